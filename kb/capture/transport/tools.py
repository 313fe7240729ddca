"""Runs a tool of the cluster, such as squeue, and returns what it prints."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from kb.errors import CaptureFailed, UsageError

LIMIT_S = 15.0


def output_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """The output of a tool. Raises `UsageError` if it is missing, `CaptureFailed` if it fails or does not return."""
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, env=environment, check=False
        )
    except FileNotFoundError:
        raise UsageError(f"there is no {command[0]} here", "run kb where the cluster is administered") from None
    except subprocess.TimeoutExpired:
        raise CaptureFailed(f"{command[0]} did not return in {LIMIT_S:.0f} s", f"try `{' '.join(command)}`") from None
    except OSError as error:
        raise CaptureFailed(f"{command[0]} cannot be started: {error.strerror}") from error
    if ended.returncode:
        reason = ended.stderr.decode("utf-8", "replace").strip().splitlines()
        raise CaptureFailed(f"{command[0]} failed: {reason[-1] if reason else ended.returncode}", "")
    return ended.stdout.decode("utf-8", "replace")

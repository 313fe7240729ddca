"""`kb` with a file system mounted over a folder. `run_mounted` forks it, so the mount is not visible outside."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

from kb.content import roots
from tests.support.console import GENEROUS_S, Ended
from tests.support.warm_start import PIPE, VERIFY, start_warm

CLONE_NEWNS = 0x20000


def may_mount() -> bool:
    """Whether this process may mount in a new mount namespace; root in a container often may not."""
    try:
        tried = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/tmp"], capture_output=True)
    except OSError:
        return False
    return tried.returncode == 0


def run_mounted(options: str, folder: Path, *commands: list[str], **env: str) -> Ended:
    """Run `kb` with each of these arguments on a tmpfs with these mount options. The exit code is that of the last."""
    built_in = roots.builtin_root()  # the one of this test, which may have few entries
    order = [options, str(folder), str(built_in.entries), str(built_in.probes), commands]
    process = start_warm(
        json.dumps(order),
        imports=(*VERIFY, "kb.cli.commands.search", __name__),
        main=f"{__name__}:main",
        env={**os.environ, **env},
        stdout=PIPE,
        stderr=PIPE,
    )
    out, err = process.communicate(GENEROUS_S)
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


def main() -> None:
    options, folder, entries, probes, commands = json.loads(sys.argv[1])
    assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
    for mount in (("--make-rprivate", "/"), ("-t", "tmpfs", "-o", options, "none", folder)):
        subprocess.run(["mount", *mount], check=True)
    built_in = replace(roots.builtin_root(), entries=Path(entries), probes=Path(probes))
    roots.builtin_root = lambda: built_in
    resolve_name("kb.cli.terminal.output:claim_streams")()  # by name: no module may import a shell
    codes = [resolve_name("kb.cli.main:run")(command) for command in commands]
    sys.stderr.write("".join(f"left: {path}\n" for path in sorted(Path(folder).glob("*"))))
    sys.exit(codes[-1])

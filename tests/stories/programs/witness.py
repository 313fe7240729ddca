"""What a rank knows of itself, for truth.json: its step, phase, end and place. Prints nothing into the log.

$TRUTH/<rank>.json holds what the program noted; $TRUTH/<rank>.stack the frames at SIGTERM or at an abort, which Python
code could not note any more. Both lie in a folder per attempt where torchrun restarts workers.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAULT = os.environ.get("STORY_FAULT", "none")
STYLE = os.environ.get("STORY_STYLE", "plain")
CULPRIT = int(os.environ.get("STORY_CULPRIT", "-1"))
TIMEOUT = float(os.environ.get("STORY_TIMEOUT", "6"))
RANK = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
state: dict = {}
stacks = None


def begin(rank: int = RANK) -> None:
    """Start the file of this rank; called again where the rank is known later (spawn, Ray)."""
    global stacks
    state.clear()
    state.update(rank=rank, end="running", place="", error="", step=None, phase="start", injected=False)
    folder().mkdir(parents=True, exist_ok=True)
    stacks = open(folder() / f"{rank}.stack", "w")
    if not os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable(stacks)
    faulthandler.register(signal.SIGTERM, stacks, all_threads=True, chain=True)
    note()


def folder() -> Path:
    return Path(os.environ["STORY_TRUTH"]) / str(ATTEMPT)


def note(**facts) -> None:
    state.update(facts, time=time.time())
    fresh = folder() / f"{state['rank']}.new"
    fresh.write_text(json.dumps(state))
    fresh.replace(folder() / f"{state['rank']}.json")


def fault(name: str, rank: int | None = None) -> bool:
    """Is this fault on here? `rank`: only on that one, else only on the culprit of the job where it has one."""
    return FAULT == name and state["rank"] == (CULPRIT if rank is None else rank)


def everywhere(name: str) -> bool:
    return FAULT == name


def inject(**facts) -> None:
    """The fault happens now."""
    frame = sys._getframe(1)
    note(injected=True, place=f"{frame.f_code.co_name}:{frame.f_lineno}", **facts)


@contextlib.contextmanager
def watching():
    """Around main(): the exception that ends this rank, and the innermost frame of the program in it."""
    if "rank" not in state:
        begin()
    try:
        yield
    except SystemExit as error:
        if state["end"] == "running":
            note(end="exit", error=f"SystemExit: {error.code}", place=innermost(error))
        raise
    except BaseException as error:
        failed(error)
        raise
    note(end="done", place="")


def failed(error: BaseException) -> None:
    """A rank that hung stays one: what a handler of SIGTERM raised in it came from outside."""
    if state["end"] == "hung":
        note(error=f"{type(error).__name__}: {str(error)[:200]}")
        return
    note(end="exception", error=f"{type(error).__name__}: {str(error)[:200]}", place=innermost(error))


def innermost(error: BaseException) -> str:
    """The program's own innermost frame."""
    own = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(HERE)]
    own = [f for f in own if not f.filename.endswith("witness.py")]
    return f"{own[-1].name}:{own[-1].lineno}" if own else ""

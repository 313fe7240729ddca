"""Rank 1 fails and is slow to exit, rank 0 waits for it and is aborted: which of them does torchrun's report name?"""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path
from typing import Any, Mapping

from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown

CAUSE = "CUDA out of memory (made up by the probe)"
RECORD = "from torch.distributed.elastic.multiprocessing.errors import record"
NO_RECORD = "record = lambda main: main"

# Rank 1 raises, and its process stays: until somebody ends it, as one does that hangs in the teardown of NCCL, or
# until rank 0 is aborted, so that torchrun finds both dead in one look.
# Rank 0 misses it in a collective and is aborted some time later, as the watchdog of NCCL does: by more than
# a second, because the report orders failures by whole seconds.
TRAIN = """
import atexit, os, pathlib, resource, sys, time
{record}

def linger():
    left.touch()
    {teardown}

@record
def main():
    if os.environ["RANK"] == "1":
        atexit.register(linger)
        raise RuntimeError({cause!r})
    while not left.exists():
        time.sleep(0.01)
    time.sleep(1.2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    aborted.touch()
    os.abort()

def until_aborted():
    while not aborted.exists():
        time.sleep(0.001)
    time.sleep(0.01)
    os._exit(1)

left, aborted = map(pathlib.Path, sys.argv[1:])
main()
"""
HANGS, ENDS = "time.sleep(60)", "until_aborted()"
OPTIONS = (
    "--nnodes=1 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --local-addr=localhost "
    "--max-restarts=0 --redirects=3 --tee=0"
)


def launch(ctx: Context, *, recorded: bool, teardown: str = HANGS, look_every_s: float = 0.1) -> None:
    import os

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun takes its options from there as well
    script = Path(ctx.path("train.py"))
    script.write_text(TRAIN.format(record=RECORD if recorded else NO_RECORD, cause=CAUSE, teardown=teardown))
    ctx.reached()
    options = [*OPTIONS.split(), f"--monitor-interval={look_every_s}", "--log-dir", ctx.path("logs")]
    try:
        run.run(run.parse_args([*options, str(script), ctx.path("left"), ctx.path("aborted")]))
    except ChildFailedError as report:
        ctx.note(exit_codes={rank: failure.exitcode for rank, failure in sorted(report.failures.items())})
        (stderr,) = Path(ctx.path("logs")).glob("*/attempt_0/1/stderr.log")
        assert CAUSE in stderr.read_text()  # whatever the report says, the redirected log of rank 1 has it
        assert report.failures[0].error_file == "<N/A>"  # and @record leaves no error file for a signal
        if CAUSE not in str(report).partition("Root Cause (first observed failure):")[2]:
            raise
    else:
        raise AssertionError("torchrun reports success")


def check(params: Mapping[str, Any]) -> Finding:
    """Does the training script pass its exceptions to torchrun?"""
    script = params["script"]
    if script is None:
        return unknown("no training script was named", advice="--set script=train.py")
    try:
        tree = ast.parse(script.read_text(errors="replace"), str(script))
    except OSError as error:
        return unknown("%s cannot be read: %s" % (script, error.strerror))
    except (SyntaxError, ValueError) as error:
        return unknown("%s does not parse as Python: %s" % (script, error))
    uses = [line for node in ast.walk(tree) for line in _lines_of_record(node)]
    if uses:
        return clear("%s uses torch's `record` in line %d" % (script, min(uses)))
    return exposed(
        "%s uses `record` nowhere: of an exception torchrun reports error_file: <N/A>" % script,
        advice="put @record above main(), after: %s" % RECORD,
    )


def _lines_of_record(node: ast.AST) -> list[int]:
    """Where this node is decorated with `@record` or `@errors.record`, or calls `record(main)`."""
    if isinstance(node, ast.FunctionDef):
        return [decorator.lineno for decorator in node.decorator_list if _is_record(decorator)]
    return [node.lineno] if isinstance(node, ast.Call) and _is_record(node.func) else []


def _is_record(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "record" and ast.unparse(node.value).endswith("errors")
    return isinstance(node, ast.Name) and node.id == "record"


BLAMES_RANK_0 = r"Root Cause \(first observed failure\):\s+\[0\]:(.*\n){4}.*: -6 .*\n.*error_file: <N/A>"
RECORDED = "@record writes the exception of rank 1 and its time to the error file that torchrun reads"

probe = Probe(
    check=check,
    params={"script": Param("path", "the training script that torchrun starts")},
    experiments=(
        Experiment(
            name="torchrun",
            control=Arm(
                partial(launch, recorded=False),
                expect=raised(BLAMES_RANK_0),
                because="rank 1's exception reaches no error file, so the abort of rank 0 passes for the first failure",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(launch, recorded=True),
                expect=completed(),
                because=RECORDED,
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.10"}),  # before, the report lacks the ranks that torchrun ended
            deadline_s=40,
            expected_s=(1.8, 3.4),
        ),
        Experiment(
            name="one-look",
            control=Arm(
                partial(launch, recorded=False, teardown=ENDS, look_every_s=2.0),
                expect=raised(BLAMES_RANK_0),
                because="torchrun finds both ranks dead in one look, and of equal times the lower rank counts",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(launch, recorded=True, teardown=ENDS, look_every_s=2.0),
                expect=completed(),
                because=RECORDED,
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1"}),
            deadline_s=40,
            expected_s=(2.5, 4.5),
        ),
    ),
)

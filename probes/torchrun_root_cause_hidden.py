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

# Rank 1 raises, and its process stays until somebody ends it, as one does that hangs in the teardown of NCCL.
# Rank 0 misses it in a collective and is aborted some time later, as the watchdog of NCCL does: by more than
# a second, because the report orders failures by whole seconds.
TRAIN = """
import atexit, os, pathlib, sys, time
{record}

def linger():
    left.touch()
    time.sleep(60)

@record
def main():
    if os.environ["RANK"] == "1":
        atexit.register(linger)
        raise RuntimeError({cause!r})
    while not left.exists():
        time.sleep(0.01)
    time.sleep(1.2)
    os.abort()

left = pathlib.Path(sys.argv[1])
main()
"""
OPTIONS = (
    "--nnodes=1 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --local-addr=localhost "
    "--max-restarts=0 --monitor-interval=0.1 --redirects=3 --tee=0"
)


def launch(ctx: Context, *, recorded: bool) -> None:
    import os

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun takes its options from there as well
    script = Path(ctx.path("train.py"))
    script.write_text(TRAIN.format(record=RECORD if recorded else NO_RECORD, cause=CAUSE))
    ctx.reached()
    try:
        run.run(run.parse_args([*OPTIONS.split(), "--log-dir", ctx.path("logs"), str(script), ctx.path("left")]))
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


probe = Probe(
    check=check,
    params={"script": Param("path", "the training script that torchrun starts")},
    experiments=(
        Experiment(
            name="torchrun",
            control=Arm(
                partial(launch, recorded=False),
                expect=raised(
                    r"Root Cause \(first observed failure\):\s+\[0\]:(.*\n){4}.*: -6 .*\n.*error_file: <N/A>"
                ),
                because="rank 1's exception reaches no error file, so the abort of rank 0 passes for the first failure",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(launch, recorded=True),
                expect=completed(),
                because="@record writes the exception of rank 1 and its time to the error file that torchrun reads",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1"}),
            deadline_s=40,
            expected_s=(1.8, 3.4),
        ),
    ),
)

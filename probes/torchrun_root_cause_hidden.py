"""Rank 1 fails and is slow to exit, and rank 0 waits for it and aborts: which rank does torchrun's report name?"""

from __future__ import annotations

import ast
import atexit
import inspect
import os
import resource
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, List, Mapping, Set, Tuple

from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

CAUSE = "CUDA out of memory (made up by the probe)"
OPTIONS = (
    "--nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --local-addr=localhost --max-restarts=0 "
    "--monitor-interval=0.1"
)
ERRORS = "torch.distributed.elastic.multiprocessing.errors"
KEEP_STREAMS = ("--redirects=3", "--tee=0:3")


# --- what the workers run: their script is the source of these functions -------------------------------------------


def train() -> None:
    """Rank 1 raises, but its process stays: until something ends it, like a process that hangs in the teardown of NCCL,
    or until rank 0 aborts, so that torchrun finds both dead at the same check.
    Rank 0 waits for rank 1, as in a collective, and aborts later, as the watchdog of NCCL does: more than a second
    later, because the report orders failures by whole seconds.
    """
    teardown, cause = sys.argv[1:]
    raised, aborted = Path("raised"), Path("aborted")

    def linger() -> None:
        raised.touch()
        if teardown == "hangs":
            time.sleep(60)
        while not aborted.exists():
            time.sleep(0.001)
        time.sleep(0.01)
        os._exit(1)

    if os.environ["RANK"] == "1":
        atexit.register(linger)
        raise RuntimeError(cause)
    while not raised.exists():
        time.sleep(0.01)
    time.sleep(1.2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    aborted.touch()
    os.abort()


def fail() -> None:
    """The last rank raises or aborts, as its argument says; with two ranks, rank 0 waits."""
    way, cause = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.environ["RANK"] == "0" and os.environ["WORLD_SIZE"] == "2":
        time.sleep(60)
    if way == "aborts":
        os.abort()
    raise RuntimeError(cause)


def run_recorded() -> None:
    """Runs with torch's `record`. It needs nothing else of torch, so its parent packages stay empty to save time."""
    root = find_spec("torch").submodule_search_locations[0]  # type: ignore[union-attr,index]
    for name in ("torch", "torch.distributed", "torch.distributed.elastic.multiprocessing"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [root + name[len("torch") :].replace(".", "/")]
    from torch.distributed.elastic.multiprocessing.errors import record

    @record  # type: ignore[untyped-decorator]
    def main() -> None:
        train()

    if __name__ == "__main__":
        main()


IMPORTS = """import atexit, os, resource, sys, time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType"""


def write_script(ctx: Context, *, recorded: bool, way: Callable[[], None] = train) -> str:
    parts = [IMPORTS, inspect.getsource(way), inspect.getsource(run_recorded), "train = %s" % way.__name__]
    parts.append("run_recorded()" if recorded else "train()")
    script = Path(ctx.path("train.py"))
    script.write_text("\n\n".join(parts) + "\n")
    return str(script)


# --- the jobs: torchrun in this process ----------------------------------------------------------------------------


def launch(ctx: Context, *, recorded: bool, teardown: str = "hangs", check_every_s: float = 0.1) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    script = write_script(ctx, recorded=recorded)
    ctx.reached()
    options = [*KEEP_STREAMS, f"--monitor-interval={check_every_s}", "--nproc-per-node=2"]
    try:
        start(ctx, options, script, teardown)
    except ChildFailedError as report:
        ctx.note(exit_codes={rank: failure.exitcode for rank, failure in sorted(report.failures.items())})
        assert CAUSE in stderr_of(ctx, 1)  # the redirected log of rank 1 always has the cause
        assert report.failures[0].error_file == "<N/A>"  # @record writes no error file for a signal
        if CAUSE not in str(report).partition("Root Cause (first observed failure):")[2]:
            raise
    else:
        raise AssertionError("torchrun reported success")


def keep_stderr(ctx: Context, *, redirected: bool) -> None:
    """The exception of rank 1 goes to a stream that nobody stores, or to the file of the rank."""
    script = write_script(ctx, recorded=False, way=fail)
    ctx.reached()
    report = report_of_failure(ctx, [*(KEEP_STREAMS if redirected else ()), "--nproc-per-node=2"], script, "raises")
    assert CAUSE not in report, report
    if CAUSE not in stderr_of(ctx, 1):
        files = sorted(path.name for path in Path(ctx.path("logs")).rglob("*") if path.is_file())
        raise Symptom(f"the report has error_file: <N/A>, but the log folder has no stderr of rank 1: {files}")


def copy_error(ctx: Context, *, named: bool) -> None:
    """Each torchrun copies the error file of its first failure to TORCHELASTIC_ERROR_FILE, if that is set."""
    shared = Path(ctx.path("shared"))
    shared.mkdir()
    copied = shared / "0.json"
    script = write_script(ctx, recorded=True, way=fail)
    ctx.reached()
    if named:
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(copied)
    report_of_failure(ctx, [*KEEP_STREAMS, "--nproc-per-node=1"], script, "raises", as_program=True)
    if not copied.exists():
        written = sorted(path.name for path in shared.iterdir())
        raise Symptom(f"error files outside torchrun's log folder: {written}")
    assert CAUSE in copied.read_text() and "timestamp" in copied.read_text()


def dump_stack(ctx: Context, *, faulthandler: bool) -> None:
    """A rank aborts outside the control of Python: does its stderr contain its Python stack?"""
    if faulthandler:
        os.environ["PYTHONFAULTHANDLER"] = "1"
    script = write_script(ctx, recorded=False, way=fail)
    ctx.reached()
    report = report_of_failure(ctx, [*KEEP_STREAMS, "--nproc-per-node=1"], script, "aborts")
    assert "Signal 6 (SIGABRT)" in report, report
    if "in fail" not in stderr_of(ctx, 0):
        raise Symptom(f"Signal 6 (SIGABRT), but the stderr of the rank has {len(stderr_of(ctx, 0))} characters")


def report_of_failure(ctx: Context, options: List[str], script: str, way: str, *, as_program: bool = False) -> str:
    """Starts a job that must fail, and returns the report of torchrun."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        start(ctx, options, script, way, as_program=as_program)
    except ChildFailedError as report:
        return str(report)
    raise AssertionError("torchrun reported success")


def start(ctx: Context, options: List[str], script: str, way: str, *, as_program: bool = False) -> None:
    from torch.distributed import run

    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun also reads its options from these variables
    arguments = [*OPTIONS.split(), *options, "--log-dir", ctx.path("logs"), script, way, CAUSE]
    if as_program:
        run.main(arguments)  # with torchrun's own @record
    else:
        run.run(run.parse_args(arguments))


def stderr_of(ctx: Context, rank: int) -> str:
    return "".join(path.read_text() for path in Path(ctx.path("logs")).glob(f"*/attempt_0/{rank}/stderr.log"))


def check(params: Mapping[str, Any]) -> Finding:
    """Does the training script pass its exceptions to torchrun?"""
    script = params["script"]
    if script is None:
        return unknown("no training script was named", advice="name your training script: --set script=train.py")
    try:
        tree = ast.parse(script.read_text(errors="replace"), str(script))
    except OSError as error:
        return unknown("%s cannot be read: %s" % (script, error.strerror))
    except (SyntaxError, ValueError) as error:
        return unknown("%s does not parse as Python: %s" % (script, error))
    uses = [line for node in ast.walk(tree) for line in _lines_of_record(node)]
    calls = _calls_of_the_script(tree)
    if not any(map(_imported, ast.walk(tree))):
        return unknown("%s imports no module: is it the training script?" % script)
    if not uses:
        last = _called_from_elsewhere(tree, calls)
        if last:
            return unknown(
                "%s calls %s, which it imports; kb cannot tell whether that function uses `record`" % (script, last)
            )
        return exposed(
            "%s does not use `record`, so torchrun reports error_file: <N/A> for an exception" % script,
            advice="put @record above main(), and import it: from %s import record" % ERRORS,
        )
    where = "%s uses `record` in line %d" % (script, min(uses))
    if ERRORS not in {name for node in ast.walk(tree) for name in _imported(node)}:
        return unknown(
            where,
            "kb cannot tell whether that is the `record` of torch, because the script does not import %s" % ERRORS,
        )
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    recorded = {node.name for node in functions if _lines_of_record(node)}
    plain = {node.name for node in functions if not node.decorator_list or _is_record(node.decorator_list[-1])}
    called = [call.func for call in calls if _is_recorded(call.func, recorded)]
    if not called:
        return unknown(where, "but the script does not call the recorded function itself; another module may")
    if not all(_recorded_name(function) in plain for function in called):
        return unknown(
            where, "but a decorator or a module that it calls may end in sys.exit, which `record` does not report"
        )
    return clear(where, "`record` writes exceptions to the error file, but not a signal or sys.exit")


def _calls_of_the_script(tree: ast.Module) -> List[ast.Call]:
    """Calls that are statements outside functions and classes, including those in `if __name__ == "__main__"`."""
    blocks, calls = [tree.body], []
    while blocks:
        for statement in blocks.pop():
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            blocks += [getattr(statement, name) for name in ("body", "orelse", "finalbody") if hasattr(statement, name)]
            if isinstance(statement, (ast.Expr, ast.Assign)) and isinstance(statement.value, ast.Call):
                inner = [call for call in statement.value.args if isinstance(call, ast.Call)]  # sys.exit(main())
                calls += [statement.value, *inner]
    return calls


def _is_recorded(function: ast.expr, recorded: Set[str]) -> bool:
    if isinstance(function, ast.Call):  # record(main)()
        return _is_record(function.func)
    return isinstance(function, ast.Name) and function.id in recorded


def _recorded_name(function: ast.expr) -> str:
    """The name `main` for both main() and record(main)()."""
    inner = function.args[0] if isinstance(function, ast.Call) and function.args else function
    return inner.id if isinstance(inner, ast.Name) else ""


def _called_from_elsewhere(tree: ast.Module, calls: List[ast.Call]) -> str:
    """The name of the last called function, if the script imports it from a module other than torch and sys."""
    imported = {
        (name.asname or name.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in node.names
        if (getattr(node, "module", None) or name.name).partition(".")[0] not in ("torch", "sys")
    }
    last = max(calls, key=lambda call: (call.lineno, call.col_offset), default=None)
    name = ast.unparse(last.func) if last else ""
    return name if name.partition(".")[0] in imported else ""


def _lines_of_record(node: ast.AST) -> List[int]:
    """Lines in which this node is decorated with `@record` or `@errors.record`, or calls `record(main)`."""
    if isinstance(node, ast.FunctionDef):
        return [decorator.lineno for decorator in node.decorator_list if _is_record(decorator)]
    return [node.lineno] if isinstance(node, ast.Call) and _is_record(node.func) else []


def _imported(node: ast.AST) -> List[str]:
    """Modules that this node imports; for `from a.b import c`, both a.b and a.b.c."""
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *("%s.%s" % (node.module, name.name) for name in node.names)]
    return [name.name for name in node.names] if isinstance(node, ast.Import) else []


def _is_record(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "record" and ast.unparse(node.value).endswith("errors")
    return isinstance(node, ast.Name) and node.id == "record"


BLAMES_RANK_0 = r"Root Cause \(first observed failure\):\s+\[0\]:(.*\n){4}.*: -6 .*\n.*error_file: <N/A>"
RECORDED = "@record writes the exception of rank 1 and its time to the error file that torchrun reads"


def pair(
    name: str,
    job: Callable[..., None],
    fix: str,
    expect: Expect,
    because: str,
    fixed: str,
    torch: str = ">=2.1",
    expected_s: Tuple[float, float] = (1.0, 1.0),
) -> Experiment:
    """`fix` is the argument of the job that differs between the arms."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{fix: False}), expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{fix: True}), completed(), because=fixed, fidelity="cpu"),
        world_size=1,
        needs=Needs(packages={"torch": torch}),
        deadline_s=120,
        expected_s=expected_s,
    )


probe = Probe(
    check=check,
    params={"script": Param("path", "the training script that torchrun starts")},
    experiments=(
        pair(
            "torchrun",
            launch,
            "recorded",
            raised(BLAMES_RANK_0),
            "no error file has the exception of rank 1, so torchrun reports the abort of rank 0 as the first failure",
            RECORDED,
            torch=">=2.10",  # before 2.10, the report omits ranks that torchrun ended
            expected_s=(2.0, 2.0),
        ),
        pair(
            "one-look",
            partial(launch, teardown="ends", check_every_s=2.0),
            "recorded",
            raised(BLAMES_RANK_0),
            "torchrun finds both ranks dead at the same check, and reports the lower rank as the first failure",
            RECORDED,
            expected_s=(2.5, 2.5),
        ),
    ),
    variants=(
        pair(
            "redirects",
            keep_stderr,
            "redirected",
            symptom(r"error_file: <N/A>, but the log folder has no stderr of rank 1: \["),
            "--log-dir alone does not store the streams of the ranks",
            "--redirects 3 --tee 0:3 stores the stderr of every rank in a file",
        ),
        pair(
            "error-file",
            copy_error,
            "named",
            symptom(r"error files outside torchrun's log folder: \[\]"),
            "TORCHELASTIC_ERROR_FILE is not set, so torchrun leaves the error file in its log folder",
            "TORCHELASTIC_ERROR_FILE names a file, and torchrun copies the first failure to it",
        ),
        pair(
            "faulthandler",
            dump_stack,
            "faulthandler",
            symptom(r"Signal 6 \(SIGABRT\), but the stderr of the rank has 0 characters"),
            "the rank aborts without printing anything",
            "PYTHONFAULTHANDLER=1 makes the rank print its Python stack",
        ),
    ),
)

"""`kb capture`: evidence of a hanging job on this node, taken without harming it, and its diagnosis."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kb.content.roots import configured_roots
from kb.errors import CaptureFailed, UsageError

from ..terminal.fields import field, labelled
from ..terminal.output import JsonFlag, RootOption, emit, notice, shown, style

if TYPE_CHECKING:
    from kb.diagnose.diagnosis import Diagnosis

NO_JOB = "no process of a training job runs on this node"


def capture(
    pid: Annotated[
        int | None, typer.Option(min=1, help="A process of the job: a rank, its launcher, or any process.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the bundle. [default: the temporary folder]")] = None,
    interval: Annotated[float, typer.Option(min=0.5, max=60, help="Seconds between the two samples.")] = 3.0,
    seconds: Annotated[float, typer.Option(min=3, max=600, help="Deadline of the collection.")] = 30.0,
    native: Annotated[
        bool, typer.Option("--native", help="C++ stacks too; pauses a process of each group for about a second.")
    ] = False,
    trigger: Annotated[
        bool, typer.Option("--trigger", help="Ask torch for flight-recorder dumps, where it opened a way to ask.")
    ] = False,
    no_diagnose: Annotated[bool, typer.Option("--no-diagnose", help="Only write the bundle.")] = False,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Take stacks, process states and logs of a hanging job before it is killed, and diagnose them.

    It pauses, signals and ends nothing, and leaves a redacted bundle that `kb diagnose` reads on any machine.
    Exit code 0 with a bundle, 1 when no job runs here.
    """
    from kb.capture import archive, gather, plan
    from kb.capture import session as sessions

    if not Path("/proc/self/stat").exists():
        raise UsageError("kb capture reads /proc, which this system does not have", "run it on a node with Linux")
    folder = (out or Path(tempfile.gettempdir())).expanduser()
    archive.check_folder(folder)
    listed = gather.list_jobs(pid)
    job = _chosen(listed, pid, is_asked=not as_json)
    if job is None:
        return _nothing(listed["problems"], as_json)
    if not as_json:
        notice(f"{plan.describe(job)}: collecting for at most {seconds:.0f} s, the job goes on")
    taken = sessions.capture(job, sessions.Settings(interval, seconds, native, trigger))
    problems = (*listed["problems"], *taken.problems)
    try:
        bundle: Path | None = archive.write(folder, taken.name, taken.data)
        failure = None
    except CaptureFailed as error:  # what was found is shown all the same: the job may be gone in a minute
        bundle, failure = None, error
    diagnosis = None if no_diagnose else _diagnose(taken.data, str(bundle or taken.name), roots)
    if not as_json:
        _print(taken, bundle, problems, diagnosis, roots)
    if failure:
        raise failure
    if as_json:
        document = None if diagnosis is None else diagnosis.to_json()
        emit(
            "capture", bundle=str(bundle), bytes=len(taken.data), seconds=round(taken.seconds, 2), ranks=taken.ranks,
            problems=problems, diagnosis=document,
        )  # fmt: skip
    return 0


def _chosen(listed: Mapping[str, Any], pid: int | None, *, is_asked: bool) -> Mapping[str, Any] | None:
    """The job; of several, the one that a person at a terminal names."""
    from kb.capture import plan

    jobs = listed["jobs"]
    if len(jobs) < 2 or not (is_asked and sys.stdin is not None and sys.stdin.isatty()):
        return plan.choose_job(listed, pid)
    for number, job in enumerate(jobs, 1):
        notice(f"{number}  {plan.describe(job)}  (--pid {job['id']})")
    answer = int(typer.prompt("which job", type=int, err=True))
    if not 0 < answer <= len(jobs):
        raise UsageError(f"there is no job {answer}", f"name one of 1 to {len(jobs)}, or use --pid")
    chosen: Mapping[str, Any] = jobs[answer - 1]
    return chosen


def _nothing(problems: list[str], as_json: bool) -> int:
    if as_json:
        emit("capture", bundle=None, bytes=0, seconds=0.0, ranks=[], problems=[*problems, NO_JOB], diagnosis=None)
        return 1
    for problem in problems:
        notice(problem)
    notice(f"{NO_JOB}; --pid names one whose ranks kb does not recognise")
    return 1


def _diagnose(data: bytes, name: str, roots: list[Path] | None) -> Diagnosis:
    from kb.diagnose.diagnosis import diagnose
    from kb.diagnose.inputs.sources import Stream
    from kb.diagnose.scan.scan import scan
    from kb.diagnose.scan.signature_matcher import Matcher
    from kb.search.index_cache import open_index

    with open_index(configured_roots(tuple(roots or ())), notice) as index:
        return diagnose(index, scan([Stream(name, iter([data]))], Matcher(index.signatures)))


def _print(
    taken: Any, bundle: Path | None, problems: tuple[str, ...], diagnosis: Diagnosis | None, roots: list[Path] | None
) -> None:
    for problem in problems:
        notice(problem)
    if diagnosis is not None:
        from kb.diagnose.evidence import DERIVED_PREFIX

        from ..terminal.diagnosis import MOST_LINES, Printer

        Printer(diagnosis, roots=roots).print()
        for line in diagnosis.observations[MOST_LINES:]:
            print(labelled("inferred", line.text.removeprefix(DERIVED_PREFIX)))
    if bundle:
        print(
            field(
                "bundle",
                f"{style(str(shown(bundle)), bold=True)}  {len(taken.data):,} bytes, redacted, {taken.seconds:.1f} s",
            )
        )
        print(field("then", f"kb diagnose {shown(bundle)}"))

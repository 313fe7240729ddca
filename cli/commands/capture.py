"""`kb capture`: evidence of a hanging job on its nodes, taken without harming it, and its diagnosis."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kb.content.roots import configured_roots
from kb.errors import CaptureFailed, UsageError

from ..terminal.fields import field, labelled
from ..terminal.output import JsonFlag, RootOption, emit, notice, shown, style

if TYPE_CHECKING:
    from kb.capture.session import Capture, Settings
    from kb.diagnose.diagnosis import Diagnosis

NO_JOB = "no training job is running on this node"
NO_JOB_THERE = "no training job is running on these nodes"
MOST_NODES = 8  # nodes listed by name


def capture(
    pid: Annotated[
        int | None, typer.Option(min=1, help="A process of the job: a rank, its launcher, or any process.")
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE", help="All nodes of a job: slurm:JOBID, ssh:HOST1,HOST2, ssh:@FILE or kubectl:SELECTOR."
        ),
    ] = None,
    job: Annotated[str | None, typer.Option(help="With --nodes, the job with this name, if there are several.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the bundle. [default: the temporary folder]")] = None,
    interval: Annotated[float, typer.Option(min=0.5, max=60, help="Seconds between the two samples.")] = 3.0,
    seconds: Annotated[float, typer.Option(min=3, max=600, help="Time limit for the collection on each node.")] = 30.0,
    native: Annotated[
        bool, typer.Option("--native", help="C++ stacks too; pauses a process of each group for about a second.")
    ] = False,
    trigger: Annotated[
        bool, typer.Option("--trigger", help="Ask torch for flight-recorder dumps, if the job enabled them.")
    ] = False,
    no_diagnose: Annotated[bool, typer.Option("--no-diagnose", help="Only write the bundle.")] = False,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Take stacks, process states and logs of a hanging job before it is killed, and diagnose them.

    It pauses, signals and ends nothing, and leaves a redacted bundle that `kb diagnose` reads on any machine.
    With --nodes it looks at all nodes at once, through Slurm, ssh or kubectl; nothing is installed there.
    Exit code 0 with a bundle, 1 when no job runs here.
    """
    from kb.capture import archive
    from kb.capture.session import Settings

    if nodes is None and not Path("/proc/self/stat").exists():
        raise UsageError("kb capture reads /proc, which this system does not have", "run it on a node with Linux")
    if nodes is not None and pid is not None:
        raise UsageError("--pid names a process of this node", "use --job with --nodes")
    if job is not None and nodes is None:
        raise UsageError("--job selects a job across nodes", "use --pid without --nodes")
    folder = (out or Path(tempfile.gettempdir())).expanduser()
    archive.check_folder(folder)
    settings = Settings(interval, seconds, native, trigger)
    taken, problems = (
        _over_nodes(nodes, job, settings, is_asked=not as_json)
        if nodes is not None
        else _here(pid, settings, is_asked=not as_json)
    )
    if taken is None:
        return _nothing(problems, NO_JOB if nodes is None else NO_JOB_THERE, as_json)
    problems = [*problems, *taken.problems]
    try:
        bundle: Path | None = archive.write(folder, taken.name, taken.data)
        failure = None
    except CaptureFailed as error:  # the results are still shown: the job may be gone in a minute
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
            nodes=[node.to_json() for node in taken.nodes], problems=problems, diagnosis=document,
        )  # fmt: skip
    return 0


def _here(pid: int | None, settings: Settings, *, is_asked: bool) -> tuple[Capture | None, list[str]]:
    """The capture of a job on this node, or None without a job, and the problems met while listing jobs."""
    from kb.capture import gather, plan, session

    listed = gather.list_jobs(pid)
    jobs = listed["jobs"]
    number = _answer([f"{plan.describe(job)}  (--pid {job['id']})" for job in jobs], is_asked)
    job = plan.choose_job(listed, pid) if number is None else jobs[number]
    if job is None:
        return None, listed["problems"]
    if is_asked:
        notice(f"{plan.describe(job)}: collecting for at most {settings.seconds:.0f} s, the job goes on")
    return session.capture(job, settings), listed["problems"]


def _over_nodes(
    where: str, name: str | None, settings: Settings, *, is_asked: bool
) -> tuple[Capture | None, list[str]]:
    """The capture of a job on all its nodes. Raises `CaptureFailed` if no node answers."""
    from kb.capture import gather, jobs, session
    from kb.capture.transport import nodes

    asked = nodes.resolve(where)
    problems = list(asked.problems)
    listings = gather.list_nodes(asked.connections, settings.seconds)
    unreached = [listing for listing in listings if listing.reason]
    if len(unreached) == len(listings):
        reasons = dict.fromkeys(f"{listing.connection.name}: {listing.reason}" for listing in listings)
        raise CaptureFailed(f"none of {len(listings)} nodes answered", "; ".join(list(reasons)[:MOST_NODES]))
    found = jobs.group_over_nodes(listings, asked.slurm_job)
    number = None if name else _answer([f"{job}  (--job {job.name})" for job in found], is_asked)
    job = jobs.choose(found, name) if number is None else found[number]
    if job is None:
        for node in listings:
            problems += [f"{node.connection.name}: {text}" for text in (*node.problems, node.reason) if text]
        return None, problems
    if is_asked:
        notice(f"{job}: collecting for at most {settings.seconds:.0f} s, the job goes on")
    return session.capture_nodes(job, listings, settings), problems


def _answer(jobs: Sequence[str], is_asked: bool) -> int | None:
    """Ask a person at a terminal which job to capture. Returns its index, or None when there is nothing to ask."""
    if len(jobs) < 2 or not (is_asked and sys.stdin is not None and sys.stdin.isatty()):
        return None
    for number, text in enumerate(jobs, 1):
        notice(f"{number}  {text}")
    answer = int(typer.prompt("which job", type=int, err=True))
    if not 0 < answer <= len(jobs):
        raise UsageError(f"there is no job {answer}", f"name one of 1 to {len(jobs)}, or use the option behind it")
    return answer - 1


def _nothing(problems: list[str], reason: str, as_json: bool) -> int:
    if as_json:
        problems = [*problems, reason]
        emit("capture", bundle=None, bytes=0, seconds=0.0, ranks=[], nodes=[], problems=problems, diagnosis=None)
        return 1
    for problem in problems:
        notice(problem)
    notice(f"{reason}; --pid names one whose ranks kb does not recognise" if reason == NO_JOB else reason)
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
    taken: Capture, bundle: Path | None, problems: Sequence[str], diagnosis: Diagnosis | None, roots: list[Path] | None
) -> None:
    for problem in problems:
        notice(problem)
    if diagnosis is not None:
        from kb.diagnose.evidence import DERIVED_PREFIX

        from ..terminal.diagnosis import MOST_LINES, Printer

        Printer(diagnosis, roots=roots).print()
        for line in diagnosis.observations[MOST_LINES:]:
            print(labelled("inferred", line.text.removeprefix(DERIVED_PREFIX)))
    if len(taken.nodes) > 1:
        print(field("nodes", _nodes(taken)))
    if bundle:
        print(
            field(
                "bundle",
                f"{style(str(shown(bundle)), bold=True)}  {len(taken.data):,} bytes, redacted, {taken.seconds:.1f} s",
            )
        )
        print(field("then", f"kb diagnose {shown(bundle)}"))


def _nodes(taken: Capture) -> str:
    """The nodes of a capture, for instance `node-0 gpu-17 (ranks 0-7); node-1 gpu-18 (no answer)`."""
    from kb.harness.collective import name_ranks

    texts = []
    for node in taken.nodes[:MOST_NODES]:
        ranks = [rank for rank in node.ranks if rank is not None]
        texts.append(f"{node.node} {node.name} ({name_ranks(ranks) if ranks else 'no ranks'})")
    more = len(taken.nodes) - len(texts)
    return "; ".join(texts) + (f"; {more} more" if more else "")

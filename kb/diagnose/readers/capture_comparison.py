"""Compares the processes of a capture: which rank the others wait for, what it does, and what holds it up.

Equal places are grouped, and the small group is odd. Ranks count as waiting only if their main threads did not move
between two samples: in a running job, some rank is outside a collective at any moment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kb.diagnose.evidence import DERIVED_PREFIX, LONGEST_EVIDENCE, Line
from kb.diagnose.readers.capture_node import node_sentences
from kb.diagnose.readers.capture_record import Process, is_process, read_process, read_record
from kb.diagnose.readers.structured import as_text
from kb.harness.collective import name_ranks

MOST_PROCESSES = 4096
MOST_GROUPS = 4  # groups of places that one sentence names
IDLE = ("queues.py", "connection.py", "selectors.py", "popen_fork.py", "resource_tracker.py", "worker.py")
COMMANDS = ("subprocess.py",)


@dataclass(slots=True)
class CaptureRecords:
    """`add` the records of a capture, then `compare` them."""

    processes: list[Process] = field(default_factory=list)
    nodes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def add(self, data: bytes, source: str, most_values: int) -> None:
        """Add the record of a process or node. Raises `Unreadable`."""
        document = read_record(data, most_values)
        if not is_process(document):
            self.nodes.append((source, document))
        elif len(self.processes) < MOST_PROCESSES:
            self.processes.append(read_process(document, source))

    def compare(self) -> list[Line]:
        """The sentences, first those about the rank that holds up the others."""
        processes = sorted(self.processes, key=lambda process: (process.rank is None, process.rank or 0, process.pid))
        return [*_sentences(processes, self.nodes), *node_sentences(self.nodes, processes)]

    def problems(self) -> Iterator[str]:
        """Sentences about ranks that were not examined, and about what the capture could not do."""
        for process in self.processes:
            if process.reason and not process.has_ended:
                yield f"{process.source}: no stack of {_name([process])}: {process.reason}"
        for source, document in self.nodes:
            if reason := as_text(document.get("reason"), 300):
                yield f"{source}: no answer: {reason}"
            problems = document.get("problems")
            for problem in problems if isinstance(problems, list) else ():
                yield f"{source}: {str(problem)[:300]}"


def _sentences(processes: Sequence[Process], nodes: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[Line]:
    halted = [process for process in processes if process.is_halted]
    yield from map(_halt, halted)
    ended = [process for process in processes if process.has_ended]
    if ended:
        yield _line(ended, "ended while it was captured" if len(ended) == 1 else "ended while they were captured")
    present = [process for process in processes if process not in halted and process not in ended]
    waiting = [process for process in present if process.waits_for_others]
    others = [process for process in present if process not in waiting and process.place]
    if len(processes) == 1:
        yield from (_alone(process) for process in present if process.place)
        yield from _details(present, nodes)
    elif waiting:
        odd = [process for process in others if process.place not in [other.place for other in waiting]]
        odd, rest = (odd, waiting) if odd else _odd(waiting)
        if odd and rest:
            yield from (_odd_line(group, rest) for group in _groups(odd)[:MOST_GROUPS])
        elif not halted:
            yield from _same(waiting)
        yield from _details(odd, nodes)
    elif len(others) > 1 and not halted:
        odd, rest = _odd([process for process in others if process.stays])
        odd = [] if _has_run(rest) else odd
        yield from (_odd_line(group, rest) for group in _groups(odd)[:MOST_GROUPS])
        yield from () if odd else _nobody_waits(others)
        yield from _details(odd, nodes)
    yield from _details(halted, nodes)


def _halt(process: Process) -> Line:
    place = f", in {process.place}" if process.place else ""
    if process.tracer:
        return _line([process], f"is traced by process {process.tracer}, a debugger or profiler{place}")
    if process.state in "Tt":
        return _line([process], f"is stopped (state {process.state}, `kill -CONT {process.pid}` continues it){place}")
    return _line([process], f"is in uninterruptible sleep in {process.wchan or 'the kernel'}{place}")


def _alone(process: Process) -> Line:
    return _line([process], f"is in {process.place}")


def _odd(processes: Sequence[Process]) -> tuple[list[Process], list[Process]]:
    """The processes outside and inside the place where more than half of them are; two empty lists if none is."""
    groups = _groups(processes)
    largest = max(groups, key=len, default=[])
    if len(groups) < 2 or len(largest) * 2 <= len(processes):
        return [], []
    return [process for process in processes if process not in largest], largest


def _groups(processes: Iterable[Process]) -> list[list[Process]]:
    """The processes grouped by name and caller of their places, the smallest group first."""
    groups: dict[str, list[Process]] = defaultdict(list)
    for process in processes:
        groups[str(process.place)].append(process)
    return sorted(groups.values(), key=len)


def _odd_line(group: Sequence[Process], rest: Sequence[Process]) -> Line:
    place = group[0].place
    assert place is not None
    how = "not with the others" if place.is_collective or place.may_hide_collective else "in no collective"
    others = "; ".join(
        f"{_name(members)} {_are(members)} in {members[0].place}" for members in _groups(rest)[:MOST_GROUPS]
    )
    return _line(group, f"{_are(group)} in {place}, {how}, while {others}")


def _same(waiting: Sequence[Process]) -> Iterator[Line]:
    groups = _groups(waiting)
    if len(groups) == 1:
        seconds = [process.change.seconds for process in waiting if process.change]
        time = f", and none moved in {min(seconds):.1f} s" if seconds else ""
        yield _line(waiting, f"are in the same collective: {waiting[0].place}{time}", rank=False)
        return
    places = "; ".join(f"{_name(members)} {_are(members)} in {members[0].place}" for members in groups[:MOST_GROUPS])
    yield Line(
        waiting[0].source, 0, f"{DERIVED_PREFIX}ranks wait in different collectives: {places}"[:LONGEST_EVIDENCE]
    )


def _nobody_waits(others: Sequence[Process]) -> Iterator[Line]:
    """The sentence if no rank waited for another between the samples: all are in one place, or the job goes on."""
    if all(process.stays for process in others) and len(_groups(others)) == 1 and not _has_run(others):
        yield _line(others, f"are all in {others[0].place}, in no collective", rank=False)
    else:
        moved = [process for process in others if not process.stays or (process.change and process.change.has_run)]
        if moved:
            seconds = max((process.change.seconds for process in moved if process.change), default=0.0)
            yield _line(
                moved, f"ran on between two samples {seconds:.1f} s apart: the job is not at a standstill", rank=False
            )


def _has_run(processes: Iterable[Process]) -> bool:
    return any(process.change is not None and process.change.has_run for process in processes)


def _details(odd: Sequence[Process], nodes: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[Line]:
    """Sentences that help to see why the odd processes do not come: processor time, locks and child processes."""
    for process in odd[:MOST_GROUPS]:
        if process.change and not process.is_halted:
            where = " and stands in the same function" if process.change.is_busy and process.stays else ""
            yield _line([process], f"{process.change}{where}")
        for lock in _locks(nodes, process):
            holder = f"process {lock['holder']}" if lock.get("holder") else "another process"
            yield _line([process], f"waits for the lock of a file, which {holder} holds")
        for child in process.children[:MOST_GROUPS]:
            if sentence := _child(process, child):
                yield _line([process], sentence)


def _locks(nodes: Sequence[tuple[str, dict[str, Any]]], process: Process) -> list[dict[str, Any]]:
    """The locks that the process waits for. Only those of its node count, since pids are per node."""
    own = [document for _, document in nodes if document.get("node") == process.node]
    listed = [lock for document in own for lock in document.get("locks") or () if isinstance(lock, dict)]
    return [lock for lock in listed if lock.get("pid") == process.pid]


def _child(parent: Process, child: Process) -> str:
    """The sentence about a worker or command that its parent waits for; empty for an idle worker."""
    change = f", and {child.change}" if child.change else ""
    place = child.place
    if place is not None and place.frames:
        is_idle = place.frames[0].file.split("/")[-1] in IDLE or place.frames == (
            parent.place.frames if parent.place else ()
        )
        is_idle = is_idle or any(frame.name == "get" and frame.file.endswith("queues.py") for frame in place.frames)
        own = place.innermost or place.name
        return "" if is_idle else f"has the worker process {child.pid}, which is in {own}{change}"
    if parent.place and any(frame.file.endswith(COMMANDS) for frame in parent.place.frames) and child.command:
        return f"waits for process {child.pid}, `{child.command[:80]}`{change}"
    return ""


def _line(processes: Sequence[Process], text: str, *, rank: bool = True) -> Line:
    first = processes[0]
    sentence = f"{DERIVED_PREFIX}{_name(processes)} {text}"[:LONGEST_EVIDENCE]
    return Line(first.source, 0, sentence, first.rank if rank else None)


def _name(processes: Sequence[Process]) -> str:
    ranks = [process.rank for process in processes if process.rank is not None]
    if len(ranks) == len(processes):
        return name_ranks(ranks)
    pids = ", ".join(str(process.pid) for process in processes[:8])
    return f"{'process' if len(processes) == 1 else 'processes'} {pids}"


def _are(processes: Sequence[Process]) -> str:
    return "is" if len(processes) == 1 else "are"

"""How far each rank came, from what watchdogs and launchers print, and what that means for all of them together.

The messages are those of torch's ProcessGroupNCCL (1.12 to 2.13) and of torchrun's summary. `observations` says
in fixed sentences what no single line says; entries have signatures for them, as for any other line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from kb.diagnose.evidence import Exit, Line, Progress, Scan, Timeout

MOST = 10_000  # of each kind that are kept
TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\("
    r"(?:SeqNum=(?P<sequence>\d{1,12}), )?OpType=(?P<op>\w{1,60})"
    r"(?:, NumelIn=(?P<numel_in>\d{1,15}))?(?:, NumelOut=(?P<numel_out>\d{1,15}))?"
)
GROUP = re.compile(r"\[PG (?:ID )?(?P<group>\d{1,9})")
RANK = re.compile(r"\bRank (\d{1,6})\]")
PROGRESS = re.compile(
    r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,20}), "
    r"last completed (?:NCCL )?work: (?P<completed>-?\d{1,20})"
)
ENDED = re.compile(r"^\s{0,8}rank\s{0,12}: (\d{1,6}) \(local_rank: ")
CODE = re.compile(r"^\s{0,8}exitcode\s{0,12}: (-?\d{1,5}) ")
NEVER = 1 << 62  # torch prints -1 as an unsigned number in some releases


@dataclass(slots=True)
class Reading:
    """Takes telling lines one by one, in order. The first timeout of a rank in a group stands, the last progress."""

    timeouts: dict[tuple[str, int, int], Timeout] = field(default_factory=dict)
    progress: dict[tuple[str, int], Progress] = field(default_factory=dict)
    exits: list[Exit] = field(default_factory=list)
    _ending: int | None = None

    def take(self, line: Line, text: str) -> None:
        rank = RANK.search(text)
        who = int(rank[1]) if rank else line.rank
        named = GROUP.search(text)
        group = named["group"] if named else "0"
        if who is not None and (timeout := TIMEOUT.search(text)) and len(self.timeouts) < MOST:
            sequence = int(timeout["sequence"] or -1)
            sizes = int(timeout["numel_in"] or -1), int(timeout["numel_out"] or -1)
            found = Timeout(who, group, sequence, timeout["op"], *sizes, line)
            self.timeouts.setdefault((group, who, sequence), found)
        if who is not None and (progress := PROGRESS.search(text)) and len(self.progress) < MOST:
            completed = int(progress["completed"])
            done = 0 if completed < 0 or completed > NEVER else completed
            self.progress[group, who] = Progress(who, int(progress["enqueued"]), done, line)
        if ended := ENDED.search(text):
            self._ending = int(ended[1])
        elif (code := CODE.search(text)) and self._ending is not None and len(self.exits) < MOST:
            self.exits.append(Exit(self._ending, int(code[1]), line))
            self._ending = None


def observations(scan: Scan) -> Iterator[Line]:
    """Sentences over all ranks, each at the line it rests on, with the rank that is odd."""
    groups: dict[str, list[Timeout]] = defaultdict(list)
    for timeout in scan.timeouts:
        groups[timeout.group].append(timeout)
    for timeouts in groups.values():
        yield from _of_group(_first_of_each(timeouts), scan)


def _first_of_each(timeouts: list[Timeout]) -> dict[int, Timeout]:
    first: dict[int, Timeout] = {}
    for timeout in timeouts:
        if timeout.rank not in first or timeout.sequence < first[timeout.rank].sequence:
            first[timeout.rank] = timeout
    return dict(sorted(first.items()))


def _of_group(by_rank: dict[int, Timeout], scan: Scan) -> Iterator[Line]:
    one = next(iter(by_rank.values()))
    sequences = {timeout.sequence for timeout in by_rank.values()}
    calls = {(timeout.sequence, timeout.op, timeout.numel_in, timeout.numel_out) for timeout in by_rank.values()}
    completed = [progress.completed for progress in scan.progress if progress.rank in by_rank]
    if sequences == {1} or (completed and not any(completed)):
        yield _derived(one.line, "no collective ever completed: the first one of the job timed out", None)
    elif len(calls) == 1 and len(by_rank) > 1:
        yield _derived(one.line, f"{len(by_rank)} ranks timed out in the same collective, {_told(one)}", None)
    if len(calls) > 1:
        yield from _divergence(by_rank)
    absent = sorted(set(scan.ranks) - set(by_rank)) if one.group == "0" else []
    if absent and len(absent) < len(by_rank):
        who = ", ".join(map(str, absent[:8]))
        yield _derived(one.line, f"rank {who} reported no timeout while {len(by_rank)} others waited", absent[0])


def _divergence(by_rank: dict[int, Timeout]) -> Iterator[Line]:
    """Different operations or sizes at one sequence number, or ranks at different sequence numbers."""
    at: dict[int, list[Timeout]] = defaultdict(list)
    for timeout in by_rank.values():
        at[timeout.sequence].append(timeout)
    odd = min(at.values(), key=len)[0]
    for timeouts in at.values():
        ops = {timeout.op for timeout in timeouts}
        if len(ops) > 1:
            last = min(timeouts, key=lambda one: sum(one.op == other.op for other in timeouts))
            yield _derived(
                last.line,
                f"ranks timed out in different collectives at SeqNum={last.sequence}: {' and '.join(sorted(ops))}",
                last.rank,
            )
            return
        if len({(one.numel_in, one.numel_out) for one in timeouts}) > 1:
            yield _derived(
                timeouts[0].line,
                f"ranks timed out in {timeouts[0].op} of different sizes at SeqNum={timeouts[0].sequence}",
                timeouts[0].rank,
            )
            return
    if len(at) > 1:
        low, high = min(at), max(at)
        text = f"ranks timed out at different collectives: SeqNum={low} and SeqNum={high}"
        yield _derived(odd.line, text, odd.rank)


def _told(timeout: Timeout) -> str:
    return f"SeqNum={timeout.sequence} {timeout.op}"


def _derived(line: Line, text: str, rank: int | None) -> Line:
    return Line(line.source, line.number, f"kb: {text}", rank, line.time)

"""How far each rank came, from what watchdogs and launchers print, and what that means for all of them together.

The messages are those of torch's ProcessGroupNCCL (1.12 to 2.13) and of torchrun's summary. `observations` says
in fixed sentences what no single line says; entries have signatures for them, as for any other line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeVar

from kb.diagnose.evidence import CONCLUDED, Exit, Line, Progress, Scan, Timeout
from kb.harness.collective import name_ranks

MOST = 10_000  # of each kind that are kept
MOST_SIDES = 4
TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\("
    r"(?:SeqNum=(?P<sequence>\d{1,12}), )?OpType=(?P<op>\w{1,60})"
    r"(?:, NumelIn=(?P<numel_in>\d{1,15}))?(?:, NumelOut=(?P<numel_out>\d{1,15}))?"
    r"(?:, TensorShape=\[(?P<shape>[\d, ]{0,100})\])?"
)
GROUP = re.compile(r"\[PG (?:ID \d{1,9} PG GUID |ID )?(?P<group>\w{1,80})[^][]{0,120}?[ ]Rank (?P<member>\d{1,6})\]")
PROGRESS = re.compile(
    r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,20}), "
    r"last completed (?:NCCL )?work: (?P<completed>-?\d{1,20})"
)
ENDED = re.compile(r"^\s{0,8}rank\s{0,12}: (\d{1,6}) \(local_rank: ")
CODE = re.compile(r"^\s{0,8}exitcode\s{0,12}: (-?\d{1,5}) ")
NEVER = 1 << 62  # torch prints -1 as an unsigned number in some releases
DEFAULT = "0"  # the group of all ranks
PAIRED = ("SEND", "RECV")  # differ on both sides by nature
Side = TypeVar("Side", bound=Hashable)  # what some ranks have in common
EQUAL_SIZES = re.compile(r"ALLREDUCE|_?ALLGATHER(_BASE)?|_?REDUCE(_SCATTER)?(_BASE)?|BROADCAST")


@dataclass(slots=True)
class Reading:
    """Takes telling lines one by one, in order. The first timeout of a rank at a number stands, the last progress."""

    progress: dict[tuple[str, int], Progress] = field(default_factory=dict)
    exits: list[Exit] = field(default_factory=list)
    _timeouts: dict[tuple[int, int, str], Timeout] = field(default_factory=dict)
    _members: dict[tuple[str, str], set[int]] = field(default_factory=lambda: defaultdict(set))
    _ending: int | None = None

    def take(self, line: Line, text: str) -> None:
        named = _group(text)
        if line.rank is not None and len(self._timeouts) < MOST and len(self.progress) < MOST:
            self._take_timeout(line, line.rank, text, named)
            self._take_progress(line, line.rank, text, named[0] if named else DEFAULT)
        if ended := ENDED.search(text):
            self._ending = int(ended[1])
        elif (code := CODE.search(text)) and self._ending is not None and len(self.exits) < MOST:
            self.exits.append(Exit(self._ending, int(code[1]), line))
            self._ending = None

    @property
    def timeouts(self) -> dict[tuple[int, int, str], Timeout]:
        """Each with its group. The first of the lines that a rank prints leaves it out: it is the default one where
        the log speaks of no other. Groups that share a name, as `split_group` makes them, are left out."""
        shared = {group for (group, _), ranks in self._members.items() if len(ranks) > 1}
        others = {group for group, _ in self._members} - {DEFAULT}
        known = {key: timeout for key, timeout in self._timeouts.items() if timeout.group or not others}
        return {key: replace(one, group=one.group or DEFAULT) for key, one in known.items() if one.group not in shared}

    def _take_timeout(self, line: Line, rank: int, text: str, named: tuple[str, str] | None) -> None:
        timeout = TIMEOUT.search(text)
        if timeout is None or timeout["op"] in PAIRED:
            return
        sequence = int(timeout["sequence"] or -1)
        size_in = timeout["numel_in"] or (_elements(timeout["shape"]) if timeout["shape"] else -1)
        found = Timeout(rank, "", sequence, timeout["op"], int(size_in), int(timeout["numel_out"] or -1), line)
        key = rank, sequence, timeout["op"]
        known = self._timeouts.setdefault(key, found)
        if named:
            self._members[named].add(rank)
            self._timeouts[key] = replace(known, group=known.group or named[0])

    def _take_progress(self, line: Line, rank: int, text: str, group: str) -> None:
        if progress := PROGRESS.search(text):
            completed = int(progress["completed"])
            done = 0 if completed < 0 or completed > NEVER else completed
            self.progress[group, rank] = Progress(rank, int(progress["enqueued"]), done, line)


def _group(text: str) -> tuple[str, str] | None:
    """Name of the process group that a line speaks of, and which rank of it."""
    named = GROUP.search(text)
    return (DEFAULT if "default_pg" in named[0] else named["group"], named["member"]) if named else None


def _elements(shape: str) -> int:
    return prod(int(size) for size in re.findall(r"\d{1,15}", shape))


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
    call = f"SeqNum={one.sequence} {one.op}"
    calls = {(timeout.sequence, timeout.op, timeout.numel_in, timeout.numel_out) for timeout in by_rank.values()}
    absent = sorted(set(scan.ranks) - set(by_rank)) if one.group == DEFAULT else []
    is_short = 0 < len(absent) < len(by_rank)
    if _none_completed(by_rank, scan):
        yield _derived(one.line, "no collective ever completed: the first one of the job timed out", None)
    elif len(calls) == 1 and len(by_rank) > 1 and not is_short:
        yield _derived(one.line, f"{len(by_rank)} ranks timed out in the same collective, {call}", None)
    if len(calls) > 1:
        yield from _divergence(by_rank)
    if is_short:
        who = ", ".join(map(str, absent))
        where = f" in {call}" if len(calls) == 1 else ""
        yield _derived(one.line, f"rank {who} reported no timeout while {len(by_rank)} others waited{where}", absent[0])


def _none_completed(by_rank: dict[int, Timeout], scan: Scan) -> bool:
    is_first = {timeout.sequence for timeout in by_rank.values()} == {1}
    return (is_first or bool(scan.progress)) and not any(progress.completed for progress in scan.progress)


def _divergence(by_rank: dict[int, Timeout]) -> Iterator[Line]:
    """Different operations or sizes at one sequence number, or ranks at different sequence numbers."""
    at: dict[int, dict[int, Timeout]] = defaultdict(dict)
    for rank, timeout in by_rank.items():
        if timeout.sequence >= 0:
            at[timeout.sequence][rank] = timeout
    for sequence, timeouts in sorted(at.items()):
        ops = _sides({rank: timeout.op for rank, timeout in timeouts.items()})
        sizes = _sides({rank: (timeout.numel_in, timeout.numel_out) for rank, timeout in timeouts.items()})
        op = next(iter(ops))
        if len(ops) > 1:
            told = ", ".join(f"{name_ranks(ranks)} in {side}" for side, ranks in _few(ops))
            yield _odd(by_rank, ops, f"ranks timed out in different collectives at SeqNum={sequence}: {told}")
            return
        if len(sizes) > 1 and EQUAL_SIZES.fullmatch(str(op)):
            told = ", ".join(f"{name_ranks(ranks)} with {_sized(*side)}" for side, ranks in _few(sizes))
            yield _odd(by_rank, sizes, f"ranks timed out in {op} of different sizes at SeqNum={sequence}: {told}")
            return
    if len(at) > 1:
        numbers = {sequence: list(timeouts) for sequence, timeouts in sorted(at.items())}
        told = ", ".join(f"SeqNum={number} on {name_ranks(ranks)}" for number, ranks in _few(numbers))
        yield _odd(by_rank, numbers, f"ranks timed out at different collectives: {told}")


def _sides(of: Mapping[int, Side]) -> dict[Side, list[int]]:
    """Ranks by what they have in common, the largest side first."""
    sides: dict[Side, list[int]] = defaultdict(list)
    for rank, side in of.items():
        sides[side].append(rank)
    return dict(sorted(sides.items(), key=lambda item: -len(item[1])))


def _few(sides: Mapping[Side, list[int]]) -> list[tuple[Side, list[int]]]:
    return list(sides.items())[:MOST_SIDES]


def _sized(numel_in: int, numel_out: int) -> str:
    return f"NumelIn={numel_in}" + (f" NumelOut={numel_out}" if numel_out >= 0 else "")


def _odd(by_rank: Mapping[int, Timeout], sides: Mapping[Side, list[int]], text: str) -> Line:
    """At the line of the one rank that stands alone against several; of equals none is accused."""
    fewest, *others = sorted(sides.values(), key=len)
    is_alone = len(fewest) == 1 and min(map(len, others)) > 1
    return _derived(by_rank[min(fewest)].line, text, fewest[0] if is_alone else None)


def _derived(line: Line, text: str, rank: int | None) -> Line:
    return Line(line.source, line.number, f"{CONCLUDED}{text}", rank, line.time)

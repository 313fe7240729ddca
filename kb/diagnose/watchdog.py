"""Reads how far each rank came from messages of watchdogs and launchers, and compares the ranks.

The messages are from torch's ProcessGroupNCCL (1.12 to 2.15; nccl2, its implementation in 2.15, names neither the
operation nor its number) and from torchrun's summary. `derive_observations` puts what only several lines together show
into fixed sentences; entries have signatures for these, as for any other line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeVar

from kb.diagnose.evidence import DERIVED_PREFIX, Exit, GroupProgress, Line, Timeout
from kb.diagnose.scan.result import Scan
from kb.harness.collective import name_ranks

MOST = 10_000  # stored messages of each kind
MOST_SIDES = 4  # groups of ranks in one sentence
TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\("
    r"(?:SeqNum=(?P<sequence>\d{1,12}), )?OpType=(?P<op>\w{1,60})"
    r"(?:, NumelIn=(?P<numel_in>\d{1,15}))?(?:, NumelOut=(?P<numel_out>\d{1,15}))?"
    r"(?:, TensorShape=\[(?P<shape>[\d, ]{0,100})\])?"
)
GAVE_UP = re.compile(  # nccl2; the rank is within the group
    r"(?:\[TC\]\[rank=(?P<member>\d{1,6})\]\[name=(?P<group>[^][]{0,80})\] )?"
    r"(?:Operation timed out after \d{1,12} ms|Aborting process on rank (?P<rank>\d{1,6}) due to timeout - )"
)
GROUP = re.compile(r"\[PG (?:ID \d{1,9} PG GUID |ID )?(?P<group>\w{1,80})[^][]{0,120}?[ ]Rank (?P<member>\d{1,6})\]")
PROGRESS = re.compile(
    r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,20}), "
    r"last completed (?:NCCL )?work: (?P<completed>-?\d{1,20})"
)
EXIT_RANK = re.compile(r"^\s{0,8}rank\s{0,12}: (\d{1,6}) \(local_rank: ")
EXIT_CODE = re.compile(r"^\s{0,8}exitcode\s{0,12}: (-?\d{1,5}) ")
NONE_COMPLETED = 1 << 62  # torch prints -1 as an unsigned number in some releases
DEFAULT_GROUP = "0"  # of all ranks
PAIRED = ("SEND", "RECV")  # operations that naturally differ between ranks
Side = TypeVar("Side", bound=Hashable)  # the operation, size or number that some ranks have in common
EQUAL_SIZES = re.compile(r"ALLREDUCE|_?ALLGATHER(_BASE)?|_?REDUCE(_SCATTER)?(_BASE)?|BROADCAST")


@dataclass(slots=True)
class WatchdogReader:
    """Reads lines one by one, in order. It stores each rank's first timeout at each number, and its last progress."""

    progress: dict[tuple[str, int], GroupProgress] = field(default_factory=dict)
    exits: list[Exit] = field(default_factory=list)
    _timeouts: dict[tuple[int, int, str], Timeout] = field(default_factory=dict)
    _members: dict[tuple[str, str], set[int]] = field(default_factory=lambda: defaultdict(set))
    _exit_rank: int | None = None

    def read_line(self, line: Line, text: str) -> None:
        member = _group_member(text)
        if len(self._timeouts) < MOST and (match := GAVE_UP.search(text)):
            self._read_abort(line, match)
        elif line.rank is not None and len(self._timeouts) < MOST and len(self.progress) < MOST:
            self._read_timeout(line, line.rank, text, member)
            self._read_progress(line, line.rank, text, member[0] if member else DEFAULT_GROUP)
        if rank := EXIT_RANK.search(text):
            self._exit_rank = int(rank[1])
        elif (code := EXIT_CODE.search(text)) and self._exit_rank is not None and len(self.exits) < MOST:
            self.exits.append(Exit(self._exit_rank, int(code[1]), line))
            self._exit_rank = None

    @property
    def timeouts(self) -> dict[tuple[int, int, str], Timeout]:
        """The timeouts with their groups. The first line that a rank prints does not name the group, which is the
        default group if the log names no other. Groups that share a name, as from `split_group`, are left out."""
        shared = {group for (group, _), ranks in self._members.items() if len(ranks) > 1}
        others = {group for group, _ in self._members} - {DEFAULT_GROUP}
        known = {key: timeout for key, timeout in self._timeouts.items() if timeout.group or not others}
        return {
            key: replace(timeout, group=timeout.group or DEFAULT_GROUP)
            for key, timeout in known.items()
            if timeout.group not in shared
        }

    def _read_abort(self, line: Line, match: re.Match[str]) -> None:
        """Read a line that names no operation. The first of several counts: the process ends 15 s after it."""
        within = match["member"] or match["rank"]
        if within is None:
            return
        rank, group = int(within) if line.rank is None else line.rank, _group_name(match["group"] or "")
        if group:
            self._members[group, within].add(rank)
        self._timeouts.setdefault((rank, -1, group), Timeout(rank, group, -1, "", -1, -1, line))

    def _read_timeout(self, line: Line, rank: int, text: str, member: tuple[str, str] | None) -> None:
        match = TIMEOUT.search(text)
        if match is None or match["op"] in PAIRED:
            return
        sequence = int(match["sequence"] or -1)
        size_in = match["numel_in"] or (_elements(match["shape"]) if match["shape"] else -1)
        timeout = Timeout(rank, "", sequence, match["op"], int(size_in), int(match["numel_out"] or -1), line)
        key = rank, sequence, match["op"]
        first = self._timeouts.setdefault(key, timeout)
        if member:
            self._members[member].add(rank)
            self._timeouts[key] = replace(first, group=first.group or member[0])

    def _read_progress(self, line: Line, rank: int, text: str, group: str) -> None:
        if match := PROGRESS.search(text):
            number = int(match["completed"])
            completed = 0 if number < 0 or number > NONE_COMPLETED else number
            self.progress[group, rank] = GroupProgress(rank, int(match["enqueued"]), completed, line)


def _group_member(text: str) -> tuple[str, str] | None:
    """The name of the process group in a line, and the rank within it."""
    match = GROUP.search(text)
    return (DEFAULT_GROUP if "default_pg" in match[0] else match["group"], match["member"]) if match else None


def _group_name(name: str) -> str:
    return DEFAULT_GROUP if "default_pg" in name else name


def _elements(shape: str) -> int:
    return prod(int(size) for size in re.findall(r"\d{1,15}", shape))


def derive_observations(scan: Scan) -> Iterator[Line]:
    """Sentences that compare all ranks; each cites a line, with the rank that differs from the others, if any."""
    groups: dict[str, list[Timeout]] = defaultdict(list)
    for timeout in scan.timeouts:
        groups[timeout.group].append(timeout)
    for timeouts in groups.values():
        yield from _group_observations(_first_of_each_rank(timeouts), scan)


def _first_of_each_rank(timeouts: list[Timeout]) -> dict[int, Timeout]:
    first: dict[int, Timeout] = {}
    for timeout in timeouts:
        if timeout.rank not in first or timeout.sequence < first[timeout.rank].sequence:
            first[timeout.rank] = timeout
    return dict(sorted(first.items()))


def _group_observations(by_rank: dict[int, Timeout], scan: Scan) -> Iterator[Line]:
    first = next(iter(by_rank.values()))
    call = f"SeqNum={first.sequence} {first.op}" if first.op else ""
    calls = {(timeout.sequence, timeout.op, timeout.numel_in, timeout.numel_out) for timeout in by_rank.values()}
    absent = sorted(set(scan.ranks) - set(by_rank)) if first.group == DEFAULT_GROUP else []
    are_few_absent = 0 < len(absent) < len(by_rank)
    if _none_completed(by_rank, scan):
        yield _derived(first.line, "no collective ever completed: the first one of the job timed out", None)
    elif call and len(calls) == 1 and len(by_rank) > 1 and not are_few_absent:
        yield _derived(first.line, f"{len(by_rank)} ranks timed out in the same collective, {call}", None)
    if len(calls) > 1:
        yield from _divergence(by_rank)
    if are_few_absent:
        ranks = ", ".join(map(str, absent))
        where = f" in {call}" if call and len(calls) == 1 else ""
        text = f"rank {ranks} reported no timeout while {len(by_rank)} others waited{where}"
        yield _derived(first.line, text, absent[0])


def _none_completed(by_rank: dict[int, Timeout], scan: Scan) -> bool:
    is_first = {timeout.sequence for timeout in by_rank.values()} == {1}
    return (is_first or bool(scan.progress)) and not any(progress.completed for progress in scan.progress)


def _divergence(by_rank: dict[int, Timeout]) -> Iterator[Line]:
    """The observation of different operations or sizes at one sequence number, or of different sequence numbers."""
    by_sequence: dict[int, dict[int, Timeout]] = defaultdict(dict)
    for rank, timeout in by_rank.items():
        if timeout.sequence >= 0:
            by_sequence[timeout.sequence][rank] = timeout
    for sequence, timeouts in sorted(by_sequence.items()):
        ops = _sides({rank: timeout.op for rank, timeout in timeouts.items()})
        sizes = _sides({rank: (timeout.numel_in, timeout.numel_out) for rank, timeout in timeouts.items()})
        op = next(iter(ops))
        if len(ops) > 1:
            sides = ", ".join(f"{name_ranks(ranks)} in {side}" for side, ranks in _first_sides(ops))
            yield _odd(by_rank, ops, f"ranks timed out in different collectives at SeqNum={sequence}: {sides}")
            return
        if len(sizes) > 1 and EQUAL_SIZES.fullmatch(str(op)):
            sides = ", ".join(f"{name_ranks(ranks)} with {_sized(*side)}" for side, ranks in _first_sides(sizes))
            yield _odd(by_rank, sizes, f"ranks timed out in {op} of different sizes at SeqNum={sequence}: {sides}")
            return
    if len(by_sequence) > 1:
        numbers = {sequence: list(timeouts) for sequence, timeouts in sorted(by_sequence.items())}
        sides = ", ".join(f"SeqNum={number} on {name_ranks(ranks)}" for number, ranks in _first_sides(numbers))
        yield _odd(by_rank, numbers, f"ranks timed out at different collectives: {sides}")


def _sides(by_rank: Mapping[int, Side]) -> dict[Side, list[int]]:
    """The ranks grouped by what they have in common, the largest group first."""
    sides: dict[Side, list[int]] = defaultdict(list)
    for rank, side in by_rank.items():
        sides[side].append(rank)
    return dict(sorted(sides.items(), key=lambda item: -len(item[1])))


def _first_sides(sides: Mapping[Side, list[int]]) -> list[tuple[Side, list[int]]]:
    return list(sides.items())[:MOST_SIDES]


def _sized(numel_in: int, numel_out: int) -> str:
    return f"NumelIn={numel_in}" + (f" NumelOut={numel_out}" if numel_out >= 0 else "")


def _odd(by_rank: Mapping[int, Timeout], sides: Mapping[Side, list[int]], text: str) -> Line:
    """An observation that cites a rank of the smallest side, and blames it if it is alone against larger sides."""
    fewest, *others = sorted(sides.values(), key=len)
    is_single = len(fewest) == 1 and min(map(len, others)) > 1
    return _derived(by_rank[min(fewest)].line, text, fewest[0] if is_single else None)


def _derived(line: Line, text: str, rank: int | None) -> Line:
    return Line(line.source, line.number, f"{DERIVED_PREFIX}{text}", rank, line.time)

"""What NCCL's RAS subsystem says of a job, `ncclras` as text or with `-f json`, to sentences.

JSON exists since NCCL 2.28.7, text since 2.24; both are printed by `src/ras/client_support.cc` of NCCL. RAS numbers
ranks within a communicator. They are the job's ranks where the communicator has all GPUs of the job; elsewhere a line
carries no rank and the sentence names process and node.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kb.diagnose.evidence import LONGEST_EVIDENCE, Line
from kb.diagnose.readers.structured import Unreadable, as_integer, as_text, load_json
from kb.harness.collective import name_ranks

LARGEST = 64 << 20  # bytes or characters
MOST_LINES = 10_000
RESULTS = {  # ncclResult_t; 0 is success, 7 in progress
    1: "ncclUnhandledCudaError",
    2: "ncclSystemError",
    3: "ncclInternalError",
    4: "ncclInvalidArgument",
    5: "ncclInvalidUsage",
    6: "ncclRemoteError",
}
IN_PROGRESS = 7

TOTALS = re.compile(r" *\d[ \d]* (\d{1,9})$")  # the row under the job summary; GPUs stand last
GROUP = re.compile(r" *(\d{1,9}) +\d+ +\d+ +[\d-]+ +(\d{1,9}) +\d+ +[A-Z]")
SECTION = re.compile(r"(?:#(\d{1,9})-\d+ \(([0-9a-f]{1,16})\) )?(INCOMPLETE|DEAD|ERROR|MISMATCH)$")
COUNTS = re.compile(r"  Communicator ranks have different (\w{1,40}) operation counts$")
LAUNCHED = re.compile(
    r"  (\d{1,9}|Rank \d{1,9}) (?:ranks have|has) (?:not launched|launched up to operation (\d{1,19}))"
)
REPORTED = re.compile(r"  Rank (\d{1,9}) reported (.{1,100}?)(?: -- |$)")
MEMBER = re.compile(r"  Rank (\d{1,9}) -- (?:GPU \S{1,100} managed by (process \d{1,10} on node \S{1,100}))?")
MISSING = re.compile(r"  The missing ranks?: (\d[\d, -]{0,400})$")
PROCESS = re.compile(r"  (Process \d{1,10} on node \S{1,100}) managing GPU")
EVENT = re.compile(r"\[[\d :-]{10,30}\] PEER_DEAD: (Process \d{1,10} on node \S{1,100})")
SILENT = {"INCOMPLETE": "is unresponsive", "DEAD": "is considered dead"}


def read_ras_report(data: bytes | str, source: str) -> list[Line]:
    """Raises `Unreadable`. A healthy job yields nothing."""
    if len(data) > LARGEST:
        raise Unreadable(f"it is larger than {LARGEST >> 20} MiB")
    shown = data.decode(errors="replace") if isinstance(data, bytes) else data
    said = _of_json(load_json(shown)) if shown.lstrip()[:1] == "{" else _of_text(shown)
    return [Line(source, 0, f"NCCL RAS: {one}"[:LONGEST_EVIDENCE], rank) for one, rank in said]


Said = tuple[str, int | None]  # a sentence, the rank of the job that it is about


def _of_json(document: Any) -> list[Said]:
    communicators = document.get("communicators") if isinstance(document, dict) else None
    if not isinstance(communicators, list):
        raise Unreadable("it is no RAS report: it has no list of communicators")
    known = [communicator for communicator in communicators[:MOST_LINES] if isinstance(communicator, dict)]
    gpus = {_gpu(rank) for one in known for rank in (*_dicts(one, "ranks"), *_dicts(one, "missing_ranks"))}
    said = [each for one in known for each in _of_communicator(one, is_job=as_integer(one.get("size")) == len(gpus))]
    ras = document.get("ras")
    timeouts = as_integer(ras.get("timeouts_count")) if isinstance(ras, dict) else None
    return said[:MOST_LINES] + (
        [(f"{timeouts} communication timeouts while it asked the job", None)] if timeouts else []
    )


def _dicts(parent: dict[Any, Any], key: str) -> list[dict[Any, Any]]:
    items = parent.get(key)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _gpu(rank: dict[Any, Any]) -> tuple[str, int | None, int | None]:
    return as_text(rank.get("host")), as_integer(rank.get("pid")), as_integer(rank.get("nvml_dev"))


def _of_communicator(one: dict[Any, Any], is_job: bool) -> Iterator[Said]:
    name = f"communicator {as_text(one.get('hash'), 40)} of {as_integer(one.get('size'))} ranks"
    for missing in _dicts(one, "missing_ranks"):
        rank, status = as_integer(missing.get("rank")), missing.get("status")
        status = status if isinstance(status, dict) else {}
        state = "is considered dead" if status.get("considered_dead") is True else "is unresponsive"
        if state == "is unresponsive" and status.get("unresponsive") is False:
            state = "is alive and not in the communicator"
        yield f"rank {rank} {state} ({_process(missing)}, {name})", rank if is_job else None
    ranks = {rank: one for one in _dicts(one, "ranks") if (rank := as_integer(one.get("rank"))) is not None}
    for rank, member in ranks.items():
        for state in _states(member.get("status")):
            yield f"rank {rank} {state} ({_process(member)}, {name})", rank if is_job else None
    for said, behind in _behind(ranks):
        yield f"{said} ({name})", behind if is_job else None


def _process(rank: dict[Any, Any]) -> str:
    return f"process {as_integer(rank.get('pid'))} on node {as_text(rank.get('host'), 100)}"


def _states(status: Any) -> Iterator[str]:
    """What is wrong with a rank that answered."""
    if not isinstance(status, dict):
        return
    start, later = as_integer(status.get("init_state")) or 0, as_integer(status.get("async_error")) or 0
    if start == IN_PROGRESS:
        yield "is still initializing"
    elif start:
        yield f"failed to initialize, {RESULTS.get(start, start)}"
    if later not in (0, IN_PROGRESS):
        yield f"reported {RESULTS.get(later, later)}"
    if status.get("abort_flag") is True:
        yield "has aborted"


def _behind(ranks: dict[int, dict[Any, Any]]) -> Iterator[tuple[str, int]]:
    """Per operation the ranks that launched fewer of it. A running job shows differences of a few as well."""
    launched: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, member in ranks.items():
        counts = member.get("collective_counts")
        for op, count in list(counts.items())[:64] if isinstance(counts, dict) else ():
            launched[as_text(op, 40)][rank] = as_integer(count) or 0
    for op, by_rank in launched.items():
        most = max(by_rank.values())
        late = sorted(rank for rank, count in by_rank.items() if count < most)
        if late:
            yield _told_behind(op, late, [by_rank[rank] for rank in late], most), late[0]


def _told_behind(op: str, late: list[int], counts: list[int], most: int) -> str:
    least = str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"{name_ranks(late)} launched {least} {op} operations, others {most}"


@dataclass(slots=True)
class _Report:
    """Where in the text form a line stands: the section, its communicator, the counts that are being listed."""

    said: list[Said] = field(default_factory=list)
    gpus: int = 0
    sizes: dict[int, int] = field(default_factory=dict)  # ranks of a communicator, by group
    state: str = ""
    name: str = ""
    is_job: bool = False
    op: str = ""
    counts: list[tuple[int, int, list[int]]] = field(default_factory=list)  # launched, ranks that did, those listed

    def say(self, sentence: str, rank: int | None = None) -> None:
        self.said.append((sentence, rank if self.is_job else None))

    def read(self, line: str) -> None:
        """One line, of whatever kind it is."""
        if match := SECTION.match(line):
            self.begin(match)
        elif match := COUNTS.match(line):
            self.flush()
            self.op = match[1]
        elif self.op and (match := LAUNCHED.match(line)):
            ranks = [int(match[1].removeprefix("Rank "))] if match[1].startswith("Rank") else []
            self.counts.append((int(match[2] or 0), 1 if ranks else int(match[1]), ranks))
        elif match := MEMBER.match(line):
            self.member(int(match[1]), match[2])
        elif self.state in SILENT and (match := MISSING.match(line)):
            for rank in map(int, re.findall(r"\d{1,9}", match[1])):
                self.member(rank, None)
        elif match := REPORTED.match(line):
            self.say(f"rank {match[1]} reported {match[2]} ({self.name})", int(match[1]))
        elif match := PROCESS.match(line):
            if self.state in SILENT:
                self.say(f"{match[1].lower()} {SILENT[self.state]}")
        elif match := EVENT.match(line):
            self.say(f"{match[1].lower()} {SILENT['DEAD']}")
        elif not line:
            self.flush()
        else:
            self.table(line)

    def table(self, line: str) -> None:
        if match := GROUP.match(line):
            self.sizes[int(match[1])] = int(match[2])
        elif not self.sizes and (match := TOTALS.match(line)):
            self.gpus = int(match[1])

    def begin(self, match: re.Match[str]) -> None:
        self.flush()
        self.state = match[3]
        size = self.sizes.get(int(match[1])) if match[1] else None
        self.is_job = size is not None and size == self.gpus
        self.name = f"communicator 0x{match[2]}" + (f" of {size} ranks" if size else "") if match[2] else ""

    def member(self, rank: int, process: str | None) -> None:
        if self.op and self.counts:
            self.counts[-1][2].append(rank)
        elif self.state in SILENT:
            self.say(f"rank {rank} {SILENT[self.state]} ({', '.join(filter(None, (process, self.name)))})", rank)

    def flush(self) -> None:
        """End a list of counts: who launched fewer than the others."""
        most = max((count for count, _, _ in self.counts), default=0)
        for count, many, ranks in self.counts:
            if count < most:
                who = name_ranks(ranks) if len(ranks) == many else f"{many} ranks"
                said = f"{who} launched {count} {self.op} operations, others {most} ({self.name})"
                self.say(said, ranks[0] if len(ranks) == many else None)
        self.op, self.counts = "", []


def _of_text(shown: str) -> list[Said]:
    if not re.search(r"^(Job summary|Communicators\.\.\.|RAS Monitor Mode|Group +Comms )|PEER_", shown, re.MULTILINE):
        raise Unreadable("it is no RAS report: it has neither a job summary nor communicators")
    report = _Report()
    for line in shown.splitlines():
        report.read(line.rstrip()[:1000])
        if len(report.said) >= MOST_LINES:
            break
    report.flush()
    return report.said

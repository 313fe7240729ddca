"""Turns reports of NCCL's RAS subsystem, which `ncclras` prints as text or with `-f json`, into sentences.

JSON exists since NCCL 2.28.7, text since 2.24; `src/ras/client_support.cc` of NCCL prints both. RAS numbers ranks
within a communicator. They are the job's ranks if the communicator has all GPUs of the job; otherwise the line has no
rank, and the sentence names process and node.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kb.diagnose.evidence import LONGEST_EVIDENCE, Line
from kb.diagnose.readers.structured import MOST_VALUES, Unreadable, as_integer, as_text, load_json
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

TOTALS = re.compile(r" *\d[ \d]* (\d{1,9})$")  # the row under the job summary; its last number counts GPUs
GROUP = re.compile(r" *(\d{1,9}) +\d+ +\d+ +[\d-]+ +(\d{1,9}) +\d+ +[A-Z]")
SECTION = re.compile(r"(?:#(\d{1,9})-\d+ \(([0-9a-f]{1,16})\) )?(INCOMPLETE|DEAD|ERROR|MISMATCH)$")
COUNTS = re.compile(r"  Communicator ranks have different (\w{1,40}) operation counts$")
OPERATIONS = re.compile(
    r"  (\d{1,9}|Rank \d{1,9}) (?:ranks have|has) (?:not launched|launched up to operation (\d{1,19}))"
)
REPORTED = re.compile(r"  Rank (\d{1,9}) reported (.{1,100}?)(?: -- |$)")
MEMBER = re.compile(r"  Rank (\d{1,9}) -- (?:GPU \S{1,100} managed by (process \d{1,10} on node \S{1,100}))?")
MISSING = re.compile(r"  The missing ranks?: (\d[\d, -]{0,400})$")
PROCESS = re.compile(r"  (Process \d{1,10} on node \S{1,100}) managing GPU")
EVENT = re.compile(r"\[[\d :-]{10,30}\] PEER_DEAD: (Process \d{1,10} on node \S{1,100})")
SILENT = {"INCOMPLETE": "is unresponsive", "DEAD": "is considered dead"}


def read_ras_report(data: bytes | str, source: str, most_values: int = MOST_VALUES) -> list[Line]:
    """The lines of a report; none if the job is healthy. Raises `Unreadable`."""
    if len(data) > LARGEST:
        raise Unreadable(f"it is larger than {LARGEST >> 20} MiB")
    text = data.decode(errors="replace") if isinstance(data, bytes) else data
    statements = _from_json(load_json(text, most_values)) if text.lstrip()[:1] == "{" else _from_text(text)
    return [Line(source, 0, f"NCCL RAS: {sentence}"[:LONGEST_EVIDENCE], rank) for sentence, rank in statements]


Statement = tuple[str, int | None]  # a sentence, and the job's rank that it is about


def _from_json(document: Any) -> list[Statement]:
    communicators = document.get("communicators") if isinstance(document, dict) else None
    if not isinstance(communicators, list):
        raise Unreadable("not a RAS report: it has no list of communicators")
    communicators = [communicator for communicator in communicators[:MOST_LINES] if isinstance(communicator, dict)]
    keys = ("ranks", "missing_ranks")
    gpus = {_gpu(rank) for communicator in communicators for key in keys for rank in _dicts(communicator, key)}
    statements = [
        statement
        for communicator in communicators
        for statement in _of_communicator(communicator, is_job=as_integer(communicator.get("size")) == len(gpus))
    ][:MOST_LINES]
    ras = document.get("ras")
    timeouts = as_integer(ras.get("timeouts_count")) if isinstance(ras, dict) else None
    if timeouts:
        statements.append((f"{timeouts} communication timeouts while it asked the job", None))
    return statements


def _dicts(parent: dict[Any, Any], key: str) -> list[dict[Any, Any]]:
    items = parent.get(key)
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _gpu(rank: dict[Any, Any]) -> tuple[str, int | None, int | None]:
    return as_text(rank.get("host")), as_integer(rank.get("pid")), as_integer(rank.get("nvml_dev"))


def _of_communicator(communicator: dict[Any, Any], is_job: bool) -> Iterator[Statement]:
    name = f"communicator {as_text(communicator.get('hash'), 40)} of {as_integer(communicator.get('size'))} ranks"
    for missing in _dicts(communicator, "missing_ranks"):
        rank, status = as_integer(missing.get("rank")), missing.get("status")
        status = status if isinstance(status, dict) else {}
        state = "is considered dead" if status.get("considered_dead") is True else "is unresponsive"
        if state == "is unresponsive" and status.get("unresponsive") is False:
            state = "is alive and not in the communicator"
        yield f"rank {rank} {state} ({_process(missing)}, {name})", rank if is_job else None
    members = _dicts(communicator, "ranks")
    ranks = {rank: member for member in members if (rank := as_integer(member.get("rank"))) is not None}
    for rank, member in ranks.items():
        for state in _states(member.get("status")):
            yield f"rank {rank} {state} ({_process(member)}, {name})", rank if is_job else None
    for sentence, rank in _behind(ranks):
        yield f"{sentence} ({name})", rank if is_job else None


def _process(rank: dict[Any, Any]) -> str:
    return f"process {as_integer(rank.get('pid'))} on node {as_text(rank.get('host'), 100)}"


def _states(status: Any) -> Iterator[str]:
    """The problems of a rank that answered."""
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
    """For each operation, the ranks that launched fewer than the others. A running job has small differences too."""
    launched: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, member in ranks.items():
        counts = member.get("collective_counts")
        for op, count in list(counts.items())[:64] if isinstance(counts, dict) else ():
            launched[as_text(op, 40)][rank] = as_integer(count) or 0
    for op, by_rank in launched.items():
        most = max(by_rank.values())
        late = sorted(rank for rank, count in by_rank.items() if count < most)
        if late:
            yield _behind_sentence(op, late, [by_rank[rank] for rank in late], most), late[0]


def _behind_sentence(op: str, late: list[int], counts: list[int], most: int) -> str:
    least = str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return f"{name_ranks(late)} launched {least} {op} operations, others {most}"


@dataclass(slots=True)
class _TextReport:
    """The state while reading the text form: section, communicator, and the current list of counts."""

    statements: list[Statement] = field(default_factory=list)
    gpus: int = 0
    sizes: dict[int, int] = field(default_factory=dict)  # number of ranks in a communicator, by group
    state: str = ""
    name: str = ""
    is_job: bool = False
    op: str = ""
    counts: list[tuple[int, int, list[int]]] = field(
        default_factory=list
    )  # number of operations, number of ranks that launched so many, and the ranks among these that are listed

    def add(self, sentence: str, rank: int | None = None) -> None:
        self.statements.append((sentence, rank if self.is_job else None))

    def read_line(self, line: str) -> None:
        if match := SECTION.match(line):
            self.begin_section(match)
        elif match := COUNTS.match(line):
            self.flush()
            self.op = match[1]
        elif self.op and (match := OPERATIONS.match(line)):
            ranks = [int(match[1].removeprefix("Rank "))] if match[1].startswith("Rank") else []
            self.counts.append((int(match[2] or 0), 1 if ranks else int(match[1]), ranks))
        elif match := MEMBER.match(line):
            self.add_member(int(match[1]), match[2])
        elif self.state in SILENT and (match := MISSING.match(line)):
            for rank in map(int, re.findall(r"\d{1,9}", match[1])):
                self.add_member(rank, None)
        elif match := REPORTED.match(line):
            self.add(f"rank {match[1]} reported {match[2]} ({self.name})", int(match[1]))
        elif match := PROCESS.match(line):
            if self.state in SILENT:
                self.add(f"{match[1].lower()} {SILENT[self.state]}")
        elif match := EVENT.match(line):
            self.add(f"{match[1].lower()} {SILENT['DEAD']}")
        elif not line:
            self.flush()
        else:
            self.read_table(line)

    def read_table(self, line: str) -> None:
        if match := GROUP.match(line):
            self.sizes[int(match[1])] = int(match[2])
        elif not self.sizes and (match := TOTALS.match(line)):
            self.gpus = int(match[1])

    def begin_section(self, match: re.Match[str]) -> None:
        self.flush()
        self.state = match[3]
        size = self.sizes.get(int(match[1])) if match[1] else None
        self.is_job = size is not None and size == self.gpus
        self.name = f"communicator 0x{match[2]}" + (f" of {size} ranks" if size else "") if match[2] else ""

    def add_member(self, rank: int, process: str | None) -> None:
        if self.op and self.counts:
            self.counts[-1][2].append(rank)
        elif self.state in SILENT:
            self.add(f"rank {rank} {SILENT[self.state]} ({', '.join(filter(None, (process, self.name)))})", rank)

    def flush(self) -> None:
        """End a list of counts, and add which ranks launched fewer operations than the others."""
        most = max((count for count, _, _ in self.counts), default=0)
        for count, size, ranks in self.counts:
            if count < most:
                names = name_ranks(ranks) if len(ranks) == size else f"{size} ranks"
                sentence = f"{names} launched {count} {self.op} operations, others {most} ({self.name})"
                self.add(sentence, ranks[0] if len(ranks) == size else None)
        self.op, self.counts = "", []


def _from_text(text: str) -> list[Statement]:
    if not re.search(r"^(Job summary|Communicators\.\.\.|RAS Monitor Mode|Group +Comms )|PEER_", text, re.MULTILINE):
        raise Unreadable("not a RAS report: it has neither a job summary nor communicators")
    report = _TextReport()
    for line in text.splitlines():
        report.read_line(line.rstrip()[:1000])
        if len(report.statements) >= MOST_LINES:
            break
    report.flush()
    return report.statements

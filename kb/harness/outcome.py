"""How one rank ended, how one arm ended, and what a failing rank printed. Plain data; `kb.verify.verdict` judges it.

rank.json + exit code + the guard's record -> RankOutcome;  all ranks + guard.json -> ArmOutcome
"""

from __future__ import annotations

import math
import re
import signal
from dataclasses import asdict, dataclass, field
from typing import Any

from kb.probe import Expect

COMPLETED, RAISED, SYMPTOM, HUNG, KILLED, EXITED, STOPPED, UNAVAILABLE = (
    "completed",
    "raised",
    "symptom",
    "hung",
    "killed",
    "exited",  # ended by itself without an error, by sys.exit or os._exit
    "stopped",  # ended by the guard after another rank had failed, or at the memory cap
    "unavailable",
)
WRITTEN = (COMPLETED, RAISED, SYMPTOM, EXITED, UNAVAILABLE)  # the outcomes that a rank may write about itself
CONNECTION_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|failed to (recv|send), (got|sent) 0 bytes", re.I
)
TERMINATED = "terminate called after throwing an instance of"  # C++ prints this before an abort
HANDLING = "During handling of the above exception, another exception occurred:"
REPORT_DELAY_S = 1.0  # on a busy machine the guard sees a process end up to this much later


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """One rank of an arm. Times are seconds since the epoch; signatures are searched for in `text`."""

    rank: int
    kind: str
    exit_code: int | None = None
    signal: str = ""
    type: str = ""
    message: str = ""
    traceback: str = ""
    log: str = ""
    stacks: str = ""
    waiting_in: str = ""
    ended: float | None = None
    max_rss_mib: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Everything that the rank printed and raised."""
        raised = f"{self.type}: {self.message}\n" if self.type else ""
        return f"{raised}{self.log}\n{self.traceback}"

    @property
    def failure_text(self) -> str:
        """What ended the rank, without earlier output: an exception and its direct causes, or what an abort printed.

        `SIGKILL` or `exit code 1` if nothing else is known.
        """
        if self.kind in (RAISED, SYMPTOM):
            chain = self.traceback.rpartition(HANDLING)[2].splitlines()
            causes = [line for line in chain if not line.startswith((" ", "Traceback"))]
            return "\n".join([f"{self.type}: {self.message}", *causes])
        if self.signal == "SIGABRT":
            return f"SIGABRT\n{self.log[max(0, self.log.rfind(TERMINATED)) :]}"
        return self.signal or f"exit code {self.exit_code}"

    @property
    def has_failed(self) -> bool:
        return self.kind in (RAISED, SYMPTOM, HUNG, KILLED, EXITED)


@dataclass(frozen=True, slots=True)
class ArmOutcome:
    """One arm. `kind` is the worst of its ranks; `failure` says why the *harness* failed, and is "" otherwise."""

    ranks: tuple[RankOutcome, ...] = ()
    has_reached: bool = False
    failure: str = ""
    duration_s: float = 0.0
    peak_mib: int = 0
    attempts: int = 1
    flight: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        if self.failure:
            return "harness-failure"
        kinds = [rank.kind for rank in self.ranks]
        for kind in (UNAVAILABLE, SYMPTOM, RAISED, KILLED, EXITED, HUNG, STOPPED):
            if kind in kinds:
                return kind
        return COMPLETED

    @property
    def has_completed(self) -> bool:
        return self.kind == COMPLETED

    @property
    def first_failure(self) -> RankOutcome | None:
        """The rank that failed first: a heuristic for the cause, and reported as such.

        Ranks are ordered by the clock, but a rank that lost a connection comes after the rank at the other end, because
        it sees the loss before the guard sees the other process end.
        """
        return next(iter(self.failures), None)

    @property
    def failures(self) -> tuple[RankOutcome, ...]:
        """The ranks that failed, in the order in which they failed."""
        return tuple(sorted((rank for rank in self.ranks if rank.has_failed), key=_failed_at))

    @property
    def first_failures(self) -> tuple[RankOutcome, ...]:
        """The ranks that may have failed first: several if the guard saw them end at about the same time."""
        return tuple(rank for rank in self.failures if _earliest(rank) <= _failed_at(self.failures[0]))

    def failure_as(self, expect: Expect) -> tuple[RankOutcome, str] | None:
        """The rank that failed as `expect` says, and the line that shows it; None if the arm ended otherwise.

        A rank that failed after another one counts only if `expect` allows it, since it usually reports consequences.
        """
        ranks = self.first_failures
        if expect.after and any(re.search(expect.after, rank.failure_text) for rank in ranks):
            ranks = self.failures
        for rank in ranks:
            evidence = _rank_evidence(rank, expect)
            if evidence is not None:
                return rank, evidence
        return None

    def to_json(self) -> dict[str, Any]:
        first = self.first_failure
        return {
            "outcome": self.kind,
            "failure": self.failure or None,
            "mechanism_reached": self.has_reached,
            "first_failing_rank": first.rank if first else None,
            "duration_s": self.duration_s,
            "peak_mib": self.peak_mib,
            "attempts": self.attempts,
            "flight_record": list(self.flight),
            "strays": list(self.strays),
            "ranks": [asdict(rank) for rank in self.ranks],
        }


def _failed_at(rank: RankOutcome) -> float:
    if rank.ended is None:
        return math.inf
    return rank.ended + (REPORT_DELAY_S if CONNECTION_LOST.search(rank.message) else 0.0)


def _earliest(rank: RankOutcome) -> float:
    """The earliest time at which the rank may have failed.

    If a rank left no result, only the guard saw it end, and on a busy machine it saw that late.
    """
    return _failed_at(rank) - (REPORT_DELAY_S if rank.kind in (KILLED, EXITED) else 0.0)


def _rank_evidence(rank: RankOutcome, expect: Expect) -> str | None:
    if expect.kind == KILLED:
        return f"rank {rank.rank} died of {rank.signal}" if rank.signal == expect.pattern else None
    is_abort = expect.kind == RAISED and rank.signal == "SIGABRT"  # an abort prints its text
    if rank.kind != expect.kind and not is_abort:
        return None
    match = re.search(expect.pattern, rank.stacks if expect.kind == HUNG else rank.failure_text)
    return line_around(match) if match else None


def line_around(match: re.Match[str]) -> str:
    """The whole line that contains a match, so that evidence reads as it was printed."""
    start = match.string.rfind("\n", 0, match.start()) + 1
    end = match.string.find("\n", match.end())
    return match.string[start : end if end >= 0 else None].strip()[:500]


def rank_outcome(
    rank: int,
    result: dict[str, Any] | None,
    exit_code: int | None,
    ending: str,
    log: str,
    stacks: str,
    waiting_in: str,
    gone_at: float | None = None,
    facts: dict[str, Any] | None = None,
) -> RankOutcome:
    """Join what the rank wrote with how its process ended.

    `exit_code` is None if the guard had to end it; `gone_at` is when the guard saw that its process was gone.
    """
    result = result or {}
    kind = str(result.get("outcome", ""))
    if kind not in WRITTEN or (kind == COMPLETED and exit_code not in (0, None)):
        kind = ""  # not one of ours, or the job completed and the process then died: how it died is the outcome
    if not kind:
        if exit_code is None:
            kind = HUNG if ending == "deadline" else STOPPED
        else:
            kind = KILLED if exit_code < 0 else EXITED
    return RankOutcome(
        rank=rank,
        kind=kind,
        exit_code=exit_code,
        signal=_signal_name(exit_code),
        type=str(result.get("type", "")),
        message=str(result.get("message", "")),
        traceback=str(result.get("traceback", "")),
        log=log,
        stacks=stacks,
        waiting_in=waiting_in,
        ended=gone_at if kind == KILLED else _number(result.get("ended"), gone_at),
        max_rss_mib=_number(result.get("max_rss_mib"), None),
        facts=facts or {},
    )


def _number(value: Any, default: Any) -> Any:
    """`value` if it is a number, else `default`: a rank may write anything into its result."""
    return value if isinstance(value, int | float) else default


def _signal_name(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return ""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"

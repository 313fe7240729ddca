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
    "exited",  # ended by itself without a result, for instance by os._exit
    "stopped",  # ended by the guard after another rank had failed, or at the memory cap
    "unavailable",
)
CONNECTION_LOST = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|failed to (recv|send), (got|sent) 0 bytes", re.I
)
REPORT_DELAY_S = 1.0  # on a busy machine the guard sees a process end up to this much later


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """One rank of an arm. Times are seconds since the epoch; signatures are searched in `text`."""

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
        raised = f"{self.type}: {self.message}\n" if self.type else ""
        return f"{raised}{self.log}\n{self.traceback}"

    @property
    def has_failed(self) -> bool:
        return self.kind in (RAISED, SYMPTOM, HUNG, KILLED, EXITED)


@dataclass(frozen=True, slots=True)
class ArmOutcome:
    """One arm. `kind` is the worst of its ranks; `failure` says why the *harness* failed, else it is empty."""

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

        By the clock, but a rank that lost a connection comes after the rank at its other end: that end sees the loss
        before the guard sees the process end.
        """
        failed = [rank for rank in self.ranks if rank.has_failed]
        return min(failed, key=_failed_at, default=None)

    def evidence_for(self, expect: Expect) -> str | None:
        """The text that shows the arm ended as `expect` says, or None when it did not."""
        if expect.kind == COMPLETED:
            return "every rank completed" if self.has_completed else None
        for rank in self.ranks:
            evidence = _rank_evidence(rank, expect)
            if evidence is not None:
                return evidence
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


def _rank_evidence(rank: RankOutcome, expect: Expect) -> str | None:
    if expect.kind == KILLED:
        return f"rank {rank.rank} died of {rank.signal}" if rank.signal == expect.pattern else None
    kinds = {
        RAISED: (RAISED, KILLED),  # an abort prints its text and dies of SIGABRT
        SYMPTOM: (SYMPTOM,),
        HUNG: (HUNG,),
    }[expect.kind]
    if rank.kind not in kinds:
        return None
    match = re.search(expect.pattern, rank.stacks if expect.kind == HUNG else rank.text)
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

    `exit_code` is None when the guard had to end it; `gone_at` is when the guard saw its process gone.
    """
    result = result or {}
    kind = str(result.get("outcome", ""))
    if kind == COMPLETED and exit_code not in (0, None):
        kind = ""  # it completed its job and then died: how it died is the outcome
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
        ended=result.get("ended", gone_at),
        max_rss_mib=result.get("max_rss_mib"),
        facts=facts or {},
    )


def _signal_name(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return ""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"

"""What of a report may leave a node: the verdict, what it stands on, the kind of machine; nothing that names anybody.

No logs, tracebacks, variables, hosts, users or files of the reader. The model is strict and every length is bounded,
so that a report is at most `MOST_BYTES` of JSON: who receives one takes it for data, and refuses what is none of it.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from kb.errors import UsageError
from kb.redaction.redactor import Redactor, local_redactor
from kb.verify.verdict import Verdict

MOST_BYTES = 64 << 10  # of any report as JSON in UTF-8; tests/kb/test_shared_report.py holds the lengths below to it
LINE, WORD = 500, 64  # characters
MOST_VARIANTS, MOST_EVIDENCE, MOST_GPUS = 8, 6, 64

# Beside control characters: what breaks a line or turns the direction of what follows.
UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]+")
PART = r"(?:[\w.+@%=,~-]|<[a-z]+-\d+>)+"
FILE = re.compile(rf"(?<![\w.:/~>-])~?/(?!(?:dev|proc|sys|etc)/){PART}(?:/{PART})+/?")
LIBRARY_SOURCE = re.compile(r"[^/]+\.(?:cc|cpp|cu|h|hpp)$")  # as the errors of torch, gloo and NCCL name them

SHOWN = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]*$"
Line = Annotated[str, Field(max_length=LINE, pattern=SHOWN)]
Word = Annotated[str, Field(max_length=WORD, pattern=SHOWN)]
EntryId = Annotated[str, Field(max_length=100, pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$", description="sha256; empty when there is no such file.")]
Seconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
Fidelity = Literal["hardware", "cpu", "stand-in", "model", "check"]
Ending = Literal[
    "completed", "raised", "symptom", "hung", "killed", "exited", "stopped", "unavailable", "harness-failure"
]


def _utc(moment: datetime.datetime) -> datetime.datetime:
    try:
        return moment.astimezone(datetime.UTC)
    except OverflowError:
        raise ValueError("no such moment in UTC") from None


Moment = Annotated[AwareDatetime, AfterValidator(_utc)]


class Shape(BaseModel):
    """A part of a shared report: no other members, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SharedFinding(Shape):
    """What the check said of the machine or of the file that it was given."""

    state: Literal["exposed", "clear", "unknown"]
    evidence: Annotated[tuple[Line, ...], Field(max_length=MOST_EVIDENCE)] = ()
    advice: Line | None = None


class SharedArm(Shape):
    """How one arm ended, and how it was expected to."""

    outcome: Ending
    expected: Word
    because: Line = ""
    first_failing_rank: Annotated[int, Field(ge=0, le=10**7)] | None = None
    duration_s: Seconds = 0.0


class SharedArms(Shape):
    """The last pair."""

    control: SharedArm
    treatment: SharedArm


class SharedVariant(Shape):
    """The incident in another form, run besides."""

    experiment: Word | None
    verdict: Verdict
    reason: Line = ""


class Machine(Shape):
    """The kind of machine and of the training environment: versions as they are printed; null is unknown."""

    gpus: Annotated[tuple[Word, ...], Field(max_length=MOST_GPUS, description="One name for each GPU.")] = ()
    driver: Word | None = None
    torch: Word | None = None
    cuda: Word | None = None
    nccl: Word | None = None
    kernel: Word | None = None
    os: Word | None = None
    python: Word | None = None


class SharedReport(Shape):
    """One verification. `fidelity` belongs to the verdict: one from a CPU says nothing of NCCL."""

    id: EntryId
    title: Line = ""
    verdict: Verdict
    reason: Line = ""
    evidence: Line = Field("", description="The line that the verdict stands on.")
    experiment: Word | None = None
    fidelity: Fidelity
    entry_digest: Digest
    probe_digest: Digest = ""
    started_at: Moment
    duration_s: Seconds
    kb_version: Annotated[str, Field(max_length=40, pattern=r"^[0-9A-Za-z.+!-]+$")]
    check: SharedFinding | None = None
    arms: SharedArms | None = None
    variants: Annotated[tuple[SharedVariant, ...], Field(max_length=MOST_VARIANTS)] = ()
    machine: Machine = Machine()
    next_step: Line = ""


def shared(document: Mapping[str, Any]) -> SharedReport:
    """What may leave of a report (`Report.to_json()`), or of a shared one: that stays as it is when it is clean.

    Raises `UsageError` for what is no report.
    """
    told = _Told(local_redactor())
    try:
        told.report(document)  # a name that the end gives away is to be hidden at the beginning too
        return SharedReport.model_validate(told.report(document))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"this is no report of kb: {error}", "`kb verify ID --json` prints one") from error


def one_line(text: str, most: int = LINE) -> str:
    """What anybody wrote as one line that may be shown: without names, secrets, files and unseen characters."""
    return _Told(local_redactor()).line(text, most)


def gpu_name(text: str) -> str:
    """The name of a GPU likewise: a machine that is called h100 does not hide that its GPUs are, too."""
    return _Told(Redactor()).line(text, WORD)


def kind_of_machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The machine of a report from what `kb env` says of it: kinds and versions, nothing that names it."""
    host, python = environment.get("host") or {}, environment.get("python") or {}
    torch, packages = python.get("torch") or {}, python.get("packages") or {}
    gpus: Sequence[Mapping[str, Any]] = environment.get("gpus") or ()
    return {
        "gpus": [gpu["name"] for gpu in gpus],
        "driver": next((gpu["driver_version"] for gpu in gpus), None),
        "torch": torch.get("version") or packages.get("torch"),
        "cuda": torch.get("cuda"),
        "nccl": next((version for name, version in sorted(packages.items()) if name.startswith("nvidia-nccl")), None),
        "kernel": host.get("kernel"),
        "os": host.get("os"),
        "python": python.get("version"),
    }


class _Told:
    """Makes the parts of a report: one redactor, so that equal names are equal placeholders in all of them."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor

    def report(self, document: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "id": document["id"],
            "title": self.line(document.get("title")),
            "verdict": Verdict(document["verdict"]),
            "reason": self.line(document.get("reason")),
            "evidence": self.line(document.get("evidence")),
            "experiment": self.word(document.get("experiment")),
            "fidelity": document["fidelity"],
            "entry_digest": document["entry_digest"],
            "probe_digest": document["probe_digest"],
            "started_at": datetime.datetime.fromisoformat(document["started_at"]),
            "duration_s": float(document["duration_s"]),
            "kb_version": document["kb_version"],
            "check": self.check(document.get("check")),
            "arms": self.arms(document.get("arms")),
            "variants": self.variants(document.get("variants") or ()),
            "machine": self.machine(document.get("machine") or kind_of_machine(document.get("environment") or {})),
            "next_step": self.line(document.get("next_step")),
        }

    def line(self, text: object, most: int = LINE) -> str:
        """One line without names, files and unseen characters. Cut at last: half a secret would not be known as one."""
        plain = " ".join(UNSEEN.sub(" ", str(text or "")[: 8 * most]).split())
        clean = FILE.sub(_hide, self._redactor.text(plain))
        return clean if len(clean) <= most else f"{clean[: most - 1]}…"

    def word(self, text: object) -> str | None:
        return self.line(text, WORD) or None

    def check(self, found: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if not found:
            return None
        evidence = tuple(map(self.line, found.get("evidence") or ()))[:MOST_EVIDENCE]
        return {"state": found["state"], "evidence": evidence, "advice": self.line(found.get("advice")) or None}

    def arms(self, found: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if not found or not all("outcome" in found.get(name, {}) for name in ("control", "treatment")):
            return None
        return {name: self.arm(found[name]) for name in ("control", "treatment")}

    def arm(self, arm: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "outcome": arm["outcome"],
            "expected": self.word(arm.get("expected")) or "",
            "because": self.line(arm.get("because")),
            "first_failing_rank": arm.get("first_failing_rank"),
            "duration_s": float(arm.get("duration_s") or 0.0),
        }

    def variants(self, found: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        return tuple(
            {
                "experiment": self.word(one.get("experiment")),
                "verdict": Verdict(one["verdict"]),
                "reason": self.line(one.get("reason")),
            }
            for one in found[:MOST_VARIANTS]
        )

    def machine(self, found: Mapping[str, Any]) -> dict[str, Any]:
        kinds = {name: self.word(found.get(name)) for name in Machine.model_fields if name != "gpus"}
        return {**kinds, "gpus": tuple(map(gpu_name, found.get("gpus") or ()))[:MOST_GPUS]}


def _hide(match: re.Match[str]) -> str:
    """A file of the reader; the name of a library's own source stays, since errors are known by it."""
    source = LIBRARY_SOURCE.search(match.group())
    return f"<path>/{source.group()}" if source else "<path>"

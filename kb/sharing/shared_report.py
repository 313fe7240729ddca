"""The part of a report that may leave a node: the verdict, its evidence and the kind of machine, nothing identifying.

It has no logs, tracebacks, variables, hosts, users or files of the reader. The model is strict and every length is
bounded, so that a report has at most `MAX_BYTES` of JSON. A service refuses input that does not fit the model.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from kb.errors import UsageError
from kb.printable import HAZARDS
from kb.redaction.redactor import Redactor, local_redactor
from kb.sharing.hardware_names import gpu_name, version
from kb.verify.verdict import Verdict

MAX_BYTES = 64 << 10  # of any report as JSON in UTF-8; a test checks that the lengths below respect it
MAX_LINE, MAX_WORD = 500, 64  # characters
VERSIONS = ("driver", "torch", "cuda", "nccl", "python")
MAX_VARIANTS, MAX_EVIDENCE, MAX_GPUS = 8, 6, 64

INVISIBLE = re.compile(rf"[\t\n{HAZARDS}]+")
PATH_PART = r"(?:[\w.+@%=,~-]|<[a-z]+-\d+>)+"
FILE_PATH = re.compile(rf"(?<![\w.:/~>-])~?/(?!(?:dev|proc|sys|etc)/){PATH_PART}(?:/{PATH_PART})+/?")
LIBRARY_SOURCE = re.compile(r"[^/]+\.(?:cc|cpp|cu|h|hpp)$")  # as errors of torch, gloo and NCCL name them

PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]*$"
Line = Annotated[str, Field(max_length=MAX_LINE, pattern=PRINTABLE)]
Word = Annotated[str, Field(max_length=MAX_WORD, pattern=PRINTABLE)]
EntryId = Annotated[str, Field(max_length=100, pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$", description="sha256; empty when there is no such file.")]
Seconds = Annotated[float, Field(ge=0, le=1e7, allow_inf_nan=False)]
Fidelity = Literal["hardware", "cpu", "stand-in", "model", "check"]
Outcome = Literal[
    "completed", "raised", "symptom", "hung", "killed", "exited", "stopped", "unavailable", "harness-failure"
]


def _to_utc(time: datetime.datetime) -> datetime.datetime:
    try:
        return time.astimezone(datetime.UTC)
    except OverflowError:
        raise ValueError("this time does not exist in UTC") from None


UtcTime = Annotated[AwareDatetime, AfterValidator(_to_utc)]


class StrictModel(BaseModel):
    """The base of the models below: no other members, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SharedFinding(StrictModel):
    """The result of a check of the machine or of a file."""

    state: Literal["exposed", "clear", "unknown"]
    evidence: Annotated[tuple[Line, ...], Field(max_length=MAX_EVIDENCE)] = ()
    advice: Line | None = None


class SharedArm(StrictModel):
    """How one arm ended, and how it was expected to end."""

    outcome: Outcome
    expected: Word
    because: Line = ""
    first_failing_rank: Annotated[int, Field(ge=0, le=10**7)] | None = None
    duration_s: Seconds = 0.0


class SharedArms(StrictModel):
    """The last pair of arms."""

    control: SharedArm
    treatment: SharedArm


class SharedVariant(StrictModel):
    """The incident in another form, run in addition."""

    experiment: Word | None
    verdict: Verdict
    reason: Line = ""


class Machine(StrictModel):
    """The kind of machine and training environment: versions as they are printed; null for unknown."""

    gpus: Annotated[tuple[Word, ...], Field(max_length=MAX_GPUS, description="One name for each GPU.")] = ()
    driver: Word | None = None
    torch: Word | None = None
    cuda: Word | None = None
    nccl: Word | None = None
    kernel: Word | None = None
    os: Word | None = None
    python: Word | None = None


class SharedReport(StrictModel):
    """One verification. `fidelity` belongs to the verdict: a verdict from a CPU says nothing about NCCL."""

    id: EntryId
    title: Line = ""
    verdict: Verdict
    reason: Line = ""
    evidence: Line = Field("", description="The line that the verdict is based on.")
    experiment: Word | None = None
    fidelity: Fidelity
    entry_digest: Digest
    probe_digest: Digest = ""
    started_at: UtcTime
    duration_s: Seconds
    kb_version: Annotated[str, Field(max_length=40, pattern=r"^[0-9A-Za-z.+!-]+$")]
    check: SharedFinding | None = None
    arms: SharedArms | None = None
    variants: Annotated[tuple[SharedVariant, ...], Field(max_length=MAX_VARIANTS)] = ()
    machine: Machine = Machine()
    next_step: Line = ""


def to_shared_report(document: Mapping[str, Any]) -> SharedReport:
    """The shareable part of a report (`Report.to_json()`). A shared report without anything to redact is unchanged.

    Raises `UsageError` for an invalid report.
    """
    redaction = _Redaction(local_redactor())
    try:
        redaction.report(document)  # first pass: a name that the end reveals is then redacted at the beginning too
        return SharedReport.model_validate(redaction.report(document))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"this is not a report of kb: {error}", "`kb verify ID --json` prints one") from error


def redact_line(text: str, length: int = MAX_LINE) -> str:
    """Any text as one printable line without names, secrets or file paths."""
    return _Redaction(local_redactor()).line(text, length)


def machine_kind(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The `machine` of a shared report, from a machine snapshot: kinds and versions, nothing that identifies it."""
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


class _Redaction:
    """Redacts the parts of a report with one redactor, so that equal names get equal placeholders in all of them."""

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
            "machine": self.machine(document.get("machine") or machine_kind(document.get("environment") or {})),
            "next_step": self.line(document.get("next_step")),
        }

    def line(self, text: object, length: int = MAX_LINE) -> str:
        """One redacted line. It is cut last, since the redactor would not recognize half a secret."""
        printable = " ".join(INVISIBLE.sub(" ", str(text or "")[: 8 * length]).split())
        redacted = FILE_PATH.sub(_path_placeholder, self._redactor.text(printable))
        return redacted if len(redacted) <= length else f"{redacted[: length - 1]}…"

    def word(self, text: object) -> str | None:
        return self.line(text, MAX_WORD) or None

    def check(self, check: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if not check:
            return None
        evidence = tuple(map(self.line, check.get("evidence") or ()))[:MAX_EVIDENCE]
        return {"state": check["state"], "evidence": evidence, "advice": self.line(check.get("advice")) or None}

    def arms(self, arms: Mapping[str, Any] | None) -> dict[str, Any] | None:
        if not arms or not all("outcome" in arms.get(name, {}) for name in ("control", "treatment")):
            return None
        return {name: self.arm(arms[name]) for name in ("control", "treatment")}

    def arm(self, arm: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "outcome": arm["outcome"],
            "expected": self.word(arm.get("expected")) or "",
            "because": self.line(arm.get("because")),
            "first_failing_rank": arm.get("first_failing_rank"),
            "duration_s": float(arm.get("duration_s") or 0.0),
        }

    def variants(self, variants: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        return tuple(
            {
                "experiment": self.word(variant.get("experiment")),
                "verdict": Verdict(variant["verdict"]),
                "reason": self.line(variant.get("reason")),
            }
            for variant in variants[:MAX_VARIANTS]
        )

    def machine(self, machine: Mapping[str, Any]) -> dict[str, Any]:
        words = {name: self.word(machine.get(name)) for name in ("kernel", "os")}
        versions = {name: version(str(machine.get(name) or "")) or None for name in VERSIONS}
        gpus = tuple(gpu_name(str(name)) for name in (machine.get("gpus") or ())[:MAX_GPUS])
        return {**words, **versions, "gpus": gpus}


def _path_placeholder(match: re.Match[str]) -> str:
    """The placeholder of a path. The file name of a library's source stays, since errors are identified by it."""
    source = LIBRARY_SOURCE.search(match.group())
    return f"<path>/{source.group()}" if source else "<path>"

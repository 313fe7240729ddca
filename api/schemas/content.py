"""Search results and entries, as the CLI prints them under `--json`, described for OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, WrapSerializer

from kb.content.entry import FrontMatter
from kb.search.decision import Kind
from kb.search.results import Hit, asked

ID = "checkpoint-save-allgather-timeout"
TITLE = "All-gather times out while a sharded model is saved"
SUMMARY: dict[str, Any] = {
    "id": ID,
    "title": TITLE,
    "title_zh": "保存分片模型的检查点时 all-gather 超时",
    "status": "confirmed",
    "severity": "high",
    "area": "checkpoint",
    "tags": ["collectives", "checkpoint", "fsdp"],
    "frameworks": ["torch"],
    "origin": "built-in",
    "probe": "checkpoint_save_allgather_timeout",
    "hardware": "GPU arms: never run on hardware",
    "releases": {"verified": ["2.5.1", "2.13.0"], "not-applicable": ["2.2.2"]},
    "cause": "A collective inside the save is not entered by every rank.",
}
ENTRY: dict[str, Any] = {
    **{key: value for key, value in SUMMARY.items() if key != "frameworks"},
    "libraries": [
        {
            "experiment": "deepspeed",
            "verdict": "verified",
            "packages": {"torch": "2.7.1", "deepspeed": "0.17.1"},
            "day": "2026-11-22",
        }
    ],
    "symptoms": ["hang"],
    "phases": ["save"],
    "components": ["checkpoint", "nccl"],
    "aliases": ["ALLGATHER timeout save"],
    "signatures": [
        {
            "pattern": r"Timed out waiting \d+ms for (recv|send) operation to complete",
            "role": "cascade",
            "source": "gloo",
            "sample": "Timed out waiting 1800000ms for send operation to complete",
            "printed_by": {"torch": ">=2.1"},
            "fix": 1,
        }
    ],
    "not_signatures": ["To avoid data inconsistency, we are taking the entire process down."],
    "applies_to": {"torch": ">=1.12"},
    "fixed_in": {},
    "causes": ["connection-reset-by-peer"],
    "caused_by": [],
    "masked_by": [],
    "references": [
        {
            "url": "https://github.com/huggingface/accelerate/issues/2000",
            "shows": "save_state on the main process only hangs",
            "grade": "read in thread",
        }
    ],
    "probe_waiver": None,
    "replaces": None,
    "reviewed": "2026-03-01",
    "checked": ["negatives", "patterns"],
    "sections": {"Symptom": "…", "Root cause": "…", "Fix": "…"},
    "digest": "5f0c…",
}
WHY: dict[str, Any] = {
    "concepts": [
        {"word": "ALLGATHER", "term": "allgath", "idf": 2.1, "weight": 1.0, "bm25": 8.5, "score": 8.5},
        {"word": "timeout", "term": "time out", "idf": 1.5, "weight": 0.5, "bm25": 4.0, "score": 2.0},
    ],
    "coverage": 0.8,
    "agreement": 1.1,
    "signature": 0.0,
}
HIT: dict[str, Any] = {
    **{key: value for key, value in SUMMARY.items() if key not in ("hardware", "releases")},
    "cause_zh": "保存过程中的集合通信并非所有 rank 都进入。",
    "score": 8.4,
    "matched": ["ALLGATHER", "timeout"],
    "signature": "",
    "snippet": "ALLGATHER timeout save",
    "why": WHY,
}


# Without optional members. A lambda, because the annotation of a function would become the schema of the hit.
AskedHit = Annotated[Hit, WrapSerializer(lambda hit, dump: asked(dump(hit)))]


class ChoiceDocument(BaseModel):
    """A text of the entry `id`: a line and who prints it, or, with an empty `printed_by`, an observation."""

    model_config = ConfigDict(from_attributes=True)
    id: str
    text: str
    printed_by: str


class QuestionDocument(BaseModel):
    """What to ask a person, and the answers that speak for one entry or another."""

    model_config = ConfigDict(from_attributes=True)
    text: str
    choices: tuple[ChoiceDocument, ...]


ANSWER: dict[str, Any] = {
    "did_you_mean": None,
    "kind": "answer",
    "probability": 0.97,
    "answered": True,
    "out_of_scope": [],
    "triage": [],
    "ask": [],
}


class OutOfScope(BaseModel):
    """A subject that kb does not cover, and where to look."""

    subject: str
    see: str


class OutcomeDocument(BaseModel):
    """What may be seen, and the entries that it points to; none if kb has no entry about it."""

    seen: str
    points_to: tuple[str, ...]


class ObservationDocument(BaseModel):
    """Something to look at: the command that shows it, where to run it, and what each outcome points to."""

    ask: str
    command: str
    where: str
    outcomes: tuple[OutcomeDocument, ...]


class SearchResult(BaseModel):
    """Hits, best first. `did_you_mean` is the query with its unknown words respelled.

    A hit has `why` only on request, `verified_on` only if its fix was verified on hardware like that in the question,
    and never `applicability`, since the versions here are not the reader's.

    `kind` is `answer` when the first hit is about the question; `related` when no entry is, and the hits are near
    (`difference` says how each differs); `unknown` when nothing is near. `probability` is the probability that the
    first hit is an answer, `answered` whether `kind` is `answer`. If it is not: say that kb does not know it, cite no
    hit, and ask the person what `ask` has (lines and observations that tell the hits apart) or what `triage` has
    (observations that narrow it, each with its command and what an outcome points to). `out_of_scope` names the subject
    of a question that kb does not cover.
    """

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"query": "ALLGATHER timeout save", "hits": [HIT], **ANSWER}]}
    )
    query: str
    hits: tuple[AskedHit, ...]
    did_you_mean: str | None
    kind: Kind
    probability: float
    answered: bool
    out_of_scope: tuple[OutOfScope, ...]
    triage: tuple[ObservationDocument, ...]
    ask: tuple[QuestionDocument, ...]


class Summary(BaseModel):
    """An entry in a list."""

    id: str
    title: str
    title_zh: str
    status: str
    severity: str
    area: str | None
    tags: list[str]
    frameworks: list[str]
    origin: str
    probe: str | None
    hardware: str | None
    releases: dict[str, list[str]]
    cause: str


class EntryList(BaseModel):
    """Entries by id; `next` is the cursor to the rest, null at the end."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"entries": [SUMMARY], "next": None}]})
    entries: list[Summary]
    next: str | None


class LibraryRecord(BaseModel):
    """The result of one experiment in real libraries, with the releases of torch and of the libraries."""

    experiment: str
    verdict: str
    packages: dict[str, str]
    day: str


class EntryDocument(FrontMatter):
    """An entry: its front matter, its sections as Markdown by heading, and the sha256 of its file.

    `hardware` says what is known about its GPU arms; null when it has none. `releases` maps each verdict of its probe
    to the releases of torch that had it, on CPU; `libraries` are its experiments in real libraries, with releases.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [ENTRY]})
    cause: str
    sections: dict[str, str]
    origin: str
    digest: str
    hardware: str | None
    releases: dict[str, list[str]]
    libraries: list[LibraryRecord]

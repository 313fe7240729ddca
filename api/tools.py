"""What a language model can ask for: the functions behind the MCP tools, which read and change nothing.

What their docstrings and the descriptions of their parameters say is all that a model knows of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeVar

from pydantic import Field

from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.scan import scan
from kb.diagnose.source import Stream
from kb.errors import IndexUnavailable, KbError, UsageError
from kb.filter import Filter
from kb.hit import Answer
from kb.search import MOST_HITS

from .content import Content
from .diagnosis_schemas import DiagnosisDocument
from .environment import CheckAnswer, EnvironmentDocument, judge
from .machine import Machine
from .problems import UNAVAILABLE, log
from .questions import Text, Values
from .schemas import EntryDocument, SearchResult

MOST_TEXT = 2 << 20  # bytes of a log: what a model can hold is far less
LONGEST_ECHO = 1000  # characters of a question that its answer repeats
CHINESE = "中文"
PACKAGES_HINT = 'send packages, for instance {"torch": "2.4.0", "nccl": "2.20.5", "transformers": "4.44.0"}'

Found = TypeVar("Found")
Query = Annotated[
    Text,
    Field(
        description="An error line as it was printed, or the symptom in a few words; English or Chinese; no operators."
    ),
]
Limit = Annotated[int, Field(ge=1, le=MOST_HITS, description="At most this many hits.")]
Tags = Annotated[Values, Field(description="Only incidents with all of these tags, such as fsdp.")]
Frameworks = Annotated[
    Values, Field(description="Only incidents about one of these packages, such as torch, deepspeed.")
]
Statuses = Annotated[
    Values, Field(description="Only incidents of one of these statuses: confirmed, reported, disputed.")
]
EntryId = Annotated[str, Field(max_length=200, description="The id of an incident, as the other tools give it.")]
Language = Annotated[
    Literal["en", "zh"] | None, Field(description="Only the sections in English, or the one in Chinese; default: all.")
]
Log = Annotated[str, Field(description="The log as it was printed, all ranks together if there are more; up to 2 MB.")]
Name = Annotated[str, Field(max_length=100)]
Packages = Annotated[
    dict[Name, Name | None] | None,
    Field(
        max_length=2000,
        description="Versions by package, as `pip list` prints them; also python, cuda and nccl. Null is a version "
        "that cannot be read.",
    ),
]
GpuName = Annotated[str, Field(max_length=200, description="The model of the GPUs, such as H100; default: not known.")]


class Ear(Protocol):
    """Hears what was asked, so that a service counts it."""

    def searched(self, text: str, found: Answer) -> None:
        """`text` is "" for a question with filters, which may have no answer for their sake."""

    def diagnosed(self, found: Diagnosis) -> None: ...


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools over one content, which may still be on its way. `machine` only where that is the caller's own."""

    content: Callable[[], Awaitable[Content]]
    machine: Machine | None = None
    ear: Ear | None = None

    async def search_incidents(
        self,
        query: Query,
        limit: Limit = 5,
        tags: Tags = None,
        frameworks: Frameworks = None,
        statuses: Statuses = None,
    ) -> SearchResult:
        """Find known incidents of distributed GPU training (hangs, NCCL errors, out of memory, checkpoints, launch).

        Use it for an error line or a symptom in words; for a whole log use diagnose_log. Hits come best first, each
        with its cause in one sentence and the words that matched. `answered` is false when even the best has but some
        words in common with the question: then say that nothing is known of it. Read an incident with get_incident
        before you advise a fix, and cite its id and the section you rely on.
        """
        content, only = await self.content(), Filter.of(tags, frameworks, statuses)
        found = await content.search(query, limit, only)
        if self.ear:
            self.ear.searched("" if only else query, found)
        return SearchResult(
            query=query[:LONGEST_ECHO],
            hits=found.hits,
            did_you_mean=found.did_you_mean or None,
            answered=found.answered,
        )

    async def get_incident(self, id: EntryId, language: Language = None) -> EntryDocument:  # noqa: A002  # its name there
        """Read one incident: symptom, cause, how to tell it from look-alikes, fix with its cost, known cases.

        Every claim ends with its grade: [probe] an experiment shows it, [source N] and [thread N] it was read in
        reference N, [claimed N] somebody asserts it and nobody checked, [inferred] a conclusion. Keep the grade when
        you pass a claim on, and cite it as the id and the section, for instance `address-in-use, Fix`.
        """
        content = await self.content()
        entry = content.catalog.get(id)
        document = {**entry.to_json(), "hardware": content.hardware[entry.id] or None}
        document["sections"] = _in(language, document["sections"])
        return EntryDocument.model_validate(document, strict=False)

    async def diagnose_log(self, text: Log) -> DiagnosisDocument:
        """Find what made a job fail, from its log: the cause before what followed from it, with the lines that say so.

        Send the log unchanged: times, ranks and order matter. Findings come best first with a confidence; `next_step`
        is what to ask or look at when they cannot be told apart; `unexplained` means that no incident fits, and then
        say so. Nothing of the log is kept. Read the finding with get_incident, and cite its id and section.
        """
        data = text.encode(errors="replace")
        if not data:
            raise UsageError("the text is empty", "send the log as it was printed")
        if len(data) > MOST_TEXT:
            message = f"the text is {len(data) / (1 << 20):.1f} MB, and {MOST_TEXT >> 20} MB is the most"
            raise UsageError(message, "send its end, or run `kb diagnose FILE`, which reads files of any size")
        content = await self.content()
        async with content.diagnosing:
            found = await asyncio.get_running_loop().run_in_executor(
                content.scanning, scan, [Stream("body", iter([data]))], content.matcher
            )
        diagnosis = await content.diagnose(found)
        if self.ear:
            self.ear.diagnosed(diagnosis)
        return DiagnosisDocument.model_validate(diagnosis.to_json())

    async def check_environment(self, packages: Packages = None, gpu: GpuName = "") -> EnvironmentDocument:
        """Say which known incidents can happen with these versions, which cannot, and why.

        Use it before a job runs, before an upgrade, or to see whether a candidate applies at all. Where the server
        runs on the person's own machine, packages may be left out: then it looks at that machine. Everywhere else they
        are needed. What only a version excludes has state does-not-apply; unknown means that a version is missing.
        """
        content = await self.content()
        if packages is not None:
            return judge(content.catalog.current(), packages, gpu, content.hardware)
        if self.machine is None:
            raise UsageError("this server does not run on your machine, and cannot look at it", PACKAGES_HINT)
        machine = self.machine
        versions = await self.on_machine(machine.versions)
        gpu = gpu or await self.on_machine(machine.gpu)
        answers = await self.on_machine(lambda: machine.checks(content.catalog))
        checks = tuple(CheckAnswer.model_validate(one) for one in answers if one["state"] != "unknown")
        return judge(content.catalog.current(), versions, gpu, content.hardware).model_copy(update={"checks": checks})

    def told(self, error: KbError) -> str:
        """An error for a model. To strangers only what they can mend: the rest may name files of this machine."""
        if self.machine is None and not isinstance(error, UsageError | IndexUnavailable):
            log.error("%s", error.message)
            return UNAVAILABLE
        return f"{error.message}; hint: {error.hint}" if error.hint else error.message

    async def on_machine(self, work: Callable[[], Found]) -> Found:
        """Do it in a thread. Who stops waiting, as a client that leaves, stops the work."""
        assert self.machine is not None
        try:
            return await asyncio.to_thread(work)
        except asyncio.CancelledError:
            self.machine.stop()
            raise


def _in(language: Literal["en", "zh"] | None, sections: Mapping[str, str]) -> dict[str, str]:
    return {
        name: text for name, text in sections.items() if language is None or (name == CHINESE) == (language == "zh")
    }

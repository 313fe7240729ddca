"""The functions behind the MCP tools. They do not change anything.

A model knows about them only what their docstrings and the descriptions of their arguments say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from anyio import CancelScope

from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.inputs.sources import Stream
from kb.errors import IndexUnavailable, KbError, UsageError
from kb.search.results import Answer
from kb.store.reports import VerdictCount

from ..log import log
from ..requests.problems import UNAVAILABLE
from ..requests.questions import SearchQuestion
from ..state.content import Content
from .answers import Document, diagnosis_answer, environment_answer, incident, search_answer
from .arguments import (
    Areas,
    EntryId,
    FindingLimit,
    Frameworks,
    GpuName,
    IncidentLimit,
    Language,
    Limit,
    Log,
    Packages,
    Query,
    ReaderGpu,
    ReaderTorch,
    Sections,
    Statuses,
    Tags,
)
from .exposure import CheckAnswer, judge
from .machine import Machine

MOST_TEXT = 2 << 20  # bytes of a log, far more than a model can hold
STOP_EVERY_S = 0.1
PACKAGES_HINT = 'send packages, for instance {"torch": "2.4.0", "nccl": "2.20.5", "transformers": "4.44.0"}'

Result = TypeVar("Result")


class Recorder(Protocol):
    """Counts questions and gaps for a service."""

    def record_search(self, text: str, answer: Answer) -> None:
        """Count a question. `text` is "" for a question with filters, which may be the reason for a missing answer."""

    def record_diagnosis(self, diagnosis: Diagnosis) -> None: ...


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools over one content, which may still be loading.

    `machine` is set only if it is the caller's own, and `turn` allows one call at a time on it. `verdict_counts` are
    what shared reports say about entries.
    """

    content: Callable[[], Awaitable[Content]]
    verdict_counts: Callable[[], Sequence[VerdictCount]] = tuple
    machine: Machine | None = None
    recorder: Recorder | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def search_incidents(
        self,
        query: Query,
        limit: Limit = 5,
        tags: Tags = None,
        frameworks: Frameworks = None,
        statuses: Statuses = None,
        areas: Areas = None,
        gpu: ReaderGpu = "",
        torch: ReaderTorch = "",
    ) -> Document:
        """Find known incidents of distributed GPU training (hangs, NCCL errors, out of memory, checkpoints, launch).

        Use it for an error line or a symptom in words; for a whole log use diagnose_log. Hits come best first.
        `kind`: `answer`; `related`, none is about the question, `difference` says how; `unknown`, nothing is near.
        Unless it is an answer, advise none of their fixes: say that kb does not know it, and put `triage` or `ask` to
        the person. Read an incident with get_incident before you advise a fix, and cite its id and the section you rely
        on.
        """
        question = SearchQuestion(
            q=query,
            limit=limit,
            tag=tags,
            framework=frameworks,
            status=statuses,
            area=areas,
            why=False,
            gpu=gpu,
            torch=torch,
        )
        content = await self.content()
        answer = await content.answer(question, self.verdict_counts())
        if self.recorder:
            self.recorder.record_search("" if question.only else query, answer)
        return search_answer(answer, content.open_questions(answer), content.triage)

    async def get_incident(
        self,
        id: EntryId,  # noqa: A002  # its name there
        sections: Sections = None,
        language: Language = None,
    ) -> Document:
        """Read one incident: cause, fix with its cost, how to tell it from look-alikes.

        Omitted parts, marked with …, are listed in `more_sections`: ask for them. Every claim ends with its grade:
        [probe NAME] an experiment shows it, [source N] and [thread N] it was read in reference N, [claimed N] nobody
        checked it, [inferred] a conclusion. Keep the grade when you pass a claim on, and cite the id and the section.
        """
        content = await self.content()
        entry = content.catalog.get(id)
        return incident(entry, content.on_record(entry), sections or (), language or "en")

    async def diagnose_log(self, text: Log, limit: FindingLimit = None) -> Document:
        """Find what made a job fail, from its log: the cause first, then its consequences, with the lines that show it.

        Send the log unchanged: times, ranks and order matter. Findings come best first with a confidence and their
        fix; `next_step` and `ask` are what to look at and what to ask when they cannot be told apart;
        `unexplained` means that no incident fits: say so and ask `triage`. The log is not stored.
        Read the finding with get_incident, and cite its id and section.
        """
        data = text.encode(errors="replace")
        if not data:
            raise UsageError("the text is empty", "send the log as it was printed")
        if len(data) > MOST_TEXT:
            message = f"the text is {len(data) / (1 << 20):.1f} MB, and {MOST_TEXT >> 20} MB is the limit"
            raise UsageError(message, "send the end of it, or run `kb diagnose FILE`, which reads files of any size")
        content = await self.content()
        diagnosis = await content.diagnose([Stream("body", iter([data]))])
        if self.recorder:
            self.recorder.record_diagnosis(diagnosis)
        return diagnosis_answer(diagnosis, content.catalog, content.triage, limit)

    async def check_environment(
        self, packages: Packages = None, gpu: GpuName = "", limit: IncidentLimit = None
    ) -> Document:
        """Say which known incidents can happen with these versions, which cannot, and why.

        Use it before a job runs, before an upgrade, or to see whether a candidate applies at all. Packages may be left
        out if the server runs on the person's own machine: then it looks at that machine. An incident that a version
        rules out has state does-not-apply; unknown means that a version is missing.
        """
        content = await self.content()
        if packages is not None:
            return environment_answer(judge(content.catalog.current(), packages, gpu, content.hardware), limit)
        if self.machine is None:
            raise UsageError("this server does not run on your machine, and cannot look at it", PACKAGES_HINT)
        machine = self.machine
        versions = await self.on_machine(machine.versions)
        gpu = gpu or await self.on_machine(machine.gpu)
        answers = await self.on_machine(lambda: machine.checks(content.catalog))
        checks = tuple(CheckAnswer.model_validate(answer) for answer in answers if answer["state"] != "unknown")
        document = judge(content.catalog.current(), versions, gpu, content.hardware)
        return environment_answer(document.model_copy(update={"checks": checks}), limit)

    def error_text(self, error: KbError) -> str:
        """An error for a model. Over HTTP, only errors caused by the caller: others may name files of this machine."""
        if self.machine is None and not isinstance(error, UsageError | IndexUnavailable):
            log.error("%s", error.message)
            return UNAVAILABLE
        return f"{error.message}; hint: {error.hint}" if error.hint else error.message

    async def on_machine(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread, after earlier calls. Cancelling, for instance when the client leaves, stops it."""
        async with self.turn:
            running = asyncio.ensure_future(asyncio.to_thread(work))
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                with CancelScope(shield=True):
                    await self._stop(running)
                raise

    async def _stop(self, running: asyncio.Future[Any]) -> None:
        """Stop the running call repeatedly until it ends: a stop may come just before it starts a process."""
        assert self.machine is not None
        while not running.done():
            self.machine.stop()
            await asyncio.wait([running], timeout=STOP_EVERY_S)
        with suppress(Exception):  # its caller is gone
            running.result()

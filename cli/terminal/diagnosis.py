"""A diagnosis on a terminal, in English or Chinese; log lines are quoted unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kb.content.languages import Language
from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.evidence import DERIVED_PREFIX, SINCE_EPOCH, Line
from kb.diagnose.finding import Finding
from kb.diagnose.next_step import CERTAIN
from kb.harness.collective import name_ranks

from .fields import INDENT, field, headline, labelled, origin_facts, print_commands
from .hints import with_roots
from .labels import label, sentence, value
from .output import style
from .wrapping import shortened

MOST_FINDINGS = 3
MOST_LINES = 3
MOST_FAILURES = 8
WIDEST_LINE = 160
BRIEF_WIDTH, BRIEF_LINES = 64, 3  # columns and lines of each field of the brief
HEALTHY = "no line reports a failure in English or Chinese: {} of {} read"


@dataclass(frozen=True, slots=True)
class Printer:
    """Prints a diagnosis with at most `limit` findings. `roots` are the content roots given to the command."""

    diagnosis: Diagnosis
    lang: Language = Language.ENGLISH
    limit: int = MOST_FINDINGS
    roots: Sequence[Path] | None = None

    def print(self) -> None:
        diagnosis = self.diagnosis
        if diagnosis.unexplained or diagnosis.findings:
            self._print_brief()
            print()
            self._print_details()
        elif diagnosis.bytes:
            print(self._say(HEALTHY).format(self._counted(diagnosis.lines, "{:,} line", "{:,} lines"), self._files()))
            self._print_observations()
            for fact in diagnosis.story.trends:
                self._print_line("seen", fact.evidence)
        else:
            print(self._say("there is nothing to read: {} of 0 bytes").format(self._files()))

    def _print_brief(self) -> None:
        """Print cause, decisive line, fix and next step, in at most twelve lines of 80 columns. Details follow."""
        brief, step, in_chinese = self.diagnosis.brief, self.diagnosis.next_step, self.lang is Language.CHINESE
        if brief.entry:
            title = (in_chinese and brief.title_zh) or brief.title
            facts = f" ({brief.entry}, {self.diagnosis.findings[0].confidence:.2f})"
            cause = shortened(title, 2 * BRIEF_WIDTH - len(facts)) + facts
        elif self.diagnosis.is_cause_unknown:
            cause = self._say("unknown: no entry explains the first failure")
        else:
            cause = self._say("unknown: no confident match")
        print(labelled("cause", style(cause, bold=True), self.lang))
        if brief.decisive:
            self._print_brief_field("line", self._decisive(brief.decisive))
        if fix := (in_chinese and brief.fix_zh) or brief.fix:
            number = f"{brief.fix_number}. " if brief.fix_number > 1 else ""  # as `kb show` numbers it
            self._print_brief_field("fix", number + fix)
        if step and step.text:
            self._print_brief_field("next", with_roots(step.text.replace("**", ""), self.roots))
            if step.command:
                print(field("run", style(with_roots(step.command, self.roots), "green"), self.lang))

    def _print_brief_field(self, name: str, text: str) -> None:
        print(labelled(name, shortened(text, BRIEF_LINES * BRIEF_WIDTH), self.lang))

    def _decisive(self, line: Line) -> str:
        rank, is_derived = self.diagnosis.ranks.failed_first, line.text.startswith(DERIVED_PREFIX)
        is_unnamed = rank is None or is_derived or self.diagnosis.brief.entry is not None
        first = "" if is_unnamed else f"{self._say('rank {} failed first').format(rank)}: "
        return f"{first}{_time(line)}{line.text.removeprefix(DERIVED_PREFIX)} ({line.place})"

    def _print_details(self) -> None:
        diagnosis = self.diagnosis
        if diagnosis.unexplained:
            self._print_unexplained()
        else:
            self._print_findings()
            if diagnosis.brief.entry:
                self._print_first_failure()
        self._print_observations()
        self._print_long_step()

    def _print_findings(self) -> None:
        findings = self.diagnosis.findings
        in_full = 1 if findings[0].confidence >= CERTAIN else self.limit
        for number, finding in enumerate(findings[:in_full], 1):
            self._print_finding(number, finding)
        if others := self._listed(findings[in_full : self.limit]):
            print(labelled("also", self._say("possible: {}").format(others), self.lang) + "\n")

    def _print_finding(self, number: int, finding: Finding) -> None:
        in_chinese = self.lang is Language.CHINESE
        facts = self._say("{} · confidence {:.2f} · {}").format(
            value(finding.role, self.lang), finding.confidence, value(finding.status, self.lang)
        )
        title = finding.title_zh if in_chinese else finding.title
        print(headline(number, title, finding.id, facts + origin_facts(finding.origin, self.lang)))
        print(labelled("cause", (in_chinese and finding.cause_zh) or finding.cause, self.lang))
        for line in finding.evidence[:MOST_LINES]:
            if line != self.diagnosis.brief.decisive or not line.text.startswith(DERIVED_PREFIX):
                self._print_line("line", line)
        if finding.count > min(len(finding.evidence), MOST_LINES):
            self._print_count(finding)
        for objection in finding.against:
            print(labelled("against", sentence(objection, self.lang), self.lang))
        print_commands(finding.id, self.roots, self.lang, has_probe=bool(finding.probe))
        print()

    def _print_count(self, finding: Finding) -> None:
        count = self._say("{:,} lines in all").format(finding.count)
        ranks = self._say(", of {}").format(self._named(finding.ranks)) if finding.ranks else ""
        print(f"{' ' * INDENT}{count}{ranks}")

    def _print_unexplained(self) -> None:
        diagnosis = self.diagnosis
        shown = (*diagnosis.observations, diagnosis.ranks.first_failure)
        failures = [failure for failure in diagnosis.failures if failure.line not in shown]
        for failure in failures[:MOST_FAILURES]:
            times = self._say(" ({:,} times)").format(failure.count) if failure.count > 1 else ""
            print(field("seen", f"{_cited(failure.line)}{times}", self.lang))
        if len(failures) > MOST_FAILURES:
            print(" " * INDENT + self._say("more: see --json"))
        best = diagnosis.findings[: self.limit]
        matched = [finding for finding in best if finding.role != "similar"]
        if diagnosis.is_cause_unknown and matched:
            print(labelled("then", self._say("what followed fits: {}").format(self._listed(matched)), self.lang))
        elif best:
            print(labelled("similar", self._say("at best: {}").format(self._listed(best)), self.lang))
        print()

    def _print_first_failure(self) -> None:
        ranks = self.diagnosis.ranks
        line = f"{_time(ranks.first_failure)}{_cited(ranks.first_failure)}" if ranks.first_failure else ""
        rank = "" if ranks.failed_first is None else self._say("rank {} failed first").format(ranks.failed_first)
        if line and not rank and len(ranks.known) > 1 and not self.diagnosis.is_cause_unknown:
            rank = self._say("several ranks failed; order unknown")
        if rank or line:
            print(field("first", self._say(": ").join(filter(None, (rank, line))), self.lang))

    def _print_observations(self) -> None:
        if absent := self.diagnosis.ranks.absent:
            text = self._say("{}: did not wait where the others waited").format(self._named(absent))
            print(field("absent", text, self.lang))
        cited = {
            line.text for finding in self.diagnosis.findings[: self.limit] for line in finding.evidence[:MOST_LINES]
        }
        cited.add(self.diagnosis.brief.decisive.text if self.diagnosis.brief.decisive else "")
        for line in self.diagnosis.observations[:MOST_LINES]:
            if line.text not in cited:
                self._print_line("seen", line)

    def _print_line(self, name: str, line: Line) -> None:
        """Print a line of evidence with its place, or, without one, a sentence that kb derived from several lines."""
        if line.text.startswith(DERIVED_PREFIX):
            print(labelled("inferred", line.text.removeprefix(DERIVED_PREFIX), self.lang))
        else:
            print(field(name, _cited(line), self.lang))

    def _print_long_step(self) -> None:
        """Print the whole step if the first lines had no room for it."""
        step = self.diagnosis.next_step
        text = with_roots(step.text.replace("**", ""), self.roots) if step else ""
        if shortened(text, BRIEF_LINES * BRIEF_WIDTH) != text:
            print(labelled("next", text, self.lang))

    def _say(self, text: str) -> str:
        return label(text, self.lang)

    def _listed(self, findings: Sequence[Finding]) -> str:
        names = (f"{each.id} ({value(each.role, self.lang)}, {each.confidence:.2f})" for each in findings)
        return ", ".join(names)

    def _named(self, ranks: Sequence[int]) -> str:
        return value(name_ranks(ranks), self.lang)

    def _files(self) -> str:
        return self._counted(self.diagnosis.sources, "{:,} file", "{:,} files")

    def _counted(self, count: int, one: str, several: str) -> str:
        return self._say(one if count == 1 else several).format(count)


def _time(line: Line) -> str:
    """The time of a line, which is not in its text: as in the log, or in UTC if the log names a zone."""
    if line.time is None:
        return ""
    if line.time < SINCE_EPOCH:
        return f"{line.time:.3f} s  "
    return f"{datetime.fromtimestamp(line.time, UTC):%Y-%m-%d %H:%M:%S}  "


def _cited(line: Line) -> str:
    rank = f" rank {line.rank}" if line.rank is not None else ""
    text = line.text if len(line.text) <= WIDEST_LINE else f"{line.text[:WIDEST_LINE]}…"
    return f"{style(f'{line.place}{rank}', dim=True)}  {text}"

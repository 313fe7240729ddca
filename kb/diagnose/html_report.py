"""A diagnosis as one HTML file to attach to a ticket. It has no script, loads nothing, and secrets are redacted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape

from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.evidence import DERIVED_PREFIX, Line
from kb.diagnose.finding import Finding
from kb.diagnose.story.picture import MARKS, extent, row_text, svg_picture
from kb.diagnose.story.summary import AttemptSummary
from kb.printable import printable
from kb.redaction.redactor import redact

MOST_FINDINGS, MOST_LINES, MOST_FAILURES = 3, 5, 20
STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code, pre { font: 13px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; white-space: pre-wrap }
dt { font-weight: 600 } dd { margin: 0 0 .6rem } svg { width: 100%; height: auto }
table { border-collapse: collapse } td, th { text-align: left; padding: .1rem .8rem .1rem 0; vertical-align: top }
"""


def html_report(diagnosis: Diagnosis) -> str:
    """The document, in English. Below each picture is a table with the same content."""
    parts = [*_brief(diagnosis), *_story(diagnosis), *_findings(diagnosis), *_failures(diagnosis)]
    body = "\n".join(parts)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>kb diagnose</title>'
    page = f'<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>'
    return f"<!doctype html>\n{page}\n"


def _brief(diagnosis: Diagnosis) -> Iterator[str]:
    brief, step = diagnosis.brief, diagnosis.next_step
    title = f"{brief.title} ({brief.entry})" if brief.entry else "unknown: no entry explains it with confidence"
    if not (diagnosis.findings or diagnosis.unexplained):
        title = "no line reports a failure"
    yield f"<h1>{_text(title)}</h1>"
    rows = [
        ("Decisive line", _cited(brief.decisive) if brief.decisive else ""),
        ("Fix" if brief.fix_number == 1 else f"Fix {brief.fix_number}", _text(brief.fix)),
        ("Next", _text(step.text) if step else ""),
        ("Run", f"<code>{_text(step.command)}</code>" if step and step.command else ""),
        ("Read", f"{diagnosis.lines:,} lines of {diagnosis.sources:,} files"),
    ]
    yield f"<dl>{''.join(f'<dt>{name}</dt><dd>{text}</dd>' for name, text in rows if text)}</dl>"


def _story(diagnosis: Diagnosis) -> Iterator[str]:
    attempts = [_redacted(attempt) for attempt in diagnosis.story.attempts if attempt.rows]
    for number, attempt in enumerate(attempts, 1):
        name = f"Attempt {number} of {len(attempts)}" if len(attempts) > 1 else "What each rank did"
        yield f"<h2>{name}</h2>\n<figure>{svg_picture(attempt)}<figcaption>{extent(attempt)}</figcaption></figure>"
        yield _table(attempt)
    if facts := diagnosis.story.facts:
        sentences = "".join(f"<li>{_text(fact.text.removeprefix(DERIVED_PREFIX))}</li>" for fact in facts)
        yield f"<ul>{sentences}</ul>"


def _redacted(attempt: AttemptSummary) -> AttemptSummary:
    """The attempt with its texts redacted: the picture has them as titles."""
    rows = (
        replace(
            row,
            error=redact(row.error),
            place=redact(row.place),
            ending=redact(row.ending),
            spans=tuple(replace(span, last=redact(span.last)) for span in row.spans),
        )
        for row in attempt.rows
    )
    return replace(attempt, rows=tuple(rows))


def _table(attempt: AttemptSummary) -> str:
    cells = (
        (
            "" if row.rank is None else str(row.rank),
            ", ".join(span.last for span in row.spans[-3:]),
            row.mark,
            row_text(row),
        )
        for row in attempt.rows
    )
    rows = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in cells)
    head = "<tr><th>rank</th><th>last phases</th><th>mark</th><th>end</th></tr>"
    return f"<details><summary>As a table; {MARKS}</summary><table>{head}{rows}</table></details>"


def _findings(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.findings:
        yield "<h2>Findings</h2>"
    for finding in diagnosis.findings[:MOST_FINDINGS]:
        yield _finding(finding)


def _finding(finding: Finding) -> str:
    lines = "".join(f"<li>{_cited(line)}</li>" for line in finding.evidence[:MOST_LINES])
    against = "".join(f"<li>against: {_text(objection)}</li>" for objection in finding.against)
    facts = f"{finding.id}, {finding.role}, confidence {finding.confidence:.2f}"
    return f"<h3>{_text(finding.title)}</h3><p>{_text(facts)}</p><p>{_text(finding.cause)}</p><ul>{lines}{against}</ul>"


def _failures(diagnosis: Diagnosis) -> Iterator[str]:
    if diagnosis.failures:
        lines = "".join(f"<li>{_cited(failure.line)}</li>" for failure in diagnosis.failures[:MOST_FAILURES])
        yield f"<details><summary>Lines that report a failure</summary><ul>{lines}</ul></details>"


def _cited(line: Line) -> str:
    rank = f" rank {line.rank}" if line.rank is not None else ""
    return f"<code>{_text(line.place + rank)}</code> {_text(line.text.removeprefix(DERIVED_PREFIX))}"


def _text(text: str) -> str:
    return escape(redact(printable(text)))

"""`kb search`: the entries that answer a question or a pasted log line.

Annotations are not strings here, because Typer would evaluate each of them five times.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from kb.content.applicability import Applicability
from kb.content.languages import Language
from kb.content.roots import Root, configured_roots
from kb.content.triage import load_triage
from kb.errors import UsageError
from kb.search.decision import Kind
from kb.search.explanation import Explanation
from kb.search.index_cache import open_index
from kb.search.ranking import search as find
from kb.search.results import Answer, Difference, Hit

from ..terminal.fields import field, headline, labelled, origin_facts, print_commands
from ..terminal.filter_options import AreaOption, FrameworkOption, StatusOption, TagOption
from ..terminal.labels import joined, label, sentence, value
from ..terminal.output import JsonFlag, RootOption, emit, interpreter_of, notice, style
from ..terminal.stdin import stdin
from ..terminal.wrapping import cells, padded

MOST_INPUT = 4 << 20  # bytes read from standard input

if TYPE_CHECKING:
    from kb.content.filters import Filter


def search(
    query: Annotated[
        list[str], typer.Argument(help="Words or an error, English or Chinese; `-` reads standard input.")
    ],
    limit: Annotated[int, typer.Option(min=1, max=50, help="Show at most this many entries.")] = 3,
    tag: TagOption = None,
    framework: FrameworkOption = None,
    status: StatusOption = None,
    area: AreaOption = None,
    applies_here: Annotated[
        bool,
        typer.Option("--applies-here", help="List entries that apply to your installed versions first, and say why."),
    ] = False,
    python: Annotated[
        Path | None, typer.Option(help="Interpreter of your training environment, for --applies-here.")
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Explain each score.")] = False,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Find the entry for a failure: paste an error or describe it, in English or Chinese.

    Exit code 0 for an answer, or for the nearest entries when none is about it; 1 when nothing is near,
    or when common words fit many entries equally well.
    """
    text = _text(query)
    if not text.strip():
        raise UsageError("the query is empty", 'for instance: kb search "ALLGATHER timeout save"')
    if python and not applies_here:
        raise UsageError("--python has no effect without --applies-here", "add --applies-here")
    only = _filter(tag, framework, status, area)
    installed = _installed(interpreter_of(python)) if applies_here else None
    chosen = configured_roots(tuple(roots or ()))
    with open_index(chosen, notice) as index:
        answer = find(index, text, limit, only=only, installed=installed, explain=why)
    if as_json:
        from kb.search.gap import gap

        triage = {} if answer.answered else load_triage(chosen)
        hits = [hit.to_json() for hit in answer.hits]
        emit(
            "search",
            query=text[:1000],
            hits=hits,
            did_you_mean=answer.did_you_mean or None,
            kind=answer.kind.value,
            probability=answer.probability,
            answered=answer.answered,
            **gap(answer, triage),
            problems=index.problems,
        )
    else:
        _print(answer, roots, chosen)
    return 1 if answer.kind is Kind.UNKNOWN else 0


def _text(query: list[str]) -> str:
    """The text of the query. Invalid UTF-8 is replaced; on a command line Python passes it as surrogates."""
    given = stdin().read(MOST_INPUT) if query == ["-"] else " ".join(query).encode(errors="surrogateescape")
    return given.decode(errors="replace")


def _filter(
    tag: list[str] | None, framework: list[str] | None, status: list[str] | None, area: list[str] | None
) -> Optional["Filter"]:
    if not (tag or framework or status or area):
        return None
    from kb.content.filters import Filter

    return Filter.of(tag, framework, status, area)


def _installed(python: Path) -> dict[str, str | None]:
    from kb.machine import installed  # slow to import, and only --applies-here needs it

    return installed.versions(python)


def _print(answer: Answer, roots: list[Path] | None, chosen: tuple[Root, ...]) -> None:
    """Print an answer in the language of the question."""
    lang = Language.CHINESE if answer.in_chinese else Language.ENGLISH
    if answer.did_you_mean:
        print(label("did you mean: {}", lang).format(style(answer.did_you_mean, bold=True)) + "\n")
    print_hit = partial(_print_hit, roots=roots, lang=lang)
    if answer.kind is Kind.ANSWER:
        for number, hit in enumerate(answer.hits, 1):
            print_hit(number, hit)
        return
    from ..terminal.gap import print_gap  # not needed for an answer

    print_gap(answer, load_triage(chosen), print_hit, lang)


def _print_hit(number: int, hit: Hit, roots: list[Path] | None, lang: Language) -> None:
    in_chinese = lang is Language.CHINESE
    facts = label("{} entry · {} severity", lang).format(value(hit.status, lang), value(hit.severity, lang))
    title = hit.title_zh if in_chinese else hit.title
    print(headline(number, title, hit.id, facts + origin_facts(hit.origin, lang)))
    print(labelled("cause", (in_chinese and hit.cause_zh) or hit.cause, lang))
    why = label("a signature of this entry matches your text", lang) if hit.signature else ""
    print(labelled("matched", joined([why, ", ".join(hit.matched[:8])], lang), lang))
    if hit.difference:
        _print_difference(hit.difference, lang)
    if hit.applicability:
        _print_applicability(hit.applicability, lang)
    if hit.why:
        _print_why(hit.why, lang)
    print(labelled("example", hit.snippet, lang, dim=True))
    print_commands(hit.id, roots, lang, has_probe=bool(hit.probe) and hit.difference is None)
    print()


def _print_difference(difference: Difference, lang: Language) -> None:
    from ..terminal.gap import difference_in_words

    if words := difference_in_words(difference, lang):
        print(labelled("differs", words, lang))


def _print_applicability(applicability: Applicability, lang: Language) -> None:
    state = value(applicability.state, lang).replace("-", " ")
    reasons = [sentence(reason, lang) for reason in applicability.reason.split("; ")]
    print(labelled("here", f"{state}{label(': ', lang)}{joined(reasons, lang)}", lang))


def _print_why(why: Explanation, lang: Language) -> None:
    """Print the score, then a line for each of its summands, aligned as a table."""
    words = sum(concept.score for concept in why.concepts)
    product = label("{:.3f} words x {:.3f} coverage x {:.3f} agreement", lang)
    lift = f" + {label('{:.3f} signature', lang).format(why.signature)}" if why.signature else ""
    print(field("score", f"{why.score:.3f} = {product.format(words, why.coverage, why.agreement)}{lift}", lang))
    width = max((cells(concept.word) for concept in why.concepts), default=0)
    for concept in why.concepts:
        how = label("{:.3f} bm25 x {:g} of {!r}, idf {:.2f}", lang)
        how = how.format(concept.bm25, concept.weight, concept.term, concept.idf)
        print(style(f"            {concept.score:7.3f}  {padded(concept.word, width)}  {how}", dim=True))

"""`kb search`: the entries that answer a question or a pasted log line.

Annotations are no strings here: Typer would evaluate each of them five times.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from kb.content.roots import Root, configured_roots
from kb.content.triage import load_triage
from kb.errors import UsageError
from kb.search.decision import Kind
from kb.search.explanation import Explanation
from kb.search.index_cache import open_index
from kb.search.ranking import search as find
from kb.search.results import Answer, Difference, Hit

from ..terminal.fields import headline, labelled, print_commands
from ..terminal.filter_options import AreaOption, FrameworkOption, StatusOption, TagOption
from ..terminal.output import JsonFlag, RootOption, emit, interpreter_of, notice, style
from ..terminal.stdin import stdin

MOST_INPUT = 4 << 20  # bytes read from standard input
STATES = {"applies": "applies", "unknown": "unknown", "does-not-apply": "does not apply"}

if TYPE_CHECKING:
    from kb.content.filters import Filter


def search(
    query: Annotated[
        list[str], typer.Argument(help="Words or an error, English or Chinese; `-` reads standard input.")
    ],
    limit: Annotated[int, typer.Option(min=1, max=50, help="At most this many entries.")] = 3,
    tag: TagOption = None,
    framework: FrameworkOption = None,
    status: StatusOption = None,
    area: AreaOption = None,
    applies_here: Annotated[
        bool, typer.Option("--applies-here", help="First what fits the versions of your environment, with the reason.")
    ] = False,
    python: Annotated[
        Path | None, typer.Option(help="Interpreter of your training environment, for --applies-here.")
    ] = None,
    why: Annotated[bool, typer.Option("--why", help="Show what each score is made of.")] = False,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Find the entry for a failure: paste an error or describe it, in English or Chinese.

    Exit code 0 for an answer, or for entries that are near when none is about it; 1 when nothing is near.
    """
    text = _text(query)
    if not text.strip():
        raise UsageError("the query is empty", 'for instance: kb search "ALLGATHER timeout save"')
    if python and not applies_here:
        raise UsageError("--python says nothing without --applies-here", "add --applies-here")
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
    """What is asked. Bytes that are no UTF-8 are replaced; Python carries those of a command line as surrogates."""
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
    from kb.machine import installed  # only --applies-here pays for it

    return installed.versions(python)


def _print(answer: Answer, roots: list[Path] | None, chosen: tuple[Root, ...]) -> None:
    if answer.did_you_mean:
        print(f"did you mean: {style(answer.did_you_mean, bold=True)}\n")
    print_hit = partial(_print_hit, roots=roots, in_chinese=answer.in_chinese)
    if answer.kind is Kind.ANSWER:
        for number, hit in enumerate(answer.hits, 1):
            print_hit(number, hit)
        return
    from ..terminal.gap import print_gap  # an answer does without

    print_gap(answer, load_triage(chosen), print_hit)


def _print_hit(number: int, hit: Hit, roots: list[Path] | None, in_chinese: bool) -> None:
    title = hit.title_zh if in_chinese else hit.title
    cause = hit.cause_zh if in_chinese and hit.cause_zh else hit.cause
    origin = "" if hit.origin == "built-in" else f" · from {hit.origin}"
    matched = ", ".join(hit.matched[:8])
    why = "a signature of this entry matches your text; " if hit.signature else ""
    print(headline(number, title, hit.id, f"{hit.status} entry · {hit.severity} severity{origin}"))
    print(labelled("cause", cause))
    print(labelled("matched", why + matched))
    if hit.difference:
        _print_difference(hit.difference, in_chinese=in_chinese)
    if hit.applicability:
        print(labelled("here", f"{STATES[hit.applicability.state]}: {hit.applicability.reason}"))
    if hit.why:
        _print_why(hit.why)
    print(labelled("example", hit.snippet, dim=True))
    print_commands(hit.id, roots, has_probe=bool(hit.probe) and hit.difference is None)
    print()


def _print_difference(difference: Difference, *, in_chinese: bool) -> None:
    from ..terminal.gap import difference_in_words

    if words := difference_in_words(difference, chinese=in_chinese):
        print(labelled("differs", words))


def _print_why(why: Explanation) -> None:
    """The sum, then a line for each summand, aligned as a table."""
    words = sum(concept.score for concept in why.concepts)
    lift = f" + {why.signature:.3f} signature" if why.signature else ""
    factors = f"{why.coverage:.3f} coverage x {why.agreement:.3f} agreement"
    print(f"   score    {why.score:.3f} = {words:.3f} words x {factors}{lift}")
    width = max((len(concept.word) for concept in why.concepts), default=0)
    for concept in why.concepts:
        how = f"{concept.bm25:.3f} bm25 x {concept.weight:g} of {concept.term!r}, idf {concept.idf:.2f}"
        print(style(f"            {concept.score:7.3f}  {concept.word:<{width}}  {how}", dim=True))

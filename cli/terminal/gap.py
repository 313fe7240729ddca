"""The output for a question that no entry answers: the nearest entries, and what to look at next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kb.content.languages import Language
from kb.content.triage import Observation, Triage
from kb.search.decision import Kind
from kb.search.gap import observations, subjects
from kb.search.results import Answer, Difference, Hit

from .fields import labelled, origin_facts
from .labels import joined, label, listed, value
from .output import style

HEADINGS = {
    Kind.RELATED: "No entry is clearly about this. The nearest ones, and how they differ:",
    Kind.UNKNOWN: "kb does not know this.",
}
MOST_ENTRIES = 4  # entries shown for one outcome of an observation
SHARED = "These entries share a few words with it:"
VAGUE = "Many entries fit these words, and none stands out. Paste the error line itself to tell them apart."
NOTHING = "Try fewer words, fewer filters, or the error line itself; `kb list` shows every entry."


def print_gap(answer: Answer, triage: Triage, print_hit: Callable[[int, Hit], None], lang: Language) -> None:
    """Print an answer of kind related or unknown. `print_hit` prints a numbered hit in full."""
    outside = subjects(answer)
    for subject in outside:
        print(label("kb is not about this. See: {}", lang).format(value(subject.meaning, lang)))
    if outside:
        return
    print(f"{label(VAGUE if answer.is_vague else HEADINGS[answer.kind], lang)}\n")
    if answer.kind is Kind.RELATED:
        for number, hit in enumerate(answer.hits, 1):
            print_hit(number, hit)
    else:
        _print_shared(answer.hits, lang)
    print_triage(observations(answer, triage), lang)


def _print_shared(hits: Sequence[Hit], lang: Language) -> None:
    """Print one line per hit, since hits that only share a few words are hardly worth reading."""
    print(label(SHARED if hits else NOTHING, lang))
    for hit in hits:
        title = hit.title_zh if lang is Language.CHINESE else hit.title
        print(f"- {hit.id}: {title}{origin_facts(hit.origin, lang)}")
    print()


def difference_in_words(difference: Difference, lang: Language) -> str:
    """What the entry lacks and what it is not about, in words; "" if there is no difference."""
    lacks = listed([repr(word) for word in difference.lacks], lang)
    facets = listed([value(facet.partition(":")[2], lang) for facet in difference.facets], lang)
    return joined(
        [
            label("the entry does not mention {}", lang).format(lacks) if lacks else "",
            label("it is not about {}", lang).format(facets) if facets else "",
        ],
        lang,
    )


def print_triage(asked: Sequence[Observation], lang: Language) -> None:
    """Print the numbered observations to make, each with its command and what each outcome points to."""
    if asked:
        print(f"{label('What to check next:', lang)}\n")
    for number, observation in enumerate(asked, 1):
        document = observation.to_json(in_chinese=lang is Language.CHINESE)
        print(f"{number}. {style(document['ask'], bold=True)}")
        where = label("  ({})", lang).format(document["where"])
        print(labelled("run", f"{style(document['command'], 'green')}{where}", lang))
        for outcome in document["outcomes"]:
            entries = ", ".join(_shown(outcome["points_to"], lang))
            print(labelled("", f"- {outcome['seen']}{f' -> {entries}' if entries else ''}"))
        print()


def _shown(entries: Sequence[str], lang: Language) -> list[str]:
    """The first few entries, as many as fit on a line; `--json` has all."""
    more = len(entries) - MOST_ENTRIES
    return [*entries[:MOST_ENTRIES], *([label("and {} more", lang).format(more)] if more > 0 else [])]

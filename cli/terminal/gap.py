"""What the terminal shows for a question that no entry answers: the nearest entries, and what to look at next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kb.content.triage import Observation, Triage
from kb.search.decision import Kind
from kb.search.gap import observations, subjects
from kb.search.results import Answer, Difference, Hit

from .fields import labelled
from .output import style

HEADINGS = {  # by kind, in English and Chinese
    Kind.RELATED: (
        "No entry is clearly about this. The nearest, and how they differ:",
        "没有条目明确讲这个问题。最接近的条目及其不同之处：",
    ),
    Kind.UNKNOWN: ("kb does not know this.", "kb 不了解这个问题。"),
}
LABELS = {
    "run": ("run", "执行"),
    "outside": ("kb is not about this. See", "这不在 kb 的范围内。参见"),
    "shared": ("These entries share a few words with it:", "只有几个词相同的条目："),
    "nothing": (
        "Fewer words, fewer filters or the error line itself find more; `kb list` shows all.",
        "词少一些、条件少一些，或直接用报错那一行，会找到更多；`kb list` 列出全部条目。",
    ),
    "next": ("What to look at, to find out more:", "可以先看这些，缩小范围："),
    "lacks": ("the entry says nothing of", "条目没有提到"),
    "facets": ("it is not about", "不属于"),
}


def print_gap(answer: Answer, triage: Triage, print_hit: Callable[[int, Hit], None]) -> None:
    """`print_hit` prints a numbered hit in full."""
    chinese = answer.in_chinese
    outside = subjects(answer)
    for subject in outside:
        print(f"{_label('outside', chinese)}: {subject.meaning}")
    if outside:
        return
    print(f"{HEADINGS[answer.kind][chinese]}\n")
    if answer.kind is Kind.RELATED:
        for number, hit in enumerate(answer.hits, 1):
            print_hit(number, hit)
    else:
        _print_shared(answer.hits, chinese=chinese)
    _print_triage(observations(answer, triage), chinese=chinese)


def _print_shared(hits: Sequence[Hit], *, chinese: bool) -> None:
    """A line each: too little to read them for."""
    print(_label("shared" if hits else "nothing", chinese))
    for hit in hits:
        print(f"- {hit.id}: {hit.title_zh if chinese else hit.title}{_origin(hit)}")
    print()


def _origin(hit: Hit) -> str:
    return "" if hit.origin == "built-in" else f" · from {hit.origin}"


def difference_in_words(difference: Difference, *, chinese: bool) -> str:
    """What the entry lacks and is not about; "" for nothing."""
    lacks = ", ".join(repr(word) for word in difference.lacks)
    facets = ", ".join(facet.partition(":")[2] for facet in difference.facets)
    parts = [
        f"{_label('lacks', chinese)} {lacks}" if lacks else "",
        f"{_label('facets', chinese)} {facets}" if facets else "",
    ]
    return "; ".join(filter(None, parts))


def _print_triage(asked: Sequence[Observation], *, chinese: bool) -> None:
    if asked:
        print(f"{_label('next', chinese)}\n")
    for number, observation in enumerate(asked, 1):
        document = observation.to_json(in_chinese=chinese)
        print(f"{number}. {style(document['ask'], bold=True)}")
        print(labelled(_label("run", chinese), f"{style(document['command'], 'green')}  ({document['where']})"))
        for outcome in document["outcomes"]:
            entries = ", ".join(outcome["points_to"])
            print(labelled("", f"- {outcome['seen']}{f' -> {entries}' if entries else ''}"))
        print()


def _label(name: str, chinese: bool) -> str:
    return LABELS[name][chinese]

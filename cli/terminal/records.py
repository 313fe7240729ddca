"""The verdicts on record of an entry, one per line, in the language of its page."""

from __future__ import annotations

import re

from kb.content.languages import Language

from .labels import label, sentence, value

# `verified with 2.5.1`, `verified with peft 0.14.0`, `verified on 2 x NVIDIA H100`
VERDICT = re.compile(r"([a-z]+(?:-[a-z]+)*) (?:with|on) (?=(?:[a-z-]+ )?\d)")
FIDELITY = re.compile(r"(?<=\()(cpu|hardware|model|stand-in)(?=\))")
NOTES = (", in an earlier wording", ", with an earlier probe", "GPU arms: ", "; ")


def record(line: str, lang: Language) -> str:
    """A line of a summary from `kb.records`, in this language."""
    if lang is Language.ENGLISH or sentence(line, lang) != line:
        return sentence(line, lang)
    for note in NOTES:
        line = line.replace(note, label(note, lang))
    line = FIDELITY.sub(lambda match: value(match[1], lang), line)
    return VERDICT.sub(lambda match: f"{value(match[1], lang)}{label(': ', lang)}", line)

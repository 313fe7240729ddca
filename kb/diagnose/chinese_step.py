"""The next step in Chinese: an item of `判断` instead of `How to tell`; kb's own sentences come from a dictionary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kb.content.chinese import dictionary
from kb.content.entry import Entry
from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.next_step import NextStep, candidates, next_step
from kb.search.document import FENCED, ITEM, tells


def chinese_step(diagnosis: Diagnosis, entry: Callable[[str], Entry]) -> NextStep | None:
    """The next step of a diagnosis, in English if there is no Chinese text. `entry` returns the entry of an id."""
    step = diagnosis.next_step
    if step and step.source:
        likely = candidates(diagnosis.findings)
        documents = {finding.id: {"tells": chinese_items(entry(finding.id))} for finding in likely}
        again = next_step(diagnosis.findings, documents, diagnosis.ranks)
        step = replace(again, command=step.command) if again else step
    return step and replace(step, text=dictionary().sentence(step.text) or step.text)


def chinese_items(entry: Entry) -> list[str]:
    """The items of `判断`, each on one line; the items of `How to tell` if the entry is only in English."""
    text = FENCED.sub("", entry.translation().get("判断", ""))
    return [" ".join(item.split()) for item in ITEM.split(text)[1:]] or tells(entry)

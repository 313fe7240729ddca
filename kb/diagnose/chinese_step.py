"""The next step in Chinese: an item of `判断` instead of one of `How to tell`, and what kb composes from its table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kb.content.chinese import dictionary
from kb.content.entry import Entry
from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.next_step import NextStep, candidates, next_step
from kb.search.document import FENCED, ITEM, tells


def chinese_step(diagnosis: Diagnosis, entry: Callable[[str], Entry]) -> NextStep | None:
    """The next step of a diagnosis; `entry` returns the entry of an id. Without a Chinese text it is in English."""
    step = diagnosis.next_step
    if step and step.source:
        likely = candidates(diagnosis.findings)
        documents = {finding.id: {"tells": chinese_items(entry(finding.id))} for finding in likely}
        again = next_step(diagnosis.findings, documents, diagnosis.ranks)
        step = replace(again, command=step.command) if again else step
    return step and replace(step, text=dictionary().sentence(step.text) or step.text)


def chinese_items(entry: Entry) -> list[str]:
    """The items of `判断`, each in one line; those of `How to tell` for an entry that is in English alone."""
    text = FENCED.sub("", entry.translation().get("判断", ""))
    return [" ".join(item.split()) for item in ITEM.split(text)[1:]] or tells(entry)

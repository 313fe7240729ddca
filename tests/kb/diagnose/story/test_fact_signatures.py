"""The facts of jobs that really ran, against the entries' signatures for facts and the page that explains them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.fact import FactKind
from kb.diagnose.story.story import read_story
from kb.patterns.literals import find

ROOT = Path(__file__).parents[4]
RECORDS = ROOT / "tests" / "stories" / "records"
SOURCE = "kb diagnose, from the "
OF_FACTS = ("tracebacks of all ranks", "lines of all ranks", "metrics in the log", "launcher")
SIGNATURES = {
    (entry.id, signature.pattern): signature.sample
    for entry in load_catalog((builtin_root(),)).current()
    for signature in entry.meta.signatures
    if signature.source and signature.source.startswith(tuple(SOURCE + words for words in OF_FACTS))
}


# No program of the records can show it: a resume whose loss is merely higher.
HIGHER = (
    "".join(f"step {step} loss {4 - step / 10:.2f}\n" for step in range(1, 31))
    + "resuming from ckpt-30\nstep 31 loss 2.6\n"
)


@cache
def sentences() -> tuple[str, ...]:
    logs = [*(path.read_bytes() for path in sorted(RECORDS.glob("*/job.log"))), HIGHER.encode()]
    return tuple(
        fact.text for log in logs for fact in read_story([Excerpt("job.log", None, None, (Part(1, log),))]).facts
    )


@pytest.mark.parametrize(
    ("entry_id", "pattern"), SIGNATURES, ids=[f"{entry}-{n}" for n, (entry, _) in enumerate(SIGNATURES)]
)
def test_a_job_has_the_fact_that_a_signature_names(entry_id: str, pattern: str) -> None:
    assert any(find(pattern, sentence) for sentence in sentences()), f"no job of {len(sentences())} facts has it"


@pytest.mark.parametrize("kind", FactKind)
def test_the_page_explains_each_kind(kind: FactKind) -> None:
    assert f"`{kind}`" in (ROOT / "docs" / "hang.md").read_text()

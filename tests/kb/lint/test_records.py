"""Rules that compare an entry with the records in `docs/verified/`."""

from __future__ import annotations

import pytest

from kb.lint.linter import check_entry
from kb.lint.rule import OnRecord
from kb.records.libraries import LibraryVerdict
from kb.records.occurrences import Occurrences
from kb.records.releases import ReleaseVerdict
from tests.support.lint_examples import PROBE, SAMPLE, TELL, edited, entry_file

NAMED = "Not shown with torch `<2.5`: its scaler is for GPUs. [inferred]"


def violations(text: str, on_record: OnRecord) -> list[tuple[str, str]]:
    """The rules that are broken, each with its message."""
    return [(violation.rule, violation.message) for violation in check_entry(entry_file(text, on_record=on_record))]


@pytest.mark.parametrize(
    ("torch", "verdict", "reason", "is_broken"),
    [
        ("2.5.1", "verified", "", False),
        ("2.5.1", "fix-ineffective", "the treatment failed the same way", True),
        ("2.5.1", "not-applicable", "gloo: torch 2.5.1 in python is not >=2.6", True),
        ("2.5.1", "not-applicable", "nccl: needs 2 GPUs: nvidia-smi is not installed", False),
        ("2.5.1", "not-applicable", "nccl: torch 2.5.1 in python is not >=2.6; needs 2 GPUs: none here", False),
        ("2.5.1", "not-applicable", "nccl: needs 2 GPUs: none; gloo: torch 2.5.1 in python is not >=2.6", True),
        ("2.4.1", "not-applicable", "gloo: torch 2.4.1 in python is not >=2.6", False),
        ("2.3.1", "inconclusive", "outside applies_to", False),
    ],
)
def test_no_release_that_an_entry_is_about_has_a_verdict_against_it(
    torch: str, verdict: str, reason: str, is_broken: bool
) -> None:
    text = edited({PROBE: PROBE + 'applies_to:\n  torch: ">=2.4"\n', TELL: f"{TELL} {NAMED}"})
    release = ReleaseVerdict(torch, "2026-01-01", verdict, reason, {}, "")
    broken = [rule for rule, _ in violations(text, OnRecord(releases=(release,)))]
    assert broken == ["release-verdict"] * is_broken


@pytest.mark.parametrize(
    ("printed_by", "remark"),
    [
        ("", "say in printed_by which of these print it: torch 2.5.1, 2.6.0"),
        ("    printed_by: {torch: '>=2.5'}\n", ""),
        ("    printed_by: {torch: '>=2.4'}\n", "torch 2.4.1 was searched and does not contain this text"),
        ("    printed_by: {torch: '>=3'}\n", "torch >=3 was searched and does not contain this text"),
        ("    printed_by: {python: ''}\n", ""),
    ],
)
def test_the_releases_that_print_a_signature_contain_its_text(printed_by: str, remark: str) -> None:
    text = edited({"    source: a test\n": "    source: torch, in a test\n", SAMPLE: SAMPLE + printed_by})
    pattern = entry_file(text).meta.signatures[0].pattern
    searched = {"torch": ["2.4.1", "2.5.1", "2.6.0"]}
    texts = Occurrences(searched, {pattern: {"torch": ["2.5.1", "2.6.0"]}})
    assert violations(text, OnRecord(wordings=texts)) == ([("untraced-wording", remark)] if remark else [])


@pytest.mark.parametrize(
    ("verdict", "note", "is_broken"),
    [
        ("verified", "", False),
        ("not-applicable", "", False),
        ("not-reproduced", "", True),
        ("not-reproduced", "Not shown with deepspeed `<0.15`: it gathers otherwise. [inferred]", False),
        ("not-reproduced", "Not shown with deepspeed `<0.14`: it gathers otherwise. [inferred]", True),
        ("fix-ineffective", "Not shown with torch `<2.5`: DeepSpeed of then breaks. [inferred]", False),
    ],
)
def test_no_experiment_in_libraries_ended_against_the_entry(verdict: str, note: str, is_broken: bool) -> None:
    row = LibraryVerdict("deepspeed", "cpu", verdict, "why", {"deepspeed": "0.14.5"}, "2.4.1", "2026-01-01", "sha256:0")
    found = violations(edited({TELL: f"{TELL} {note}"}), OnRecord(libraries=(row,)))
    message = f"{verdict}: deepspeed with deepspeed 0.14.5 and torch 2.4.1: why"
    assert found == ([("library-verdict", message)] if is_broken else [])


CODE = """

```python
with torch.serialization.safe_globals([Config]):
    torch.nn.Linear(4, 4, bias=False)
```
"""


@pytest.mark.parametrize(
    ("present", "note", "remark"),
    [
        (["2.4.1", "2.5.1", "2.6.0"], "", ""),
        (["2.5.1", "2.6.0"], "", "`{name}` of torch is in 2.5.1, not in 2.4.1: say with which release that changed"),
        (["2.5.1", "2.6.0"], "Needs torch 2.5. [inferred]", ""),
        (["2.5.1", "2.6.0"], "Needs torch 2.6. [inferred]", "`{name}` of torch is in 2.5.1, not in 2.4.1: say with which release that changed"),
        (["2.4.1", "2.5.1"], "Gone in torch 2.6. [inferred]", ""),
        (["2.4.1", "2.5.1"], "", "`{name}` of torch is in 2.5.1, not in 2.6.0: say with which release that changed"),
        ([], "Needs torch 2.5. [inferred]", "`{name}` is in no release of torch up to 2.6.0"),
    ],
)  # fmt: skip
def test_an_entry_says_since_when_there_is_what_its_code_names(present: list[str], note: str, remark: str) -> None:
    name = "torch.serialization.safe_globals"
    record = Occurrences({"torch": ["2.4.1", "2.5.1", "2.6.0"]}, {name: {"torch": present} if present else {}})
    found = violations(edited({TELL: f"{TELL} {note}{CODE}"}), OnRecord(names=record))
    assert found == ([("unstated-release", remark.format(name=name))] if remark else [])

"""A log that names one of several causes is answered with the fix of that cause."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name

import pytest

from kb.content.catalog import load_catalog
from kb.content.entry import Role, Signature
from kb.content.roots import builtin_root
from kb.diagnose.diagnosis import Diagnosis
from kb.search.document import fixes

CATALOG = load_catalog((builtin_root(),))
NAMED = [
    (entry.id, number)
    for entry in CATALOG.current()
    for number, signature in enumerate(entry.meta.signatures)
    if signature.fix != 1
]

INCLUDE = "/opt/venv/lib/python3.11/site-packages/torch/include/torch/csrc"
MISSING_HEADER = f"{INCLUDE}/python_headers.h:12:10: fatal error: Python.h: No such file or directory"
FAILED_BUILD = "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1."


def signature(entry: str, number: int) -> Signature:
    return CATALOG.get(entry).meta.signatures[number]


def test_the_fix_is_that_of_the_signature(answer: Callable[..., Diagnosis]) -> None:
    told = answer(f"[rank0]: {MISSING_HEADER}\n[rank0]: {FAILED_BUILD}\n").brief
    assert told.entry == "extension-build-toolchain"
    assert told.fix_number == 4
    assert told.fix == fixes(CATALOG.get(told.entry).section("Fix"))[3]
    assert told.fix_zh == fixes(CATALOG.get(told.entry).translation()["修复"])[3]


def test_a_consequence_beside_a_cause_does_not_choose_the_fix(answer: Callable[..., Diagnosis]) -> None:
    """`/bin/sh: c++: not found` is printed below other causes as well."""
    told = answer(f"[rank0]: {MISSING_HEADER}\n[rank0]: /bin/sh: 1: c++: not found\n").brief
    assert told.fix_number == 4


def test_where_no_signature_names_one_it_is_the_first(answer: Callable[..., Diagnosis]) -> None:
    told = answer("[rank1]: RuntimeError: Trying to backward through the graph a second time\n").brief
    assert told.entry == "backward-second-time"
    assert told.fix_number == 1


@pytest.mark.parametrize(("entry", "number"), NAMED)
def test_its_sample_is_answered_with_it(entry: str, number: int, answer: Callable[..., Diagnosis]) -> None:
    named = signature(entry, number)
    found = next(finding for finding in answer(f"{named.sample}\n").findings if finding.id == entry)
    assert named.role is not Role.CONTEXT
    assert found.fix_number == named.fix


@pytest.mark.parametrize(("entry", "number"), NAMED)
def test_the_service_gives_the_whole_fix_with_its_number(entry: str, number: int) -> None:
    fix = signature(entry, number).fix
    document = resolve_name("kb.api.schemas.diagnosis:FixDocument").of(CATALOG.get(entry), fix)
    assert document.text.startswith(f"{fix}. ")

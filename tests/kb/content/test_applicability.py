"""kb.content.applicability: what the versions here say about an incident, and why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kb.content.applicability import Ranges, State, Versions, applicability
from kb.errors import InterpreterError
from kb.machine.installed import versions

HERE = {"torch": "2.4.1", "transformers": "5.2", "odd": None, "homemade": "from-git"}


@pytest.mark.parametrize(
    ("applies_to", "fixed_in", "state", "reason"),
    [
        ({"torch": ">=2.1,<2.5"}, {}, State.APPLIES, "torch 2.4.1 is within >=2.1,<2.5"),
        ({"torch": ""}, {}, State.APPLIES, "torch 2.4.1 is within any version"),
        ({"torch": "<2"}, {}, State.DOES_NOT_APPLY, "it needs torch <2, here 2.4.1"),
        ({}, {"transformers": ">=4.39"}, State.DOES_NOT_APPLY, "fixed in transformers >=4.39, here 5.2"),
        ({}, {"transformers": ">=6"}, State.APPLIES, "transformers 5.2 is not >=6, where it is fixed"),
        ({}, {}, State.UNKNOWN, "the entry names no versions"),
        ({"deepspeed": ">=0.9"}, {}, State.UNKNOWN, "no version of deepspeed is known here"),
        ({"odd": ">=1"}, {}, State.UNKNOWN, "the version of odd cannot be read here"),
        ({}, {"homemade": ">=1"}, State.UNKNOWN, "cannot tell whether homemade from-git is >=1"),
    ],
)
def test_each_range_is_judged_with_its_reason(applies_to: Ranges, fixed_in: Ranges, state: State, reason: str) -> None:
    result = applicability(applies_to, fixed_in, HERE)
    assert (result.state, result.reason) == (state, reason)


@pytest.mark.parametrize(
    ("applies_to", "fixed_in", "state"),
    [
        ({"torch": ">=2.1", "transformers": ">=5"}, {}, State.APPLIES),
        ({"torch": ">=2.1", "transformers": "<5"}, {}, State.DOES_NOT_APPLY),
        ({"torch": ">=2.1"}, {"torch": ">=2.4"}, State.DOES_NOT_APPLY),
        ({"torch": ">=2.1", "deepspeed": ">=0.9"}, {}, State.UNKNOWN),
        ({"torch": "<2", "deepspeed": ">=0.9"}, {}, State.DOES_NOT_APPLY),
    ],
)
def test_one_version_excludes_and_all_are_needed_to_apply(applies_to: Ranges, fixed_in: Ranges, state: State) -> None:
    assert applicability(applies_to, fixed_in, HERE).state is state


@pytest.mark.parametrize(
    ("version", "wanted", "state"),
    [
        ("2.6.0+cu124", ">=2.6", State.APPLIES),
        ("2.7.0a0+7c8ec84dab.nv25.03", ">=2.6", State.APPLIES),
        ("2.6.0a0+ecf3bae40a.nv25.01", ">=2.6", State.UNKNOWN),
        ("2.6.0.dev20250101", "<2.6", State.DOES_NOT_APPLY),
        ("2.5.0.dev20240901", "<2.6", State.APPLIES),
    ],
)
def test_builds_of_vendors_and_nightlies_are_judged_as_the_release_they_become(
    version: str, wanted: str, state: State
) -> None:
    assert applicability({"torch": wanted}, {}, {"torch": version}).state is state


@pytest.mark.parametrize("name", ["flash-attn", "flash_attn", "Flash.Attn"])
def test_a_package_is_the_same_in_every_spelling(name: str) -> None:
    installed: Versions = {"flash_attn": "2.5"}
    assert applicability({name: ">=2"}, {}, installed).state is State.APPLIES


def test_an_interpreter_says_its_own_version_and_its_packages() -> None:
    result = versions(Path(sys.executable))
    assert result["python"] == sys.version.split()[0]
    assert result["packaging"]


def test_an_interpreter_that_is_none_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(InterpreterError, match="does not say what is installed"):
        versions(tmp_path / "python")

"""`kb mcp --allow-verify`: a probe runs on this machine only when the person in front of the client consents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp.client.session import ClientRequestContext
from mcp_types import ElicitRequestParams, ElicitResult
from model import Model, over_stdio
from support import ContentRoot, Kb

MARKS = """\
with open({mark!r}, "a") as file:
    file.write("ran ")
if not is_fixed:
    raise RuntimeError("the thing broke: code 7")
"""


class Person:
    """Answers every question alike, and remembers them."""

    def __init__(self, action: str, **content: Any) -> None:
        self.answer = ElicitResult(action=action, content=content or None)  # type: ignore[arg-type]  # one of three
        self.asked: list[str] = []

    async def __call__(self, context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
        self.asked.append(params.message)
        return self.answer


@pytest.fixture
def mark(content: ContentRoot, tmp_path: Path) -> Path:
    """Where every arm of the probe of `breaks` writes that it ran."""
    path = tmp_path / "ran"
    content.incident("breaks", MARKS.format(mark=str(path)))
    return path


@pytest.fixture(params=["auto", "legacy"], ids=["2026", "2025"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def connected(person: Person | None, mode: str = "auto") -> Iterator[Model]:
    with over_stdio("--allow-verify", mode=mode, consent=person) as model:
        yield model


def test_with_consent_the_probe_runs_and_the_report_is_kept(mark: Path, mode: str, kb: Kb) -> None:
    person = Person("accept", run=True)
    with connected(person, mode) as model:
        report = model.told("verify_fix", id="breaks")
    assert (report["id"], report["verdict"], report["fidelity"]) == ("breaks", "verified", "cpu")
    assert report["leftovers"] == []
    assert mark.read_text() == "ran ran "
    assert [one["verdict"] for one in kb("history", "breaks", "--json").json["reports"]] == ["verified"]
    [question] = person.asked
    assert "Run the probe of breaks (The thing called breaks)" in question


@pytest.mark.parametrize(
    "person", [Person("decline"), Person("cancel"), Person("accept", run=False)], ids=["declined", "cancelled", "no"]
)
def test_without_consent_nothing_runs(mark: Path, mode: str, person: Person) -> None:
    with connected(person, mode) as model:
        assert "did not consent, so nothing was run" in model.refused("verify_fix", id="breaks")
    assert not mark.exists()


def test_consent_is_for_one_run(mark: Path, mode: str) -> None:
    person = Person("accept", run=True)
    with connected(person, mode) as model:
        model.told("verify_fix", id="breaks")
        person.answer = ElicitResult(action="decline")
        model.refused("verify_fix", id="breaks")
    assert len(person.asked) == 2
    assert mark.read_text() == "ran ran "


def test_a_client_that_cannot_ask_is_refused(mark: Path, mode: str) -> None:
    with connected(None, mode) as model:
        told = model.refused("verify_fix", id="breaks")
    assert "this client cannot ask for consent" in told
    assert "`kb verify breaks`" in told
    assert not mark.exists()


def test_nobody_is_asked_about_what_does_not_exist(mark: Path) -> None:
    person = Person("accept", run=True)
    with connected(person) as model:
        assert "nearest: breaks" in model.refused("verify_fix", id="break")
    assert not person.asked


def test_the_person_sees_the_settings_and_a_wrong_one_runs_nothing(mark: Path) -> None:
    person = Person("accept", run=True)
    with connected(person) as model:
        assert "no chosen probe takes 'speed'" in model.refused("verify_fix", id="breaks", settings={"speed": "9\nok"})
    assert r"speed='9\nok'" in person.asked[0]
    assert not mark.exists()


def test_it_says_what_it_does(mark: Path) -> None:
    with connected(None) as model:
        [tool] = [one for one in model.do("list_tools").tools if one.name == "verify_fix"]
    assert tool.annotations.read_only_hint is False
    assert tool.annotations.destructive_hint is False
    assert set(tool.input_schema["properties"]) == {"id", "settings"}


def test_it_is_not_there_unless_it_was_allowed(mark: Path) -> None:
    with over_stdio(consent=Person("accept", run=True)) as model:
        assert "verify_fix" not in [one.name for one in model.do("list_tools").tools]
        assert "Unknown tool: verify_fix" in model.refused("verify_fix", id="breaks")
    assert not mark.exists()

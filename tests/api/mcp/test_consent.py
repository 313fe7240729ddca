"""`kb mcp --allow-verify`: a probe runs on this machine only when the person in front of the client consents."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from mcp.client.session import ClientRequestContext
from mcp_types import ElicitRequestParams, ElicitResult

from tests.support.console import ContentRoot, run_kb
from tests.support.mcp_client import Model, over_stdio

MARKS = """\
with open({mark!r}, "a") as file:
    file.write("ran ")
if not is_fixed:
    raise RuntimeError("the thing broke: code 7")
"""


class Person:
    """Answers every question alike, and remembers them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.says("decline")

    def says(self, action: Literal["accept", "decline", "cancel"], **content: Any) -> None:
        self._answer = ElicitResult(action=action, content=content or None)

    async def __call__(self, context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:  # noqa: ARG002
        self.asked.append(params.message)
        return self._answer


@dataclass
class Place:
    """Where the server runs: its environment, and the file in which every arm of the probe of `breaks` says it ran."""

    env: dict[str, str]
    mark: Path

    @property
    def ran(self) -> str:
        return self.mark.read_text() if self.mark.exists() else ""


@dataclass
class Desk:
    """A model at work, and the person in front of it."""

    model: Model
    person: Person
    place: Place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    path = tmp_path_factory.mktemp("verify")
    root = ContentRoot(path / "content")
    root.incident("breaks", MARKS.format(mark=str(path / "ran")))
    own = {name: str(path) for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "TMPDIR")}
    return Place({**os.environ, **own, "KB_ROOTS": str(root.path)}, path / "ran")


@pytest.fixture(scope="module", params=["auto", "legacy"], ids=["2026", "2025"])
def opened(request: pytest.FixtureRequest, place: Place) -> Iterator[Desk]:
    person = Person()
    with over_stdio("--allow-verify", env=place.env, mode=request.param, consent=person) as model:
        yield Desk(model, person, place)


@pytest.fixture
def desk(opened: Desk) -> Desk:
    """One where nothing was asked and nothing ran yet."""
    opened.person.asked.clear()
    opened.person.says("decline")
    opened.place.mark.unlink(missing_ok=True)
    return opened


def test_with_consent_the_probe_runs_and_the_report_is_kept(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.person.says("accept", run=True)
    report = desk.model.answer("verify_fix", id="breaks")
    assert (report["id"], report["verdict"], report["fidelity"]) == ("breaks", "verified", "cpu")
    assert report["arms"]["control"]["ranks"][0]["message"] == "the thing broke: code 7"
    assert desk.place.ran == "ran ran "
    [question] = desk.person.asked
    assert "Run the probe of breaks (The thing called breaks)" in question
    for name, value in desk.place.env.items():
        monkeypatch.setenv(name, value)
    kept = run_kb(*report["whole_report"].split()[1:], cwd=tmp_path).json["reports"][0]
    names = ("id", "verdict", "reason", "evidence", "fidelity", "next_step")
    assert [kept[name] for name in names] == [report[name] for name in names]
    assert kept["arms"]["control"]["ranks"][0]["traceback"]


@pytest.mark.parametrize("action", ["decline", "cancel"])
def test_without_consent_nothing_runs(desk: Desk, action: Literal["decline", "cancel"]) -> None:
    desk.person.says(action)
    assert "did not consent, so nothing was run" in desk.model.refused("verify_fix", id="breaks")
    assert (len(desk.person.asked), desk.place.ran) == (1, "")


def test_an_answer_that_says_no_is_no_consent(desk: Desk) -> None:
    desk.person.says("accept", run=False)
    assert "did not consent, so nothing was run" in desk.model.refused("verify_fix", id="breaks")
    assert desk.place.ran == ""


def test_consent_is_for_one_run(desk: Desk) -> None:
    desk.person.says("accept", run=True)
    desk.model.answer("verify_fix", id="breaks")
    desk.person.says("decline")
    desk.model.refused("verify_fix", id="breaks")
    assert (len(desk.person.asked), desk.place.ran) == (2, "ran ran ")


def test_nobody_is_asked_about_what_does_not_exist(desk: Desk) -> None:
    desk.person.says("accept", run=True)
    assert "nearest: breaks" in desk.model.refused("verify_fix", id="break")
    assert not desk.person.asked


def test_the_person_sees_the_settings_and_a_wrong_one_runs_nothing(desk: Desk) -> None:
    desk.person.says("accept", run=True)
    message = desk.model.refused("verify_fix", id="breaks", settings={"speed": "9\nok"})
    assert "no chosen probe takes 'speed'" in message
    assert r"speed='9\nok'" in desk.person.asked[0]
    assert desk.place.ran == ""


def test_it_says_what_it_does(desk: Desk) -> None:
    [tool] = [tool for tool in desk.model.do("list_tools").tools if tool.name == "verify_fix"]
    assert tool.annotations.read_only_hint is False
    assert tool.annotations.destructive_hint is False
    assert set(tool.input_schema["properties"]) == {"id", "settings"}


@pytest.mark.parametrize("mode", ["auto", "legacy"], ids=["2026", "2025"])
def test_a_client_that_cannot_ask_is_refused(place: Place, mode: str) -> None:
    place.mark.unlink(missing_ok=True)
    with over_stdio("--allow-verify", env=place.env, mode=mode) as model:
        message = model.refused("verify_fix", id="breaks")
    assert "this client cannot ask for consent" in message
    assert "`kb verify breaks`" in message
    assert place.ran == ""


def test_it_is_not_there_unless_it_was_allowed(place: Place) -> None:
    person = Person()
    person.says("accept", run=True)
    place.mark.unlink(missing_ok=True)
    with over_stdio(env=place.env, consent=person) as model:
        assert "verify_fix" not in [tool.name for tool in model.do("list_tools").tools]
        assert "Unknown tool: verify_fix" in model.refused("verify_fix", id="breaks")
    assert place.ran == ""

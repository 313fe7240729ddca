"""docs/api.md, followed to the letter: its requests run, in their order, and are answered as it shows."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import get_args

import pytest
from pydantic import TypeAdapter

from kb.content.roots import builtin_root
from kb.search.decision import Kind
from kb.search.index_cache import open_index
from kb.search.ranking import search
from kb.sharing.shared_report import Fidelity
from tests.support.console import CHECKOUT, GENEROUS_S, wait_for
from tests.support.replicas import Place, started

PAGE = (CHECKOUT / "docs" / "api.md").read_text(encoding="utf-8")
THREADS = CHECKOUT / "tests" / "bench" / "threads.jsonl"
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\n```(json|text)\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """Commands, and what stands below them on the page: of `kind` json, text or nothing."""

    commands: str
    kind: str
    shown: str


EXAMPLES = [
    Example(commands, kind, shown) for language, commands, kind, shown in FENCED.findall(PAGE) if language == "bash"
]
REQUESTS = [example for example in EXAMPLES if "curl " in example.commands]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, built_in_index: Path) -> Place:
    return Place(tmp_path_factory.mktemp("service"), built_in_index)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, place: Place) -> Iterator[list[str]]:
    """What each request of the page prints, in a folder of its own against a service of its own."""
    folder = tmp_path_factory.mktemp("reader")
    key = place.key("admin")
    with started(place) as replica:
        environment = {"PATH": os.environ["PATH"], "KB": replica.url, "KB_KEY": key, "NO_PROXY": "*"}
        yield [answer(request, folder, environment) for request in REQUESTS]


def answer(example: Example, folder: Path, environment: dict[str, str]) -> str:
    """What the commands print; gaps are counted some seconds after a question, as the page says."""
    result: list[str] = []

    def is_there() -> bool:
        result.append(run(example.commands, folder, environment))
        return "/v1/gaps" not in example.commands or is_shown(example, result[-1])

    wait_for(is_there, "a question to be counted")
    return result[-1]


def run(commands: str, folder: Path, environment: dict[str, str]) -> str:
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=GENEROUS_S,
    )
    assert ended.returncode == 0, f"{commands}\n{ended.stderr}"
    return ended.stdout


def is_like(shown: object, real: object) -> bool:
    """Whether a document is what the page shows of it: it may have more, and `…` stands for the rest of a text."""
    if isinstance(shown, dict):
        return isinstance(real, dict) and all(
            name in real and is_like(item, real[name]) for name, item in shown.items()
        )
    if isinstance(shown, list):
        return isinstance(real, list) and len(real) >= len(shown) and all(map(is_like, shown, real))
    if isinstance(shown, str) and shown.endswith("…"):
        return isinstance(real, str) and real.startswith(shown[:-1])
    return shown == real


def is_shown(example: Example, answer: str) -> bool:
    """Whether the answer is what the page shows of it; where it shows nothing, whether it is one."""
    if example.kind == "json":
        return is_like(json.loads(example.shown), json.loads(answer))
    if example.kind == "text":
        return answer.startswith(example.shown.partition("…")[0].rstrip("\n"))
    return bool(answer) and "urn:kb:problem" not in answer


@pytest.mark.parametrize("number", range(len(REQUESTS)), ids=lambda number: f"request-{number}")
def test_a_request_of_the_page_is_answered_as_it_shows(answers: list[str], number: int) -> None:
    assert is_shown(REQUESTS[number], answers[number]), f"{REQUESTS[number].commands}\n{answers[number]}"


def test_a_wrong_example_would_be_noticed() -> None:
    assert is_like({"a": [{"b": "begins…"}]}, {"a": [{"b": "begins so"}, 2], "c": 3})
    others: tuple[object, ...] = ({"a": []}, {"a": [{"b": "ends"}]}, {"a": [{}]}, {}, [], None)
    for other in others:
        assert not is_like({"a": [{"b": "begins…"}]}, other)


def test_the_chatbot_of_the_page_answers(place: Place, tmp_path: Path) -> None:
    [bot] = PYTHON.findall(PAGE)
    (tmp_path / "bot.py").write_text(bot, encoding="utf-8")
    with started(place) as replica:
        own = {"PATH": os.environ["PATH"], "KB": replica.url, "KB_KEY": place.key("read"), "NO_PROXY": "*"}

        def reply(text: str) -> str:
            return run(f"{sys.executable} bot.py {shlex.quote(text)}", tmp_path, own)

        log = reply(
            "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following"
        )
        assert "[ddp-marked-ready-twice § Fix, " in log
        assert log.endswith(f"{replica.url}/entries/ddp-marked-ready-twice\n")
        question = reply("all-gather times out when I save a checkpoint")
        assert "[checkpoint-save-allgather-timeout § Fix, " in question
        assert question.endswith(f"{replica.url}/entries/checkpoint-save-allgather-timeout\n")
        assert reply("my job hangs").startswith("kb does not know this one. Do you see one of these?\n- ")


def test_the_chatbot_of_the_page_cites_nothing_where_kb_has_no_answer(place: Place, tmp_path: Path) -> None:
    [bot] = PYTHON.findall(PAGE)
    asking = "for line in sys.stdin:\n    print(json.dumps(answer(json.loads(line))))"
    (tmp_path / "bot.py").write_text(
        "import json\n" + bot.replace("print(answer(sys.argv[1]))", asking), encoding="utf-8"
    )
    with open_index((builtin_root(),)) as index:
        foreign = [
            row["query"] for row in map(json.loads, THREADS.read_text("utf-8").splitlines()) if not row["labels"]
        ]
        unknown = [question for question in foreign if search(index, question, 1).kind is not Kind.ANSWER]
    (tmp_path / "questions").write_text("".join(f"{json.dumps(question)}\n" for question in unknown))
    with started(place) as replica:
        own = {"PATH": os.environ["PATH"], "KB": replica.url, "KB_KEY": place.key("read"), "NO_PROXY": "*"}
        replies = run(f"{sys.executable} bot.py < questions", tmp_path, own).splitlines()
    assert len(replies) == len(unknown) >= 0.75 * len(foreign)
    cited = [question for question, reply in zip(unknown, replies, strict=True) if "§" in json.loads(reply)]
    assert not cited


def test_every_role_and_fidelity_is_explained_on_the_page() -> None:
    finding = TypeAdapter(resolve_name("kb.api.schemas.diagnosis:FindingDocument")).json_schema()
    for word in (*finding["properties"]["role"]["enum"], *get_args(Fidelity)):
        assert f"`{word}`" in PAGE


def test_every_address_of_the_api_is_on_the_page(answers: list[str]) -> None:
    for path in ("search", "context", "diagnose", "entries", "reports", "feedback", "gaps", "admin/reindex"):
        assert f"/v1/{path}" in PAGE
    for path in ("/healthz", "/readyz", "/metrics", "/mcp", "/sign-in", "/openapi.json"):
        assert path in PAGE

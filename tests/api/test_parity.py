"""The command line, REST, MCP over HTTP and MCP over stdio give the same answer to the same question."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest

from kb.content.roots import builtin_root
from kb.search.decision import Kind
from kb.search.index_cache import open_index
from kb.search.ranking import search
from tests.support.console import CHECKOUT
from tests.support.mcp_client import Model, over_http, over_stdio
from tests.support.replicas import Place, started

pytestmark = pytest.mark.slow

QUESTIONS = CHECKOUT / "tests" / "bench" / "questions.jsonl"
THREADS = QUESTIONS.with_name("threads.jsonl")
OF_EACH_KIND = 100
ENVELOPE = ("schema", "ok")
OWN = (
    "ALLGATHER timeout save",
    "all gather time-out when saving the checkpoint",
    "保存检查点时 all-gather 超时",
    "多卡训练卡住不动，没有报错",
    "loss 变成 nan",
    "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
    "port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
    "[rank3]:[E ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
    'OSError: [Errno 28] No space left on device: "/dev/shm/nccl-AbCdEf"',
    "nccl timout on the chekpoint",  # misspelled
    "ﬁne‑tuning ＯＯＭ at ｓａｖｅ",  # ligatures, a hyphen that does not break, full width
    'a"b\\c <script>alert(1)</script> & ; drop table report; --',
    "{{7*7}} ${jndi:ldap://x} %s %n \x00 \u202e",
    "😀 how do I bake bread",
    "the zeppelin of the quartermaster is purple",
    "x",
    "。",
    "torch " * 300,
)
FILTERS: tuple[dict[str, list[str]], ...] = (
    {"tag": ["fsdp"]},
    {"framework": ["deepspeed"]},
    {"status": ["confirmed"], "tag": ["checkpoint"]},
    {"area": ["collectives", "launch"]},
)
NAMES = {"tag": "tags", "framework": "frameworks", "status": "statuses", "area": "areas"}  # filters: REST and CLI, MCP


def asked_by_people() -> list[dict[str, Any]]:
    """Real questions that the ranking was tuned with: the others are for measuring it."""
    result = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    return [item for item in result if item["split"] == "dev"]


def some_questions() -> list[str]:
    english = [asked_by_person["query"] for asked_by_person in asked_by_people() if asked_by_person["lang"] == "en"]
    chinese = [asked_by_person["query"] for asked_by_person in asked_by_people() if asked_by_person["lang"] == "zh"]
    return [*OWN, *english[::2][:30], *chinese[::2][:30]]


@dataclass
class Service:
    """One service, its two doors over HTTP, and a server of one's own over stdio."""

    rest: httpx.Client
    models: tuple[Model, Model]


@pytest.fixture(scope="module")
def service(built_in_index: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    place = Place(tmp_path_factory.mktemp("service"), built_in_index, {"KB_RATE": ""})
    with (
        started(place) as replica,
        httpx.Client(base_url=replica.url, timeout=60, trust_env=False) as rest,
        over_http(replica.url) as there,
        over_stdio(env=place.environment) as here,
    ):
        yield Service(rest, (there, here))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """The document of a command under `--json`, in this process: a process for each would take minutes."""
    run: Callable[[list[str]], int] = resolve_name("kb.cli.main:run")

    def document(command: str, *args: str) -> dict[str, Any]:
        capsys.readouterr()
        assert run([command, "--json", *args]) in (0, 1)
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert result["ok"]
        return {name: value for name, value in result.items() if name not in ENVELOPE}

    return document


def short(items: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What a model gets of hits and findings as well."""
    return [
        tuple(item.get(name) for name in ("id", "title", "cause", "status", "score", "confidence")) for item in items
    ]


def test_the_same_question_has_the_same_hits(service: Service, cli: Callable[..., dict[str, Any]]) -> None:
    questions = some_questions()
    assert len(questions) >= 60
    for question in questions:
        expected = cli("search", "--limit", "5", "--", question)
        assert expected.pop("problems") == []
        rest = service.rest.get("/v1/search", params={"q": question, "limit": 5}).json()
        posted = service.rest.post("/v1/search", json={"q": question, "limit": 5}).json()
        assert bool(rest["ask"]) <= (not rest["answered"])
        ask = rest.pop("ask")
        assert posted.pop("ask") == ask
        assert [rest, posted] == [expected, expected], question
        for model in service.models:
            answer = model.answer("search_incidents", query=question, limit=5)
            assert short(answer["hits"]) == short(expected["hits"]), question
            assert answer["answered"] == expected["answered"]
            assert [item["question"] for item in answer.get("ask", [])] == [item["text"] for item in ask]


def of_each_kind() -> dict[str, list[str]]:
    """Real questions, and what their first third says to somebody who has typed no more."""
    rows = [json.loads(line) for path in (QUESTIONS, THREADS) for line in path.read_text("utf-8").splitlines()]
    texts = [text for row in rows for text in (row["query"], row["query"][: len(row["query"]) // 3]) if text.strip()]
    kinds: dict[str, list[str]] = {kind: [] for kind in Kind}
    with open_index((builtin_root(),)) as index:
        for text in dict.fromkeys(texts):
            kinds[search(index, text, 1).kind].append(text)
    return {kind: texts[:OF_EACH_KIND] for kind, texts in kinds.items()}


def kind_of_page(html: str) -> Kind:
    if 'class="unanswered"' not in html:
        return Kind.ANSWER
    return Kind.RELATED if 'aria-label="No entry is clearly about this"' in html else Kind.UNKNOWN


def test_an_answer_is_one_everywhere_and_so_is_none(service: Service, cli: Callable[..., dict[str, Any]]) -> None:
    for kind, questions in of_each_kind().items():
        assert len(questions) == OF_EACH_KIND
        for question in questions:
            asked = {"q": question}
            rest = service.rest.get("/v1/search", params=asked).json()
            page = service.rest.get("/", params=asked, headers={"Accept": "text/html"}).text
            context = service.rest.get("/v1/context", params=asked).json()
            model = service.models[1].answer("search_incidents", query=question)
            kinds = [cli("search", "--", question)["kind"], rest["kind"], context["kind"], model["kind"]]
            assert kinds == [kind] * 4, question
            assert kind_of_page(page) is Kind(kind) or rest["out_of_scope"], question
            assert bool(context["claims"]) <= (kind == Kind.ANSWER), question


def test_a_question_of_common_words_is_told_so(service: Service) -> None:
    """As the terminal says it: see `tests/cli/commands/test_search.py`."""
    page = service.rest.get("/", params={"q": "my job hangs"}, headers={"Accept": "text/html"}).text
    assert kind_of_page(page) is Kind.UNKNOWN
    assert "Many entries fit these words" in page


def test_filters_mean_the_same(service: Service, cli: Callable[..., dict[str, Any]]) -> None:
    for only in FILTERS:
        options = [f"--{name}={value}" for name, values in only.items() for value in values]
        expected = cli("search", "--limit", "9", *options, "timeout")
        del expected["problems"]
        assert expected["hits"]
        parameters: dict[str, Any] = {"q": "timeout", "limit": 9, **only}
        rest = service.rest.get("/v1/search", params=parameters).json()
        del rest["ask"]
        assert rest == expected
        given = {NAMES[name]: values for name, values in only.items()}
        for model in service.models:
            answer = model.answer("search_incidents", query="timeout", limit=9, **given)
            assert short(answer["hits"]) == short(expected["hits"])


def test_the_same_log_has_the_same_diagnosis(
    service: Service, cli: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = [asked_by_person["log"] for asked_by_person in asked_by_people() if asked_by_person["log"]][::4][:30]
    logs += ["step 1 loss 2.0\nstep 2 loss 1.9\n", "RuntimeError: 显存不足\n", "\ufeffa\r\nb\r\n"]
    monkeypatch.chdir(tmp_path)
    for log in logs:
        (tmp_path / "body").write_bytes(log.encode())  # as the text of a request is called
        expected = cli("diagnose", "body")
        assert expected.pop("saved") is None
        everything = {"limit": 10, "lines": 20}
        rest = service.rest.post("/v1/diagnose", params=everything, content=log.encode()).json()
        assert rest.pop("omitted") == {"findings": 0, "lines": 0}
        del rest["ask"]
        for finding in rest["findings"]:
            assert finding.pop("fix")["citation"].startswith(f"[{finding['id']} § Fix, ")
            assert finding.pop("url").endswith(f"/entries/{finding['id']}")
        assert rest == expected, log
        for model in service.models:
            answer = model.answer("diagnose_log", text=log, limit=10)
            assert short(answer["findings"]) == short(expected["findings"]), log
            assert answer["unexplained"] == expected["unexplained"]
            assert answer.get("next_step", {}).get("text") == (expected["next_step"] or {}).get("text")


def test_the_same_entry_is_the_same_document(service: Service, cli: Callable[..., dict[str, Any]]) -> None:
    ids = [path.stem for path in sorted((CHECKOUT / "entries").glob("*.md"))]
    for number, entry_id in enumerate(ids):
        expected = service.rest.get(f"/v1/entries/{entry_id}").json()
        if number % 15 == 0:  # the command line reads all entries each time
            document = cli("show", entry_id)
            del document["probe_file"]
            assert document == expected
        for model in service.models:
            answer = model.answer("get_incident", id=entry_id, sections=list(expected["sections"]))
            assert answer["sections"] == expected["sections"]
            assert all(answer[name] == expected[name] for name in ("id", "title", "status", "severity"))


def test_an_entry_is_the_same_text(service: Service) -> None:
    for path in sorted((CHECKOUT / "entries").glob("*.md"))[::10]:
        text = path.read_text(encoding="utf-8")
        rest = service.rest.get(f"/v1/entries/{path.stem}", headers={"Accept": "text/markdown"})
        assert rest.text == text
        for model in service.models:
            [content] = model.do("read_resource", f"kb://entries/{path.stem}").contents
            assert content.text == text


def test_versions_are_judged_alike_here_and_there(service: Service) -> None:
    asked = {"packages": {"torch": "2.1.0", "nccl": "2.18.1", "deepspeed": None}, "gpu": "H100", "limit": 1000}
    there, here = (model.answer("check_environment", **asked) for model in service.models)
    assert there == here
    assert {item["state"] for item in here["incidents"]} == {"applies", "unknown", "does-not-apply"}

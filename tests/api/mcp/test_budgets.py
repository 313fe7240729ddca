"""What a model gets costs it at most 1,500 tokens, unless it asks for more.

Tokens are estimated without a tokenizer: four characters are one, and so is each character of a wide script.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from mcp_types import CallToolResult, TextContent

from kb.content.catalog import Catalog, load_catalog
from kb.content.roots import builtin_root
from tests.support.console import CHECKOUT
from tests.support.mcp_client import Model, over_stdio

BUDGET = 1500
QUESTIONS = (
    "ALLGATHER timeout save",
    "my job hangs",
    "timeout",
    "multi-gpu training stuck, no error",
    "多卡训练卡住不动，没有报错",
    "torch " * 300,
    "保存" * 1000,
)


def tokens(text: str) -> int:
    wide = sum(ord(character) >= 0x2E80 for character in text)
    return wide + (len(text) - wide) // 4


def cost(result: CallToolResult) -> int:
    """Of everything that a client may show its model."""
    [content] = result.content
    assert isinstance(content, TextContent)
    assert not result.is_error, content.text
    assert result.structured_content is None
    return tokens(content.text)


@pytest.fixture(scope="module")
def model(built_in_index: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    home = str(tmp_path_factory.mktemp("home"))
    own = {"HOME": home, "XDG_CACHE_HOME": str(built_in_index), "XDG_DATA_HOME": home, "KB_ROOTS": ""}
    with over_stdio(env={**os.environ, **own}) as model:
        yield model


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog((builtin_root(),))


def test_the_tools_cost_little(model: Model) -> None:
    tools = model.do("list_tools").tools
    assert sum(tokens(tool.model_dump_json(by_alias=True, exclude_none=True)) for tool in tools) <= BUDGET
    assert tokens(model.client.instructions or "") <= 300


@pytest.mark.parametrize("query", QUESTIONS)
def test_a_search_costs_little(model: Model, query: str) -> None:
    assert cost(model.call("search_incidents", query=query)) <= BUDGET


def test_every_incident_costs_little_and_has_its_fix(model: Model, catalog: Catalog) -> None:
    for entry in catalog.current():
        assert cost(model.call("get_incident", id=entry.id)) <= BUDGET, entry.id
        assert cost(model.call("get_incident", id=entry.id, language="zh")) <= BUDGET, entry.id
        assert "Fix" in model.answer("get_incident", id=entry.id)["sections"], entry.id


def test_every_diagnosis_costs_little_and_has_a_fix(model: Model, catalog: Catalog) -> None:
    for entry in catalog.current():
        for log in entry.logs:
            assert cost(model.call("diagnose_log", text=log.text)) <= BUDGET, entry.id
    text = catalog.get("rank-divergent-collectives").logs[0].text
    short, whole = (model.answer("diagnose_log", text=text, **more) for more in ({}, {"limit": 10}))
    assert short["findings"][0]["fix"]["text"]
    assert short["findings_omitted"] == len(whole["findings"]) - len(short["findings"])


def test_the_log_of_a_healthy_job_costs_little(model: Model) -> None:
    paths = sorted((CHECKOUT / "entries" / "healthy").glob("*.log"))
    for path in paths[::6]:
        assert cost(model.call("diagnose_log", text=path.read_text(encoding="utf-8"))) <= BUDGET, path.name


def test_an_environment_costs_little(model: Model) -> None:
    packages = {"torch": "2.4.0", "nccl": "2.20.5", "transformers": "4.44.0", "deepspeed": "0.14.0"}
    assert cost(model.call("check_environment", packages=packages, gpu="H100")) <= BUDGET
    assert cost(model.call("check_environment")) <= BUDGET

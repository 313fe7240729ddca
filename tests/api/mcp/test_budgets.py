"""What a model gets costs it at most 1,500 tokens, unless it asks for more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from mcp_types import CallToolResult, TextContent

from kb.content.catalog import Catalog, load_catalog
from kb.content.roots import builtin_root
from kb.content.triage import load_triage
from tests.support.console import CHECKOUT
from tests.support.mcp_client import Model, over_stdio

answers: Any = resolve_name("kb.api.mcp.answers")
verification: Any = resolve_name("kb.api.mcp.verification")

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


# Texts of the kinds that answers consist of, and what o200k_base, the tokenizer of GPT-4o and GPT-5, makes of them.
COUNTED = {
    "Saving a sharded model is a collective: the full state dict is all-gathered from every rank.": 22,
    "export NCCL_IB_GID_INDEX=3; show_gids | grep v2; ib_write_bw -d mlx5_0 -x 3 -F": 33,
    '{"id":"nan-loss","confidence":0.95,"evidence":[{"line":1042,"rank":3,"time":"2026-11-12T10:10:10Z"}]}': 42,
    "[rank3]: WorkNCCL(SeqNum=92113, OpType=_ALLGATHER_BASE, NumelIn=12582912, Timeout(ms)=1800000)": 38,
    "https://github.com/pytorch/pytorch/blob/001074d25084fdb87a799823e395a50f5ec044d3/c10/cuda/CUDACachingAllocator.cpp": 41,
    "保存分片模型本身就是一次集合通信:完整的 state dict 要从所有 rank all-gather 而来": 25,
}


def tokens(text: str) -> int:
    return int(answers.tokens(text))


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


@pytest.mark.parametrize("text", COUNTED)
def test_the_estimate_of_tokens_is_near_the_count_of_a_tokenizer(text: str) -> None:
    assert 0.88 <= tokens(text) / COUNTED[text] <= 1.35


def test_the_tools_cost_little(model: Model) -> None:
    tools = model.do("list_tools").tools
    assert sum(tokens(tool.model_dump_json(by_alias=True, exclude_none=True)) for tool in tools) <= BUDGET
    assert tokens(model.client.instructions or "") <= 300


@pytest.mark.parametrize("query", QUESTIONS)
def test_a_search_costs_little(model: Model, query: str) -> None:
    assert cost(model.call("search_incidents", query=query)) <= BUDGET


def test_an_outcome_that_points_to_many_entries_says_how_many_it_leaves_out(model: Model) -> None:
    observation = load_triage((builtin_root(),))["crash"][0]
    [shown] = model.answer("search_incidents", query="flux capacitor crashed with an unknown error")["triage"]
    assert any("omitted" in outcome for outcome in shown["outcomes"])
    for outcome, whole in zip(shown["outcomes"], observation.outcome, strict=True):
        kept = outcome["points_to"]
        assert tuple(kept) == whole.points_to[: len(kept)]
        assert len(kept) + outcome.get("omitted", 0) == len(whole.points_to)


def test_every_incident_costs_little_and_has_its_fix(model: Model, catalog: Catalog) -> None:
    for entry in catalog.current():
        assert cost(model.call("get_incident", id=entry.id)) <= BUDGET, entry.id
        assert cost(model.call("get_incident", id=entry.id, language="zh")) <= BUDGET, entry.id
        answer = model.answer("get_incident", id=entry.id)
        assert "1. " in answer["sections"]["Fix"], entry.id


def test_a_section_that_does_not_fit_ends_after_a_whole_item_and_can_be_asked_for(model: Model) -> None:
    sections = {}
    for name, more in (("short", {}), ("whole", {"sections": ["Fix"]})):
        document = model.answer("get_incident", id="container-without-gpu", **more)
        sections[name] = document["sections"]["Fix"]
        assert ("Fix" in document["more_sections"]) == (name == "short")
    text, end = sections["short"][:-2], sections["short"][-2:]
    assert end == "\n…"
    assert sections["whole"].startswith(text)
    assert sections["whole"][len(text)] == "\n"
    assert text.count("```") % 2 == 0


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


def test_a_log_without_failures_says_what_to_send_instead(model: Model) -> None:
    assert "py-spy dump" in model.answer("diagnose_log", text="step 1, loss 2.0\n")["note"]
    binary = model.answer("diagnose_log", text="\x7fELF\0\0")
    assert (binary["problems"], "note" in binary) == (["body: is binary and was not read"], False)


def test_an_environment_costs_little(model: Model) -> None:
    packages = {"torch": "2.4.0", "nccl": "2.20.5", "transformers": "4.44.0", "deepspeed": "0.14.0"}
    assert cost(model.call("check_environment", packages=packages, gpu="H100")) <= BUDGET
    assert cost(model.call("check_environment")) <= BUDGET


def test_a_verification_costs_little_and_says_what_failed() -> None:
    failed: dict[str, Any] = {"kind": "raised", "exit_code": 3, "signal": "", "type": "RuntimeError", "waiting_in": ""}
    log = "[rank0]: Traceback (most recent call last):\n" * 500
    ranks = [failed | {"rank": rank, "message": "x " * 2000, "traceback": log, "log": log} for rank in range(64)]
    arm: dict[str, Any] = {
        "because": "w " * 400,
        "expected": "raised",
        "outcome": "raised",
        "failure": None,
        "duration_s": 3.7,
    }
    arm |= {"first_failing_rank": 0, "flight_record": ["rank 1 never issued collective 6"] * 64, "ranks": ranks}
    result: dict[str, Any] = {
        "verdict": "other-failure",
        "reason": "r " * 2000,
        "evidence": log,
        "fidelity": "cpu",
        "stands_for": None,
    }
    result |= {"experiment": "gloo", "repeats": None, "arms": {"control": arm, "treatment": arm}}
    environment = {"gpus": [{"name": "NVIDIA H100 80GB HBM3", "driver_version": "570.86.15"}] * 8}
    report = result | {
        "id": "nan-loss",
        "variants": [result] * 8,
        "skipped": [{"experiment": "nccl", "reason": "needs 2 GPUs"}] * 8,
        "check": None,
        "params": {},
        "environment": environment,
        "leftovers": [],
        "next_step": "find out what broke here",
    }
    answer = verification.verification_answer(report)
    assert tokens(answers.encode(answer)) <= BUDGET
    assert answer["arms"]["control"]["ranks"][0]["message"].startswith("x x ")
    assert (answer["verdict"], answer["next_step"]) == ("other-failure", "find out what broke here")
    assert answer["machine"]["driver"] == "570.86.15"

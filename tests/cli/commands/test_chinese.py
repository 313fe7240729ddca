"""Who asks in Chinese is answered in Chinese: labels, facts and sentences of kb; only what is quoted stays as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest

from kb.content.entry import Severity, Status
from tests.support.console import CHECKOUT, Kb
from tests.support.job_logs import HEALTHY, OOM, SHM, watchdog

CHINESE: dict[str, str] = resolve_name("kb.cli.terminal.labels:CHINESE")
cells = resolve_name("kb.cli.terminal.wrapping:cells")

LABEL = re.compile(r"^   (\S+)( +)\S", re.MULTILINE)
PHRASES = {
    piece.strip(" ,:()·`.") for text in CHINESE for piece in re.split(r"\{[^}]*\}", text) if piece.count(" ") > 1
}
WORDS = re.compile(rf"(?<![\w-])(?:{'|'.join([*Status, *Severity])})(?![\w-])")
QUESTIONS = (
    "Mixtral 保存 NCCL 超时",  # an answer
    "训练卡住 NCCL 超时 保存",  # entries that are near, and what to look at
    "训练卡住了，换了机器也一样",  # nothing
    "烤箱里的面包发不起来",
    "HCCL 报错 NPU",  # not what kb is about
)
LOGS = {
    "root": OOM + watchdog(1) + watchdog(2, second=6),
    "cascade": "".join(watchdog(rank) for rank in range(3)),
    "unexplained": "[rank2]: Traceback (most recent call last):\n[rank2]: ShardError: odd shard\n" * 3,
    "nccl": "ncclSystemError: System call (e.g. socket, malloc) or external library call failed\n",
    "shared memory": "".join(f"[rank{rank}]: {SHM.format(rank=rank)}\n" for rank in range(64)),
    "healthy": HEALTHY,
    "empty": "",
}


def assert_chinese(text: str) -> None:
    """No label, no fact and no sentence of kb is in English, and what follows a label begins in its column."""
    for label, gap in LABEL.findall(text):
        if not re.fullmatch(r"[a-z0-9]+(?:-[a-z0-9]+)+", label):  # the line below a title begins with the id
            assert not label.isascii(), label
            assert 3 + cells(label) + len(gap) == 12, label
    assert [phrase for phrase in PHRASES if len(phrase) > 9 and phrase in text] == []
    facts = re.findall(r"^   [a-z0-9-]+-[a-z0-9-]+ (.+)$", text, re.MULTILINE)
    assert not WORDS.search("\n".join(facts))


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_chinese_question_has_a_chinese_answer(kb: Kb, question: str) -> None:
    assert_chinese(kb("search", question, "--why").out)


def test_title_cause_facts_and_commands_of_a_hit(kb: Kb) -> None:
    first = kb("search", QUESTIONS[0]).out.split("\n\n")[0].splitlines()
    assert first[0] == "1. 保存分片模型的检查点时 all-gather 超时"
    assert first[1] == "   checkpoint-save-allgather-timeout 已证实 · 严重程度：高"
    assert first[2].startswith("   原因     保存分片模型本身就是一次集合通信")
    assert first[-2] == "   阅读     kb show checkpoint-save-allgather-timeout --lang zh"
    assert first[-1] == "   验证     kb verify checkpoint-save-allgather-timeout"


def test_how_an_entry_differs_and_whether_it_applies(kb: Kb) -> None:
    answer = kb("search", QUESTIONS[1], "--applies-here").out
    assert "没有条目明确讲这个问题。" in answer
    assert "   不同     不属于：" in answer
    assert re.search(r"^   本机     (适用|不适用|不确定)：", answer, re.MULTILINE)
    assert "可以先看这些，缩小范围：" in answer


@pytest.mark.parametrize("log", LOGS)
def test_a_diagnosis_in_chinese(kb: Kb, tmp_path: Path, log: str) -> None:
    (tmp_path / "train.log").write_text(LOGS[log])
    english, chinese = kb("diagnose", "train.log"), kb("diagnose", "train.log", "--lang", "zh")
    assert chinese.code == english.code
    assert_chinese(chinese.out)
    quoted = re.findall(r"train\.log:\d+(?: rank \d+)?  (.*?)(?: \(\d+ times\))?$", english.out, re.MULTILINE)
    assert all(line in chinese.out for line in quoted), "lines of the log stay as they are"


def test_the_next_step_is_an_action_of_the_chinese_text(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(watchdog(1, op="_ALLGATHER_BASE"))
    said = kb("diagnose", "train.log", "--lang", "zh").out
    assert re.search(r"^   下一步   [^\n]*[\u4e00-\u9fff]", said, re.MULTILINE)
    assert "不是这里，看" not in said.partition("下一步")[2]
    assert re.search(r"^   执行     kb verify ", said, re.MULTILINE)


def test_documents_stay_as_they_are(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(LOGS["root"])
    assert kb("diagnose", "train.log", "--json").json == kb("diagnose", "train.log", "--json", "--lang", "zh").json


def test_another_language_is_refused_alike(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(OOM)
    for command in (("diagnose", "train.log"), ("show", "oom-logits")):
        ended = kb(*command, "--lang", "de")
        assert (ended.code, "available in en and zh" in ended.err) == (2, True)


def test_the_page_of_an_entry_has_chinese_facts_and_records(kb: Kb) -> None:
    page = kb("show", "checkpoint-save-allgather-timeout", "--lang", "zh", "--all").out
    assert "已证实 · 高 · 检查点" in page
    assert "torch: 已验证：" in page
    assert "verified with" not in page


def said(tree: ast.AST) -> Iterator[str]:
    """The texts that a module says by its labels."""
    for item in ast.walk(tree):
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            yield item.value


def test_the_table_has_what_the_terminal_says_and_nothing_else() -> None:
    files = [path for path in (CHECKOUT / "cli").rglob("*.py") if path.name != "labels.py"]
    texts = {text for path in files for text in said(ast.parse(path.read_text(encoding="utf-8")))}
    own = set(said(ast.parse((CHECKOUT / "cli/terminal/labels.py").read_text(encoding="utf-8")).body[-1]))
    assert set(CHINESE) - texts - own - {"; ", ", "} == set()

"""Lines for a terminal: what is copied from them stays whole."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

LONG = "kb verify oom-activations --python /path/to/your/training/env/bin/python"


@pytest.mark.parametrize("width", range(10, 60, 7))
def test_a_command_is_on_one_line(width: int) -> None:
    text = f"Verify it here, then apply the fix (`kb show oom-activations`). Or `{LONG}`. 然后运行 `kb verify oom`,再看 checkpoint-save。"
    lines = [text[start:end] for start, end in resolve_name("kb.cli.terminal.wrapping:breaks")(text, width)]
    for whole in ("`kb show oom-activations`", f"`{LONG}`", "`kb verify oom`", "checkpoint-save"):
        assert any(whole in line for line in lines), lines
    assert "".join("".join(lines).split()) == "".join(text.split())


def test_what_follows_a_chinese_label_begins_in_the_column_of_an_english_one() -> None:
    field, labelled, language = (
        resolve_name(f"kb.cli.terminal.{name}") for name in ("fields:field", "fields:labelled", "labels:language")
    )
    cells = resolve_name("kb.cli.terminal.wrapping:cells")
    for label in ("cause", "line", "next"):
        columns = {cells(field(label, "|", language(lang))) for lang in ("en", "zh")}
        assert columns == {13}
    wrapped = labelled("next", "比较各 rank 停在哪一次集合通信。" * 9, language("zh")).splitlines()
    assert all(line.startswith(" " * 12) and line == line.rstrip() and cells(line) <= 80 for line in wrapped[1:])


def test_a_wrapped_line_has_no_space_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    text = "搜：`grep -niE 'out of memory' logs/*`，最早的一条说了算。torchrun 加 `--log-dir logs --redirects 3` 再跑一次，再看。"
    assert all(
        line == line.rstrip() for line in resolve_name("kb.cli.terminal.wrapping:hanging")(text, 12).splitlines()
    )

"""The Chinese labels, headings and sentences of the terminal, by their English text.

Values of closed lists and sentences of the core are translated in `kb.content.chinese`, which the pages use too.
English output needs neither table.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kb.content.languages import Language
from kb.errors import UsageError

from .completion import complete_languages

LangOption = Annotated[
    str, typer.Option("--lang", help="en, or zh for the Chinese text.", autocompletion=complete_languages)
]

CHINESE = {
    ": ": "：",
    ", ": "、",
    # labels of fields, at most eight columns
    "cause": "原因",
    "matched": "匹配",
    "differs": "不同",
    "here": "本机",
    "score": "得分",
    "example": "示例",
    "read": "阅读",
    "verify": "验证",
    "run": "执行",
    "line": "日志行",
    "inferred": "推断",
    "against": "反证",
    "also": "还有",
    "first": "最先",
    "seen": "出现",
    "absent": "缺席",
    "then": "随后",
    "similar": "相似",
    "next": "下一步",
    "nodes": "节点",
    "save": "保存",
    "saved": "已保存",
    # facts of an entry
    "{} entry · {} severity": "{} · 严重程度：{}",
    "{} severity": "严重程度：{}",
    "from {}": "来自 {}",
    "no probe: {}": "没有 probe：{}",
    # search
    "did you mean: {}": "您是不是要找：{}",
    "a signature of this entry matches your text": "您的文字与本条目的特征相符",
    "{:.3f} words x {:.3f} coverage x {:.3f} agreement": "词 {:.3f} x 覆盖 {:.3f} x 一致 {:.3f}",
    "{:.3f} signature": "特征 {:.3f}",
    "{:.3f} bm25 x {:g} of {!r}, idf {:.2f}": "bm25 {:.3f} x {:g}（{!r}），idf {:.2f}",
    # a question that no entry answers
    "No entry is clearly about this. The nearest ones, and how they differ:": (
        "没有条目明确讲这个问题。最接近的条目及其不同之处："
    ),
    "kb does not know this.": "kb 不了解这个问题。",
    "Many entries fit these words, and none stands out. Paste the error line itself to tell them apart.": (
        "符合这些词的条目很多，没有哪一条更突出。报错原文才能区分它们。"
    ),
    "kb is not about this. See: {}": "这不在 kb 的范围内。参见：{}",
    "These entries share a few words with it:": "只有几个词相同的条目：",
    "Try fewer words, fewer filters, or the error line itself; `kb list` shows every entry.": (
        "词少一些、条件少一些，或直接用报错那一行，会找到更多；`kb list` 列出全部条目。"
    ),
    "What to check next:": "可以先看这些，缩小范围：",
    "  ({})": "（{}）",
    "the entry does not mention {}": "条目没有提到 {}",
    "it is not about {}": "不属于：{}",
    # diagnosis
    "{} · confidence {:.2f} · {}": "{} · 把握 {:.2f} · {}",
    "no line reports a failure in English or Chinese: {} of {} read": "没有一行报告失败（英文或中文）：读取 {1}，{0}",
    "there is nothing to read: {} of 0 bytes": "没有可读取的内容：{}，0 字节",
    "{:,} line": "{:,} 行",
    "{:,} lines": "{:,} 行",
    "{:,} file": "{:,} 个文件",
    "{:,} files": "{:,} 个文件",
    "{:,} lines in all": "共 {:,} 行",
    ", of {}": "，来自 {}",
    " ({:,} times)": "（{:,} 次）",
    "and {} more": "另有 {} 条",
    "more: see --json": "还有更多：见 --json",
    "possible: {}": "可能：{}",
    "at best: {}": "至多：{}",
    "what followed fits: {}": "随后出现的内容符合：{}",
    "unknown: no confident match": "不明：没有可靠的匹配",
    "unknown: no entry explains the first failure": "不明：没有条目能解释最先的失败",
    "fix": "修复",
    "attempt {} of {}": "第 {} 次启动，共 {} 次",
    "rank {} failed first": "rank {} 最先失败",
    "several ranks failed; order unknown": "多个 rank 失败，先后不明",
    "{}: did not wait where the others waited": "{}：没有在其他 rank 等待的地方等待",
    "kb new ID --from {} makes an entry of it": "用 kb new ID --from {} 由它生成条目",
    "`{}` saves a redacted excerpt, for a new entry": "`{}` 保存脱敏的节选，用于新条目",
    "there is nothing to verify: no entry with a probe explains this": "没有可验证的：能解释它的条目都没有 probe",
    # an entry
    "References": "参考",
    "Verify on this machine": "在本机验证",
    "Not this: {}.": "不是：{}。",
    "Fix {} in full: {}": "修复 {} 的全文：{}",
    "GPU arms: ": "GPU 实验：",
    ", in an earlier wording": "，针对旧版本条目",
    ", with an earlier probe": "，使用旧版本 probe",
    "; ": "；",
    "`--all` adds logs, look-alikes, environment, reasons, known cases, references.": "`--all` 另有环境和参考。",
}


def language(value: str) -> Language:
    """The language that `--lang` names."""
    if value not in list(Language):
        raise UsageError(f"--lang {value}: entries are available in en and zh")
    return Language(value)


def label(text: str, lang: Language) -> str:
    """A text of the table in this language."""
    return CHINESE[text] if lang is Language.CHINESE and text else text


def value(text: str, lang: Language) -> str:
    """A value of a closed list of the core, such as a status, or a list of ranks, in this language."""
    if lang is Language.ENGLISH:
        return text
    from kb.content.chinese import dictionary  # only Chinese output needs the table

    return dictionary().label(text)


def sentence(text: str, lang: Language) -> str:
    """A sentence of the core in this language; unchanged if the table has no translation."""
    if lang is Language.ENGLISH:
        return text
    from kb.content.chinese import dictionary

    return dictionary().sentence(text) or text


def listed(words: list[str], lang: Language) -> str:
    return label(", ", lang).join(words)


def joined(clauses: list[str], lang: Language) -> str:
    return label("; ", lang).join(filter(None, clauses))

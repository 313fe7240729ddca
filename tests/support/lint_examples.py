"""For every rule about the text of an entry, edits that break it and similar edits that do not."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kb.content.languages import Language
from kb.content.parser import parse_entry
from kb.lint.body import blocks
from kb.lint.rule import EntryFile, OnRecord, ProbeFile
from kb.probe import Arm, Experiment, Probe, completed, unknown
from tests.support.console import ENTRY

SOUND = ENTRY.format(id="example", title="The thing", extra="probe: example\n", symptom="The thing broke.")

ENTRY_FILE = Path("/content/entries/example.md")
IDS = frozenset({"example", "sound-one", "rank-divergent-collectives"})
ARM = Arm(print, completed(), "it is a test", "cpu")
PROBE_FILE = ProbeFile(
    Path("/content/probes/example.py"),
    "def job(ctx):\n    dist.barrier()\n",
    "example",
    (),
    Probe((Experiment("plain", ARM, ARM),), check=lambda _: unknown()),
)
TODAY = datetime.date(2026, 1, 1)

Edits = Mapping[str, str]


@dataclass(frozen=True)
class Example:
    """Edits of the valid entry. `bad` breaks only this rule, in the line with `at`; `good` does not break it."""

    rule: str
    bad: Edits
    at: str
    good: Edits = field(default_factory=dict)


def entry_file(
    text: str,
    languages: frozenset[Language] = frozenset(Language),
    on_record: OnRecord | None = None,
) -> EntryFile:
    """An entry with this text and a valid probe. Raises `ContentError`."""
    entry = parse_entry(text.encode(), ENTRY_FILE, "test")
    given = blocks(text), languages, entry, IDS, PROBE_FILE, frozenset[str](), TODAY, on_record or OnRecord()
    return EntryFile(ENTRY_FILE, text, *given)


def edited(edits: Edits) -> str:
    """The valid entry with these edits, each of which must match its text."""
    text = SOUND
    for old, new in edits.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


SAMPLE = "    sample: 'the thing broke: code 7'\n"
PROBE = "probe: example\n"
REFERENCE = "    grade: claimed\n"
CAUSE = "The thing is made to break. [probe plain]"
FIX = "Do not break it. [probe plain]"
TELL = "It says so."
SECOND = "```log\n[rank3]"
UNPROVED = {FIX: "Do not break it. [inferred] Not proved here: it is a test."}
INFERRED = {**UNPROVED, "[probe plain]": "[inferred]"}
UNSHOWN = {PROBE: "probe_waiver: no time\n", "confirmed": "reported", **INFERRED}
PYTHON = "```python\n"
WHY = "Nothing breaks it. [probe plain] [claimed 1]"


def signature(pattern: str, sample: str, role: str = "root") -> Edits:
    """Edits that add a signature to the valid entry."""
    more = f"  - pattern: '{pattern}'\n    role: {role}\n    source: a test\n    sample: '{sample}'\n"
    return {SAMPLE: SAMPLE + more}


def reference(url: str, grade: str, mark: str) -> Edits:
    """Edits that add a reference and a mark to the valid entry."""
    more = f"  - url: {url}\n    shows: nothing\n    grade: {grade}\n"
    return {REFERENCE: REFERENCE + more, WHY: f"{WHY} {mark}"}


def link(lines: str) -> Edits:
    return {PROBE: PROBE + lines}


def fix(command: str) -> Edits:
    return {FIX: f"{FIX}\n\n```bash\n# once\n{command}\n```"}


def cause(length: int) -> Edits:
    return {CAUSE: "The " + "x" * (length - 5) + ". [probe plain]"}


NOT = "not_signatures:\n  - 'the thing held'\n"
BOOTSTRAP = "NCCL INFO Bootstrap : Using lo:127.0.0.1<0>"

SIGNATURES = (
    Example("sample-not-matched", {SAMPLE: SAMPLE.replace("7", "x")}, "sample:", {SAMPLE: SAMPLE.replace("7", "42")}),
    Example("not-signature-matched", link(f"{NOT}  - 'a thing broke: code 8; the thing broke: code 9'\n"), "code 8",
            link(f"{NOT}  - 'a thing broke: code 8; the thing broke: code N'\n")),
    Example("matches-empty-text", signature("(a thing)?", "a thing", "context"), "(a thing)?",
            signature("(a )?thing", "a thing", "context")),
    Example("matches-healthy-log", signature("NCCL INFO Bootstrap : Using", BOOTSTRAP), "pattern: 'NCCL",
            signature("NCCL INFO Bootstrap : Using lo:", BOOTSTRAP)),
    Example("matches-healthy-log", signature("RuntimeError:", "RuntimeError: it broke", "cascade"), "pattern: 'Run",
            signature("RuntimeError:", "RuntimeError: it broke", "context")),
    Example("ambiguous-repeat", signature(r"broke: (\w+\s?)+$", "broke: it did"), r"(\w+\s?)+$",
            signature(r"broke: (\w+\s)*\w+$", "broke: it did")),
    Example("ambiguous-repeat", signature(r"broke (.*a){20}", "broke " + "a" * 20), "(.*a)",
            signature(r"broke (.*a){2}", "broke aa")),
    Example("slow-pattern", signature("(?:a?){30}a{30}broke", "a" * 30 + "broke"), "(?:a?)",
            signature("a{30,60}broke", "a" * 30 + "broke")),
    Example("no-literal", signature("(?i)it snapped", "it snapped"), "(?i)it",
            signature("it snapped|a thing is lost", "it snapped")),
    Example("only-context", {"role: root": "role: context"}, "signatures:", {"role: root": "role: cascade"}),
    Example("duplicate-pattern", signature(r"the thing broke: code \d+", "the thing broke: code 7"), r"code \d+",
            signature(r"the thing broke: code \w+", "the thing broke: code 7")),
)  # fmt: skip

LINKS = (
    Example("unknown-link", link("caused_by:\n  - sound-one\n  - sound-on\n"), "- sound-on",
            link("caused_by:\n  - sound-one\n")),
    Example("link-to-itself", link("masked_by: [example]\n"), "masked_by:", link("masked_by: [sound-one]\n")),
    Example("circular-link", link("causes: [sound-one]\ncaused_by: [sound-one]\n"), "caused_by:",
            link("causes: [sound-one]\ncaused_by: [rank-divergent-collectives]\n")),
    Example("misspelt-id", {TELL: f"{TELL}\nNot so: see\n`rank-divergent-collective`."}, "`rank-",
            {TELL: "Not so: see `rank-divergent-collectives`, `sound-on`, or `nvidia-container-toolkit`."}),
    Example("missing-item", {TELL: f"{TELL}\nCause 2 is rarer."}, "Cause 2 is", {TELL: f"{TELL} See fix 3 of `sound-one`."}),
    Example("missing-item", {SAMPLE: f"{SAMPLE}    fix: 2\n"}, "- pattern:", {SAMPLE: f"{SAMPLE}    fix: 1\n"}),
    Example("missing-item", {"不要弄坏。": "1. 不要弄坏。\n2. 不要拆。"}, "### 修复",
            {FIX: f"1. {FIX}", "不要弄坏。": "1. 不要弄坏。", TELL: f"{TELL} See fix 1, or `sound-one`, Fix 9."}),
    Example("probe-or-waiver", link("probe_waiver: no time\n"), "probe_waiver:"),
    Example("probe-or-waiver", {PROBE: "", **INFERRED, "confirmed": "reported"}, "id: example",
            {PROBE: "probe_waiver: needs a lightning strike\n", **INFERRED, "confirmed": "reported"}),
    Example("probe-name", {PROBE: "probe: another\n"}, PROBE[:7]),
    Example("confirmed-without-probe", {PROBE: "probe_waiver: no time\n", **INFERRED}, "status:",
            {PROBE: "probe_waiver: no time\n", **INFERRED, "confirmed": "disputed"}),
)  # fmt: skip

CLAIMS = (
    Example("unmarked-claim", {CAUSE: f"{CAUSE}\n\nIt is also\nfragile."}, "It is also",
            {CAUSE: f"{CAUSE}\n\n1. It is also:\n\n   - fragile [inferred]\n   - old\n\n   and it shows."}),
    Example("unmarked-claim", {FIX: f"1. {FIX}\n2. Glue it. Not proved here: no glue:\n\n   ```bash\n   glue  # [probe plain]\n   ```"}, "2. Glue it",
            {FIX: f"{FIX} Or glue it:\n\n```bash\nglue\n```\n\n用胶水：\n\n```bash\nglue\n```"}),
    Example("unmarked-claim", {WHY: f"{WHY}\n\nIt is `[probe plain]`."}, "It is `", {WHY: f"{WHY}\n\n| a | b |\n|--|--|"}),
    Example("unknown-mark", {WHY: f"{WHY}\nReally so. [sourc 1]"}, "[sourc 1]", {WHY: f"{WHY} [Rank 1] `[sourc 1]`"}),
    Example("unknown-mark", {WHY: f"{WHY} [source]"}, "[source]"),
    Example("unknown-mark", {WHY: f"{WHY} [Thread 1, 2]"}, "[Thread 1, 2]"),
    Example("dangling-mark", {TELL: f"{TELL} [claimed 2]"}, "[claimed 2]", {TELL: f"{TELL} [claimed 1]"}),
    Example("wrong-grade", {TELL: f"{TELL}\nSo. [thread 1]"}, "[thread 1]", {TELL: f"{TELL}\nSo. [claimed 1]"}),
    Example("wrong-grade", reference("https://x.org", "read in thread", "[thread 2] [source 2]"), "[source 2]",
            reference("https://x.org", "read in source", "[source 2]")),
    Example("unknown-experiment",
            {PROBE: "probe_waiver: no time\n", "confirmed": "reported", CAUSE: "So. [inferred]",
             **UNPROVED}, WHY, {PROBE: "probe_waiver: no time\n", "confirmed": "reported", **INFERRED}),
    Example("unknown-experiment", {CAUSE: CAUSE.replace("plain", "ornate")}, CAUSE[:20],
            {CAUSE: CAUSE.replace("plain", "check")}),
    Example("unknown-experiment", {CAUSE: CAUSE.replace(" plain", "")}, CAUSE[:20]),
    Example("no-reference",
            {"references:\n": "", "  - url: https://example.org/example\n    shows: nothing, it is a test\n": "",
             REFERENCE: "references: []\n", " [claimed 1]": ""}, "references: []"),
    Example("duplicate-reference", reference("https://example.org/example", "claimed", "[claimed 2]"), "- url",
            reference("https://example.org/example", "read in thread", "[thread 2]")),
    Example("unused-reference", reference("https://x.org", "claimed", ""), "https://x.org",
            reference("https://x.org", "inferred", "")),
)  # fmt: skip

FIXES = (
    Example("unproved-fix", {FIX: "1. Do not break it. [inferred]\n2. Glue it. [probe plain]"}, "1. Do not", UNPROVED),
    Example("unproved-fix", {FIX: "Do not break it. [inferred]"}, "Do not break", {FIX: "Do not break it. [probe check]"}),
    Example("untried-code", {FIX: f"{FIX}\n\n{PYTHON}glue()\n```"}, "glue()", {FIX: f"{FIX}\n\n{PYTHON}dist.barrier()\n```"}),
    Example("untried-code", {FIX: f"1. {FIX}\n\n   {PYTHON}   x = 1\n   ```\n2. {FIX}"}, "x = 1",
            {FIX: f"1. {FIX} Not proved here: no x.\n\n   {PYTHON}   x = 1\n   ```\n2. {FIX}"}),
    Example("code-language", {FIX: f"{FIX}\n\n```\nglue\n```"}, "```"),
    Example("code-language", {TELL: f"{TELL}\n\n```cobol\nglue\n```"}, "```cobol", {TELL: f"{TELL}\n\n```text\nglue\n```"}),
    Example("broken-code", {TELL: f"{TELL}\n\n{PYTHON}glue(\n```"}, "glue(", {TELL: f"{TELL}\n\n{PYTHON}glue()\n```"}),
    Example("broken-code", {TELL: f"{TELL}\n\n```json\n{{\n'a': 1}}\n```"}, "'a': 1", {TELL: f'{TELL}\n\n```json\n{{"a": 1}}\n```'}),
    Example("broken-code", {TELL: f"{TELL}\n\n```yaml\na: [\n```"}, "a: [", {TELL: f"{TELL}\n\n```yaml\na: [1]\n```"}),
    Example("broken-code", {TELL: f"{TELL}\n\n```ini\na\n```"}, "a", {TELL: f"{TELL}\n\n```ini\n[a]\nb = %c\n```"}),
    Example("inferred-negative", {TELL: f"{TELL} Glue does not help. [inferred]"}, "Glue",
            {TELL: f"{TELL} Glue does not help. [claimed 1] [inferred] It may melt. [inferred]"}),
    Example("no-action", {**UNSHOWN, TELL: "- The same in mid-epoch is not this: see the log."}, "## How to tell",
            {**UNSHOWN, TELL: "- Compare the sizes: equal, it is not this."}),
    Example("no-action", {**UNSHOWN, TELL: "- Compare it.", "日志里有这句话。": "- 同样的报错出现在 epoch 中间：不是这里。"}, "## How to tell",
            {**UNSHOWN, TELL: "- Compare it.", "日志里有这句话。": "- 比较大小：相同，就不是这里。"}),
)  # fmt: skip

FORM = (
    Example("hidden-text", {CAUSE: f"\u202e{CAUSE}"}, CAUSE, {CAUSE: f"é\u200d {CAUSE}"}),
    Example("headings", {"## How to tell": "## How to notice"}, "## How to notice"),
    Example("headings", {"## Fix": "## X", "## Why it works": "## Fix", "## X": "## Why it works"}, "## Why it works"),
    Example("empty-section", {"A test.\n": ""}, "## Environment", {"A test.\n": "```bash\nls\n```\n"}),
    Example("few-logs", {SECOND: SECOND.replace("log", "text")}, "## Symptom"),
    Example("no-look-alike", {"log look-alike": "text"}, "## How to tell", {"log look-alike": "log  look-alike"}),
    Example("long-cause", cause(241), "The xx", cause(240)),
    Example("long-text", {TELL: f"{TELL}{' a' * 1_400}"}, "## Symptom", {TELL: f"{TELL}{' a' * 800}"}),
    Example("chinese-parts", {"### 环境": "### 环境说明"}, "### 环境说明"),
    Example("chinese-parts", {"测试。": ""}, "### 环境", {"测试。": "```log\n测试\n```"}),
    Example("half-width-punctuation", {"坏了。": "坏了,真的。"}, "坏了", {"坏了。": "坏了，`a`, `b` 都是 (1, 2)。"}),
    Example("half-width-punctuation", {"坏了。": "坏了(真的)。"}, "坏了"),
    Example("chinese-text", {"测试条目": "a test"}, "title_zh:", {"测试条目": "test 条目"}),
    Example("chinese-text", {"不要弄坏。": "Do not break it."}, "Do not break it."),
    Example("aliases", {"[made for a test, 测试]": "[made for a test]"}, "aliases:",
            {"[made for a test, 测试]": "[made for a test, test 测试]"}),
    Example("aliases", {"[made for a test, 测试]": "[made for 测试]"}, "aliases:"),
    Example("hollow-alias", {"[made for a test, 测试]": "[made for collate_fn, 测试]"}, "aliases:",
            {"[made for a test, 测试]": "[made for collate_fn, 测试]", TELL: f"{TELL} See `collate_fn`."}),
    Example("missing-area", {"area: data\n": ""}, "id: example", {"area: data": "area: launch"}),
    Example("missing-facet", {"phases: [data]\n": ""}, "id: example", {"phases: [data]": "phases: [data, save]"}),
    Example("reviewed-in-future", {"2026-01-01": "2026-01-03"}, "reviewed:", {"2026-01-01": "2026-01-02"}),
    Example("unfinished", {TELL: f"{TELL} TODO"}, "TODO", {TELL: f"{TELL} todo"}),
    Example("package-name", link('applies_to:\n  torch: ">=2"\n  Flash_Attn: ""\n'), "Flash_Attn",
            link('applies_to:\n  torch: ">=2"\n  flash-attn: ""\n')),
    Example("folklore", fix("NCCL_P2P_DISABLE=1 torchrun"), "P2P", fix("NCCL_P2P_DISABLE=0 torchrun")),
    Example("folklore", fix("export NCCL_IB_DISABLE=1"), "IB",
            {**fix("export NCCL_IB_DISABLE=1"), "[test]": "[test, transport]"}),
    Example("folklore", fix("rm -rf ~/.cache && reboot"), "rm -rf", fix("rm -rf ~/.cache/torch_extensions/py311")),
)  # fmt: skip

READING = (
    Example("no-front-matter", {"---\nid": "id"}, "id: example"),
    Example("yaml", {"tags: [test]": "tags: [test"}, "aliases:", {"tags: [test]": "tags: [test, test-2]"}),
    Example("yaml", {"tags: [test]": "tags: &a [test]"}, "tags:"),
    Example("duplicate-key", {"severity: low": "severity: low\nseverity: high"}, "severity: high"),
    Example("front-matter", {"severity: low": "severity: fatal"}, "severity:", {"severity: low": "severity: high"}),
    Example("front-matter", {"area: data": "area: date"}, "area:"),
    Example("front-matter", {REFERENCE: ""}, "- url: https://example.org/example"),
    Example("id-is-not-file-name", {"id: example": "id: examples"}, "id: examples"),
    Example("duplicate-section", {"## Environment": "## Symptom"}, "## Symptom"),
)  # fmt: skip

EXAMPLES = (*SIGNATURES, *LINKS, *CLAIMS, *FIXES, *FORM, *READING)

# Rule to (a glossary that breaks it, the line of the violation, a similar glossary that does not).
GLOSSARIES = {
    "unreadable-glossary": ('groups = ["save", "保存"]\n', 1, 'groups = [["save", "保存"]]\n'),
    "glossary-word-twice": (
        'groups = [\n  ["save", "保存"],\n  ["keep", "all-saved"],\n  ["saving", "存盘"],\n]\n',
        4,
        'groups = [\n  ["save", "保存"],\n  ["keep", "all-saved"],\n  ["all", "存盘"],\n]\n',
    ),
    "glossary-language": ('groups = [\n  ["保存", "存盘"],\n]\n', 2, 'groups = [\n  ["保存 ckpt", "ckpt"],\n]\n'),
    "glossary-group-size": ('groups = [\n  ["save"],\n]\n', 2, 'groups = [\n  ["save", "ckpt"],\n]\n'),
    "glossary-stop-word": ('groups = [\n  ["save", "with the"],\n]\n', 2, 'groups = [\n  ["save", "with disk"],\n]\n'),
    "glossary-long-word": (
        'groups = [\n  ["hang",\n   "it does not go on"],\n]\n',
        3,
        'groups = [\n  ["hang",\n   "does not go on"],\n]\n',
    ),
}

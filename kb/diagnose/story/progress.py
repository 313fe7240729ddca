"""Reads progress from a line in any usual form: a phase of training, a counter that advances, values of metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kb.diagnose.story.lines import StoryLine

TOKENIZE, EVALUATE, SAVE, RESUME, LOAD, TEARDOWN, TRAIN = (
    "tokenize",
    "evaluate",
    "save",
    "resume",
    "load",
    "teardown",
    "train",
)
WORDS = (  # a line is in the first phase whose words it has
    (TOKENIZE, r"token[iy][sz]\w*|preprocess\w*|Map(?: \(num_proc|:)|Generating \w+ split|packing|分词|预处理"),
    (EVALUATE, r"eval(?:uat\w+)?|validat\w+|val(?:id)? (?:loss|step|acc)|testing|验证|评估|评测"),
    (RESUME, r"resum\w+|restor\w+|load(?:ing|ed) (?:checkpoint(?! shards)|state)|恢复|续训"),
    (
        SAVE,
        r"sav(?:e|ing|ed)\b|checkpoint(?:ing|ed)?\b|upload\w*|ckpt|writing (?:model|shard|snapshot)|push\w* to hub"
        r"|state.dict|consolidat\w*|保存|上传",
    ),
    (
        LOAD,
        r"load\w*|download\w*|starting|initiali[sz]\w+|building (?:model|dataset)|warm.?up|set(?:ting)? ?up|spawn\w*"
        r"|加载|下载|初始化|启动",
    ),
    (
        TEARDOWN,
        r"(?:training|run|job|all) (?:is )?(?:finished|done|complete\w*|ended)|destroy\w*|shutting down|exiting|bye"
        r"|best epoch|train_runtime|^\W*(?:done|finished|完成)\W*$|训练(?:完成|结束)",
    ),
    (
        TRAIN,
        r"train\w*|\bstep\b|\biter(?:ation)?s?\b|\bepoch\b|\bbackward\b|\boptimizer\b|\bloss\b|global_step|\bbatch\b|训练|步",
    ),
)
PHASES = [
    (phase, re.compile(words if phase == TRAIN else rf"(?<![A-Za-z])(?:{words})", re.IGNORECASE))
    for phase, words in WORDS
]
BAR = re.compile(
    r"(?:^|(?P<label>[^|\r\n%]{0,80}?):?\s+)(?P<percent>\d{1,3})%\|[^|]*\|\s*(?P<count>[\d.,]{1,12}[kKMG]?)/(?P<total>[\d.,]{1,12}[kKMG]?)"
    r"\s*\[[\d:]+<[\d:?]+"
)
COUNTER = re.compile(
    r"(?<![A-Za-z])(?P<label>global[_ ]?step|train[_ ]?step|step|iteration|iter|it|batch|epoch|shard|part|file|chunk"
    r"|example|sample|prompt|page)s?"
    r"['\"]?\s{0,8}[=:#\[(]{0,2}\s{0,12}(?P<count>\d{1,12})(?:\s{0,12}(?:/|of)\s{0,12}(?P<total>\d{1,12}))?(?![\d.]*[a-z])",
    re.IGNORECASE,
)
CHINESE_COUNTER = re.compile(r"第 ?(?P<count>\d{1,9}) ?(?:/ ?(?P<total>\d{1,9}) ?)?(?P<label>步|轮|批|个)")
CHINESE_LABEL = re.compile(r"(?P<label>步数|迭代|轮次)[ :：=]{0,3}(?P<count>\d{1,9})(?:\s?/\s?(?P<total>\d{1,9}))?")
CHINESE_LABELS = {
    "步": "step",
    "轮": "epoch",
    "批": "batch",
    "个": "",
    "步数": "step",
    "迭代": "iteration",
    "轮次": "epoch",
}
COUNTED = re.compile(r"[\[(](?P<count>\d{1,9})\s{0,4}/\s{0,4}(?P<total>\d{1,9})[\])]")  # `[3/40]`
EPOCH = re.compile(r"['\"]?epoch['\"]?[=: ]{1,3}(\d{1,6}\.\d{1,6})", re.IGNORECASE)

KEY = (
    r"(?:[A-Za-z_/]{0,40}loss(?:/\w{1,20})?|lm loss|grad[_ ]?norm|gnorm|\|g\||ppl|perplexity|lr|learning[_ ]rate"
    r"|loss[_ ]scale|step[_ ]time|data[_ ]time|time per iteration \(ms\)|(?:samples|tokens|tok|it|examples)"
    r"(?:/|_per_)s(?:ec)?|throughput|tflops|mfu|reward|kl|entropy|损失|学习率|梯度范数|吞吐)"
)
VALUE = r"[-+]?(?:\d{1,20}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,3})?|\.\d{1,20}|nan|inf(?:inity)?)"
METRIC = re.compile(
    rf"(?<![A-Za-z_])['\"]?(?P<key>{KEY})['\"]?\s{{0,3}}(?:[=:：|]|is|->)?\s{{0,10}}['\"]?(?:tensor\()?"
    rf"(?P<value>{VALUE})(?![\w.]*[A-Za-z_]{{2}})",
    re.IGNORECASE,
)
METRIC_WORDS = re.compile(
    r"loss|norm|lr|rate|time|/s|_per_s|throughput|mfu|flops|ppl|reward|kl|entropy|损失|吞吐|学习率", re.I
)
NAMES = {"lm_loss": "loss", "train_loss": "loss", "损失": "loss", "gnorm": "grad_norm", "gradnorm": "grad_norm"}
NAMES |= {"|g|": "grad_norm", "梯度范数": "grad_norm", "learning_rate": "lr", "学习率": "lr", "吞吐": "throughput"}
SCALES = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}
CODE = re.compile(r"[(){};]|Error|Warning|^\s{4}|\.py\b|\bself\b|https?:|=")
NUMBER = re.compile(r"((?<![\w.])[-+]?(?:(?i:nan|inf(?:inity)?)(?!\w)|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?!\w)|\.\d+)|\d+)")
INTEGER, FRACTION = "0", "0.5"
MOST_LAYOUTS = 8192
LONGEST_PROGRESS, LONGEST_REMARK = 2000, 160  # characters


@dataclass(frozen=True, slots=True)
class Progress:
    """`label` `count` of `total` in a phase, such as `step 8 of 24`; all but one of these may be missing.

    `epoch` is a fractional epoch, which the Trainer of transformers prints instead of a step.
    """

    line: StoryLine
    phase: str
    label: str = ""
    count: int | None = None
    total: int | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    epoch: str = ""

    @property
    def text(self) -> str:
        """The progress as text, such as `evaluate batch 16/30`."""
        total = f"/{self.total}" if self.total else ""
        counter = f"{self.label} {self.count}{total}".strip() if self.count is not None else ""
        return " ".join(filter(None, (self.phase or "output", counter)))


class Layout(NamedTuple):
    """What a line shows, whatever its numbers: which of them are the counter and the metrics.

    A log prints a few layouts a million times. Indices are -1 if there is no such number.
    """

    phase: str
    label: str
    counter: int
    total: int
    epoch: int
    metrics: tuple[tuple[str, int], ...]
    is_remark: bool


def read_progress(line: StoryLine) -> Progress | None:
    """The progress that a line shows; None for other lines, such as stack frames and messages of libraries."""
    text = line.message
    if len(text) > LONGEST_PROGRESS or line.text.startswith(("    at ", "  File ")):
        return None
    if "%|" in text and (bar := BAR.search(text)):
        metrics, unnamed = read_metrics(text[bar.end() :]), "bytes" if bar["count"][-1] in SCALES else "bar"
        label = (bar["label"] or "").strip() or unnamed
        phase = phase_of(label) or (TRAIN if metrics else "")
        return Progress(line, phase, label, _number(bar["count"]), _number(bar["total"]), metrics)
    layout, numbers = _read_layout(text)
    if layout.counter < 0 and layout.epoch < 0 and not layout.metrics:
        return Progress(line, layout.phase) if layout.is_remark else None
    count, total = (_number(numbers[index]) if index >= 0 else None for index in (layout.counter, layout.total))
    epoch = numbers[layout.epoch] if layout.epoch >= 0 else ""
    return Progress(line, layout.phase, layout.label, count, total, _values(layout, numbers), epoch)


def has_progress(text: str) -> bool:
    """Whether the text contains a counter or a metric."""
    layout, _ = _read_layout(text)
    return layout.counter >= 0 or bool(layout.metrics)


@lru_cache(maxsize=MOST_LAYOUTS)
def phase_of(text: str) -> str:
    """The phase that a word of the text names; empty if none does."""
    return next((phase for phase, words in PHASES if words.search(text)), "")


def read_metrics(text: str) -> tuple[tuple[str, float], ...]:
    """The metrics of a line as normalised names and values; only the first value of each name."""
    return _values(*_read_layout(text))


def _read_layout(text: str) -> tuple[Layout, list[str]]:
    """The layout of a line and its numbers."""
    parts = NUMBER.split(text)
    numbers = parts[1::2]
    parts[1::2] = [INTEGER if number.isdigit() else FRACTION for number in numbers]
    return _layout("".join(parts)), numbers


def _values(layout: Layout, numbers: Sequence[str]) -> tuple[tuple[str, float], ...]:
    return tuple((name, float(numbers[index])) for name, index in layout.metrics)


@lru_cache(maxsize=MOST_LAYOUTS)
def _layout(template: str) -> Layout:
    """The layout of a line whose numbers are replaced by `INTEGER` or `FRACTION`."""
    at = {match.start(): index for index, match in enumerate(NUMBER.finditer(template))}
    metrics = tuple(_metrics(template, at).items())
    counter, phase, epoch = _counter(template), phase_of(template), EPOCH.search(template)
    is_remark = bool(phase) and counter is None and not metrics and _is_remark(template)
    if counter is None or (_label(counter) == "epoch" and epoch):
        index = at.get(epoch.start(1), -1) if epoch else -1
        return Layout(phase, "", -1, -1, index, metrics, is_remark)
    total = counter.groupdict().get("total")
    end = at.get(counter.start("total"), -1) if total else -1
    return Layout(phase, _label(counter), at.get(counter.start("count"), -1), end, -1, metrics, is_remark)


def _metrics(text: str, at: dict[int, int]) -> dict[str, int]:
    metrics: dict[str, int] = {}
    for match in METRIC.finditer(text) if METRIC_WORDS.search(text) else ():
        name = re.sub(r"[ /]+", "_", match["key"].lower()).strip("_").replace("_per_", "_")
        if match.start("value") in at:
            metrics.setdefault(NAMES.get(name, name), at[match.start("value")])
    return metrics


def _label(counter: re.Match[str]) -> str:
    label = str(counter.groupdict().get("label") or "").lower()
    return CHINESE_LABELS.get(label, label)


def _counter(text: str) -> re.Match[str] | None:
    """The counter that moves fastest: a step rather than an epoch."""
    counters = list(COUNTER.finditer(text))
    inner = [counter for counter in counters if counter["label"].lower() != "epoch"]
    if inner or counters:
        return (inner or counters)[0]
    return COUNTED.search(text) or CHINESE_COUNTER.search(text) or CHINESE_LABEL.search(text)


def _is_remark(text: str) -> bool:
    """Whether a text is a remark of the job about its phase, rather than code, a warning or a path."""
    return len(text) < LONGEST_REMARK and not CODE.search(text)


def _number(text: str | None) -> int | None:
    if not text:
        return None
    digits = text.replace(",", "")
    try:
        return int(float(digits.rstrip("kKMG")) * SCALES.get(digits[-1], 1))
    except ValueError:
        return None

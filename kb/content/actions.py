"""Items of `How to tell` that ask the reader to do something: run a command, compare, print, look.

The other items state an observation and what it means: "`SeqNum=1` on all ranks: `nccl-p2p-hang`". A reader who asks
for the next step has not made the observation yet, so only the first kind helps.
"""

from __future__ import annotations

import re

from kb.content.grades import without_marks

EMPHASIS = re.compile(r"(?<![\w*])\*{1,2}(?=\S)|(?<=\S)\*{1,2}(?![\w*])")
SENTENCE_END = re.compile(r"(?<=[.?!]) +|(?<=[。？！])")

ID = r"`[a-z0-9]+(?:-[a-z0-9]+)+`"
PROGRAM = (
    r"c\+\+filt|cat|cuobjdump|df|dmesg|docker|env|find|gcc|gdb|grep|head|ib_write_bw|ip|journalctl|kubectl|ldconfig|ldd|ls"
    r"|lsof|lspci|nvidia-smi|pip|ps|python3?|sacct|srun|ss|ssh|sudo|systemctl|tail|torchrun|tr|ulimit|watch"
)
COMMAND = rf"`(?:[A-Z][A-Z0-9_]*=\S* )*(?:(?:py-spy|kb check|kb verify|torchfrtrace|smem)\b|(?:{PROGRAM}) [^`]*[-/|])"
VERB = (
    "(?i:ask|bisect|calculate|call|check|compare|count|do|draw|find|halve|list|look|measure|multiply|name|print|put|read|replay"
    "|run|search|set|switch|take|test|try|turn|watch|one run with)"
)
CHINESE_VERB = (
    rf"看(?! ?{ID}|不)|查|找(?!不|到)|数(?![字据])|算|问(?!题)|比较|打印|运行|执行|检查|核对|对比|确认|读|试|测"
    rf"|设(?![置备])|搜|列出|关掉|打开|用 ?\S+ ?跑"
)
CONDITION = r"(?i:after|before|for|if|in|on|under|when|without) (?:`[^`]*`|[^.?!:`]){1,90}?, "
ENGLISH_ACTION = (
    rf"(?:[^.?!:]{{0,90}}[?:] |{CONDITION})?(?:[^`.?!:]{{0,60}}{COMMAND}|(?:(?:first|then|now) )?(?:{VERB})\b)"
    rf"|`[A-Z]+_[A-Z_]+="  # a variable to set
)
CHINESE_ACTION = (
    rf"(?:[^。？！：]{{0,60}}(?:[？：，]|？ ))?(?:[^。？！；`]{{0,40}}{COMMAND}"
    rf"|(?:请|先|再|直接|不用多卡，)?(?:在[^，。：；]{{1,24}}?)?(?:{CHINESE_VERB}))"
)
ACTION = re.compile(f"{ENGLISH_ACTION}|{CHINESE_ACTION}")
CONCLUSION = re.compile(rf"\b(?i:not) (?:this|here)\b|\bthis entry\b|不是(?:这里|本条|这个)|就是(?:这里|本条)|{ID}")


def action(item: str) -> str:
    """Return the item, English or Chinese, if it asks for an action; return "" if it only states something.

    A last sentence that ends with a colon is dropped: it introduces code or a log that is not shown here.
    """
    text = without_marks(item).strip()
    if text.endswith((":", "：")):
        text = text[: max([0, *(match.end() for match in SENTENCE_END.finditer(text))])].rstrip()
    plain = EMPHASIS.sub("", text)
    begin, conclusion = ACTION.match(plain), CONCLUSION.search(plain)
    return text if begin and (conclusion is None or begin.end() <= conclusion.end()) else ""

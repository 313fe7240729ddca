"""Which lines report a failure, in the words of Python, torch, NCCL, launchers, the kernel and people."""

from __future__ import annotations

import re

from kb.diagnose.advice import without_advice

# What such a line has at least one of: looked for in every log.
WORDS = (
    *("Error", "error", "ERROR", "Exception", "exception", "Traceback (most recent", "FATAL", "Fatal", "fatal"),
    *("failed", "Failed", "FAILED", "ailure", "timed out", "imeout", "TIMEOUT", "NCCL WARN", "Killed", "killed"),
    *("Aborted", "terminate called", "core dumped", "Segmentation", "Assertion", "assert", "exitcode", "SIG"),
    *("nable to", "annot ", "an't ", "o space left", "refused", "reset by peer", "Broken pipe", "Xid", "CANCELLED"),
    *(
        "out of memory",
        "Out of memory",
        "OOM",
        "not found",
        "nvalid",
        "corrupt",
        "stuck",
        "eadlock",
        "KeyboardInterrupt",
    ),
    *("错误", "失败", "异常", "超时", "报错", "卡住", "崩溃"),
)

REPORTS = re.compile(
    r"""Traceback\ \(most\ recent\ call\ last\)
      | \b[A-Za-z_.]*(?:Error|Exception|Failure)\b(?:[:(\]]|$|\ \w)
      | ^\s*(?:[A-Za-z_]+\ )?[Ee]rror\b | \b(?:ERROR|FATAL)\b | [Ff]atal\ error | ^\[?E\d{4}\ | \[E\d{0,4}\ | \[E\ \w
      | NCCL\ WARN | timed\ out | imeout\b | exitcode | \bSIG(?:KILL|ABRT|SEGV|BUS|TERM|INT|FPE|ILL)\b
      | \b[Kk]illed\b | Aborted | terminate\ called | core\ dumped | Segmentation\ fault | [Oo]ut\ of\ memory | \bOOM\b
      | Assertion\ .{1,200}\ failed | \bassert\ | NVRM | \bXid\b | [Nn]o\ space\ left | refused\b | reset\ by\ peer
      | Broken\ pipe | \b[Ff]ailed\b | \bFAILED\b | \b(?:[Cc]annot|[Cc]an't|[Uu]nable\ to)\ | \bnot\ found\b
      | \b[Ii]nvalid\b | \bcorrupt | \bstuck\b | [Dd]eadlock | KeyboardInterrupt | CANCELLED
      | 错误 | 失败 | 异常 | 超时 | 报错 | 卡住 | 崩溃""",
    re.VERBOSE,
)
HARMLESS = re.compile(
    r"""Warning:\ | \[WARNING\] | ^\[?[IW]\d{4}\ | \[I\d{0,4}\ | \bINFO\b | \bDEBUG\b | ^\s*\|?\s*warnings\.warn
      | Unable\ to\ find\ hostfile""",
    re.VERBOSE,
)
INTERRUPTED = re.compile(
    r"KeyboardInterrupt|\bSIGINT\b|^\^C|CANCELLED AT|DUE TO TIME LIMIT|closing signal SIG(?:TERM|INT)|Terminated"
)


def is_failure(text: str) -> bool:
    """Whether a line reports a failure: not a warning, not a remark, not advice."""
    return not HARMLESS.search(text) and bool(REPORTS.search(without_advice(text)))


def is_interruption(text: str) -> bool:
    """Whether a line says that somebody, or a scheduler, ended the job: what one does with a job that hangs."""
    return bool(INTERRUPTED.search(text))

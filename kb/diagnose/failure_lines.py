"""Recognizes failure lines: lines in which Python, torch, NCCL, launchers, the kernel or people report a failure.

Some of them report only that somebody ended the job; others are printed because another rank ended or did not come.
"""

from __future__ import annotations

import re

from kb.diagnose.advice import strip_advice

# A failure line contains at least one of these; the scanner searches every log for them.
WORDS = (
    *("Error", "error", "ERROR", "Exception", "exception", "Traceback (most recent", "FATAL", "Fatal", "fatal"),
    *("failed", "Failed", "FAILED", "ailure", "timed out", "imeout", "TIMEOUT", "NCCL WARN", "Killed", "killed"),
    *("Aborted", "terminate called", "core dumped", "Segmentation", "Assertion", "assert", "exitcode", "SIG"),
    *("nable to", "annot ", "an't ", "o space left", "refused", "reset by peer", "Broken pipe", "Xid", "CANCELLED"),
    *("out of memory", "Out of memory", "OOM", "not found", "nvalid", "corrupt", "stuck", "eadlock"),
    "KeyboardInterrupt",
    *("错误", "失败", "异常", "超时", "报错", "卡住", "崩溃"),
)

REPORTS = re.compile(
    r"""Traceback\ \(most\ recent\ call\ last\)
      | \b[A-Za-z_.]*(?:Error|Exception|Failure)\b(?:[:(\]]|$|\ \w)
      | ^\s*(?:[A-Za-z_]+\ )?[Ee]rror\b | \b(?:ERROR|FATAL)\b | [Ff]atal\ error
      | \bCUDA\ error | :\ error:\  | ^\[?E\d{4}\ | \[E\d{0,4}\ | \[E\ \w
      | NCCL\ WARN | timed\ out | imeout\b | exitcode | \bSIG(?:KILL|ABRT|SEGV|BUS|TERM|INT|FPE|ILL)\b
      | \b[Kk]illed\b | Aborted | terminate\ called | core\ dumped | Segmentation\ fault | [Oo]ut\ of\ memory | \bOOM\b
      | Assertion\ .{1,200}\ failed | \bassert\ | NVRM | \bXid\b | [Nn]o\ space\ left | refused\b | reset\ by\ peer
      | Broken\ pipe | \b[Ff]ailed\b | \bFAILED\b | \b(?:[Cc]annot|[Cc]an't|[Uu]nable\ to)\ | \bnot\ found\b
      | \b[Ii]nvalid\b | \bcorrupt | \bstuck\b | [Dd]eadlock | KeyboardInterrupt | CANCELLED
      | 错误 | 失败 | 异常 | 超时 | 报错 | 卡住 | 崩溃""",
    re.VERBOSE,
)
NO_FAILURE = re.compile(
    r"""Warning:\ | \[WARNING\] | ^\[?[IW]\d{4}\ | \[I\d{0,4}\ | \bINFO\b | \bDEBUG\b | ^\s*\|?\s*warnings\.warn
      | thrown\ while\ requesting | \bRetrying\ in\ \d | \bRetrying\ \(Retry\(
      | Unable\ to\ find\ hostfile | Unable\ to\ register\ cu\w+\ factory
      | ^\s*frame\ \#\d | ^Exception\ raised\ from\ \w""",
    re.VERBOSE,
)
GLOG_HEADER = re.compile(  # without a message
    r"\[?E\d{0,4} [^]\n]{1,120}\](?: ?\[[^][]{0,160}Rank \d{1,6}\])?[ .]*"
)
AFTERMATH = re.compile(
    r"""Watchdog\ caught | detected\ by\ watchdog | collective\ operation\ timeout | Timeout\ at\ NCCL\ work
      | NCCL\ operation\ timed\ out | \[TC\]\S*\ Operation\ timed\ out | Aborting\ process\ on\ rank\ \d
      | waitForInput | communicator\ was\ aborted
      | Timed\ out\ waiting\ \d+\ ?ms\ for\ (?:recv|send) | [Hh]eartbeat\ ?[Mm]onitor
      | Connection\ (?:closed|reset)\ by | Broken\ pipe | ncclRemoteError | remote\ process\ exited
      | (?:recv|send)(?:Value|Bytes)\ failed | 'c10::DistBackendError' | Fatal\ Python\ error:\ Aborted""",
    re.VERBOSE,
)
LAUNCHER = re.compile(
    r"""failed\ \(exitcode: | exitcode\s*: | ChildFailedError | Root\ Cause\ \(first | SignalException | error_file:
      | closing\ signal\ SIG | ^\s*(?:traceback\ :\ )?Signal\ \d+\ \(SIG | To\ enable\ traceback | ^\S+\ FAILED\s*$
      | exits\ with\ return\ code | ^srun:\ error | Exited\ with\ exit\ code | CalledProcessError
      | ActorDiedError | actor\ died\ unexpectedly""",
    re.VERBOSE,
)
RAISED = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b:?|^Fatal Python error: (?!Aborted)"
)
INTERRUPTED = re.compile(
    r"KeyboardInterrupt|\bSIGINT\b|^\^C|CANCELLED AT|DUE TO TIME LIMIT|closing signal SIG(?:TERM|INT)|Terminated"
    r"|Received \d+ death signal"
)

# Printed by jobs and seldom written by people: dates, times, log levels, ranks, warnings with their place, progress.
LOGGED = re.compile(
    r"""\d{4}-\d\d-\d\d | \b\d\d:\d\d:\d\d\b | \[?\b(?:INFO|DEBUG|WARNING|WARN|ERROR)\b | \[(?:rank|default)\d
      | Warning:\s | \d%\| | (?i:\b(?:step|epoch|iter(?:ation)?|loss|rank|worker|done|finished|completed)s?\b)""",
    re.VERBOSE,
)


def is_log(text: str) -> bool:
    """Whether a text looks as if a job printed it, rather than as if a person wrote it or copied a screen."""
    return bool(LOGGED.search(text))


def is_failure(text: str) -> bool:
    """Whether a line reports a failure; warnings, remarks and advice do not."""
    if NO_FAILURE.search(text):
        return False
    message = strip_advice(text)
    return bool(REPORTS.search(message)) and not GLOG_HEADER.fullmatch(message.strip())


def is_interruption(text: str) -> bool:
    """Whether a line says that somebody or a scheduler ended the job, as people do when a job hangs."""
    return bool(INTERRUPTED.search(text))


def is_aftermath(text: str) -> bool:
    """Whether a line is printed because another rank ended or did not come, or by a launcher because a rank ended."""
    return is_interruption(text) or is_launcher(text) or bool(AFTERMATH.search(text))


def is_launcher(text: str) -> bool:
    """Whether a line is one that a launcher prints for every ended rank, whatever the reason."""
    return bool(LAUNCHER.search(text))


def is_raised(text: str) -> bool:
    """Whether a line says what ended a process: the exception below its traceback, or its own fatal signal."""
    return bool(RAISED.match(text))

"""Reading logs: megabytes per second compared with ripgrep and the same patterns, memory, and hostile texts."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median

from kb.authoring.signature_tests import HealthyLog
from kb.diagnose.inputs.sources import Stream, find_sources
from kb.diagnose.scan.scan import scan
from kb.diagnose.scan.signature_matcher import Matcher
from kb.patterns.multiline import spans_lines
from kb.patterns.redos_timing import pumped
from tests.bench import training_log
from tests.bench.measured import run

KB = str(Path(sys.executable).with_name("kb"))
RG = str(Path(sys.executable).with_name("rg"))
ROUNDS = 3
SPEED_BYTES = 200 << 20
MEMORY_BYTES = 2 << 30
HOSTILE_BYTES = 10 << 20
NOT_IN_RG = ("(?=", "(?!", "(?<=", "(?<!", "(?P=", "\\1", "\\2")
CLASS = re.compile(r"\[[^]]+\]")
ENOUGH_S = 2.0  # reading for this long makes a rate reliable
Rows = Iterator[str]


def ordinary(size: int, healthy: tuple[HealthyLog, ...]) -> Iterator[bytes]:
    return training_log.pieces(size, healthy, seed=7)


def speed(home: Path, matcher: Matcher, healthy: tuple[HealthyLog, ...], size: int, failed: list[str]) -> Rows:
    """The rows for one log. Only reading counts: the time in which rg builds its automata is subtracted."""
    log = home / "train.log"
    with log.open("wb") as file:
        file.writelines(ordinary(size, healthy))
    megabytes = log.stat().st_size / 1e6
    texts = [pattern.text for pattern in matcher.patterns if _is_for_rg(pattern.text)]
    lines_only = [text for text in texts if not spans_lines(text)]
    rates = {
        "`kb diagnose`, in process": megabytes / _median(lambda: scan(find_sources([str(log)]).inputs, matcher)),
        "`kb diagnose`, the whole process": megabytes / _median(lambda: run([KB, "diagnose", str(log)], home)),
    }
    ours = min(rates.values())
    for name, patterns in (("", texts), (", without those over several lines", lines_only)):
        rates[f"`rg -c --no-unicode`, {len(patterns)} patterns{name}"] = _rg_rate(home, patterns, log)
    yield f"| {megabytes:.0f} MB, medians of {ROUNDS} | MB/s | kb relative to it |"
    yield "|---|---|---|"
    for name, rate in rates.items():
        yield f"| {name} | {rate:.2f} | {ours / rate:.2f} |"
    fastest = max(rate for name, rate in rates.items() if "rg" in name)
    if ours < 0.2 * fastest:
        failed.append(f"{ours:.0f} MB/s is less than a fifth of {fastest:.0f} MB/s")


def _is_for_rg(pattern: str) -> bool:
    """Whether rg accepts a pattern: no look-around, back references, or line ends outside a class, which need -U."""
    return not any(part in pattern for part in NOT_IN_RG) and "\\n" not in CLASS.sub("", pattern)


def _median(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _rg_rate(home: Path, patterns: Iterable[str], log: Path) -> float:
    """Megabytes per second on as much of the log as rg reads in a few seconds, so that slow patterns finish.

    Unicode classes are off: with them, ripgrep 14 needs 22 GB for a thousand patterns before it reads a line.
    """
    file, head = home / "patterns.txt", home / "head.log"
    file.write_text("\n".join(dict.fromkeys(patterns)) + "\n", encoding="utf-8")
    argv = [RG, "-c", "--no-config", "--regex-size-limit=1G", "--threads=1", "--no-unicode", "-f", str(file), str(head)]

    def search() -> None:
        process = subprocess.run(argv, capture_output=True, text=True)
        assert process.returncode in (0, 1), process.stderr

    head.write_bytes(b"\n")
    building = _median(search)
    size = 16 << 10
    while True:
        with log.open("rb") as whole:
            head.write_bytes(whole.read(size))
        reading = _median(search) - building
        if reading > ENOUGH_S or size >= log.stat().st_size:
            return size / 1e6 / max(1e-3, reading)
        size *= 4


def memory(home: Path, healthy: tuple[HealthyLog, ...], size: int, failed: list[str]) -> Rows:
    """Peak memory of the process while it reads a log from a pipe, so that the log takes no disk space."""
    pipe = home / "pipe"
    os.mkfifo(pipe)
    writer = os.fork()
    if not writer:
        with pipe.open("wb") as file:
            file.writelines(ordinary(size, healthy))
        os._exit(0)
    cost = run([KB, "diagnose", str(pipe)], home)
    os.waitpid(writer, 0)
    yield f"| peak memory, {size / 1e9:.1f} GB from a pipe | {cost.peak_mib:.0f} MiB | {size / 1e6 / cost.wall_s:.0f} MB/s |"
    if cost.code != 0 or cost.peak_mib >= 200:
        failed.append(f"memory {cost.peak_mib:.0f} MiB, exit code {cost.code}")


def hostile(matcher: Matcher, healthy: tuple[HealthyLog, ...], samples: dict[str, str], size: int) -> Rows:
    """Seconds for texts that are designed to be slow, compared with an ordinary log of the same size."""
    rng = random.Random(3)
    texts: dict[str, Iterable[bytes]] = {
        "an ordinary log": ordinary(size, healthy),
        "no newline": [b"x" * size],
        "no newline, failures": _repeated(b"error: NCCL WARN timed out 7 ", size),
        "carriage returns only": _repeated(b"\r 10%|# | 1/10 [00:01<00:09]", size),
        "a flood of one literal": _repeated(b"out of memory ", size),
        "one literal a line": _repeated(b"CUDA out of memory. Tried to allocate 1.25 GiB\n", size),
        "different failures": (b"Error %d: failed with %x\n" % (n, rng.getrandbits(40)) for n in range(size // 32)),
        "boxes": _repeated("│ /a/b.py:33 in forward │\n╰──╯\nError: out of\nmemory\n".encode(), size),
        "random bytes": (rng.randbytes(1 << 20) for _ in range(size >> 20)),
        "NULs": [b"text\n" + bytes(size)],
    }
    seconds = {name: _seconds(text, matcher) for name, text in texts.items()}
    own = {
        pattern.text: _seconds(_repeated(_worst(pattern.text, samples[pattern.text]), size), matcher)
        for pattern in matcher.patterns
    }
    base = seconds["an ordinary log"]
    yield f"| {size / 1e6:.0f} MB | seconds | relative to an ordinary log |"
    yield "|---|---|---|"
    for name, taken in seconds.items():
        yield f"| {name} | {taken:.2f} | {taken / base:.1f} |"
    worst = max(own, key=lambda text: own[text])
    yield f"| each signature's own repeats, median of {len(own)} | {median(own.values()):.2f} | {median(own.values()) / base:.1f} |"
    cell = worst.replace("|", "\\|")
    yield f"| the slowest of them, `{cell[:60]}` | {own[worst]:.2f} | {own[worst] / base:.1f} |"


def _repeated(text: bytes, size: int) -> Iterator[bytes]:
    block = text * (1 + (1 << 20) // len(text))
    for _ in range(max(1, size // len(block))):
        yield block


def _worst(pattern: str, sample: str) -> bytes:
    """The longest text on which the linter tries a pattern, without NULs, which would make the log binary."""
    return max(pumped(pattern, sample), key=len).replace("\0", "\1").encode()


def _seconds(text: Iterable[bytes], matcher: Matcher) -> float:
    pieces = list(text)
    began = time.perf_counter()
    scan([Stream("hostile", iter(pieces))], matcher)
    return time.perf_counter() - began

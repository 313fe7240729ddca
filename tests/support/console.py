"""Basic helpers for tests: the real console script, small content roots, and waiting for processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

KB = Path(sys.executable).with_name("kb")
CHECKOUT = Path(__file__).resolve().parents[2]
GENEROUS_S = 180.0  # a deadline of a test, never an expectation


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document on stdout. Fails if there is not exactly one."""
        return json.loads(self.out)


Kb = Callable[..., Ended]


def run_kb(*args: str | Path, cwd: Path, stdin: bytes = b"", timeout_s: float = GENEROUS_S, **env: str) -> Ended:
    """Run the installed `kb` in a fresh process."""
    ended = subprocess.run(
        [str(KB), *map(str, args)],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        env={**os.environ, **env},
        timeout=timeout_s,
    )
    return Ended(ended.returncode, ended.stdout.decode(errors="replace"), ended.stderr.decode(errors="replace"))


def wait_for(is_true: Callable[[], object], what: str, seconds: float = GENEROUS_S) -> None:
    """Wait until a condition is true. Fails with `what` after `seconds`."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.02)


def wait_until_ready(app: Any) -> None:
    """Wait until the API serves its content, which the reading thread puts in place after its future is done."""
    app.state.loading.result(60).searching.submit(int).result(60)


def ruin(path: Path) -> None:
    """Replace a SQLite file atomically with one that is not a database. Whoever has it open keeps the old file."""
    other = path.with_name("ruined")
    other.write_text("no database " * 100)
    for name in ("-wal", "-shm"):
        Path(f"{path}{name}").unlink(missing_ok=True)
    other.replace(path)


def is_running(pid: int) -> bool:
    """Whether a process with this pid runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Process(Protocol):
    """What a test starts and ends."""

    def poll(self) -> int | None: ...
    def send_signal(self, number: int, /) -> None: ...
    def wait(self, timeout: float) -> int: ...


def end(process: Process, number: signal.Signals = signal.SIGKILL) -> None:
    """End a process that a test started, and reap it."""
    if process.poll() is None:
        process.send_signal(number)
    process.wait(GENEROUS_S)


def arm_directories() -> set[Path]:
    """The directories of this test's arms, since each test has its own TMPDIR."""
    return set(Path(os.environ["TMPDIR"]).glob("kb-arm-*"))


ENTRY = """\
---
id: {id}
title: {title}
title_zh: 测试条目
status: confirmed
severity: low
area: data
symptoms: [crash]
phases: [data]
components: [storage]
tags: [test]
aliases: [made for a test, 测试]
signatures:
  - pattern: 'the thing broke: code \\d+'
    role: root
    source: a test
    sample: 'the thing broke: code 7'
references:
  - url: https://example.org/{id}
    shows: nothing, it is a test
    grade: claimed
{extra}reviewed: 2026-01-01
---

## Symptom

{symptom}

```log
the thing broke: code 42
```

```log
[rank3]: the thing broke: code 43
```

## Environment

A test.

## Root cause

The thing is made to break. [probe plain]

## How to tell

It says so.

```log look-alike
another thing broke: code 42
```

## Fix

Do not break it. [probe plain]

## Why it works

Nothing breaks it. [probe plain] [claimed 1]

## Known cases

None, it is a test. [inferred]

## 中文

### 症状

坏了。

### 环境

测试。

### 原因

故意弄坏的。

### 修复

不要弄坏。

### 判断

日志里有这句话。
"""

PROBE = """\
import os, signal, subprocess, sys, time
from functools import partial
from pathlib import Path

from kb.probe import *
from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, completed, hung, killed, raised, symptom


def job(ctx: Context, *, is_fixed: bool) -> None:
    ctx.reached()
{body}


def make(expect, **options):
    return Probe(experiments=(Experiment(
        name="plain",
        control=Arm(partial(job, is_fixed=False), expect=expect, because="it is broken", fidelity="cpu"),
        treatment=Arm(partial(job, is_fixed=True), expect=completed(), because="it is whole", fidelity="cpu"),
        **{{"world_size": 1, "needs": Needs(packages={{}}), "deadline_s": 20, **options}},
    ),))


probe = {probe}
"""

BREAKS = """\
if not is_fixed:
    raise RuntimeError("the thing broke: code %d" % 7)
"""


class ContentRoot:
    """A content root on disk that a test fills with entries and probes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "entries").mkdir(parents=True, exist_ok=True)
        (path / "probes").mkdir(exist_ok=True)

    def entry(self, entry_id: str, *, has_probe: bool = True, extra: str = "", **words: str) -> Path:
        """Write a valid entry. `words` replace its title or symptom, `extra` adds lines to its front matter."""
        probe = f"probe: {entry_id.replace('-', '_')}\n" if has_probe else "probe_waiver: a test\n"
        given = {"title": f"The thing called {entry_id}", "symptom": "The thing broke.", **words}
        path = self.path / "entries" / f"{entry_id}.md"
        path.write_text(ENTRY.format(id=entry_id, extra=extra + probe, **given), encoding="utf-8")
        return path

    def probe(self, entry_id: str, body: str = BREAKS, probe: str = 'make(raised("the thing broke"))') -> Path:
        """Write a probe. `body` is the job after its mark, `probe` the declaration."""
        path = self.path / "probes" / f"{entry_id.replace('-', '_')}.py"
        path.write_text(
            PROBE.format(body=textwrap.indent(textwrap.dedent(body), "    "), probe=probe), encoding="utf-8"
        )
        return path

    def incident(self, entry_id: str, body: str = BREAKS, probe: str = 'make(raised("the thing broke"))') -> None:
        self.entry(entry_id)
        self.probe(entry_id, body, probe)

    def raw_probe(self, entry_id: str, source: str) -> None:
        """Write an entry whose probe file has exactly this source."""
        self.entry(entry_id)
        (self.path / "probes" / f"{entry_id.replace('-', '_')}.py").write_text(
            textwrap.dedent(source), encoding="utf-8"
        )

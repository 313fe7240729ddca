"""Summarizes the stack of each process of a job in one sentence: the collective it waits in, or what it does instead.

It reads dumps of py-spy (text and `--json`), faulthandler and torch's debug server, which prints
`=== Rank 2: host ===` above the output of either. Only the main thread of a process counts. DataLoader workers and
launchers are not ranks and get no sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kb.diagnose.evidence import LONGEST_EVIDENCE, Line
from kb.diagnose.frames import Frame, Place, function, place_of
from kb.diagnose.readers.structured import Unreadable, as_integer, as_text, load_json
from kb.diagnose.scan.log_prefix import parse_prefix

LARGEST = 64 << 20  # characters
LONGEST_LINE = 1000
MOST_PROCESSES = 10_000
MOST_THREADS = 20_000
MOST_FRAMES = 500

RANK = re.compile(r"=== Rank (\d{1,6}): ")
PROCESS = re.compile(r"Process (\d{1,10}): ")
THREAD = re.compile(r'Thread (?:0x[0-9A-Fa-f]+|\d+) \((?:active|idle)[^)]*\)(?:: "([^"]*)")?$')
FAULT_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[[^\]]*\])? \(most recent call first\):$")
# A frame may lack one space of its indentation, removed with the prefix: torchrun prints none after `[default3]:`.
FRAME = re.compile(r" {3,4}([^ (][^(]*) \(([^():]+):(\d{1,9})\)$")
FAULT_FRAME = re.compile(r' {1,2}File "([^"]+)", line (\d{1,9}) in (.+)$')

MODULE_CODE = ("<module>", "_run_module_as_main", "_run_code")  # outermost frames of a main thread
NOT_A_RANK = re.compile(
    r"/data/_utils/worker\.py$|torch/distributed/(elastic/agent/|run\.py|launch)|accelerate/commands/launch"
    r"|deepspeed/launcher/|multiprocessing/(resource_tracker|forkserver)\.py$|_inductor/compile_worker/"
)


@dataclass(slots=True)
class Thread:
    """Frames are innermost first; `name` is the thread's name in Python, empty if the dump has none."""

    name: str = ""
    frames: list[Frame] = field(default_factory=list)


@dataclass(slots=True)
class Process:
    """Threads are in the order of the dump; rank and pid are None if the dump does not give them."""

    rank: int | None = None
    pid: int | None = None
    threads: list[Thread] = field(default_factory=list)


def read_stacks(text: str, source: str, rank: int | None = None) -> list[Line]:
    """At most one sentence per process. `rank` is the rank in the file name, if any.

    Raises `Unreadable` if there is no stack.
    """
    if len(text) > LARGEST:
        raise Unreadable(f"it is larger than {LARGEST >> 20} MiB")
    is_json = re.match(r"\s*\[\s*[\]{]", text[:LONGEST_LINE]) is not None
    processes = _from_json(text, rank) if is_json else _from_text(text, rank)
    if not any(thread.frames for process in processes for thread in process.threads):
        raise Unreadable("it contains no stack")
    sentences = ((process, _sentence(process)) for process in processes)
    return [Line(source, 0, sentence[:LONGEST_EVIDENCE], process.rank) for process, sentence in sentences if sentence]


def _from_json(text: str, rank: int | None) -> list[Process]:
    """The processes in py-spy's list of threads."""
    processes: dict[int | None, Process] = {}
    for thread in load_json(text)[:MOST_THREADS]:
        if not isinstance(thread, dict) or not isinstance(thread.get("frames"), list):
            raise Unreadable("not a py-spy dump: a thread has no frames")
        pid = as_integer(thread.get("pid"))
        frames = [_json_frame(frame) for frame in thread["frames"][:MOST_FRAMES] if isinstance(frame, dict)]
        process = processes.setdefault(pid, Process(rank, pid))
        process.threads.append(Thread(as_text(thread.get("thread_name")), frames))
    return list(processes.values())


def _json_frame(frame: dict[Any, Any]) -> Frame:
    file = as_text(frame.get("filename")) or as_text(frame.get("short_filename"))
    return Frame(function(as_text(frame.get("name"))), file, as_integer(frame.get("line")) or 0)


def _from_text(text: str, rank: int | None) -> list[Process]:
    """The processes of a text. Lines of several ranks may be interleaved if they have torchrun's prefix."""
    processes = [Process(rank)]
    current: dict[int | None, Process] = {None: processes[0]}
    for printer, line in _lines(text):
        if heading := RANK.match(line) or PROCESS.match(line):
            is_rank = heading.re is RANK
            process = Process(int(heading[1])) if is_rank else Process(current[None].rank, int(heading[1]))
            current[printer] = process
            processes.append(process)
        elif printer not in current:
            processes.append(current.setdefault(printer, Process(printer)))
        _add(current[printer], line)
        if len(processes) > MOST_PROCESSES:
            raise Unreadable(f"it has more than {MOST_PROCESSES} processes")
    return processes


def _lines(text: str) -> Iterator[tuple[int | None, str]]:
    """Each line without the launcher's prefix, preceded by the rank that the prefix names."""
    for line in text.splitlines():
        parsed = parse_prefix(line[: 2 * LONGEST_LINE])
        if len(parsed.text) <= LONGEST_LINE:
            yield parsed.rank, parsed.text.rstrip()


def _add(process: Process, line: str) -> None:
    """Add a line that is a thread or a frame; others, such as locals, are ignored."""
    if (thread := THREAD.match(line)) or FAULT_THREAD.match(line):
        if len(process.threads) < MOST_THREADS:
            process.threads.append(Thread((thread[1] or "") if thread else ""))
    elif process.threads and len(process.threads[-1].frames) < MOST_FRAMES:
        if frame := FRAME.match(line):
            process.threads[-1].frames.append(Frame(function(frame[1]), frame[2], int(frame[3])))
        elif frame := FAULT_FRAME.match(line):
            process.threads[-1].frames.append(Frame(function(frame[3]), frame[1], int(frame[2])))


def _sentence(process: Process) -> str:
    frames = _main_frames(process)
    place = place_of(frames)
    if place is None or any(NOT_A_RANK.search(frame.file) for frame in frames):
        return ""
    rank = f"rank {process.rank}" if process.rank is not None else "rank ?"
    if process.rank is None and process.pid is not None:
        rank = f"rank ? (pid {process.pid})"
    is_outside = place.is_activity and not place.may_hide_collective
    return f"{rank} is in {place}{', not in a collective' if is_outside else ''}"


def _main_frames(process: Process) -> list[Frame]:
    """The frames of the main thread, found by name, else by outermost frame, else the last, as in faulthandler."""
    threads = [thread for thread in process.threads if thread.frames]
    named = [thread for thread in threads if thread.name == "MainThread"]
    of_module = [thread for thread in threads if thread.frames[-1].name in MODULE_CODE]
    main = named or of_module or threads
    return main[-1].frames if main else []


def main_place(text: str) -> Place | None:
    """The place of the first process in a text dump; None if it has no stack."""
    process = next((process for process in _from_text(text[:LARGEST], None) if process.threads), Process())
    return place_of(_main_frames(process))

"""Reads Python tracebacks from a log of interleaved ranks: where the user's code was, and in which call.

If lines name their rank, each rank has one open stack. If they do not, a frame continues the open stack whose last
source line calls it (`train(model)` precedes `in train`). If several stacks qualify, they are equal up to that point,
so the set of places is right whichever is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from kb.diagnose.failure_lines import is_aftermath
from kb.diagnose.frames import Frame, function, is_library, place_of
from kb.diagnose.story.lines import StoryLine

OPENING = re.compile(r"Traceback \(most recent call last\)(?::$| ─)")
FRAME = re.compile(r'\s*(?:> )?File "(?P<file>[^"]+)", line (?P<line>\d{1,9}), in (?P<name>.+)$')
BOXED_FRAME = re.compile(r"[│|] *(?P<file>/\S+\.py):(?P<line>\d{1,9}) in (?P<name>\S+) *[│|]$")  # as rich draws it
BOXED_CODE = re.compile(r"[│|] *❱ *\d+ [│ ]*(.*?) *[│|]$")
EXCEPTION = re.compile(
    r"(?:(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning|Iteration|Timeout)"
    r"|(?:torch|subprocess)\.[\w.]+|Exception)(?::|$).*"
)
CHAINED = re.compile(r"During handling of the above exception|The above exception was the direct cause")
LAUNCHER = re.compile(
    r"torch/distributed/(elastic/|run\.py|launcher/|launch\.py)|accelerate/commands/|deepspeed/launcher|<frozen runpy>"
    r"|/bin/(?:accelerate|torchrun|deepspeed|ray)$"
    r"|multiprocessing"
)
LOST = re.compile(
    r"Connection (?:closed|reset)|[Bb]roken pipe|Read error|Write error|ncclRemoteError|remote process exited"
    r"|communicator was aborted|recvValue failed|failed to recv"
)
WAITED = re.compile(  # another rank did not come, came with another call, or is gone
    r"Timed out waiting|imeout|Connection (?:closed|reset|refused)|[Bb]roken pipe|Read error|Write error"
    r"|connectFullMesh|data size does|op\.preamble\.length|ncclRemoteError|communicator was aborted|DistBackendError"
    r"|DistStoreError|DistNetworkError|Socket|Gloo|recvValue|unhandled system error"
)
# Wrappers of the model choose the sizes of their collectives, so these are equal on all ranks.
WRAPPER = re.compile(
    r"/torch/distributed/(?:_composable/)?fsdp/|/deepspeed/runtime/|/torch/nn/parallel/distributed\.py"
)
# Lightning's SIGTERM handler calls a collective; other programs have such handlers too.
HANDLER = re.compile(r"signal_connector\.py:|:_?(?:handle_|on_)?sig(?:term|nal)(?:_handler)?$", re.IGNORECASE)
WRAPPER_NAME = "wrapper"
LIBRARY_FILE = re.compile(r"/(?:site|dist)-packages/")
LONGEST_MESSAGE = 600  # characters of an exception that rich broke into lines
MOST_OPEN = 256  # open stacks without a rank
MOST_FRAMES = 300


@dataclass(slots=True, eq=False)
class Traceback:
    """`frames` are outermost first. `is_chained`: it was raised while another exception was handled.

    `is_interrupted`: a SIGTERM handler raised it; `frames` are then those that the signal interrupted.
    """

    rank: int | None
    first: StoryLine
    last: StoryLine
    frames: list[Frame] = field(default_factory=list)
    code: str = ""  # source line of the last frame
    error: str = ""
    is_chained: bool = False
    is_boxed: bool = False
    is_interrupted: bool = False

    @property
    def needs_code(self) -> bool:
        """Whether the source line of the last frame may follow; frozen modules have none."""
        return bool(self.frames) and not self.code and not self.frames[-1].file.startswith("<")

    @property
    def has_fixed_sizes(self) -> bool:
        """Whether the model's wrapper made the call, so that its sizes are equal on all ranks."""
        return self.call == "backward" or any(WRAPPER.search(frame.file) for frame in self.frames)

    @property
    def is_launcher(self) -> bool:
        """Whether a launcher raised it, rather than the program that it starts."""
        return all(LAUNCHER.search(frame.file) or frame.name == "wrapper" for frame in self.frames)

    @property
    def own(self) -> Frame | None:
        """The innermost frame of the user's code, else of a library other than torch, else of any code."""
        own = [frame for frame in self.frames if not is_library(frame)]
        other = [frame for frame in self.frames if "/torch/" not in frame.file and not frame.file.startswith("<")]
        frames = own or other or self.frames
        return frames[-1] if frames else None

    @property
    def inner(self) -> Frame | None:
        """The innermost frame outside torch that the user's code called; mostly that of a trainer."""
        start = self.frames.index(self.own) if self.own else 0
        outside = (
            frame
            for frame in reversed(self.frames[start:])
            if "/torch/" not in frame.file and not frame.file.startswith("<") and frame.name != "wrapper"
        )
        return next(outside, None)

    @property
    def call(self) -> str:
        """The collective or other library activity that the user's code called; empty if neither."""
        place = place_of(self.frames[::-1])
        return place.name if place and (place.is_collective or place.is_activity) else ""

    @property
    def place(self) -> str:
        """The place as text, such as `all_gather in trainer.py:290 gather called from train.py:44 evaluate`."""
        if self.own is None:
            return "an unknown place"
        if not self.call:
            return self.own.place
        within = f" in {self.inner.place}" if self.inner and self.inner is not self.own else ""
        return f"{self.call}{within} called from {self.own.place}"

    @property
    def has_waited(self) -> bool:
        """Whether it reports that another rank did not come, rather than the rank's own failure."""
        return bool(WAITED.search(self.error)) or is_aftermath(self.error)

    @property
    def has_lost(self) -> bool:
        """Whether the rank's peers were gone: it came late, or one of them failed."""
        return bool(LOST.search(self.error))


def read_tracebacks(lines: Iterable[StoryLine]) -> list[Traceback]:
    """The complete tracebacks, in the order of their ends."""
    reader = _Reader()
    for line in lines:
        reader.read(line)
    return reader.complete


Key = tuple[str, int | None]


@dataclass(slots=True)
class _Reader:
    complete: list[Traceback] = field(default_factory=list)
    _open: dict[Key, list[Traceback]] = field(default_factory=dict)
    _chained: set[Key] = field(default_factory=set)
    _wrapped: dict[Key, Traceback] = field(default_factory=dict)  # tracebacks whose message rich broke into lines

    def read(self, line: StoryLine) -> None:
        key = line.source, line.rank
        if key in self._wrapped:
            self._continue_message(line, key)
        has_opening = "Traceback" in line.text and (OPENING.search(line.message) or OPENING.search(line.text))
        if has_opening:
            stacks = self._open.setdefault(key, [])
            if len(stacks) < MOST_OPEN:
                stacks.append(Traceback(line.rank, line, line, is_chained=key in self._chained))
            self._chained.discard(key)
        elif "above exception" in line.text and CHAINED.search(line.text):
            self._chained.add(key)
        elif stacks := self._open.get(key, []):
            self._extend(line, key, stacks)

    def _continue_message(self, line: StoryLine, key: Key) -> None:
        traceback = self._wrapped[key]
        is_message = re.match(r"[^\W\d_]|[\[\]\d(./:]", line.text) and not OPENING.search(line.text)
        if is_message and len(traceback.error) < LONGEST_MESSAGE:
            traceback.error += f" {line.text.strip()}"
        else:
            del self._wrapped[key]

    def _extend(self, line: StoryLine, key: Key, stacks: list[Traceback]) -> None:
        text = line.text
        if frame := FRAME.match(text) or BOXED_FRAME.match(text):
            self._add_frame(line, frame, stacks)
        elif boxed := BOXED_CODE.match(text):
            stacks[-1].code = boxed[1]
        elif text.startswith(("    ", "\t")) and not re.fullmatch(r"[\s^~]+", text):
            # Processes print several lines at once, so the line usually belongs to the last changed stack.
            if stack := next((stack for stack in reversed(stacks) if stack.needs_code), None):
                stack.code = text.strip()
        elif error := EXCEPTION.match(text):
            ended = _deepest(stacks)
            ended.error, ended.last = error.group().strip()[:LONGEST_MESSAGE], line
            stacks.remove(ended)
            if ended.frames:
                _cut_handler(ended)
                self.complete.append(ended)
                if ended.is_boxed:
                    self._wrapped[key] = ended

    @staticmethod
    def _add_frame(line: StoryLine, match: re.Match[str], stacks: list[Traceback]) -> None:
        frame = Frame(function(match["name"]), match["file"], int(match["line"]))
        stack = _caller(stacks, frame)
        if len(stack.frames) < MOST_FRAMES:
            stack.frames.append(frame)
        stack.code, stack.last = "", line
        stack.is_boxed = stack.is_boxed or match.re is BOXED_FRAME
        stacks.remove(stack)
        stacks.append(stack)  # its source line comes next


def _cut_handler(traceback: Traceback) -> None:
    functions = [f"{frame.file}:{frame.name}" for frame in traceback.frames]
    handler = next((index for index, name in enumerate(functions) if index and HANDLER.search(name)), None)
    if handler is not None:
        traceback.frames, traceback.is_interrupted = traceback.frames[:handler], True


def _deepest(stacks: list[Traceback]) -> Traceback:
    """The open stack that an exception ends: the last changed one with more than one frame, if there is one."""
    begun = [stack for stack in stacks if stack.frames]
    deep = [stack for stack in begun if len(stack.frames) > 1]
    return (deep or begun or stacks)[-1]


def _caller(stacks: list[Traceback], frame: Frame) -> Traceback:
    """The open stack that a frame continues."""
    if len(stacks) == 1:
        return stacks[0]
    if frame.name == "<module>" or not frame.name.isidentifier():
        return next((stack for stack in reversed(stacks) if not stack.frames), stacks[-1])
    calls = re.compile(rf"\b{re.escape(frame.name)}\s*\(")
    begun = [stack for stack in stacks if stack.frames]
    if frame.name == WRAPPER_NAME:  # a decorator's: the source line calls the wrapped function
        callers = [stack for stack in begun if stack.code and not LIBRARY_FILE.search(stack.frames[-1].file)]
    else:
        callers = [stack for stack in begun if stack.code and calls.search(stack.code)]
        callers = callers or [stack for stack in begun if stack.frames[-1].name == WRAPPER_NAME]
    return (callers or begun or stacks)[-1]

"""Runs the steps of a capture, each in its own process, with limits on time and output.

A read of /proc blocks if the driver holds a lock of the process, and nvidia-smi does not return if the driver hangs.
That is evidence, so the step is left behind and the others go on. The agent itself has one thread, opens nothing that
can block, and writes the outcome of each step at once, so that its results survive its own end.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import tarfile
import time
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Sequence, Union

MOST_OUTPUT = 16 << 20  # bytes of one step
MOST_BYTES = 96 << 20  # of all steps of a node, unless kb says less
AT_ONCE = 4  # steps that run in parallel; few, since the job needs the processors
LEAST_S = 0.05  # a step with less time than this is left out
GRACE_S = 0.2  # for the kernel to end a process after SIGKILL; in uninterruptible sleep it never does
LOOK_S = 0.2  # between checks whether anybody still reads
PR_SET_PDEATHSIG = 1

try:
    import ctypes

    PRCTL: Optional[Callable[..., int]] = ctypes.CDLL(None).prctl
except (ImportError, OSError, AttributeError):  # without ctypes, a step may outlive a killed agent
    PRCTL = None


class Step(NamedTuple):
    """A command, or a function whose result is written as JSON. `where` is the process or subject it is about."""

    name: str
    where: str
    limit_s: float
    command: Sequence[str] = ()
    function: Optional[Callable[[], Any]] = None


class Outcome(NamedTuple):
    """`output` is what was written until the end or limit. `error` is empty after success and never a traceback."""

    step: Step
    output: bytes
    seconds: float
    error: str = ""
    is_left_behind: bool = False  # it neither returned nor could be ended

    def json(self) -> Any:
        try:
            return json.loads(self.output.decode("utf-8", "replace")) if self.output else None
        except ValueError:
            return None


class Archive:
    """Writes a tar to a descriptor, member by member."""

    def __init__(self, descriptor: int, most: int = MOST_BYTES) -> None:
        self._file = os.fdopen(descriptor, "wb", closefd=False)
        self._left = most

    def add(self, name: str, content: Union[bytes, str]) -> bool:
        """Add a file; return False and leave it out if it would exceed the limit of the node."""
        data = content.encode("utf-8", "replace") if isinstance(content, str) else content
        if len(data) > self._left:
            return False
        self._left -= len(data)
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = len(data), int(time.time()), 0o600
        self._file.write(info.tobuf(tarfile.USTAR_FORMAT) + data + b"\0" * (-len(data) % tarfile.BLOCKSIZE))
        self._file.flush()
        return True

    def close(self) -> None:
        self._file.write(b"\0" * (2 * tarfile.BLOCKSIZE))
        self._file.flush()


class _Child:
    def __init__(self, step: Step, limit_s: float) -> None:
        self.step, self.began = step, time.monotonic()
        self.ends = self.began + limit_s
        self.out, self.err = os.memfd_create("out"), os.memfd_create("err")
        self.pid = os.fork()
        if self.pid == 0:
            _become(step, self.out, self.err)

    def outcome(self) -> Optional[Outcome]:
        """The outcome, or None while the step runs within its limit."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if ended:
            return self._finish(self._error(status))
        if time.monotonic() < self.ends:
            return None
        return self._finish(*self._give_up())

    def _give_up(self) -> "tuple[str, bool]":
        waited = "did not return in %.1f s" % (time.monotonic() - self.began)
        for kill, number in ((os.killpg, self.pid), (os.kill, self.pid)):  # the group may not exist yet
            try:
                kill(number, signal.SIGKILL)
            except OSError:
                pass
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until:
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                return waited, False
            time.sleep(0.01)
        return waited + " and cannot be ended", True

    def _error(self, status: int) -> str:
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number == signal.SIGXFSZ:
                return "its output was cut at %d MiB" % (MOST_OUTPUT >> 20)
            return "was ended by signal %d" % number
        code = os.WEXITSTATUS(status)
        lines = _content(self.err, 1 << 16).decode("utf-8", "replace").strip().splitlines()
        return "" if code == 0 else (" ".join(lines[-3:]) if lines else "exit code %d" % code)[:600]

    def _finish(self, error: str, is_left_behind: bool = False) -> Outcome:
        output = _content(self.out, MOST_OUTPUT)
        os.close(self.out)
        os.close(self.err)
        return Outcome(self.step, output, time.monotonic() - self.began, error, is_left_behind)


def run(steps: Sequence[Step], deadline: float) -> List[Outcome]:
    """Run the steps, some in parallel; return the outcomes in order. `deadline` is on the monotonic clock."""
    waiting = list(enumerate(steps))
    running: Dict[int, _Child] = {}
    outcomes: Dict[int, Outcome] = {}
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, step = waiting.pop(0)
            left = deadline - time.monotonic()
            if left < LEAST_S:
                outcomes[number] = Outcome(step, b"", 0.0, "left out: the time was over")
            else:
                running[number] = _Child(step, min(step.limit_s, left))
        for number, child in list(running.items()):
            outcome = child.outcome()
            if outcome:
                outcomes[number] = outcome
                del running[number]
        if running and (not waiting or len(running) == AT_ONCE):
            next_end = min(child.ends for child in running.values()) - time.monotonic()
            signal.sigtimedwait([signal.SIGCHLD], min(LOOK_S, max(0.001, next_end)))
        _end_without_reader()
    return [outcomes[number] for number in range(len(steps))]


def pause(seconds: float) -> None:
    """Sleep, but end the process if nobody reads its output any more."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(min(LOOK_S, max(0.0, until - time.monotonic())))
        _end_without_reader()


_reader: List[int] = []  # the descriptor that somebody has to read


def end_with_reader(descriptor: int) -> None:
    """End this process when the other end of a pipe or socket is closed, for example because a connection broke."""
    _reader[:] = [descriptor]


def _end_without_reader() -> None:
    poll = select.poll()
    for descriptor in _reader:
        poll.register(descriptor, 0)
    if poll.poll(0):  # only errors and hang-ups
        os._exit(1)  # the kernel ends the steps


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends for any reason."""
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)


def _become(step: Step, out: int, err: int) -> NoReturn:
    """Run the step in the child. It holds none of the agent's streams, since others wait for these to be closed."""
    code = 1
    try:
        parent = os.getppid()
        os.setsid()
        end_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        empty = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((empty, 0), (out, 1), (err, 2)):
            os.dup2(source, target)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_OUTPUT, MOST_OUTPUT))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        if step.command:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            os.execvp(step.command[0], list(step.command))
        result = step.function() if step.function else None
        if result is not None:
            _write(1, result if isinstance(result, bytes) else json.dumps(result).encode())
        code = 0
    except BaseException as error:  # the reason is all that the agent reads
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        _write(2, reason.encode("utf-8", "replace"))
    os._exit(code)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _content(descriptor: int, most: int) -> bytes:
    size = min(os.fstat(descriptor).st_size, most)
    return os.pread(descriptor, size, 0) if size else b""

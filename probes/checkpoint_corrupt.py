"""A save is cut off in the middle, once over the only checkpoint and once into a file beside it."""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, List, Mapping, Optional, Tuple

from kb.checkpoint import Unreadable, read_checkpoint
from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown

CUT_AT = 100_000  # bytes; the checkpoint has 800,000
HOWS = ("kill", "disk-full")


def save_twice(ctx: Context, *, beside: bool) -> None:
    """Step 1 is saved well. The save of step 2 is interrupted in a child process. Then the job resumes."""
    import torch

    path, how = ctx.path("last.pt"), str(ctx.params["how"])
    assert how in HOWS, "how is one of %s" % ", ".join(HOWS)
    torch.save({"step": 1, "weight": torch.ones(4)}, path)
    ctx.reached()
    child = os.fork()
    if child == 0:
        write(path + ".part" if beside else path, how, beside)
        if beside:
            os.rename(path + ".part", path)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status != 0, "the writer was not interrupted"
    ctx.note(writer="signal %d" % os.WTERMSIG(status) if os.WIFSIGNALED(status) else "exit %d" % os.WEXITSTATUS(status))
    ctx.note(files={name: os.path.getsize(name) for name in sorted(os.listdir(".")) if ".p" in name})
    assert torch.load(path)["step"] == 1  # the last good one is still there
    ctx.note(one_bit_flipped_in_a_tensor=flip_a_bit(path))


def write(path: str, how: str, flushed: bool) -> None:
    """The second save: a kill or a full disk stops it after `CUT_AT` bytes. A file size limit acts as the full disk."""
    import torch

    state = {"step": 2, "weight": torch.ones(200_000)}
    if how == "disk-full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (CUT_AT, CUT_AT))  # writing past it fails; SIGXFSZ is ignored here
        try:
            torch.save(state, path)
        except RuntimeError as error:
            sys.stderr.write("%s\n" % error)
            os._exit(1)
    with open(path, "wb") as file:
        torch.save(state, DiesInTheMiddle(file))
        if flushed:
            os.fsync(file.fileno())  # a kill cannot show what this is for; a power cut can


class DiesInTheMiddle:
    """A file whose writer is killed, as by Slurm, the kernel or a lost node."""

    def __init__(self, file: Any) -> None:
        self.file, self.written = file, 0

    def write(self, data: bytes) -> int:
        self.file.write(data)
        self.written += len(data)
        if self.written > CUT_AT:
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def flip_a_bit(path: str) -> str:
    """Whether torch.load and the zip checksum notice a tensor in which one bit has changed."""
    import torch

    data = bytearray(Path(path).read_bytes())
    data[data.find(struct.pack("<4f", 1, 1, 1, 1)) + 2] ^= 1
    Path(path).write_bytes(data)
    weight = torch.load(path)["weight"].tolist()
    with zipfile.ZipFile(path) as archive:
        return "torch.load gives %s without an error, the checksum test names %s" % (weight, archive.testzip())


WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
SECONDS = 0.6


def check(params: Mapping[str, Any]) -> Finding:
    """Are these files complete, do the parts exist that are written last, and does another checkpoint fit?"""
    path: Optional[Path] = params["checkpoint"]
    if path is None:
        return unknown("no checkpoint was named", advice="--set checkpoint=/path/to/checkpoint-500")
    try:
        files = [path] if not path.is_dir() else sorted(item for item in _inside(path) if item.is_file())
        size = sum(file.stat().st_size for file in files)
        disk = os.statvfs(path)
    except OSError as error:
        return unknown("%s cannot be read: %s" % (path, error.strerror))
    torn, unread = _torn(files)
    folders = {file.parent for file in files if file.suffix == ".distcp"}
    torn += [
        "%s: shards without .metadata, which is written last" % folder
        for folder in folders
        if not _has_metadata(folder)
    ]
    if torn:
        return exposed(*torn[:8], advice="resume from the checkpoint before this one, and keep this one for the report")
    room = disk.f_bavail * disk.f_frsize
    message = "%d files of %s read, none is torn; %d MiB, and %d MiB are free" % (
        len(files) - len(unread),
        path,
        size >> 20,
        room >> 20,
    )
    if room < size:
        return exposed(message, advice="another one of this size does not fit: make room, or keep fewer")
    if unread or len(files) == 0:
        return unknown(message, *unread[:5])
    return clear(message, "values were not compared: a changed bit is only found by a checksum")


def _inside(folder: Path) -> List[Path]:
    first = list(folder.iterdir())[:2000]
    return first + [two for item in first if item.is_dir() for two in list(item.iterdir())[:2000]]


def _torn(files: List[Path]) -> Tuple[List[str], List[str]]:
    """What is torn, and what could not be judged."""
    torn: List[str] = []
    unread: List[str] = []
    end = time.monotonic() + SECONDS
    for file in files:
        if file.suffix not in WEIGHTS:
            continue
        if time.monotonic() > end:
            unread.append("%s and the rest: out of time, name them one by one" % file)
            break
        try:
            read_checkpoint(file)
        except Unreadable as error:
            (torn if error.is_torn else unread).append(str(error))
    return torn, unread


def _has_metadata(folder: Path) -> bool:
    return any(name.endswith(".metadata") for name in os.listdir(folder))


probe = Probe(
    check=check,
    params={
        "checkpoint": Param("path", "a checkpoint file or its folder; nothing in it is run"),
        "how": Param("str", "what cuts the save off: kill, or disk-full", "kill"),
    },
    experiments=(
        Experiment(
            name="save",
            control=Arm(
                partial(save_twice, beside=False),
                expect=raised(r"failed finding central directory"),
                because="the save that is cut off had already truncated the only checkpoint",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(save_twice, beside=True),
                expect=completed(),
                because="the save goes into a file beside it, which is renamed once it is complete",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(memory_mib=512),
            expected_s=(0.1, 0.1),
        ),
    ),
)

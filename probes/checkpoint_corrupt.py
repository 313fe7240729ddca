"""A save is cut off in the middle, once over the only checkpoint and once into a file beside it."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import shutil
import signal
import struct
import sys
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from kb.checkpoint import Unreadable, read_checkpoint
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

CUT_AT = 800_000  # bytes; a whole checkpoint has some hundred more
CUT_EARLY = 30_000  # between 4 and 68 KiB torch.load says something else
Save = Callable[[object, str], None]


def save(state: object, path: str) -> None:
    import torch

    with open(path + ".part", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def save_in_place(state: object, path: str) -> None:
    import torch

    torch.save(state, path)


def state_of(step: int) -> Dict[str, Any]:
    import torch

    return {"step": step, "weight": torch.ones(4 if step == 1 else 200_000)}


def save_and_die(ctx: Context, saves: Save, step: int, path: str, kills: bool = True, at: int = CUT_AT) -> None:
    """A save in a process of its own, stopped after `at` bytes: by a signal, or by a write that is refused."""
    child = os.fork()
    if child == 0:
        # A limit on the size of files stands for both: the kernel kills who exceeds it, or refuses the write
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if kills else signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (at, at))
        try:
            saves(state_of(step), path)
        except (OSError, RuntimeError) as error:
            sys.stderr.write("%s\n" % error)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) if kills else status == 256, (
        "the writer was not interrupted as it should: %d" % status
    )
    ctx.note(files={name: os.path.getsize(name) for name in sorted(os.listdir(".")) if ".p" in name})


def save_twice(ctx: Context, *, saves: Save, kills: bool = True, at: int = CUT_AT) -> None:
    """Step 1 is saved well. The save of step 2 over it is interrupted. Then the job resumes."""
    import torch

    path = ctx.path("last.pt")
    save_in_place(state_of(1), path)
    ctx.reached()
    save_and_die(ctx, saves, 2, path, kills, at)
    try:
        step = torch.load(path)["step"]
    except OSError as error:
        raise Symptom("torch.load of %d bytes: %s" % (os.path.getsize(path), error)) from error
    assert step == 1  # the last good one is still there
    ctx.note(one_bit_flipped_in_a_tensor=flip_a_bit(path))


def newest(folder: str) -> str:
    """What trainers resume from: the folder with the highest number."""
    folders = [name for name in os.listdir(folder) if re.fullmatch(r"checkpoint-\d+", name)]
    if not folders:
        raise Symptom("no checkpoint is left to resume from, only %s" % sorted(os.listdir(folder)))
    return os.path.join(folder, max(folders, key=lambda name: int(name.split("-")[1])))


def resume_newest(ctx: Context, *, moves_torn: bool, **options: Any) -> None:
    """The save of the second folder is cut off; the next job takes the highest number, and each one after it."""
    import torch

    for step in (1, 2):
        os.mkdir(ctx.path("checkpoint-%d" % step))
    save_in_place(state_of(1), ctx.path("checkpoint-1/state.pt"))
    ctx.reached()
    save_and_die(ctx, save_in_place, 2, ctx.path("checkpoint-2/state.pt"))
    if moves_torn:
        os.rename(ctx.path("checkpoint-2"), ctx.path("torn-checkpoint-2"))
    assert torch.load(newest(str(ctx.dir)) + "/state.pt", **options)["step"] == 1


def make_room(ctx: Context, *, after: bool) -> None:
    """The old checkpoint is deleted before the new one is saved, or after it."""
    import torch

    os.mkdir(ctx.path("checkpoint-1"))
    save_in_place(state_of(1), ctx.path("checkpoint-1/state.pt"))
    ctx.reached()

    def save_next(state: object, path: str) -> None:
        if not after:
            shutil.rmtree(ctx.path("checkpoint-1"))
        os.mkdir(ctx.path("checkpoint-2"))
        save_in_place(state, path)
        if after:
            shutil.rmtree(ctx.path("checkpoint-1"))

    save_and_die(ctx, save_next, 2, ctx.path("checkpoint-2/state.pt"))
    os.rename(ctx.path("checkpoint-2"), ctx.path("torn-checkpoint-2"))
    assert torch.load(newest(str(ctx.dir)) + "/state.pt")["step"] == 1


def save_folder(ctx: Context, *, renames: bool) -> None:
    """Each rank writes a shard; the disk of rank 1 is full. Then both resume from the newest folder."""
    import torch

    dist = ctx.init_process_group(timeout_s=2)
    if ctx.rank == 0:
        os.makedirs(ctx.path("checkpoint-1"))
        for rank in range(2):
            save_in_place(state_of(1), ctx.path("checkpoint-1/%d.pt" % rank))
    ctx.reached()
    folder, state = ctx.path("checkpoint-2"), state_of(2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ctx.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (CUT_AT, limits[1]))
    try:
        if renames:
            os.makedirs(folder + ".tmp", exist_ok=True)
            torch.save(state, f"{folder}.tmp/{dist.get_rank()}.pt")
            dist.barrier()
            if dist.get_rank() == 0:
                assert len(os.listdir(folder + ".tmp")) == dist.get_world_size()
                os.rename(folder + ".tmp", folder)
        else:
            os.makedirs(folder, exist_ok=True)
            torch.save(state, f"{folder}/{dist.get_rank()}.pt")
    except RuntimeError as error:  # the write on rank 1, the barrier on rank 0
        ctx.note(error=str(error)[:200])
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ctx.meet("saved", timeout_s=15)
    steps = [torch.load("%s/%d.pt" % (newest(str(ctx.dir)), rank))["step"] for rank in range(2)]
    assert steps == [1, 1], steps


def save_from_ranks(ctx: Context, *, one_rank: bool) -> None:
    """Both ranks save into one path, the second while the first is half through; or only rank 0 does."""
    import torch

    path = ctx.path("last.pt")

    class Halfway(io.FileIO):
        """A file whose writer is slow: after the first bytes it waits for the other rank."""

        calls = 0

        def write(self, data: Any) -> int:
            self.calls += 1
            if self.calls == 3:
                ctx.meet("half")
                ctx.meet("other")
            return super().write(data)

    ctx.reached()
    if ctx.rank == 0:
        with Halfway(path, "wb") as file:
            torch.save(state_of(1), file)
            assert file.calls >= 3
    else:
        ctx.meet("half")
        if not one_rank:
            torch.save({**state_of(2), "random_state": torch.get_rng_state()}, path)
        ctx.meet("other")
    ctx.meet("saved")
    assert torch.load(path)["step"] == 1


def flip_a_bit(path: str) -> str:
    """Whether torch.load and the zip checksum notice a tensor in which one bit has changed."""
    import torch

    data = bytearray(Path(path).read_bytes())
    data[data.find(struct.pack("<4f", 1, 1, 1, 1)) + 2] ^= 1
    Path(path).write_bytes(data)
    weight = torch.load(path)["weight"].tolist()
    with zipfile.ZipFile(path) as archive:
        broken = archive.testzip()
    assert weight[0] == 1.0078125 and broken, (weight, broken)
    return "torch.load gives %s without an error, the checksum test names %s" % (weight, broken)


WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
SMALL = (".json", ".txt", ".model")  # beside the weights
SECONDS = 0.6
MOST = 2000  # files of a folder


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
    torn, unread, read = _torn(files)
    folders = {file.parent for file in files if file.suffix == ".distcp"}
    torn += [
        "%s: shards without .metadata, which is written last" % folder
        for folder in folders
        if not _has_metadata(folder)
    ]
    torn += _unfinished(files) + _cut_json(files) if path.is_dir() else []
    if torn:
        return exposed(*torn[:8], advice="resume from the checkpoint before this one, and keep this one for the report")
    missing = _missing(files)
    if missing:
        return exposed(*missing[:5], advice="not every shard was saved or copied: resume from the one before this one")
    room = disk.f_bavail * disk.f_frsize
    message = "%d files of %s read, none is torn; %d MiB" % (read, path, size >> 20)
    if not disk.f_blocks:
        return unknown(message, *unread[:4], "the file system does not say how much is free")
    message += ", and %d MiB are free, without a look at quotas" % (room >> 20)
    if room < size:
        return exposed(message, advice="another one of this size does not fit: make room, or keep fewer")
    if unread or not (read or folders):
        return unknown(message, *unread[:5])
    if len(files) >= MOST:
        return unknown(message, "more files than are looked at: name one folder, or one file, of it")
    if folders:
        return unknown(
            message, "the .distcp shards were not read; .metadata may be of an earlier save into this folder"
        )
    if any(re.search(r"rank|rng_state_\d", file.name) for file in files):
        return unknown(message, "whether every rank's file is there cannot be seen: count them")
    if path.is_dir() and not any(file.name == "trainer_state.json" for file in files):
        return unknown(message, "whether every file of it is there cannot be seen: compare with an older checkpoint")
    other = size - sum(file.stat().st_size for file in files if file.suffix in (*WEIGHTS, *SMALL))
    if path.is_dir() and other > size // 10:
        return unknown(message, "%d MiB in files of other kinds were not read" % (other >> 20))
    return clear(message, "values were not compared: a changed bit is only found by a checksum")


def _inside(folder: Path) -> List[Path]:
    def stop(error: OSError) -> None:
        raise error

    result: List[Path] = []
    for place, _, names in os.walk(folder, onerror=stop):
        result += [Path(place, name) for name in names]
        if len(result) >= MOST:
            break
    return result


def _unfinished(files: List[Path]) -> List[str]:
    """Folders in which the Trainer began a checkpoint and did not come to the file that it writes last."""
    begun = {file.parent for file in files if file.name == "training_args.bin"}
    return [
        "%s: no trainer_state.json, which the Trainer writes last" % folder
        for folder in sorted(begun)
        if re.fullmatch(r"checkpoint-\d+", folder.resolve().name) and not (folder / "trainer_state.json").exists()
    ]


def _cut_json(files: List[Path]) -> List[str]:
    """JSON files that are empty, zeros, or begin with a bracket and end without it; marks of a save that goes on."""
    result: List[str] = []
    for file in files:
        if file.name == "checkpoint-is-incomplete.txt":
            result.append("%s: the Trainer removes it once its save at SIGTERM is whole" % file)
        if file.suffix != ".json":
            continue
        try:
            with file.open("rb") as stream:
                first = stream.read(64).strip()
                stream.seek(max(0, file.stat().st_size - 64))
                last = stream.read().strip()
        except OSError:
            continue
        brackets = {b"{": b"}", b"[": b"]"}
        if not first.strip(b"\0") or last[-1:] != brackets.get(first[:1], last[-1:]):
            result.append("%s: its end is missing, or it is empty" % file)
    return result


def _missing(files: List[Path]) -> List[str]:
    """Shards that an index names and that are not there."""
    result: List[str] = []
    for index in [file for file in files if file.name.endswith(".index.json") and file.stat().st_size < 1 << 24]:
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
            result += [
                "%s names %s, which is not there" % (index, name)
                for name in sorted(named - set(os.listdir(index.parent)))
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return result


def _torn(files: List[Path]) -> Tuple[List[str], List[str], int]:
    """What is torn, what could not be judged, and how many files were read."""
    torn: List[str] = []
    unread: List[str] = []
    read = 0
    end = time.monotonic() + SECONDS
    for file in files:
        if file.suffix not in WEIGHTS:
            continue
        if time.monotonic() > end:
            unread.append("%s and the rest: out of time, name them one by one" % file)
            break
        try:
            form = read_checkpoint(file).format
            torn += _holes(file)
            read += 1
            if form == "safetensors" and _ends_in_zeros(file):
                unread.append("%s ends in zeros: weights that are zero, or a write that was lost" % file)
        except Unreadable as error:
            no_checksums = "Bad CRC-32" in str(error)  # torch.save can leave them out, and the file is whole
            (torn if error.is_torn and not no_checksums else unread).append(str(error))
        except (OSError, zipfile.BadZipFile) as error:
            unread.append("%s cannot be read: %s" % (file, error))
    return torn, unread, read


def _holes(file: Path) -> List[str]:
    """The first part of an archive whose own header is gone, while the table of contents is whole."""
    if not zipfile.is_zipfile(file):
        return []
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        for part in archive.infolist():
            stream.seek(part.header_offset)
            if stream.read(4) != b"PK\x03\x04":
                return ["%s: the header of %s is gone, a piece of the file was lost" % (file, part.filename)]
    return []


def _ends_in_zeros(file: Path) -> bool:
    """Whether the last page holds nothing, as after a power cut: this format has no checksum and no end of its own."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 4096))
        return not stream.read().strip(b"\0")


def _has_metadata(folder: Path) -> bool:
    return any(name.endswith(".metadata") for name in os.listdir(folder))


TORN = raised(r"failed finding central directory")
BROKEN = "the save that is cut off had already truncated the only checkpoint"
BESIDE = "the save goes into a file beside it, which is renamed once it is complete"


def variant(
    name: str,
    broken: Callable[[Context], None],
    fixed: Callable[[Context], None],
    because: str,
    fix: str,
    expect: Expect = TORN,
    world_size: int = 1,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(fixed, expect=completed(), because=fix, fidelity="cpu"),
        world_size=world_size,
        needs=Needs(memory_mib=512),
        expected_s=(0.2, 0.2 if world_size == 1 else 2.3),
    )


disk_full = variant(
    "disk-full",
    partial(save_twice, saves=save_in_place, kills=False),
    partial(save_twice, saves=save, kills=False),
    BROKEN + "; it fails because a write is refused, as on a full disk",
    BESIDE,
)
other_options = variant(
    "other-options",
    partial(resume_newest, moves_torn=False, map_location="cpu", weights_only=False),
    partial(resume_newest, moves_torn=True, map_location="cpu", weights_only=False),
    "the torn file is loaded with weights_only=False and map_location",
    "the checkpoint before it is loaded",
)
moved = variant(
    "move-away",
    partial(resume_newest, moves_torn=False),
    partial(resume_newest, moves_torn=True),
    "the torn folder has the highest number",
    "it was renamed, so that the one before it has the highest number",
)
room = variant(
    "delete-after",
    partial(make_room, after=False),
    partial(make_room, after=True),
    "the old checkpoint is deleted to make room, then the save is cut off",
    "the old one is deleted once the new one is whole, which it never was",
    symptom(r"no checkpoint is left"),
)
early = variant(
    "early",
    partial(save_twice, saves=save_in_place, at=CUT_EARLY),
    partial(save_twice, saves=save, at=CUT_EARLY),
    BROKEN + ", and died within the first 68 KiB",
    BESIDE,
    symptom(r"torch\.load of 30000 bytes: \[Errno 22\] Invalid argument"),
)
two_writers = variant(
    "two-writers",
    partial(save_from_ranks, one_rank=False),
    partial(save_from_ranks, one_rank=True),
    "rank 1 saves into the path that rank 0 is half through",
    "only rank 0 saves",
    raised(r"PytorchStreamReader failed reading|failed finding central directory"),
    2,
)
folder = variant(
    "folder",
    partial(save_folder, renames=False),
    partial(save_folder, renames=True),
    "rank 0 has saved its shard, rank 1 has not: the folder has the highest number, and one torn file",
    "the folder gets its name after a barrier, which rank 1 did not reach",
    TORN,
    2,
)

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "a checkpoint file or its folder; nothing in it is run")},
    experiments=(
        Experiment(
            name="save",
            control=Arm(partial(save_twice, saves=save_in_place), expect=TORN, because=BROKEN, fidelity="cpu"),
            treatment=Arm(partial(save_twice, saves=save), expect=completed(), because=BESIDE, fidelity="cpu"),
            world_size=1,
            needs=Needs(memory_mib=512),
            expected_s=(0.1, 0.1),
        ),
    ),
    variants=(disk_full, early, other_options, moved, room, folder, two_writers),
)

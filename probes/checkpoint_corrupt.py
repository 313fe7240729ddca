"""A save is interrupted, once while it overwrites the only checkpoint and once while it writes a file next to it."""

from __future__ import annotations

import importlib
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
from kb.cpu_arms import without_launcher
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

CUT_AT = 800_000  # bytes; a complete checkpoint has about 801,500
CUT_EARLY = 30_000  # for files between 4 and 68 KiB, torch.load raises a different error
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
    """Saves in a separate process, which a signal or a refused write stops after `at` bytes."""
    child = os.fork()
    if child == 0:
        # With a limit on the size of files, the kernel kills a process that exceeds it, or refuses its write.
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
    assert os.WIFSIGNALED(status) if kills else status == 256, "the writer was not interrupted: %d" % status
    ctx.note(files={name: os.path.getsize(name) for name in sorted(os.listdir(".")) if ".p" in name})


def save_twice(ctx: Context, *, saves: Save, kills: bool = True, at: int = CUT_AT) -> None:
    """Saves step 1, interrupts the save of step 2 to the same path, and resumes."""
    import torch

    path = ctx.path("last.pt")
    save_in_place(state_of(1), path)
    ctx.reached()
    save_and_die(ctx, saves, 2, path, kills, at)
    try:
        step = torch.load(path)["step"]
    except OSError as error:
        raise Symptom("torch.load of %d bytes: %s" % (os.path.getsize(path), error)) from error
    assert step == 1  # the last good checkpoint is still there
    ctx.note(one_bit_flipped_in_a_tensor=flip_a_bit(path))


def newest(folder: str) -> str:
    """The folder with the highest number, from which trainers resume."""
    folders = [name for name in os.listdir(folder) if re.fullmatch(r"checkpoint-\d+", name)]
    if not folders:
        raise Symptom("no checkpoint is left to resume from, only %s" % sorted(os.listdir(folder)))
    return os.path.join(folder, max(folders, key=lambda name: int(name.split("-")[1])))


def resume_newest(ctx: Context, *, moves_torn: bool, **options: Any) -> None:
    """Interrupts the save of the second folder, and resumes from the folder with the highest number."""
    import torch

    for step in (1, 2):
        os.makedirs(ctx.path("run/checkpoint-%d" % step))
    save_in_place(state_of(1), ctx.path("run/checkpoint-1/state.pt"))
    ctx.reached()
    save_and_die(ctx, save_in_place, 2, ctx.path("run/checkpoint-2/state.pt"))
    if moves_torn:
        os.rename(ctx.path("run/checkpoint-2"), ctx.path("torn-checkpoint-2"))
    assert torch.load(newest(ctx.path("run")) + "/state.pt", **options)["step"] == 1


def resume_by_number(ctx: Context, *, moves_out: bool) -> None:
    """accelerate's automatic naming resumes from the highest number; the torn folder is renamed, or moved out."""
    without_launcher()
    accelerate: Any = importlib.import_module("accelerate")
    utils: Any = importlib.import_module("accelerate.utils")
    import torch

    run = ctx.path("run")
    named = utils.ProjectConfiguration(project_dir=run, automatic_checkpoint_naming=True)
    accelerator = accelerate.Accelerator(cpu=True, project_config=named)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    for step in (0, 1):
        torch.nn.init.constant_(model.weight, step)
        accelerator.save_state()
    ctx.reached()
    beside = "torn-checkpoint_1" if moves_out else "run/checkpoints/torn-checkpoint_1"
    os.rename(ctx.path("run/checkpoints/checkpoint_1"), ctx.path(beside))
    accelerator.load_state()
    if model.weight.item() == 1:
        raise Symptom("load_state chose the renamed folder again: %s" % sorted(os.listdir(run + "/checkpoints")))
    assert model.weight.item() == 0


def make_room(ctx: Context, *, after: bool) -> None:
    """Deletes the old checkpoint before or after the save of the new one, which is interrupted."""
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
    """Each rank writes a shard, the second time on a full disk of rank 1; then both resume from the newest folder."""
    import torch

    dist = ctx.init_process_group(timeout_s=4)

    def save_all(state: object, folder: str) -> None:
        if renames:
            if dist.get_rank() == 0:
                shutil.rmtree(folder + ".tmp", ignore_errors=True)  # left from an interrupted save
                os.makedirs(folder + ".tmp")
            dist.barrier()
            torch.save(state, f"{folder}.tmp/{dist.get_rank()}.pt")
            dist.barrier()  # every rank has written; a rank that failed never gets here
            if dist.get_rank() == 0:
                os.rename(folder + ".tmp", folder)
        else:
            os.makedirs(folder, exist_ok=True)
            torch.save(state, f"{folder}/{dist.get_rank()}.pt")

    if ctx.rank == 0:  # a save of four ranks was interrupted here
        os.makedirs(ctx.path("checkpoint-1.tmp"))
        Path(ctx.path("checkpoint-1.tmp/3.pt")).write_bytes(b"PK")
    ctx.meet("left")
    save_all(state_of(1), ctx.path("checkpoint-1"))
    ctx.meet("first")
    assert sorted(os.listdir(ctx.path("checkpoint-1"))) == ["0.pt", "1.pt"]
    ctx.reached()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ctx.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (CUT_AT, limits[1]))
    try:
        save_all(state_of(2), ctx.path("checkpoint-2"))
    except RuntimeError as error:  # the write fails on rank 1, the barrier on rank 0
        ctx.note(error=str(error)[:200])
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    ctx.meet("saved", timeout_s=15)
    steps = [torch.load("%s/%d.pt" % (newest(str(ctx.dir)), rank))["step"] for rank in range(2)]
    assert steps == [1, 1], steps


def save_from_ranks(ctx: Context, *, one_rank: bool) -> None:
    """Both ranks save to one path, rank 1 in the middle of rank 0's save; or only rank 0 saves."""
    import torch

    path = ctx.path("last.pt")

    class Halfway(io.FileIO):
        """A slow file, which waits for the other rank after the first bytes."""

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
    """Flips a bit of a tensor in a file, and says whether torch.load and the zip checksum notice it."""
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
SMALL = (".json", ".txt", ".model")  # files next to the weights
SECONDS = 0.6
SMALL_ENOUGH = 1 << 25  # bytes of a file whose checksums the check has time to compare
MAX_FILES = 2000  # how many files of a folder the check reads


def check(params: Mapping[str, Any]) -> Finding:
    """Are these files complete, do the files exist that a save writes last, and does another checkpoint fit?"""
    path: Optional[Path] = params["checkpoint"]
    if path is None:
        return unknown("kb needs a checkpoint", advice="run --set checkpoint=/path/to/checkpoint-500")
    try:
        files = [path] if not path.is_dir() else sorted(item for item in _inside(path) if item.is_file())
        size = sum(file.stat().st_size for file in files)
        disk = os.statvfs(path)
    except OSError as error:
        return unknown("kb cannot read %s: %s" % (path, error.strerror))
    torn, unread, read = _torn(files)
    folders = {file.parent for file in files if file.suffix == ".distcp"}
    without = [folder for folder in folders if not _has_metadata(folder)]
    torn += ["%s: has shards but no .metadata, which a save writes last" % folder for folder in without]
    torn += _unfinished(files) + _cut_json(files) if path.is_dir() else []
    if torn:
        return exposed(*torn[:8], advice="resume from the previous checkpoint, and keep this one for the report")
    missing = _missing(files)
    if missing:
        advice = "a shard was not saved or not copied: resume from the previous checkpoint"
        return exposed(*missing[:5], advice=advice)
    room = disk.f_bavail * disk.f_frsize
    message = "kb read %d files of %s, and none is torn; %d MiB" % (read, path, size >> 20)
    if not disk.f_blocks:
        return unknown(message, *unread[:4], "the file system does not report its free space")
    message += ", and %d MiB are free, apart from quotas" % (room >> 20)
    if room < size:
        return exposed(message, advice="another checkpoint of this size does not fit: free space, or keep fewer")
    if unread or not (read or folders):
        return unknown(message, *unread[:5])
    limits = _limits(path, files, size, bool(folders))
    if limits:
        return unknown(message, *limits)
    if any(file.suffix in WEIGHTS and file.stat().st_size > SMALL_ENOUGH for file in files):
        return clear(message, "kb did not compare checksums: python -m zipfile -t FILE does, for torch.save")
    return clear(message, "kb compared the checksums of torch.save; safetensors has none")


def _limits(path: Path, files: List[Path], size: int, has_shards: bool) -> List[str]:
    """Why a checkpoint without a torn file may still be incomplete, or nothing."""
    if len(files) >= MAX_FILES:
        return ["kb reads only the first %d files: name one folder or one file of it" % MAX_FILES]
    if has_shards:
        return ["kb does not read .distcp shards, and .metadata may be from an earlier save into this folder"]
    if any(re.search(r"rank|rng_state_\d", file.name) for file in files):
        return ["kb cannot see whether the file of every rank is there: count them"]
    if path.is_dir() and not any(file.name == "trainer_state.json" for file in files):
        return ["kb cannot see whether every file is there: compare with an older checkpoint"]
    if path.is_dir() and not any(file.name.startswith("optimizer") for file in files):
        return ["no optimizer file is there: save_only_model leaves it out, an incomplete copy lacks it"]
    other = size - sum(file.stat().st_size for file in files if file.suffix in (*WEIGHTS, *SMALL))
    if path.is_dir() and other > size // 10:
        return ["kb did not read %d MiB in files of other kinds" % (other >> 20)]
    return []


def _inside(folder: Path) -> List[Path]:
    """The files below a folder, about `MAX_FILES` at most; raises OSError."""

    def stop(error: OSError) -> None:
        raise error

    result: List[Path] = []
    for subfolder, _, names in os.walk(folder, onerror=stop):
        result += [Path(subfolder, name) for name in names]
        if len(result) >= MAX_FILES:
            break
    return result


def _unfinished(files: List[Path]) -> List[str]:
    """The folders in which the Trainer began a checkpoint, but did not write its last file."""
    begun = {file.parent for file in files if file.name == "training_args.bin"}
    return [
        "%s: has no trainer_state.json, which the Trainer writes last" % folder
        for folder in sorted(begun)
        if re.fullmatch(r"checkpoint-\d+", folder.resolve().name) and not (folder / "trainer_state.json").exists()
    ]


def _cut_json(files: List[Path]) -> List[str]:
    """JSON files that are empty, zeros or lack their closing bracket; also the Trainer's mark of a running save."""
    result: List[str] = []
    for file in files:
        if file.name == "checkpoint-is-incomplete.txt":
            result.append("%s: the Trainer removes this file when its save at SIGTERM is complete" % file)
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
            result.append("%s: is empty, or its end is missing" % file)
    return result


def _missing(files: List[Path]) -> List[str]:
    """The shards that an index names but that are missing."""
    result: List[str] = []
    for index in [file for file in files if file.name.endswith(".index.json") and file.stat().st_size < 1 << 24]:
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
            result += [
                "%s names %s, which is missing" % (index, name)
                for name in sorted(named - set(os.listdir(index.parent)))
            ]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return result


def _torn(files: List[Path]) -> Tuple[List[str], List[str], int]:
    """The torn files, those that kb could not judge, and the number of files that it read."""
    torn: List[str] = []
    unread: List[str] = []
    read = 0
    end = time.monotonic() + SECONDS
    for file in files:
        if file.suffix not in WEIGHTS:
            continue
        if time.monotonic() > end:
            unread.append("kb had no time to read %s and the files after it: name them one by one" % file)
            break
        try:
            form = read_checkpoint(file).format
            torn += _holes(file)
            read += 1
            if form == "safetensors" and _ends_in_zeros(file):
                unread.append("%s ends in zeros: these weights are zero, or a write was lost" % file)
            if _has_a_hole(file):
                unread.append("%s has a hole: a write was lost, or the file system stores zeros in this way" % file)
            elif form == "torch.save" and file.stat().st_size <= SMALL_ENOUGH:
                with zipfile.ZipFile(file) as archive:
                    part = archive.testzip()
                if part:
                    unread.append("%s: the checksum of %s is wrong, or was left out by the save" % (file, part))
        except Unreadable as error:
            no_checksums = "Bad CRC-32" in str(error)  # torch.save can leave out checksums of a complete file
            (torn if error.is_torn and not no_checksums else unread).append(str(error))
        except (OSError, zipfile.BadZipFile) as error:
            unread.append("kb cannot read %s: %s" % (file, error))
    return torn, unread, read


def _holes(file: Path) -> List[str]:
    """The first part of an archive whose header is missing, although the table of contents is complete."""
    if not zipfile.is_zipfile(file):
        return []
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        for part in archive.infolist():
            stream.seek(part.header_offset)
            if stream.read(4) != b"PK\x03\x04":
                return ["%s: the header of %s is missing, so a piece of the file was lost" % (file, part.filename)]
    return []


def _ends_in_zeros(file: Path) -> bool:
    """Does the last page contain only zeros, as after a power cut? safetensors has no checksum and no end mark."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 4096))
        return not stream.read().strip(b"\0")


def _has_a_hole(file: Path) -> bool:
    """Did nobody write a part of the file? After a power cut its middle may be missing, between good ends."""
    with file.open("rb") as stream:
        return os.lseek(stream.fileno(), 0, os.SEEK_HOLE) < os.fstat(stream.fileno()).st_size


def _has_metadata(folder: Path) -> bool:
    return any(name.endswith(".metadata") for name in os.listdir(folder))


TORN = raised(r"failed finding central directory")
BROKEN = "the interrupted save had already truncated the only checkpoint"
BESIDE = "the save writes a second file, and renames it over the checkpoint when it is complete"


def variant(
    name: str,
    broken: Callable[[Context], None],
    fixed: Callable[[Context], None],
    because: str,
    fix: str,
    expect: Expect = TORN,
    world_size: int = 1,
    packages: Optional[Dict[str, str]] = None,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(fixed, expect=completed(), because=fix, fidelity="cpu"),
        world_size=world_size,
        needs=Needs(memory_mib=512, packages={"torch": ">=2.1", **(packages or {})}),
        deadline_s=60.0 if packages else 30.0,
        expected_s=(0.2, 0.2 if world_size == 1 else 4.3),
    )


disk_full = variant(
    "disk-full",
    partial(save_twice, saves=save_in_place, kills=False),
    partial(save_twice, saves=save, kills=False),
    BROKEN + "; it failed because a write was refused, as on a full disk",
    BESIDE,
)
other_options = variant(
    "other-options",
    partial(resume_newest, moves_torn=False, map_location="cpu", weights_only=False),
    partial(resume_newest, moves_torn=True, map_location="cpu", weights_only=False),
    "the job loads the torn file with weights_only=False and map_location",
    "the job loads the previous checkpoint",
)
moved = variant(
    "move-away",
    partial(resume_newest, moves_torn=False),
    partial(resume_newest, moves_torn=True),
    "the torn folder has the highest number",
    "the torn folder is no longer there, so the previous one has the highest number",
)
by_number = variant(
    "accelerate-naming",
    partial(resume_by_number, moves_out=False),
    partial(resume_by_number, moves_out=True),
    "the torn folder was only renamed, and accelerate takes the number from any name",
    "the torn folder was moved out of the folder that accelerate searches",
    symptom(r"load_state chose the renamed folder again"),
    packages={"accelerate": ">=0.30"},
)
room = variant(
    "delete-after",
    partial(make_room, after=False),
    partial(make_room, after=True),
    "the job deletes the old checkpoint to free space, and then the save is interrupted",
    "the job deletes the old checkpoint only after a complete save, so it is still there",
    symptom(r"no checkpoint is left"),
)
early = variant(
    "early",
    partial(save_twice, saves=save_in_place, at=CUT_EARLY),
    partial(save_twice, saves=save, at=CUT_EARLY),
    BROKEN + ", and stopped within the first 68 KiB",
    BESIDE,
    symptom(r"torch\.load of 30000 bytes: \[Errno 22\] Invalid argument"),
)
two_writers = variant(
    "two-writers",
    partial(save_from_ranks, one_rank=False),
    partial(save_from_ranks, one_rank=True),
    "rank 1 saves to the same path in the middle of rank 0's save",
    "only rank 0 saves",
    raised(r"PytorchStreamReader failed reading|failed finding central directory"),
    2,
)
folder = variant(
    "folder",
    partial(save_folder, renames=False),
    partial(save_folder, renames=True),
    "rank 0 saved its shard but rank 1 did not, so the folder with the highest number has a torn file",
    "the folder gets its final name after a barrier, which rank 1 did not reach",
    TORN,
    2,
)

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "a checkpoint file or its folder; kb runs no code in it")},
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
    variants=(disk_full, early, other_options, moved, by_number, room, folder, two_writers),
)

"""The first build of a C++ extension is killed halfway; the next start finds its lock file and waits forever."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Mapping

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Unavailable,
    clear,
    completed,
    exposed,
    hung,
    unknown,
)

LONGEST_BUILD_S = 3600  # older than any build: then an owner on another host is not the explanation
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs"}
FLOCK_SINCE = (2, 14)  # torch locks with flock from here on; a left-over file means nothing to it


def start(ctx: Context, *, lock_removed: bool) -> None:
    import signal
    import unittest.mock

    try:
        import filelock
        from torch.utils import cpp_extension
    except ImportError as error:
        raise Unavailable("extensions cannot be built here: %s" % error) from error

    folder = Path(ctx.path("fused_adam"))
    folder.mkdir()
    source = Path(ctx.path("fused_adam.cpp"))
    source.write_text("int main() { return 0; }\n")

    def load() -> str:  # the compiler is left out: the lock is taken before it and released after it
        with unittest.mock.patch.object(cpp_extension, "_write_ninja_file_and_build_library", build):
            return str(
                cpp_extension.load(
                    name="fused_adam",
                    sources=str(source),
                    build_directory=str(folder),
                    is_python_module=False,
                    is_standalone=True,
                )
            )

    def build(**_: object) -> None:
        if os.getpid() != starter:
            filelock.FileLock(ctx.path("hub.lock")).acquire()  # as huggingface_hub and datasets lock
            os.kill(os.getpid(), signal.SIGKILL)
        (folder / "fused_adam").touch()

    starter = os.getpid()
    killed = os.fork()
    if killed == 0:
        load()
        os._exit(1)
    assert os.waitpid(killed, 0)[1] == signal.SIGKILL
    begun = time.monotonic()
    with filelock.FileLock(ctx.path("hub.lock"), timeout=1):
        ctx.note(flock_of_the_killed_process_free_after_s=round(time.monotonic() - begun, 3))
    ctx.note(left_behind=sorted(path.name for path in folder.iterdir()))
    ctx.reached()
    lock = folder / "lock"
    if lock_removed and lock.exists():
        assert not _holders([lock])[lock], "somebody builds: the lock is not stale"
        lock.unlink()
    assert Path(load()).exists()


def check(params: Mapping[str, Any]) -> Finding:
    """Lock files of extension builds that no living process holds open."""
    root = params["cache"] or extensions_root()
    elsewhere = "if the job builds elsewhere: --set cache=THAT_FOLDER"
    if not root.is_dir():
        return unknown("there is no folder %s" % root, advice=elsewhere)
    try:
        locks = sorted({*root.glob("*/lock"), *root.glob("*/*/lock")})
    except OSError as error:
        return unknown("%s cannot be read: %s" % (root, error.strerror), advice=elsewhere)
    if not locks:
        return clear("no lock file below %s; %s" % (root, elsewhere))
    holders = _holders(locks)
    message = [_describe(lock, holders[lock]) for lock in locks]
    stale = [lock for lock in locks if not holders[lock]]
    if not stale:
        return clear(*message, "every lock has a living owner: a build is under way")
    installed = _torch()
    if installed >= FLOCK_SINCE:
        since = (
            "torch %d.%d locks with flock: a left-over file does not stop it, but it stops an older torch" % installed
        )
        return clear(*message, since)
    doubt = [doubt for lock in stale for doubt in _doubts(lock)]
    if doubt:
        return unknown(*message, *sorted(set(doubt)), advice="look for a running build there before removing anything")
    return exposed(
        *message,
        "no process that can be seen from here has %s open" % ("it" if len(stale) == 1 else "them"),
        advice="when no job builds there: rm %s" % " ".join(str(lock) for lock in stale),
    )


def extensions_root() -> Path:
    """Where torch.utils.cpp_extension builds, by the caller's variables."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions"))


def _describe(lock: Path, pids: list[int]) -> str:
    owner = "held open by process %s" % ", ".join(map(str, pids)) if pids else "nobody has it open"
    return "%s: %.1f minutes old, %s" % (lock, _age_s(lock) / 60, owner)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _holders(files: list[Path]) -> dict[Path, list[int]]:
    """For each file the processes that have it open, as far as their descriptors can be read."""
    file_of = {os.path.realpath(file): file for file in files}
    result: dict[Path, list[int]] = {file: [] for file in files}
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        try:
            targets = {os.readlink(entry.path) for entry in os.scandir(descriptors)}
        except OSError:
            continue  # ended, or somebody else's
        for target in targets & file_of.keys():
            result[file_of[target]].append(int(descriptors.parent.name))
    return result


def _doubts(lock: Path) -> list[str]:
    """Why a lock without a visible owner may still have one."""
    doubts = []
    try:
        if os.geteuid() not in (0, lock.stat().st_uid):
            doubts.append("it belongs to another user, whose processes cannot be examined")
    except OSError:
        doubts.append("it has just gone")
    kind = _file_system(lock)
    if kind not in LOCAL and _age_s(lock) < LONGEST_BUILD_S:
        doubts.append("it lies on %s, where the owner may be on another host" % kind)
    return doubts


def _file_system(path: Path) -> str:
    """Type of the file system that holds a path, as the longest mount point that contains it."""
    where, kind = "", "an unknown file system"
    real = os.path.realpath(path)
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return kind
    for fields in (mount.split() for mount in mounts):
        point = fields[1].replace("\\040", " ").rstrip("/") + "/"
        if real.startswith(point) and len(point) >= len(where):
            where, kind = point, fields[2]
    return kind


def _torch() -> tuple[int, int]:
    """Major and minor release of the installed torch; (0, 0) when there is none."""
    import importlib.metadata

    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
        return int(major), int(minor)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return 0, 0


probe = Probe(
    check=check,
    params={"cache": Param("path", "the folder of extension builds (default ~/.cache/torch_extensions)")},
    experiments=(
        Experiment(
            name="lock",
            control=Arm(
                partial(start, lock_removed=False),
                expect=hung(r"file_baton\.py\", line \d+ in wait\b"),
                because="the lock of the killed build is still there, and its existence is all that counts",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(start, lock_removed=True),
                expect=completed(),
                because="the one file is removed once no process has it open; the next start builds",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1,<2.14"}),  # from 2.14 on it is an flock, see FLOCK_SINCE
            deadline_s=10,
            expected_s=(5.2, 0.3),
        ),
    ),
)

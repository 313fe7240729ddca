"""Something kills the first build of a C++ extension; the next start finds its lock file and waits forever."""

from __future__ import annotations

import errno
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping

from kb.host import mount_of
from kb.packages import release
from kb.probe import (
    Arm,
    Context,
    Expect,
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
    raised,
    unknown,
)

LONGEST_BUILD_S = 3600  # no build takes longer, so an older lock has no owner on another host
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs"}
FLOCK_SINCE = (2, 14)  # from here on torch locks with flock, and a leftover file does not stop it


class Builds:
    """Builds of one extension below TORCH_EXTENSIONS_DIR, without the compiler.

    torch takes the lock before it runs the compiler and releases it afterwards.
    """

    def __init__(self, ctx: Context) -> None:
        try:
            from torch.utils import cpp_extension
        except ImportError as error:
            raise Unavailable("torch cannot build extensions here: %s" % error) from error
        self.extensions = cpp_extension
        self.path = ctx.path
        self.source = Path(ctx.path("fused_adam.cpp"))
        self.source.write_text("int main() { return 0; }\n")
        self.starter = os.getpid()
        self.use("shared")

    def use(self, name: str) -> None:
        """Makes torch build below this folder from now on."""
        os.environ["TORCH_EXTENSIONS_DIR"] = self.path(name)
        self.folder = Path(self.path(name), "fused_adam")

    def load(self) -> str:
        """Builds the extension if its lock is free, and returns the path of the result."""
        import unittest.mock

        with unittest.mock.patch.object(self.extensions, "_write_ninja_file_and_build_library", self.build):
            options = {"is_python_module": False, "is_standalone": True}
            return str(self.extensions.load(name="fused_adam", sources=str(self.source), **options))

    def build(self, **_: object) -> None:
        """Replaces the compiler; in a forked process, it dies while it holds the lock."""
        import signal

        if os.getpid() != self.starter:
            import filelock

            hub = filelock.FileLock(self.path("hub.lock"))  # huggingface_hub and datasets lock in this way
            hub.acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / "fused_adam").touch()

    def kill_one(self, ctx: Context, *, on_host: str = "") -> None:
        """Forks a first start, which is killed while it builds."""
        import signal
        import socket

        import filelock

        killed = os.fork()
        if killed == 0:
            if on_host:
                socket.gethostname = lambda: on_host
            self.load()
            os._exit(1)
        assert os.waitpid(killed, 0)[1] == signal.SIGKILL
        begun = time.monotonic()
        if not on_host:
            with filelock.FileLock(ctx.path("hub.lock"), timeout=1):
                ctx.note(flock_of_the_killed_process_free_after_s=round(time.monotonic() - begun, 3))
        ctx.note(left_behind=sorted(path.name for path in self.folder.iterdir()))


def start(ctx: Context, *, lock_removed: bool = False, own_folder: bool = False) -> None:
    """Starts again after a build was killed."""
    builds = Builds(ctx)
    builds.kill_one(ctx)
    ctx.reached()
    lock = builds.folder / "lock"
    if lock_removed and lock.exists():
        assert not _holders([lock])[lock], "a build is running, so the lock is not stale"
        lock.unlink()
    if own_folder:
        builds.use("own")
    assert Path(builds.load()).exists()


def load_as_before(builds: Builds) -> None:
    """Takes the lock of a build as torch up to 2.13 does."""
    from torch.utils.file_baton import FileBaton

    baton = FileBaton(str(builds.folder / "lock"))
    if baton.try_acquire():
        baton.release()
    else:
        baton.wait()


def start_newer(ctx: Context, *, flock: bool) -> None:
    """Starts again after a build was killed, with the code of torch 2.14 or with the old code."""
    builds = Builds(ctx)
    builds.kill_one(ctx)
    ctx.reached()
    if flock:
        assert Path(builds.load()).exists()
    else:
        load_as_before(builds)


def start_elsewhere(ctx: Context, *, has_flock: bool) -> None:
    """Starts again after a build was killed on another host, on a file system with flock or without."""
    import fcntl

    import filelock

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if not has_flock:
        fcntl.flock = refuse
    builds = Builds(ctx)
    try:
        with filelock.FileLock(ctx.path("other.lock")):
            pass
    except NotImplementedError as error:
        raise Unavailable("filelock before 3.24 has no fallback") from error
    builds.kill_one(ctx, on_host="gpu-03")
    ctx.note(lock_says=(builds.folder / "lock").read_text().split()[:2])
    ctx.reached()
    assert Path(builds.load()).exists()


def share_cache(ctx: Context, *, own_folder: bool) -> None:
    """Builds with torch 2.14 or newer, and then starts an older torch."""
    builds = Builds(ctx)
    builds.load()
    ctx.note(left_behind=sorted(path.name for path in builds.folder.iterdir()))
    ctx.reached()
    if own_folder:
        builds.use("own")
        builds.folder.mkdir(parents=True)
    load_as_before(builds)


def download(ctx: Context, *, has_flock: bool) -> None:
    """Takes the lock of a download that was killed on another host; the lock is an flock or the existence of a file."""
    import signal
    import socket

    import filelock

    kind = filelock.FileLock if has_flock else filelock.SoftFileLock  # huggingface_hub falls back to SoftFileLock
    killed = os.fork()
    if killed == 0:
        socket.gethostname = lambda: "gpu-03"
        lock = kind(ctx.path("model.lock"))
        lock.acquire()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(killed, 0)[1] == signal.SIGKILL
    ctx.reached()
    with kind(ctx.path("model.lock"), timeout=1):
        pass


def check(params: Mapping[str, Any]) -> Finding:
    """Looks for lock files of extension builds that no running process has open."""
    root = params["cache"] or extensions_root()
    elsewhere = "if the job builds in another folder, run --set cache=THAT_FOLDER"
    if not root.is_dir():
        return unknown("there is no folder %s" % root, advice=elsewhere)
    try:
        locks = sorted({*root.glob("*/lock"), *root.glob("*/*/lock")})
    except OSError as error:
        return unknown("kb cannot read %s: %s" % (root, error.strerror), advice=elsewhere)
    hidden = [folder for folder in folders(root) if not os.access(str(folder), os.R_OK | os.X_OK)]
    unread = "kb cannot read %s" % ", ".join(map(str, hidden))
    if hidden and not locks:
        return unknown(unread, advice="run this as its owner")
    if not locks:
        other = "if the job builds in another folder, run kb verify stale-cache-lock --set cache=THAT_FOLDER"
        return clear("there is no lock file below %s; %s" % (root, other))
    holders = _holders(locks)
    message = [_describe(lock, holders[lock]) for lock in locks]
    stale = [lock for lock in locks if not holders[lock]]
    if hidden and not stale:
        return unknown(*message, unread, advice="run this as its owner")
    if not stale:
        return clear(*message, "a running process holds every lock, so a build is in progress")
    installed = release("torch")[:2]
    if installed >= FLOCK_SINCE:
        fails = [reason for lock in stale for reason in [_flock_fails(lock)] if reason]
        if fails:
            advice = "without flock, the file is the lock: remove it when its process has ended"
            return unknown(*message, *fails, advice=advice)
        since = "the installed torch %d.%d locks with flock, so a leftover file does not stop it," % installed
        return clear(*message, since + " but stops an older torch")
    doubt = [doubt for lock in stale for doubt in _doubts(lock)]
    if doubt:
        advice = "look for a running build there before you remove anything"
        return unknown(*message, *sorted(set(doubt)), advice=advice)
    return exposed(
        *message,
        "no process that kb can see has %s open" % ("it" if len(stale) == 1 else "them"),
        advice="when no job builds there, run rm %s" % " ".join(str(lock) for lock in stale),
    )


def extensions_root() -> Path:
    """The folder in which torch.utils.cpp_extension builds, according to the caller's variables."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions"))


def folders(root: Path) -> list[Path]:
    """The folders that may contain a lock: those of builds, of Python and CUDA versions, and of extensions."""
    try:
        return [path for path in (root, *root.glob("*"), *root.glob("*/*")) if path.is_dir()]
    except OSError:
        return [root]


def _describe(lock: Path, pids: list[int]) -> str:
    owner = "held open by process %s" % ", ".join(map(str, pids)) if pids else "no process has it open"
    return "%s: %.1f minutes old, %s" % (lock, _age_s(lock) / 60, owner)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _holders(files: list[Path]) -> dict[Path, list[int]]:
    """The processes that have each file open, as far as this user may read their descriptors."""
    file_of = {os.path.realpath(file): file for file in files}
    result: dict[Path, list[int]] = {file: [] for file in files}
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        try:
            targets = {os.readlink(entry.path) for entry in os.scandir(descriptors)}
        except OSError:
            continue  # the process ended, or belongs to another user
        for target in targets & file_of.keys():
            result[file_of[target]].append(int(descriptors.parent.name))
    return result


def _flock_fails(lock: Path) -> str:
    """Why flock does not work for this file, or ""; it works if the lock is granted, or if another process holds it."""
    import fcntl

    try:
        with open(lock, "rb") as file:
            owner = file.read(200).decode(errors="replace").split()[:2]
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return ""
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            return "kb cannot examine %s: %s" % (lock, error.strerror)
        left = ", and process %s of %s left the file" % (owner[0], owner[1]) if len(owner) == 2 else ""
        return "%s: the file system has no flock%s" % (lock, left)
    return ""


def _doubts(lock: Path) -> list[str]:
    """The reasons why a lock without a visible owner may still have one."""
    doubts = []
    try:
        if os.geteuid() not in (0, lock.stat().st_uid):
            doubts.append("the lock belongs to another user, whose processes kb cannot examine")
    except OSError:
        doubts.append("the lock has just been removed")
    kind = mount_of(str(lock)).kind or "an unknown file system"
    if kind not in LOCAL and _age_s(lock) < LONGEST_BUILD_S:
        doubts.append("the lock is on %s, so its owner may be on another host" % kind)
    elif _in_container() and _age_s(lock) < LONGEST_BUILD_S:
        doubts.append("kb cannot see processes outside this container")
    return doubts


def _in_container() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC  # the host's namespace, in every kernel
    except OSError:
        return True


WAITS = hung(r"file_baton\.py\", line \d+ in wait\b")
LEFT = "the killed build left its lock file, and the next start waits as long as the file exists"
OLDER = "torch before 2.14; the probe uses its lock class, which newer releases still have"
UNTIL = Needs(packages={"torch": ">=2.1,<2.14"})  # newer releases use flock, see FLOCK_SINCE
SINCE = Needs(packages={"torch": ">=2.14"})


def experiment(
    name: str,
    control: Callable[[Context], None],
    treatment: Callable[[Context], None],
    because: str,
    fix: str,
    needs: Needs,
    expect: Expect = WAITS,
    stands_for: str = "",
) -> Experiment:
    fidelity = "stand-in" if stands_for else "cpu"
    return Experiment(
        name=name,
        control=Arm(control, expect=expect, because=because, fidelity=fidelity, stands_for=stands_for),
        treatment=Arm(treatment, expect=completed(), because=fix, fidelity=fidelity, stands_for=stands_for),
        world_size=1,
        needs=needs,
        deadline_s=8,
        expected_s=(1.1 if expect.kind == "raised" else 5.2, 0.3),
    )


probe = Probe(
    check=check,
    params={"cache": Param("path", "folder of the extension builds; default: ~/.cache/torch_extensions")},
    experiments=(
        experiment(
            "lock",
            start,
            partial(start, lock_removed=True),
            LEFT,
            "no process has the lock file open, so it is removed, and the next start builds",
            UNTIL,
        ),
    ),
    variants=(
        experiment(
            "own-folder",
            start,
            partial(start, own_folder=True),
            LEFT,
            "TORCH_EXTENSIONS_DIR gives the next start its own folder",
            UNTIL,
        ),
        experiment(
            "torch-2.14",
            partial(start_newer, flock=False),
            partial(start_newer, flock=True),
            LEFT,
            "torch 2.14 locks with flock, which ended with the killed process",
            SINCE,
            stands_for=OLDER,
        ),
        experiment(
            "no-flock",
            partial(start_elsewhere, has_flock=False),
            partial(start_elsewhere, has_flock=True),
            "flock fails with ENOSYS, so the lock is a file, and it names a process of another host",
            "the file system has flock, which ended with the killed process",
            SINCE,
            hung(r"_poll_until_acquired\b[\s\S]*torch/utils/_filelock\.py"),
        ),
        experiment(
            "shared-cache",
            partial(share_cache, own_folder=False),
            partial(share_cache, own_folder=True),
            "torch 2.14 or newer left its file after a good build, and an older torch takes it for a lock",
            "TORCH_EXTENSIONS_DIR gives the older torch its own folder",
            SINCE,
            stands_for=OLDER,
        ),
        experiment(
            "soft-lock",
            partial(download, has_flock=False),
            partial(download, has_flock=True),
            "the lock is the existence of a file, and a killed process on another host left the file",
            "the lock is an flock, which huggingface_hub uses if the file system has it",
            Needs(),  # torch requires filelock
            raised(r"[Tt]he file lock .\S+. could not be acquired"),
        ),
    ),
)

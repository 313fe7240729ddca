"""The first build of a C++ extension is killed halfway; the next start finds its lock file and waits forever."""

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

LONGEST_BUILD_S = 3600  # older than any build: then an owner on another host is not the explanation
LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs"}
FLOCK_SINCE = (2, 14)  # torch locks with flock from here on; a left-over file means nothing to it


class Builds:
    """Builds of one extension, below the folder that TORCH_EXTENSIONS_DIR names. The compiler is left out.

    The lock is taken before the compiler runs and released after it.
    """

    def __init__(self, ctx: Context) -> None:
        try:
            from torch.utils import cpp_extension
        except ImportError as error:
            raise Unavailable("extensions cannot be built here: %s" % error) from error
        self.extensions = cpp_extension
        self.path = ctx.path
        self.source = Path(ctx.path("fused_adam.cpp"))
        self.source.write_text("int main() { return 0; }\n")
        self.starter = os.getpid()
        self.use("shared")

    def use(self, name: str) -> None:
        os.environ["TORCH_EXTENSIONS_DIR"] = self.path(name)
        self.folder = Path(self.path(name), "fused_adam")

    def load(self) -> str:
        import unittest.mock

        with unittest.mock.patch.object(self.extensions, "_write_ninja_file_and_build_library", self.build):
            options = {"is_python_module": False, "is_standalone": True}
            return str(self.extensions.load(name="fused_adam", sources=str(self.source), **options))

    def build(self, **_: object) -> None:
        import signal

        if os.getpid() != self.starter:
            import filelock

            hub = filelock.FileLock(self.path("hub.lock"))  # as huggingface_hub and datasets lock
            hub.acquire()
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / "fused_adam").touch()

    def kill_one(self, ctx: Context, *, on_host: str = "") -> None:
        """A first start, which is killed while it builds."""
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
    builds = Builds(ctx)
    builds.kill_one(ctx)
    ctx.reached()
    lock = builds.folder / "lock"
    if lock_removed and lock.exists():
        assert not _holders([lock])[lock], "somebody builds: the lock is not stale"
        lock.unlink()
    if own_folder:
        builds.use("own")
    assert Path(builds.load()).exists()


def load_as_before(builds: Builds) -> None:
    """How torch up to 2.13 takes the lock of a build."""
    from torch.utils.file_baton import FileBaton

    baton = FileBaton(str(builds.folder / "lock"))
    if baton.try_acquire():
        baton.release()
    else:
        baton.wait()


def start_newer(ctx: Context, *, flock: bool) -> None:
    """The left-over of a killed build, met by the old code and by that of torch 2.14."""
    builds = Builds(ctx)
    builds.kill_one(ctx)
    ctx.reached()
    if flock:
        assert Path(builds.load()).exists()
    else:
        load_as_before(builds)


def start_elsewhere(ctx: Context, *, has_flock: bool) -> None:
    """A build is killed on another host that shares the folder, on a file system with flock or without."""
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
        raise Unavailable("filelock before 3.24 has no fall-back") from error
    builds.kill_one(ctx, on_host="gpu-03")
    ctx.note(lock_says=(builds.folder / "lock").read_text().split()[:2])
    ctx.reached()
    assert Path(builds.load()).exists()


def share_cache(ctx: Context, *, own_folder: bool) -> None:
    """Torch 2.14 or newer builds well; an older one comes after it."""
    builds = Builds(ctx)
    builds.load()
    ctx.note(left_behind=sorted(path.name for path in builds.folder.iterdir()))
    ctx.reached()
    if own_folder:
        builds.use("own")
        builds.folder.mkdir(parents=True)
    load_as_before(builds)


def download(ctx: Context, *, has_flock: bool) -> None:
    """A download on another host is killed; the next one asks for the same lock, of the one kind or the other."""
    import signal
    import socket

    import filelock

    kind = filelock.FileLock if has_flock else filelock.SoftFileLock  # what huggingface_hub falls back to
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
    """Lock files of extension builds that no living process holds open."""
    root = params["cache"] or extensions_root()
    elsewhere = "if the job builds elsewhere: --set cache=THAT_FOLDER"
    if not root.is_dir():
        return unknown("there is no folder %s" % root, advice=elsewhere)
    try:
        locks = sorted({*root.glob("*/lock"), *root.glob("*/*/lock")})
    except OSError as error:
        return unknown("%s cannot be read: %s" % (root, error.strerror), advice=elsewhere)
    hidden = [folder for folder in folders(root) if not os.access(str(folder), os.R_OK | os.X_OK)]
    if hidden and not locks:
        return unknown("%s cannot be read" % ", ".join(map(str, hidden)), advice="run this as its owner")
    if not locks:
        return clear("no lock file below %s; %s" % (root, elsewhere))
    holders = _holders(locks)
    message = [_describe(lock, holders[lock]) for lock in locks]
    stale = [lock for lock in locks if not holders[lock]]
    if not stale:
        return clear(*message, "every lock has a living owner: a build is under way")
    installed = release("torch")[:2]
    if installed >= FLOCK_SINCE:
        fails = [reason for lock in stale for reason in [_flock_fails(lock)] if reason]
        if fails:
            return unknown(
                *message, *fails, advice="without flock the file is the lock: remove it when its process is gone"
            )
        since = "torch %d.%d, as installed here, locks with flock: a left-over file does not stop it," % installed
        return clear(*message, since + " but it stops an older torch")
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


def folders(root: Path) -> list[Path]:
    """Where locks may be: the folder of builds, those of Python and CUDA below it, and those of extensions."""
    try:
        return [path for path in (root, *root.glob("*"), *root.glob("*/*")) if path.is_dir()]
    except OSError:
        return [root]


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


def _flock_fails(lock: Path) -> str:
    """Ask for the lock, shared and without waiting; one that somebody holds is one that works."""
    import fcntl

    try:
        with open(lock, "rb") as file:
            said = file.read(200).decode(errors="replace").split()[:2]
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return ""
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            return "%s cannot be examined: %s" % (lock, error.strerror)
        owner = ", left by process %s of %s" % (said[0], said[1]) if len(said) == 2 else ""
        return "%s: the file system has no flock%s" % (lock, owner)
    return ""


def _doubts(lock: Path) -> list[str]:
    """Why a lock without a visible owner may still have one."""
    doubts = []
    try:
        if os.geteuid() not in (0, lock.stat().st_uid):
            doubts.append("it belongs to another user, whose processes cannot be examined")
    except OSError:
        doubts.append("it has just gone")
    kind = mount_of(str(lock)).kind or "an unknown file system"
    if kind not in LOCAL and _age_s(lock) < LONGEST_BUILD_S:
        doubts.append("it lies on %s, where the owner may be on another host" % kind)
    elif _in_container() and _age_s(lock) < LONGEST_BUILD_S:
        doubts.append("processes outside this container cannot be seen")
    return doubts


def _in_container() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC  # of the host, the same in every kernel
    except OSError:
        return True


WAITS = hung(r"file_baton\.py\", line \d+ in wait\b")
LEFT = "the lock of the killed build is still there, and its existence is all that counts"
OLDER = "torch before 2.14, whose class for the lock this torch still has"
UNTIL = Needs(packages={"torch": ">=2.1,<2.14"})  # from 2.14 on it is an flock, see FLOCK_SINCE
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
    params={"cache": Param("path", "the folder of extension builds (default ~/.cache/torch_extensions)")},
    experiments=(
        experiment(
            "lock",
            start,
            partial(start, lock_removed=True),
            LEFT,
            "the one file is removed once no process has it open; the next start builds",
            UNTIL,
        ),
    ),
    variants=(
        experiment(
            "own-folder",
            start,
            partial(start, own_folder=True),
            LEFT,
            "the next start has a folder of its own, by TORCH_EXTENSIONS_DIR",
            UNTIL,
        ),
        experiment(
            "torch-2.14",
            partial(start_newer, flock=False),
            partial(start_newer, flock=True),
            LEFT,
            "the lock is an flock, which ended with the process that held it",
            SINCE,
            stands_for=OLDER,
        ),
        experiment(
            "no-flock",
            partial(start_elsewhere, has_flock=False),
            partial(start_elsewhere, has_flock=True),
            "flock fails with ENOSYS; the lock is a file that names a process of another host",
            "the file system has flock, which ended with its process",
            SINCE,
            hung(r"_poll_until_acquired\b[\s\S]*torch/utils/_filelock\.py"),
        ),
        experiment(
            "shared-cache",
            partial(share_cache, own_folder=False),
            partial(share_cache, own_folder=True),
            "torch 2.14 or newer has built and left its file; an older torch takes it for a lock",
            "the older torch has a folder of its own, by TORCH_EXTENSIONS_DIR",
            SINCE,
            stands_for=OLDER,
        ),
        experiment(
            "soft-lock",
            partial(download, has_flock=False),
            partial(download, has_flock=True),
            "a lock whose file is all that counts, left by a process of another host",
            "the lock is an flock, as huggingface_hub takes it on a disk that has it",
            Needs(),  # torch requires filelock
            raised(r"[Tt]he file lock .\S+. could not be acquired"),
        ),
    ),
)

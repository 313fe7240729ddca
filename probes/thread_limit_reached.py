"""Every pool of threads counts against one limit of the user or of the container; the thread beyond it is refused.

The limit is the kernel's. It does not bind root, so root becomes another user first.
"""

import ctypes
import multiprocessing
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from kb.host import file_text
from kb.namespaces import own_user
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    Unavailable,
    completed,
    exposed,
    symptom,
    unknown,
)

END_WITH_PARENT, KEEP_CAPABILITIES, AMBIENT = 1, 8, 47  # of prctl(2)
READ_ANY_FILE = 1  # CAP_DAC_OVERRIDE: the interpreter may be in a folder of root
SWITCHES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")


def run(ctx: Context, act: Callable[[], Any], room: int) -> None:
    """`act` in a child process, whose user may have `room` more threads. `Symptom` says with what it ended."""
    words, refusal = Path(ctx.path("words")), Path(ctx.path("refusal"))
    words.touch()
    ctx.reached()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.dup2(os.open(words, os.O_WRONLY | os.O_APPEND), 2)
            become_bound_user()
            leave(room)
            act()
            code = 0
        except Unavailable as error:
            refusal.write_text(str(error))
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if refusal.exists():
        raise Unavailable(refusal.read_text())
    if code:
        raise Symptom(f"exit code {code} after: {words.read_text(errors='replace')[-3000:].strip()}")


def become_bound_user() -> None:
    """Root becomes a user without account, who may still read what root may. Of another user, only what is started
    here counts, where the machine lets users create namespaces."""
    libc = ctypes.CDLL(None)
    if os.getuid():
        with suppress(Unavailable):
            own_user()
    else:
        libc.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0)
        user = 61_184 + os.getpid() % 4096  # of no account and of no other arm, so that no thread but ours counts
        with suppress(OSError):  # root of a user namespace is an ordinary user outside it
            os.setresuid(user, user, user)
            libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[1 << READ_ANY_FILE] * 3))
            libc.prctl(AMBIENT, 2, READ_ANY_FILE, 0, 0)
    libc.prctl(END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)


def leave(room: int) -> None:
    """Set the limit so. What is used is the largest limit under which no further thread starts."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
    for limit in range(1, most - 100):
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, hard))
        with suppress(RuntimeError):
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()
            break
    else:
        raise Unavailable(f"the hard limit, {most} threads, is too small to try a smaller one")
    if limit == 1:
        raise Unavailable("RLIMIT_NPROC does not bind a process on this machine")
    while own_threads() > 1:  # a thread counts until the kernel has removed it
        time.sleep(0.001)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit - 1 + room, hard))


def compute(ctx: Context, *, threads: int) -> None:
    """Two ranks of one user with a pool of OpenMP threads each, 8 as on a machine with so many cores."""
    import torch

    torch.set_num_threads(1)  # where torch makes a pool of its default size first, it does so here

    def compare(number: int) -> None:
        torch.set_num_threads(number)
        ones = torch.ones(1 << 20)
        assert torch.equal(ones, ones)

    def ranks() -> None:
        first, second = socket.socketpair()
        pid = os.fork()
        if not pid:
            first.close()
            compare(threads)
            second.send(b"ready")
            second.recv(1)  # until the other rank ends
            os._exit(0)
        second.close()
        assert first.recv(5) == b"ready", "one rank alone"
        compare(threads)
        first.close()
        os.waitpid(pid, 0)

    pid = os.fork()
    if not pid:
        try:
            compare(8)
        finally:
            os._exit(own_threads())
    one = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # it differs between releases of torch
    run(ctx, ranks, room=2 * one - 4)


def own_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def inside(ctx: Context, *, code: str) -> None:
    run(ctx, partial(exec, code, {}), room=12)


def script(ctx: Context, *, code: str, shell: str = ":", room: int = 12, **env: str) -> None:
    """A new interpreter, so that what is imported reads these variables; `shell` is what the job script does before."""
    if "numpy" in code:
        check_openblas()
    kept = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    argv = ["bash", "-c", shell + '; exec "$@"', "bash", sys.executable, "-c", code]
    run(ctx, partial(os.execvpe, "bash", argv, {**kept, **env}), room)


START_40 = """
import threading
from concurrent.futures import ThreadPoolExecutor
threading.stack_size(8 << 20)  # the usual `ulimit -s`
kept, one = [], ThreadPoolExecutor(1)
for step in range(40):
    kept.append(ThreadPoolExecutor(1))
    assert kept[-1].submit(abs, -step).result() == step
"""
START_1 = START_40.replace("append(ThreadPoolExecutor(1))", "append(one)")
MULTIPLY = "import numpy, os; assert (numpy.ones((300, 300)) @ numpy.ones(300)).sum() == 90000"
TOKENIZE = """
from tokenizers import Tokenizer, models
tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
assert len(tokenizer.encode_batch(["a"] * 100)) == 100
"""


def check_openblas() -> None:
    """The OpenBLAS in the wheel of numpy starts a thread for each core but one when numpy is imported."""
    spec = find_spec("numpy")
    if not (spec and spec.origin and list(Path(spec.origin).parent.parent.glob("numpy.libs/*openblas*"))):
        raise Unavailable("this numpy brings no OpenBLAS of its own")
    if len(os.sched_getaffinity(0)) < 2:
        raise Unavailable("one core: OpenBLAS starts no thread")


def load(ctx: Context, *, workers: int) -> None:
    """A worker is a process with threads, and a thread in the rank sends to it."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    rows: Any = range(16)

    def read() -> None:
        try:
            assert list(DataLoader(rows, None, num_workers=workers, multiprocessing_context="fork")) == list(rows)
        finally:
            for worker in multiprocessing.active_children():
                worker.kill()

    run(ctx, read, room=6)


def group(ctx: Context, *, most: int) -> None:
    """The pids controller of a container, with `ulimit -u` as high as it goes."""
    folder = cgroups()[-1] / f"kb-{os.getpid()}"

    def threads() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
        try:
            folder.mkdir()
            (folder / "pids.max").write_text(str(most))
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise Unavailable(f"no cgroup of our own: {error}") from error
        exec(START_40, {})

    try:
        run(ctx, threads, room=0)
    finally:
        with suppress(OSError):
            folder.rmdir()


# --- the check: every limit that counts here, and what is used of it ------------------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """How many more threads may a job have that is started from here?"""
    evidence: List[str] = []
    free, name = min([*user_limit(evidence), *group_limits(evidence), *kernel_limits(evidence)], default=(None, ""))
    if free is None:
        return unknown(*evidence, "no limit on threads can be read here", advice="look on the host")
    evidence.append(f"{free} more threads are left by {name}, if this is the place of the ranks and no limit is hidden")
    ranks, workers, threads = (params[name] for name in ("ranks", "workers", "threads"))
    need = 1
    if ranks > 0 and workers >= 0 and threads >= 0:
        given = os.environ.get("OMP_NUM_THREADS", "")
        threads = threads or (int(given) if re.fullmatch(r"[1-9]\d{0,6}", given) else 1)
        need = ranks * (threads + 3 * workers)
        evidence.append(f"{ranks} ranks x (a pool of {threads} + {workers} workers x 3) = {need} threads at the least")
    if need > free or any("has refused" in line for line in evidence):
        return exposed(*evidence, advice="smaller pools (OMP_NUM_THREADS), fewer workers, or a higher limit")
    advice = "--set ranks=8 --set workers=8 --set threads=16, the numbers of your job, lets the check compare"
    return unknown(*evidence, advice=advice)


def user_limit(evidence: List[str]) -> List[Tuple[int, str]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    says = ["unlimited" if value == resource.RLIM_INFINITY else str(value) for value in (soft, hard)]
    evidence.append(f"processes and threads of this user (ulimit -u): {says[0]}, hard limit {says[1]}")
    if soft == resource.RLIM_INFINITY:
        return []
    if privileged():
        evidence.append("which does not bind this process, because it is privileged; it binds ordinary users")
        return []
    rows = (file_text(path) for path in Path("/proc").glob("[0-9]*/status"))
    mine = [row for row in rows if re.search(rf"^Uid:\s+{os.getuid()}\s", row, re.M)]
    used = sum(int(number) for row in mine for number in re.findall(r"^Threads:\s+(\d+)", row, re.M))
    evidence.append(f"it has {used} that can be seen from here; those in other containers count too")
    return [(soft - used, "ulimit -u")]


def privileged() -> bool:
    """CAP_SYS_RESOURCE or CAP_SYS_ADMIN in the first user namespace, or its root."""
    mask = re.search(r"^CapEff:\s+([0-9a-f]+)", file_text("/proc/self/status"), re.M)
    first = file_text("/proc/self/uid_map").split() == ["0", "0", "4294967295"]
    return first and (os.getuid() == 0 or bool(mask and int(mask.group(1), 16) & (1 << 24 | 1 << 21)))


def cgroups() -> List[Path]:
    """The group of this process that counts threads, and those around it, innermost first."""
    rows = re.findall(r"^\d+:([^:]*):(/.*)$", file_text("/proc/self/cgroup"), re.M)
    paths = {name: path for name, path in rows if name in ("", "pids")}
    root = Path("/sys/fs/cgroup/pids" if "pids" in paths else "/sys/fs/cgroup")
    inner = root / paths.get("pids", paths.get("", "/")).lstrip("/")
    if ".." in inner.parts or not inner.is_dir():
        return [root]  # in a container, where the path is the host's
    return [inner, *(parent for parent in inner.parents if parent.is_relative_to(root))]


def group_limits(evidence: List[str]) -> List[Tuple[int, str]]:
    limits = []
    for depth, folder in enumerate(cgroups()):
        most, now = number(folder / "pids.max"), number(folder / "pids.current")
        if most is not None and now is not None:
            evidence.append(f"cgroup {folder}: {now} of {most} threads (pids.current, pids.max)")
            limits.append((most - now, f"{folder}/pids.max"))
        refused = re.search(r"^max ([1-9]\d*)", file_text(folder / "pids.events"), re.M)
        if refused:
            words = "refused some, perhaps to other jobs" if depth else "has refused"
            evidence.append(f"cgroup {folder} {words}, since it was made: {refused.group(1)} (pids.events)")
    return limits


def kernel_limits(evidence: List[str]) -> List[Tuple[int, str]]:
    total = re.search(r"/(\d+) ", file_text("/proc/loadavg"))
    found = [(number(Path("/proc/sys/kernel", name)), f"kernel.{name}") for name in ("threads-max", "pid_max")]
    most, name = min(((most, name) for most, name in found if most), default=(0, ""))
    if not (total and most):
        return []
    evidence.append(f"the whole machine: {total.group(1)} of {most} threads ({name})")
    return [(most - int(total.group(1)), name)]


def number(path: Path) -> Optional[int]:
    return next(map(int, re.findall(r"\A\d{1,18}$", file_text(path))), None)


NO_BLAS = symptom(r"blas_thread_init: pthread_create failed for thread \d+ of \d+: ")
NO_THREAD = symptom(r"RuntimeError: can't start new thread")
NO_OPENMP = symptom(r"libgomp: Thread creation failed: |OMP: Error #34")
NO_POOL = symptom(r"ThreadPoolBuildError \{ kind: IOError\(Os \{ code: 11")
Parts = Tuple[Dict[str, Any], str]


def pair(name: str, job: Callable[..., None], package: str, expect: Any, fails: Parts, works: Parts) -> Experiment:
    """Each arm: what differs in the call of the job, and what it does."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **fails[0]), expect=expect, because=fails[1], fidelity="cpu"),
        treatment=Arm(partial(job, **works[0]), expect=completed(), because=works[1], fidelity="cpu"),
        world_size=1,
        needs=Needs(packages={package: ">=2.1" if package == "torch" else ""} if package else {}, programs=("bash",)),
        expected_s=(0.3, 0.3),
    )


probe = Probe(
    check=check,
    params={
        "ranks": Param("int", "ranks on this machine, for the check", 0),
        "workers": Param("int", "DataLoader workers of each rank, for the check", 0),
        "threads": Param("int", "threads of a pool, for the check; 0: OMP_NUM_THREADS, else 1", 0),
    },
    experiments=(
        pair(
            *("pools", compute, "torch", NO_OPENMP),
            ({"threads": 8}, "two ranks with a pool of 8 threads each, and room for 4 fewer"),
            ({"threads": 2}, "the same with pools of 2 threads"),
        ),
    ),
    variants=(
        pair(
            *("openblas", partial(script, code=MULTIPLY, room=0), "numpy", NO_BLAS),
            ({"MKL_NUM_THREADS": "1"}, "a thread for each core, and room for none; MKL_NUM_THREADS=1 is not read"),
            ({"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS=1: no thread is started"),
        ),
        pair(
            *("workers", load, "torch", symptom(r"BlockingIOError: \[Errno 11\]")),
            ({"workers": 8}, "8 workers"),
            ({"workers": 1}, "1 worker"),
        ),
        pair(
            *("soft-limit", partial(script, code=START_40), "", NO_THREAD),
            ({"shell": ":"}, "40 threads, and room for 12 under the soft limit"),
            ({"shell": 'ulimit -Su "$(ulimit -Hu)"'}, "the script raises the soft limit to the hard one"),
        ),
        pair(
            *("executors", inside, "", NO_THREAD),
            ({"code": START_40}, "each step makes an executor that something keeps"),
            ({"code": START_1}, "one executor for all steps"),
        ),
        pair(
            *("tokenizers", partial(script, code=TOKENIZE, room=6, RAYON_NUM_THREADS="16"), "tokenizers", NO_POOL),
            ({"OMP_NUM_THREADS": "1"}, "a pool as on 16 cores, and room for 6; OMP_NUM_THREADS=1 is not read"),
            ({"RAYON_NUM_THREADS": "4"}, "RAYON_NUM_THREADS=4"),
        ),
        pair(
            *("address-space", partial(script, code=START_40, room=100), "", NO_THREAD),
            ({"shell": "ulimit -Sv 300000"}, "room for all, and address space for fewer than 40 stacks of 8 MiB"),
            ({"shell": 'ulimit -Sv 300000; ulimit -Sv "$(ulimit -Hv)"'}, "the script raises the soft limit"),
        ),
        pair(
            *("pids", group, "", NO_THREAD),
            ({"most": 12}, "pids.max is 12, and the soft limit of the user is raised to the hard one"),
            ({"most": 100}, "pids.max is 100"),
        ),
    ),
)

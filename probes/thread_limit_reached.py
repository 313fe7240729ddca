"""Every thread pool counts against one limit of the user or container; the kernel refuses the thread beyond it.

The limit does not bind root, so root becomes another user first.
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
from dataclasses import replace
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

END_WITH_PARENT, KEEP_CAPABILITIES, AMBIENT = 1, 8, 47  # options of prctl(2)
READ_ANY_FILE = 1  # CAP_DAC_OVERRIDE, because the interpreter may be in a folder of root
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "GOTO_NUM_THREADS",
    "MKL_NUM_THREADS",
    "MKL_DYNAMIC",
    "RAYON_NUM_THREADS",
)


def run(ctx: Context, job: Callable[[], Any], room: int) -> None:
    """Runs `job` in a child process whose user may start `room` more threads; raises `Symptom` with its stderr."""
    stderr, unavailable = Path(ctx.path("stderr")), Path(ctx.path("unavailable"))
    stderr.touch()
    ctx.reached()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND), 2)
            become_bound_user()
            limit_threads(room)
            job()
            code = 0
        except Unavailable as error:
            unavailable.write_text(str(error))
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if unavailable.exists():
        raise Unavailable(unavailable.read_text())
    if code:
        raise Symptom(f"exit code {code} after: {stderr.read_text(errors='replace')[-3000:].strip()}")


def become_bound_user() -> None:
    """Root becomes a user without an account, who can still read every file. Another user enters a user namespace, if
    the machine allows that, so that only the threads of this arm count."""
    libc = ctypes.CDLL(None)
    if os.getuid():
        with suppress(Unavailable):
            own_user()
    else:
        libc.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0)
        user = (
            61_184 + os.getpid() % 4096
        )  # neither an account nor another arm has this id, so that only our threads count
        with suppress(OSError):  # root of a user namespace is an ordinary user outside it
            os.setresuid(user, user, user)
            libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[1 << READ_ANY_FILE] * 3))
            libc.prctl(AMBIENT, 2, READ_ANY_FILE, 0, 0)
    libc.prctl(END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)


def limit_threads(room: int) -> None:
    """Sets the limit so that `room` more threads can start. The smallest limit that allows one shows how many run."""
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
        raise Unavailable(f"no limit below the hard limit of {most} threads allows another thread")
    if limit == 1:
        raise Unavailable("the kernel does not enforce RLIMIT_NPROC on this machine")
    while own_threads() > 1:  # a thread counts until the kernel has removed it
        time.sleep(0.001)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit - 1 + room, hard))


def compute(ctx: Context, *, threads: int) -> None:
    """Two ranks of one user, each with a pool of OpenMP threads; 8 threads, as on a machine with 8 cores."""
    import torch

    torch.set_num_threads(1)  # a torch that first makes a pool of its default size does so here

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
            second.recv(1)  # until the other rank closes the socket
            os._exit(0)
        second.close()
        assert first.recv(5) == b"ready", "the first rank did not start its pool"
        compare(threads)
        first.close()
        os.waitpid(pid, 0)

    pid = os.fork()
    if not pid:
        try:
            compare(8)
        finally:
            os._exit(own_threads())
    threads_of_8 = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])  # the number differs between releases of torch
    run(ctx, ranks, room=2 * threads_of_8 - 4)


def own_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def inside(ctx: Context, *, code: str) -> None:
    run(ctx, partial(exec, code, {}), room=12)


def script(ctx: Context, *, code: str, shell: str = ":", room: int = 12, **env: str) -> None:
    """Starts a new interpreter, so that imports read `env`; `shell` is what the job script runs before."""
    if "numpy" in code:
        check_openblas()
    if "torch" in code:
        check_mkl()
    inherited = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    argv = ["bash", "-c", shell + '; exec "$@"', "bash", sys.executable, "-c", code]
    run(ctx, partial(os.execvpe, "bash", argv, {**inherited, **env}), room)


START_40 = """
import threading
from concurrent.futures import ThreadPoolExecutor
threading.stack_size(8 << 20)  # the usual `ulimit -s`
kept, one = [], ThreadPoolExecutor(1)
for step in range(40):
    kept.append(ThreadPoolExecutor(1))
    assert kept[-1].submit(abs, -step).result() == step
"""
CHILDREN_40 = """
import os
for step in range(40):
    if not (pid := os.fork()):
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and still counts
"""
REAPED_40 = CHILDREN_40.replace(" | os.WNOWAIT)", ")")
COMPARE = "import torch; assert torch.equal(torch.ones(1 << 20), torch.ones(1 << 20))"
START_1 = START_40.replace("append(ThreadPoolExecutor(1))", "append(one)")
MULTIPLY = "import numpy, os; assert (numpy.ones((300, 300)) @ numpy.ones(300)).sum() == 90000"
TOKENIZE = """
from tokenizers import Tokenizer, models
tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
assert len(tokenizer.encode_batch(["a"] * 100)) == 100
"""


def check_openblas() -> None:
    """When numpy is imported, the OpenBLAS in its wheel starts one thread fewer than there are cores."""
    spec = find_spec("numpy")
    if not (spec and spec.origin and list(Path(spec.origin).parent.parent.glob("numpy.libs/*openblas*"))):
        raise Unavailable("this numpy contains no OpenBLAS")
    if len(os.sched_getaffinity(0)) < 2:
        raise Unavailable("OpenBLAS starts no thread on a single core")


def check_mkl() -> None:
    import torch

    if not torch.backends.mkl.is_available():
        raise Unavailable("this torch is built without MKL")


def load(ctx: Context, *, workers: int) -> None:
    """Each DataLoader worker is a process with threads, and needs a sender thread in the rank."""
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
    """The pids controller of a cgroup limits the threads, with `ulimit -u` raised to the hard limit."""
    folder = cgroups()[-1] / f"kb-{os.getpid()}"

    def threads() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
        try:
            folder.mkdir()
            (folder / "pids.max").write_text(str(most))
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise Unavailable(f"kb cannot create a cgroup: {error}") from error
        exec(START_40, {})

    try:
        run(ctx, threads, room=0)
    finally:
        with suppress(OSError):
            folder.rmdir()


# --- the check: every limit that applies here, and how much of it is used ------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """How many more threads can a job that starts here have?"""
    evidence: List[str] = []
    free, name = min([*user_limit(evidence), *group_limits(evidence), *kernel_limits(evidence)], default=(None, ""))
    if free is None:
        return unknown(*evidence, "kb cannot read any limit on threads here", advice="run this on the host")
    evidence.append(f"{name} leaves {free} threads, if the ranks run here and kb sees every limit")
    ranks, workers, threads = (params[name] for name in ("ranks", "workers", "threads"))
    need = 1
    if ranks > 0 and workers >= 0 and threads >= 0:
        given = os.environ.get("OMP_NUM_THREADS", "")
        threads = threads or (int(given) if re.fullmatch(r"[1-9]\d{0,6}", given) else 1)
        need = ranks * (threads + 3 * workers)
        evidence.append(f"{ranks} ranks x (a pool of {threads} + {workers} workers x 3) = at least {need} threads")
    if need > free or any("has refused" in line for line in evidence):
        return exposed(*evidence, advice="use smaller pools (OMP_NUM_THREADS) or fewer workers, or raise the limit")
    advice = "give the numbers of your job to compare: --set ranks=8 --set workers=8 --set threads=16"
    return unknown(*evidence, advice=advice)


def user_limit(evidence: List[str]) -> List[Tuple[int, str]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    texts = ["unlimited" if value == resource.RLIM_INFINITY else str(value) for value in (soft, hard)]
    evidence.append(f"processes and threads of this user (ulimit -u): {texts[0]}, hard limit {texts[1]}")
    if soft == resource.RLIM_INFINITY:
        return []
    if privileged():
        evidence.append("that limit does not bind this process, which is privileged, but it binds ordinary users")
        return []
    rows = (file_text(path) for path in Path("/proc").glob("[0-9]*/status"))
    mine = [row for row in rows if re.search(rf"^Uid:\s+{os.getuid()}\s", row, re.M)]
    used = sum(int(number) for row in mine for number in re.findall(r"^Threads:\s+(\d+)", row, re.M))
    evidence.append(f"kb sees {used} threads of this user from here; threads in other containers count too")
    return [(soft - used, "ulimit -u")]


def privileged() -> bool:
    """Whether this process has CAP_SYS_RESOURCE or CAP_SYS_ADMIN in the initial user namespace, or is its root."""
    mask = re.search(r"^CapEff:\s+([0-9a-f]+)", file_text("/proc/self/status"), re.M)
    initial = file_text("/proc/self/uid_map").split() == ["0", "0", "4294967295"]
    return initial and (os.getuid() == 0 or bool(mask and int(mask.group(1), 16) & (1 << 24 | 1 << 21)))


def cgroups() -> List[Path]:
    """The cgroup of this process that counts threads, then its parents."""
    rows = re.findall(r"^\d+:([^:]*):(/.*)$", file_text("/proc/self/cgroup"), re.M)
    paths = {name: path for name, path in rows if name in ("", "pids")}
    root = Path("/sys/fs/cgroup/pids" if "pids" in paths else "/sys/fs/cgroup")
    inner = root / paths.get("pids", paths.get("", "/")).lstrip("/")
    if ".." in inner.parts or not inner.is_dir():
        return [root]  # in a container, the path is one of the host
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
            words = "refused a thread, perhaps of another job," if depth else "has refused a thread"
            evidence.append(f"cgroup {folder} {words} {refused.group(1)} times since it was created (pids.events)")
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
    """`fails` and `works` are the arguments that differ between the arms, and the `because` of the arm."""
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
        "ranks": Param("int", "number of ranks on this machine, for the check", 0),
        "workers": Param("int", "number of DataLoader workers per rank, for the check", 0),
        "threads": Param(
            "int", "threads of each pool, for the check; 0 means OMP_NUM_THREADS, or 1 if that is not set", 0
        ),
    },
    experiments=(
        pair(
            *("pools", compute, "torch", NO_OPENMP),
            ({"threads": 8}, "two ranks start pools of 8 threads each, and the limit leaves room for 4 threads fewer"),
            ({"threads": 2}, "the ranks start pools of 2 threads each, which fit under the limit"),
        ),
    ),
    variants=(
        pair(
            *("openblas", partial(script, code=MULTIPLY, room=0), "numpy", NO_BLAS),
            (
                {"MKL_NUM_THREADS": "1"},
                "OpenBLAS starts a thread per core, with room for none, and does not read MKL_NUM_THREADS=1",
            ),
            ({"OMP_NUM_THREADS": "1"}, "OpenBLAS reads OMP_NUM_THREADS=1 and starts no thread"),
        ),
        replace(
            pair(
                *("mkl", partial(script, code=COMPARE, room=0, OMP_NUM_THREADS="1"), "torch", NO_OPENMP),
                (
                    {"MKL_NUM_THREADS": "8", "MKL_DYNAMIC": "FALSE"},
                    "torch's pool has the 8 threads of MKL_NUM_THREADS, although OMP_NUM_THREADS is 1; room for none",
                ),
                ({}, "MKL_NUM_THREADS is not set, and torch's pool has the one thread of OMP_NUM_THREADS"),
            ),
            deadline_s=180,  # a new interpreter imports torch
            expected_s=(3.0, 3.0),
        ),
        pair(
            *("workers", load, "torch", symptom(r"BlockingIOError: \[Errno 11\]")),
            ({"workers": 8}, "8 workers, and the threads of each, exceed the limit"),
            ({"workers": 1}, "1 worker fits under the limit"),
        ),
        pair(
            *("soft-limit", partial(script, code=START_40), "", NO_THREAD),
            ({"shell": ":"}, "the job starts 40 threads, and the soft limit leaves room for 12"),
            (
                {"shell": "ulimit -Su hard"},
                "the job script raises the soft limit of threads to the hard limit",
            ),
        ),
        pair(
            *("executors", inside, "", NO_THREAD),
            ({"code": START_40}, "each step creates an executor, and the job keeps every one"),
            ({"code": START_1}, "all steps share one executor"),
        ),
        pair(
            *("zombies", inside, "", symptom(r"BlockingIOError: \[Errno 11\]")),
            ({"code": CHILDREN_40}, "40 children have ended, but nobody waited for them; the limit leaves room for 12"),
            ({"code": REAPED_40}, "the job waits for each child"),
        ),
        pair(
            *("tokenizers", partial(script, code=TOKENIZE, room=6, RAYON_NUM_THREADS="16"), "tokenizers", NO_POOL),
            (
                {"OMP_NUM_THREADS": "1"},
                "tokenizers starts a pool of 16 threads, with room for 6, and does not read OMP_NUM_THREADS=1",
            ),
            ({"RAYON_NUM_THREADS": "4"}, "tokenizers reads RAYON_NUM_THREADS=4 and starts 4 threads"),
        ),
        pair(
            *("address-space", partial(script, code=START_40, room=100), "", NO_THREAD),
            (
                {"shell": "ulimit -Sv 300000"},
                "the thread limit allows 40 threads, but the address space does not hold 40 stacks of 8 MiB",
            ),
            (
                {"shell": "ulimit -Sv 300000; ulimit -Sv hard"},
                "the job script raises the soft limit of the address space to the hard limit",
            ),
        ),
        pair(
            *("pids", group, "", NO_THREAD),
            (
                {"most": 12},
                "pids.max of the cgroup is 12, although the soft limit of the user is raised to the hard limit",
            ),
            ({"most": 100}, "pids.max of the cgroup is 100, which is enough"),
        ),
    ),
)

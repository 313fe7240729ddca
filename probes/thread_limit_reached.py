"""Every pool of threads counts against one limit of the user or of the container; the thread beyond it is refused.

The limit is the kernel's. It does not bind root, so root becomes another user first.
"""

import ctypes
import errno
import os
import platform
import re
import resource
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from kb.cpu_arms import limit_address_space
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

END_WITH_PARENT, KEEP_CAPABILITIES, SECCOMP, NO_NEW_PRIVILEGES, AMBIENT = 1, 8, 22, 38, 47  # of prctl(2)
READ_ANY_FILE = 1  # CAP_DAC_OVERRIDE: the interpreter may be in a folder of root
FREE_USER = 61_803  # of no account, so that no thread but ours counts
SWITCHES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
CLONE3 = 435  # on every architecture


def run(ctx: Context, act: Callable[[], Any], room: Optional[int] = None, prepare: Callable[[], Any] = int) -> None:
    """`act` in a child process, whose user may have `room` more threads. `Symptom` says with what it ended."""
    words, refusal = Path(ctx.path("words")), Path(ctx.path("refusal"))
    words.touch()
    ctx.reached()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.dup2(os.open(words, os.O_WRONLY | os.O_APPEND), 2)
            prepare()
            become_bound_user()
            if room is not None:
                hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
                resource.setrlimit(resource.RLIMIT_NPROC, (threads_used(hard) + room, hard))
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
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getuid():
        with suppress(Unavailable):
            own_user()
    else:
        libc.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0)
        with suppress(OSError):  # root of a user namespace is an ordinary user outside it
            os.setresuid(FREE_USER, FREE_USER, FREE_USER)
            libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[1 << READ_ANY_FILE] * 3))
            libc.prctl(AMBIENT, 2, READ_ANY_FILE, 0, 0)
    libc.prctl(END_WITH_PARENT, signal.SIGKILL, 0, 0, 0)


def threads_used(hard: int) -> int:
    """The threads of this user: the largest limit under which no further one starts."""
    low, high = 0, 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
    while high - low > 1:
        middle = (low + high) // 2
        resource.setrlimit(resource.RLIMIT_NPROC, (middle, hard))
        try:
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()
            while len(os.listdir("/proc/self/task")) > 1:  # it counts until the kernel has removed it
                time.sleep(0.001)
            high = middle
        except RuntimeError:
            low = middle
    resource.setrlimit(resource.RLIMIT_NPROC, (high, hard))
    if not low:
        raise Unavailable("RLIMIT_NPROC does not bind a process on this machine")
    return low


def compute(ctx: Context, *, threads: int = 16, ranks: int = 2) -> None:
    """Ranks of one user with a pool of OpenMP threads each, as large as on a machine with so many cores."""

    import torch

    torch.set_num_threads(1)  # where torch makes a pool of its default size first, it does so here

    def compare(number: int) -> None:
        torch.set_num_threads(number)
        ones = torch.ones(1 << 20)
        assert torch.equal(ones, ones)

    def measure() -> None:
        compare(16)
        os._exit(own_threads(None))

    def rank(number: int) -> None:
        compare(threads)
        (ctx.dir / f"pool{number}").touch()
        end = time.monotonic() + 5
        while len(list(ctx.dir.glob("pool*"))) < ranks and time.monotonic() < end:
            time.sleep(0.01)

    def launch() -> None:
        pids = [start(partial(rank, number)) for number in range(ranks)]
        while pids:
            pid, status = os.wait()
            pids.remove(pid)
            if status:
                for other in pids:
                    os.kill(other, signal.SIGKILL)
                os._exit(os.waitstatus_to_exitcode(status))
        assert len(list(ctx.dir.glob("pool*"))) == ranks

    one = os.waitstatus_to_exitcode(os.waitpid(start(measure), 0)[1])  # it differs between releases of torch
    ctx.note(threads_of_a_rank=one)
    run(ctx, launch, room=2 * one - 8)


def start(act: Callable[[], Any]) -> int:
    pid = os.fork()
    if not pid:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return pid


def execute(code: str, env: Mapping[str, str], before: Tuple[str, ...] = ()) -> None:
    """Become a new interpreter, so that what is imported reads these variables."""
    kept = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    os.execvpe((before or (sys.executable,))[0], [*before, sys.executable, "-c", code], {**kept, **env})


MULTIPLY = "import numpy, os; assert (numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum() == 300 ** 3"
SET_EARLY = "import os; os.environ['OPENBLAS_NUM_THREADS'] = '1'; " + MULTIPLY
SET_LATE = "import numpy, os; os.environ['OPENBLAS_NUM_THREADS'] = '1'; " + MULTIPLY


def multiply(ctx: Context, *, variable: str = "", code: str = MULTIPLY) -> None:
    """numpy with the OpenBLAS of its wheel, which starts a thread for each core but one when it is imported."""
    check_openblas()
    run(ctx, partial(execute, code, {variable: "1"} if variable else {}), room=0)


def check_openblas() -> None:
    import numpy

    if not list(Path(numpy.__file__).parent.parent.glob("numpy.libs/*openblas*")):
        raise Unavailable("this numpy brings no OpenBLAS of its own")
    if len(os.sched_getaffinity(0)) < 2:
        raise Unavailable("one core: OpenBLAS starts no thread")


def clone(ctx: Context, *, code: int) -> None:
    """The filter of a container engine answers the newer system call for threads with this error."""
    check_openblas()
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 34):
        raise Unavailable(f"{name or 'this libc'} {version} does not use clone3 for threads")

    def deny() -> None:
        lines = ((0x20, 0, 0, 0), (0x15, 0, 1, CLONE3), (0x06, 0, 0, 0x50000 | code), (0x06, 0, 0, 0x7FFF0000))
        program = b"".join(x.to_bytes(n, sys.byteorder) for line in lines for x, n in zip(line, (2, 1, 1, 4)))
        buffer = ctypes.create_string_buffer(program)
        header = len(lines).to_bytes(8, "little") + ctypes.addressof(buffer).to_bytes(8, "little")
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        if libc.prctl(SECCOMP, 2, ctypes.create_string_buffer(header), 0, 0):
            raise Unavailable("no seccomp filter on this machine")
        execute(MULTIPLY, {})

    run(ctx, deny)


class Rows:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> int:
        return row


def load(ctx: Context, *, workers: int) -> None:
    """Each worker is a process with threads, and a thread in the rank sends to it."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)

    def read() -> None:
        rows: Any = Rows()
        loader = DataLoader(rows, num_workers=workers, multiprocessing_context="fork")
        assert sum(int(batch) for batch in loader) == sum(range(16))

    run(ctx, read, room=12)


def count(ctx: Context, *, threads: int) -> None:
    """The threads of a worker, where the rank has set how many it wants for itself."""
    import torch
    from torch.utils.data import DataLoader

    ctx.reached()
    torch.set_num_threads(threads)
    rows: Any = Rows()
    (first, *_) = DataLoader(rows, num_workers=1, multiprocessing_context="fork", collate_fn=own_threads)
    ctx.note(threads_of_a_worker=first)
    if first > 10:
        raise Symptom(f"a worker has {first} threads")


def own_threads(_: Any) -> int:
    return len(os.listdir("/proc/self/task"))


START_40 = """
import threading
end = threading.Event()
threads = [threading.Thread(target=end.wait) for _ in range(40)]
try:
    for thread in threads:
        thread.start()
finally:
    end.set()
"""


def start_in_script(ctx: Context, *, raised: bool) -> None:
    """A job script under the soft limit of a login, where the hard one is higher."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if hard != resource.RLIM_INFINITY and hard < 1000:
        raise Unavailable(f"the hard limit is {hard} here")
    script = ('ulimit -Su "$(ulimit -Hu)"; ' if raised else "") + 'exec "$@"'
    run(ctx, partial(execute, START_40, {}, ("bash", "-c", script, "bash")), room=12)


def submit(ctx: Context, *, shared: bool) -> None:
    """Each step makes an executor, and something keeps it."""

    def steps() -> None:
        pools: List[ThreadPoolExecutor] = []
        for step in range(40):
            if not (shared and pools):
                pools.append(ThreadPoolExecutor(1))
            assert pools[-1].submit(abs, -step).result() == step

    run(ctx, steps, room=12)


TOKENIZE = """
from tokenizers import Tokenizer, models
tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
assert len(tokenizer.encode_batch(["a"] * 100)) == 100
"""


def tokenize(ctx: Context, **env: str) -> None:
    """The pool of the tokenizers library, as large as on a machine with 16 cores unless `env` says otherwise."""
    run(ctx, partial(execute, TOKENIZE, {"RAYON_NUM_THREADS": "16", "RUST_BACKTRACE": "0", **env}), room=6)


def reserve(ctx: Context, *, mib: int) -> None:
    """No limit on threads: each of 40 reserves address space for its stack, which `ulimit -v` limits."""

    def threads() -> None:
        threading.stack_size(8 << 20)  # the usual `ulimit -s`
        limit_address_space(mib << 20)
        exec(START_40, {})

    run(ctx, threads)


def group(ctx: Context, *, most: int) -> None:
    """The pids controller of a container, with `ulimit -u` as high as it goes."""
    folder = pids_folder() / f"kb-{os.getpid()}"

    def enter() -> None:
        try:
            folder.mkdir()
            (folder / "pids.max").write_text(str(most))
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise Unavailable(f"no cgroup of our own: {error}") from error
        hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))

    try:
        run(ctx, partial(exec, START_40, {}), prepare=enter)
    finally:
        ctx.note(pids_events=text(folder / "pids.events").split())
        with suppress(OSError):
            folder.rmdir()


def pids_folder() -> Path:
    """Where a group with a limit may be made: this process's own group or its parent."""
    for folder in cgroups()[:2]:
        if "unified" not in folder.parts and (
            folder.is_relative_to("/sys/fs/cgroup/pids") or "pids" in text(folder / "cgroup.subtree_control").split()
        ):
            return folder
    raise Unavailable("no cgroup of our own: the pids controller is not delegated to this user")


# --- the check: every limit that counts here, and what is used of it ------------------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """How many more threads may a job have that is started from here?"""
    evidence: List[str] = []
    limits = [*user_limit(evidence), *group_limits(evidence), *kernel_limits(evidence)]
    need = needed(params, evidence)
    refused = [line for line in evidence if "has refused" in line]
    free, name = min(limits, default=(None, ""))
    if free is None:
        return unknown(*evidence, "no limit on threads can be read here", advice="look on the host")
    advice = f"fewer threads per rank (OMP_NUM_THREADS), fewer workers, or a higher limit: {name}"
    if need > free:
        return exposed(*evidence, f"{free} more threads are left by {name}", advice=advice)
    if refused:
        return exposed(*evidence, advice=advice)
    return unknown(
        *evidence,
        f"{free} more threads are left by {name}, if this is the place of the ranks",
        advice="--set ranks=8 --set workers=8 --set threads=16, the numbers of your job, lets the check compare",
    )


def needed(params: Mapping[str, Any], evidence: List[str]) -> int:
    ranks, workers, threads = (params[name] for name in ("ranks", "workers", "threads"))
    if ranks < 1 or workers < 0 or threads < 0:
        return 0
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = threads or (int(given) if re.fullmatch(r"[1-9]\d{0,6}", given) else 1)
    need: int = ranks * (threads + 3 * workers)
    evidence.append(f"{ranks} ranks x (one pool of {threads} + {workers} workers x 3) = {need} threads at the least")
    return need


def user_limit(evidence: List[str]) -> List[Tuple[int, str]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    says = ["unlimited" if value == resource.RLIM_INFINITY else str(value) for value in (soft, hard)]
    evidence.append(f"processes and threads of this user (ulimit -u): {says[0]}, hard limit {says[1]}")
    if soft == resource.RLIM_INFINITY:
        return []
    if privileged():
        evidence.append("which does not bind this process, because it is privileged; it binds ordinary users")
        return []
    used = sum(int(status["Threads"]) for status in statuses() if status.get("Uid") == str(os.getuid()))
    evidence.append(f"it has {used} that can be seen from here; those in other containers count too")
    return [(soft - used, "ulimit -u")]


def statuses() -> List[Dict[str, str]]:
    rows = (text(path) for path in Path("/proc").glob("[0-9]*/status"))
    return [dict(re.findall(r"^(Uid|Threads):\s+(\d+)", row, re.M)) for row in rows if "\nThreads:" in row]


def privileged() -> bool:
    """CAP_SYS_RESOURCE or CAP_SYS_ADMIN in the first user namespace, or its root."""
    capabilities = re.search(r"^CapEff:\s+([0-9a-f]+)", text(Path("/proc/self/status")), re.M)
    mapped = text(Path("/proc/self/uid_map")).split() == ["0", "0", "4294967295"]
    has = bool(capabilities) and bool(int(capabilities.group(1), 16) & (1 << 24 | 1 << 21)) if capabilities else False
    return mapped and (has or os.getuid() == 0)


def cgroups() -> List[Path]:
    """The group of this process that counts threads, and those around it, innermost first."""
    rows = re.findall(r"^\d+:([^:]*):(/.*)$", text(Path("/proc/self/cgroup")), re.M)
    paths = {name: path for name, path in rows if name in ("", "pids")}
    root, path = Path("/sys/fs/cgroup"), paths.get("pids", paths.get("", "/"))
    root = root / "pids" if "pids" in paths else root
    inner = root / path.lstrip("/")
    if ".." in inner.parts or not inner.is_dir():
        return [root]  # in a container, where the path is the host's
    return [inner, *(parent for parent in inner.parents if parent.is_relative_to(root))]


def group_limits(evidence: List[str]) -> List[Tuple[int, str]]:
    limits = []
    for depth, folder in enumerate(cgroups()):
        most, now = number(folder / "pids.max"), number(folder / "pids.current")
        if most is None or now is None:
            continue
        evidence.append(f"cgroup {folder}: {now} of {most} threads (pids.current, pids.max)")
        limits.append((most - now, f"{folder}/pids.max"))
        refused = re.search(r"^max (\d+)", text(folder / "pids.events"), re.M)
        if refused and int(refused.group(1)):
            others = ", perhaps to other jobs" if depth else ""
            word = "refused some" if depth else "has refused"
            evidence.append(f"it {word} since it was made{others}: {refused.group(1)} (pids.events)")
    if not limits:
        evidence.append("no cgroup that can be seen from here limits threads; one outside a container may")
    return limits


def kernel_limits(evidence: List[str]) -> List[Tuple[int, str]]:
    total = re.search(r"\d+/(\d+) \d+$", text(Path("/proc/loadavg")).strip())
    names = ("threads-max", "pid_max")
    found = [(most, f"kernel.{name}") for name in names if (most := number(Path("/proc/sys/kernel") / name))]
    if not (total and found):
        return []
    most, name = min(found)
    evidence.append(f"the whole machine: {total.group(1)} of {most} threads ({name})")
    return [(most - int(total.group(1)), name)]


def number(path: Path) -> Optional[int]:
    value = text(path).strip()
    return int(value) if re.fullmatch(r"\d{1,18}", value) else None


def text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


OPENBLAS = r"blas_thread_init: pthread_create failed for thread \d+ of \d+: "
NO_THREAD = symptom(r"RuntimeError: can't start new thread")
NO_OPENMP = symptom(r"libgomp: Thread creation failed: |OMP: Error #34")
NO_BLAS, DENIED = symptom(OPENBLAS), symptom(OPENBLAS + os.strerror(errno.EPERM))
NO_POOL = symptom(r"ThreadPoolBuildError \{ kind: IOError\(Os \{ code: 11")
NO_FORK = symptom(r"BlockingIOError: \[Errno 11\]")
TORCH: Dict[str, str] = {"torch": ">=2.1"}


def pair(
    name: str,
    job: Callable[..., None],
    expect: Any,
    control: Tuple[Dict[str, Any], str],
    treatment: Tuple[Dict[str, Any], str],
    packages: Optional[Dict[str, str]] = None,
    programs: Tuple[str, ...] = (),
) -> Experiment:
    """Each arm: what differs in the call of the job, and what it does."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **control[0]), expect=expect, because=control[1], fidelity="cpu"),
        treatment=Arm(partial(job, **treatment[0]), expect=completed(), because=treatment[1], fidelity="cpu"),
        world_size=1,
        needs=Needs(packages=packages or {}, programs=programs),
        expected_s=(0.3, 0.3),
    )


NUMPY = {"numpy": ""}
TWO_POOLS: Tuple[Dict[str, Any], str] = ({}, "two ranks with a pool of 16 threads each, and room for 8 fewer")
NO_VARIABLE: Tuple[Dict[str, Any], str] = ({}, "a pool of one thread per core, and room for none")
ONE = "the pool has one thread, so none is started"

probe = Probe(
    check=check,
    params={
        "ranks": Param("int", "ranks on this machine, for the check", 0),
        "workers": Param("int", "DataLoader workers of each rank, for the check", 0),
        "threads": Param("int", "threads of a pool, for the check; 0: OMP_NUM_THREADS, else 1", 0),
    },
    experiments=(
        pair("pools", compute, NO_OPENMP, TWO_POOLS, ({"threads": 4}, "the same with pools of 4 threads"), TORCH),
    ),
    variants=(
        pair("sum", compute, NO_OPENMP, TWO_POOLS, ({"ranks": 1}, "one such rank alone"), TORCH),
        pair("openblas", multiply, NO_BLAS, NO_VARIABLE, ({"variable": "OPENBLAS_NUM_THREADS"}, ONE), NUMPY),
        pair(
            "variables",
            multiply,
            NO_BLAS,
            ({"variable": "MKL_NUM_THREADS"}, "MKL_NUM_THREADS=1, which OpenBLAS does not read"),
            ({"variable": "OMP_NUM_THREADS"}, "OMP_NUM_THREADS=1, which it reads"),
            NUMPY,
        ),
        pair(
            "late",
            multiply,
            NO_BLAS,
            ({"code": SET_LATE}, "the script sets the variable after it imports numpy"),
            ({"code": SET_EARLY}, "it sets it before"),
            NUMPY,
        ),
        pair("workers", load, NO_FORK, ({"workers": 16}, "16 workers"), ({"workers": 2}, "2 workers"), TORCH),
        pair(
            "worker-pools",
            count,
            symptom(r"a worker has \d{2,} threads"),
            ({"threads": 80}, "the rank called torch.set_num_threads(80)"),
            ({"threads": 1}, "it called torch.set_num_threads(1)"),
            TORCH,
        ),
        pair(
            "soft-limit",
            start_in_script,
            NO_THREAD,
            ({"raised": False}, "40 threads, and room for 12 under the soft limit"),
            ({"raised": True}, "the script raises the soft limit to the hard one"),
            programs=("bash",),
        ),
        pair(
            "executors",
            submit,
            NO_THREAD,
            ({"shared": False}, "each step makes an executor that something keeps"),
            ({"shared": True}, "one executor for all steps"),
        ),
        pair(
            "tokenizers",
            tokenize,
            NO_POOL,
            ({}, "a pool of 16 threads, and room for 6"),
            ({"RAYON_NUM_THREADS": "4"}, "RAYON_NUM_THREADS=4"),
            {"tokenizers": ""},
        ),
        pair(
            "tokenizers-omp",
            tokenize,
            NO_POOL,
            ({"OMP_NUM_THREADS": "1"}, "OMP_NUM_THREADS=1, which this pool does not read"),
            ({"TOKENIZERS_PARALLELISM": "false"}, "TOKENIZERS_PARALLELISM=false"),
            {"tokenizers": ""},
        ),
        pair(
            "address-space",
            reserve,
            NO_THREAD,
            ({"mib": 128}, "no limit on threads, and address space for fewer than 40 stacks of 8 MiB"),
            ({"mib": 1024}, "address space for all"),
        ),
        pair(
            "pids",
            group,
            NO_THREAD,
            ({"most": 12}, "pids.max is 12, and the soft limit of the user is raised to the hard one"),
            ({"most": 100}, "pids.max is 100"),
        ),
        pair(
            "seccomp",
            clone,
            DENIED,
            ({"code": errno.EPERM}, "the filter answers clone3 with EPERM, as an old container engine"),
            ({"code": errno.ENOSYS}, "it answers ENOSYS, and glibc takes the older call"),
            NUMPY,
        ),
    ),
)

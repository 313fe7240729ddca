"""A build of torch without libuv refuses to create a TCPStore with libuv, and USE_LIBUV=0 does not reach every store.

Each arm changes the machine code of its own process, so that torch's function that reports whether libuv is built in
returns false. The error message, the launchers and the store without libuv are torch's own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import runpy
import socket
import struct
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Probe,
    Unavailable,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)

SYMBOL = b"\0_ZN4c10d6detail35is_libuv_tcpstore_backend_availableEv\0"
# "return true", and the bytes that turn it into "return false", on x86-64 and aarch64
TRUE_TO_FALSE = {b"\xb8\1\0\0\0\xc3": b"\xb8\0", b"\x20\0\x80\x52\xc0\x03\x5f\xd6": b"\0\0\x80\x52"}
TRAIN = """
import os
import torch
import torch.distributed as dist

ranks = torch.ones(1)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    dist.all_reduce(ranks)
with open(os.environ["KB_OUT"] + os.environ.get("RANK", "0"), "w") as out:
    out.write("%d ranks" % ranks.item())
if "RANK" in os.environ:
    dist.barrier()
"""
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# The ranks are forked from this process, which has imported torch.
TORCHRUN = ["--run-path", "--start-method=fork", "--monitor-interval=0.1"]
BY_FILE = ["--rdzv-backend=c10d", "--rdzv-conf", "store_type=file", "--local-addr=localhost"]
NOT_SHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
BY_VARIABLES = {**NOT_SHARED, "PET_RDZV_BACKEND": "c10d", "PET_RDZV_CONF": "store_type=file"}


def remove_libuv() -> None:
    """Makes `is_libuv_tcpstore_backend_available` return false in this process and in the processes it forks."""
    import torch

    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
            offset = find_function(elf)
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path.name)]
    except (OSError, ValueError, struct.error) as error:
        raise Unavailable("kb cannot read torch's library: %s" % error) from error
    if offset is None or not mapped:
        raise Unavailable("torch's library has no symbol for the function that reports whether libuv is built in")
    address = min(int(line.split("-")[0], 16) for line in mapped) + offset
    address += 4 * (ctypes.string_at(address, 4) == b"\xf3\x0f\x1e\xfa")  # endbr64
    code = ctypes.string_at(address, 8)
    patch = next((false for true, false in TRUE_TO_FALSE.items() if code.startswith(true)), None)
    if patch is None:
        raise Unavailable("libuv is not built in, or the probe does not know this machine code: %s" % code.hex())
    libc, start = ctypes.CDLL(None, use_errno=True), address & -mmap.PAGESIZE
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(start, 2 * mmap.PAGESIZE, 7):
        raise Unavailable(
            "this machine does not allow a process to change its code: %s" % os.strerror(ctypes.get_errno())
        )
    ctypes.memmove(address, patch, len(patch))
    libc.mprotect(start, 2 * mmap.PAGESIZE, 5)


def find_function(elf: mmap.mmap) -> Optional[int]:
    """Returns the offset of the function from the symbol table of a 64-bit ELF file."""
    table, (size, count) = struct.unpack_from("<Q", elf, 40)[0], struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + number * size) for number in range(count)]
    for _, kind, _, _, start, length, link, *_ in sections:
        name = elf.find(SYMBOL, sections[link][4], sum(sections[link][4:6])) if kind == 2 else -1  # SHT_SYMTAB
        symbol = struct.pack("<I", name + 1 - sections[link][4]) if name >= 0 else b""
        at = elf.find(symbol, start, start + length) if symbol else -1
        while at >= 0:
            if (at - start) % 24 == 0:
                return int(struct.unpack_from("<Q", elf, at + 8)[0])
            at = elf.find(symbol, at + 1, start + length)
    return None


def change_default() -> None:
    """Changes the default of `TCPStore` with the code that the entry prints."""
    import torch.distributed as dist

    create = dist.TCPStore.__init__

    def create_without_libuv(self, *args, **kwargs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN003, ANN202
        create(self, *args, **{**kwargs, "use_libuv": False})

    dist.TCPStore.__init__ = create_without_libuv


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


# --- ranks ----------------------------------------------------------------------------------------------------------


def be_a_rank(ctx: Context) -> None:
    rank, world_size, path = ctx.rank, ctx.world_size, Path(ctx.path("port"))
    if rank == 0:
        path.write_text(free_port())
    assert ctx.meet("port")
    port = path.read_text()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    remove_libuv()


def join(ctx: Context, address: str = "env://") -> None:
    import torch
    import torch.distributed as dist

    ctx.reached()
    dist.init_process_group("gloo", init_method=address)
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    assert ranks.item() == ctx.world_size
    ctx.meet("counted")


def start(ctx: Context, *, has_variable: bool) -> None:
    """Joins a group as a rank that was started without torchrun."""
    be_a_rank(ctx)
    if has_variable:
        os.environ["USE_LIBUV"] = "0"
    join(ctx)


def start_below_torchrun(ctx: Context, *, imported: bool) -> None:
    """Joins a store of torchrun as a rank whose script may import the file that the entry prints."""
    import torch.distributed as dist

    be_a_rank(ctx)
    os.environ.update(USE_LIBUV="0", TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"  # torch 2.5 reads it
    if ctx.rank == 0:
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, True, use_libuv=False)
        assert not store.libuvBackend
    assert ctx.meet("hosted")
    if imported:
        change_default()
    join(ctx, "env://?use_libuv=0")


# --- launchers ------------------------------------------------------------------------------------------------------


def launch(ctx: Context, launcher: Callable[[], Any], variables: Mapping[str, str] = {}, ranks: int = 2) -> None:
    """Starts ranks with `USE_LIBUV=0`, and asserts that they joined one group."""
    out = ctx.path("out")
    Path(ctx.path("train.py")).write_text(TRAIN)
    os.environ.update(variables, USE_LIBUV="0", PET_LOCAL_ADDR="localhost", KB_OUT=out)
    remove_libuv()
    ctx.reached()
    launcher()
    assert [Path(out + str(rank)).read_text() for rank in range(ranks)] == ["%d ranks" % ranks] * ranks


def torchrun(ctx: Context, *, options: List[str], variables: Mapping[str, str]) -> None:
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    main = import_module("torch.distributed.run").main
    words = [*options, *TORCHRUN, "--nproc-per-node=2", ctx.path("train.py")]
    try:
        launch(ctx, partial(main, words), variables)
    except RendezvousConnectionError as error:  # "See inner exception for details."
        raise error.__cause__ or error from None


def static() -> List[str]:
    """The options with which LLaMA-Factory calls torchrun."""
    return ["--nnodes=1", "--node_rank=0", "--master_addr=127.0.0.1", "--master_port=" + free_port()]


def torchrun_static(ctx: Context, *, variables: Mapping[str, str] = NOT_SHARED, imported: bool = False) -> None:
    if imported:
        change_default()
    torchrun(ctx, options=static(), variables=variables)


def train_alone(ctx: Context, *, launched: bool) -> None:
    """Runs one process for one GPU, with torchrun or as `python train.py`."""
    for name in LAUNCHER:
        os.environ.pop(name, None)
    main: Callable[[], Any] = partial(runpy.run_path, ctx.path("train.py"), run_name="__main__")
    if launched:
        words = [*static(), *TORCHRUN, "--nproc-per-node=1", ctx.path("train.py")]
        main = partial(import_module("torch.distributed.run").main, words)
    launch(ctx, main, ranks=1)


def launch_accelerate(ctx: Context, *, options: List[str]) -> None:
    accelerate = import_module("accelerate.commands.launch")
    words = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
    arguments = accelerate.launch_command_parser().parse_args([*words, *options, ctx.path("train.py")])
    launch(ctx, lambda: accelerate.launch_command(arguments), NOT_SHARED)


def start_lightning(ctx: Context, *, use_libuv: str) -> None:
    """Lightning starts its own ranks. On Windows it sets USE_LIBUV when it is imported."""
    from lightning.fabric import Fabric  # type: ignore[import-not-found]

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", LOCAL_RANK="0", NODE_RANK="0", USE_LIBUV=use_libuv)
    remove_libuv()
    ctx.reached()
    Fabric(accelerator="cpu", devices=1, strategy="ddp").launch()


# --- the check reads torch's files, without importing torch: is libuv built in, and which stores have a switch? ------

LIBRARIES = ("torch_cpu.dll", "libtorch_cpu.so", "libtorch_cpu.dylib")
BUILT_IN, MISSING = b"LibUVStoreDaemon", b"LibUV TCPStore implementation missing"
READ_S, CHUNK = 0.7, 1 << 24
STORES = {"static": "static_tcp_rendezvous.py", "c10d, --standalone": "c10d_rendezvous_backend.py"}


def check(params: Mapping[str, Any]) -> Finding:
    """Is libuv built into torch's library, and if not, do all stores of torchrun have a switch for it?"""
    try:
        found = importlib.util.find_spec("torch")
    except (ImportError, ValueError) as error:
        return unknown("kb cannot find out whether torch is installed: %s" % error)
    if found is None or not found.origin:
        return unknown("torch is not installed for this interpreter")
    try:
        return judge(Path(found.origin).parent)
    except (OSError, ValueError) as error:
        return unknown("kb cannot read torch's files: %s" % error)


def judge(folder: Path) -> Finding:
    ask = "run: python -c \"import torch.distributed as d; d.TCPStore('localhost', 0, 1, True, use_libuv=True)\""
    library = next((path for path in (folder / "lib" / name for name in LIBRARIES) if path.is_file()), None)
    if library is None:
        return unknown("torch/lib has none of the libraries %s" % ", ".join(LIBRARIES), advice=ask)
    marker = find_marker(library)
    if marker == BUILT_IN:
        return clear("%s contains the store with libuv" % library.name)
    if marker != MISSING:
        return unknown("kb could not tell in time whether %s contains libuv" % library.name, advice=ask)
    evidence = ["%s was built without libuv" % library.name]
    distributed = folder / "distributed"
    ranks = (distributed / "rendezvous.py").read_text(errors="replace")
    if 'os.environ.get("USE_LIBUV", "1")' not in ranks:  # 2.3 and older, or newer than this probe
        return unknown(*evidence, "torch/distributed/rendezvous.py does not read USE_LIBUV as in torch 2.4", advice=ask)
    rendezvous = distributed / "elastic" / "rendezvous"
    ignoring = [
        store for store, name in STORES.items() if "use_libuv" not in (rendezvous / name).read_text(errors="replace")
    ]
    if ignoring:
        evidence.append("torchrun (%s) requests libuv even if USE_LIBUV=0 is set" % "; ".join(ignoring))
        return exposed(
            *evidence, advice="set USE_LIBUV=0, and let torchrun use a file as its store: Fix 1 of the entry"
        )
    return unknown(*evidence, "each store of torchrun has a switch, so USE_LIBUV=0 may be enough", advice=ask)


def find_marker(library: Path) -> bytes:
    """The marker that the library contains, or b"" if kb finds none in time. Reads from the end, where names are."""
    end = time.monotonic() + READ_S
    with library.open("rb") as file:
        at = file.seek(0, os.SEEK_END)
        while at > 0 and time.monotonic() < end:
            at = max(0, at - CHUNK)
            file.seek(at)
            chunk = file.read(CHUNK + len(MISSING))
            for marker in (BUILT_IN, MISSING):
                if marker in chunk:
                    return marker
    return b""


# --- the experiments --------------------------------------------------------------------------------------------------

REFUSED = raised(r"use_libuv was requested but PyTorch was buil[dt] without libuv support")
BUILD = "a build without libuv: in memory, torch's function that reports libuv is changed to return false"


def pair(name: str, job: Callable[..., None], because: str, fix: str, ranks: int = 1, **keyword: Any) -> Experiment:
    """`keyword` has two values: of the control arm, and of the treatment arm."""
    (word, (fails, works)), *_ = keyword.items()
    stand_in: Dict[str, Any] = {"fidelity": "stand-in", "stands_for": BUILD}
    library = {name: ""} if name in ("accelerate", "lightning") else {}
    return Experiment(
        name=name,
        control=Arm(partial(job, **{word: fails}), REFUSED, because=because, **stand_in),
        treatment=Arm(partial(job, **{word: works}), completed(), because=fix, **stand_in),
        world_size=ranks,
        needs=Needs(packages={"torch": ">=2.5", **library}),
        deadline_s=60,
        expected_s=(0.5, 1.5),
    )


run = partial(torchrun, variables=NOT_SHARED)
by_file = partial(torchrun, options=BY_FILE)
RANKS = "torch requests libuv by default"
STATIC = "torchrun's own store requests libuv although USE_LIBUV is 0"
STANDALONE = "torchrun's c10d store requests libuv too, and ignores the option use_libuv=0"
BELOW = "ranks that join torchrun's store request libuv, although USE_LIBUV and the address say 0"
OWN_FILE = "torchrun's store is a file, and the ranks create their own store, which obeys USE_LIBUV"
ACCELERATE = ["--rdzv_backend=c10d", "--rdzv_conf=store_type=file"]
NO_SWITCH = ["--standalone", "--rdzv-conf", "use_libuv=0"]

probe = Probe(
    check=check,
    experiments=(
        pair("ranks", start, RANKS, "USE_LIBUV=0 is in the environment of the ranks", 2, has_variable=(False, True)),
    ),
    variants=(
        pair("torchrun", run, STATIC, OWN_FILE, options=(["--master-port=1"], BY_FILE)),
        pair("standalone", run, STANDALONE, OWN_FILE, options=(NO_SWITCH, BY_FILE)),
        pair(
            "shared-store",
            by_file,
            "torchrun creates a second store for the ranks, which requests libuv",
            OWN_FILE,
            variables=({}, NOT_SHARED),
        ),
        pair(
            "variables",
            torchrun_static,
            STATIC,
            "environment variables make torchrun's store a file",
            variables=(NOT_SHARED, BY_VARIABLES),
        ),
        pair(
            "wrapper",
            torchrun_static,
            STATIC,
            "the file of the entry, imported first, changes the default of TCPStore",
            imported=(False, True),
        ),
        pair(
            "below-torchrun",
            start_below_torchrun,
            BELOW,
            "the script imports the file of the entry",
            2,
            imported=(False, True),
        ),
        pair(
            "one-gpu",
            train_alone,
            "torchrun's store requests libuv even for one process",
            "python train.py starts without torchrun",
            launched=(True, False),
        ),
        pair("accelerate", launch_accelerate, STATIC, OWN_FILE, options=([], ACCELERATE)),
        pair(
            "lightning",
            start_lightning,
            "Lightning starts its ranks with USE_LIBUV=1",
            "USE_LIBUV is 0, as Lightning sets it on Windows",
            use_libuv=("1", "0"),
        ),
    ),
)

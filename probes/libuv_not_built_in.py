"""torch's TCPStore is asked for libuv in a build that has none: who asks, and whom does USE_LIBUV=0 reach?

In the memory of an arm, the function of torch's library that says whether libuv is built in is made to say no. The
refusal, the launchers and the store without libuv are torch's own.
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

ANSWER = b"\0_ZN4c10d6detail35is_libuv_tcpstore_backend_availableEv\0"
# "return true" and what makes it false, on x86-64 and aarch64
YES = {b"\xb8\1\0\0\0\xc3": b"\xb8\0", b"\x20\0\x80\x52\xc0\x03\x5f\xd6": b"\0\0\x80\x52"}
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
    """Let `is_libuv_tcpstore_backend_available` return false in this process, and in those that it forks."""
    import torch

    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
            offset = find_answer(elf)
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path.name)]
    except (OSError, ValueError, struct.error) as error:
        raise Unavailable("torch's library cannot be read: %s" % error) from error
    if offset is None or not mapped:
        raise Unavailable("no symbol of torch's library says whether libuv is built in")
    address = min(int(line.split("-")[0], 16) for line in mapped) + offset
    address += 4 * (ctypes.string_at(address, 4) == b"\xf3\x0f\x1e\xfa")  # endbr64
    code = ctypes.string_at(address, 8)
    no = next((no for yes, no in YES.items() if code.startswith(yes)), None)
    if no is None:
        raise Unavailable("libuv is not built in, or the machine code is not known here: %s" % code.hex())
    libc, start = ctypes.CDLL(None, use_errno=True), address & -mmap.PAGESIZE
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.mprotect(start, 2 * mmap.PAGESIZE, 7):
        raise Unavailable("the memory of code cannot be changed here: %s" % os.strerror(ctypes.get_errno()))
    ctypes.memmove(address, no, len(no))
    libc.mprotect(start, 2 * mmap.PAGESIZE, 5)


def find_answer(elf: mmap.mmap) -> Optional[int]:
    """The offset of the function, by the symbol table of a 64-bit ELF file."""
    table, (size, count) = struct.unpack_from("<Q", elf, 40)[0], struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + number * size) for number in range(count)]
    for _, kind, _, _, start, length, link, *_ in sections:
        name = elf.find(ANSWER, sections[link][4], sum(sections[link][4:6])) if kind == 2 else -1  # SHT_SYMTAB
        symbol = struct.pack("<I", name + 1 - sections[link][4]) if name >= 0 else b""
        at = elf.find(symbol, start, start + length) if symbol else -1
        while at >= 0:
            if (at - start) % 24 == 0:
                return int(struct.unpack_from("<Q", elf, at + 8)[0])
            at = elf.find(symbol, at + 1, start + length)
    return None


def change_default() -> None:
    """The file of the entry."""
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
    """Ranks that something other than torchrun starts."""
    be_a_rank(ctx)
    if has_variable:
        os.environ["USE_LIBUV"] = "0"
    join(ctx)


def start_below_torchrun(ctx: Context, *, imported: bool) -> None:
    """Ranks that join a store of torchrun; their script imports the file of the entry, or does not."""
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
    """Start ranks with `USE_LIBUV=0`, and read what they write down."""
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
    """As LLaMA-Factory calls torchrun."""
    return ["--nnodes=1", "--node_rank=0", "--master_addr=127.0.0.1", "--master_port=" + free_port()]


def torchrun_static(ctx: Context, *, variables: Mapping[str, str] = NOT_SHARED, imported: bool = False) -> None:
    if imported:
        change_default()
    torchrun(ctx, options=static(), variables=variables)


def train_alone(ctx: Context, *, launched: bool) -> None:
    """One process for one GPU: by torchrun, or as `python train.py`."""
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
    """Lightning starts its ranks itself; on Windows it sets the variable when it is imported."""
    from lightning.fabric import Fabric  # type: ignore[import-not-found]

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", LOCAL_RANK="0", NODE_RANK="0", USE_LIBUV=use_libuv)
    remove_libuv()
    ctx.reached()
    Fabric(accelerator="cpu", devices=1, strategy="ddp").launch()


# --- the check: is libuv in torch's library, and which files pass a switch on? Read without importing torch ---------

LIBRARIES = ("torch_cpu.dll", "libtorch_cpu.so", "libtorch_cpu.dylib")
BUILT_IN, MISSING = b"LibUVStoreDaemon", b"LibUV TCPStore implementation missing"
READ_S, PIECE = 0.7, 1 << 24
STORES = {"static": "static_tcp_rendezvous.py", "c10d, --standalone": "c10d_rendezvous_backend.py"}


def check(params: Mapping[str, Any]) -> Finding:
    try:
        found = importlib.util.find_spec("torch")
    except (ImportError, ValueError) as error:
        return unknown("torch cannot be looked up: %s" % error)
    if found is None or not found.origin:
        return unknown("torch is not installed for this interpreter")
    try:
        return judge(Path(found.origin).parent)
    except (OSError, ValueError) as error:
        return unknown("torch's files cannot be read: %s" % error)


def judge(folder: Path) -> Finding:
    ask = "ask it: python -c \"import torch.distributed as d; d.TCPStore('localhost', 0, 1, True, use_libuv=True)\""
    library = next((path for path in (folder / "lib" / name for name in LIBRARIES) if path.is_file()), None)
    if library is None:
        return unknown("torch/lib has no library by a name known here", advice=ask)
    word = look_into(library)
    if word == BUILT_IN:
        return clear("%s has the store with libuv" % library.name)
    if word != MISSING:
        return unknown("%s does not say whether it has libuv, or was not read in time" % library.name, advice=ask)
    evidence = ["%s is built without the store with libuv" % library.name]
    distributed = folder / "distributed"
    ranks = (distributed / "rendezvous.py").read_text(errors="replace")
    if 'os.environ.get("USE_LIBUV", "1")' not in ranks:  # 2.3 and older, or newer than this probe
        return unknown(*evidence, "torch/distributed/rendezvous.py does not ask for libuv as 2.4 does", advice=ask)
    rendezvous = distributed / "elastic" / "rendezvous"
    deaf = [who for who, name in STORES.items() if "use_libuv" not in (rendezvous / name).read_text(errors="replace")]
    if deaf:
        evidence.append("torchrun (%s) asks for libuv whatever USE_LIBUV says" % "; ".join(deaf))
        return exposed(*evidence, advice="USE_LIBUV=0 and a file for torchrun's store: Fix 1 of the entry")
    return unknown(*evidence, "each store of torchrun has a switch; USE_LIBUV=0 may do", advice=ask)


def look_into(library: Path) -> bytes:
    """Which of the two texts the library holds: from its end, where names are; empty if none is found in time."""
    end = time.monotonic() + READ_S
    with library.open("rb") as file:
        at = file.seek(0, os.SEEK_END)
        while at > 0 and time.monotonic() < end:
            at = max(0, at - PIECE)
            file.seek(at)
            piece = file.read(PIECE + len(MISSING))
            for word in (BUILT_IN, MISSING):
                if word in piece:
                    return word
    return b""


# --- the experiments --------------------------------------------------------------------------------------------------

REFUSED = raised(r"use_libuv was requested but PyTorch was buil[dt] without libuv support")
BUILD = "a build without libuv: torch's function that says whether it is built in is made to say no, in memory"


def pair(name: str, job: Callable[..., None], because: str, fix: str, ranks: int = 1, **keyword: Any) -> Experiment:
    """`keyword` is what differs, for control and treatment."""
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
RANKS = "torch asks for libuv by default"
STATIC = "torchrun's own store asks for libuv, although USE_LIBUV is 0"
BELOW = "ranks that join torchrun's store ask for libuv, although variable and address say no"
OWN_FILE = "the store is a file, and the ranks make their own, which obeys USE_LIBUV"
ACCELERATE = ["--rdzv_backend=c10d", "--rdzv_conf=store_type=file"]
NO_SWITCH = ["--standalone", "--rdzv-conf", "use_libuv=0"]

probe = Probe(
    check=check,
    experiments=(pair("ranks", start, RANKS, "USE_LIBUV=0 in their environment", 2, has_variable=(False, True)),),
    variants=(
        pair("torchrun", run, STATIC, OWN_FILE, options=(["--master-port=1"], BY_FILE)),
        pair("standalone", run, "so does c10d's, and its option is not read", OWN_FILE, options=(NO_SWITCH, BY_FILE)),
        pair(
            "shared-store",
            by_file,
            "torchrun makes a second store, for the ranks",
            OWN_FILE,
            variables=({}, NOT_SHARED),
        ),
        pair("variables", torchrun_static, STATIC, "variables do it", variables=(NOT_SHARED, BY_VARIABLES)),
        pair(
            "wrapper",
            torchrun_static,
            STATIC,
            "a file that is imported first changes the default",
            imported=(False, True),
        ),
        pair("below-torchrun", start_below_torchrun, BELOW, "their script imports the file", 2, imported=(False, True)),
        pair("one-gpu", train_alone, "the same for one process", "python train.py", launched=(True, False)),
        pair("accelerate", launch_accelerate, STATIC, OWN_FILE, options=([], ACCELERATE)),
        pair("lightning", start_lightning, "USE_LIBUV=1", "USE_LIBUV=0, as on Windows", use_libuv=("1", "0")),
    ),
)

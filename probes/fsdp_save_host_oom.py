"""Every rank, or only rank 0, builds the full state dict; rank 1 has memory for its shard and one whole layer only."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from kb.cpu_arms import GPU_OOM, HOST_OOM, limit_address_space
from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, completed, exposed, unknown
from kb.training_config import UnreadableConfig, read_config

GIB = 1 << 30
CPU_LAYERS, CPU_WIDTH, CPU_ROOM = 8, 2048, 80 << 20  # 128 MiB of float32 weights, 64 on each rank
GPU_LAYERS, GPU_WIDTH, GPU_MIB = 10, 5120, 1024  # 1000 MiB, 500 on each rank


def save(ctx: Context, *, how: str) -> None:
    """Saves in shards, or builds the full state dict; each weight has its own value, by which the job checks it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

    dist, on_gpu = ctx.init_process_group(timeout_s=20), ctx.device.type == "cuda"
    model, folder = sharded_model(ctx), ctx.path("checkpoint")
    dist.all_gather([torch.empty(1, device=ctx.device) for _ in range(2)], torch.ones(1, device=ctx.device))
    path, first = ctx.path("model.pt"), next(iter(model.parameters()))
    optimizer = torch.optim.SGD([first], lr=0.0, momentum=0.9)  # its state is allocated before the limit
    first.grad = torch.zeros_like(first)
    optimizer.step()
    ctx.note(shard_mib=sum(parameter.to_local().nbytes for parameter in model.parameters()) >> 20)
    if not on_gpu and ctx.rank == 1:
        limit_address_space(CPU_ROOM)
    ctx.reached()
    if how == "sharded":
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder)
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        assert {f"model.{name}" for name in weights} < set(saved), (list(saved), list(weights))
        assert "optim.state.0.weight.momentum_buffer" in saved, list(saved)
        return
    if how == "rank 0":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            torch.save(state, path)
    else:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    ctx.note(full_mib=sum(tensor.nbytes for tensor in state.values()) >> 20)
    expected = len(list(model.parameters())) if ctx.rank == 0 else 0
    assert len(state) == expected, "%d tensors on rank %d, not %d" % (len(state), ctx.rank, expected)
    assert all(bool((state[name] == number).all()) for number, name in enumerate(state)), "the save changed a weight"


def sharded_model(ctx: Context) -> Any:
    """A model that is sharded before its memory is allocated, so that no rank ever holds all of it before the save."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    count, width = (GPU_LAYERS, GPU_WIDTH) if ctx.device.type == "cuda" else (CPU_LAYERS, CPU_WIDTH)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False, device="meta") for _ in range(count)])
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).to_empty(device=ctx.device)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.to_local().fill_(number)
    return model


def check(params: Mapping[str, Any]) -> Finding:
    """Does a full state dict fit into this host's memory, once for rank 0 or once for each rank of the host?"""
    kind, billions = "", params["params"]
    if params["config"] is not None:
        try:
            kind = state_dict_type(read_config(params["config"]).values)
        except UnreadableConfig as error:
            return unknown(str(error))
    if "SHARDED" in kind:
        return unknown(
            "the configuration saves %s, so every rank saves its own shard" % kind,
            "accelerate first copies the shards to host memory, and on a single host they are the whole model",
            "the Trainer uses this key only since transformers 5.10",
            "kb cannot see whether your script asks for a full state dict at the end",
        )
    if billions is None or billions <= 0 or params["ranks"] < 1 or params["copies"] not in ("rank0", "all"):
        return unknown(
            "the number of parameters was not given" + (", and the save is %s" % kind if kind else ""),
            advice="--set params=70 --set bytes=12 (billions; fp32 weights and Adam), copies=all if every rank gathers",
        )
    free, source = host_memory()
    if free is None:
        return unknown(source)
    everywhere = params["copies"] == "all"
    times = params["ranks"] if everywhere else 1
    need = billions * 1e9 * params["bytes"] * times / GIB
    message = "%.1f billion x %.0f bytes x %d = %.0f GiB, and this host has %.0f GiB available (%s)" % (
        *(billions, params["bytes"], times, need, free),
        source,
    )
    if need > free:
        return exposed(message, advice="save sharded checkpoints, or only the weights on rank 0 only")
    if need > 0.7 * free:
        return unknown(message, "data loaders, pinned buffers and the page cache of the write need memory as well")
    if not everywhere:
        return unknown(message, "this is enough for rank 0; copies=all checks whether every rank could gather")
    gpu = "without offload_to_cpu each GPU also needs %.0f GiB, which kb did not compare" % (need / times)
    return unknown(message, "this is enough for the host; " + gpu)


def state_dict_type(values: Mapping[str, Any]) -> str:
    """`FULL_STATE_DICT`, `SHARDED_STATE_DICT` or "" from an accelerate or Trainer configuration."""
    part: Any = values.get("fsdp_config")
    settings: Dict[str, Any] = {**values, **part} if isinstance(part, dict) else dict(values)
    return str(settings.get("fsdp_state_dict_type", settings.get("state_dict_type", ""))).upper()


def host_memory() -> Tuple[Optional[float], str]:
    """GiB still available on this host or in this shell's cgroup, and the source; or None and the reason."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        result: List[Tuple[float, str]] = [
            (int(line.split()[1]) / (1 << 20), "MemAvailable") for line in lines if line.startswith("MemAvailable")
        ]
    except (OSError, ValueError):
        return None, "kb cannot read /proc/meminfo"
    for limit, used, statistics in cgroups():
        try:
            free = int(limit.read_text()) - int(used.read_text())
            dropped = re.search(r"^(?:total_)?inactive_file (\d+)", statistics.read_text(), re.M)
        except (OSError, ValueError):  # this cgroup has no limit
            continue
        result.append(((free + int(dropped.group(1) if dropped else 0)) / GIB, "cgroup"))
    return min(result) if result else (None, "this kernel does not report MemAvailable")


def cgroups() -> Iterator[Tuple[Path, Path, Path]]:
    """The files with limit, use and statistics of this process's cgroup and of those above it, in versions 1 and 2."""
    try:
        paths = re.findall(r"^\d+:(?:.*memory.*)?:(/.*)$", Path("/proc/self/cgroup").read_text(), re.M)
    except OSError:
        paths = []
    for root, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        # in a container, the root is the container's own cgroup, and the path may be that of the host
        for group in {Path(root)}.union(*({Path(root + path), *Path(root + path).parents} for path in paths)):
            yield group / limit, group / used, group / "memory.stat"


EVERYWHERE = "full_state_dict=True without cpu_offload makes every rank build the whole model"
ONCE = "with cpu_offload=True, only rank 0 builds the whole model, layer by layer"
SHARED = "the memory of a GPU, or the host memory that all ranks share; here the address space of rank 1 is limited"

FULL = Arm(
    partial(save, how="everywhere"),
    HOST_OOM,
    because=EVERYWHERE,
    fidelity="stand-in",
    stands_for=SHARED,
)
rlimit = Experiment(
    name="rlimit",
    control=FULL,
    treatment=Arm(partial(save, how="rank 0"), completed(), because=ONCE, fidelity="stand-in", stands_for=SHARED),
    needs=Needs(packages={"torch": ">=2.8"}),  # in 2.7, the CPU's allocator does not release gathered weights
    deadline_s=30,
    expected_s=(1.2, 1.2),
)
in_shards = Experiment(
    name="sharded",
    control=FULL,
    treatment=Arm(
        partial(save, how="sharded"),
        completed(),
        because="torch.distributed.checkpoint makes each rank write its own shard",
        fidelity="stand-in",
        stands_for=SHARED,
    ),
    needs=Needs(packages={"torch": ">=2.8", "numpy": ""}),  # torch.distributed.checkpoint copies through numpy
    deadline_s=30,
    expected_s=(1.2, 1.2),
)

probe = Probe(
    check=check,
    params={
        "config": Param("path", "your accelerate configuration, which names the state dict type"),
        "params": Param("float", "number of parameters of the model, in billions"),
        "bytes": Param("float", "bytes per parameter in the save: 2 for bf16, 4 for fp32, 12 for fp32 with Adam", 4.0),
        "copies": Param("str", "the ranks that build the full state dict: rank0 or all", "rank0"),
        "ranks": Param("int", "number of ranks on this host, for copies=all", 8),
    },
    experiments=(
        rlimit.on_gpus(expect=GPU_OOM, gpu_memory_mib=GPU_MIB),
        rlimit,
    ),
    variants=(in_shards,),
)

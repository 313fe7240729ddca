"""Two nodes train with DDP over a link whose rate is limited; each micro-batch computes for 0.1 s."""

from __future__ import annotations

import os
import re
import subprocess
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping

from kb.namespaces import join_nodes, own_network, run_two_nodes
from kb.nccl import nccl_setting
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
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)

NIC = "kb0"  # the name of the cable's end on each node
WIDTH, MICRO_BATCHES, COMPUTE_S, TOO_SLOW = 1024, 4, 0.1, 4.8
MEGABYTES = WIDTH * WIDTH * 4 / 1e6


def train_on_two_nodes(ctx: Context, *, modelled: bool = False, **options: Any) -> None:
    """Trains on two nodes that a cable connects; if `modelled`, on two ranks that pause as long as the bytes take."""
    if modelled:
        train(ctx, modelled=True, **options)
    else:
        run_two_nodes(ctx, partial(train, **options))


def connect(node: Context, mbit: int) -> None:
    """Connects the two nodes by a cable of this rate; 0 does not limit the rate."""
    own_network()
    join_nodes(node, NIC)
    os.environ["GLOO_SOCKET_IFNAME"] = NIC
    if not mbit:
        return
    options = ["dev", NIC, "root", "tbf", "rate", "%dmbit" % mbit, "burst", "64kb", "latency", "400ms"]
    ran = subprocess.run(["tc", "qdisc", "add", *options], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Unavailable("tc cannot limit the rate of a link here: %s" % ran.stderr.strip())


def pause_for_bytes(model: Any, mbit: int) -> None:
    """Before each all-reduce, DDP pauses for as long as the bucket would take on a link of this rate."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def pause(group: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        time.sleep(buffer.numel() * buffer.element_size() * 8 / 1e6 / mbit if mbit else 0)
        return default_hooks.allreduce_hook(group, bucket)

    pause.__annotations__.clear()  # torch rejects annotations that are not its own types
    model.register_comm_hook(None, pause)


def compute(model: Any, batch: Any) -> Any:
    time.sleep(COMPUTE_S)
    return model(batch).sum()


class Timer:
    """Measures the seconds per micro-batch between optimizer steps, and checks that each gradient is averaged."""

    def __init__(self, model: Any, optimizer: Any, accumulation: int) -> None:
        self.weight, self.accumulation = next(model.parameters()), accumulation
        self.seconds: List[float] = []
        self.started = time.monotonic()
        optimizer.register_step_pre_hook(self.stop)
        optimizer.register_step_post_hook(self.restart)

    def stop(self, *_: Any) -> None:
        import torch

        self.seconds.append((time.monotonic() - self.started) / self.accumulation)
        gradient = self.weight.grad
        assert gradient is not None and torch.allclose(gradient, torch.full_like(gradient, 4 * 1.5)), gradient

    def restart(self, *_: Any) -> None:
        self.started = time.monotonic()


def train(node: Context, *, mbit: int = 80, accumulation: int = 1, bucket_mb: int = 25, modelled: bool = False) -> None:
    """Four micro-batches, the same in every arm."""
    if not modelled:
        connect(node, mbit)
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    node.init_process_group(timeout_s=20)
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH, bias=False), bucket_cap_mb=bucket_mb)
    if modelled:
        pause_for_bytes(model, mbit)
    forward = partial(compute, model)
    batch = torch.full((4, WIDTH), float(node.rank + 1))
    forward(batch).backward()  # DDP builds its buckets in the first step
    node.reached()
    loader = [batch] * MICRO_BATCHES
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    timer = Timer(model, optimizer, accumulation)
    optimizer.zero_grad()
    for window in zip(*[iter(loader)] * accumulation):
        for number, batch in enumerate(window):
            with nullcontext() if number == accumulation - 1 else model.no_sync():
                loss = forward(batch) / accumulation
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(timer.seconds) == MICRO_BATCHES // accumulation, timer.seconds
    judge(node, min(timer.seconds), mbit)  # the fastest, because other load on the machine only adds time


def judge(node: Context, seconds: float, mbit: int) -> None:
    node.note(seconds_per_micro_batch=round(seconds, 3))
    if seconds > TOO_SLOW * COMPUTE_S:
        measured = "a micro-batch takes %.2f s on two nodes and computes for %.2f s" % (seconds, COMPUTE_S)
        network = "%.1f MB of gradients at %d Mbit/s are %.2f s" % (MEGABYTES, mbit, MEGABYTES * 8 / max(mbit, 1))
        raise Symptom("%s; %s" % (measured, network))


def shard_in_nodes(ctx: Context, *, by_visible: bool) -> None:
    """FSDP 1 with HYBRID_SHARD on four ranks; torch sees one CPU, as it sees one GPU in a task that has only one."""
    dist = ctx.init_process_group(timeout_s=20)
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False)),
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=None if by_visible else mesh,
        device_id=torch.device("cpu"),
    )
    ctx.reached()
    model(torch.full((1, 4), float(ctx.rank + 1))).sum().backward()
    values: List[Any] = [None] * 4
    dist.all_gather_object(values, [round(float(p.grad.flatten()[0]), 3) for p in model.parameters()])
    gradients = [value for (value,) in values]
    if len(set(gradients)) > 1:
        raise Symptom("the ranks should have one gradient after backward and have %s" % gradients)
    assert gradients[0] == 2.5, gradients


def check(params: Mapping[str, Any]) -> Finding:
    """Compares what the links of this node can carry at best with what a step sends."""
    nodes = params["nodes"] or max(digits(os.environ.get(name, "")) for name in NODES)
    if params["nodes"] == 1:
        return clear("the job has one node, so its gradients cross no network between nodes")
    if nodes == 1:
        alone = "this allocation has one node, but kb does not know whether others join the job"
        return unknown(alone, advice="--set nodes=N")
    rdma, ethernet = rdma_ports(), ethernet_links()
    evidence = ["InfiniBand or RoCE ports that are up: %s" % (listed(rdma) or "none")]
    evidence.append("other links: %s" % (listed(ethernet) or "none whose speed kb can read"))
    forced = tcp_only(rdma)
    if forced:
        variables = ", ".join(forced)
        return exposed(*evidence, "%s makes NCCL use TCP" % variables, advice="unset it if the ports work")
    best = max(sum(rdma.values()), sum(ethernet.values()))
    if not best:
        return unknown(*evidence, "kb cannot read any link speed: the interfaces are virtual, or access is denied")
    trained, step_s, size = (params[name] or 0 for name in ("trained", "step_s", "bytes"))
    if not min(trained, step_s, size) > 0:
        advice = "--set trained=7 (billions of trained parameters) --set step_s=1.5 (one step on one node)"
        return unknown(*evidence, "the size of the model and the time of a step were not given", advice=advice)
    nodes = max(nodes, 2)
    at_least = 2 * (nodes - 1) / nodes * trained * size * 8 / best  # over all links, in each direction
    evidence.append("an all-reduce of the gradients takes at least %.2f s at %g Gbit/s" % (at_least, best))
    if at_least > step_s:
        advice = "accumulate gradients, shard within the node, or use a faster network"
        return exposed(*evidence, "a step on one node takes only %.2f s" % step_s, advice=advice)
    speed = "kb cannot see here which link NCCL uses and how fast it is"
    return unknown(*evidence, speed, advice="run all_reduce_perf on two nodes")


NODES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")
EFA = ("rdmap", "efa_")  # NCCL_IB_DISABLE has no effect on these, because NCCL uses them through a plugin


def tcp_only(rdma: Mapping[str, float]) -> List[str]:
    """The settings that make NCCL use TCP although the node has RDMA ports."""
    (disable, disable_origin), (net, net_origin) = nccl_setting("NCCL_IB_DISABLE"), nccl_setting("NCCL_NET")
    verbs = any(not port.startswith(EFA) for port in rdma)
    settings = ["NCCL_IB_DISABLE=%s (%s)" % (disable, disable_origin)] if verbs and digits(disable) else []
    return settings + (["NCCL_NET=%s (%s)" % (net, net_origin)] if rdma and net.lower() == "socket" else [])


def digits(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() else 0


def listed(links: Mapping[str, float]) -> str:
    return ", ".join("%s %g Gbit/s" % link for link in sorted(links.items()))


def read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def rdma_ports() -> Dict[str, float]:
    """Gbit/s of the active ports. A port's `rate` file has "200 Gb/sec (4X HDR)", its `state` file "4: ACTIVE"."""
    ports: Dict[str, float] = {}
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", read(port / "rate"))
        if rate and "ACTIVE" in read(port / "state"):
            ports["%s:%s" % (port.parts[-3], port.name)] = float(rate.group(1))
    return ports


def ethernet_links() -> Dict[str, float]:
    """Gbit/s of the links that are up.

    Leaves out links without a `device`, which are software: a container's veth always reports 10 Gbit/s, and a bridge
    or bond repeats the speed of other links.
    """
    links: Dict[str, float] = {}
    for link in sorted(Path("/sys/class/net").glob("*")):
        up = read(link / "operstate").strip() == "up" and os.path.exists(str(link / "device"))
        speed = digits(read(link / "speed").strip())
        if up and speed:
            links[link.name] = speed / 1000
    return links


CABLE = "two machines with GPUs and nccl; here two networks of this host, a cable of limited rate, gloo, and a sleep"
SLOW = r"a micro-batch takes \d\.\d\d s on two nodes and computes for 0\.10 s; 4\.2 MB of gradients at 80 Mbit/s are"


def pair(name: str, because: str, fix: str, change: Mapping[str, Any], **common: Any) -> Experiment:
    """`change` holds the keyword of the fix and its value; the control arm uses the keyword's default."""
    modelled = "modelled" in common
    fidelity, stands_for = ("model", PAUSE) if modelled else ("stand-in", CABLE)
    treatment = partial(train_on_two_nodes, **common, **change)
    return Experiment(
        name=name,
        control=Arm(partial(train_on_two_nodes, **common), symptom(SLOW), because, fidelity, stands_for),
        treatment=Arm(treatment, completed(), fix, fidelity, stands_for),
        world_size=2 if modelled else 1,
        needs=Needs(packages={"torch": ">=2.1"}, programs=() if modelled else ("tc",)),
        expected_s=(3.0, 2.0),
    )


PAUSE = "the network between two nodes; here DDP pauses for as long as the bytes of a bucket would take"
ALL = "each micro-batch sends all gradients over a slow link"
ONCE = "the ranks send the gradients once in four micro-batches"
FAST = "each micro-batch sends all gradients over a link without a limit"

probe = Probe(
    params={
        "nodes": Param("int", "number of nodes of the job (default: from the launcher's variables)"),
        "trained": Param("float", "number of trained parameters, in billions"),
        "bytes": Param("float", "bytes per gradient element: 2 for bf16, 4 for fp32", 2.0),
        "step_s": Param("float", "seconds that a step takes on one node"),
    },
    check=check,
    experiments=(
        pair("link", ALL, FAST, {"mbit": 0}),
        pair("model", ALL, FAST, {"mbit": 0}, modelled=True),
    ),
    variants=(
        pair("accumulation", ALL, ONCE, {"accumulation": 4}),
        pair(
            "buckets",
            "larger buckets do not help: each micro-batch still sends all gradients over a slow link",
            ONCE,
            {"accumulation": 4},
            bucket_mb=200,
        ),
        Experiment(
            name="shard-groups",
            control=Arm(
                partial(shard_in_nodes, by_visible=True),
                symptom(r"the ranks should have one gradient after backward and have \[\d\.\d+, "),
                because="torch sees one device, so HYBRID_SHARD makes each rank a shard group and averages nothing",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(shard_in_nodes, by_visible=False),
                completed(),
                because="a device mesh tells FSDP how many ranks a node has, and all ranks get the mean gradient",
                fidelity="cpu",
            ),
            world_size=4,
            needs=Needs(packages={"torch": ">=2.3"}),
            expected_s=(2.0, 2.0),
        ),
    ),
)

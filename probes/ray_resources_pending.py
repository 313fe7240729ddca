"""Ray reserves all bundles of a placement group or none, and waits forever for resources that the cluster lacks.

The GPUs of the probe's Ray cluster are only numbers, which Ray does not verify; no task uses a GPU.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Tuple

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    completed,
    exposed,
    symptom,
    unknown,
)

GPUS = 2
BUNDLES: List[Dict[str, float]] = [{"CPU": 1, "GPU": 1}] * GPUS


def wait_for_bundles(ctx: Context, *, cpus: int) -> None:
    """A table of free resources; the request for all bundles waits until the table has them."""
    free = {"CPU": float(cpus), "GPU": float(GPUS)}
    released = threading.Condition()
    needed = {name: sum(bundle[name] for bundle in BUNDLES) for name in free}
    ctx.reached()
    with released:
        granted = released.wait_for(lambda: all(free[name] >= needed[name] for name in needed), timeout=1.0)
    if not granted:
        raise Symptom(f"pending: {free['GPU']:g} of {GPUS} GPUs free, {needed['CPU']:g} CPUs needed, {cpus} present")
    assert needed == {"CPU": 2, "GPU": 2}


def isolate(ctx: Context) -> None:
    """Removes the user's settings of Ray, and puts its files and its home directory into the folder of the arm."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray would compare it with num_gpus
    os.environ.update(HOME=str(ctx.dir), RAY_TMPDIR=str(ctx.dir), RAY_USAGE_STATS_ENABLED="0")
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))  # others can reach its ports
    os.mkdir(ctx.path("ray"))


@contextmanager
def cluster(ctx: Context, cpus: int) -> Iterator[Any]:
    """A Ray cluster on this machine only."""
    isolate(ctx)
    import ray  # type: ignore[import-not-found]

    ray.init(
        address="local",
        num_cpus=cpus,
        num_gpus=GPUS,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        _temp_dir=str(ctx.dir),
    )
    try:
        yield ray
    finally:
        ray.shutdown()


def reserve(ray: Any, name: str) -> None:
    """Reserves GPUs as a trainer does when it starts, but with a time limit, which trainers lack."""
    groups = importlib.import_module("ray.util.placement_group")  # `ray.util` has a function of the same name
    group = groups.placement_group(BUNDLES, strategy="STRICT_PACK", name=name)
    if not group.wait(3):
        state = groups.placement_group_table(group)["stats"]["scheduling_state"]
        total, free = ray.cluster_resources(), ray.available_resources()
        gpus, cpus = (f"{free.get(key, 0):g} of {total.get(key, 0):g} {key}s" for key in ("GPU", "CPU"))
        raise Symptom(f"pending, {state}: {gpus} and {cpus} are free, 2 GPUs and 2 CPUs needed")


def reserve_with_cpus(ctx: Context, *, cpus: int) -> None:
    """Reserves two GPUs and a CPU for each, in a cluster with this number of CPUs."""
    with cluster(ctx, cpus) as ray:
        ctx.reached()
        reserve(ray, "global_pool")


EARLIER_JOB = """
import sys
import ray
from ray.util.placement_group import placement_group

ray.init(address=sys.argv[1], log_to_driver=False)
group = placement_group([{"GPU": 1}] * 2, name="left_over", lifetime="detached")
assert group.wait(30)
print(group.id.hex())
"""


def reserve_after_job(ctx: Context, *, removes: bool) -> None:
    """An earlier job ends and leaves a detached placement group behind; then the next job starts."""
    with cluster(ctx, 2) as ray:
        command = [sys.executable, "-c", EARLIER_JOB, ray.get_runtime_context().gcs_address]
        group_id = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=90).stdout.split()[-1]
        ctx.reached()
        if removes:
            from ray._raylet import PlacementGroupID  # type: ignore[import-not-found]
            from ray.util.placement_group import PlacementGroup  # type: ignore[import-not-found]

            ended = [job["IsDead"] for job in ray._private.state.jobs() if job["JobID"] == group_id[-8:]]
            assert ended == [True], "the job that made this group still runs"
            ray.util.remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
        reserve(ray, "global_pool")


def reserve_on_nodes(ctx: Context, *, nodes: int) -> None:
    """Reserves a group for each of two nodes, as with `trainer.nnodes=2`, in a cluster of one node or two."""
    isolate(ctx)
    import ray
    from ray.cluster_utils import Cluster  # type: ignore[import-not-found]

    node = {"num_cpus": 2, "num_gpus": GPUS, "object_store_memory": 80 << 20, "include_dashboard": False}
    ray_cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(nodes - 1):
            ray_cluster.add_node(**node)
        ray.init(address=ray_cluster.address, log_to_driver=False)
        ctx.reached()
        for name in ("global_pool:0", "global_pool:1"):
            reserve(ray, name)
    finally:
        ray.shutdown()
        ray_cluster.shutdown()


# --- the check: does `ray status` show a request that the cluster cannot meet, and what did Ray find on this node? ---

N = r"(\d{1,9}(?:\.\d+)?)"
USAGE = re.compile(rf"^\s*{N}/{N} (\S+)(?: \({N} used of {N} reserved)?", re.MULTILINE)
DEMAND = re.compile(r"^\s*(\{.*\}.*): \d+\+ pending (placement groups|tasks/actors)", re.MULTILINE)
RESOURCES = re.compile(r"--static_resource_list=(\S+)")
COUNTED = re.compile(r"\{([^{}]*)\}(?: \* (\d{1,6})\b)?")


def check(params: Mapping[str, Any]) -> Finding:
    """Reads a saved `ray status`, or else the resources with which the raylet of this node was started."""
    if not params["status"]:
        return check_node()
    try:
        text = params["status"].read_text(errors="replace")
    except OSError as error:
        return unknown(f"{params['status']}: {error.strerror}")
    if "Node status" not in text or "Demands:" not in text:
        return unknown(f"{params['status']} is not the output of ray status")
    total, free = {}, {}
    usage = text.split("Usage:", 1)[-1].split("Demands:", 1)[0]  # below, `ray status -v` repeats it for each node
    for used, there, name, inside, reserved in USAGE.findall(usage):
        # `used` includes what jobs use inside groups, but not the rest that the groups reserve
        total[name] = float(there)
        free[name] = float(there) - float(used) + float(inside or 0) - float(reserved or 0)
    nodes = text.split("Node status", 1)[1].split("Pending:", 1)[0]  # active nodes, and idle ones if Ray lists them
    evidence = [f"nodes: {sum(map(int, re.findall(r'^ *([0-9]{1,6}) ', nodes, re.MULTILINE)))}"]
    evidence += [f"{free[name]:g} of {total[name]:g} {name} free" for name in total]
    demands = DEMAND.findall(text)
    if not demands or not total:
        why = "no pending demand: Ray granted it, the job has not made it yet, or the job uses another cluster"
        advice = "compare the cluster's address with the driver's log, and run py-spy dump on the actors"
        return unknown(*evidence, why, advice=advice)
    evidence += [f"pending {kind}: {bundles}" for bundles, kind in demands]
    if "(no pending nodes)" not in text:
        return unknown(*evidence, "nodes are starting: run `ray status` again when they have joined")
    for bundles, kind in demands:
        needed: Dict[str, float] = {}
        for bundle, count in COUNTED.findall(bundles):
            for name, amount in re.findall(rf"'([^']+)': {N}", bundle):
                needed[name] = needed.get(name, 0) + float(amount) * int(count or 1)
        for name in sorted({"CPU", "GPU", "NPU", *total} & set(needed)):
            if needed[name] > total.get(name, 0):
                why = f"the job needs {needed[name]:g} {name}, the whole cluster has {total.get(name, 0):g}"
                advice = "add nodes, give `ray start` the true numbers, or request less"
                return exposed(*evidence, why, advice=advice)
            if needed[name] > free[name] + 1e-6 and (kind != "tasks/actors" or "GPU" in needed):
                why = (
                    f"the job needs {needed[name]:g} {name}, {free[name]:g} are free: other jobs or groups use the rest"
                )
                advice = "find what uses them: ray list placement-groups, ray list actors, ray job list"
                return exposed(*evidence, why, advice=advice)
    why = "the cluster has enough in total, but a bundle must fit on one node, and STRICT_PACK puts all on one node"
    return unknown(*evidence, why, advice="compare the bundles with the nodes: ray list nodes")


def check_node() -> Finding:
    """Compares the resources in the command line of the raylet with the cards of this container or host."""
    found = [match[1].split(",") for match in map(RESOURCES.search, command_lines()) if match]
    if not found:
        why = "kb sees no raylet: Ray does not run on this node, or it runs for another user"
        advice = "run `ray status > FILE` on a node of the cluster, then use --set status=FILE"
        return unknown(why, advice=advice)
    cards = len(list(Path("/dev").glob("nvidia[0-9]*")))
    offers = [dict(zip(words[::2], words[1::2])) for words in found]
    evidence = [f"Ray offers {offer.get('CPU', 0)} CPU and {offer.get('GPU', 0)} GPU of this node" for offer in offers]
    evidence.append(f"{cards} cards in /dev")
    if cards and not any("GPU" in offer for offer in offers):
        why = "Ray found no card, was started with --num-gpus=0, or may not use the cards"
        advice = "look at nvidia-smi and CUDA_VISIBLE_DEVICES in the shell that runs `ray start`"
        return unknown(*evidence, why, advice=advice)
    advice = "run `ray status > FILE` while the job waits, then use --set status=FILE"
    return unknown(*evidence, "kb cannot see on this node what the job requests", advice=advice)


def command_lines() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if words[0].endswith(b"/raylet"):
                yield b" ".join(words).decode("utf-8", "replace")


TABLE = "Ray's scheduler, which reserves all bundles of a group or none; a table of free resources does the same"


def in_ray(name: str, control: Any, treatment: Any, pattern: str, because: Tuple[str, str]) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, symptom(pattern), because[0], "cpu"),
        treatment=Arm(treatment, completed(), because[1], "cpu"),
        world_size=1,
        needs=Needs(packages={"ray": ">=2.9"}, memory_mib=2048),
        deadline_s=150,
        expected_s=(10.0, 8.0),
    )


probe = Probe(
    check=check,
    params={"status": Param("path", "saved output of `ray status`, taken while the job waits, for the check")},
    experiments=(
        Experiment(
            name="bundles",
            control=Arm(
                partial(wait_for_bundles, cpus=1),
                symptom(r"pending: 2 of 2 GPUs free, 2 CPUs needed, 1 present"),
                "two GPUs are free, but the bundles need two CPUs as well, and the node has only one",
                "stand-in",
                TABLE,
            ),
            treatment=Arm(
                partial(wait_for_bundles, cpus=2),
                completed(),
                "the node has the two CPUs that the bundles need",
                "stand-in",
                TABLE,
            ),
            world_size=1,
            needs=Needs(packages={}),
            expected_s=(1.2, 0.2),
        ),
    ),
    variants=(
        in_ray(
            "cpus",
            partial(reserve_with_cpus, cpus=1),
            partial(reserve_with_cpus, cpus=2),
            r"pending, INFEASIBLE: 2 of 2 GPUs and 1 of 1 CPUs are free, 2 GPUs and 2 CPUs needed",
            (
                "the group needs two GPUs and two CPUs, and the node offers only one CPU",
                "the node offers two CPUs",
            ),
        ),
        in_ray(
            "left-over",
            partial(reserve_after_job, removes=False),
            partial(reserve_after_job, removes=True),
            r"pending, NO_RESOURCES: 0 of 2 GPUs and 2 of 2 CPUs are free",
            (
                "a detached placement group of a job that has ended keeps both GPUs",
                "the next job removes the placement group of the ended job first",
            ),
        ),
        in_ray(
            "nodes",
            partial(reserve_on_nodes, nodes=1),
            partial(reserve_on_nodes, nodes=2),
            r"pending, NO_RESOURCES: 0 of 2 GPUs and 0 of 2 CPUs are free",
            (
                "the job reserves a group for each of two nodes, and the second node has not joined",
                "both nodes have joined, so each gets a group",
            ),
        ),
    ),
)

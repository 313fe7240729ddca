"""Two pipeline stages that must send to each other both receive first, so neither sends."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List, Mapping

from kb.probe import (
    GLOO_TIMEOUT,
    NCCL2_TIMEOUT,
    Arm,
    Context,
    Expect,
    Experiment,
    Needs,
    Probe,
    Symptom,
    completed,
    raised,
    symptom,
)


def exchange(
    ctx: Context,
    *,
    batched: bool = False,
    even_sends_first: bool = False,
    receive_first: bool = True,
    barrier: bool = False,
) -> None:
    """One step of the steady phase: each rank sends a tensor to its peer and receives one from it."""
    import torch

    dist = ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    rank = dist.get_rank()
    peer = 1 - rank
    output = torch.full((4,), rank + 1.0, device=ctx.device)
    received = torch.zeros_like(output)
    ctx.reached()
    if barrier:
        dist.barrier()
    if batched:
        operations = [dist.P2POp(dist.isend, output, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    elif even_sends_first:
        if rank % 2 == 0:
            dist.send(output, peer)
            dist.recv(received, peer)
        else:
            dist.recv(received, peer)
            dist.send(output, peer)
    elif receive_first:
        dist.recv(received, peer)
        dist.send(output, peer)
    else:
        dist.send(output, peer)
        dist.recv(received, peer)
    values = received.tolist()
    ctx.meet("exchanged")
    assert values == [2.0 - rank] * 4, values


def pair_by_order(ctx: Context, *, mirrored: bool) -> None:
    """Two stages on each of two ranks: the previous and the next stage are on one peer, which gets two messages."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    rank = dist.get_rank()
    peer = 1 - rank
    activation = torch.full((4,), 10.0 + rank, device=ctx.device)
    gradient = torch.full((4,), -1.0 - rank, device=ctx.device)
    activation_in, gradient_in = torch.zeros_like(activation), torch.zeros_like(gradient)
    ctx.reached()
    previous = [dist.P2POp(dist.isend, gradient, peer), dist.P2POp(dist.irecv, activation_in, peer)]
    following = [dist.P2POp(dist.isend, activation, peer), dist.P2POp(dist.irecv, gradient_in, peer)]
    operations = following + previous if mirrored and rank % 2 else previous + following
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    values = [activation_in[0].item(), gradient_in[0].item()]
    ctx.meet("exchanged")
    if values[0] < 0:
        raise Symptom(f"rank {rank} got the gradient {values[0]:.0f} as its activation, without an error")
    assert values == [10.0 + peer, -1.0 - peer], values


def make_groups(ctx: Context, *, same_order: bool) -> None:
    """Creates a group for activations and one for gradients; rank 1 may create them in the opposite order."""
    from datetime import timedelta

    import torch

    dist = ctx.init_process_group(timeout_s=2)
    ranks, timeout, groups = [0, 1], timedelta(seconds=2), {}
    for name in ("forward", "backward") if same_order or ctx.rank == 0 else ("backward", "forward"):
        groups[name] = dist.new_group(ranks, timeout=timeout)
    output = torch.ones(4, device=ctx.device)
    received = torch.zeros_like(output)
    ctx.reached()
    if ctx.rank == 0:
        dist.send(output, 1, group=groups["forward"])
    else:
        dist.recv(received, 0, group=groups["forward"])
        assert received.tolist() == [1.0] * 4
    ctx.meet("sent")


def run_out(ctx: Context, *, agreed: bool) -> None:
    """The first and the last stage read their own data, and the first has one batch fewer."""
    import itertools

    import torch

    dist = ctx.init_process_group(timeout_s=2)
    rank, device = dist.get_rank(), ctx.device
    loader = torch.utils.data.DataLoader([1.0] * (2 + rank))
    ctx.reached()
    steps = torch.tensor([len(loader)], device=device)
    if agreed:
        dist.all_reduce(steps, op=dist.ReduceOp.MIN)
    batches = itertools.islice(loader, int(steps))
    for batch in batches:
        hidden = torch.full((4,), float(batch), device=device)
        if rank == 0:
            dist.send(hidden, 1)
        else:
            dist.recv(hidden, 0)
    ctx.meet("trained", timeout_s=10)
    assert int(steps) == 2, steps


def schedule(ctx: Context, *, microbatches: int = 2, one_f_one_b: bool = True, every_stage: bool = True) -> None:
    """Two stages of torch.distributed.pipelining, whose loss must be that of both layers in one process."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    from torch.nn.functional import mse_loss

    dist = ctx.init_process_group(timeout_s=3)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    samples = torch.ones(4, 4)
    expected = mse_loss(layers[1](layers[0](samples)), samples).item()
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    ctx.reached()
    kind: Any = Schedule1F1B if one_f_one_b else ScheduleGPipe
    pipeline = kind(stage, microbatches, loss_fn=mse_loss)
    losses: List[Any] = []

    def call(run: Callable[..., Any]) -> None:
        if rank == last:
            run(target=samples, losses=losses)
        else:
            run(samples)

    if every_stage or rank == last:
        call(pipeline.eval)
    call(pipeline.step)
    ctx.meet("trained", timeout_s=10)
    if rank == last:
        assert abs(sum(float(loss) for loss in losses) / microbatches - expected) < 1e-5, losses


RECEIVE = raised(GLOO_TIMEOUT)
BOTH_RECEIVE = "both stages receive first, so neither reaches its send"
BATCHED = "each stage passes its send and its receive to batch_isend_irecv"

gloo = Experiment(
    name="gloo",
    control=Arm(partial(exchange, batched=False), expect=RECEIVE, because=BOTH_RECEIVE, fidelity="cpu"),
    treatment=Arm(partial(exchange, batched=True), expect=completed(), because=BATCHED, fidelity="cpu"),
    expected_s=(2.4, 0.3),
)


def variant(
    name: str,
    job: Callable[..., None],
    change: Mapping[str, Any],
    because: str,
    fix: str,
    expect: Expect = RECEIVE,
    torch: str = ">=2.1",
) -> Experiment:
    """`change` is the argument that the treatment arm adds to the job."""
    return Experiment(
        name=name,
        control=Arm(job, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **change), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": torch}),
        expected_s=(2.4, 0.5),
    )


BOTH_SEND = raised(r"Timed out waiting \d+ms for send operation|Application timeout caused pair closure")
TOO_FEW = raised(r"Number of microbatches \(1\) must be greater than or equal to the number of stages \(2\)")

probe = Probe(
    experiments=(
        gloo.on_gpus(
            expect=raised(rf"Watchdog caught collective operation timeout: WorkNCCL\(.*OpType=RECV|{NCCL2_TIMEOUT}")
        ),
        gloo,
    ),
    variants=(
        variant(
            "send-first",
            partial(exchange, receive_first=False),
            {"even_sends_first": True},
            "both stages send first, and the send of gloo waits for the receiver",
            "even ranks send first, odd ranks receive first",
            BOTH_SEND,
        ),
        variant(
            "barrier",
            partial(exchange, barrier=True),
            {"batched": True},
            "both stages pass a barrier, then both receive first, so neither reaches its send",
            BATCHED,
        ),
        variant(
            "two-for-one-peer",
            partial(pair_by_order, mirrored=False),
            {"mirrored": True},
            "both ranks list the previous stage first, so each takes the gradient of the other for its activation",
            "odd ranks list the next stage first, so the messages match",
            symptom(r"rank \d got the gradient -\d as its activation, without an error"),
        ),
        variant(
            "group-order",
            partial(make_groups, same_order=False),
            {"same_order": True},
            "rank 1 creates the two groups in the opposite order, so send and receive use different groups",
            "both ranks create the groups in the same order",
        ),
        variant(
            "steps",
            partial(run_out, agreed=False),
            {"agreed": True},
            "the first stage has one batch fewer than the last, which waits for it",
            "the stages agree on the smallest number of batches",
        ),
        variant(
            "microbatches",
            partial(schedule, microbatches=1),
            {"microbatches": 2},
            "1F1B has one microbatch for two stages",
            "1F1B has as many microbatches as stages",
            TOO_FEW,
            ">=2.13",
        ),
        variant(
            "schedule-eval",
            partial(schedule, microbatches=1, one_f_one_b=False, every_stage=False),
            {"every_stage": True},
            "only the last stage calls eval, which receives what the first stage sends for its step",
            "every stage calls eval before the step",
            torch=">=2.13",
        ),
    ),
)

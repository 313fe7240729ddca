"""Every decoding step of a sharded model is a collective, and a rank stops decoding when its answer is complete."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, List, Tuple

from kb.cpu_arms import import_deepspeed
from kb.probe import (
    GLOO_TIMEOUT,
    NCCL2_TIMEOUT,
    Arm,
    Context,
    Experiment,
    Needs,
    Probe,
    Symptom,
    completed,
    raised,
    symptom,
)

LENGTHS = (2, 5)  # tokens in the answer of rank 0 and of rank 1


def decode(ctx: Context, *, stop: str, ranks: Tuple[int, ...] = (0, 1), barrier: bool = False) -> None:
    """Runs a custom decoding loop on a sharded model, and compares its answer with that of the unsharded model.

    `stop` says when a rank leaves the loop: `complete`, at the end of its own answer; `all complete`, when all answers
    are complete; `fixed`, after a fixed number of steps. A rank keeps only the tokens of its answer. Ranks that are not
    in `ranks` do not generate, as under `if is_main_process`.
    """
    import torch
    from torch import nn

    dist = ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    torch.manual_seed(0)
    device, length = ctx.device, LENGTHS[ctx.rank]
    model: Any = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)).to(device)
    expected = answer(model, device, length)
    model = shard(ctx, model)
    ctx.reached()
    tokens: List[int] = []
    forwards = 0
    ids = torch.tensor([1], device=device)
    with torch.no_grad():
        while ctx.rank in ranks:
            done = len(tokens) == length
            if stop == "all complete":
                ctx.note(waits_in="the flag", forwards=forwards)
                unfinished = torch.tensor(0.0 if done else 1.0, device=device)
                dist.all_reduce(unfinished)
                if unfinished.item() == 0:
                    break
            elif forwards == max(LENGTHS) if stop == "fixed" else done:
                break
            logits = model(ids)
            ids = logits.argmax(-1)
            forwards += 1
            if not done:
                tokens.append(int(ids.item()))
            ctx.note(tokens=tokens, forwards=forwards)
    if barrier:
        dist.barrier()
    ctx.meet("generated", timeout_s=15)  # a rank that is done stays alive, as in training
    assert tokens == expected or ctx.rank not in ranks, (tokens, expected)


def shard(ctx: Context, model: Any) -> Any:
    """Shards each layer with FSDP2, or with FSDP1 before torch 2.7, whose FSDP2 needs CUDA."""
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7):
        return fsdp1(ctx, model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp1(ctx: Context, model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrap = partial(FullyShardedDataParallel, use_orig_params=True, device_id=ctx.device)
    for index, layer in enumerate(model):
        model[index] = wrap(layer)
    return wrap(model)


def summon(ctx: Context, *, until_all_complete: bool) -> None:
    """Runs a decoding loop inside FSDP1's summon_full_params."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist = ctx.init_process_group(timeout_s=2)
    model = fsdp1(ctx, nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)))
    ids, forwards = torch.tensor([1]), 0
    ctx.reached()
    with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model, writeback=False):
        while True:
            unfinished = torch.tensor(float(forwards < LENGTHS[ctx.rank]))
            if until_all_complete:
                dist.all_reduce(unfinished)
            if unfinished.item() == 0:
                break
            ids = model(ids).argmax(-1)
            forwards += 1
        ctx.note(forwards=forwards)
        ctx.meet("generated", timeout_s=15)


def answer(model: Any, device: Any, length: int) -> List[int]:
    """The first `length` tokens that the unsharded model generates."""
    import torch

    tokens: List[int] = [1]
    while len(tokens) <= length:
        tokens.append(int(model(torch.tensor(tokens[-1:], device=device)).argmax().item()))
    return tokens[1:]


def generate(ctx: Context, *, synced_gpus: bool) -> None:
    """Calls generate() of transformers on a ZeRO-3 model without an HfDeepSpeedConfig, on CPU and gloo."""
    import torch

    deepspeed = import_deepspeed()
    transformers: Any = importlib.import_module("transformers")
    ctx.init_process_group(timeout_s=2)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=None)).eval()
    prompt = torch.tensor([[1, 2, 3]])
    batch = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    options = {"do_sample": False, "max_new_tokens": LENGTHS[ctx.rank], "pad_token_id": 0}
    expected = model.generate(**batch, **options).tolist()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}  # 0: shard the small weights too
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    model = engine.module
    ctx.reached()
    if synced_gpus:
        out = model.generate(**batch, synced_gpus=True, **options)
    else:
        out = model.generate(**batch, **options)
    ctx.note(new_tokens=len(out[0]) - 3)
    ctx.meet("generated", timeout_s=15)
    assert out.tolist() == expected, (out.tolist(), expected)


def overrun(ctx: Context, *, limit: str) -> None:
    """Generates with synced_gpus and prompts of different length, with a limit for the whole or for the new tokens."""
    import torch

    transformers: Any = importlib.import_module("transformers")
    ctx.init_process_group(timeout_s=20)
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=None)).eval()
    prompt = torch.arange(2, 12 if ctx.rank == 0 else 5)[None]
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
    options[limit] = 15 if limit == "max_length" else 5
    expected = model.generate(prompt, synced_gpus=False, **options).tolist()
    ctx.reached()
    try:
        out = model.generate(prompt, synced_gpus=True, **options).tolist()
    except IndexError as error:
        raise Symptom(f"a rank that was done ran past its length with synced_gpus: {error}") from error
    assert out == expected, (out, expected)


GLOO = raised(GLOO_TIMEOUT)
ALONE = "rank 0's answer ends after two tokens, so rank 1 gathers the weights alone in its third step"
TOGETHER = "a rank whose answer is complete calls the model until all answers are complete, and ignores the output"

AT_ONCE = Arm(partial(decode, stop="complete"), expect=GLOO, because=ALONE, fidelity="cpu")
ALL_TOGETHER = Arm(partial(decode, stop="all complete"), expect=completed(), because=TOGETHER, fidelity="cpu")

gloo = Experiment(name="gloo", control=AT_ONCE, treatment=ALL_TOGETHER, expected_s=(2.4, 0.3))
one_rank = Experiment(
    name="one-rank",
    control=Arm(
        partial(decode, stop="all complete", ranks=(1,)),
        expect=GLOO,
        because="rank 1 all-reduces a flag before each step, but rank 0 does not generate",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(decode, stop="all complete"),
        expect=completed(),
        because="both ranks generate, even if the caller needs only one result",
        fidelity="cpu",
    ),
    expected_s=(2.4, 0.3),
)
fixed_length = Experiment(
    name="fixed-length",
    control=AT_ONCE,
    treatment=Arm(
        partial(decode, stop="fixed"),
        expect=completed(),
        because="every rank makes the same number of steps and keeps only the tokens of its answer",
        fidelity="cpu",
    ),
    expected_s=(2.4, 0.3),
)
barrier_after = Experiment(
    name="barrier",
    control=Arm(
        partial(decode, stop="complete", barrier=True),
        expect=GLOO,
        because="rank 0 is done and waits in a barrier after the loop, while rank 1 waits for rank 0's weights",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(decode, stop="all complete", barrier=True), expect=completed(), because=TOGETHER, fidelity="cpu"
    ),
    expected_s=(2.4, 0.3),
)
summoned = Experiment(
    name="summon",
    control=Arm(
        partial(summon, until_all_complete=False),
        expect=GLOO,
        because="each forward still gathers weights inside summon_full_params, and rank 0 leaves the loop first",
        fidelity="cpu",
    ),
    treatment=Arm(partial(summon, until_all_complete=True), expect=completed(), because=TOGETHER, fidelity="cpu"),
    needs=Needs(packages={"torch": ">=2.5"}),  # 2.2.2 raises "Expects storage to be allocated" in the forward
    expected_s=(2.4, 0.3),
)
zero3 = Experiment(
    name="deepspeed",
    control=Arm(partial(generate, synced_gpus=False), expect=GLOO, because=ALONE, fidelity="cpu"),
    treatment=Arm(partial(generate, synced_gpus=True), expect=completed(), because=TOGETHER, fidelity="cpu"),
    needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.14", "transformers": ">=4.39"}),
    deadline_s=90,
    expected_s=(8, 6),
)
too_long = Experiment(
    name="max-length",
    control=Arm(
        partial(overrun, limit="max_length"),
        expect=symptom(r"ran past its length with synced_gpus: index out of range in self"),
        because="rank 0 is done after 5 tokens, but runs 12 steps with rank 1, past the 16 positions of the model",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(overrun, limit="max_new_tokens"),
        expect=completed(),
        because="with the same max_new_tokens no rank runs past the length that it asked for",
        fidelity="cpu",
    ),
    needs=Needs(packages={"torch": ">=2.1", "transformers": ">=5.0"}),
    deadline_s=90,
    expected_s=(8, 8),
)

probe = Probe(
    experiments=(
        gloo.on_gpus(expect=raised(rf"Watchdog caught collective operation timeout: WorkNCCL\(|{NCCL2_TIMEOUT}")),
        gloo,
    ),
    variants=(one_rank, fixed_length, barrier_after, summoned, zero3, too_long),
)

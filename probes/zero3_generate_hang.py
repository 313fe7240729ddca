"""Every decoding step of a sharded model is a collective, and a rank whose answer is complete makes no more of them."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, List, Tuple

from kb.cpu_arms import import_deepspeed
from kb.probe import GLOO_TIMEOUT, Arm, Context, Experiment, Needs, Probe, completed, raised

LENGTHS = (2, 5)  # tokens of the answer, rank by rank


def decode(ctx: Context, *, until_all_complete: bool, ranks: Tuple[int, ...] = (0, 1)) -> None:
    """A hand-written decoding loop over an FSDP2 model. Only the tokens before the end of an answer are kept.

    Ranks that are not in `ranks` do not generate, as under `if is_main_process`.
    """
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist = ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)).to(ctx.device)
    expected = answer(model, ctx.device, LENGTHS[ctx.rank])
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ctx.reached()
    tokens: List[int] = []
    forwards = 0
    last = 1
    with torch.no_grad():
        while ctx.rank in ranks:
            is_complete = len(tokens) == LENGTHS[ctx.rank]
            if until_all_complete:
                unfinished = torch.tensor(0.0 if is_complete else 1.0, device=ctx.device)
                ctx.note(waits_in="the flag", forwards=forwards)
                dist.all_reduce(unfinished)
                if unfinished.item() == 0:
                    break
            elif is_complete:
                break
            last = int(model(torch.tensor([last], device=ctx.device)).argmax().item())
            forwards += 1
            if not is_complete:
                tokens.append(last)
            ctx.note(tokens=tokens, forwards=forwards)
    ctx.meet("generated", timeout_s=15)  # the rank that is done is alive and busy elsewhere, as in training
    assert tokens == expected or ctx.rank not in ranks, (tokens, expected)


def answer(model: Any, device: Any, length: int) -> List[int]:
    """The answer of the model when it is not sharded."""
    import torch

    tokens: List[int] = [1]
    while len(tokens) <= length:
        tokens.append(int(model(torch.tensor(tokens[-1:], device=device)).argmax().item()))
    return tokens[1:]


def generate(ctx: Context, *, synced_gpus: bool) -> None:
    """transformers' generate() on a DeepSpeed model without an HfDeepSpeedConfig, on CPU and gloo."""
    import torch

    deepspeed = import_deepspeed()
    transformers: Any = importlib.import_module("transformers")
    ctx.init_process_group(timeout_s=2)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=None)).eval()
    prompt = torch.tensor([[1, 2, 3]])
    options = {"do_sample": False, "max_new_tokens": LENGTHS[ctx.rank], "pad_token_id": 0}
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options).tolist()
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}  # shard small weights too
    engine = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})[
        0
    ]
    ctx.reached()
    if synced_gpus:
        options["synced_gpus"] = True
    got = engine.module.generate(prompt, attention_mask=torch.ones_like(prompt), **options).tolist()
    ctx.note(new_tokens=len(got[0]) - 3)
    ctx.meet("generated", timeout_s=15)
    assert got == expected, (got, expected)


GLOO = raised(GLOO_TIMEOUT)
ALONE = "rank 0's answer ends after two tokens, and rank 1's third step gathers weights alone"
TOGETHER = "a rank whose answer is complete goes on calling the model until all are, and drops what comes out"

gloo = Experiment(
    name="gloo",
    control=Arm(partial(decode, until_all_complete=False), expect=GLOO, because=ALONE, fidelity="cpu"),
    treatment=Arm(partial(decode, until_all_complete=True), expect=completed(), because=TOGETHER, fidelity="cpu"),
    needs=Needs(packages={"torch": ">=2.6"}),  # fully_shard under its public name
    expected_s=(2.4, 0.3),
)
one_rank = Experiment(
    name="one-rank",
    control=Arm(
        partial(decode, until_all_complete=True, ranks=(1,)),
        expect=GLOO,
        because="the flag is reduced before each step, and rank 0 does not generate",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(decode, until_all_complete=True),
        expect=completed(),
        because="both ranks generate, and the result of one is used",
        fidelity="cpu",
    ),
    needs=Needs(packages={"torch": ">=2.6"}),
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

probe = Probe(
    experiments=(gloo.on_gpus(expect=raised(r"Watchdog caught collective operation timeout: WorkNCCL\(")), gloo),
    variants=(one_rank, zero3),
)

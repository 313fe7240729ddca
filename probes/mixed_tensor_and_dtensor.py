"""One operation gets a sharded weight (DTensor) and a plain tensor: outside an FSDP2 unit, in a loss, or in a list."""

import warnings
from functools import partial
from typing import Any, Callable, Tuple

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

WORDS, WIDTH = 32, 16


def build() -> Any:
    import torch
    from torch import nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(WORDS, WIDTH)
            self.body = nn.Linear(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, WORDS, bias=False)

        def features(self, ids: Any) -> Any:
            return self.body(self.embed(ids))

        def forward(self, ids: Any, hidden: Any = None) -> Any:
            return self.head(self.features(ids) if hidden is None else hidden)

    return Net()


def start(ctx: Context, *names: str) -> Tuple[Any, Any, Any]:
    """A model, token ids of this rank and a mesh of both ranks; with two `names`, its second dimension has size 1."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    warnings.simplefilter("ignore")
    ctx.init_process_group(timeout_s=10)
    mesh = init_device_mesh(ctx.device.type, (2, 1)[: len(names)], mesh_dim_names=names)
    ids = torch.arange(10 * ctx.rank, 10 * ctx.rank + 10, device=ctx.device).view(2, 5)
    return build().to(ctx.device), ids, mesh


def call(ctx: Context, *, way: str) -> None:
    """Calls a method other than forward, as generation and evaluation do."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard, register_fsdp_forward_method

    model, ids, mesh = start(ctx, "dp")
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ctx.reached()
    if way in ("direct", "called"):
        logits = model.forward(ids) if way == "direct" else model(ids)
        assert torch.allclose(logits.cpu(), build()(ids.cpu()), atol=1e-5)
        return
    if way == "registered":
        register_fsdp_forward_method(model, "features")
        hidden = model.features(ids)
    elif way == "unshard":
        model.unshard()
        hidden = model.features(ids)
        model.reshard()
    elif way == "summon":
        with FullyShardedDataParallel.summon_full_params(model):
            hidden = model.features(ids)
    else:
        hidden = model.features(ids)
    assert torch.allclose(hidden.cpu(), build().features(ids.cpu()), atol=1e-5)


def generate(ctx: Context, *, registered: bool) -> None:
    """generate() of a LoRA model: the FSDP2 unit is the PeftModel, whose forward does not run when generate() does."""
    import torch
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    from transformers import GPT2Config, GPT2LMHeadModel  # type: ignore[import-not-found]

    _, ids, mesh = start(ctx, "dp")
    config = GPT2Config(n_embd=WIDTH, n_layer=1, n_head=2, vocab_size=WORDS, bos_token_id=0, eos_token_id=0)
    adapter = LoraConfig(target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    options = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(GPT2LMHeadModel(config).to(ctx.device), adapter).eval()
        if sharded:
            fully_shard(model, mesh=mesh)
            ctx.reached()
        if registered:
            register_fsdp_forward_method(model, "generate")
        results.append(model.generate(input_ids=ids, **options))
    assert torch.equal(*results)


def custom_loss(ctx: Context, *, way: str) -> None:
    """A loss reads the weight of the head; hidden states are 1 on rank 0, 2 on rank 1, so the mean gradient is 1.5."""
    import torch
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.nn import functional

    model, ids, mesh = start(ctx, "dp")
    fully_shard(model, mesh=mesh)
    hidden = torch.full((1, WIDTH), ctx.rank + 1.0, device=ctx.device)
    expected = build().head(hidden.cpu())
    ctx.reached()
    if way == "forward":
        logits = model(ids, hidden=hidden)  # forward() has self.head(hidden)
    elif way == "full":
        logits = functional.linear(hidden, model.head.weight.full_tensor())
    elif way == "implicit":
        with implicit_replication():
            logits = functional.linear(hidden, model.head.weight).full_tensor()
    else:
        logits = functional.linear(hidden, model.head.weight)
    if not torch.allclose(logits.cpu(), expected, atol=1e-5):
        raise Symptom("no error, and the logits of rank %d are not those of its input" % ctx.rank)
    logits.sum().backward()
    gradient = model.head.weight.grad.to_local()[0, 0].item()
    if abs(gradient - 1.5) > 1e-6:
        raise Symptom("no error, gradient %.1f in the piece of rank %d, the mean is 1.5" % (gradient, ctx.rank))


def left_out(ctx: Context, *, root: bool, clip: bool) -> None:
    """Without `root`, the embedding and the head are in no FSDP2 unit; the ranks have different inputs."""
    import torch
    from torch.distributed.fsdp import fully_shard

    model, ids, mesh = start(ctx, "dp")
    fully_shard(model.body, mesh=mesh)
    if root:
        fully_shard(model, mesh=mesh)
    model(ids).square().mean().backward()
    ctx.reached()
    if clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
    gradient = model.head.weight.grad.full_tensor() if root else model.head.weight.grad
    mean = gradient.clone()
    torch.distributed.all_reduce(mean)
    if not torch.allclose(mean / 2, gradient):
        raise Symptom("no error, and the gradient of rank %d is its own, not averaged" % ctx.rank)


def step(ctx: Context, *, separate: bool, names: Tuple[str, ...]) -> None:
    """The tensor-parallel plan has only the body; the other weights are plain, or FSDP2 shards them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, _, mesh = start(ctx, *names)
    plain, ids = build(), torch.arange(10, device=ctx.device).view(2, 5)
    lr, max_norm = 0.1, 1e-3
    parallelize_module(model, mesh["tp"], {"body": ColwiseParallel(output_layouts=Replicate())})
    if "dp" in names:
        fully_shard(model, mesh=mesh["dp"])
    model(ids).square().mean().backward()
    ctx.reached()
    if separate:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)
        params = [p for p in model.parameters() if p.grad is not None]
        assert mesh["tp"].size() == dist.get_world_size() or all(isinstance(p, DTensor) for p in params), "fix 3 first"
        norms = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in [p.grad.norm() for p in params]])
        most = norms.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=mesh["tp"].get_group())
        assert torch.allclose(most, norms, rtol=1e-2, atol=1e-6), "a gradient differs over tp: into the plan"
        factor = (max_norm / (norms.norm() + 1e-6)).clamp(max=1.0)
        for p in params:
            p.grad.mul_(factor)
    else:
        if "dp" in names:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, foreach=True)
    optimizer.step()
    plain(ids.cpu()).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    assert torch.allclose(norms.norm().cpu(), expected, rtol=1e-4)
    torch.optim.AdamW(plain.parameters(), lr=lr).step()
    assert torch.allclose(model(ids).cpu(), plain(ids.cpu()), atol=1e-3)


def heads(ctx: Context, *, planned: bool) -> None:
    """A norm after a split layer sees only the heads of its own rank; torch reports no error."""
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.q_proj, self.q_norm, self.o_proj = nn.Linear(16, 16), nn.LayerNorm(4), nn.Linear(16, 16)

        def forward(self, x: Any) -> Any:
            return self.o_proj(self.q_norm(self.q_proj(x).view(2, 5, -1, 4)).flatten(-2))

    _, _, mesh = start(ctx, "tp")
    model, plain = Attention().to(ctx.device), Attention()
    x = torch.randn(2, 5, 16)
    plan = {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
    if planned:
        plan["q_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    parallelize_module(model, mesh["tp"], plan)
    ctx.reached()
    for module, data in ((model, x.to(ctx.device)), (plain, x)):
        module(data).square().mean().backward()
    gradient = model.q_norm.weight.grad
    if isinstance(gradient, DTensor):
        gradient = gradient.full_tensor()
    if not torch.allclose(gradient.cpu(), plain.q_norm.weight.grad, atol=1e-5):
        raise Symptom("no error, and the gradient on rank %d is that of its own heads" % ctx.rank)


def optimize(ctx: Context, *, library: str) -> None:
    """Steps a sharded model with an optimizer whose state is plain tensors or DTensors."""
    import torch
    from torch.distributed.fsdp import fully_shard

    model, _, mesh = start(ctx, "dp")
    plain, ids = build(), torch.arange(10, device=ctx.device).view(2, 5)
    fully_shard(model, mesh=mesh)
    if library == "bitsandbytes":
        from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found]

        optimizer = AdamW8bit(model.parameters(), lr=0.1, min_8bit_size=1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(ids).square().mean().backward()
    ctx.reached()
    optimizer.step()
    plain(ids.cpu()).square().mean().backward()
    torch.optim.AdamW(plain.parameters(), lr=0.1).step()
    assert torch.allclose(model(ids).cpu(), plain(ids.cpu()), atol=1e-3)


def load(ctx: Context, *, distributed: bool) -> None:
    """Loads a full state dict, as from a file, into a model that is already sharded."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model, _, mesh = start(ctx, "dp")
    fully_shard(model, mesh=mesh)
    state_dict = {name: weight + 1 for name, weight in build().state_dict().items()}
    ctx.reached()
    if distributed:
        set_model_state_dict(model, state_dict, options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(state_dict)
    assert torch.allclose(model.head.weight.full_tensor().cpu(), build().head.weight + 1)


def resume(ctx: Context, *, distributed: bool) -> None:
    """Loads the full state of an optimizer, as from a file, into the optimizer of a sharded model."""
    import torch
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model, ids, mesh = start(ctx, "dp")
    plain = build()
    earlier = torch.optim.AdamW(plain.parameters())
    plain(ids.cpu()).sum().backward()
    earlier.step()
    state = get_optimizer_state_dict(plain, earlier, options=StateDictOptions(full_state_dict=True))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    ctx.reached()
    if distributed:
        set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))
    else:
        optimizer.load_state_dict(earlier.state_dict())
    model(ids).sum().backward()
    optimizer.step()
    moments = optimizer.state[model.head.weight]
    assert isinstance(moments["exp_avg"], DTensor) and moments["step"] == 2


def operate(ctx: Context, *, builtin: bool) -> None:
    """Calls a custom operator, which has no sharding rule for DTensors, or a built-in operator of torch."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    kernel = torch.library.custom_op("kb_probe::double", double, mutates_args=())
    kernel.register_fake(torch.empty_like)
    _, _, mesh = start(ctx, "tp")
    whole = torch.arange(8.0, device=ctx.device).view(4, 2)
    hidden = distribute_tensor(whole, mesh, [Shard(0)])
    ctx.reached()
    result = double(hidden) if builtin else kernel(hidden)
    assert torch.equal(result.full_tensor(), whole * 2)


def infer(ctx: Context, *, inference: bool) -> None:
    """Runs a split layer without bias; under inference_mode, DTensor receives F.linear as aten.matmul."""
    import torch
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model, _, mesh = start(ctx, "tp")
    parallelize_module(model, mesh, {"head": ColwiseParallel()})
    ids = torch.arange(10, device=ctx.device).view(2, 5)
    ctx.reached()
    with torch.inference_mode() if inference else torch.no_grad():
        logits = model(ids)
    part = slice(ctx.rank * WORDS // 2, (ctx.rank + 1) * WORDS // 2)
    assert torch.allclose(logits.cpu(), build()(ids.cpu())[..., part], atol=1e-5)


MIXED = raised(r"got mixed torch\.Tensor and DTensor, need to convert all")
MESHES = raised(r"must have the same mesh|different mesh|cross-mesh operation")
WRONG = symptom(r"no error, and the logits of rank [01] are not those of its input")
PIECES = symptom(r"no error, gradient [12]\.0 in the piece of rank [01], the mean is 1\.5")
APART = symptom(r"no error, and the gradient of rank [01] is its own, not averaged")
HEADS = symptom(r"no error, and the gradient on rank [01] is that of its own heads")
MATMUL = raised(r"Operator aten\.matmul\.default does not have a sharding strategy registered")
UNKNOWN = raised(r"Operator kb_probe\.double\.default does not have a sharding strategy registered")


def pair(
    name: str,
    job: Callable[..., None],
    change: Tuple[str, Any, Any],
    expect: Expect,
    *because: str,
    needs: str = "",
    torch: str = ">=2.7",
) -> Experiment:
    """`change` is the argument that differs, with its values in control and treatment; `because` has a text each."""
    control, treatment = (partial(job, **{change[0]: value}) for value in change[1:])
    return Experiment(
        name=name,
        control=Arm(control, expect=expect, because=because[0], fidelity="cpu"),
        treatment=Arm(treatment, expect=completed(), because=because[1], fidelity="cpu"),
        needs=Needs(
            packages={"torch": torch, **dict(package.partition(":")[::2] for package in needs.split())},
            memory_mib=1536 if needs else 1024,
        ),
        expected_s=(3.0, 3.0) if needs else (0.4, 0.4),
    )


gloo = pair(
    "gloo",
    call,
    ("way", "method", "registered"),
    MIXED,
    "FSDP2 gathers the weights only for forward, and the job calls another method",
    "register_fsdp_forward_method makes FSDP2 gather the weights for the method as well",
)
tensor_parallel, both = (partial(step, names=names) for names in (("tp",), ("dp", "tp")))
clipped, unclipped = (partial(left_out, clip=clip) for clip in (True, False))
distributed = ("distributed", False, True)
registered = ("registered", False, True)
separate = ("separate", False, True)
root = ("root", False, True)

probe = Probe(
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        pair(
            "direct",
            call,
            ("way", "direct", "called"),
            MIXED,
            "model.forward(x) bypasses the hooks with which FSDP2 gathers the weights",
            "model(x) runs the hooks of FSDP2",
        ),
        pair(
            "summon",
            call,
            ("way", "summon", "unshard"),
            MIXED,
            "summon_full_params belongs to FSDP1 and does nothing to an FSDP2 model",
            "unshard() gathers the weights of the FSDP2 root unit",
        ),
        pair(
            "peft",
            generate,
            registered,
            MIXED,
            "generate() of a LoRA model does not call the forward for which FSDP2 gathers the weights",
            "register_fsdp_forward_method makes FSDP2 gather the weights for generate()",
            needs="peft transformers",
        ),
        # with torch 2.7 and 2.8 and gloo, FSDP2 computes wrong gradients: 3.0 where the mean is 1.5
        pair(
            "own-loss",
            custom_loss,
            ("way", "plain", "forward"),
            MIXED,
            "the loss multiplies plain hidden states by the sharded weight of the head",
            "forward() computes the logits, after FSDP2 has gathered the weight",
            torch=">=2.9",
        ),
        pair(
            "full-tensor",
            custom_loss,
            ("way", "full", "forward"),
            PIECES,
            "the loss uses full_tensor() of the weight, so the gradient is not averaged over the ranks",
            "forward() computes the logits, so FSDP2 averages the gradient",
            torch=">=2.9",
        ),
        pair(
            "implicit",
            custom_loss,
            ("way", "implicit", "forward"),
            WRONG,
            "implicit_replication() takes the hidden states of each rank for the same tensor",
            "forward() computes the logits from the hidden states of each rank",
            torch=">=2.9",
        ),
        pair(
            "left-out",
            clipped,
            root,
            MIXED,
            "the embedding and the head are in no FSDP2 unit, so clipping mixes plain gradients and DTensors",
            "fully_shard(model) puts the embedding and the head into the root unit",
        ),
        pair(
            "drift",
            unclipped,
            root,
            APART,
            "the embedding and the head are in no FSDP2 unit, so no rank averages their gradients",
            "fully_shard(model) puts the embedding and the head into the root unit",
        ),
        pair(
            "optimizer",
            tensor_parallel,
            separate,
            MIXED,
            "the plan has only the body, and the foreach optimizer mixes its DTensors with plain weights",
            "the norm is computed per parameter, and the optimizer runs with foreach=False",
            torch=">=2.6",
        ),
        pair(
            "heads",
            heads,
            ("planned", False, True),
            HEADS,
            "the plan does not have the norm of the heads, so each rank keeps the gradient of its own heads",
            "the plan has the norm of the heads, so its gradient covers all heads",
            torch=">=2.6",
        ),
        pair(
            "bitsandbytes",
            optimize,
            ("library", "bitsandbytes", "torch"),
            MIXED,
            "AdamW8bit makes plain tensors for its state, and the weights are DTensors",
            "the AdamW of torch makes DTensors for its state, as the weights are",
            needs="bitsandbytes:>=0.50.2",  # older releases do not run on the CPU
            torch=">=2.9",
        ),
        pair(
            "meshes",
            both,
            separate,
            MESHES,
            "clip_grad_norm_ stacks the norms of gradients that are on two meshes",
            "the norm is computed per parameter, so no operation gets DTensors of two meshes",
            torch=">=2.9",
        ),
        pair(
            "load",
            load,
            distributed,
            MIXED,
            "load_state_dict copies plain tensors into the DTensors of the model",
            "set_model_state_dict shards the tensors while it loads them",
            torch=">=2.6",
        ),
        pair(
            "resume",
            resume,
            distributed,
            MIXED,
            "load_state_dict of the optimizer keeps the moments as plain tensors",
            "set_optimizer_state_dict shards the moments while it loads them",
        ),
        pair(
            "inference",
            infer,
            ("inference", True, False),
            MATMUL,
            "under inference_mode, DTensor receives F.linear as aten.matmul, for which it has no rule",
            "under no_grad, DTensor receives the operators for which it has rules",
            torch=">=2.2,<2.6",
        ),
        pair(
            "operator",
            operate,
            ("builtin", False, True),
            UNKNOWN,
            "the custom operator has no sharding rule",
            "the built-in operator of torch has a sharding rule",
            torch=">=2.6",
        ),
    ),
)

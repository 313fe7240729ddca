"""An EMA that does not follow the weights, next to the EMA that one process computes with a plain model."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

STEPS = 4


def values(module: Any) -> Dict[str, Any]:
    found = {}
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module."):
            name = name.replace(wrapper, "")
        found[name] = (value.to_local() if hasattr(value, "to_local") else value).detach().cpu().clone()
    return found


def check_ema(model: Any, ema: Any, before: Dict[str, Any]) -> List[str]:
    """The test of the entry. `before`: the values of the EMA some steps ago."""
    import torch

    now, average = values(model), values(ema)
    stuck = [n for n in before if torch.equal(average[n], before[n]) and not torch.equal(now[n], before[n])]
    whole = [n for n in before if not average[n].is_floating_point() and "num_batches" not in n]
    wrong = [n for n in whole if not torch.equal(average[n], now[n])]
    lines = []
    if stuck:
        lines.append("EMA: %d of %d tensors have not moved, first %s" % (len(stuck), len(before), stuck[0]))
    if wrong:
        lines.append("EMA: %d integer buffers differ from the model's, first %s" % (len(wrong), wrong[0]))
    return lines


def network() -> Any:
    """The same on all ranks: a BatchNorm, and a table of indices as Swin has it."""
    import torch
    from torch import nn

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 1)])
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("index", torch.arange(1000))

        def forward(self, x: Any) -> Any:
            return self.blocks[1](self.norm(self.blocks[0](x)))

    torch.manual_seed(0)
    return Net()


def learn(model: Any, update: Callable[[], None], *, accumulation: int = 1, each: bool = False) -> Any:
    """AdamW; each rank has the same batch, so that one process computes the same. `each`: after each micro-batch."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for i in range(STEPS * accumulation):
        torch.manual_seed(i)
        batch = (torch.randn(16, 8) * 3 + 5).to(next(model.parameters()).dtype)
        (model(batch).square().mean() / accumulation).backward()
        if (i + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
            update()
        elif each:
            update()
    return optimizer


def reference(decay: float, accumulation: int = 1) -> Dict[str, Any]:
    """The formula, in one process without a wrapper: the first update copies, and buffers are copied."""
    model, average = network(), {}  # type: Any, Dict[str, Any]

    def update() -> None:
        for name, value in model.state_dict().items():
            new = value.detach().clone()
            mix = name in average and name in dict(model.named_parameters())
            average[name] = decay * average[name] + (1 - decay) * new if mix else new

    learn(model, update, accumulation=accumulation)
    return average


def judge(model: Any, ema: Any, before: Dict[str, Any], expected: Dict[str, Any]) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    if lines := check_ema(model, ema, before):
        raise Symptom("; ".join(lines))
    got = get_model_state_dict(ema, options=StateDictOptions(full_state_dict=True))
    assert got.keys() == expected.keys(), got.keys()
    for name, value in expected.items():
        assert torch.allclose(got[name].float(), value.float(), atol=1e-5), (name, got[name], value)


def replicated(ctx: Context, *, way: str, decay: float = 0.9, accumulation: int = 1) -> None:
    """DDP, and an EMA that is kept in various ways."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

    ctx.init_process_group(timeout_s=20)
    model = network()
    ema = AveragedModel(model, avg_fn=get_ema_avg_fn(decay), use_buffers=way == "use_buffers")
    if way == "switch":
        ema = AveragedModel(model, avg_fn=get_ema_avg_fn(decay))
        ema.module.float()
    model = DistributedDataParallel(model)
    before, shadow = values(ema.module), dict(ema.module.named_parameters())
    ctx.reached()

    def update() -> None:
        source = model.module if way in ("unwrapped", "parameters") else model
        if way in ("names", "unwrapped", "parameters"):
            with torch.no_grad():
                for name, p in source.named_parameters():
                    if name in shadow:
                        shadow[name].copy_(p) if first else shadow[name].lerp_(p, 1 - decay)
                if way == "unwrapped":
                    for b, new in zip(ema.module.buffers(), source.buffers()):
                        b.copy_(new)
            first.clear()
        elif way != "rank-zero" or ctx.rank == 0:
            ema.update_parameters(model)

    first = [True]
    optimizer = learn(model, update, accumulation=accumulation, each=way == "each")
    updates, steps = int(ema.n_averaged), int(next(iter(optimizer.state.values()))["step"])
    if updates > steps:
        raise Symptom("EMA: %d updates in %d optimizer steps" % (updates, steps))
    judge(model, ema.module, before, reference(decay, accumulation))


def sharded(ctx: Context, *, way: str, fsdp1: bool = False) -> None:
    """FSDP2 or FSDP1: an EMA made before or after it, sharded or not."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

    ctx.init_process_group(timeout_s=20)
    mesh, decay, model = init_device_mesh("cpu", (2,)), 0.9, network()
    old, options = list(model.parameters()), {"device_id": torch.device("cpu"), "use_orig_params": True}
    ema = AveragedModel(model, avg_fn=get_ema_avg_fn(decay))
    ema.module.float()
    ctx.reached()
    if fsdp1:
        model = FullyShardedDataParallel(model, **options)
        if way == "both":
            ema.module = FullyShardedDataParallel(ema.module, **options)
    else:
        from torch.distributed.fsdp import fully_shard

        if way in ("both", "validated"):
            for net in (model, ema.module):
                for block in net.blocks:
                    fully_shard(block, mesh=mesh)
                fully_shard(net, mesh=mesh)
        else:
            fully_shard(model, mesh=mesh)
    if way == "late":
        ema = AveragedModel(model, avg_fn=get_ema_avg_fn(decay))
    before = values(ema.module)

    def update() -> None:
        if way == "references":
            with torch.no_grad():
                for average, p in zip(ema.module.parameters(), old):
                    average.lerp_(p, 1 - decay)
        else:
            ema.update_parameters(model)
            validate()

    def validate() -> None:
        ema.module.eval()
        batch = torch.ones(2, 8)
        if fsdp1:
            with FullyShardedDataParallel.summon_full_params(ema.module, writeback=False), torch.no_grad():
                ema.module(batch)
            return
        with torch.no_grad():
            ema.module(batch)
        if way == "both":
            ema.module.reshard()

    learn(model, update)
    judge(model, ema.module, before, reference(decay))


def half(ctx: Context, *, way: str) -> None:
    """One process that trains in bf16, with an EMA of the same dtype or in float32."""
    from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

    model = network().bfloat16()
    ema = AveragedModel(model, avg_fn=get_ema_avg_fn(0.999))
    if way == "float32":
        ema.module.float()
    before = values(ema.module)
    ctx.reached()
    ema.n_averaged.add_(1)  # the first update would copy
    learn(model, lambda: ema.update_parameters(model))
    if lines := check_ema(model, ema.module, before):
        raise Symptom("; ".join(lines))


def resume(ctx: Context, *, way: str) -> None:
    """One process saves its EMA, loads it into a new one, and updates that once."""
    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

    model = network()
    ema, new = (AveragedModel(model, avg_fn=get_ema_avg_fn(0.999)) for _ in range(2))
    ctx.reached()
    learn(model, lambda: ema.update_parameters(model))
    if way == "state":
        new.load_state_dict(ema.state_dict())
    else:
        new.module.load_state_dict(ema.module.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    new.update_parameters(model)
    pairs = list(zip(new.module.parameters(), model.parameters()))
    same = sum(torch.equal(average, p) for average, p in pairs)
    if same:
        raise Symptom("EMA: %d of %d weights equal the model's after a resume" % (same, len(pairs)))


WAYS = {
    "names": "parameters are looked up by name, and DDP has prefixed the names with `module.`",
    "switch": "AveragedModel with get_ema_avg_fn, made of the model before DDP and updated in each optimizer step",
    "unwrapped": "parameters are looked up in the unwrapped model, and buffers are copied",
    "parameters": "parameters of the unwrapped model are averaged, buffers are left alone",
    "use_buffers": "AveragedModel with use_buffers=True, which averages integers too",
    "rank-zero": "only rank 0 updates its EMA",
    "each": "the EMA is updated in each of four micro-batches",
    "references": "the EMA reads a list of parameters from before fully_shard",
    "late": "the EMA is made of a model that is sharded already",
    "whole": "the model is sharded, the EMA is not",
    "both": "the EMA is made before sharding, and both are sharded in the same way",
    "validated": "both are sharded, and the EMA is not resharded after its forward",
    "bf16": "the EMA is in bf16, as the model",
    "float32": "the EMA is in float32",
    "module": "only the averaged module is saved and loaded",
    "state": "the whole AveragedModel is saved and loaded, with n_averaged",
}


def pair(name: str, job: Callable[..., None], wrong: str, right: str, expect: Expect, **given: Any) -> Experiment:
    torch, world = given.pop("torch", ">=2.3"), given.pop("world", 2)
    return Experiment(
        name=name,
        control=Arm(partial(job, way=wrong, **given), expect=expect, because=WAYS[wrong], fidelity="cpu"),
        treatment=Arm(partial(job, way=right, **given), expect=completed(), because=WAYS[right], fidelity="cpu"),
        needs=Needs(packages={"torch": torch}),
        world_size=world,
        deadline_s=60.0,
        expected_s=(2.0, 2.0),
    )


ALL = symptom(r"EMA: 8 of 9 tensors have not moved, first blocks\.0\.weight")
COPY = raised(r"AssertionError: FSDP does not support deepcopy")
MIXED = raised(r"RuntimeError: aten\.copy_\.default.? got mixed torch\.Tensor and DTensor")
ADDED = raised(r"RuntimeError: aten\.\w+\.\w+.? got mixed torch\.Tensor and DTensor")
SIZE = raised(r"RuntimeError: The size of tensor a \(\d+\) must match the size of tensor b")
BUFFERS = symptom(r"EMA: 3 of 9 tensors have not moved, first norm\.running_mean")
INTEGERS = symptom(r"EMA: 1 integer buffers differ from the model's, first index")
FSDP1, FSDP2 = {"torch": ">=2.4"}, {"torch": ">=2.7"}  # on the CPU
probe = Probe(
    experiments=(pair("names", replicated, "names", "switch", ALL),),
    variants=(
        pair("decay", replicated, "names", "switch", ALL, decay=0.1),
        pair("unwrapped", replicated, "names", "unwrapped", ALL),
        pair("buffers", replicated, "parameters", "switch", BUFFERS),
        pair("integers", replicated, "use_buffers", "switch", INTEGERS),
        pair("rank-zero", replicated, "rank-zero", "switch", ALL),
        pair("micro-batch", replicated, "each", "switch", symptom("EMA: 16 updates in 4"), accumulation=4),
        pair("references", sharded, "references", "both", symptom("EMA: 8 of 9 tensors have not"), **FSDP2),
        pair("deepcopy", sharded, "late", "both", COPY, **FSDP2),
        pair("not-sharded", sharded, "whole", "both", MIXED, **FSDP2),
        pair("validated", sharded, "validated", "both", ADDED, **FSDP2),
        pair("fsdp1", sharded, "whole", "both", SIZE, fsdp1=True, **FSDP1),
        pair("bf16", half, "bf16", "float32", symptom(r"EMA: \d of 9 tensors"), world=1),
        pair("resume", resume, "module", "state", symptom(r"EMA: 5 of 5 weights"), world=1),
    ),
)

"""An EMA does not follow the weights. The probe compares it with the EMA of one process with a plain model."""

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
    """The test that the entry prints. `before` has the values of the EMA some steps ago."""
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
    """A network with a BatchNorm and, like Swin, a table of indices; all ranks get the same weights."""
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
    """Trains with AdamW. All ranks have the same batch, so one process gets the same result.

    `update` runs after each optimizer step and, with `each`, after each micro-batch.
    """
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
    """The EMA of one process without a wrapper. The first update copies the weights; each one copies the buffers."""
    model, average = network(), {}  # type: Any, Dict[str, Any]

    def update() -> None:
        parameters = dict(model.named_parameters())
        for name, value in model.state_dict().items():
            new = value.detach().clone()
            is_averaged = name in average and name in parameters
            average[name] = decay * average[name] + (1 - decay) * new if is_averaged else new

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
    """Trains with DDP and updates an EMA in one of several ways."""
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
    """Trains with FSDP2 or FSDP1; the EMA is created before or after sharding, and is sharded or not."""
    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

    ctx.init_process_group(timeout_s=20)
    decay, model = 0.9, network()
    old = list(model.parameters())
    ema = AveragedModel(model, avg_fn=get_ema_avg_fn(decay))
    ema.module.float()
    ctx.reached()
    model = shard_with_fsdp1(model, ema, way) if fsdp1 else shard(model, ema, way)
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
            validate_with_fsdp1(ema) if fsdp1 else validate(ema, way)

    learn(model, update)
    judge(model, ema.module, before, reference(decay))


def shard(model: Any, ema: Any, way: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    if way in ("both", "validated"):
        for net in (model, ema.module):
            for block in net.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(net, mesh=mesh)
    else:
        fully_shard(model, mesh=mesh)
    return model


def shard_with_fsdp1(model: Any, ema: Any, way: str) -> Any:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    model = FullyShardedDataParallel(model, **options)
    if way == "both":
        ema.module = FullyShardedDataParallel(ema.module, **options)
    return model


def validate(ema: Any, way: str) -> None:
    import torch

    ema.module.eval()
    batch = torch.ones(2, 8)
    with torch.no_grad():
        ema.module(batch)
    if way == "both":
        ema.module.reshard()


def validate_with_fsdp1(ema: Any) -> None:
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    ema.module.eval()
    with FullyShardedDataParallel.summon_full_params(ema.module, writeback=False), torch.no_grad():
        ema.module(torch.ones(2, 8))


def train_in_bf16(ctx: Context, *, way: str) -> None:
    """One process trains in bf16, with an EMA in bf16 or in float32."""
    from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

    model = network().bfloat16()
    ema = AveragedModel(model, avg_fn=get_ema_avg_fn(0.999))
    if way == "float32":
        ema.module.float()
    before = values(ema.module)
    ctx.reached()
    ema.n_averaged.add_(1)  # otherwise the first update copies the weights
    learn(model, lambda: ema.update_parameters(model))
    if lines := check_ema(model, ema.module, before):
        raise Symptom("; ".join(lines))


def resume(ctx: Context, *, way: str) -> None:
    """One process saves its EMA, loads it into a new one, and updates the new one once."""
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
    "names": "the update looks parameters up by name, but DDP prefixes the names with `module.`",
    "switch": "AveragedModel with get_ema_avg_fn is created before DDP and updated after each optimizer step",
    "unwrapped": "the update looks parameters up in the unwrapped model, and copies the buffers",
    "parameters": "the update averages the parameters of the unwrapped model, but ignores its buffers",
    "use_buffers": "AveragedModel with use_buffers=True also averages integer buffers",
    "rank-zero": "only rank 0 updates its EMA, so the EMA of rank 1 never changes",
    "each": "the loop updates the EMA after each of four micro-batches",
    "references": "the update reads a list of parameters from before fully_shard",
    "late": "the EMA is created from a model that is already sharded",
    "whole": "the model is sharded, but the EMA is not",
    "both": "the EMA is created before sharding, and model and EMA are sharded in the same way",
    "validated": "model and EMA are sharded, but the EMA is not resharded after its forward",
    "bf16": "the EMA is in bf16 like the model, so small changes are rounded away",
    "float32": "the EMA is in float32, which keeps small changes",
    "module": "the checkpoint has only the averaged module, so the first update after a resume copies the weights",
    "state": "the checkpoint has the whole AveragedModel, with n_averaged",
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
        pair("bf16", train_in_bf16, "bf16", "float32", symptom(r"EMA: \d of 9 tensors"), world=1),
        pair("resume", resume, "module", "state", symptom(r"EMA: 5 of 5 weights"), world=1),
    ),
)

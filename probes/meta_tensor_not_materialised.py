"""A job moves or uses a model on the meta device before its parameters and buffers have memory and values."""

from __future__ import annotations

import threading
from functools import partial
from types import MappingProxyType
from typing import Any, Callable, Mapping

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom


def build() -> Any:
    """A model with a buffer that no checkpoint contains, like the inv_freq of rotary embeddings."""
    import torch
    from torch import nn

    class Model(nn.Module):  # type: ignore[misc,unused-ignore]
        inv_freq: Any

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("inv_freq", self.frequencies(), persistent=False)

        def frequencies(self, device: Any = None) -> Any:
            return 10.0 ** -torch.arange(2.0, device=device)

        def reset_buffers(self) -> None:
            self.inv_freq = self.frequencies(self.inv_freq.device)

    return Model()


def move(ctx: Context, *, filled: bool) -> None:
    """Moves a model on meta with to(), or gives it memory on the device and the values of a checkpoint."""
    import torch

    device, state = ctx.device, build().state_dict()
    with torch.device("meta"):
        model = build()
    ctx.reached()
    if filled:
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        assert len(names) == len(list(model.parameters())), "shared weights: tie them again after to_empty"
        model.to_empty(device=device)
        model.load_state_dict(state)
        model.reset_buffers()
    else:
        model.to(device)
    assert torch.equal(model.layer.weight.cpu(), state["layer.weight"]) and model.inv_freq.cpu()[0] == 1


def load(ctx: Context, *, assign: bool) -> None:
    """Loads a checkpoint into a model on meta by copying, which has no effect there, or by assigning its tensors."""
    import torch

    state = build().state_dict()
    with torch.device("meta"):
        model = build()
    ctx.reached()
    if assign:
        result = model.load_state_dict(state, assign=True)
    else:
        result = model.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    model.layer.to(ctx.device)
    assert torch.equal(model.layer.weight, state["layer.weight"])


def fill(ctx: Context, *, loaded: bool = True, buffers: bool = True) -> None:
    """Gives the model memory; with `loaded` also the checkpoint, with `buffers` also the buffers that it lacks."""
    import torch

    trained = build()  # stays alive, so that to_empty cannot reuse memory with its values
    state = trained.state_dict()
    with torch.device("meta"):
        model = build()
    model.to_empty(device=ctx.device)
    ctx.reached()
    if loaded:
        model.load_state_dict(state)
    if buffers:
        model.reset_buffers()
    equal = sum(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    if equal < 2:
        raise Symptom("%d of 2 tensors have the values of the checkpoint" % equal)
    actual, computed = model.inv_freq.tolist(), model.frequencies().tolist()
    if actual != computed:
        raise Symptom("all keys matched, but inv_freq is %s, not %s" % (actual, computed))


def tie(ctx: Context, *, tied_again: bool) -> None:
    """to_empty turns one weight in two places into two weights."""
    import torch
    from torch import nn

    class Tied(nn.Module):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
            self.tie_weights()

        def tie_weights(self) -> None:
            self.head.weight = self.embed.weight

    with torch.device("meta"):
        model = Tied()
    assert model.head.weight is model.embed.weight
    model.to_empty(device=ctx.device)
    ctx.reached()
    if tied_again:
        model.tie_weights()
    if model.head.weight is not model.embed.weight:
        raise Symptom(
            "%d parameters where there was 1: the shared weight is no longer shared" % len(list(model.parameters()))
        )


def shard(ctx: Context, *, filled: bool) -> None:
    """Applies fully_shard to a model on meta, then runs the first forward."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ctx.init_process_group(timeout_s=10)
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    fully_shard(model, mesh=mesh)
    ctx.reached()
    if filled:
        model.to_empty(device=ctx.device)
        model.reset_parameters()
    output = model(torch.ones(1, 2, device=ctx.device))
    assert torch.isfinite(output).all() and output.abs().sum() > 0


def send(ctx: Context, *, emptied: bool) -> None:
    """Rank 0 sends a checkpoint in bfloat16 to a float32 model on meta, which has memory before that or not."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist = ctx.init_process_group(timeout_s=10)
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2, bias=False)
    fully_shard(model, mesh=init_device_mesh(ctx.device.type, (ctx.world_size,)))
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    state = {"weight": weight} if dist.get_rank() == 0 else {}
    ctx.reached()
    if emptied:
        model.to_empty(device=ctx.device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    assert model.weight.full_tensor().tolist() == weight.tolist()
    if model.weight.dtype != torch.float32:
        raise Symptom("the model of torch.float32 trains in %s" % model.weight.dtype)


def offload(ctx: Context, *, all_in_memory: bool) -> None:
    """A device map puts one layer on disk, or all layers in memory; then the job copies the weights."""
    from accelerate import dispatch_model  # type: ignore[import-not-found,unused-ignore]
    from torch import nn

    places = {"0": "cpu", "1": "cpu" if all_in_memory else "disk"}
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = dispatch_model(model, places, main_device="cpu", offload_dir=ctx.path("offload"))
    ctx.reached()
    copies = {name: value.clone().to("cpu") for name, value in model.state_dict().items()}
    assert len(copies) == 4


def build_in_two_threads(ctx: Context, *, locked: bool) -> None:
    """One thread builds a model on meta, as from_pretrained does, while another thread builds an ordinary layer."""
    from accelerate import init_empty_weights
    from torch import nn

    lock, inside, built = threading.Lock(), threading.Event(), threading.Event()

    def build_on_meta() -> None:
        with lock, init_empty_weights():
            inside.set()
            built.wait(0.5 if locked else 20)

    thread = threading.Thread(target=build_on_meta)
    thread.start()
    inside.wait(20)
    ctx.reached()
    if locked:
        with lock:
            layer = nn.Linear(2, 2)
    else:
        layer = nn.Linear(2, 2)
    built.set()
    thread.join()
    assert layer.to("cpu").weight.device.type == "cpu"


def load_custom_class(ctx: Context, *, computed: bool = True, plain: bool = True) -> None:
    """from_pretrained of a custom class; __init__ may move a layer, and _init_weights may compute the buffer."""
    import torch
    from transformers import PretrainedConfig, PreTrainedModel  # type: ignore[import-not-found,unused-ignore]

    class Custom(PreTrainedModel):  # type: ignore[misc,unused-ignore]
        config_class = PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = torch.nn.Linear(2, 2)
            if not plain:
                self.layer.to("cpu")
            self.register_buffer("table", 7 + torch.arange(2.0), persistent=False)
            self.post_init()

        def _init_weights(self, module: Any) -> None:
            if computed and module is self:
                module.table.copy_(7 + torch.arange(2.0, device=module.table.device))

    folder, trained = ctx.path("model"), Custom(PretrainedConfig())
    trained.save_pretrained(folder)
    ctx.reached()
    loaded = Custom.from_pretrained(folder)
    assert torch.equal(loaded.layer.weight, trained.layer.weight)
    if not torch.equal(loaded.table, trained.table):
        raise Symptom("the weights were loaded, but table is %s, not [7.0, 8.0]" % loaded.table.tolist())


NO_DATA = raised(r"Cannot copy out of meta tensor; no data!")
ANY_TORCH = MappingProxyType({"torch": ">=2.1"})


def pair(
    job: Callable[..., None],
    name: str,
    keyword: str,
    because: str,
    fix: str,
    expect: Expect = NO_DATA,
    packages: Mapping[str, str] = ANY_TORCH,
    world_size: int = 1,
) -> Experiment:
    """`keyword` is False in the control arm and True in the treatment arm."""
    library = len(packages) > 1
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: False}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{keyword: True}), expect=completed(), because=fix, fidelity="cpu"),
        world_size=world_size,
        needs=Needs(packages=packages),
        deadline_s=90.0 if library else 20.0,
        expected_s=(3.0, 3.0) if library else (0.3, 0.3),
    )


moved = pair(
    move,
    "move",
    "filled",
    "to() finds no data to copy in a model on meta",
    "to_empty gives the model memory, and load_state_dict gives it values",
)
sharded = pair(
    shard,
    "fully-shard",
    "filled",
    "fully_shard leaves the parameters on the meta device",
    "to_empty and reset_parameters give them memory and values before the first forward",
    expect=raised(r"FSDP parameters should be materialized from meta device before training"),
    packages={"torch": ">=2.7"},
    world_size=2,
)
sent = pair(
    send,
    "sent",
    "emptied",
    "the parameters are on meta, so the tensors of the checkpoint replace them",
    "to_empty gives them memory of their dtype, and the tensors are copied into it",
    expect=symptom(r"the model of torch\.float32 trains in torch\.bfloat16"),
    packages={"torch": ">=2.7"},
    world_size=2,
)
assigned = pair(
    load,
    "assign",
    "assign",
    "load_state_dict copies into tensors on meta, which has no effect",
    "assign=True puts the tensors of the checkpoint into the model",
)
values = pair(
    fill,
    "values",
    "loaded",
    "to_empty gives the model memory, but the values in it are arbitrary",
    "load_state_dict loads the checkpoint after to_empty",
    expect=symptom(r"[01] of 2 tensors have the values of the checkpoint"),
)
buffer = pair(
    fill,
    "buffer",
    "buffers",
    "to_empty gives memory to the buffer, but the checkpoint has no values for it",
    "the model computes the buffer again",
    expect=symptom(r"all keys matched, but inv_freq is .{1,80}, not \[1\.0, 0\.1"),
)
tied = pair(
    tie,
    "tied",
    "tied_again",
    "to_empty makes a separate parameter for each place of the shared weight",
    "tie_weights ties the weights again after to_empty",
    expect=symptom(r"2 parameters where there was 1: the shared weight is no longer shared"),
)
offloaded = pair(
    offload,
    "offload",
    "all_in_memory",
    "the device map puts a layer on disk and leaves a parameter on meta in its place",
    "the device map offloads no layer",
    packages={**ANY_TORCH, "accelerate": ""},
)
threads = pair(
    build_in_two_threads,
    "threads",
    "locked",
    "init_empty_weights in one thread also puts the layer that another thread builds on meta",
    "a lock lets only one thread build at a time",
    packages={**ANY_TORCH, "accelerate": ""},
)
own_class = pair(
    load_custom_class,
    "own-class",
    "computed",
    "transformers 5 builds the class on meta, then gives its buffer memory without values",
    "_init_weights computes the buffer",
    expect=symptom(r"the weights were loaded, but table is .{1,80}, not \[7\.0, 8\.0\]"),
    packages={**ANY_TORCH, "transformers": ">=5", "safetensors": ""},
)
own_init = pair(
    load_custom_class,
    "own-init",
    "plain",
    "from_pretrained runs __init__ with the parameters on meta, and __init__ moves a layer",
    "__init__ moves no layer",
    packages={**ANY_TORCH, "transformers": ">=4.51", "safetensors": ""},
)
probe = Probe(
    experiments=(sharded.on_gpus(), moved.on_gpus(1, name="one-gpu"), moved),
    variants=(sharded, sent, assigned, values, buffer, tied, offloaded, threads, own_class, own_init),
)

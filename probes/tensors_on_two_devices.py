"""One operand stays on the CPU: a plain attribute, a constant, a part of the batch, the weights of a loss."""

from __future__ import annotations

import ast
import os
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Callable, Iterator, Mapping, Tuple

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
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)


@contextmanager
def gpu(ctx: Context, index: int = 0) -> Iterator[Any]:
    """Yields the GPU of this rank, or a fake cuda device on which torch only tracks devices and shapes."""
    import torch

    if ctx.device.type == "cuda":
        yield ctx.device
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad(), FakeTensorMode():
        device = torch.device("cuda", index)
        try:
            torch.ones(2, device=device)
        except (RuntimeError, AssertionError) as error:
            raise Unavailable(f"torch {torch.__version__} has no fake cuda device") from error
        yield device


def add_table(ctx: Context, *, registered: bool, on_meta: bool = False) -> None:
    """Runs a module whose table is a plain attribute, which .to() does not move, or (`registered`) a buffer."""
    import torch

    class Positions(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            table = torch.arange(4.0)
            if registered:
                self.register_buffer("table", table, persistent=False)
            else:
                self.table = table

        def forward(self, hidden: Any) -> Any:
            return hidden + self.table

    with nullcontext(torch.device("meta")) if on_meta else gpu(ctx) as device:
        model = Positions().to(device)
        ctx.reached()
        assert model(torch.ones(2, 4, device=device)).device == device
        assert not model.state_dict()  # older checkpoints lack no name


def create_constant(ctx: Context, *, follows: bool) -> None:
    """Creates positions in forward, on the CPU or (`follows`) on the device of the hidden states."""
    import torch

    with gpu(ctx) as device:
        hidden = torch.ones(2, 4, 8, device=device)
        ctx.reached()
        if follows:
            positions = torch.arange(hidden.shape[1], device=hidden.device)
        else:
            positions = torch.arange(hidden.shape[1])
        assert (hidden + positions.unsqueeze(-1)).device == device


def multiply_by_factor(ctx: Context, *, zero_dim: bool) -> None:
    """torch treats a CPU tensor without dimensions as a number, but not one of shape (1,)."""
    import torch

    with gpu(ctx) as device:
        hidden = torch.ones(2, 4, device=device)
        ctx.reached()
        factor = torch.tensor(2.0) if zero_dim else torch.tensor([2.0])
        assert (hidden * factor).device == device


def move(value: object, device: object) -> object:
    if hasattr(value, "to"):  # tensors, BatchEncoding, PackedSequence
        return value.to(device)
    if isinstance(value, dict):
        return {key: move(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        moved = [move(item, device) for item in value]
        return getattr(value, "_make", type(value))(moved)  # _make: a namedtuple
    return value


def move_batch(ctx: Context, *, nested: bool) -> None:
    """Moves the tensors of a batch, but those of a dict inside it only if `nested`."""
    import torch

    with gpu(ctx) as device:
        host = {"ids": torch.ones(2, 4), "extra": {"mask": torch.ones(2, 4)}, "names": ["a", "b"]}
        moved: Any
        ctx.reached()
        if nested:
            moved = move(host, device)
        else:
            moved = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in host.items()}
        assert (moved["ids"] * moved["extra"]["mask"]).device == device


def move_inputs(ctx: Context, *, assigned: bool) -> None:
    """Tensor.to returns a new tensor and does not move the old one."""
    import torch

    with gpu(ctx) as device:
        weight, inputs = torch.ones(4, 4, device=device), torch.ones(2, 4)
        ctx.reached()
        if assigned:
            inputs = inputs.to(device)
        else:
            inputs.to(device)
        assert torch.nn.functional.linear(inputs, weight).device == device


def weighted_loss(ctx: Context, *, moved: bool) -> None:
    """The loss holds the class weights; it is a module of its own, which model.to() does not move."""
    import torch

    with gpu(ctx) as device:
        loss_function = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
        logits, labels = torch.ones(2, 3, device=device), torch.tensor([0, 2]).to(device)
        ctx.reached()
        if moved:
            loss_function = loss_function.to(device)
        assert loss_function(logits, labels).device == device


def move_layers(ctx: Context, *, module_list: bool) -> None:
    """Layers in a Python list belong to no module, so .to() and parameters() skip them."""
    import torch

    class Stack(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            blocks = [
                torch.nn.BatchNorm1d(4, affine=False) for _ in range(2)
            ]  # without weights, because .to() cannot move those to a fake device
            self.blocks = torch.nn.ModuleList(blocks) if module_list else blocks

    with gpu(ctx) as device:
        model = Stack().to(device).eval()
        ctx.reached()
        assert model.blocks[0].eval()(torch.ones(2, 4, device=device)).device == device
        assert len(list(model.buffers())) == 6


def mask_on_second_rank(ctx: Context, *, follows: bool) -> None:
    """Rank 1 works on GPU 1, but one line of the model creates a mask on cuda:0."""
    import torch

    with gpu(ctx, index=1) as device:
        hidden = torch.ones(2, 4, device=device)
        ctx.reached()
        mask = torch.ones(4, device=hidden.device if follows else "cuda:0")
        assert (hidden * mask).device == device


def resume(ctx: Context, *, moved_first: bool) -> None:
    """load_state_dict puts the optimizer state on the device of the parameters; a later model.to does not move it."""
    import torch

    def start() -> Any:
        model = torch.nn.Linear(4, 4)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    device = ctx.device
    if device.type != "cuda":
        device = torch.device("meta")
        torch.__future__.set_swap_module_params_on_conversion(True)  # on a GPU .to() keeps the parameters by itself
    (model, optimizer), (first, first_optimizer) = start(), start()
    first(torch.ones(2, 4)).sum().backward()
    first_optimizer.step()
    saved = first_optimizer.state_dict()
    ctx.reached()
    if moved_first:
        model.to(device)
        optimizer.load_state_dict(saved)
    else:
        optimizer.load_state_dict(saved)
        model.to(device)
    model(torch.ones(2, 4, device=device)).sum().backward()
    optimizer.step()
    assert all(optimizer.state[weight]["exp_avg"].device == device for weight in model.parameters())


def load_with_transformers(ctx: Context, *, initialised: bool) -> None:
    """transformers 5 builds a model on meta, so a buffer that is not in the checkpoint gets no values."""
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, initialization  # type: ignore[import-not-found]

    class Config(PretrainedConfig):  # type: ignore[misc]
        model_type = "positions"

    class Positions(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(4.0), persistent=False)

    class Model(PreTrainedModel):  # type: ignore[misc]
        config_class = Config

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.positions, self.head = Positions(), torch.nn.Linear(4, 4)
            self.post_init()

    class Initialised(Model):
        def _init_weights(self, module: object) -> None:
            super()._init_weights(module)  # else a new head holds garbage too
            if isinstance(module, Positions):
                initialization.copy_(module.table, torch.arange(4.0))  # transformers.initialization

    torch.use_deterministic_algorithms(True)  # uninitialised memory then holds NaN
    Model(Config()).save_pretrained(ctx.path("model"))
    ctx.reached()
    chosen = Initialised if initialised else Model
    table = chosen.from_pretrained(ctx.path("model")).positions.table
    if not torch.equal(table, torch.arange(4.0)):
        raise Symptom("the table of the loaded model is %s; no error" % table.tolist())


# --- the check: finds code that creates tensors without a device, or on a fixed one -----------------------------

MAKE = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}
MOVES = ("to", "cuda", "type_as", "item", "tolist")


def check(params: Mapping[str, Any]) -> Finding:
    code = params["code"]
    if code is None:
        return unknown("no code was named", advice="--set code=model.py, or a folder")
    if not os.path.isfile(code) and not os.path.isdir(code):
        return unknown("%s is not a file or folder that kb can read" % code, advice="--set code=model.py, or a folder")
    end, read, result = time.monotonic() + 0.5, 0, []
    for file in python_files(str(code), end):
        try:
            with open(file, encoding="utf-8") as stream:
                source = stream.read()
            result += ["%s:%d: %s" % (file, line, what) for line, what in suspects(ast.parse(source))]
            read += 1
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
    if result:
        return exposed(
            *result[:10],
            advice="pass device=hidden.device, or call self.register_buffer(name, value, persistent=False)",
        )
    return unknown(
        "kb found nothing suspicious in %d Python files; it does not look at batches, losses and libraries" % read
    )


def python_files(code: str, end: float) -> Iterator[str]:
    """Yields files one by one, so that a large tree does not delay the first one, and stops at `end`."""
    if not os.path.isdir(code):
        yield code
    for folder, folders, names in os.walk(code):
        folders.sort()
        for path in (os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")):
            if os.path.isfile(path) and time.monotonic() < end:
                yield path
        if time.monotonic() > end:
            return


def suspects(tree: ast.AST) -> Iterator[Tuple[int, str]]:
    """Finds plain tensor attributes that a forward uses, tensors that it makes without a device, and uses of cuda:0.

    Skips whatever forward moves, and the attributes of a class that defines its own `_apply`, `to` or `cuda`.
    """
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        methods = {item.name: item for item in owner.body if isinstance(item, ast.FunctionDef)}
        if "forward" not in methods:
            continue
        inside: Any = list(ast.walk(methods["forward"]))
        moved = {ast.unparse(node.func.value) for node in inside if moves(node)}
        excused = {id(node) for outer in inside for node in harmless(outer)}
        excused |= {id(n.value) for n in inside if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in moved}
        used = {ast.unparse(node) for node in inside if isinstance(node, ast.Attribute) and id(node) not in excused}
        used -= used if methods.keys() & {"_apply", "to", "cuda"} else moved
        for node in ast.walk(methods.get("__init__", ast.Pass())):
            if isinstance(node, ast.Assign) and makes(node.value) and ast.unparse(node.targets[0]) in used:
                yield node.lineno, "%s is a plain attribute, which .to() does not move" % ast.unparse(node.targets[0])
        for node in inside:
            if isinstance(node, ast.Call) and makes(node) and id(node) not in excused:
                yield node.lineno, "%s creates a tensor without a device" % ast.unparse(node)[:60]
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda:"):
                if id(node) in excused:
                    continue
                yield node.lineno, node.value + " is the same GPU on every rank"


def moves(node: Any) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MOVES


def harmless(node: Any) -> Iterator[ast.AST]:
    """Yields what `node` moves at once, an index (a GPU accepts one on the CPU), or a condition."""
    if moves(node):
        yield node.func.value
    elif isinstance(node, ast.Subscript):
        yield from ast.walk(node.slice)
    elif isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)):
        yield from ast.walk(node.test)


def makes(node: ast.AST) -> bool:
    """Is this a call like torch.zeros(3) without a device? torch.tensor(3) is harmless."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    name, is_torch = node.func.attr, ast.unparse(node.func.value) == "torch"
    if not is_torch or name not in MAKE or any(word.arg in ("device", "out", None) for word in node.keywords):
        return False
    return name != "tensor" or not (node.args and isinstance(node.args[0], ast.Constant))


SAME = r"Expected all tensors to be on the same device"
FAKE = "a GPU; torch.compile uses the same fake device to track devices and shapes, without computing anything"
META = "a GPU; the meta device has its own error messages"


def pair(
    name: str, job: Callable[..., None], keyword: str, because: str, fix: str, torch: str = ">=2.13"
) -> Experiment:
    """The argument `keyword` of `job` is False in the control arm and True in the treatment."""
    control, treatment = partial(job, **{keyword: False}), partial(job, **{keyword: True})
    return Experiment(
        name=name,
        control=Arm(control, raised(SAME), because, "stand-in", FAKE),
        treatment=Arm(treatment, completed(), fix, "stand-in", FAKE),
        world_size=1,
        needs=Needs(packages={"torch": torch}),
        expected_s=(1.0, 1.0),
    )


PLAIN, BUFFER = (
    "the table is a plain attribute, and .to() left it on the CPU",
    "the table is a buffer, and .to() moves it",
)
attribute = pair("fake", add_table, "registered", PLAIN, BUFFER)
on_meta = partial(add_table, on_meta=True)
meta = Experiment(
    name="meta",
    control=Arm(
        partial(on_meta, registered=False), raised("is not on the expected device|" + SAME), PLAIN, "stand-in", META
    ),
    treatment=Arm(partial(on_meta, registered=True), completed(), BUFFER, "stand-in", META),
    world_size=1,
    needs=Needs(packages={"torch": ">=2.2"}),
    expected_s=(0.3, 0.3),
)
order = Experiment(
    name="resumed",
    control=Arm(
        partial(resume, moved_first=False),
        raised("is not on the expected device|of the same index must be on the same device|" + SAME),
        "the optimizer state is loaded while the model is on the CPU, and model.to() does not move it",
        "stand-in",
        META,
    ),
    treatment=Arm(
        partial(resume, moved_first=True),
        completed(),
        "the model is moved first, then the optimizer state is loaded",
        "stand-in",
        META,
    ),
    world_size=1,
    needs=Needs(packages={"torch": ">=2.3"}),
)
from_checkpoint = Experiment(
    name="loaded",
    control=Arm(
        partial(load_with_transformers, initialised=False),
        symptom(r"the table of the loaded model is \[nan, nan, nan, nan\]; no error"),
        "transformers builds the model on meta, and the checkpoint does not hold the buffer",
        "cpu",
    ),
    treatment=Arm(
        partial(load_with_transformers, initialised=True), completed(), "_init_weights fills the buffer", "cpu"
    ),
    world_size=1,
    needs=Needs(packages={"torch": ">=2.4", "transformers": ">=5"}, memory_mib=2048),
    deadline_s=60,
    expected_s=(5.0, 5.0),
)
probe = Probe(
    check=check,
    params={"code": Param("path", "the Python file of your model, or a folder of such files")},
    experiments=(
        attribute.on_gpus(gpus=1, needs=Needs(packages={"torch": ">=2.2"}, gpus=1), expected_s=(10.0, 10.0)),
        attribute,
        meta,
    ),
    variants=(
        pair(
            "constant",
            create_constant,
            "follows",
            "forward calls arange without a device",
            "forward calls arange with the device of the hidden states",
        ),
        pair(
            "batch",
            move_batch,
            "nested",
            "only the tensors at the top level of the batch are moved",
            "the tensors at all levels of the batch are moved",
        ),
        pair(
            "assigned",
            move_inputs,
            "assigned",
            "the result of inputs.to() is discarded",
            "the result of inputs.to() is assigned",
        ),
        pair(
            "criterion",
            weighted_loss,
            "moved",
            "the class weights in the loss are on the CPU",
            "the loss is moved to the GPU",
        ),
        pair(
            "list",
            move_layers,
            "module_list",
            "the layers are in a Python list, which .to() skips",
            "the layers are in a ModuleList",
        ),
        pair(
            "cuda-0",
            mask_on_second_rank,
            "follows",
            "rank 1 creates a mask on cuda:0",
            "the mask is created on the device of the other operand",
        ),
        order,
        from_checkpoint,
        pair(
            "zero-dim",
            multiply_by_factor,
            "zero_dim",
            "the factor is a CPU tensor of shape (1,)",
            "the factor is a CPU tensor without dimensions",
        ),
    ),
)

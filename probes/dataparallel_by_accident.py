"""One process drives several GPUs through nn.DataParallel; the model that works in one process per GPU fails in it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Dict, Iterator, List, Mapping, Tuple
from unittest.mock import patch

from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

FEATURES, BATCH = 4, 8


def train(ctx: Context, *, way: str) -> None:
    """One step of a model whose forward looks at its own parameters, on two devices."""
    import torch

    dist = ctx.init_process_group(timeout_s=60)
    model = model_of(ctx)
    features = torch.arange(BATCH * FEATURES, dtype=torch.float32).reshape(BATCH, FEATURES).to(ctx.device)
    ctx.reached()
    if way == "DataParallel":
        if ctx.rank == 0:  # this job is one process
            with devices(ctx):
                data_parallel(ctx, model)(features).mean().backward()
            assert torch.equal(model.layer.weight.grad, features.mean(0, keepdim=True))
    else:
        own = features[ctx.rank * BATCH // 2 : (ctx.rank + 1) * BATCH // 2]  # as a DistributedSampler deals them out
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp(own).mean().backward()
        assert torch.equal(model.layer.weight.grad, features.mean(0, keepdim=True))
    dist.barrier()


def model_of(ctx: Context) -> Any:
    import torch

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(FEATURES, 1, bias=False)
            self.config, self.steps = {"hidden_size": FEATURES}, 0

        def forward(self, features: Any) -> Any:
            self.steps += 1
            return self.layer(features.to(next(self.parameters()).dtype))

    return Model().to(ctx.device)


def data_parallel(ctx: Context, model: Any) -> Any:
    """torch's wrapper for two devices; without GPUs both are the CPU, and it is told so."""
    import torch

    if ctx.device.type == "cuda":
        return torch.nn.DataParallel(model, device_ids=[0, 1])
    wrapper: Any = torch.nn.DataParallel(model)
    wrapper.device_ids, wrapper.output_device, wrapper.dim = [0, 1], 0, 0
    wrapper.src_device_obj = torch.device("cpu")
    wrapper.scatter = lambda inputs, kwargs, ids: ([(part,) for part in inputs[0].chunk(len(ids))], [kwargs] * len(ids))
    wrapper.gather = lambda outputs, _: torch.cat(outputs)
    return wrapper


@contextmanager
def devices(ctx: Context) -> Iterator[None]:
    """Without GPUs: copies for a device stay on the CPU. The replicas and their threads are torch's own."""
    import importlib

    import torch

    if ctx.device.type == "cuda":
        yield
        return
    replicate = importlib.import_module("torch.nn.parallel.replicate")
    apply = importlib.import_module("torch.nn.parallel.parallel_apply")

    class Part:
        """A module of torch as parallel_apply sees it, with two devices that are the CPU."""

        def __init__(self, module: Any, **stubs: Any) -> None:
            self.__dict__.update(stubs, module=module)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.module, name)

    calls: Dict[str, Any] = dict.fromkeys(
        ("current_stream", "stream", "device", "device_index"), lambda *_: nullcontext()
    )
    calls.update(is_available=lambda: True, current_accelerator=lambda: torch.device("cpu"))
    accelerator = Part(getattr(torch, "accelerator", None), **calls)  # torch 2.6 and newer
    cuda = Part(torch.cuda, **calls)

    def copies(tensors: Any, ids: Any, detach: bool = False) -> List[List[Any]]:
        return [[tensor.detach() if detach else tensor.view_as(tensor) for tensor in tensors] for _ in ids]

    stubs: Dict[str, Any] = {"torch": Part(torch, cuda=cuda, accelerator=accelerator)}
    if hasattr(apply, "_get_available_device_type"):
        stubs["_get_available_device_type"] = lambda: "cuda"
    with ExitStack() as stack:
        stack.enter_context(patch.object(replicate, "_broadcast_coalesced_reshape", copies))
        stack.enter_context(patch.multiple(apply, **stubs))
        yield


def attribute(ctx: Context, *, inner: bool) -> None:
    """Something of the model is asked for, of the wrapper or of the model in it."""
    import torch

    wrapper: Any = torch.nn.DataParallel(model_of(ctx))
    ctx.reached()
    config = wrapper.module.config if inner else wrapper.config
    assert config["hidden_size"] == FEATURES


def place(ctx: Context, *, device: str) -> None:
    """The model is on another device than the first of the wrapper; `meta` is the other one."""
    import torch

    wrapper = data_parallel(ctx, model_of(ctx).to(device))
    ctx.reached()
    with torch.no_grad():
        wrapper.device_ids = [0]
        assert wrapper(torch.ones(BATCH, FEATURES)).shape == (BATCH, 1)


def remember(ctx: Context, *, way: str) -> None:
    """A model that counts its steps in forward."""
    import torch

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.steps = torch.nn.Linear(FEATURES, 1), 0

        def forward(self, features: Any) -> Any:
            self.steps += 1
            return self.layer(features)

    model = Model().to(ctx.device)
    wrapper = data_parallel(ctx, model) if way == "DataParallel" else model
    ctx.reached()
    with devices(ctx):
        for _ in range(3):
            assert wrapper(torch.ones(BATCH, FEATURES, device=ctx.device)).shape == (BATCH, 1)
    if model.steps != 3:
        raise Symptom(f"after 3 steps the counter of the model is {model.steps}: forward wrote it in replicas")


def train_with_trainer(ctx: Context, model: Any, *, visible: int) -> Any:
    """transformers' Trainer, started without a launcher where so many GPUs are visible."""
    import torch
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # python train.py
    options = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "max_steps": 2}
    arguments = TrainingArguments(ctx.path("out"), per_device_train_batch_size=4, **options)
    assert arguments.device.type == "cpu"  # reading it also counts the GPUs
    arguments._n_gpu = visible
    samples = [{"x": torch.ones(1), "labels": torch.zeros(1, dtype=torch.long)}] * 64
    job = Trainer(model, arguments, train_dataset=samples)
    ctx.reached()
    return job, job.train()


def trainer(ctx: Context, *, visible: int) -> None:
    """Whether the Trainer wraps the model."""
    import torch

    sizes: List[int] = []

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any, labels: Any) -> Any:  # noqa: ARG002
            sizes.append(len(x))
            return {"loss": (self.weight * x).mean()}

    job, _ = train_with_trainer(ctx, Model(), visible=visible)
    wrapped = job.model_wrapped.__class__.__name__
    if wrapped == "DataParallel":
        raise Symptom(f"the Trainer wrapped the model in DataParallel, and a step has {sizes[0]} samples instead of 4")
    assert (sizes[0], wrapped) == (4, "Model"), (sizes, wrapped)


def quantized(ctx: Context, *, visible: int) -> None:
    """A model that says it is in 8 bits, whose loss is divided by the count of tokens as in transformers."""
    import torch

    sizes: List[int] = []

    class Model(torch.nn.Module):  # type: ignore[misc]
        is_loaded_in_8bit = True

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: Any, labels: Any, num_items_in_batch: Any, **_: Any) -> Any:  # noqa: ARG002
            sizes.append(len(x))
            return {"loss": (self.weight * x).sum() / torch.as_tensor(num_items_in_batch).flatten()[0]}

    job, result = train_with_trainer(ctx, Model(), visible=visible)
    assert job.model_wrapped.__class__.__name__ == "Model"
    loss = round(result.training_loss, 2)  # of every sample it is 1, and the learning rate is small
    if loss > 1.5:
        raise Symptom(f"not wrapped, {sizes[0]} samples a step instead of 4, and a loss of {loss} instead of 1.0")
    assert (sizes[0], loss) == (4, 1.0), (sizes, loss)


def dtype(ctx: Context, *, way: str) -> None:
    """A model of transformers 5 that reads its own dtype in forward."""
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    class Model(PreTrainedModel):  # type: ignore[misc]
        config_class = PreTrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layer = torch.nn.Linear(FEATURES, 1)
            self.post_init()

        def forward(self, features: Any) -> Any:
            return self.layer(features.to(self.dtype))

    model = Model(PreTrainedConfig())
    wrapper = data_parallel(ctx, model) if way == "DataParallel" else model
    ctx.reached()
    with devices(ctx):
        assert wrapper(torch.ones(BATCH, FEATURES)).shape == (BATCH, 1)


def scatter(ctx: Context, *, repeated: bool) -> None:
    """How torch splits a batch for two devices, where the count of tokens is one of the arguments of forward."""
    from types import SimpleNamespace

    import torch
    from torch.nn.parallel import scatter_gather

    count = torch.tensor(30).unsqueeze(0)
    if repeated:
        count = count.expand(2, -1)  # as transformers 4.57 does
    batch = {"input_ids": torch.arange(BATCH), "num_items_in_batch": count}
    copies = SimpleNamespace(apply=lambda devices, _, dim, tensor: tensor.chunk(len(devices), dim))
    ctx.reached()
    with patch.object(scatter_gather, "Scatter", copies):
        _, parts = scatter_gather.scatter_kwargs((), batch, [0, 1])
    samples = sum(len(part["input_ids"]) for part in parts)
    if samples < BATCH:
        raise Symptom(f"{len(parts)} of 2 devices gets samples, {samples} of {BATCH}")
    assert [part["input_ids"].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# --- the check: does this code wrap a model without a launcher where several GPUs are visible? -------------------


def check(params: Mapping[str, Any]) -> Finding:
    gpus, how = visible_gpus(params["gpus"])
    code, found, names_gpus = params["code"], [], False
    evidence = [f"{gpus} GPUs are visible ({how})" if gpus >= 0 else how]
    if code is not None:
        try:
            text = code.read_text("utf-8")
            found, names_gpus = wrapping(ast.parse(text)), "CUDA_VISIBLE_DEVICES" in text
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return unknown(*evidence, f"{code} cannot be read: {type(error).__name__}")
    if names_gpus and params["gpus"] is None:
        return unknown(*evidence, f"{code} names CUDA_VISIBLE_DEVICES itself", advice="--set gpus=4, what it sets")
    if gpus in (0, 1):
        return clear(*evidence, "with fewer than two there is nothing to spread a model over")
    if code is None:
        return unknown(*evidence, "no code was given to read", advice="--set code=train.py")
    explicit = [f"{code}:{line}: {what}" for line, what in found if what == "DataParallel"]
    implicit = [f"{code}:{line}: {what}" for line, what in found if what != "DataParallel"]
    if gpus < 0:
        return unknown(*evidence, *explicit, *implicit, advice="run this on the node of the job, or --set gpus=4")
    if explicit:
        return exposed(*evidence, *explicit, advice="DistributedDataParallel, and torchrun to start it")
    if implicit and os.environ.get("LOCAL_RANK", "-1").isdecimal():
        return clear(*evidence, "LOCAL_RANK is set: the Trainer takes one GPU for this process")
    if implicit:  # RANK alone, as a Kubernetes operator sets it, does not count for the Trainer
        one = "torchrun --nproc-per-node %d %s, or CUDA_VISIBLE_DEVICES=0" % (gpus, code.name)
        start = "LOCAL_RANK is not set here: python %s alone would use DataParallel" % code.name
        return exposed(*evidence, *implicit, start, advice=one)
    return unknown(*evidence, f"{code} names neither DataParallel nor a Trainer; what it imports was not read")


def visible_gpus(given: Any) -> Tuple[int, str]:
    """How many GPUs CUDA would count, or -1 and why that is not known."""
    if given is not None:
        return given, "as given"
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None:
        entries = [entry.strip() for entry in variable.split(",")]
        entries = entries[: entries.index("-1")] if "-1" in entries else entries  # CUDA counts up to the first bad one
        if entries in ([], [""]):
            return 0, f"CUDA_VISIBLE_DEVICES={variable}"
        if len(set(entries)) < len(entries) or not all(re.fullmatch(r"\d+|GPU-[\w-]+", entry) for entry in entries):
            return -1, f"CUDA_VISIBLE_DEVICES={variable}: how many GPUs that makes is not known"
        return len(entries), f"CUDA_VISIBLE_DEVICES={variable}"
    try:
        ran = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=0.8, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return -1, "CUDA_VISIBLE_DEVICES is not set, and nvidia-smi does not answer"
    gpus = len(re.findall(r"^GPU \d+:", ran.stdout, re.MULTILINE))
    if not gpus or re.search(r"^\s*MIG ", ran.stdout, re.MULTILINE):
        return -1, "nvidia-smi -L lists %s" % ("MIG instances, and CUDA does not count each" if gpus else "no GPU")
    return gpus, "nvidia-smi -L"


def wrapping(tree: ast.AST) -> List[Tuple[int, str]]:
    """Calls of nn.DataParallel, and of a Trainer of transformers or of a library on it."""
    hugging_face = {"transformers", "trl", "sentence_transformers", "setfit"}
    trainers = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in hugging_face:
            trainers |= {alias.asname or alias.name for alias in node.names if alias.name.endswith("Trainer")}
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).split(".")[-1] in trainers for base in node.bases):
            trainers.add(node.name)
    result = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.split(".")[-1]
            of_library = last.endswith("Trainer") and name.split(".")[0] in hugging_face
            if last == "DataParallel" or name in trainers or of_library:
                result.append((node.lineno, last))
    return result


GPUS = "two GPUs: both devices are the CPU; the wrapper, its replicas and their threads are torch's own"
DP = "one process, and a replica of the model for each device in every step"
REPLICA = raised(r"Caught StopIteration in replica 0 on device 0")


def experiment(name: str, fails: Any, works: Any, expect: Expect, because: str, fix: str, **changes: Any) -> Experiment:
    fidelity = changes.pop("fidelity", "stand-in")
    stands_for = changes.pop("stands_for", GPUS) if fidelity != "cpu" else ""
    return Experiment(
        name=name,
        control=Arm(fails, expect, because=because, fidelity=fidelity, stands_for=stands_for),
        treatment=Arm(works, completed(), because=fix, fidelity=fidelity, stands_for=stands_for),
        **{"world_size": 1, "deadline_s": 60, "expected_s": (1.0, 1.0), **changes},
    )


launched = experiment(
    "replicas",
    partial(train, way="DataParallel"),
    partial(train, way="DistributedDataParallel"),
    REPLICA,
    because=DP + "; parameters() of a replica is empty",
    fix="a process for each device, and each has a model of its own",
    world_size=2,
)

probe = Probe(
    check=check,
    params={
        "code": Param("path", "your training script"),
        "gpus": Param("int", "GPUs that the job sees (default: from the environment)"),
    },
    experiments=(launched.on_gpus(expected_s=(12, 12)), launched),
    variants=(
        experiment(
            "attribute",
            partial(attribute, inner=False),
            partial(attribute, inner=True),
            raised(r"'DataParallel' object has no attribute 'config'"),
            because="the wrapper has none of the model's attributes",
            fix="the model in the wrapper has them",
            fidelity="cpu",
        ),
        experiment(
            "other-device",
            partial(place, device="meta"),
            partial(place, device="cpu"),
            raised(r"module must have its parameters and buffers on device cpu \(device_ids\[0\]\) but found one"),
            because="the model is not on the first device of the wrapper",
            fix="the model is on that device",
        ),
        experiment(
            "lost-writes",
            partial(remember, way="DataParallel"),
            partial(remember, way="one device"),
            symptom(r"after 3 steps the counter of the model is 0: forward wrote it in replicas"),
            because=DP + ", which is thrown away with what forward wrote into it",
            fix="one model, as in a process of its own",
        ),
        experiment(
            "dropped",
            partial(scatter, repeated=False),
            partial(scatter, repeated=True),
            symptom(r"1 of 2 devices gets samples, 4 of 8"),
            because="the count of tokens has one element, which two devices cannot share",
            fix="the element is repeated for each device",
            stands_for="two GPUs: the parts stay on the CPU; how many there are is decided by torch's own code",
        ),
        experiment(
            "trainer",
            partial(trainer, visible=2),
            partial(trainer, visible=1),
            symptom(r"the Trainer wrapped the model in DataParallel, and a step has 8 samples instead of 4"),
            because="two GPUs are visible, and no launcher has started this process",
            fix="one GPU is visible",
            stands_for="the number of visible GPUs",
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=4.40", "accelerate": ""}),
            expected_s=(6.0, 6.0),
        ),
        experiment(
            "quantized",
            partial(quantized, visible=2),
            partial(quantized, visible=1),
            symptom(r"not wrapped, 8 samples a step instead of 4, and a loss of 2\.0 instead of 1\.0"),
            because="the model stays on one GPU, and the Trainer counts two for the batch and for the loss",
            fix="one GPU is visible",
            stands_for="the number of visible GPUs, and the weights in 8 bits",
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=5.0", "accelerate": ""}),
            expected_s=(6.0, 6.0),
        ),
        experiment(
            "dtype",
            partial(dtype, way="DataParallel"),
            partial(dtype, way="one device"),
            REPLICA,
            because="dtype of a model of transformers 5 is that of the first of its parameters, and a replica has none",
            fix="one model, as in a process of its own",
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=5.0"}),
            expected_s=(6.0, 6.0),
        ),
    ),
)

"""One process runs a model on several GPUs through nn.DataParallel, and it fails; one process per GPU works."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Dict, Iterator, List, Mapping, Tuple
from unittest.mock import patch

from kb.cpu_arms import without_launcher
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
    """Makes one step on two devices with a model whose forward reads its own parameters."""
    import torch

    dist = ctx.init_process_group(timeout_s=60)
    model = build_model(ctx)
    features = torch.arange(BATCH * FEATURES, dtype=torch.float32).reshape(BATCH, FEATURES).to(ctx.device)
    ctx.reached()
    if way == "DataParallel":
        if ctx.rank == 0:  # DataParallel runs in one process
            with devices(ctx):
                data_parallel(ctx, model)(features).mean().backward()
            assert torch.equal(model.layer.weight.grad, features.mean(0, keepdim=True))
    else:
        shard = features[ctx.rank * BATCH // 2 : (ctx.rank + 1) * BATCH // 2]  # DistributedSampler divides in this way
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp(shard).mean().backward()
        assert torch.equal(model.layer.weight.grad, features.mean(0, keepdim=True))
    dist.barrier()


def build_model(ctx: Context) -> Any:
    """A model that has attributes, and whose forward reads its own parameters and counts its calls."""
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
    """torch's wrapper for two devices; without GPUs, the probe makes it use the CPU as both."""
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
    """Without GPUs, keeps the copies for each device on the CPU; torch creates the replicas and their threads."""
    import importlib

    import torch

    if ctx.device.type == "cuda":
        yield
        return
    replicate = importlib.import_module("torch.nn.parallel.replicate")
    apply = importlib.import_module("torch.nn.parallel.parallel_apply")

    class Patched:
        """A module of torch in which some functions are replaced."""

        def __init__(self, module: Any, **stubs: Any) -> None:
            self.__dict__.update(stubs, module=module)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.module, name)

    calls: Dict[str, Any] = dict.fromkeys(
        ("current_stream", "stream", "device", "device_index"), lambda *_: nullcontext()
    )
    calls.update(is_available=lambda: True, current_accelerator=lambda: torch.device("cpu"))
    accelerator = Patched(getattr(torch, "accelerator", None), **calls)  # torch 2.6 and newer
    cuda = Patched(torch.cuda, **calls)

    def copies(tensors: Any, ids: Any, detach: bool = False) -> List[List[Any]]:
        return [[tensor.detach() if detach else tensor.view_as(tensor) for tensor in tensors] for _ in ids]

    stubs: Dict[str, Any] = {"torch": Patched(torch, cuda=cuda, accelerator=accelerator)}
    if hasattr(apply, "_get_available_device_type"):
        stubs["_get_available_device_type"] = lambda: "cuda"
    with ExitStack() as stack:
        stack.enter_context(patch.object(replicate, "_broadcast_coalesced_reshape", copies))
        stack.enter_context(patch.multiple(apply, **stubs))
        yield


def attribute(ctx: Context, *, inner: bool) -> None:
    """Reads an attribute of the model from the wrapper, or from the model inside it."""
    import torch

    wrapper: Any = torch.nn.DataParallel(build_model(ctx))
    ctx.reached()
    config = wrapper.module.config if inner else wrapper.config
    assert config["hidden_size"] == FEATURES


def place(ctx: Context, *, device: str) -> None:
    """Runs the wrapper while the model is on `device`; the first device of the wrapper is the CPU."""
    import torch

    wrapper = data_parallel(ctx, build_model(ctx).to(device))
    ctx.reached()
    with torch.no_grad():
        wrapper.device_ids = [0]
        assert wrapper(torch.ones(BATCH, FEATURES)).shape == (BATCH, 1)


def remember(ctx: Context, *, way: str) -> None:
    """Runs a model that counts its steps in forward."""
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
    """Trains with the Trainer of transformers, without a launcher, while `visible` GPUs are visible."""
    import torch
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    without_launcher()
    options = {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "max_steps": 2}
    arguments = TrainingArguments(ctx.path("out"), per_device_train_batch_size=4, **options)
    assert arguments.device.type == "cpu"  # reading it also counts the GPUs
    arguments._n_gpu = visible
    samples = [{"x": torch.ones(1), "labels": torch.zeros(1, dtype=torch.long)}] * 64
    job = Trainer(model, arguments, train_dataset=samples)
    ctx.reached()
    return job, job.train()


def trainer(ctx: Context, *, visible: int) -> None:
    """Raises `Symptom` if the Trainer wraps the model in DataParallel."""
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
    """Trains a model that claims to have 8-bit weights; like transformers, it divides the loss by the token count."""
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
    loss = round(result.training_loss, 2)  # the right loss is 1, because the learning rate is small
    if loss > 1.5:
        raise Symptom(f"not wrapped, {sizes[0]} samples a step instead of 4, and a loss of {loss} instead of 1.0")
    assert (sizes[0], loss) == (4, 1.0), (sizes, loss)


def dtype(ctx: Context, *, way: str) -> None:
    """Runs a model of transformers 5 that reads its own dtype in forward."""
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
    """Splits a batch for two devices with torch's code; the token count is one of the arguments of forward."""
    from types import SimpleNamespace

    import torch
    from torch.nn.parallel import scatter_gather

    count = torch.tensor(30).unsqueeze(0)
    if repeated:
        count = count.expand(2, -1)  # transformers 4.57 does this
    batch = {"input_ids": torch.arange(BATCH), "num_items_in_batch": count}
    copies = SimpleNamespace(apply=lambda devices, _, dim, tensor: tensor.chunk(len(devices), dim))
    ctx.reached()
    with patch.object(scatter_gather, "Scatter", copies):
        _, parts = scatter_gather.scatter_kwargs((), batch, [0, 1])
    samples = sum(len(part["input_ids"]) for part in parts)
    if samples < BATCH:
        raise Symptom(f"{len(parts)} of 2 devices gets samples, {samples} of {BATCH}")
    assert [part["input_ids"].tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]


# --- the check: does this code wrap a model, without a launcher, while several GPUs are visible? ----------------------


def check(params: Mapping[str, Any]) -> Finding:
    """Compares the number of visible GPUs with what a training script wraps."""
    gpus, source = visible_gpus(params["gpus"])
    code, found, names_gpus, elsewhere = params["code"], [], False, ""
    evidence = [f"{gpus} GPUs are visible ({source})" if gpus >= 0 else source]
    if code is not None:
        try:
            text = code.read_text("utf-8")
            found, names_gpus = wrapping(ast.parse(text)), "CUDA_VISIBLE_DEVICES" in text
            elsewhere = next((word for word in ("device_map", "deepspeed") if word in text), "")
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return unknown(*evidence, f"kb cannot read {code}: {type(error).__name__}")
    if names_gpus and params["gpus"] is None:
        advice = "run --set gpus=4 with the number that the script makes visible"
        return unknown(*evidence, f"{code} itself names CUDA_VISIBLE_DEVICES", advice=advice)
    if gpus in (0, 1):
        return clear(*evidence, "DataParallel needs at least two GPUs")
    if code is None:
        return unknown(*evidence, "kb needs your training script", advice="run --set code=train.py")
    explicit = [f"{code}:{line}: {name}" for line, name in found if name == "DataParallel"]
    implicit = [f"{code}:{line}: {name}" for line, name in found if name != "DataParallel"]
    if gpus < 0:
        return unknown(*evidence, *explicit, *implicit, advice="run this on the node of the job, or with --set gpus=4")
    if explicit:
        return exposed(*evidence, *explicit, advice="use DistributedDataParallel, and start the script with torchrun")
    if implicit and os.environ.get("LOCAL_RANK", "-1").isdecimal():
        return clear(*evidence, "LOCAL_RANK is set, so the Trainer uses one GPU in this process")
    if implicit and elsewhere:
        why = f"the script names {elsewhere}, with which the Trainer may not use DataParallel"
        return unknown(*evidence, *implicit, why, advice="print(trainer.args.n_gpu, trainer.args.parallel_mode)")
    if implicit:  # the Trainer ignores RANK alone, which a Kubernetes operator may set
        advice = "run torchrun --nproc-per-node %d %s, or set CUDA_VISIBLE_DEVICES=0" % (gpus, code.name)
        why = "LOCAL_RANK is not set here, so python %s alone would use DataParallel" % code.name
        return exposed(*evidence, *implicit, why, advice=advice)
    return unknown(*evidence, f"{code} names neither DataParallel nor a Trainer; kb does not read what it imports")


def visible_gpus(given: Any) -> Tuple[int, str]:
    """The number of GPUs that CUDA would see and its source, or -1 and why kb does not know it."""
    if given is not None:
        return given, "as given"
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is not None:
        entries = [entry.strip() for entry in variable.split(",")]
        entries = entries[: entries.index("-1")] if "-1" in entries else entries  # CUDA stops at the first invalid one
        if entries in ([], [""]):
            return 0, f"CUDA_VISIBLE_DEVICES={variable}"
        if len(set(entries)) < len(entries) or not all(re.fullmatch(r"\d+|GPU-[\w-]+", entry) for entry in entries):
            return -1, f"CUDA_VISIBLE_DEVICES={variable}, and kb cannot tell how many GPUs that makes visible"
        return len(entries), f"CUDA_VISIBLE_DEVICES={variable}"
    try:
        ran = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=0.8, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return -1, "CUDA_VISIBLE_DEVICES is not set, and nvidia-smi does not answer"
    gpus = len(re.findall(r"^GPU \d+:", ran.stdout, re.MULTILINE))
    if not gpus or re.search(r"^\s*MIG ", ran.stdout, re.MULTILINE):
        return -1, "nvidia-smi -L lists %s" % ("MIG instances, of which CUDA does not see all" if gpus else "no GPU")
    return gpus, "nvidia-smi -L"


def wrapping(tree: ast.AST) -> List[Tuple[int, str]]:
    """The lines and names of calls of nn.DataParallel, and of a Trainer of transformers or a library built on it."""
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
            from_library = last.endswith("Trainer") and name.split(".")[0] in hugging_face
            if last == "DataParallel" or name in trainers or from_library:
                result.append((node.lineno, last))
    return result


GPUS = "two GPUs; the CPU is both devices, and torch's own code creates the wrapper, its replicas and their threads"
DP = "one process creates a replica of the model for each device in every step"
ONE_MODEL = "the process has one device and uses the model itself"
REPLICA = raised(r"Caught StopIteration in replica 0 on device 0")


def experiment(
    name: str, control: Any, treatment: Any, expect: Expect, because: str, fix: str, **changes: Any
) -> Experiment:
    fidelity = changes.pop("fidelity", "stand-in")
    stands_for = changes.pop("stands_for", GPUS) if fidelity != "cpu" else ""
    return Experiment(
        name=name,
        control=Arm(control, expect, because=because, fidelity=fidelity, stands_for=stands_for),
        treatment=Arm(treatment, completed(), because=fix, fidelity=fidelity, stands_for=stands_for),
        **{"world_size": 1, "deadline_s": 60, "expected_s": (1.0, 1.0), **changes},
    )


launched = experiment(
    "replicas",
    partial(train, way="DataParallel"),
    partial(train, way="DistributedDataParallel"),
    REPLICA,
    because=DP + ", and parameters() of a replica is empty",
    fix="each device has its own process with its own model",
    world_size=2,
)

probe = Probe(
    check=check,
    params={
        "code": Param("path", "your training script"),
        "gpus": Param("int", "number of GPUs that the job sees; default: from the environment"),
    },
    experiments=(launched.on_gpus(expected_s=(12, 12)), launched),
    variants=(
        experiment(
            "attribute",
            partial(attribute, inner=False),
            partial(attribute, inner=True),
            raised(r"'DataParallel' object has no attribute 'config'"),
            because="the script reads config from the wrapper, which has none of the model's attributes",
            fix="the script reads config from the model in the wrapper",
            fidelity="cpu",
        ),
        experiment(
            "other-device",
            partial(place, device="meta"),
            partial(place, device="cpu"),
            raised(r"module must have its parameters and buffers on device cpu \(device_ids\[0\]\) but found one"),
            because="the model is not on the first device of the wrapper",
            fix="the model is on the first device of the wrapper",
        ),
        experiment(
            "lost-writes",
            partial(remember, way="DataParallel"),
            partial(remember, way="one device"),
            symptom(r"after 3 steps the counter of the model is 0: forward wrote it in replicas"),
            because=DP + ", and discards it with everything that forward wrote into it",
            fix=ONE_MODEL,
        ),
        experiment(
            "dropped",
            partial(scatter, repeated=False),
            partial(scatter, repeated=True),
            symptom(r"1 of 2 devices gets samples, 4 of 8"),
            because="the token count has one element, which torch cannot split for two devices",
            fix="the token count is repeated for each device",
            stands_for="two GPUs; the parts stay on the CPU, but torch's own code splits the batch",
        ),
        experiment(
            "trainer",
            partial(trainer, visible=2),
            partial(trainer, visible=1),
            symptom(r"the Trainer wrapped the model in DataParallel, and a step has 8 samples instead of 4"),
            because="two GPUs are visible, and no launcher started this process",
            fix="only one GPU is visible",
            stands_for="the visible GPUs; the probe sets their number in the arguments of the Trainer",
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=4.40", "accelerate": ""}),
            expected_s=(6.0, 6.0),
        ),
        experiment(
            "quantized",
            partial(quantized, visible=2),
            partial(quantized, visible=1),
            symptom(r"not wrapped, 8 samples a step instead of 4, and a loss of 2\.0 instead of 1\.0"),
            because="the model stays on one GPU, but the Trainer assumes two for the batch and the loss",
            fix="only one GPU is visible",
            stands_for="visible GPUs and 8-bit weights; the probe sets the number of GPUs and a flag of the model",
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=5.0", "accelerate": ""}),
            expected_s=(6.0, 6.0),
        ),
        experiment(
            "dtype",
            partial(dtype, way="DataParallel"),
            partial(dtype, way="one device"),
            REPLICA,
            because="transformers 5 takes the dtype of a model from its first parameter, and a replica has none",
            fix=ONE_MODEL,
            needs=Needs(packages={"torch": ">=2.1", "transformers": ">=5.0"}),
            expected_s=(6.0, 6.0),
        ),
    ),
)

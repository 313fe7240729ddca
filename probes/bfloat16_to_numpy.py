"""NumPy has no bfloat16, so a bfloat16 tensor must become float32, or its bits integers, before it becomes an array."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kb.cpu_arms import without_launcher
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, Unavailable, completed, raised, symptom


def to_numpy(t):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    t = t.detach().cpu()
    if t.is_floating_point() and t.element_size() < 4:
        t = t.float()
    return t.numpy()


array_of: Any = to_numpy  # the entry prints the function without annotations


def numbers(*values: float) -> Any:
    """A bfloat16 tensor; raises `Unavailable` if this torch cannot use NumPy."""
    import torch

    try:
        torch.ones(1).numpy()
    except RuntimeError as error:
        raise Unavailable(str(error)) from error
    return torch.tensor(values, dtype=torch.bfloat16)


def evaluate(ctx: Context, *, convert: bool) -> None:
    """Gathers the predictions of all ranks; rank 0 converts them to an array for its metric."""
    import torch

    numbers()
    dist = ctx.init_process_group(timeout_s=10)
    model = torch.nn.Linear(4, 3).bfloat16()
    with torch.no_grad():
        logits = model(torch.ones(2, 4, dtype=torch.bfloat16))
    gathered = [torch.zeros_like(logits) for _ in range(ctx.world_size)]
    dist.all_gather(gathered, logits)
    ctx.reached()
    if ctx.rank == 0:
        predictions = torch.cat(gathered)
        array = array_of(predictions) if convert else predictions.cpu().numpy()
        assert array.dtype.name == "float32" and array.shape == (2 * ctx.world_size, 3), array
        assert (array == predictions.double().numpy()).all()
        assert array_of(predictions.argmax(-1)).dtype.name == "int64"
    dist.barrier()


def make_array(ctx: Context, *, way: str) -> None:
    """Converts a tensor in the ways that people write instead of to_numpy, or with to_numpy."""
    import numpy as np
    import torch

    t = numbers(0.5, 1.5)
    losses: list[Any] = list(t)
    ctx.reached()
    if way == "force":
        array = t.numpy(force=True)
    elif way == "dtype":
        array = np.asarray(t, dtype=np.float32)
    elif way == "mean":
        array = np.mean(losses)
    elif way == "items":
        array = np.mean([loss.item() for loss in losses])
    elif way == "float8":
        array = t.to(torch.float8_e5m2).numpy()
    elif way == "float8, converted":
        array = array_of(t.to(torch.float8_e5m2))
    else:
        array = array_of(t)
    assert np.mean(array) == 1.0, array


def as_float(ctx: Context, *, way: str) -> None:
    """Converts numbers that bfloat16 can represent but float16 cannot."""
    t = numbers(70144.0, 2.0**-30)
    ctx.reached()
    array = t.half().numpy() if way == "half" else t.float().numpy()
    if array.tolist() != t.tolist():
        raise Symptom("%s became %s" % (t.tolist(), array.tolist()))


def add(ctx: Context, *, way: str) -> None:
    """Adds losses, and converts the sum to an array."""
    total = numbers(0.0)
    loss = numbers(1.0)
    ctx.reached()
    for _ in range(1000):
        total = total + (loss.float() if way == "float" else loss)
    array = total.float().numpy()
    if array[0] != 1000:
        raise Symptom("the sum of 1000 losses of 1.0 is %.1f" % array[0])


def keep_bits(ctx: Context, *, way: str) -> None:
    """Stores activations or weights in 2 bytes per number without changing them, and reads them back."""
    import torch

    t = numbers(1.0, -3.0, 70144.0)
    ctx.reached()
    array = t.view(torch.int16).numpy() if way == "bits" else t.numpy()
    assert array.nbytes == 6
    assert torch.equal(torch.from_numpy(array).view(torch.bfloat16), t)


def load_file(ctx: Context, *, way: str) -> None:
    """Reads a file of bfloat16 weights with safetensors.numpy or with safetensors.torch."""
    import safetensors.numpy as through_numpy  # type: ignore[import-not-found]
    import safetensors.torch as through_torch  # type: ignore[import-not-found]

    path = ctx.path("model.safetensors")
    through_torch.save_file({"weight": numbers(1.0, 2.0)}, path)
    ctx.reached()
    if way == "torch":
        array = array_of(through_torch.load_file(path)["weight"])
    else:
        array = through_numpy.load_file(path)["weight"]
    assert array.tolist() == [1.0, 2.0]


def train(ctx: Context, *, way: str) -> None:
    """The Trainer evaluates a bfloat16 model; with `batch_eval_metrics`, compute_metrics receives tensors."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # type: ignore

    numbers()
    without_launcher()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).bfloat16()
    seen = []

    def compute_metrics(result: Any, compute_result: bool = True) -> dict[str, float]:
        predictions = result.predictions
        if way != "arrays":
            assert predictions.dtype == torch.bfloat16, predictions.dtype
            predictions = array_of(predictions) if way == "converted" else predictions.cpu().numpy()
        assert predictions.dtype.name == "float32"
        seen.append(len(predictions))
        return {"mean": float(predictions.mean())}

    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    options: dict[str, Any] = {"batch_eval_metrics": way != "arrays", "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(ctx.path("out"), use_cpu=True, **options)
    trainer = Trainer(model, arguments, eval_dataset=data, compute_metrics=compute_metrics)
    ctx.reached()
    assert "eval_mean" in trainer.evaluate() and sum(seen) == 4


def load_model(ctx: Context, *, dtype: str | None) -> None:
    """Loads a bfloat16 checkpoint with or without the argument dtype."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    numbers()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 32, "num_hidden_layers": 1}
    name = ctx.path("model")
    LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).bfloat16().save_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, **({"dtype": dtype} if dtype else {}))
    ctx.reached()
    with torch.no_grad():
        assert model(torch.arange(8)[None]).logits.numpy().dtype.name == "float32"


UNSUPPORTED = r"Got unsupported ScalarType BFloat16"
CONVERTED = "to_numpy converts the tensor to float32 first"


def pair(name: str, job: Callable[..., None], expect: Expect, because: tuple[str, str], **options: Any) -> Experiment:
    """The remaining option is the argument in which the arms differ, with its values in control and treatment."""
    needs = {"torch": ">=2.1", "numpy": "", **options.pop("needs", {})}
    size = options.pop("world_size", 1)
    [(key, values)] = options.items()
    control, treatment = (partial(job, **{key: value}) for value in values)
    return Experiment(
        name=name,
        control=Arm(control, expect, because[0], "cpu"),
        treatment=Arm(treatment, completed(), because[1], "cpu"),
        world_size=size,
        needs=Needs(packages=needs),
        deadline_s=120,
        expected_s=(10.0, 10.0) if "transformers" in needs else (1.0, 1.0),
    )


BATCH_METRICS = {"transformers": ">=4.42", "accelerate": ">=0.30"}
TRANSFORMERS_5 = {"transformers": ">=5.0", "torch": ">=2.4"}
SAFETENSORS = {"safetensors": ">=0.4"}
NO_TYPE = raised(r"data type 'bfloat16' not understood")
RAISES = raised(UNSUPPORTED)
FLOAT8 = raised(r"Got unsupported ScalarType Float8_e5m2")
INFINITE = symptom(r"\[70144\.0, 9\.\d+e-10\] became \[inf, 0\.0\]")
STUCK = symptom(r"the sum of 1000 losses of 1\.0 is 256\.0")
GATHERED = ("rank 0 calls numpy() on the gathered bfloat16 tensors", CONVERTED)
SCALARS = ("np.mean gets a list of bfloat16 tensors", "np.mean gets a list of Python floats, from item()")
HALF = ("half() turns a large number into inf and a small one into 0", "float() keeps every number")
READ = ("safetensors.numpy cannot read bfloat16 weights", "safetensors.torch reads them, and to_numpy converts them")
TENSORS = "with batch_eval_metrics, compute_metrics receives bfloat16 tensors and calls numpy()"
ARRAYS = (TENSORS, "without batch_eval_metrics, the Trainer passes float32 arrays to compute_metrics")
DTYPE = (
    "transformers 5 loads the model in the dtype of the checkpoint, bfloat16",
    'dtype="float32" loads the model in float32',
)

probe = Probe(
    experiments=(pair("evaluation", evaluate, RAISES, GATHERED, world_size=2, convert=(False, True)),),
    variants=(
        pair(
            "force",
            make_array,
            RAISES,
            ("numpy(force=True) does not convert bfloat16", CONVERTED),
            way=("force", "float"),
        ),
        pair(
            "dtype",
            make_array,
            RAISES,
            ("np.asarray(t, dtype=np.float32) calls numpy() first", CONVERTED),
            way=("dtype", "float"),
        ),
        pair("scalars", make_array, RAISES, SCALARS, way=("mean", "items")),
        pair(
            "float8", make_array, FLOAT8, ("NumPy has no float8 either", CONVERTED), way=("float8", "float8, converted")
        ),
        pair("float16", as_float, INFINITE, HALF, way=("half", "float")),
        pair(
            "sum",
            add,
            STUCK,
            ("the sum in bfloat16 stops growing at 256", "float() converts each loss before the addition"),
            way=("bfloat16", "float"),
        ),
        pair(
            "bits",
            keep_bits,
            RAISES,
            ("the job calls numpy() on the bfloat16 tensor", "view(torch.int16) gives NumPy the bits of the tensor"),
            way=("array", "bits"),
        ),
        pair("safetensors", load_file, NO_TYPE, READ, needs=SAFETENSORS, way=("numpy", "torch")),
        pair("batch-metrics", train, RAISES, (TENSORS, CONVERTED), needs=BATCH_METRICS, way=("tensors", "converted")),
        pair("trainer-arrays", train, RAISES, ARRAYS, needs=BATCH_METRICS, way=("tensors", "arrays")),
        pair("loaded-dtype", load_model, RAISES, DTYPE, needs=TRANSFORMERS_5, dtype=(None, "float32")),
    ),
)

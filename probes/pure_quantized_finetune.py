"""Full fine-tuning of a quantized model fails: packed weights cannot have a gradient, and the Trainer refuses them."""

from functools import partial
from typing import Any, Callable, Dict, Tuple

from kb.cpu_arms import without_launcher
from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

INTEGERS = r"[oO]nly Tensors of floating point (and complex )?dtype can require gradients"
REFUSED = r"You cannot perform fine-tuning on purely quantized models"
QUANTIZED_LAYERS = 7  # in a Llama of one block


def train_packed(ctx: Context, *, adapter: bool) -> None:
    """Trains the integers of an 8-bit layer, or two small float matrices next to them."""
    import torch

    torch.manual_seed(0)
    packed = torch.randint(-127, 128, (8, 8), dtype=torch.int8)
    weight = torch.nn.Parameter(packed.clone(), requires_grad=False)
    down, up = torch.nn.Parameter(torch.randn(4, 8)), torch.nn.Parameter(torch.zeros(8, 4))
    ctx.reached()
    if not adapter:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([down, up] if adapter else [weight], lr=0.05)
    x, losses = torch.randn(16, 8), []
    for _ in range(20):
        loss = (x @ (weight.float() / 127).T + x @ down.T @ up.T - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses
    assert torch.equal(weight, packed)


def load(ctx: Context, *, published: bool = False) -> Any:
    """Loads a tiny model in 4 bits with bitsandbytes, from float weights or from files that are already 4-bit."""
    import torch
    from transformers import (  # type: ignore[import-not-found]
        AutoModelForCausalLM,
        BitsAndBytesConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(0)
    name, placed = ctx.path("model"), {"device_map": {"": "cpu"}}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 32, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).save_pretrained(name)
    in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=in_4_bits, **placed)
    if published:
        name = ctx.path("4bit")
        model.save_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, **placed)  # without a quantization config
    assert not model.model.layers[0].mlp.up_proj.weight.is_floating_point(), "the model is not quantized"
    return model


def adapt(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model  # type: ignore[import-not-found]

    model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    assert any("lora_B" in name for name, _ in model.named_parameters())
    return model


def make_model(ctx: Context, way: str) -> Any:
    """Makes the model that the Trainer receives."""
    model = load(ctx, published=way.startswith("published"))
    if way == "result discarded":
        adapt(model)
    if way == "adapter":
        model = adapt(model)
    if way == "published, dequantized":
        model = model.dequantize().float()
    if way == "check bypassed":
        model.is_quantized = False
    return model


def make_trainer(ctx: Context, model: Any) -> Any:
    import torch
    from transformers import Trainer, TrainingArguments

    without_launcher()
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    options: Dict[str, Any] = {"max_steps": 3, "learning_rate": 0.1, "save_strategy": "no", "report_to": []}
    arguments = TrainingArguments(ctx.path("out"), use_cpu=True, disable_tqdm=True, **options)
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data)


def weights(model: Any) -> Dict[str, Any]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(ctx: Context, *, way: str) -> None:
    """Trains the model for three steps with the Trainer. A layer learns in its weight or in its adapter."""
    import torch

    model = make_model(ctx, way)
    before = weights(model)
    ctx.reached()
    trainer = make_trainer(ctx, model)
    trainer.train()
    after = weights(model)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    learned = sum(name.endswith(("_proj.weight", "lora_B.default.weight")) for name in changed)
    if learned == 0:
        raise Symptom("training changed %d tensors, and 0 of %d quantized layers" % (len(changed), QUANTIZED_LAYERS))
    assert learned == QUANTIZED_LAYERS, changed


def evaluate(ctx: Context, *, adapter: bool) -> None:
    """Evaluates the model with a Trainer. A new, disabled adapter does not change the output of the model."""
    import torch

    model = load(ctx)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(input_ids=tokens, labels=tokens).loss.item()
    if adapter:
        model = adapt(model)
    ctx.reached()
    trainer = make_trainer(ctx, model)
    with model.disable_adapter():
        loss = trainer.evaluate()["eval_loss"]
    assert abs(loss - expected) < 1e-4, (loss, expected)


def pair(
    name: str,
    job: Callable[..., None],
    expect: Expect,
    because: Tuple[str, str],
    stands_for: str = "",
    needs: Any = None,
    **keyword: Any,
) -> Experiment:
    """`keyword`: the keyword in which the arms differ, with its values in the control and the treatment arm."""
    fidelity = "stand-in" if stands_for else "cpu"
    [(key, values)] = keyword.items()
    control, treatment = (partial(job, **{key: value}) for value in values)
    return Experiment(
        name=name,
        control=Arm(control, expect, because[0], fidelity, stands_for),
        treatment=Arm(treatment, completed(), because[1], fidelity, stands_for),
        world_size=1,
        needs=Needs(packages=needs or LIBRARIES),
        deadline_s=240,
        expected_s=(1.0, 1.0) if needs else (10.0, 10.0),
    )


LIBRARIES = {
    "torch": ">=2.4",
    "accelerate": ">=1.1",
    "transformers": ">=5.0",
    "bitsandbytes": ">=0.50",
    "peft": ">=0.18",
}
ADAPTED = "the Trainer receives the PeftModel"
DISCARDED = "the script discards the result of get_peft_model, and passes the base model"
SAVED = "the files are already 4-bit, and the Trainer receives the quantized model"
EVALUATES = "the Trainer refuses a quantized model even if it only evaluates"
BYPASSED = "model.is_quantized = False bypasses the check, but the packed weights do not train"
NONE = raised(REFUSED)
UNCHANGED = symptom(r"training changed [1-9]\d* tensors, and 0 of 7 quantized layers")

probe = Probe(
    experiments=(
        pair(
            "integers",
            train_packed,
            raised(INTEGERS),
            (
                "requires_grad_(True) on packed integer weights raises an error",
                "trains a float adapter next to the packed weights",
            ),
            stands_for="a layer of bitsandbytes and its packed weights",
            needs={"torch": ">=2.1"},
            adapter=(False, True),
        ),
    ),
    variants=(
        pair("result", train, NONE, (DISCARDED, ADAPTED), way=("result discarded", "adapter")),
        pair(
            "published",
            train,
            NONE,
            (SAVED, "dequantize() turns the weights into floats first"),
            way=("published", "published, dequantized"),
        ),
        pair("evaluation", evaluate, NONE, (EVALUATES, "the model has a new, disabled adapter"), adapter=(False, True)),
        pair("unchecked", train, UNCHANGED, (BYPASSED, ADAPTED), way=("check bypassed", "adapter")),
    ),
)

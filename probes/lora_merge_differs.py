"""An adapter is added to other weights than those it was trained on, or to a type that rounds it away."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, Callable, Dict, Mapping

from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, completed, symptom

INPUTS, OUTPUTS, SAMPLES, RANK = 256, 16, 512, 4
BLOCK = 32  # weights that share a scale
LIMIT = 0.1  # of what the adapter changes


def merge(ctx: Context, *, trained_on: str, into: str, saved_as: str = "bfloat16", size: float = 0.03) -> None:
    """A linear layer with an adapter: the merged layer is compared with the layer and its adapter.

    `trained_on` and `into` are "original", "four-bit" or "sft"; `saved_as` is a type, or "four-bit" for a quantization
    after the merge. `size` is how much the task differs from the base, relative to the weights.
    """
    import torch

    torch.manual_seed(0)
    original = (torch.randn(OUTPUTS, INPUTS) / INPUTS**0.5).bfloat16().float()
    x = torch.randn(SAMPLES, INPUTS) + 1.0
    bases = {"original": original, "four-bit": four_bit(original)}
    if "sft" in (trained_on, into):
        bases["sft"] = original + train(original, x, changed(original, 0.1))
    base = bases[trained_on]
    delta = train(base, x, changed(base if trained_on == "sft" else original, size))
    merged = bases[into] + delta
    merged = four_bit(merged) if saved_as == "four-bit" else merged.to(getattr(torch, saved_as)).float()
    ctx.reached()
    judge(ctx, float((x @ (merged - base - delta).T).norm() / (x @ delta.T).norm()))


def changed(weights: Any, size: float) -> Any:
    """The weights that the task asks for: a change of low rank."""
    import torch

    change = torch.randn(OUTPUTS, RANK) @ torch.randn(RANK, INPUTS)
    return weights + size * change / (INPUTS * RANK) ** 0.5


def train(base: Any, x: Any, wanted: Any) -> Any:
    """The product of the two matrices of an adapter, trained on the frozen base."""
    import torch

    a = (torch.randn(RANK, INPUTS) / INPUTS**0.5).requires_grad_()
    b = torch.zeros(OUTPUTS, RANK).requires_grad_()
    optimizer = torch.optim.AdamW([a, b], lr=3e-3, weight_decay=0.0)
    for _ in range(300):
        loss = (x @ (base + b @ a - wanted).T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (b @ a).detach()


def four_bit(weights: Any) -> Any:
    """The weights after a quantization to four bits with a scale per block, and back."""
    blocks = weights.reshape(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / 7
    return ((blocks / scale).round().clamp(-8, 7) * scale).reshape(weights.shape)


def judge(ctx: Context, error: float) -> None:
    ctx.note(merge_error=round(error, 4))
    if error > LIMIT:
        raise Symptom(f"the merged model is off by {error:.0%} of what the adapter changes")


def compare_with_dropout(ctx: Context, *, evaluates: bool) -> None:
    """A correct merge, compared in training mode, in which the adapter's dropout is active, or in evaluation mode."""
    import torch

    torch.manual_seed(0)
    base, a, b = torch.randn(OUTPUTS, INPUTS), torch.randn(RANK, INPUTS), torch.randn(OUTPUTS, RANK)
    dropout, x = torch.nn.Dropout(0.05).train(not evaluates), torch.randn(SAMPLES, INPUTS)
    ctx.reached()
    adapted = x @ base.T + dropout(x) @ a.T @ b.T
    judge(ctx, float((x @ (base + b @ a).T - adapted).norm() / (adapted - x @ base.T).norm()))


def merge_error(model: Any, merged: Any, **inputs: Any) -> float:
    import torch

    model.eval()
    merged.eval()
    with torch.no_grad():
        adapted = model(**inputs).logits.float()
        with model.disable_adapter():
            base = model(**inputs).logits.float()
        return float((merged(**inputs).logits.float() - adapted).norm() / (adapted - base).norm())


class Llama:
    """A small Llama in a folder, and the adapters that are trained on it."""

    def __init__(self, ctx: Context) -> None:
        import torch

        self.transformers: Any = importlib.import_module("transformers")
        self.peft: Any = importlib.import_module("peft")
        sizes: Dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
        config = self.transformers.LlamaConfig(
            vocab_size=64, hidden_size=64, intermediate_size=128, tie_word_embeddings=False, **sizes
        )
        torch.manual_seed(0)
        self.path = ctx.path
        self.base_id = ctx.path("base")
        self.transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(self.base_id)
        self.inputs = {"input_ids": torch.randint(0, 64, (16, 12))}

    def load(self, **options: Any) -> Any:
        import torch

        return self.transformers.AutoModelForCausalLM.from_pretrained(self.base_id, dtype=torch.bfloat16, **options)

    def train(self, base: Any, name: str, lr: float) -> Any:
        """The model with a new adapter, which is saved in the folder `name`."""
        import torch

        options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        model = self.peft.get_peft_model(base, self.peft.LoraConfig(r=4, lora_alpha=8, **options))
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=lr)
        for _ in range(20):
            model(**self.inputs, labels=self.inputs["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.save_pretrained(self.path(name))
        return model


def merge_quantized(ctx: Context, *, into: str) -> None:
    """QLoRA with bitsandbytes on the CPU; the merged model is saved and loaded again."""
    import torch

    llama = Llama(ctx)
    AutoModelForCausalLM, PeftModel = llama.transformers.AutoModelForCausalLM, llama.peft.PeftModel  # noqa: N806
    quantization = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    config = llama.transformers.BitsAndBytesConfig(load_in_4bit=True, **quantization)
    model = llama.train(llama.load(quantization_config=config), "adapter", lr=3e-4)
    base_id, adapter, out = llama.base_id, ctx.path("adapter"), ctx.path("merged")
    ctx.reached()
    if into == "dequantized":
        base = AutoModelForCausalLM.from_pretrained(base_id, quantization_config=config, dtype=torch.bfloat16)
        base = base.dequantize()
        merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()
        merged.save_pretrained(out)
        merged = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    else:
        other = llama.load(quantization_config=config) if into == "four-bit" else llama.load()
        merged = PeftModel.from_pretrained(other, adapter).merge_and_unload()
    judge(ctx, merge_error(model, merged, **llama.inputs))


def merge_stages(ctx: Context, *, both: bool) -> None:
    """A second adapter, trained on the model into which the first was merged."""
    llama = Llama(ctx)
    PeftModel = llama.peft.PeftModel  # noqa: N806
    sft_adapter, dpo_adapter = ctx.path("sft"), ctx.path("dpo")
    trained = llama.train(llama.load(), "sft", lr=1e-2).merge_and_unload()
    model = llama.train(trained, "dpo", lr=3e-3)
    base = llama.load()
    ctx.reached()
    if both:
        sft = PeftModel.from_pretrained(base, sft_adapter).merge_and_unload()
        merged = PeftModel.from_pretrained(sft, dpo_adapter).merge_and_unload()
    else:
        merged = PeftModel.from_pretrained(base, dpo_adapter).merge_and_unload()
    judge(ctx, merge_error(model, merged, **llama.inputs))


def merge_quantized_stages(ctx: Context, *, chained: bool) -> None:
    """Two stages of QLoRA: the second adapter is trained on the merged model of the first, quantized again."""
    import torch

    llama = Llama(ctx)
    PeftModel = llama.peft.PeftModel  # noqa: N806
    quantization = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    config = llama.transformers.BitsAndBytesConfig(load_in_4bit=True, **quantization)
    llama.train(llama.load(quantization_config=config), "sft", lr=1e-2)
    sft = PeftModel.from_pretrained(llama.load(quantization_config=config).dequantize(), ctx.path("sft"))
    sft = sft.merge_and_unload()
    sft.save_pretrained(ctx.path("merged-sft"))
    llama.base_id = ctx.path("merged-sft")
    model = llama.train(llama.load(quantization_config=config), "dpo", lr=3e-4)
    ctx.reached()
    base = sft if chained else llama.load(quantization_config=config).dequantize()
    merged = PeftModel.from_pretrained(base, ctx.path("dpo")).merge_and_unload()
    judge(ctx, merge_error(model, merged, **llama.inputs))


OFF = symptom(r"the merged model is off by \d{2,4}% of what the adapter changes")
TRAINED = "the adapter is added to the dequantized weights that it was trained on"


def pair(
    name: str,
    job: Callable[..., None],
    control: Mapping[str, Any],
    treatment: Mapping[str, Any],
    because: str,
    fix: str,
    packages: Mapping[str, str] = {},
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(partial(job, **control), OFF, because, "cpu"),
        treatment=Arm(partial(job, **treatment), completed(), fix, "cpu"),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.1", **packages}, memory_mib=1024),
        deadline_s=90 if packages else 30,
        expected_s=(8.0, 8.0) if packages else (0.5, 0.5),
    )


def job(trained_on: str, into: str, **options: Any) -> Dict[str, Any]:
    return {"trained_on": trained_on, "into": into, **options}


PEFT = {"transformers": ">=4.56", "peft": ">=0.17", "accelerate": ""}
BITSANDBYTES = {**PEFT, "bitsandbytes": ">=0.48"}  # the first releases with four bits on the CPU
QUANTIZED, SMALL = job("four-bit", "four-bit"), job("original", "original", size=0.003)

probe = Probe(
    experiments=(
        pair(
            "quantized",
            merge,
            job("four-bit", "original"),
            QUANTIZED,
            "the adapter was trained on four-bit weights and is added to the original ones",
            TRAINED,
        ),
    ),
    variants=(
        pair(
            "float32",
            merge,
            job("four-bit", "original", saved_as="float32"),
            QUANTIZED,
            "float32 does not help if the adapter is added to the original weights",
            TRAINED,
        ),
        pair(
            "four-bit",
            merge,
            job("four-bit", "four-bit", saved_as="four-bit"),
            QUANTIZED,
            "the merged weights are quantized to four bits again, which rounds the adapter away",
            "the merged weights stay in bfloat16",
        ),
        pair(
            "stages",
            merge,
            job("sft", "original"),
            job("sft", "sft"),
            "the second adapter is added to the base without the first one",
            "the first adapter is merged before the second one",
        ),
        pair(
            "rounding",
            merge,
            SMALL,
            {**SMALL, "saved_as": "float32"},
            "the adapter changes the weights by less than bfloat16 resolves",
            "the merged weights stay in float32",
        ),
        pair(
            "float16",
            merge,
            SMALL,
            {**SMALL, "saved_as": "float16"},
            "the adapter changes the weights by less than bfloat16 resolves",
            "float16 resolves eight times as much",
        ),
        pair(
            "dropout",
            compare_with_dropout,
            {"evaluates": False},
            {"evaluates": True},
            "the merge is right, but the comparison runs in training mode, with dropout",
            "both models are in evaluation mode",
        ),
        pair(
            "peft",
            merge_quantized,
            {"into": "original"},
            {"into": "dequantized"},
            "QLoRA: the adapter is merged into the original bfloat16 model",
            "the adapter is merged into the dequantized model, which is saved and loaded again",
            BITSANDBYTES,
        ),
        pair(
            "peft-four-bit",
            merge_quantized,
            {"into": "four-bit"},
            {"into": "dequantized"},
            "QLoRA: merge_and_unload on the four-bit model rounds the sum to four bits",
            "the adapter is merged into the dequantized model, which is saved and loaded again",
            BITSANDBYTES,
        ),
        pair(
            "peft-stages",
            merge_stages,
            {"both": False},
            {"both": True},
            "the second adapter is merged into the base without the first one",
            "both adapters are merged, in the order of their training",
            PEFT,
        ),
        pair(
            "peft-quantized-stages",
            merge_quantized_stages,
            {"chained": True},
            {"chained": False},
            "both stages are QLoRA, and both adapters are merged into the dequantized first base, one after the other",
            "the second adapter is merged into the merged model of the first stage, quantized and dequantized",
            BITSANDBYTES,
        ),
    ),
)

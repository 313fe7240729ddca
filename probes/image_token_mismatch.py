"""The number of image placeholders in the text differs from the number of features of the vision tower."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import Any, Callable, Dict, Iterator, List, Mapping

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
    Unavailable,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

IMAGE, PAD, TEXT = 0, 1, 5  # token ids; greedy decoding picks the lowest if all are equally likely
PER_IMAGE = 4
LONG = [TEXT] * 4 + [IMAGE] * PER_IMAGE + [TEXT]
SHORT = [TEXT] + [IMAGE] * PER_IMAGE + [TEXT]


def truncated(max_length: int) -> List[List[int]]:
    """Two samples with one image each, truncated and padded as a collator does; it does not change the pixels."""
    width = min(max_length, len(LONG))
    return [(sample + [PAD] * len(LONG))[:width] for sample in (LONG, SHORT)]


def build() -> Any:
    """A LLaVA with a few thousand random weights, which computes four features per image."""
    from transformers import (  # type: ignore[import-not-found]
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    small: Dict[str, int] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**small, num_hidden_layers=2, image_size=8, patch_size=4),
        text_config=LlamaConfig(
            **small, vocab_size=16, num_hidden_layers=1, num_key_value_heads=1, pad_token_id=PAD, eos_token_id=2
        ),
        image_token_index=IMAGE,
        image_seq_length=PER_IMAGE,
    )
    return LlavaForConditionalGeneration(config).eval()


def scatter(ctx: Context, *, max_length: int) -> None:
    """Merges features as the models do, in plain torch: each goes to the next placeholder of the batch."""
    import torch

    input_ids = torch.tensor(truncated(max_length))
    features = torch.arange(2.0).repeat_interleave(PER_IMAGE)  # the number of the image of each feature
    ctx.reached()
    placeholders = input_ids == IMAGE
    merged = torch.full(input_ids.shape, -1.0).masked_scatter(placeholders, features)
    wrong = [row for row in range(2) if (merged[row][placeholders[row]] != row).any()]
    if wrong:
        counts = (int(placeholders.sum()), len(features), wrong[0], 1 - wrong[0])
        raise Symptom(
            "Image features and image tokens do not match: tokens: %d, features %d; sample %d has image %d" % counts
        )
    assert int(placeholders.sum()) == len(features)


def train(ctx: Context, *, max_length: int) -> None:
    import torch

    model = build().to(ctx.device)
    input_ids = torch.tensor(truncated(max_length), device=ctx.device)
    pixel_values = torch.randn(2, 3, 8, 8, device=ctx.device)
    ctx.reached()
    loss = model(input_ids=input_ids, pixel_values=pixel_values, labels=input_ids).loss
    loss.backward()
    assert torch.isfinite(loss)


def train_unchecked(ctx: Context, *, max_length: int) -> None:
    """The folklore turns the comparison off, with TRANSFORMERS_DISABLE_TORCH_CHECK=1."""
    import torch

    try:
        from transformers.utils.import_utils import torch_compilable_check  # type: ignore[import-not-found] # noqa: F401
    except ImportError as error:
        raise Unavailable("this release of transformers does not have TRANSFORMERS_DISABLE_TORCH_CHECK") from error
    torch.manual_seed(0)
    model, pixel_values = build(), torch.randn(2, 3, 8, 8)
    input_ids = torch.tensor(truncated(max_length))
    ctx.reached()
    with torch.no_grad():
        together = model(input_ids=input_ids, pixel_values=pixel_values).logits[1]
        alone = model(input_ids=input_ids[1:], pixel_values=pixel_values[1:]).logits[0]
    difference = float((together - alone).abs().max())
    ctx.note(difference=difference)
    if difference > 1e-4:
        raise Symptom("no error, but a truncated sample changes the logits of an untruncated one by %.4f" % difference)


def roll_out(ctx: Context, *, blocks: bool) -> None:
    """The model generates the placeholder, and training runs on the prompt and this answer."""
    import torch

    model = build().to(ctx.device)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # all tokens are equally likely
    prompt_ids = torch.tensor([SHORT], device=ctx.device)
    pixel_values = torch.randn(1, 3, 8, 8, device=ctx.device)
    image_token_id = IMAGE
    inputs = {"input_ids": prompt_ids, "attention_mask": torch.ones_like(prompt_ids), "pixel_values": pixel_values}
    ctx.reached()
    if blocks:
        output_ids = model.generate(**inputs, max_new_tokens=2, suppress_tokens=[image_token_id])
    else:
        output_ids = model.generate(**inputs, max_new_tokens=2)
    logits = model(input_ids=output_ids, pixel_values=pixel_values).logits
    assert logits.shape[:2] == output_ids.shape


def stream(ctx: Context, *, dispatches: bool) -> None:
    """Trains with the Trainer of transformers on a streamed dataset whose samples have two images each."""
    import torch
    from torch.utils.data import IterableDataset
    from transformers import Trainer, TrainingArguments

    class Samples(IterableDataset):  # type: ignore[misc,type-arg,unused-ignore]
        def __iter__(self) -> Iterator[List[int]]:
            return iter([SHORT + SHORT] * 2)

    def collate(samples: List[List[int]]) -> Dict[str, Any]:
        input_ids = torch.tensor(samples)
        return {"input_ids": input_ids, "labels": input_ids, "pixel_values": torch.randn(2 * len(samples), 3, 8, 8)}

    without_launcher()
    output_dir = ctx.path("out")
    options = {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none"}
    if dispatches:
        args = TrainingArguments(output_dir, **options)
    else:
        args = TrainingArguments(output_dir, accelerator_config={"dispatch_batches": False}, **options)
    trainer = Trainer(build(), args, train_dataset=Samples(), data_collator=collate)
    ctx.reached()
    assert trainer.train().global_step == 1


def check(params: Mapping[str, Any]) -> Finding:
    """Does the sequence have room for the placeholders of the largest images?"""
    length, pixels, side, images = (params[name] for name in ("max_length", "max_pixels", "side", "images"))
    if length is None or pixels is None:
        advice = "--set max_length=8192 --set max_pixels=1003520 --set images=4; side=32 for Qwen3-VL"
        return unknown("`max_length` or `max_pixels` is not set", advice=advice)
    if min(length, pixels, side, images, params["text"] + 1) < 1:
        return unknown("max_length, max_pixels, side and images must be at least 1, and text at least 0")
    tokens = images * (pixels // side**2)
    evidence = "%d images of up to %d placeholders each, one per %dx%d pixels, need %d of %d tokens"
    counts = (images, pixels // side**2, side, side, tokens, length)
    if tokens + params["text"] > length:
        return exposed(
            evidence % counts,
            "the text needs %d tokens" % params["text"],
            advice="allow longer sequences, or use smaller or fewer images: Fix 1 and 2",
        )
    return unknown(evidence % counts, "other processors count differently, and videos and tools need more tokens")


LLAVA = MappingProxyType({"torch": ">=2.2", "transformers": ">=4.57"})
MISMATCH = raised(r"Image features and image tokens do not match")


def pair(
    name: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    expect: Expect,
    because: str,
    fix: str,
    env: Mapping[str, str] = MappingProxyType({}),
    packages: Mapping[str, str] = MappingProxyType({}),
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(fails, expect, because, "cpu", env=env),
        treatment=Arm(works, completed(), fix, "cpu", env=env),
        world_size=1,
        needs=Needs(packages={**LLAVA, **packages}),
        deadline_s=60,
        expected_s=(4.0, 4.0),
    )


CUT = "a sequence is truncated and loses placeholders, but the batch keeps all pixels"
WHOLE = "the sequences are long enough for all placeholders"
SCATTER = "the forward of a vision-language model, without its comparison of the two numbers"
transformers_pair = pair(
    "transformers", partial(train, max_length=6), partial(train, max_length=9), MISMATCH, CUT, WHOLE
)

probe = Probe(
    check=check,
    params={
        "max_length": Param("int", "largest number of tokens in a sequence: max_length, cutoff_len, max_prompt_length"),
        "max_pixels": Param("int", "pixels of the largest image after resizing: max_pixels, image_max_pixels"),
        "images": Param("int", "number of images in one sample", 1),
        "side": Param(
            "int", "side of the square that one placeholder stands for, in pixels: 28 for Qwen2-VL and Qwen2.5-VL", 28
        ),
        "text": Param("int", "number of tokens of text", 0),
    },
    experiments=(
        transformers_pair,
        Experiment(
            name="torch",
            control=Arm(
                partial(scatter, max_length=6),
                symptom(r"tokens: 6, features 8; sample 1 has image 0"),
                CUT,
                "stand-in",
                SCATTER,
            ),
            treatment=Arm(partial(scatter, max_length=9), completed(), WHOLE, "stand-in", SCATTER),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.2"}),
            expected_s=(0.2, 0.2),
        ),
    ),
    variants=(
        pair(
            "unchecked",
            partial(train_unchecked, max_length=6),
            partial(train_unchecked, max_length=9),
            symptom(r"no error, but a truncated sample changes the logits of an untruncated one"),
            CUT + "; the comparison is off",
            WHOLE,
            {"TRANSFORMERS_DISABLE_TORCH_CHECK": "1"},
        ),
        pair(
            "dispatched",
            partial(stream, dispatches=True),
            partial(stream, dispatches=False),
            MISMATCH,
            "accelerate dispatches the batch of a streamed dataset, and slices the pixels by the number of samples",
            "with dispatch_batches=False the batch stays as the collator made it",
            packages={"accelerate": ">=0.30"},
        ),
        pair(
            "generated",
            partial(roll_out, blocks=False),
            partial(roll_out, blocks=True),
            MISMATCH,
            "the model generates the placeholder, so the text has more placeholders than features",
            "suppress_tokens keeps the model from generating the placeholder",
        ),
    ),
)

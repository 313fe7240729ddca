"""Evaluation without training needs an engine without an optimizer, which ZeRO-1 and ZeRO-2 do not support."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from typing import Any, Callable, Dict, List, Optional

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, completed, raised

STEPS = 4
WORDS: List[int] = [1, 2, 3, 4]


def settings(stage: int) -> Dict[str, Any]:
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {"zero_optimization": {"stage": stage}, **dict.fromkeys(auto, "auto")}


def join(ctx: Context) -> Any:
    from kb.cpu_arms import import_deepspeed

    deepspeed = import_deepspeed()
    ctx.init_process_group(timeout_s=30)
    return deepspeed


def build_trainer(stage: Optional[int], **options: Any) -> Any:
    """A Trainer with a tiny Llama; without a stage it does not use DeepSpeed."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # type: ignore[import-not-found]

    config = LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        deepspeed=None if stage is None else settings(stage),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        save_strategy="no",
        report_to=[],
        **options,
    )
    data = [{"input_ids": WORDS, "labels": WORDS}] * 8
    return Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data, eval_dataset=data)


def evaluate(ctx: Context, *, stage: Optional[int]) -> None:
    """Evaluates and does not train."""
    join(ctx)
    trainer = build_trainer(stage)
    ctx.reached()
    assert trainer.evaluate()["eval_loss"] > 0


def evaluate_and_train(ctx: Context, *, stage: int, evaluate_first: bool) -> None:
    """Evaluates before the first step and after the last one. The first evaluation is a call, or the Trainer's own."""
    join(ctx)
    on_start = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": STEPS}
    trainer = build_trainer(stage, **({} if evaluate_first else on_start))
    ctx.reached()
    if evaluate_first:
        trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert trainer.state.global_step == STEPS, trainer.state.global_step
    assert len(losses) == 3, losses  # before the first step, at the last one, and in the call after it


def initialize(ctx: Context, *, stage: int) -> None:
    """A custom loop without an optimizer."""
    deepspeed = join(ctx)
    import torch

    model = torch.nn.Linear(2, 2)
    ctx.reached()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    with torch.no_grad():
        assert engine(torch.ones(1, 2)).shape == (1, 2)


def prepare(ctx: Context, *, together: bool) -> None:
    """A custom training loop with accelerate."""
    join(ctx)
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs  # type: ignore[import-not-found]

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    config = {**settings(2), "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ctx.reached()
    if together:
        engine, optimizer = accelerator.prepare(model, optimizer)
    else:
        engine = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    before = engine.module.bias.detach().clone()
    accelerator.backward(engine(torch.ones(1, 2)).sum())
    optimizer.step()
    assert (engine.module.bias < before).all()


def train_twice(ctx: Context, *, new_trainer: bool) -> None:
    """Trains twice in one process, with one Trainer or with a new one."""
    join(ctx)
    trainer = build_trainer(2)
    ctx.reached()
    trainer.train()
    if new_trainer:
        trainer = build_trainer(2)
    trainer.train()
    assert trainer.state.global_step == STEPS, trainer.state.global_step


ONLY_3 = raised(r"ValueError: ZeRO inference only makes sense with ZeRO Stage 3 - please adjust your config")
NONE = raised(r"AttributeError: 'NoneType' object has no attribute 'backward'")
REQUIRED = raised(r"AssertionError: zero stage 2 requires an optimizer")
DS = {"torch": ">=2.1", "deepspeed": ">=0.14"}
TRAINER = {**DS, "transformers": ">=4.46", "accelerate": ">=1.0"}


in_initialize = partial(initialize, stage=2)
in_stage_2 = partial(evaluate, stage=2)


def pair(
    name: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    because: str,
    fix: str,
    expect: Expect = ONLY_3,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(fails, expect, because, "cpu"),
        treatment=Arm(works, completed(), fix, "cpu"),
        world_size=1,
        needs=Needs(packages=DS if fails is in_initialize else TRAINER),
        deadline_s=120,
        expected_s=(8.0, 8.0),
    )


EVALUATE = "evaluate() runs without train(), with ZeRO-2"
ON_START = "eval_on_start=True replaces the first evaluate()"
around_training = partial(evaluate_and_train, stage=2)
probe = Probe(
    experiments=(
        pair(
            "initialize",
            in_initialize,
            partial(initialize, stage=0),
            "DeepSpeed creates an engine of ZeRO-2 without an optimizer",
            "DeepSpeed creates an engine of stage 0 without an optimizer",
            REQUIRED,
        ),
    ),
    variants=(
        pair(
            "stage-3", in_stage_2, partial(evaluate, stage=3), EVALUATE, "evaluate() runs without train(), with ZeRO-3"
        ),
        pair(
            "without-deepspeed",
            in_stage_2,
            partial(evaluate, stage=None),
            EVALUATE,
            "evaluate() runs without DeepSpeed",
        ),
        pair(
            "on-start",
            partial(around_training, evaluate_first=True),
            partial(around_training, evaluate_first=False),
            "evaluate() runs before train(), with ZeRO-2",
            ON_START,
        ),
        pair(
            "stage-3-then-train",
            partial(evaluate_and_train, stage=3, evaluate_first=True),
            partial(evaluate_and_train, stage=3, evaluate_first=False),
            "evaluate() runs before train(), with ZeRO-3, and training then uses the engine without an optimizer",
            ON_START,
            NONE,
        ),
        pair(
            "prepare",
            partial(prepare, together=False),
            partial(prepare, together=True),
            "one call of prepare gets the model, another one the optimizer, with ZeRO-2",
            "one call of prepare gets the model and the optimizer",
            REQUIRED,
        ),
        pair(
            "train-twice",
            partial(train_twice, new_trainer=False),
            partial(train_twice, new_trainer=True),
            "one Trainer trains a second time, with ZeRO-2",
            "a new Trainer with a new model trains the second time",
            NONE,
        ),
    ),
)

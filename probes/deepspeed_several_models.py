"""One Accelerator has one DeepSpeed engine: it refuses two models, or its backward serves the first one alone."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Callable, List, Optional, Tuple

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

# Each step moves each weight by the rate, since the gradient of a sum is its input of ones.
STEPS, LEARNING_RATE = 2, 0.1


def plugin(stage: int, micro_batches: int = 1) -> Any:
    from accelerate import DeepSpeedPlugin  # type: ignore[import-not-found]

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return DeepSpeedPlugin(hf_ds_config=settings)


def first_accelerator(ctx: Context, stage: int, micro_batches: int = 1, second_stage: Optional[int] = None) -> Any:
    """The first Accelerator of the process, with DeepSpeed on the CPU, and with two plugins if there are two stages."""
    from kb.cpu_arms import import_deepspeed

    import_deepspeed()
    ctx.init_process_group(timeout_s=20)
    from accelerate import Accelerator, InitProcessGroupKwargs

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    gloo = InitProcessGroupKwargs(backend="gloo")
    plugins = plugin(stage, micro_batches)
    if second_stage is not None:
        plugins = {"first": plugins, "second": plugin(second_stage)}
    return Accelerator(deepspeed_plugin=plugins, gradient_accumulation_steps=micro_batches, kwargs_handlers=[gloo])


def model_and_optimizer() -> Tuple[Any, Any]:
    import torch

    model = torch.nn.Linear(4, 1, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def weights(model: Any) -> List[Any]:
    """Copies of the weights of a model, whole ones under ZeRO-3 too."""
    import deepspeed  # type: ignore[import-not-found]

    parameters = list(model.parameters())
    partitioned = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(partitioned):
        return [parameter.detach().clone() for parameter in parameters]


def compare(before: List[List[Any]], models: List[Any], steps: int = STEPS) -> None:
    """Raises `Symptom` unless each weight of each model moved as it does without DeepSpeed."""
    expected = -steps * LEARNING_RATE
    moved = [
        {round(value, 4) for old, new in zip(first, weights(model)) for value in (new - old).flatten().tolist()}
        for first, model in zip(before, models)
    ]
    if any(values != {expected} for values in moved):
        text = ", ".join("/".join("%.1f" % value for value in sorted(values)) for values in moved)
        raise Symptom("the weights of the models moved by %s instead of %.1f" % (text, expected))


def update(owner: Any, optimizer: Any, loss: Any) -> None:
    """One step with the backward of the `owner`, an Accelerator."""
    owner.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def train_separately(ctx: Context, *, how: str, stage: int = 2) -> None:
    """Two models with two losses, such as a GAN."""
    import torch

    accelerator = first_accelerator(ctx, stage)
    from accelerate import Accelerator

    (first, first_optimizer), (second, second_optimizer) = model_and_optimizer(), model_and_optimizer()
    ctx.reached()
    if how == "together":
        accelerator.prepare(first, first_optimizer, second, second_optimizer)
    first, first_optimizer = accelerator.prepare(first, first_optimizer)
    if how == "second plugin":
        Accelerator(deepspeed_plugin=plugin(stage))
    second_accelerator = accelerator
    if how == "second Accelerator":
        second_accelerator = Accelerator()
    second, second_optimizer = second_accelerator.prepare(second, second_optimizer)
    before = [weights(first), weights(second)]
    for _ in range(STEPS):
        for owner, model, optimizer in (
            (accelerator, first, first_optimizer),
            (second_accelerator, second, second_optimizer),
        ):
            loss = model(torch.ones(1, 4)).sum()
            if how == "engine":
                model.backward(loss)
                model.step()
            else:
                update(owner, optimizer, loss)
    compare(before, [first, second])


def train_gan(ctx: Context, *, stage: int, freeze: bool, through_module: bool) -> None:
    """One step of a generator, whose loss passes through the discriminator, and one of the discriminator."""
    import torch

    accelerator = first_accelerator(ctx, stage)
    from accelerate import Accelerator

    generator, discriminator = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
    for model in (generator, discriminator):
        torch.nn.init.eye_(model.weight)
    ctx.reached()
    second_accelerator = Accelerator()
    generator, generator_optimizer = accelerator.prepare(
        generator, torch.optim.SGD(generator.parameters(), lr=LEARNING_RATE)
    )
    discriminator, discriminator_optimizer = second_accelerator.prepare(
        discriminator, torch.optim.SGD(discriminator.parameters(), lr=LEARNING_RATE)
    )
    before, noise = [weights(generator), weights(discriminator)], torch.ones(1, 4)
    module = discriminator
    if freeze:
        discriminator.requires_grad_(False)
    if through_module:
        module = discriminator.module
    loss = module(generator(noise)).sum()
    update(accelerator, generator_optimizer, loss)
    if freeze:
        discriminator.requires_grad_(True)
    update(second_accelerator, discriminator_optimizer, discriminator(noise).sum())
    compare(before, [generator, discriminator], steps=1)


def train_jointly(
    ctx: Context, *, as_one: bool, through_engine: bool = True, stage: int = 2, micro_batches: int = 1
) -> None:
    """Two models with one loss and one optimizer."""
    import torch

    class Both(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Linear(4, 1, bias=False) for _ in range(2))

        def forward(self, batch: Any) -> Any:
            return (self.first(batch) + self.second(batch)).sum()

    accelerator = first_accelerator(ctx, stage, micro_batches)
    both = Both()
    layers = [both.first, both.second]
    optimizer = torch.optim.SGD(both.parameters(), lr=LEARNING_RATE)
    ctx.reached()
    if as_one:
        both, optimizer = accelerator.prepare(both, optimizer)
    else:
        accelerator.prepare(*layers, optimizer)
    before = [weights(layer) for layer in layers]
    model = both if through_engine else both.module
    for _ in range(STEPS * micro_batches):
        with accelerator.accumulate(both):
            update(accelerator, optimizer, model(torch.ones(1, 4)))
    compare(before, layers)


def train_in_sequence(ctx: Context, *, free: bool) -> None:
    """Two runs in one process, each with a new model."""
    import torch

    accelerator = first_accelerator(ctx, 2)
    ctx.reached()
    for _ in range(2):
        model, optimizer = accelerator.prepare(*model_and_optimizer())
        before = [weights(model)]
        for _ in range(STEPS):
            update(accelerator, optimizer, model(torch.ones(1, 4)).sum())
        compare(before, [model])
        if free:
            model, optimizer = accelerator.free_memory(model, optimizer)


def train_with_two_plugins(ctx: Context, *, documented: bool) -> None:
    """Two models with two losses, the first in ZeRO-2 and the second in ZeRO-3."""
    import torch

    accelerator = first_accelerator(ctx, 2, second_stage=3)
    from accelerate import Accelerator

    ctx.reached()
    second_accelerator = Accelerator()
    first, first_optimizer = accelerator.prepare(*model_and_optimizer())
    if documented:
        second_accelerator.state.enable_deepspeed_plugin("second")
    second_accelerator.state.select_deepspeed_plugin("second")
    second, second_optimizer = second_accelerator.prepare(*model_and_optimizer())
    stages = [model.zero_optimization_stage() for model in (first, second)]
    assert stages == [2, 3], stages
    before = [weights(first), weights(second)]
    for _ in range(STEPS):
        for owner, model, optimizer in (
            (accelerator, first, first_optimizer),
            (second_accelerator, second, second_optimizer),
        ):
            update(owner, optimizer, model(torch.ones(1, 4)).sum())
    compare(before, [first, second])


def distil(ctx: Context, *, together: bool) -> None:
    """A student that is trained, and a teacher that is not."""
    import torch

    accelerator = first_accelerator(ctx, 2)
    (student, optimizer), (teacher, _) = model_and_optimizer(), model_and_optimizer()
    ctx.reached()
    if together:
        student, optimizer, teacher = accelerator.prepare(student, optimizer, teacher)
    student, optimizer = accelerator.prepare(student, optimizer)
    teacher = teacher.to(accelerator.device).eval().requires_grad_(False)
    before = [weights(student)]
    for _ in range(STEPS):
        batch = torch.ones(1, 4)
        update(accelerator, optimizer, (student(batch) - teacher(batch)).sum())
    compare(before, [student])


REFUSED = raised(
    r"AssertionError: You can't use same `Accelerator\(\)` instance with multiple models when using DeepSpeed"
)
SECOND_PLUGIN = raised(
    r"NotImplementedError: You cannot pass in a `deepspeed_plugin` when creating a second `Accelerator`"
)
OTHER_ENGINE = raised(r"IndexError: list index out of range|has no attribute 'ipg_index'")
TWICE = symptom(r"the weights of the models moved by -0\.4, 0\.0 instead of -0\.2")
HALF = symptom(r"the weights of the models moved by -0\.1, -0\.1 instead of -0\.2")
NO_SUCH_METHOD = raised(r"AttributeError: 'AcceleratorState' object has no attribute 'enable_deepspeed_plugin'")
TOGETHER = "one call of prepare() gets two models"
TIED = "both models are prepared by one Accelerator, whose backward() serves the engine of the first"
FROZEN = "the generator's loss passes through the frozen module of the discriminator, not through its engine"
APART = "the second model has its own Accelerator(), created without a plugin"


def pair(
    name: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    because: str,
    fix: str,
    expect: Expect = REFUSED,
    deepspeed: str = ">=0.9.3",
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(fails, expect, because, "cpu"),
        treatment=Arm(works, completed(), fix, "cpu"),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.2", "accelerate": ">=1.0", "deepspeed": deepspeed}),
        deadline_s=120,
        expected_s=(5.0, 5.0),
    )


together, in_turn, apart, by_engine = (
    partial(train_separately, how=how) for how in ("together", "in turn", "second Accelerator", "engine")
)
probe = Probe(
    experiments=(pair("apart", together, apart, TOGETHER, APART),),
    variants=(
        pair(
            "as-one",
            partial(train_jointly, as_one=False),
            partial(train_jointly, as_one=True),
            TOGETHER,
            "one module holds both models, and one optimizer has the weights of both",
        ),
        pair(
            "as-one-engine",
            partial(train_jointly, as_one=True, through_engine=False, stage=3, micro_batches=2),
            partial(train_jointly, as_one=True, stage=3, micro_batches=2),
            "the module is called without its engine, whose forward counts the micro-batches of ZeRO-3",
            "the engine is called, which calls the module",
            HALF,
            ">=0.19",
        ),
        pair(
            "in-sequence",
            partial(train_in_sequence, free=False),
            partial(train_in_sequence, free=True),
            "the second run prepares its model while the Accelerator has the engine of the first run",
            "free_memory() after the first run destroys its engine",
            OTHER_ENGINE,
        ),
        pair(
            "two-plugins",
            partial(train_with_two_plugins, documented=True),
            partial(train_with_two_plugins, documented=False),
            "the plugin is chosen with the method that the documentation names",
            "the plugin is chosen with select_deepspeed_plugin()",
            NO_SUCH_METHOD,
        ),
        pair(
            "frozen",
            partial(distil, together=True),
            partial(distil, together=False),
            "one call of prepare() gets the student and its teacher",
            "the teacher is moved to the device and not prepared",
        ),
        pair("one-engine", in_turn, apart, TIED, APART, OTHER_ENGINE),
        pair(
            "one-engine-zero3",
            partial(in_turn, stage=3),
            partial(apart, stage=3),
            TIED,
            APART,
            TWICE,
            ">=0.19",
        ),
        pair(
            "engine",
            in_turn,
            by_engine,
            TIED,
            "the loop calls backward() and step() of each engine",
            OTHER_ENGINE,
        ),
        pair(
            "gan-zero3",
            partial(train_gan, stage=3, freeze=False, through_module=False),
            partial(train_gan, stage=3, freeze=True, through_module=True),
            "the engine of the discriminator keeps the gradient of the generator's loss and adds it to its own",
            FROZEN,
            symptom(r"the weights of the models moved by -0\.1, -0\.2 instead of -0\.1"),
            ">=0.19",
        ),
        pair(
            "gan-zero2",
            partial(train_gan, stage=2, freeze=True, through_module=False),
            partial(train_gan, stage=2, freeze=True, through_module=True),
            "the generator's loss passes through the engine of the frozen discriminator",
            FROZEN,
            OTHER_ENGINE,
            ">=0.19",
        ),
        pair(
            "second-plugin",
            partial(train_separately, how="second plugin"),
            apart,
            "the second Accelerator gets a plugin of its own",
            APART,
            SECOND_PLUGIN,
        ),
    ),
)

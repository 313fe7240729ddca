"""A checkpoint holds only the trained weights of an adapter, and a strict load asks for the frozen ones too."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, Tuple

from kb.cpu_arms import import_deepspeed
from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, completed, raised, symptom

STEPS, WIDTH, RANK = 3, 8, 2


def lora_model() -> Any:
    """Two linear layers with frozen weights, each with an adapter. Every call returns the same weights."""
    import torch

    class Adapted(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.lora_A = torch.nn.Linear(WIDTH, RANK, bias=False)
            self.lora_B = torch.nn.Linear(RANK, WIDTH, bias=False)

        def forward(self, inputs: Any) -> Any:
            return self.base_layer(inputs) + self.lora_B(self.lora_A(inputs))

    torch.manual_seed(0)
    return torch.nn.Sequential(Adapted(), Adapted())


def trained_part(model: Any) -> Dict[str, Any]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(trained_part(model).values(), lr=0.05)


def train(model: Any, optimizer: Any) -> None:
    """A few steps on the same batch."""
    import torch

    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, torch.ones(2, WIDTH)).backward()
        optimizer.step()


def loss_of(model: Any, inputs: Any) -> Any:
    return (model(inputs) - 3).square().mean()


def load_checked(model: Any, state: Dict[str, Any]) -> None:
    """Only frozen weights may be missing, and nothing may be left over."""
    result = model.load_state_dict(state, strict=False)
    parameters = list(model.named_parameters(remove_duplicate=False))
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    assert set(result.missing_keys) <= frozen and not result.unexpected_keys, result


def resume(ctx: Context, *, checked: bool) -> None:
    """Saves the trained weights and resumes, strictly or with a check. Compares with a run without interruption."""
    import torch

    model = lora_model()
    optimizer = adamw(model)
    train(model, optimizer)
    torch.save({"model": trained_part(model), "optimizer": optimizer.state_dict()}, ctx.path("checkpoint.pt"))
    train(model, optimizer)
    resumed = lora_model()
    state = torch.load(ctx.path("checkpoint.pt"), weights_only=True)
    ctx.reached()
    if checked:
        load_checked(resumed, state["model"])
    else:
        resumed.load_state_dict(state["model"])
    optimizer = adamw(resumed)
    optimizer.load_state_dict(state["optimizer"])
    train(resumed, optimizer)
    assert_equal(resumed, model)


def assert_equal(model: Any, other: Any) -> None:
    for (name, one), two in zip(model.named_parameters(), other.parameters()):
        assert one.equal(two), name


def resume_renamed(ctx: Context, *, checked: bool) -> None:
    """The names in the checkpoint have the prefix of DDP. Loads with strict=False, alone or with a check."""
    import torch

    model = lora_model()
    train(model, adamw(model))
    state = {"module." + name: each for name, each in trained_part(model).items()}
    resumed = lora_model()
    ctx.reached()
    if checked:
        try:
            load_checked(resumed, state)
        except AssertionError:
            torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
            load_checked(resumed, state)
    else:
        resumed.load_state_dict(state, strict=False)
    initial = trained_part(lora_model())
    same = sum(each.equal(initial[name]) for name, each in trained_part(resumed).items())
    if same:
        raise Symptom(f"after strict=False {same} of {len(initial)} trained tensors still have their initial values")
    assert_equal(resumed, model)


# --- in libraries -----------------------------------------------------------------------------------------------------


def resume_deepspeed(ctx: Context, *, stage: int, lenient: bool) -> None:
    """DeepSpeed saves without frozen parameters and loads, strictly by default. Compares with a run that went on."""
    import torch

    deepspeed = import_deepspeed()
    ctx.init_process_group(timeout_s=60)
    deepspeed.init_distributed(dist_backend="gloo")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }

    def start() -> Any:
        model = lora_model()
        return deepspeed.initialize(model=model, optimizer=adamw(model), config=config, dist_init_required=False)[0]

    def steps(engine: Any) -> None:
        for _ in range(STEPS):
            engine.backward(loss_of(engine, torch.ones(2, WIDTH) + ctx.rank))
            engine.step()

    def weights(engine: Any) -> Dict[str, Any]:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            return {name: each.detach().clone() for name, each in engine.module.named_parameters()}

    engine = start()
    steps(engine)
    engine.save_checkpoint(ctx.path("out"), exclude_frozen_parameters=True)
    steps(engine)
    resumed = start()
    ctx.reached()
    if lenient:
        resumed.load_checkpoint(ctx.path("out"), load_module_strict=False)
    else:
        resumed.load_checkpoint(ctx.path("out"))
    steps(resumed)
    expected = weights(engine)
    for name, each in weights(resumed).items():
        assert each.equal(expected[name]), name


def resume_lightning(ctx: Context, *, lenient: bool) -> None:
    """A LightningModule whose checkpoint has only the trained weights. `lenient` sets strict_loading."""
    import lightning  # type: ignore[import-not-found]
    import torch

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            if lenient:
                self.strict_loading = False
            self.model = lora_model()

        def training_step(self, batch: Any) -> Any:
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> Any:
            return adamw(self.model)

        def on_save_checkpoint(self, checkpoint: Dict[str, Any]) -> None:
            trained = trained_part(self)
            checkpoint["state_dict"] = {name: trained[name] for name in checkpoint["state_dict"] if name in trained}

    def fit(epochs: int, **kwargs: Any) -> Tuple[Any, Any]:
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        module = Module()
        trainer.fit(module, torch.utils.data.DataLoader(torch.ones(2 * STEPS, WIDTH), batch_size=2), **kwargs)
        return trainer, module

    trainer, _ = fit(1)
    trainer.save_checkpoint(ctx.path("last.ckpt"))
    _, whole = fit(2)
    ctx.reached()
    _, resumed = fit(2, ckpt_path=ctx.path("last.ckpt"))
    assert_equal(resumed, whole)


def resume_adapter(ctx: Context, *, from_pretrained: bool) -> None:
    """Only PEFT's file of the adapter is left. Loads it as a state dict, or with PEFT."""
    import peft  # type: ignore[import-not-found]
    import torch
    from safetensors.torch import load_file  # type: ignore[import-not-found]

    def base() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))

    config = peft.LoraConfig(r=RANK, target_modules=["0", "1"])
    model = peft.get_peft_model(base(), config)
    train(model, adamw(model))
    model.save_pretrained(ctx.path("adapter"))
    ctx.reached()
    if from_pretrained:
        resumed = peft.PeftModel.from_pretrained(base(), ctx.path("adapter"), is_trainable=True)
    else:
        resumed = peft.get_peft_model(base(), config)
        resumed.load_state_dict(load_file(ctx.path("adapter/adapter_model.safetensors")))
    assert_equal(resumed, model)
    assert sorted(trained_part(resumed)) == sorted(trained_part(model))
    train(resumed, adamw(resumed))


def resume_pissa(ctx: Context, *, from_file: bool, seeded: bool) -> None:
    """PiSSA moves a part of each base weight into the adapter, here found with random numbers.

    Loads the trained weights into a new model, whose start is `seeded` like the first one, or else with PEFT
    (`from_file`) from its file.
    """
    import peft
    import torch

    def base() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))

    config = peft.LoraConfig(r=RANK, target_modules=["0", "1"], init_lora_weights="pissa_niter_1")

    def start(seed: int) -> Any:
        model = base()
        torch.manual_seed(seed)
        return peft.get_peft_model(model, config)

    model = start(1)
    train(model, adamw(model))
    ctx.reached()
    if seeded or not from_file:
        resumed = start(1 if seeded else 2)
        load_checked(resumed, trained_part(model))
    else:
        model.save_pretrained(ctx.path("adapter"))
        resumed = peft.PeftModel.from_pretrained(base(), ctx.path("adapter"), is_trainable=True)
    inputs = torch.eye(WIDTH)
    apart = (resumed(inputs) - model(inputs)).abs().max().item()
    if apart > 1e-4:
        raise Symptom(f"the resumed model differs from the saved one by {apart:.2g}")


MISSING = raised(r"Error\(s\) in loading state_dict for \w+:\s+Missing key\(s\) in state_dict: ")
STRICT = "the load is strict, and the checkpoint has no frozen weights"
SAME_AS_WHOLE = "and the run ends with the weights of one that was never interrupted"


def experiment(
    name: str, job: Callable[..., None], fix: str, because: Tuple[str, str], expect: Any = MISSING, **changes: Any
) -> Experiment:
    """`fix` is the keyword of the job that differs; `because` says what the arms do without and with it."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{fix: False}), expect=expect, because=because[0], fidelity="cpu"),
        treatment=Arm(partial(job, **{fix: True}), expect=completed(), because=because[1], fidelity="cpu"),
        **{"world_size": 1, "expected_s": (3, 3), **changes},
    )


def with_deepspeed(name: str, stage: int) -> Experiment:
    return experiment(
        name,
        partial(resume_deepspeed, stage=stage),
        "lenient",
        (f"ZeRO-{stage}: {STRICT}", f"load_module_strict=False {SAME_AS_WHOLE}"),
        world_size=2,
        needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.14"}),
        deadline_s=90,
        expected_s=(20, 20),
    )


def with_pissa(name: str, *, from_file: bool) -> Experiment:
    how = "PEFT loads its file and starts from other random numbers" if from_file else "the start has another seed"
    return experiment(
        name,
        partial(resume_pissa, from_file=from_file),
        "seeded",
        (f"{how}, so the base weights differ", "the start has the seed of the first run, and so the same base weights"),
        expect=symptom(r"the resumed model differs from the saved one by \d"),
        needs=Needs(packages={"torch": ">=2.1", "peft": ">=0.10"}),
        deadline_s=60,
        expected_s=(8, 8),
    )


probe = Probe(
    experiments=(
        experiment(
            "strict", resume, "checked", (STRICT, f"strict=False, with a check of what is missing, {SAME_AS_WHOLE}")
        ),
    ),
    variants=(
        experiment(
            "renamed",
            resume_renamed,
            "checked",
            (
                "the names differ, and strict=False alone silently loads nothing",
                "the check of what is missing finds it, and the prefix is removed",
            ),
            expect=symptom(r"after strict=False \d+ of \d+ trained tensors still have their initial values"),
        ),
        with_deepspeed("deepspeed", 2),
        with_deepspeed("zero3", 3),
        experiment(
            "lightning",
            resume_lightning,
            "lenient",
            (STRICT, f"strict_loading is False {SAME_AS_WHOLE}"),
            needs=Needs(packages={"torch": ">=2.1", "lightning": ">=2.2"}),
            deadline_s=60,
            expected_s=(8, 8),
        ),
        experiment(
            "adapter-file",
            resume_adapter,
            "from_pretrained",
            ("PEFT's file has other names and no frozen weights", "PEFT loads its file into the adapter"),
            needs=Needs(packages={"torch": ">=2.1", "peft": ">=0.10"}),
            deadline_s=60,
            expected_s=(8, 8),
        ),
        with_pissa("pissa", from_file=False),
        with_pissa("pissa-file", from_file=True),
    ),
)

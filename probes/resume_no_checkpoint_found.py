"""A resume finds no checkpoint in the folder where it looks, or one without the states that it loads."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional, Set, Tuple

from kb.cpu_arms import without_launcher
from kb.probe import (
    Arm,
    Context,
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

STEPS = 6  # of the whole run; the first start stops after step 3, and its checkpoint is from step 2
WEIGHTS = {name + end for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json")}
ADAPTERS = {"adapter_model.bin", "adapter_model.safetensors"}


def assert_resumed(first: int) -> None:
    if first != 3:
        raise Symptom("a resume was asked for, and training began at step %d" % (first - 1))


def restart_elsewhere(ctx: Context, *, is_absolute: bool) -> None:
    """The loop saves every second step, and begins at step 1 if it finds no file; each start has its own folder."""
    import torch

    os.environ["CHECKPOINT_FOLDER"] = ctx.path("shared")
    ctx.reached()
    first = 0
    for until in (3, STEPS):
        os.makedirs(ctx.path("job-%d" % until))
        os.chdir(ctx.path("job-%d" % until))
        folder = "checkpoints"
        if is_absolute:
            folder = os.environ["CHECKPOINT_FOLDER"]
        last = max(Path(folder).glob("step-*.pt"), default=None)
        first = torch.load(last, weights_only=True)["step"] + 1 if last else 1
        for step in range(first, until + 1):
            if step % 2 == 0:
                os.makedirs(folder, exist_ok=True)
                torch.save({"step": step}, os.path.join(folder, "step-%d.pt" % step))
    assert_resumed(first)


def build_trainer(output_dir: str, until: int = STEPS, **options: Any) -> Tuple[Any, List[int]]:
    """A Trainer on the CPU that stops after step `until`, and the list to which it appends its steps."""
    if "MASTER_ADDR" not in os.environ:  # the job is one process, without a launcher
        without_launcher()
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments  # type: ignore[import-not-found]

    class Model(torch.nn.Linear):  # type: ignore[misc]
        def forward(self, features: Any, labels: Any = None) -> Dict[str, Any]:
            logits = super().forward(features)
            return {"loss": torch.nn.functional.mse_loss(logits, labels), "logits": logits}

    steps: List[int] = []

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *given: Any, **_: Any) -> None:
            state, control = given[1:3]
            steps.append(state.global_step)
            control.should_training_stop = control.should_training_stop or state.global_step >= until

    settings: Dict[str, Any] = {"save_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True, **options}
    args = TrainingArguments(output_dir=output_dir, max_steps=STEPS, per_device_train_batch_size=1, **settings)
    rows = [{"features": torch.ones(2) * row, "labels": torch.ones(1)} for row in range(8)]
    return Trainer(model=Model(2, 1), args=args, train_dataset=rows, callbacks=[Watch()]), steps


def start_twice(ctx: Context, *, looks_first: bool) -> None:
    """Runs the same command for the first start and for the restart."""
    from accelerate.utils import gather_object  # type: ignore[import-not-found]
    from transformers.trainer_utils import get_last_checkpoint  # type: ignore[import-not-found]

    output_dir = ctx.path("out")
    for until, expected in ((3, [1, 2, 3]), (STEPS, [3, 4, 5, 6])):
        trainer, steps = build_trainer(output_dir, until)
        ctx.reached()
        last: Any = True
        if looks_first:
            last = get_last_checkpoint(output_dir) if os.path.isdir(output_dir) else None
            assert len(set(gather_object([last]))) == 1, "the ranks see different checkpoints: fix 6"
        trainer.train(resume_from_checkpoint=last)
        assert steps == expected, steps


def restart(ctx: Context, *, save_steps: int = 2, target: Any = "checkpoint-2", is_passed: bool = True) -> None:
    """The first start stops after step 3, and the restart resumes from `target` in the output_dir."""
    output_dir = ctx.path("out")
    build_trainer(output_dir, 3, save_steps=save_steps)[0].train()
    checkpoint = True if target is True else os.path.join(output_dir, target)
    trainer, steps = build_trainer(output_dir, resume_from_checkpoint=checkpoint)
    args = trainer.args
    ctx.reached()
    if is_passed:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    else:
        trainer.train()
    assert_resumed(steps[0])


def restart_nodes(ctx: Context, *, saves_on_each: bool) -> None:
    """Two nodes with one process each, and each with its own disk."""
    ctx.init_process_group(timeout_s=30)
    os.environ.update(RANK=str(ctx.rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"  # the default is cpu:0, which older Trainers pass to torch.load
    output_dir = ctx.path("disk-of-node-%d" % ctx.rank)
    build_trainer(output_dir, 3, save_on_each_node=saves_on_each)[0].train()
    ctx.note(saved=sorted(os.listdir(os.path.join(output_dir, "checkpoint-2"))))
    trainer, steps = build_trainer(output_dir, save_on_each_node=saves_on_each)
    ctx.reached()
    trainer.train(resume_from_checkpoint=True)
    assert steps == [3, 4, 5, 6], steps


def resume_deepspeed(ctx: Context, *, saves_states: bool) -> None:
    """Calls what the Trainer calls under DeepSpeed, on a folder with weights, and with or without states."""
    from kb.cpu_arms import import_deepspeed

    ctx.init_process_group(timeout_s=30)
    deepspeed = import_deepspeed()
    import torch
    from transformers.integrations.deepspeed import deepspeed_load_checkpoint  # type: ignore[import-not-found]

    model = torch.nn.Linear(2, 1)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config)[0]
    folder = ctx.path("checkpoint-2")
    os.makedirs(folder)
    torch.save(model.state_dict(), os.path.join(folder, "pytorch_model.bin"))
    if saves_states:
        engine.save_checkpoint(folder)
    saved = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    ctx.reached()
    deepspeed_load_checkpoint(engine, folder)
    assert torch.equal(model.weight, saved)


def check(params: Mapping[str, Any]) -> Finding:
    """Is there a checkpoint where the Trainer looks, with the files that the Trainer loads?"""
    folder, strategy = params["folder"], params["strategy"]
    if folder is None:
        return unknown("no folder was named", advice="--set folder=OUTPUT_DIR --set strategy=deepspeed")
    try:
        target = find_last(folder)
        if target is None:
            near = ", ".join(ascii(name) for name in sorted(os.listdir(folder))[:8])
            return exposed("there is no folder checkpoint-NUMBER in %s, only: %s" % (folder, near or "nothing"))
        return judge(target, set(os.listdir(target)), strategy)
    except (OSError, ValueError, RecursionError) as error:
        return unknown("kb cannot read %s: %s" % (folder, error))


def find_last(folder: Path) -> Optional[Path]:
    """The folder that get_last_checkpoint chooses: checkpoint-NUMBER with the highest number."""
    is_step = re.compile(r"checkpoint-\d+$", re.ASCII).match
    found = [folder] if is_step(folder.name) else [path for path in folder.iterdir() if is_step(path.name)]
    return max((path for path in found if path.is_dir()), key=lambda path: int(path.name[11:]), default=None)


def judge(target: Path, names: Set[str], strategy: Optional[str]) -> Finding:
    if not (target / "trainer_state.json").is_file():
        return exposed("%s has no trainer_state.json: the save was cut off, or a node without rank 0 saved it" % target)
    state = json.loads((target / "trainer_state.json").read_text(encoding="utf-8"))
    if not isinstance(state, dict) or not state.get("global_step"):
        return exposed("%s/trainer_state.json has no global_step" % target)
    if strategy == "deepspeed":
        tag = (target / "latest").read_text(encoding="utf-8").strip() if (target / "latest").is_file() else ""
        faults = [(not list(target.glob("global_step*")), "has no folder global_step*, which DeepSpeed resumes from")]
        faults += [(tag not in names, "has no file latest, or that file names a folder that does not exist")]
        states = tag in names and list((target / tag).glob("*_states.pt"))
        faults += [(not states, "has no file *_states.pt in the folder that latest names")]
    elif strategy == "ddp":
        adapters = {path.name for path in target.glob("*/adapter_model.*")} | names  # several adapters are in folders
        is_loaded = any(name.startswith("optimizer") for name in names) and "scheduler.pt" in names
        faults = [
            (any("pytorch_model_fsdp" in name for name in names), "was saved with FSDP; without it no job loads it")
        ]
        faults += [
            (not (names & WEIGHTS or adapters & ADAPTERS), "has no weights that a resume without DeepSpeed loads")
        ]
        faults += [(not is_loaded, "has no optimizer or schedule, so the resume begins with new ones")]
    else:
        advice = "--set strategy=ddp (also for one GPU) or --set strategy=deepspeed"
        return unknown("kb does not know how the job that uses %s is trained" % target, advice=advice)
    for is_fault, text in faults:
        if is_fault:
            return exposed("%s %s" % (target, text))
    return clear("%s has the files for a resume; kb did not check their content, nor other nodes" % target)


TORCH = MappingProxyType({"torch": ">=2.1"})
TRAINER = MappingProxyType({**TORCH, "transformers": ">=4.41", "accelerate": ">=0.26"})
ENGINE = MappingProxyType({**TRAINER, "deepspeed": ">=0.16"})
NONE_FOUND = raised(r"No valid checkpoint found in output directory \(.+\)")
NOT_VALID = raised(r"Can't find a valid checkpoint at \S+")
AT_ZERO = symptom(r"a resume was asked for, and training began at step 0")


def pair(
    name: str, job: Callable[..., None], change: Any, expect: Any, because: str, fix: str, **more: Any
) -> Experiment:
    keyword, before, after = change if isinstance(change, tuple) else (change, False, True)
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: before}), expect, because, "cpu"),
        treatment=Arm(partial(job, **{keyword: after}), completed(), fix, "cpu"),
        world_size=more.get("ranks", 1),
        needs=Needs(packages=more.get("packages", TRAINER)),
        deadline_s=60,
        expected_s=(4.0, 4.0),
    )


probe = Probe(
    check=check,
    params={
        "folder": Param("path", "output_dir of the Trainer, or one checkpoint-NUMBER in it"),
        "strategy": Param("str", "ddp (also for one GPU) or deepspeed"),
    },
    experiments=(
        pair(
            "trainer",
            start_twice,
            "looks_first",
            NONE_FOUND,
            "the first start passes resume_from_checkpoint=True, and there is no checkpoint yet",
            "each start passes the last checkpoint, or None if there is none",
        ),
        pair(
            "folder",
            restart_elsewhere,
            "is_absolute",
            AT_ZERO,
            "the checkpoint folder is a relative path, and the restart runs in another folder",
            "the checkpoint folder is an absolute path from an environment variable",
            packages=TORCH,
        ),
    ),
    variants=(
        pair(
            "interval",
            partial(restart, target=True),
            ("save_steps", 500, 2),
            NONE_FOUND,
            "the first start ends before step 500, its first save",
            "the first start saves at step 2, before it ends",
        ),
        pair(
            "level",
            restart,
            ("target", "", "checkpoint-2"),
            NOT_VALID,
            "the resume gets the output_dir, which is not a checkpoint",
            "the resume gets the folder checkpoint-2 in the output_dir",
        ),
        pair(
            "argument",
            restart,
            "is_passed",
            AT_ZERO,
            "resume_from_checkpoint is set only in TrainingArguments, and train() ignores it",
            "the script passes args.resume_from_checkpoint to train()",
        ),
        pair(
            "nodes",
            restart_nodes,
            "saves_on_each",
            NOT_VALID,
            "only node 0 saves the model, so the resume on node 1 finds no valid checkpoint",
            "save_on_each_node=True saves the model on each node",
            ranks=2,
        ),
        pair(
            "deepspeed",
            resume_deepspeed,
            "saves_states",
            NOT_VALID,
            "the checkpoint folder contains weights but no global_step* folder of DeepSpeed",
            "the checkpoint folder also contains the states that DeepSpeed saved",
            packages=ENGINE,
        ),
    ),
)

"""A DeepSpeed checkpoint that lacks a rank's file, or has one too many, is named wrongly or has no shards at all."""

from __future__ import annotations

import importlib
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Set

from kb.cpu_arms import import_deepspeed
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
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

TAG, OLDER, MODEL = "global_step2", "global_step1", "mp_rank_00_model_states.pt"
OLD, NODE, ANOTHER = "a file of an older job", "another node has a file", "the model file of another run"
SHARD = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
SAME_SAVE_S = 3600  # the files of one save are written within this time


def train(ctx: Context, stage: int, bf16: bool, out: str = "out", width: int = 5) -> Dict[str, Any]:
    """Two steps, each saved under a tag of its own; returns the weights as they were at the last save."""
    import torch

    deepspeed = import_deepspeed()
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    frozen = torch.nn.Linear(width, width).requires_grad_(False)
    model = torch.nn.Sequential(torch.nn.Linear(5, width), frozen, torch.nn.Linear(width, 3))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32" if bf16 else None},
    }
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]
    for tag in (OLDER, TAG):
        batch = (torch.ones(2, 5) + ctx.rank).to(torch.bfloat16 if bf16 else torch.float32)
        engine.backward(engine(batch).square().sum())
        engine.step()
        engine.save_checkpoint(ctx.path(out), tag=tag)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        state = {name: tensor.detach().clone().cpu() for name, tensor in model.state_dict().items()}
    torch.distributed.barrier()
    return state


def shards(folder: str) -> List[str]:
    names = [name for name in os.listdir(folder) if name.endswith("_optim_states.pt")]
    return sorted(os.path.join(folder, name) for name in names)


def convert(ctx: Context, *, damage: str, repair: Optional[str] = None, stage: int = 2, bf16: bool = False) -> None:
    """Rank 0 converts the checkpoint; the weights must be those of the last save."""
    import_deepspeed()
    ctx.init_process_group(timeout_s=60)
    weights = train(ctx, stage, bf16)
    if damage == ANOTHER:
        train(ctx, stage, bf16, out="other", width=4)
    ctx.reached()
    if ctx.rank:
        return
    import torch

    zero_to_fp32 = importlib.import_module("deepspeed.utils.zero_to_fp32")

    folder, tag = ctx.path("out"), None
    step = os.path.join(folder, TAG)
    files = shards(step)
    ctx.note(files=sorted(os.listdir(step)), script=os.path.exists(os.path.join(folder, "zero_to_fp32.py")))
    if damage == OLD:  # one with three ranks saved under this tag before
        shutil.copy(files[1], files[1].replace("rank_1_", "rank_2_"))
        if repair == "moved away":
            os.makedirs(ctx.path("stale"))
            shutil.move(shards(step)[2], ctx.path("stale"))
    if damage == NODE:
        os.makedirs(ctx.path("node1"))
        shutil.move(files[1], ctx.path("node1"))
        if repair == "collected":
            shutil.copy(os.path.join(ctx.path("node1"), os.path.basename(files[1])), step)
        if repair == "renamed":
            shutil.copy(files[0], files[1])
        if repair == "older tag":
            tag = OLDER
    if damage == "the tag's folder" and repair is None:
        folder = step
    if damage == ANOTHER:
        shutil.copy(os.path.join(step, MODEL), ctx.path("own.pt"))
        shutil.copy(os.path.join(ctx.path("other"), TAG, MODEL), step)
        if repair == "own":
            shutil.copy(ctx.path("own.pt"), os.path.join(step, MODEL))
    if damage == "no shards":
        for file in files:
            os.remove(file)
    if repair == "module":
        checkpoint = torch.load(f"{step}/mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)
        state = checkpoint["module"]
    else:
        state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, tag)
    compare(state, weights, same=tag is None)


def compare(state: Mapping[str, Any], weights: Mapping[str, Any], same: bool) -> None:
    import torch

    assert set(state) == set(weights), (sorted(state), sorted(weights))
    wrong = sorted(name for name in weights if not torch.allclose(state[name].float(), weights[name].float()))
    if same and wrong:
        raise Symptom("%d of %d weights are not those of the training, first %s" % (len(wrong), len(weights), wrong[0]))
    assert same or [name for name in wrong if name.startswith("1.")] == [], wrong  # an older step: the frozen layer
    assert same or "0.weight" in wrong


def check(params: Mapping[str, Any]) -> Finding:
    """Do the names and dates of the files belong to one save of one job? Nothing is opened but `latest`."""
    if not params["checkpoint"]:
        return unknown("no checkpoint was named", advice="--set checkpoint=out/checkpoint-500")
    folder = Path(params["checkpoint"])
    try:
        return _look(folder)
    except (OSError, ValueError) as error:
        return unknown("%s cannot be read: %s" % (folder, str(error)[:200]))


def _look(folder: Path) -> Finding:
    latest = folder / "latest"
    if not latest.is_file():
        if any(SHARD.match(item.name) for item in folder.iterdir()):
            return exposed("%s is the folder of a tag: it has no file `latest`" % folder, advice="give its parent")
        return unknown("%s has no file `latest`" % folder, "it is no DeepSpeed checkpoint, or needs the tag's name")
    with latest.open("rb") as file:
        tag = file.read(200).decode("utf-8").strip()
    step = folder / tag
    if not tag or not step.is_dir():
        return exposed("`latest` names %r, and there is no folder of this name" % tag, advice="-t TAG")
    found = {item: SHARD.match(item.name) for item in step.iterdir() if item.name.endswith("_optim_states.pt")}
    dates = {int(match.group(1)): item.stat().st_mtime for item, match in found.items() if match}
    models: Set[str] = {match.group(2) for match in found.values() if match}
    what = "%d files *_optim_states.pt in %s" % (len(found), step)
    if not dates:
        return exposed(
            "%s has no shards, so there is nothing to merge" % step, advice="read the key module, or copy them"
        )
    if len(models) > 1:
        return exposed("%s of %d model-parallel ranks: the script merges one" % (what, len(models)))
    if len(found) != len(dates):
        return exposed(what + ", and two of one rank, or of experts: the script counts them all")
    missing = sorted(set(range(max(dates) + 1)) - set(dates)) if max(dates) < 100_000 else []
    if missing:
        return exposed("%s: none of rank %d" % (what, missing[0]), advice="collect the files of all nodes")
    newest, top = max(dates.values()), max(dates)
    stale = sorted(rank for rank, date in dates.items() if newest - date > SAME_SAVE_S)
    if stale and stale == list(range(stale[0], top + 1)):
        return exposed(
            "%s: those of rank %d and up are older by an hour or more" % (what, stale[0]),
            advice="if the last job had %d ranks, move them away" % stale[0],
        )
    if stale:
        return unknown("%s, of ranks 0 to %d, with different dates" % (what, top), "copied apart, or of two saves")
    return unknown("%s, of ranks 0 to %d and one date" % (what, top), "complete if the job had as many ranks")


def pair(name: str, damage: str, expect: Expect, repair: str, because: str, **named: Any) -> Experiment:
    """Both arms damage the checkpoint; the control may apply what people try, the treatment applies the repair."""
    tried = named.pop("tried", None)
    job: Callable[..., None] = partial(convert, damage=damage, **named)
    return Experiment(
        name=name,
        control=Arm(partial(job, repair=tried), expect=expect, because=damage, fidelity="cpu"),
        treatment=Arm(partial(job, repair=repair), expect=completed(), because=because, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.16"}, memory_mib=2048),
        deadline_s=90,
        expected_s=(10, 10),
    )


MORE = raised(r"Expected 2 of '\*_optim_states\.pt' under .* but found 3 files")
FEWER = raised(r"Expected 2 of '\*_optim_states\.pt' under .* but found 1 files")
NO_LATEST = raised(r"Unable to find 'latest' file at")
NONE = raised(r"can't find \*_optim_states\.pt files in directory")
PLAIN = raised(r"can't find \*_optim_states\.pt files in directory|'NoneType' object is not iterable")  # before 0.19.3
NO_ZERO = raised(r"_optim_states\.pt is not a zero checkpoint")
NUMELS = raised(r"consumed \d+ numels out of \d+ - something is wrong")
WRONG = symptom(r"\d of 6 weights are not those of the training")
WHOLE = f"the weights are in {MODEL}"

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "the folder that holds `latest`; only names and dates are read")},
    experiments=(pair("stale-file", OLD, MORE, "moved away", "only the files of this job remain"),),
    variants=(
        pair("stale-file-zero3", OLD, MORE, "moved away", "only the files of this job remain", stage=3),
        pair("one-node", NODE, FEWER, "collected", "the files of both nodes are in one folder"),
        pair("older-tag", NODE, FEWER, "older tag", "an older tag that is complete"),
        pair("renamed-file", NODE, WRONG, "collected", "the file of rank 1 itself", tried="renamed"),
        pair("model-file", ANOTHER, NUMELS, "own", "its own model file"),
        pair("tag-folder", "the tag's folder", NO_LATEST, "parent", "the folder that holds latest"),
        pair("stage-0", "stage 0", PLAIN, "module", WHOLE, stage=0),
        pair("stage-1-bf16", "stage 1, bf16, float32 accumulation", NO_ZERO, "module", WHOLE, stage=1, bf16=True),
        pair("no-shards", "no shards", NONE, "module", WHOLE),
    ),
)

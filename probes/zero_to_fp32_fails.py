"""zero_to_fp32 fails on a DeepSpeed checkpoint with a missing or surplus file, a wrong folder, or no shards."""

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
OLD, NODE = "the folder also has a file of an older job", "the file of rank 1 is on another node"
ANOTHER = "the model file is that of another run"
TAG_FOLDER = "the script is called with the folder of a tag, which has no file `latest`"
NO_SHARDS = "the checkpoint has no shards of the optimizer"
NO_ZERO_STAGE = "ZeRO stage 0 writes no shards"
BF16_STAGE_1 = "with bf16 and float32 accumulation, stage 1 writes shards that the script does not accept"
SHARD = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
SAME_SAVE_S = 3600  # the files of one save are written within this time


def train(ctx: Context, stage: int, bf16: bool, out: str = "out", width: int = 5) -> Dict[str, Any]:
    """Trains two steps and saves each under its own tag. Returns the weights at the last save."""
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
    """Damages and perhaps repairs a checkpoint. Rank 0 converts it, and expects the weights of the last save."""
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
    if damage == OLD:  # an older job with three ranks has saved under this tag
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
    if damage == TAG_FOLDER and repair is None:
        folder = step
    if damage == ANOTHER:
        shutil.copy(os.path.join(step, MODEL), ctx.path("own.pt"))
        shutil.copy(os.path.join(ctx.path("other"), TAG, MODEL), step)
        if repair == "own":
            shutil.copy(ctx.path("own.pt"), os.path.join(step, MODEL))
    if damage == NO_SHARDS:
        for file in files:
            os.remove(file)
    if repair == "module":
        checkpoint = torch.load(f"{step}/mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)
        state = checkpoint["module"]
    else:
        state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, tag)
    compare(state, weights, is_same_step=tag is None)


def compare(state: Mapping[str, Any], weights: Mapping[str, Any], is_same_step: bool) -> None:
    """Compares converted weights with those of the last save. At another step, only the frozen layer is equal."""
    import torch

    assert set(state) == set(weights), (sorted(state), sorted(weights))
    wrong = sorted(name for name in weights if not torch.allclose(state[name].float(), weights[name].float()))
    if is_same_step and wrong:
        raise Symptom("%d of %d weights are not those of the training, first %s" % (len(wrong), len(weights), wrong[0]))
    assert is_same_step or [name for name in wrong if name.startswith("1.")] == [], wrong
    assert is_same_step or "0.weight" in wrong


def check(params: Mapping[str, Any]) -> Finding:
    """Do the files belong to one save of one job, by their names and dates? Opens no file but `latest`."""
    if not params["checkpoint"]:
        return unknown("no checkpoint was named", advice="run --set checkpoint=out/checkpoint-500")
    folder = Path(params["checkpoint"])
    try:
        return _judge(folder)
    except (OSError, ValueError) as error:
        return unknown("kb cannot read %s: %s" % (folder, str(error)[:200]))


def _judge(folder: Path) -> Finding:
    latest = folder / "latest"
    if not latest.is_file():
        if any(SHARD.match(item.name) for item in folder.iterdir()):
            return exposed(
                "%s is the folder of a tag, and has no file `latest`" % folder, advice="name its parent folder"
            )
        return unknown(
            "%s has no file `latest`" % folder, "it is not a DeepSpeed checkpoint, or the script needs -t TAG"
        )
    with latest.open("rb") as file:
        tag = file.read(200).decode("utf-8").strip()
    step = folder / tag
    if not tag or not step.is_dir():
        return exposed("`latest` names %r, but no folder has this name" % tag, advice="call the script with -t TAG")
    found = {item: SHARD.match(item.name) for item in step.iterdir() if item.name.endswith("_optim_states.pt")}
    dates = {int(match.group(1)): item.stat().st_mtime for item, match in found.items() if match}
    models: Set[str] = {match.group(2) for match in found.values() if match}
    files = "%d files *_optim_states.pt in %s" % (len(found), step)
    if not dates:
        return exposed(
            "%s has no shards, so the script has nothing to merge" % step,
            advice="load the key `module` of the model file, or copy the shards",
        )
    if len(models) > 1:
        return exposed("%s are of %d model-parallel ranks, but the script merges only one" % (files, len(models)))
    if len(found) != len(dates):
        return exposed(files + ": some are of the same rank, or of experts, but the script counts them all")
    missing = sorted(set(range(max(dates) + 1)) - set(dates)) if max(dates) < 100_000 else []
    if missing:
        return exposed("%s, but none of rank %d" % (files, missing[0]), advice="collect the files of all nodes")
    newest, top = max(dates.values()), max(dates)
    stale = sorted(rank for rank, date in dates.items() if newest - date > SAME_SAVE_S)
    if stale and stale == list(range(stale[0], top + 1)):
        return exposed(
            "%s: those of rank %d and above are an hour older or more" % (files, stale[0]),
            advice="if the last job had %d ranks, move the older files away" % stale[0],
        )
    if stale:
        return unknown(
            "%s, of ranks 0 to %d, with different dates" % (files, top),
            "they were copied at different times, or belong to two saves",
        )
    return unknown(
        "%s, of ranks 0 to %d, with one date" % (files, top),
        "they are complete if the job had %d ranks" % (top + 1),
    )


def pair(name: str, damage: str, expect: Expect, repair: str, because: str, **named: Any) -> Experiment:
    """Both arms damage the checkpoint. The control arm may apply `tried`, a wrong repair; the treatment, `repair`."""
    tried, reason = named.pop("tried", None), named.pop("reason", damage)
    job: Callable[..., None] = partial(convert, damage=damage, **named)
    return Experiment(
        name=name,
        control=Arm(partial(job, repair=tried), expect=expect, because=reason, fidelity="cpu"),
        treatment=Arm(partial(job, repair=repair), expect=completed(), because=because, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.16"}, memory_mib=2048),
        deadline_s=90,
        expected_s=(10, 10),
    )


MORE = raised(r"Expected 2 of '\*_optim_states\.pt' under .* but found 3 files")
FEWER = raised(r"Expected 2 of '\*_optim_states\.pt' under .* but found 1 files")
NO_LATEST = raised(r"Unable to find 'latest' file at")
NONE = raised(r"can't find \*_optim_states\.pt files in directory")
PLAIN = raised(
    r"can't find \*_optim_states\.pt files in directory|'NoneType' object is not iterable"
)  # the second message is that of DeepSpeed before 0.19.3
NO_ZERO = raised(r"_optim_states\.pt is not a zero checkpoint")
NUMELS = raised(r"consumed \d+ numels out of \d+ - something is wrong")
WRONG = symptom(r"\d of 6 weights are not those of the training")
MODULE = f"loads the weights from the key module of {MODEL}"
REMAIN = "only the files of this job remain"
COPIED = "the file of rank 0, copied under the name of rank 1, replaces the missing file"

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "the folder that contains `latest`; kb reads only names and dates")},
    experiments=(pair("stale-file", OLD, MORE, "moved away", REMAIN),),
    variants=(
        pair("stale-file-zero3", OLD, MORE, "moved away", REMAIN, stage=3),
        pair("one-node", NODE, FEWER, "collected", "the files of both nodes are in one folder"),
        pair("older-tag", NODE, FEWER, "older tag", "the script reads an older tag, whose files are complete"),
        pair(
            "renamed-file", NODE, WRONG, "collected", "rank 1's own file is copied back", tried="renamed", reason=COPIED
        ),
        pair("model-file", ANOTHER, NUMELS, "own", "the model file is that of this run"),
        pair(
            "tag-folder", TAG_FOLDER, NO_LATEST, "parent", "the script is called with the folder that contains `latest`"
        ),
        pair("stage-0", NO_ZERO_STAGE, PLAIN, "module", MODULE, stage=0),
        pair("stage-1-bf16", BF16_STAGE_1, NO_ZERO, "module", MODULE, stage=1, bf16=True),
        pair("no-shards", NO_SHARDS, NONE, "module", MODULE),
    ),
)

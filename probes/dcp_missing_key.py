"""A distributed checkpoint lacks a key that the resuming job requests, or that job does not request the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom


def start(*, trained: bool = False, extra: bool = False) -> Any:
    """Returns a model and its optimizer, after one step if `trained`; an `extra` layer is not used in the forward."""
    import torch

    torch.manual_seed(7)
    model = torch.nn.ModuleDict({"inner": torch.nn.Linear(2, 2)})
    if extra:
        model["spare"] = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if trained:
        model["inner"](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def states(model: Any, optimizer: Any, *, named: bool) -> Any:
    """Returns the state to save, with the names of get_state_dict, or with the numbers of the optimizer."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    if named:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
    else:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return state


def put(model: Any, optimizer: Any, state: Any, *, named: bool) -> None:
    """Sets the state that was loaded, the counterpart of `states`."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    if named:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


@contextmanager
def checkpoint(ctx: Context, *, named: bool = True, extra: bool = False) -> Iterator[Any]:
    """Saves a checkpoint; yields torch.distributed.checkpoint and the path of the folder."""
    import torch.distributed.checkpoint as dcp

    ctx.init_process_group(timeout_s=30)
    path = ctx.path("step-100")
    dcp.save(states(*start(trained=True, extra=extra), named=named), checkpoint_id=path)
    ctx.reached()
    yield dcp, path


def check_moments(optimizer: Any, expected: int) -> None:
    """Raises Symptom unless so many parameters have moments other than zero, which only a gradient makes."""
    count = sum(1 for state in optimizer.state.values() if state["exp_avg"].abs().sum() > 0)
    if count != expected:
        raise Symptom("loaded without an error, and %d of %d parameters have their moments" % (count, expected))


def resume(ctx: Context, *, named: bool, trained: bool) -> None:
    """Resumes from a checkpoint with names, using names too or the numbers of the optimizer."""
    with checkpoint(ctx) as (dcp, path):
        model, optimizer = start(trained=trained)
        state = states(model, optimizer, named=named)
        dcp.load(state, checkpoint_id=path)
        put(model, optimizer, state, named=named)
        check_moments(optimizer, 2)


def resume_fresh(ctx: Context, *, named: bool) -> None:
    """Saves and loads in the same way; an optimizer before its first step has no state to request."""
    with checkpoint(ctx, named=named) as (dcp, path):
        model, optimizer = start()
        state = states(model, optimizer, named=named)
        dcp.load(state, checkpoint_id=path)
        put(model, optimizer, state, named=named)
        check_moments(optimizer, 2)


def resume_raw(ctx: Context, *, raw: bool) -> None:
    """Resumes from an existing checkpoint that has numbers."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    with checkpoint(ctx, named=False) as (dcp, path):
        model, optimizer = start()
        if raw:
            get_optimizer_state_dict(model, optimizer)  # gives every parameter a state, of zeros
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.load(state, checkpoint_id=path)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        else:
            dcp.load(states(model, optimizer, named=True), checkpoint_id=path)
        check_moments(optimizer, 2)


def resume_with_gradients(ctx: Context, *, cleared: bool) -> None:
    """Resumes after a backward, as a job does that tests memory or shapes first."""
    import torch

    with checkpoint(ctx) as (dcp, path):
        model, optimizer = start()
        model["inner"](torch.ones(1, 2)).sum().backward()
        if cleared:
            optimizer.zero_grad(set_to_none=True)
        state = states(model, optimizer, named=True)
        dcp.load(state, checkpoint_id=path)
        put(model, optimizer, state, named=True)
        check_moments(optimizer, 2)


def missing_keys(state: Any, dcp: Any, path: str) -> Any:
    """Returns the keys of `state` that the checkpoint lacks."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    asked = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in state.items()}
    return sorted(set(flatten_state_dict(asked)[0]) - set(saved))


def resume_unused(ctx: Context, *, partial_load: bool) -> None:
    """Resumes with a layer that had no gradient before the save, so the checkpoint lacks its state."""
    with checkpoint(ctx, extra=True) as (dcp, path):
        model, optimizer = start(extra=True)
        state = states(model, optimizer, named=True)
        missing = missing_keys(state, dcp, path)
        planner = dcp.DefaultLoadPlanner()
        if partial_load:
            assert all(key.startswith("optimizer.state.spare.") for key in missing), missing
            planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(state, checkpoint_id=path, planner=planner)
        put(model, optimizer, state, named=True)
        check_moments(optimizer, 2)


def resume_older(ctx: Context, *, partial_load: bool) -> None:
    """Resumes from a checkpoint without an option that AdamW has since."""
    import torch.distributed.checkpoint as dcp

    ctx.init_process_group(timeout_s=30)
    path = ctx.path("step-100")
    saved = states(*start(trained=True), named=True)
    del saved["optimizer"]["param_groups"][0]["decoupled_weight_decay"]
    dcp.save(saved, checkpoint_id=path)
    ctx.reached()
    model, optimizer = start()
    state = states(model, optimizer, named=True)
    assert missing_keys(state, dcp, path) == ["optimizer.param_groups.0.decoupled_weight_decay"]
    dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=partial_load))
    put(model, optimizer, state, named=True)
    check_moments(optimizer, 2)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


def resume_with_scheduler(ctx: Context, *, partial_load: bool) -> None:
    """Resumes after a scheduler added an option to each group, which the save did not have."""
    import torch

    with checkpoint(ctx) as (dcp, path):
        model, optimizer = start()
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        state = states(model, optimizer, named=True)
        assert missing_keys(state, dcp, path) == ["optimizer.param_groups.0.initial_lr"]
        dcp.load(state, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=partial_load))
        put(model, optimizer, state, named=True)
        check_moments(optimizer, 2)


def resume_objects(ctx: Context, *, named: bool) -> None:
    """Passes the model and the optimizer themselves to dcp.load, which calls their state_dict."""
    with checkpoint(ctx, named=named) as (dcp, path):
        model, optimizer = start()
        state = states(model, optimizer, named=True) if named else {"model": model, "optimizer": optimizer}
        assert missing_keys(state, dcp, path) == []
        dcp.load(state, checkpoint_id=path)
        if named:
            put(model, optimizer, state, named=True)
        check_moments(optimizer, 2)


def resume_layout(ctx: Context, *, same: bool) -> None:
    """Resumes from a nested checkpoint with a flattened optimizer state, unless `same`."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    with checkpoint(ctx) as (dcp, path):
        model, optimizer = start()
        options = StateDictOptions(flatten_optimizer_state_dict=not same)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options
        )
        check_moments(optimizer, 2)


def set_full_state(ctx: Context, *, lenient: bool) -> None:
    """Sets a full state dict that lacks the state of a layer without a gradient."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    saved = get_optimizer_state_dict(*start(trained=True, extra=True))
    model, optimizer = start(extra=True)
    ctx.reached()
    set_optimizer_state_dict(model, optimizer, saved, options=StateDictOptions(strict=not lenient))
    check_moments(optimizer, 2)


def resume_other_name(ctx: Context, *, same_name: bool) -> None:
    """Resumes with allow_partial_load and a wrong outer name: dcp.load reads nothing and raises nothing."""
    with checkpoint(ctx) as (dcp, path):
        model, optimizer = start()
        state = states(model, optimizer, named=True)
        wanted = state if same_name else {"model": state["model"], "optim": state["optimizer"]}
        dcp.load(wanted, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        put(model, optimizer, state, named=True)
        check_moments(optimizer, 2)


def resume_compiled(ctx: Context, *, named: bool) -> None:
    """Resumes with a compiled model, whose wrapper has other names in its state dict."""
    import torch

    with checkpoint(ctx) as (dcp, path):
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        model = start()[0]
        compiled = torch.compile(model)
        state = {"model": get_model_state_dict(compiled) if named else compiled.state_dict()}
        dcp.load(state, checkpoint_id=path)
        expected = start(trained=True)[0]["inner"].weight
        assert torch.equal(model["inner"].weight, expected)


def pair(
    name: str, job: Callable[..., None], expect: Expect, because: str, fix: str, keyword: str, torch: str = ">=2.4"
) -> Experiment:
    """Returns an experiment; `keyword` is False in the control arm and True in the treatment arm."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: False}), expect, because, "cpu"),
        treatment=Arm(partial(job, **{keyword: True}), completed(), fix, "cpu"),
        world_size=1,
        needs=Needs(packages={"torch": torch}),
    )


MISSING = r"Missing key in checkpoint state_dict: "
EMPTY = symptom(r"loaded without an error, and 0 of 2 parameters have their moments")
NAMES = "both sides use get_state_dict, which names the parameters"
PARTIAL = "allow_partial_load skips the missing keys"
numbers = pair(
    "names",
    partial(resume, trained=True),
    raised(MISSING + r"optimizer\.state\.0\.step"),
    "the resuming job uses optimizer.state_dict(), which numbers the parameters",
    NAMES,
    "named",
)
probe = Probe(
    experiments=(numbers,),
    variants=(
        pair("empty", resume_fresh, EMPTY, "the new optimizer has no state, so it requests none", NAMES, "named"),
        pair(
            "fresh",
            partial(resume, trained=False),
            EMPTY,
            "optimizer.state_dict() has numbers and no state",
            NAMES,
            "named",
        ),
        pair(
            "raw",
            resume_raw,
            raised(MISSING),
            "the checkpoint has numbers, the resuming job names",
            "the job loads numbers into a state of zeros",
            "raw",
        ),
        pair(
            "gradients",
            resume_with_gradients,
            EMPTY,
            "gradients exist before the load",
            "the gradients are cleared",
            "cleared",
            ">=2.7",
        ),
        pair("unused", resume_unused, raised(MISSING), "a layer had no gradient", PARTIAL, "partial_load"),
        pair(
            "older", resume_older, raised(MISSING), "the checkpoint lacks an option", PARTIAL, "partial_load", ">=2.7"
        ),
        pair(
            "scheduler", resume_with_scheduler, raised(MISSING), "a scheduler adds initial_lr", PARTIAL, "partial_load"
        ),
        pair("objects", resume_objects, EMPTY, "the optimizer requests nothing before its first step", NAMES, "named"),
        pair(
            "layout",
            resume_layout,
            raised(MISSING),
            "the resuming job flattens the state",
            "both sides are nested",
            "same",
        ),
        pair(
            "missing-state",
            set_full_state,
            raised(r"Missing optimizer state for parameter"),
            "a layer had no gradient",
            "strict=False allows a missing state",
            "lenient",
            ">=2.13",
        ),
        pair(
            "other-name",
            resume_other_name,
            EMPTY,
            "the outer name is wrong, and allow_partial_load hides it",
            "the outer names agree",
            "same_name",
        ),
        pair(
            "compiled",
            resume_compiled,
            raised(MISSING),
            "the compiled model has the names of its wrapper",
            NAMES,
            "named",
        ),
    ),
)

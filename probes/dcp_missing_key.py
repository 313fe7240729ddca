"""A distributed checkpoint has no key that the loading job asks for, or the loading job does not ask for the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom


def start(*, trained: bool = False, extra: bool = False) -> Any:
    """A model and its optimizer, with or without a step; an extra layer takes no part in the forward."""
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
    from torch.distributed.checkpoint.state_dict import get_state_dict

    if named:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
    else:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return state


def put(model: Any, optimizer: Any, state: Any, *, named: bool) -> None:
    from torch.distributed.checkpoint.state_dict import set_state_dict

    if named:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


@contextmanager
def checkpoint(ctx: Context, *, named: bool = True, extra: bool = False) -> Iterator[Any]:
    """A saved checkpoint: torch.distributed.checkpoint and the path of the folder."""
    import torch.distributed.checkpoint as dcp

    ctx.init_process_group(timeout_s=30)
    path = ctx.path("step-100")
    dcp.save(states(*start(trained=True, extra=extra), named=named), checkpoint_id=path)
    ctx.reached()
    yield dcp, path


def check_moments(optimizer: Any, expected: int) -> None:
    """So many parameters have moments that a gradient made: zeros come from nowhere."""
    found = sum(1 for state in optimizer.state.values() if state["exp_avg"].abs().sum() > 0)
    if found != expected:
        raise Symptom("loaded without an error, and %d of %d parameters have their moments" % (found, expected))


def resume(ctx: Context, *, named: bool, trained: bool) -> None:
    """A checkpoint with names; the resuming job uses names too, or the numbers of the optimizer."""
    with checkpoint(ctx) as (dcp, path):
        model, optimizer = start(trained=trained)
        state = states(model, optimizer, named=named)
        dcp.load(state, checkpoint_id=path)
        put(model, optimizer, state, named=named)
        check_moments(optimizer, 2)


def resume_fresh(ctx: Context, *, named: bool) -> None:
    """Saved and loaded in the same way; an optimizer before its first step has no state to load into."""
    with checkpoint(ctx, named=named) as (dcp, path):
        model, optimizer = start()
        state = states(model, optimizer, named=named)
        dcp.load(state, checkpoint_id=path)
        put(model, optimizer, state, named=named)
        check_moments(optimizer, 2)


def resume_raw(ctx: Context, *, raw: bool) -> None:
    """A checkpoint with numbers, which somebody has already."""
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
    """A backward before the load, as a check of the memory or of the shapes has it."""
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
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    asked = {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in state.items()}
    return sorted(set(flatten_state_dict(asked)[0]) - set(saved))


def resume_unused(ctx: Context, *, partial_load: bool) -> None:
    """A layer got no gradient before the save, so its state is not in the checkpoint."""
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
    """A checkpoint without an option that AdamW has by now."""
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
    """A scheduler, made before this load and not before the save, adds an option to each group."""
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
    """The dict has the model and the optimizer themselves; dcp.load asks them for their state."""
    with checkpoint(ctx, named=named) as (dcp, path):
        model, optimizer = start()
        state = states(model, optimizer, named=True) if named else {"model": model, "optimizer": optimizer}
        assert missing_keys(state, dcp, path) == []
        dcp.load(state, checkpoint_id=path)
        if named:
            put(model, optimizer, state, named=True)
        check_moments(optimizer, 2)


def resume_layout(ctx: Context, *, same: bool) -> None:
    """The checkpoint is nested; the resuming job flattens the state of the optimizer, or does not."""
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
    """A full state dict without the state of a layer that had no gradient."""
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
    """allow_partial_load against a name that is wrong for everything: nothing is read, and nothing is said."""
    with checkpoint(ctx) as (dcp, path):
        model, optimizer = start()
        state = states(model, optimizer, named=True)
        wanted = state if same_name else {"model": state["model"], "optim": state["optimizer"]}
        dcp.load(wanted, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        put(model, optimizer, state, named=True)
        check_moments(optimizer, 2)


def resume_compiled(ctx: Context, *, named: bool) -> None:
    """The model is compiled in the job that resumes; the state dict of the wrapper has other names."""
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
    """`keyword` is off in the control arm and on in the treatment."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: False}), expect, because, "cpu"),
        treatment=Arm(partial(job, **{keyword: True}), completed(), fix, "cpu"),
        world_size=1,
        needs=Needs(packages={"torch": torch}),
    )


MISSING = r"Missing key in checkpoint state_dict: "
EMPTY = symptom(r"loaded without an error, and 0 of 2 parameters have their moments")
NAMES = "get_state_dict brings both to the names of the parameters"
numbers = pair(
    "names",
    partial(resume, trained=True),
    raised(MISSING + r"optimizer\.state\.0\.step"),
    "the optimizer's own state dict has numbers",
    NAMES,
    "named",
)
probe = Probe(
    experiments=(numbers,),
    variants=(
        pair("empty", resume_fresh, EMPTY, "an optimizer without state asks for none", NAMES, "named"),
        pair("fresh", partial(resume, trained=False), EMPTY, "numbers, and no state", NAMES, "named"),
        pair("raw", resume_raw, raised(MISSING), "the checkpoint has numbers", "numbers, into a state of zeros", "raw"),
        pair("gradients", resume_with_gradients, EMPTY, "gradients are there", "they are cleared", "cleared", ">=2.7"),
        pair("unused", resume_unused, raised(MISSING), "a layer had no gradient", "that is allowed", "partial_load"),
        pair(
            "older", resume_older, raised(MISSING), "an option is missing", "that is allowed", "partial_load", ">=2.7"
        ),
        pair("scheduler", resume_with_scheduler, raised(MISSING), "initial_lr", "that is allowed", "partial_load"),
        pair("objects", resume_objects, EMPTY, "an optimizer asks for nothing before its first step", NAMES, "named"),
        pair("layout", resume_layout, raised(MISSING), "one side is flattened", "both are nested", "same"),
        pair(
            "missing-state",
            set_full_state,
            raised(r"Missing optimizer state for parameter"),
            "a layer had no gradient",
            "that is allowed",
            "lenient",
            ">=2.13",
        ),
        pair("other-name", resume_other_name, EMPTY, "another name, and allowed", "the same name", "same_name"),
        pair("compiled", resume_compiled, raised(MISSING), "the names of the wrapper", NAMES, "named"),
    ),
)

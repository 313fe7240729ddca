"""Each step passes a new value to a compiled function, so torch compiles again, and after a limit runs uncompiled."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any, Callable, List, Mapping, Optional, Tuple

from kb.cpu_arms import without_launcher
from kb.packages import release, version
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
    symptom,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

LIMIT = 3  # the recompile limit of the arms; the default is 8
SIZES = (5, 6, 7, 9, 10, 11)


class Compiler:
    """Counts compiles and compiled runs of `torch.compile` with its own backend, and stores torch's warnings."""

    def __init__(self, **options: Any) -> None:
        import torch

        self.set_limit(LIMIT)
        self.compiles = self.runs = 0
        self.warnings: List[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("torch._dynamo.convert_frame").addHandler(handler)
        self.compile = partial(torch.compile, backend=self._count, **options)

    def _count(self, graph: Any, _: Any) -> Callable[..., Any]:
        self.compiles += 1

        def run(*tensors: Any) -> Any:
            self.runs += 1
            return graph.forward(*tensors)

        return run

    def set_limit(self, limit: int) -> None:
        import torch._dynamo.config as config

        setattr(config, "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit", limit)

    def hits(self) -> str:
        """The warnings about the limit since the last call, on one line."""
        hits = [" ".join(text.split()) for text in self.warnings if "hit config." in text]
        self.warnings.clear()
        return " ".join(hit.split(" To log all")[0][:400] for hit in hits)


def lengths(ctx: Context, *, dynamic: Optional[bool]) -> None:
    """Runs six lengths in turn, twice. The second round reuses the compiled versions that exist."""
    import torch

    compiler = Compiler(dynamic=dynamic)
    function = compiler.compile(lambda x: x.sin().sum(1))
    ctx.reached()
    for size in SIZES * 2:
        function(torch.ones(2, size))
    ctx.note(compiles=compiler.compiles, compiled_steps=compiler.runs)
    hits = compiler.hits()
    if hits:
        raise Symptom(f"{compiler.runs} of 12 steps ran compiled: {hits}")
    assert compiler.runs == 12 and compiler.compiles <= LIMIT, (compiler.runs, compiler.compiles)


Step = Callable[[int], Any]


def change_values(ctx: Context, *, fixed: bool) -> None:
    """Changes six things in every step: a counter, the length of a list, a function, a string, a size, a layer."""
    compiler = Compiler(dynamic=True)
    steps = {
        "counter": count_steps(compiler, fixed),
        "list": sum_list(compiler, fixed),
        "function": apply_function(compiler, fixed),
        "text": log_name(compiler, fixed),
        "full graph": fix_size(compiler, fixed),
        "layer": run_layer(compiler, fixed),
    }
    ctx.reached()
    hits = {}
    for kind, step in steps.items():
        error_text = ""
        try:
            for n in range(4):
                step(n)
        except Exception as error:  # expected with a full graph; the pattern rejects any other
            error_text = f" {type(error).__name__}: {error}"
        hits[kind] = compiler.hits() + error_text
    ctx.note(compiles=compiler.compiles, compiled_steps=compiler.runs)
    if any(hits.values()):
        raise Symptom("; ".join(f"{kind}: {hit or 'no warning'}" for kind, hit in hits.items()))
    assert compiler.runs == 24, compiler.runs


def count_steps(compiler: Compiler, fixed: bool) -> Step:
    """The module counts its steps; the fix passes the number as a tensor."""
    import torch

    class Counter(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.step = torch.nn.Linear(2, 2), 0

        def forward(self, x: torch.Tensor, step: Optional[torch.Tensor] = None) -> torch.Tensor:
            if step is None:
                self.step += 1
            return self.linear(x) * (self.step if step is None else step)

    plain, x = Counter(), torch.ones(1, 2)
    model = compiler.compile(plain)

    def run(n: int) -> None:
        if fixed:
            y = model(x, step=torch.tensor(n))
            assert torch.allclose(y, plain.linear(x) * n)
        else:
            model(x)

    return run


def sum_list(compiler: Compiler, fixed: bool) -> Step:
    """The function gets a list whose length changes; the fix passes one tensor."""
    import torch

    total = compiler.compile(lambda parts: parts.sum() if fixed else sum(part.sum() for part in parts))
    return lambda n: total(torch.ones(n + 2, 2) if fixed else [torch.ones(1, 2)] * (n + 2))


def apply_function(compiler: Compiler, fixed: bool) -> Step:
    """The function gets a new function in each step; the fix passes the same one."""
    import torch

    apply, mask = compiler.compile(lambda function, x: function(x)), eval("lambda x: x + 1")
    return lambda _: apply(mask if fixed else eval("lambda x: x + 1"), torch.ones(1, 2))


def log_name(compiler: Compiler, fixed: bool) -> Step:
    """The compiled function logs the name of the sample; the fix logs it outside."""
    import torch

    logged: List[str] = []

    def add_one(x: torch.Tensor, name: str) -> torch.Tensor:
        if not fixed:
            logged.append(name)
        return x + 1

    compiled = compiler.compile(add_one)

    def run(n: int) -> None:
        if fixed:
            logged.append(f"sample {n}")
        compiled(torch.ones(1, 2), f"sample {n}")
        assert len(logged) == n + 1, logged

    return run


def fix_size(compiler: Compiler, fixed: bool) -> Step:
    """dynamic=False with a full graph raises at the limit; the fix pads to one size."""
    import torch

    compiled = compiler.compile(lambda x: x.sin().sum(1), dynamic=False, fullgraph=True)

    def run(n: int) -> None:
        x = torch.ones(2, SIZES[n])
        if fixed:
            x = torch.nn.functional.pad(x, (0, -x.shape[1] % 8))
        compiled(x)

    return run


def run_layer(compiler: Compiler, fixed: bool) -> Step:
    """Each step runs another layer of one class; the fix raises the limit."""
    import torch

    layers = [compiler.compile(torch.nn.Dropout(n / 8)) for n in range(1, 5)]

    def run(n: int) -> None:
        if fixed:
            compiler.set_limit(8)
        layers[n](torch.ones(1, 2))

    return run


def accelerated(ctx: Context, *, argument: str) -> None:
    """Runs a prepared model in the environment that `accelerate launch` creates with `argument`."""
    import torch
    import torch._dynamo as dynamo
    from accelerate import Accelerator  # type: ignore[import-not-found]
    from accelerate.commands.launch import launch_command_parser  # type: ignore[import-not-found]
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env  # type: ignore[import-not-found]

    command = ["--cpu", "--num_processes=1", "--num_machines=1", "--num_cpu_threads_per_process=1"]
    command += ["--mixed_precision=no", "--dynamo_backend=eager", *argument.split(), "train.py"]
    _, environment = prepare_simple_launcher_cmd_env(launch_command_parser().parse_args(command))
    os.environ.update({name: text for name, text in environment.items() if name.startswith("ACCELERATE_DYNAMO_")})
    without_launcher()
    compiler = Compiler()
    model = Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2))
    ctx.reached()
    for size in SIZES:
        model(torch.ones(size, 2))
    graphs, hits = dynamo.utils.counters["stats"]["unique_graphs"], compiler.hits()
    if hits:
        raise Symptom(f"ACCELERATE_DYNAMO_USE_DYNAMIC={os.environ['ACCELERATE_DYNAMO_USE_DYNAMIC']}: {hits}")
    assert graphs == 1, graphs


ASK = "run some steps with TORCH_LOGS=recompiles, which prints each recompile and its reason"
AUTOMATIC = "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES"


def check(params: Mapping[str, Any]) -> Finding:
    """Does accelerate or a variable of torch turn off dynamic sizes? kb cannot see torch.compile in code."""
    if os.environ.get(AUTOMATIC, "1") != "1" and release("torch") >= (2, 11):
        return exposed(f"{AUTOMATIC} is off, so torch compiles again for each new size", advice=f"unset {AUTOMATIC}")
    accelerate = release("accelerate")
    if accelerate < (1, 7):
        return unknown(
            "kb finds no accelerate 1.7 or newer, and knows of no older release that turns off dynamic sizes",
            advice=ASK,
        )
    dynamic, source = os.environ.get("ACCELERATE_DYNAMO_USE_DYNAMIC", "").lower(), "ACCELERATE_DYNAMO_USE_DYNAMIC"
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if params["config"] is not None:
        try:
            config = read_config(params["config"])
        except UnreadableConfig as error:
            return unknown(str(error))
        if config.kind == "accelerate" and str(config.values.get("distributed_type")).upper() == "DEEPSPEED":
            return unknown("with DeepSpeed, accelerate launch ignores the dynamo settings", advice=ASK)
        if config.kind == "accelerate":
            section = config.values.get("dynamo_config")
            items = section.items() if isinstance(section, dict) else ()
            plain = {str(key).replace("dynamo_", "", 1): str(value).lower() for key, value in items}
            backend, source = (
                plain.get("backend", str(config.values.get("dynamo_backend", "no")).lower()),
                "the file (unless the command line has the flag)",
            )
            known = accelerate < (1, 16)  # kb does not know the default of later launchers
            dynamic = plain.get("use_dynamic", "false" if known else "")
        elif str(config.values.get("torch_compile")).lower() in ("true", "yes", "1"):
            backend = "torch_compile"
            if not dynamic:
                return unknown(
                    "torch_compile is set: accelerate launch turns off dynamic sizes, torchrun does not", advice=ASK
                )
    if backend in ("", "no", "none", "false"):  # YAML reads a bare NO as false
        return unknown(
            "accelerate does not compile; kb cannot see torch.compile or torch_compile=True in your code",
            advice=ASK,
        )
    if dynamic in ("false", "0", "no", "off", "f", "n"):
        message = (
            f"accelerate {version('accelerate')} compiles ({backend[:40]}) with dynamic=False, which {source} sets"
        )
        return exposed(message, advice="set dynamo_use_dynamic: true")
    return unknown(
        "accelerate leaves sizes dynamic; kb cannot see lists, counters and functions in your code", advice=ASK
    )


HIT = r"torch\._dynamo hit config\.(recompile_limit|cache_size_limit) \(3\) function: .{1,300}? last reason: "
REST = ".{1,400}; "
FAILED = "(FailOnRecompileLimitHit|CacheLimitExceeded): "


def pair(name: str, arms: Tuple[Any, Any], expect: Expect, because: str, fix: str, **needs: str) -> Any:
    control, treatment = arms
    return Experiment(
        name=name,
        control=Arm(control, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(treatment, expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages=needs),
        world_size=1,
        deadline_s=90,
        expected_s=(2, 2),
    )


probe = Probe(
    experiments=(
        pair(
            "lengths",
            (partial(lengths, dynamic=False), partial(lengths, dynamic=None)),
            symptom("[36] of 12 steps ran compiled: " + HIT),
            "with dynamic=False torch compiles each length up to the limit, and runs the others uncompiled",
            "by default the second length makes the size dynamic, so every step runs compiled",
            torch=">=2.2",
        ),
    ),
    variants=(
        pair(
            "values",
            (partial(change_values, fixed=False), partial(change_values, fixed=True)),
            symptom(
                REST.join(f"{kind}: {HIT}" for kind in ("counter", "list", "function", "text", "full graph"))
                + f".{{1,400}} {FAILED}{REST}layer: {HIT}"
            ),
            "dynamic=True does not help: six things that change, most of them not sizes, each reach the limit",
            "the loop passes tensors and one function, logs outside, pads, and raises the limit for the layers",
            torch=">=2.9",
        ),
        pair(
            "accelerate",
            (partial(accelerated, argument=""), partial(accelerated, argument="--dynamo_use_dynamic")),
            symptom("ACCELERATE_DYNAMO_USE_DYNAMIC=False: " + HIT),
            "accelerate launch sets USE_DYNAMIC=False, and accelerate passes that to torch.compile",
            "accelerate launch gets --dynamo_use_dynamic",
            torch=">=2.6",
            accelerate=">=1.7,<1.16",
        ),
    ),
    check=check,
    params={
        "config": Param("path", "accelerate's configuration (--config_file), or a file with the arguments of a Trainer")
    },
)

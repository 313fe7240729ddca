"""Every step has a new value for a compiled function: each is a compile, and after the limit it runs uncompiled."""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any, Callable, List, Mapping, Optional, Tuple

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

LIMIT = 3  # of the arms, in place of 8
SIZES = (5, 6, 7, 9, 10, 11)


class Compiler:
    """Counts compiles and compiled runs of `torch.compile` with a backend of its own, and keeps torch's warnings."""

    def __init__(self, **options: Any) -> None:
        import torch
        import torch._dynamo.config as config

        self.limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
        setattr(config, self.limit, LIMIT)
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

    def hits(self) -> str:
        """The warnings about the limit since the last call, on one line."""
        hits = [" ".join(text.split()) for text in self.warnings if "hit config." in text]
        self.warnings.clear()
        return " ".join(hit.split(" To log all")[0][:400] for hit in hits)


def lengths(ctx: Context, *, dynamic: Optional[bool]) -> None:
    """Six lengths in turn, twice: in the second round the versions that exist are found again."""
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


def values(ctx: Context, *, mended: bool) -> None:
    """A counter of the module, the length of a list, a new function, a text, fixed sizes with a full graph, layers.

    `mended`: a tensor from the loop, one tensor, one function, logging outside, padding, and a higher limit.
    """
    import torch
    import torch._dynamo.config as config

    class Counter(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.step = torch.nn.Linear(2, 2), 0

        def forward(self, x: torch.Tensor, step: Optional[torch.Tensor] = None) -> torch.Tensor:
            if step is None:
                self.step += 1
            return self.linear(x) * (self.step if step is None else step)

    seen: List[str] = []

    def named(x: torch.Tensor, name: str) -> torch.Tensor:
        if not mended:
            seen.append(name)
        return x + 1

    compiler = Compiler(dynamic=True)
    plain = Counter()
    model = compiler.compile(plain)
    total = compiler.compile(lambda parts: parts.sum() if mended else sum(part.sum() for part in parts))
    apply, record = compiler.compile(lambda function, x: function(x)), compiler.compile(named)
    fixed = compiler.compile(lambda x: x.sin().sum(1), dynamic=False, fullgraph=True)
    layers = [compiler.compile(torch.nn.Dropout(n / 8)) for n in range(1, 5)]
    mask, ones = eval("lambda x: x + 1"), torch.ones(1, 2)

    def step_of_counts(n: int) -> None:
        x = ones
        if mended:
            y = model(x, step=torch.tensor(n))
            assert torch.allclose(y, plain.linear(x) * n)
        else:
            model(x)

    def step_of_sizes(n: int) -> None:
        x = torch.ones(2, SIZES[n])
        if mended:
            x = torch.nn.functional.pad(x, (0, -x.shape[1] % 8))
        fixed(x)

    def step_of_texts(n: int) -> None:
        if mended:
            seen.append(f"sample {n}")
        record(ones, f"sample {n}")

    kinds: Any = (
        ("counter", step_of_counts),
        ("list", lambda n: total(torch.ones(n + 2, 2) if mended else [ones] * (n + 2))),
        ("function", lambda _: apply(mask if mended else eval("lambda x: x + 1"), ones)),
        ("text", step_of_texts),
        ("full graph", step_of_sizes),
        ("layer", lambda n: layers[n](ones)),
    )
    ctx.reached()
    hits = {}
    for kind, step in kinds:
        if mended and kind == "layer":
            setattr(config, compiler.limit, 8)
        ended = ""
        try:
            for n in range(4):
                step(n)
        except Exception as error:  # the full graph's, or one that the pattern refuses
            ended = f" {type(error).__name__}: {error}"
        hits[kind] = compiler.hits() + ended
    ctx.note(compiles=compiler.compiles, compiled_steps=compiler.runs)
    if any(hits.values()):
        raise Symptom("; ".join(f"{kind}: {hit or 'no warning'}" for kind, hit in hits.items()))
    assert len(seen) == 4 and compiler.runs == 24, (seen, compiler.runs)


def accelerated(ctx: Context, *, argument: str) -> None:
    """The environment that `accelerate launch` makes, with `argument` in its command line, and a prepared model."""
    import torch
    import torch._dynamo as dynamo
    from accelerate import Accelerator  # type: ignore[import-not-found]
    from accelerate.commands.launch import launch_command_parser  # type: ignore[import-not-found]
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env  # type: ignore[import-not-found]

    command = ["--cpu", "--num_processes=1", "--num_machines=1", "--num_cpu_threads_per_process=1"]
    command += ["--mixed_precision=no", "--dynamo_backend=eager", *argument.split(), "train.py"]
    _, environment = prepare_simple_launcher_cmd_env(launch_command_parser().parse_args(command))
    os.environ.update({name: text for name, text in environment.items() if name.startswith("ACCELERATE_DYNAMO_")})
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # a job of one process, without DDP
        os.environ.pop(name, None)
    compiler = Compiler()
    model = Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2))
    ctx.reached()
    for size in SIZES:
        model(torch.ones(size, 2))
    graphs, hits = dynamo.utils.counters["stats"]["unique_graphs"], compiler.hits()
    if hits:
        raise Symptom(f"ACCELERATE_DYNAMO_USE_DYNAMIC={os.environ['ACCELERATE_DYNAMO_USE_DYNAMIC']}: {hits}")
    assert graphs == 1, graphs


ASK = "TORCH_LOGS=recompiles for some steps prints each compile and its reason"
AUTOMATIC = "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES"


def check(params: Mapping[str, Any]) -> Finding:
    """Are sizes fixed by accelerate or by torch's variable? What the code compiles by itself is not visible."""
    if os.environ.get(AUTOMATIC, "1") != "1" and release("torch") >= (2, 11):
        return exposed(f"{AUTOMATIC} is off: each size that changes is compiled anew", advice=f"unset {AUTOMATIC}")
    accelerate = release("accelerate")
    if accelerate < (1, 7):
        return unknown("no accelerate from 1.7 on can be read here: only these are known to fix sizes", advice=ASK)
    dynamic, source = os.environ.get("ACCELERATE_DYNAMO_USE_DYNAMIC", "").lower(), "ACCELERATE_DYNAMO_USE_DYNAMIC"
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if params["config"] is not None:
        try:
            config = read_config(params["config"])
        except UnreadableConfig as error:
            return unknown(str(error))
        if config.kind == "accelerate" and str(config.values.get("distributed_type")).upper() == "DEEPSPEED":
            return unknown("with DeepSpeed accelerate launch passes no dynamo setting on", advice=ASK)
        if config.kind == "accelerate":
            section = config.values.get("dynamo_config")
            items = section.items() if isinstance(section, dict) else ()
            plain = {str(key).replace("dynamo_", "", 1): str(value).lower() for key, value in items}
            backend, source = (
                plain.get("backend", str(config.values.get("dynamo_backend", "no")).lower()),
                "the file, unless the command line has the flag",
            )
            known = accelerate < (1, 16)  # what a later launcher writes is not known
            dynamic = plain.get("use_dynamic", "false" if known else "")
        elif str(config.values.get("torch_compile")).lower() in ("true", "yes", "1"):
            backend = "torch_compile"
            if not dynamic:
                return unknown("torch_compile is set: accelerate launch fixes the sizes, torchrun does not", advice=ASK)
    if backend in ("", "no", "none", "false"):  # YAML reads a bare NO as false
        return unknown("accelerate is not told to compile; torch_compile=True and code do so by themselves", advice=ASK)
    if dynamic in ("false", "0", "no", "off", "f", "n"):
        found = f"accelerate {version('accelerate')} compiles ({backend[:40]}) with dynamic=False, by {source}"
        return exposed(found, advice="dynamo_use_dynamic: true")
    return unknown("accelerate fixes no size; lists, counters and functions are not visible", advice=ASK)


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
            "dynamic=False: each length is compiled, up to the limit, and the others run uncompiled",
            "the default: the second length makes the size dynamic, and every step runs compiled",
            torch=">=2.2",
        ),
    ),
    variants=(
        pair(
            "values",
            (partial(values, mended=False), partial(values, mended=True)),
            symptom(
                REST.join(f"{kind}: {HIT}" for kind in ("counter", "list", "function", "text", "full graph"))
                + f".{{1,400}} {FAILED}{REST}layer: {HIT}"
            ),
            "dynamic=True, and five things that are no sizes: each reaches the limit; with a full graph that raises",
            "the loop counts, one tensor, one function, logging outside, padding, a higher limit for the layers",
            torch=">=2.9",
        ),
        pair(
            "accelerate",
            (partial(accelerated, argument=""), partial(accelerated, argument="--dynamo_use_dynamic")),
            symptom("ACCELERATE_DYNAMO_USE_DYNAMIC=False: " + HIT),
            "accelerate launch writes USE_DYNAMIC=False, and the plugin passes it on",
            "the same with its flag",
            torch=">=2.6",
            accelerate=">=1.7,<1.16",
        ),
    ),
    check=check,
    params={"config": Param("path", "accelerate's configuration (--config_file), or the arguments of a Trainer")},
)

"""A compiled part of Megatron is missing: the helper of its data sets, Apex, Transformer Engine."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional

from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Probe,
    Symptom,
    Unavailable,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

MODULE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "helpers_cpp"};
PyMODINIT_FUNC PyInit_helpers_cpp(void) {
    PyObject *made = PyModule_Create(&module);
    PyModule_AddIntConstant(made, "samples", 100);
    return made;
}
"""
MAKEFILE = """
SUFFIX = $(shell python3-config --extension-suffix)
helpers_cpp$(SUFFIX): helpers_cpp.c
\tslow-link $< $@
"""
LINK = """#!/bin/sh
cc -shared -fPIC -I"$INCLUDE" "$1" -o "$2.whole" || exit 1
: > "$2"
: > "$2.open"
while [ -e "$HOLD" ]; do sleep 0.01; done
cat "$2.whole" > "$2"
"""
OTHER = ".cpython-39-kb.so"  # no Python has it
OWN = str(sysconfig.get_config_var("EXT_SUFFIX"))


class Helper:
    """megatron.core.datasets with the source of its helper, and a linker whose output is empty while HOLD exists."""

    def __init__(self, ctx: Context, suffix: str = OWN, node: int = 0) -> None:
        include = sysconfig.get_path("include")
        if not Path(include, "Python.h").exists():
            raise Unavailable("Python.h is not installed")
        root, tools = Path(ctx.path(f"node{node}")), Path(ctx.path(f"tools{ctx.rank}"))
        self.folder, self.hold = root / "megatron/core/datasets", Path(ctx.path("hold"))
        tools.mkdir()
        config = f"#!/bin/sh\necho {suffix}\n" if suffix else "#!/bin/sh\nexit 127\n"
        for program, text in (("python3-config", config), ("slow-link", LINK)):
            (tools / program).write_text(text)
            (tools / program).chmod(0o755)
        os.environ.update(PATH=f"{tools}:{os.environ['PATH']}", INCLUDE=include, HOLD=str(self.hold))
        if ctx.rank == 0 or node:
            self.folder.mkdir(parents=True)
            for package in (self.folder, *list(self.folder.parents)[:2]):
                (package / "__init__.py").touch()
            (self.folder / "helpers.py").write_text("from megatron.core.datasets.helpers_cpp import *")
            (self.folder / "helpers_cpp.c").write_text(MODULE)
            (self.folder / "Makefile").write_text(MAKEFILE)
        sys.path.insert(0, str(root))

    def make(self, *options: str) -> None:
        subprocess.run(["make", "-C", str(self.folder), *options], check=True)

    def wait_until_open(self) -> None:
        while not list(self.folder.glob("*.open")):
            time.sleep(0.005)

    def use(self) -> None:
        assert helpers().samples == 100


def helpers() -> Any:
    """As Megatron imports it, which decides the message."""
    from megatron.core.datasets import helpers  # type: ignore[import-not-found]

    return helpers


def core(name: str) -> Any:
    return importlib.import_module("megatron.core." + name)


def build(ctx: Context, *, own_suffix: bool, suffix: str = OTHER) -> None:
    """make succeeds, and asks the python3-config that is first on PATH how the file is to be called."""
    helper = Helper(ctx, suffix)
    ctx.reached()
    helper.make(*[f"SUFFIX={OWN}"] if own_suffix else [])
    helper.use()


def build_by_ranks(ctx: Context, *, one_rank: bool) -> None:
    """Rank 0 is still writing the file when rank 1 comes, and calls make as well or waits."""
    helper = Helper(ctx)
    helper.hold.touch()
    ctx.reached()
    if ctx.rank == 0:
        helper.make()
        ctx.meet("built")
    else:
        helper.wait_until_open()
        try:
            if not one_rank:
                helper.make()
                helper.use()
        finally:
            helper.hold.unlink()
        ctx.meet("built")
    helper.use()


def build_again(ctx: Context, *, always: bool) -> None:
    """The first build was killed while it wrote the file."""
    helper = Helper(ctx)
    helper.hold.touch()
    first = subprocess.Popen(["make", "-C", str(helper.folder)], start_new_session=True)
    helper.wait_until_open()
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    helper.hold.unlink()
    ctx.reached()
    helper.make(*["-B"] if always else [])
    helper.use()


def build_on_nodes(ctx: Context, *, each_node: bool) -> None:
    """Two nodes with a disk of their own, one rank on each."""
    helper = Helper(ctx, node=ctx.rank)
    ctx.reached()
    if ctx.rank == 0 or each_node:
        helper.make()
    ctx.meet("built")
    helper.use()


def without(*names: str) -> None:
    for name in names:
        if importlib.util.find_spec(name):
            raise Unavailable(f"{name} is installed")


def megatron(ctx: Context, **options: Any) -> Any:
    """The configuration of a model of one layer, and a tensor-parallel group of one rank."""
    without("transformer_engine", "apex", "fused_weight_gradient_mlp_cuda")
    parallel_state, transformer = core("parallel_state"), core("transformer")
    ctx.init_process_group(20)
    parallel_state.initialize_model_parallel()
    ctx.reached()
    return transformer.TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True, **options
    )


def fuse(ctx: Context, *, gradient_accumulation_fusion: bool) -> None:
    """The layer that every Megatron model ends in."""
    config = megatron(ctx, gradient_accumulation_fusion=gradient_accumulation_fusion)
    import torch

    layer = core("tensor_parallel").ColumnParallelLinear(8, 8, config=config, init_method=torch.nn.init.ones_)
    assert layer(torch.ones(1, 8))[0].tolist() == [[8.0] * 8]


def fuse_rope(ctx: Context, *, apply_rope_fusion: bool) -> None:
    assert megatron(ctx, apply_rope_fusion=apply_rope_fusion).num_layers == 1


def fuse_softmax(ctx: Context, *, masked_softmax_fusion: bool) -> None:
    without("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda")
    import torch

    fused, padding = core("fusions.fused_softmax"), core("transformer.enums").AttnMaskType.padding
    ctx.reached()
    softmax = fused.FusedScaleMaskSoftmax(
        False, True, padding, masked_softmax_fusion, lambda x, mask: x.masked_fill(mask, -1e4), True, None
    )
    hidden = torch.ones(1, 1, 32, 32).triu(1).bool()
    weights = softmax(torch.ones(1, 4, 32, 32, dtype=torch.bfloat16), hidden)
    assert weights[0, 0, 1, :3].tolist() == [0.5, 0.5, 0.0]


def build_model(ctx: Context, *, local: bool = True, persist_layer_norm: bool = False) -> None:
    config = megatron(ctx, persist_layer_norm=persist_layer_norm)
    gpt, specs = core("models.gpt"), core("models.gpt.gpt_layer_specs")
    spec = specs.get_gpt_layer_local_spec if local else specs.get_gpt_layer_with_transformer_engine_spec
    model = gpt.GPTModel(config, spec(), vocab_size=16, max_sequence_length=8)
    assert type(model.decoder.final_layernorm).__module__.startswith("torch.")


def compile_installed(ctx: Context, *, compiles: bool) -> None:
    """What megatron.training calls at the start of every job, in the folder of the wheel."""
    utils = core("datasets.utils")
    if Path(utils.__file__).with_name("Makefile").exists():
        raise Unavailable("megatron-core is not installed from a wheel")
    ctx.reached()
    if compiles:
        try:
            utils.compile_helpers()
        except SystemExit as error:
            raise Symptom(f"compile_helpers ends the job with exit code {error.code}") from error
    assert callable(helpers().build_sample_idx)


def check(_: Mapping[str, Any]) -> Finding:
    """Which parts are there, as files? Nothing is imported. What is merely absent, the job may not want."""
    evidence: List[str] = []
    wrong: List[str] = []
    try:
        data = next((f / "core/datasets" for f in folders("megatron") if (f / "core/datasets").is_dir()), None)
        if data:
            look_at_helper(data, evidence, wrong)
        else:
            evidence.append("megatron.core is not in this interpreter")
        look_at_parts(bool(data), evidence, wrong)
    except (OSError, ValueError, ImportError, AttributeError, subprocess.SubprocessError) as error:
        return unknown(*evidence, *wrong, f"not everything could be read: {error}")
    if wrong:
        return exposed(*wrong, *evidence, advice="kb show megatron-build-missing --section fix")
    return unknown(*evidence, "whether the job wants each part, and whether it loads, only the job shows")


def folders(name: str) -> List[Path]:
    spec = importlib.util.find_spec(name)
    if spec is None:
        return []
    return [Path(place) for place in spec.submodule_search_locations or [str(Path(spec.origin or "").parent)]]


def look_at_helper(data: Path, evidence: List[str], wrong: List[str]) -> None:
    stem = "helpers_cpp" if (data / "helpers.py").exists() else "helpers"
    made = [data / (stem + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    made = [path for path in made if path.exists()]
    other = sorted(p.name for p in data.glob(stem + "*") if p.suffix in (".so", ""))
    config, suffix = shutil.which("python3-config"), ""
    if config:
        ran = subprocess.run([config, "--extension-suffix"], stdout=subprocess.PIPE, timeout=2, check=False)
        suffix = ran.stdout.decode(errors="replace").strip()[:80]
    if made and is_cut_short(made[0]):
        wrong.append(f"{made[0]} is not complete: a build is writing it, or was killed (then make -B)")
    elif made:
        evidence.append(f"the helper of the data sets is there: {made[0]}")
    elif other and (suffix != OWN or not (data / "Makefile").exists()):
        wrong.append(f"{data} has {', '.join(other)[:200]}, this Python looks for {stem}{OWN}, make here: {suffix!r}")
    else:
        how = [f"Makefile {'there' if (data / 'Makefile').exists() else 'absent'}", f"python3-config says {suffix!r}"]
        how.append("can be written" if os.access(data, os.W_OK) else "cannot be written")
        evidence.append(f"{data} has no {stem} ({', '.join(how)})")


def is_cut_short(path: Path) -> bool:
    """The table of sections is the last thing in the file that a linker writes."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or not head.startswith(b"\x7fELF\x02\x01"):
        return len(head) < 64
    (start,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
    return bool(start + size * count > path.stat().st_size)


def look_at_parts(megatron_here: bool, evidence: List[str], wrong: List[str]) -> None:
    apex = next(iter(folders("apex")), None)
    if apex and (apex / "lib/libapex.py").exists():
        wrong.append(f"{apex} is another project, which PyPI calls apex: pip uninstall apex")
    else:
        evidence.append(f"Apex: {apex or 'absent'}")
    engine: Optional[Path] = next(iter(folders("transformer_engine")), None)
    bases = (engine.parent, Path(sysconfig.get_paths()["purelib"])) if engine else ()
    places = [base / inner for base in bases for inner in (".", "transformer_engine", "transformer_engine/wheel_lib")]
    parts = ("torch", "extensions", "jax")  # extensions: torch's part up to 1.7
    found = {part for part in parts for place in places if any(place.glob(f"transformer_engine_{part}*.so"))}
    if engine and megatron_here and not found:
        wrong.append(f"{engine} was installed without a part for torch: there is no transformer_engine_torch")
    else:
        evidence.append(f"Transformer Engine: {engine or 'absent'}, parts {sorted(found)}")
    for name in ("amp_C", "fused_weight_gradient_mlp_cuda", "grouped_gemm"):
        evidence.append(f"{name}: " + ("there" if importlib.util.find_spec(name) else "absent"))


STAND_IN = "the helper of megatron-core: a module of a few lines, built by make in the same way"
NO_MODULE = raised(r"No module named 'megatron\.core\.datasets\.helpers_cpp'")
SHORT = raised(r"helpers_cpp\S*\.so: file too short")
OWN_SUFFIX = "make gets the suffix of the job's Python"
CORE = {"torch": ">=2.1", "megatron-core": ">=0.12"}


def pair(
    name: str,
    job: Callable[..., None],
    flag: str,
    expect: Expect,
    because: str,
    fix: str,
    ranks: int = 1,
    off: bool = False,
    packages: Optional[Mapping[str, str]] = None,
) -> Experiment:
    """`flag` is `off` in the control arm and the other in the treatment."""
    kind, stands_for = ("cpu", "") if packages else ("stand-in", STAND_IN)
    return Experiment(
        name=name,
        control=Arm(partial(job, **{flag: off}), expect, because, kind, stands_for),
        treatment=Arm(partial(job, **{flag: not off}), completed(), fix, kind, stands_for),
        world_size=ranks,
        needs=Needs(packages=packages or {}, programs=("make",) if packages else ("make", "cc")),
        deadline_s=60,
        expected_s=(8.0, 8.0) if packages else (0.5, 0.5),
    )


MADE: Any = (
    ("helper", build, "own_suffix", NO_MODULE, "python3-config of another Python: another name", OWN_SUFFIX),
    ("no-config", partial(build, suffix=""), "own_suffix", NO_MODULE, "no python3-config: no suffix", OWN_SUFFIX),
    ("ranks", build_by_ranks, "one_rank", SHORT, "rank 1 calls make while rank 0 writes", "rank 1 waits for rank 0", 2),
    ("killed", build_again, "always", SHORT, "a build was killed while it wrote", "make -B builds again"),
    ("nodes", build_on_nodes, "each_node", NO_MODULE, "rank 0 builds, node 1 has its own disk", "each node builds", 2),
)
FUSED: Any = (
    ("fusion", fuse, "gradient_accumulation_fusion", r"set to True but the custom CUDA extension fused_weight_grad"),
    ("norm", build_model, "persist_layer_norm", r"persist_layer_norm not supported by torch LayerNorm"),
    ("softmax", fuse_softmax, "masked_softmax_fusion", r"No module named 'scaled_(upper_triang_)?masked_softmax_cuda'"),
    ("rope", fuse_rope, "apply_rope_fusion", r"apply_rope_fusion is not available"),
)
probe = Probe(
    check=check,
    experiments=(pair(*MADE[0]),),
    variants=(
        *(pair(*row) for row in MADE[1:]),
        pair(
            "wheel",
            compile_installed,
            "compiles",
            symptom(r"compile_helpers ends the job with exit code 1"),
            "make runs in the folder of the wheel, which has no Makefile",
            "the helper of the wheel is imported, and nothing compiled",
            off=True,
            packages={**CORE, "megatron-core": ">=0.12,<0.17"},
        ),
        pair(
            "transformer-engine",
            build_model,
            "local",
            raised(r"name 'TE\w+' is not defined|'NoneType' object is not callable"),
            "the layers are those of Transformer Engine, which is absent",
            "the local layers",
            packages=CORE,
        ),
        *(
            pair(name, job, flag, raised(pattern), "the default of Megatron-LM", "it is off", off=True, packages=CORE)
            for name, job, flag, pattern in FUSED
        ),
    ),
)

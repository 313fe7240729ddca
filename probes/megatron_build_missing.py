"""A compiled part of Megatron is missing: the helper of its datasets, Apex, or Transformer Engine."""

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
OTHER_SUFFIX = ".cpython-39-kb.so"  # the suffix of no Python
SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))


class Helper:
    """A folder megatron/core/datasets with the source of its helper; the linker writes nothing while HOLD exists."""

    def __init__(self, ctx: Context, suffix: str = SUFFIX, node: int = 0) -> None:
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
    """Imports the helper as Megatron does, because the form of the import decides the error message."""
    from megatron.core.datasets import helpers  # type: ignore[import-not-found]

    return helpers


def core(name: str) -> Any:
    return importlib.import_module("megatron.core." + name)


def build(ctx: Context, *, own_suffix: bool, suffix: str = OTHER_SUFFIX) -> None:
    """make succeeds, but it asks the first python3-config on PATH for the suffix of the file name."""
    helper = Helper(ctx, suffix)
    ctx.reached()
    helper.make(*[f"SUFFIX={SUFFIX}"] if own_suffix else [])
    helper.use()


def build_by_ranks(ctx: Context, *, one_rank: bool) -> None:
    """Rank 1 arrives while rank 0 is still writing the file. It then calls make as well, or waits for rank 0."""
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
    """Builds again after a first build was killed while it wrote the file."""
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
    """Builds on two nodes, each with its own disk and one rank."""
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
    """Creates a tensor-parallel group of one rank, and the configuration of a model with one layer."""
    without("transformer_engine", "apex", "fused_weight_gradient_mlp_cuda")
    parallel_state, transformer = core("parallel_state"), core("transformer")
    ctx.init_process_group(20)
    parallel_state.initialize_model_parallel()
    ctx.reached()
    return transformer.TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True, **options
    )


def fuse(ctx: Context, *, gradient_accumulation_fusion: bool) -> None:
    """Runs the kind of layer that every Megatron model ends in."""
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
    """Calls `compile_helpers` on an installed wheel, as megatron.training does at the start of every job."""
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
    """Which compiled parts exist as files? Imports nothing. An absent part is no fault, as the job may not need it."""
    evidence: List[str] = []
    wrong: List[str] = []
    try:
        data = next((f / "core/datasets" for f in folders("megatron") if (f / "core/datasets").is_dir()), None)
        if data:
            examine_helper(data, evidence, wrong)
        else:
            evidence.append("megatron.core is not installed for this interpreter")
        examine_parts(bool(data), evidence, wrong)
    except (OSError, ValueError, ImportError, AttributeError, subprocess.SubprocessError) as error:
        return unknown(*evidence, *wrong, f"kb could not read every file: {error}")
    if wrong:
        return exposed(*wrong, *evidence, advice="kb show megatron-build-missing --section fix")
    return unknown(*evidence, "kb cannot tell which parts the job needs, or whether they load")


def folders(name: str) -> List[Path]:
    spec = importlib.util.find_spec(name)
    if spec is None:
        return []
    return [Path(place) for place in spec.submodule_search_locations or [str(Path(spec.origin or "").parent)]]


def examine_helper(data: Path, evidence: List[str], wrong: List[str]) -> None:
    stem = "helpers_cpp" if (data / "helpers.py").exists() else "helpers"
    built = [data / (stem + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    built = [path for path in built if path.exists()]
    other = sorted(p.name for p in data.glob(stem + "*") if p.suffix in (".so", ""))
    config, suffix = shutil.which("python3-config"), ""
    if config:
        ran = subprocess.run([config, "--extension-suffix"], stdout=subprocess.PIPE, timeout=2, check=False)
        suffix = ran.stdout.decode(errors="replace").strip()[:80]
    if built and is_cut_short(built[0]):
        wrong.append(f"{built[0]} is truncated: a build is still writing it, or was killed (then run make -B)")
    elif built:
        evidence.append(f"the helper of the datasets exists: {built[0]}")
    elif other and (suffix != SUFFIX or not (data / "Makefile").exists()):
        wrong.append(
            f"{data} has {', '.join(other)[:200]}, but this Python looks for {stem}{SUFFIX}; "
            f"python3-config says {suffix!r}"
        )
    else:
        makefile = "a Makefile" if (data / "Makefile").exists() else "no Makefile"
        access = "writable" if os.access(data, os.W_OK) else "not writable"
        evidence.append(f"{data} has no {stem} and {makefile}, and is {access}; python3-config says {suffix!r}")


def is_cut_short(path: Path) -> bool:
    """Whether an ELF file ends before its table of sections does. A linker writes that table last."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or not head.startswith(b"\x7fELF\x02\x01"):
        return len(head) < 64
    (start,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
    return bool(start + size * count > path.stat().st_size)


def examine_parts(has_megatron: bool, evidence: List[str], wrong: List[str]) -> None:
    apex = next(iter(folders("apex")), None)
    if apex and (apex / "lib/libapex.py").exists():
        wrong.append(f"{apex} is not NVIDIA's Apex but an unrelated project of that name on PyPI: pip uninstall apex")
    else:
        evidence.append(f"Apex: {apex or 'absent'}")
    engine: Optional[Path] = next(iter(folders("transformer_engine")), None)
    bases = (engine.parent, Path(sysconfig.get_paths()["purelib"])) if engine else ()
    places = [base / inner for base in bases for inner in (".", "transformer_engine", "transformer_engine/wheel_lib")]
    parts = ("torch", "extensions", "jax")  # "extensions" is the part for torch up to release 1.7
    found = {part for part in parts for place in places if any(place.glob(f"transformer_engine_{part}*.so"))}
    if engine and has_megatron and not found:
        wrong.append(f"{engine} was installed without its part for torch, transformer_engine_torch")
    else:
        evidence.append(f"Transformer Engine: {engine or 'absent'}, parts {sorted(found)}")
    for name in ("amp_C", "fused_weight_gradient_mlp_cuda", "grouped_gemm"):
        evidence.append(f"{name}: " + ("present" if importlib.util.find_spec(name) else "absent"))


STAND_IN = "the helper of megatron-core, replaced by a module of a few lines that make builds in the same way"
NO_MODULE = raised(r"No module named 'megatron\.core\.datasets\.helpers_cpp'")
SHORT = raised(r"helpers_cpp\S*\.so: file too short")
OWN_SUFFIX = "passes the suffix of the job's Python to make"
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
    """`flag` is `off` in the control arm, and `not off` in the treatment arm."""
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


OTHER_CONFIG = "make asks the python3-config of another Python, which names the file differently"
NO_CONFIG = "make finds no python3-config, so the file gets no suffix"
BUILDS: Any = (
    ("helper", build, "own_suffix", NO_MODULE, OTHER_CONFIG, OWN_SUFFIX),
    ("no-config", partial(build, suffix=""), "own_suffix", NO_MODULE, NO_CONFIG, OWN_SUFFIX),
    (
        "ranks",
        build_by_ranks,
        "one_rank",
        SHORT,
        "rank 1 calls make while rank 0 is still writing the file, and loads it",
        "rank 1 waits until rank 0 has built",
        2,
    ),
    (
        "killed",
        build_again,
        "always",
        SHORT,
        "make keeps the truncated file of a build that was killed",
        "make -B builds the file again",
    ),
    (
        "nodes",
        build_on_nodes,
        "each_node",
        NO_MODULE,
        "rank 0 alone builds, but node 1 has its own disk",
        "each node builds the helper",
        2,
    ),
)
FUSED: Any = (
    ("fusion", fuse, "gradient_accumulation_fusion", r"set to True but the custom CUDA extension fused_weight_grad"),
    ("norm", build_model, "persist_layer_norm", r"persist_layer_norm not supported by torch LayerNorm"),
    ("softmax", fuse_softmax, "masked_softmax_fusion", r"No module named 'scaled_(upper_triang_)?masked_softmax_cuda'"),
    ("rope", fuse_rope, "apply_rope_fusion", r"apply_rope_fusion is not available"),
)
FLAG_ON = "%s is on, as by default in Megatron-LM, and needs a part that is not installed"
FLAG_OFF = "%s is off"
probe = Probe(
    check=check,
    experiments=(pair(*BUILDS[0]),),
    variants=(
        *(pair(*row) for row in BUILDS[1:]),
        pair(
            "wheel",
            compile_installed,
            "compiles",
            symptom(r"compile_helpers ends the job with exit code 1"),
            "compile_helpers runs make in the folder of the wheel, which has no Makefile",
            "imports the compiled helper of the wheel, and compiles nothing",
            off=True,
            packages={**CORE, "megatron-core": ">=0.12,<0.17"},
        ),
        pair(
            "transformer-engine",
            build_model,
            "local",
            raised(r"name 'TE\w+' is not defined|'NoneType' object is not callable"),
            "the model uses the layers of Transformer Engine, which is not installed",
            "the model uses the local layers",
            packages=CORE,
        ),
        *(
            pair(name, job, flag, raised(pattern), FLAG_ON % flag, FLAG_OFF % flag, off=True, packages=CORE)
            for name, job, flag, pattern in FUSED
        ),
    ),
)

"""A compiled op of DeepSpeed is missing because its build failed, on this rank or on another."""

from __future__ import annotations

import ast
import glob
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping

from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Unavailable,
    completed,
    exposed,
    raised,
    unknown,
)

LIBRARY = "curand-kb"  # no machine has this name, but some have libcurand.so in system folders
MODULE = """
#include <Python.h>
extern "C" int curandCreateGenerator(void **, int);
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "cpu_adam"};
PyMODINIT_FUNC PyInit_cpu_adam() {
    PyObject *made = PyModule_Create(&module);
    PyModule_AddIntConstant(made, "generator", curandCreateGenerator(0, 100));
    return made;
}
"""


class Op:
    """An op that links to a library of CUDA; torch builds it in its own cache, as it builds the ops of DeepSpeed."""

    def __init__(self, ctx: Context, named: bool = True) -> None:
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            raise Unavailable("Python.h is not installed")
        self.source, self.libraries = Path(ctx.path("cpu_adam.cpp")), Path(ctx.path("cuda/lib64"))
        self.cache = Path(ctx.path("torch_extensions"))
        os.environ.update(TORCH_EXTENSIONS_DIR=str(self.cache), CC="cc", CXX="c++")
        os.environ.pop("LIBRARY_PATH", None)
        if ctx.rank == 0:
            self.source.write_text(MODULE)
            self.libraries.mkdir(parents=True)
            code = Path(ctx.path("curand.cpp"))
            code.write_text('extern "C" int curandCreateGenerator(void **, int kind) { return kind; }')
            soname = str(self.libraries / f"lib{LIBRARY}.so.10")
            options = ["-shared", "-fPIC", f"-Wl,-soname,{soname}"]  # the full path, so that the loader finds it
            subprocess.run(["c++", *options, str(code), "-o", soname], check=True)
            if named:  # the linker looks for this name; wheels of nvidia-curand have only the other one
                (self.libraries / f"lib{LIBRARY}.so").symlink_to(soname)

    def load(self) -> None:
        """Builds and loads the op. Raises RuntimeError or ImportError if that fails."""
        from torch.utils import cpp_extension

        module: Any = cpp_extension.load("cpu_adam", [str(self.source)], extra_ldflags=[f"-l{LIBRARY}"])
        assert module.generator == 100


def build(ctx: Context, *, library_path: bool, named: bool = True, variable: str = "", before: str = "") -> None:
    """Builds the op; the linker finds its library only with `library_path`.

    `named` gives the library its link name, `variable` gets the folder of the library, and `before` ("called" or
    "deleted") lets a first build fail.
    """
    import torch.utils.cpp_extension as cpp_extension

    op = Op(ctx, named)
    if variable:
        os.environ[variable] = f"-L{op.libraries}" if variable == "LDFLAGS" else str(op.libraries)
    if library_path and before != "deleted":
        os.environ["LIBRARY_PATH"] = str(op.libraries)
    ctx.meet("ready")
    ctx.reached()
    while ctx.rank == 1 and not (op.cache / "cpu_adam" / "lock").exists():
        time.sleep(0.001)  # rank 1 starts while rank 0 builds
    if before:
        try:
            op.load()
        except RuntimeError as error:
            ctx.note(first=str(error)[:40])
    if before == "deleted":
        shutil.rmtree(op.cache / "cpu_adam")
        cpp_extension.JIT_EXTENSION_VERSIONER.entries.clear()  # as in a new process
        if library_path:
            os.environ["LIBRARY_PATH"] = str(op.libraries)
    op.load()


def find_ninja(ctx: Context, *, on_path: bool) -> None:
    """Builds the op; without `on_path`, ninja is only in the bin of an environment that is not activated."""
    op = Op(ctx)
    os.environ["LIBRARY_PATH"] = str(op.libraries)
    if not on_path:
        os.environ["PATH"] = ctx.path("bin")
    ctx.reached()
    op.load()


def offload(ctx: Context, *, own_optimizer: bool) -> None:
    """Steps with ZeRO-2 and an offloaded optimizer on a machine that cannot build cpu_adam."""
    from kb.cpu_arms import import_deepspeed

    deepspeed = import_deepspeed()
    import torch

    prepare_offload(ctx)
    model = torch.nn.Linear(4, 4)
    if own_optimizer:
        config: dict[str, Any] = {**OFFLOAD, "zero_force_ds_cpu_optimizer": False}
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    else:
        config, optimizer = {**OFFLOAD, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, None
    ctx.reached()
    step_once(torch, model, lambda: deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0])


def replace_optimizer(ctx: Context, *, replaced: bool) -> None:
    """Steps under accelerate, which replaces the script's AdamW by DeepSpeedCPUAdam if `replaced`."""
    from kb.cpu_arms import import_deepspeed

    import_deepspeed()
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs  # type: ignore[import-not-found]

    prepare_offload(ctx)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    config = {**OFFLOAD, "zero_force_ds_cpu_optimizer": replaced}
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")]
    )
    model = torch.nn.Linear(4, 4)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)
    ctx.reached()
    engine = step_once(torch, model, lambda: accelerator.prepare(model, optimizer)[0])
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.3, 0.0]


OFFLOAD: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}


def prepare_offload(ctx: Context) -> None:
    """Removes all programs from PATH and starts a process group of one rank."""
    os.environ.update(TORCH_EXTENSIONS_DIR=ctx.path("torch_extensions"), PATH=ctx.path("no-programs"))
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    ctx.init_process_group(timeout_s=20)


def step_once(torch: Any, model: Any, initialize: Callable[[], Any]) -> Any:
    """Makes one step with the engine from `initialize`, checks that AdamW of torch made it, and returns the engine."""
    before = model.weight.detach().clone()
    engine = initialize()
    engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    engine.step()
    assert type(engine.optimizer.optimizer) is torch.optim.AdamW
    assert (model.weight.float() - before).abs().min().item() > 0.05  # the first step of Adam has the size of lr
    return engine


def check(params: Mapping[str, Any]) -> Finding:
    """Does the installation lack an op that it records as built, or has a build of the op failed?"""
    op = params["op"]
    try:
        spec = importlib.util.find_spec("deepspeed")
    except (ImportError, ValueError) as error:
        return unknown(f"kb cannot look up DeepSpeed: {error}")
    if spec is None or not spec.origin:
        return unknown("DeepSpeed is not installed in this interpreter")
    package = Path(spec.origin).parent
    record = read_record(package)
    evidence = [f"DeepSpeed {record.get('version', 'of an unknown release')}"]
    installed = record.get("installed_ops")
    if isinstance(installed, dict) and installed.get(op):
        if not list(package.glob(f"ops/**/{op}_op*.so")):
            why = f"the installation records that it built {op}, but {package}/ops has no {op}_op*.so"
            return exposed(*evidence, why, advice="install DeepSpeed again, with the same DS_BUILD_ variables")
        return unknown(*evidence, f"{op} was built with the installation, but only the job shows whether it loads")
    return check_builds(op, evidence)


def read_record(package: Path) -> Dict[str, Any]:
    """Reads what DeepSpeed recorded at its installation; empty if kb cannot read it."""
    record = {}
    try:
        for line in (package / "git_version_info_installed.py").read_text().splitlines():
            key, _, value = line.partition("=")
            record[key] = ast.literal_eval(value)
    except (OSError, ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return {}
    return record


def check_builds(op: str, evidence: List[str]) -> Finding:
    """The finding for an op that torch builds when it is first used: did a build fail, and are its programs on PATH?"""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(
        cache, "torch_extensions", "py%d%d*" % sys.version_info[:2]
    )
    for folder in map(Path, sorted(glob.glob(os.path.join(root, op)))):
        try:
            files = os.listdir(folder)
        except OSError as error:
            return unknown(*evidence, f"kb cannot read {folder}: {error.strerror}")
        modules = [name for name in files if name.startswith(op) and name.endswith(".so")]
        if "build.ninja" in files and not modules:
            why = f"{folder} has a build.ninja but no {op}.so"
            advice = f"to see the error, run cd {folder} && ninja -v in the job's environment"
            if "lock" not in files:
                return exposed(*evidence, why + ": a build failed there", advice=advice)
            evidence.append(why + ", and a lock (torch 2.14 and newer keep it): a build runs, was killed or failed")
    compiler = (os.environ.get("CXX", "").split() or ["c++"])[0]
    missing = [program for program in ("ninja", compiler) if not shutil.which(program)]
    if missing:
        why = f"torch builds {op} when it is first used, but PATH of this shell has no {' and no '.join(missing)}"
        return exposed(*evidence, why, advice="run export PATH=/path/of/the/environment/bin:$PATH in the job")
    return unknown(
        *evidence, f"torch builds {op} when it is first used", advice="build it on a node of the job, as the entry says"
    )


STAND_IN = "cpu_adam and libcurand; torch builds a module and a library of a few lines in the same way"
FAILED = raised(r"Error building extension 'cpu_adam'[\s\S]*(cannot find|unable to find library) -lcurand")
NO_FILE = r"cpu_adam\.so: cannot open shared object file"
NO_OP = raised(r"DeepSpeedCPUAdam requires the cpu_adam op|Unable to JIT load the cpu_adam op|Ninja is required")
UNKNOWN_FOLDER = "the linker does not search the folder of the library"


def pair(
    title: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    expect: Expect,
    because: str,
    fix: str,
    until: str = "",
    ranks: int = 1,
) -> Experiment:
    return Experiment(
        name=title,
        control=Arm(fails, expect, because, "stand-in", STAND_IN),
        treatment=Arm(works, completed(), fix, "stand-in", STAND_IN),
        world_size=ranks,
        needs=Needs(packages={"torch": ">=2.2" + until, "setuptools": ""}, programs=("cc", "c++", "ninja")),
        deadline_s=60,
        expected_s=(1.0, 1.0),
    )


def linker(title: str, expect: Expect = FAILED, because: str = UNKNOWN_FOLDER, **options: Any) -> Experiment:
    """Returns an experiment whose treatment arm sets LIBRARY_PATH."""
    shape = {key: options.pop(key) for key in ("until", "ranks") if key in options}
    fails, works = (partial(build, library_path=known, **options) for known in (False, True))
    return pair(title, fails, works, expect, because, "LIBRARY_PATH names the folder", **shape)


def in_deepspeed(
    title: str, fails: Callable[[Context], None], works: Callable[[Context], None], **packages: str
) -> Experiment:
    return Experiment(
        name=title,
        control=Arm(fails, NO_OP, "no program is on PATH, so torch cannot build cpu_adam", "cpu"),
        treatment=Arm(works, completed(), "the job uses AdamW of torch, which needs no op", "cpu"),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.2", "deepspeed": ">=0.16", **packages}),
        deadline_s=60,
        expected_s=(6.0, 6.0),
    )


probe = Probe(
    check=check,
    params={"op": Param("str", "the op that the job lacks, for the check", "cpu_adam")},
    experiments=(linker("linker"),),
    variants=(
        linker(
            "ld-library-path",
            because="the folder is in LD_LIBRARY_PATH, which the linker does not read",
            variable="LD_LIBRARY_PATH",
        ),
        linker("ldflags", because="the folder is in LDFLAGS, which torch does not use", variable="LDFLAGS"),
        pair(
            "link-name",
            partial(build, library_path=True, named=False),
            partial(build, library_path=True, named=True),
            FAILED,
            "the folder has the library only under its runtime name",
            "a link has the name that the linker looks for",
        ),
        linker(
            "cache-deleted",
            because="the folder of the failed build is deleted, and nothing else is changed",
            before="deleted",
        ),
        linker(
            "second-call",
            raised(NO_FILE),
            "the first call failed, and the second does not build again",
            before="called",
        ),
        linker(
            "ranks",
            raised(NO_FILE, after="Error building extension 'cpu_adam'"),
            "the build of rank 0 fails, and rank 1, which waited for it, loads a missing file",
            until=",<2.14",
            ranks=2,
        ),
        pair(
            "ninja",
            partial(find_ninja, on_path=False),
            partial(find_ninja, on_path=True),
            raised(r"Ninja is required to load C\+\+ extensions"),
            "ninja is installed in a bin folder that is not on PATH",
            "that folder is on PATH",
        ),
        in_deepspeed("deepspeed", partial(offload, own_optimizer=False), partial(offload, own_optimizer=True)),
        in_deepspeed(
            "accelerate",
            partial(replace_optimizer, replaced=True),
            partial(replace_optimizer, replaced=False),
            accelerate=">=1.0",
        ),
    ),
)

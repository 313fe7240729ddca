"""NumPy 2 is installed next to a torch, or another package, that was compiled or written for NumPy 1."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Tuple

from kb.cpu_arms import pip_in
from kb.packages import numbers, release, version
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
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

NUMPY_1 = "numpy.core._multiarray_umath"  # import_array() of NumPy 1's headers opens this module
NUMPY_2 = "numpy._core._multiarray_umath"
# NumPy 2 refuses its function table to code that was compiled for NumPy 1; deleting the table refuses it to all code.
REFUSE = (
    "import importlib, numpy\n"
    "core = '_core' if int(numpy.__version__.split('.')[0]) > 1 else 'core'\n"
    "del importlib.import_module('numpy.%s._multiarray_umath' % core)._ARRAY_API\n"
)
HIDE = "import sys\nsys.modules['numpy'] = None\n"
FORGET = (
    "import sys, numpy, torch\n"
    "numpy.__path__ = []\n"
    "for name in [name for name in sys.modules if name.startswith('numpy._core')]: del sys.modules[name]\n"
)
READ = "import torch\nassert torch.ones(2).numpy().sum() == 2\n"
BATCH = "import numpy, torch\nassert torch.as_tensor([numpy.float32(1)]).sum() == 1\n"
DEADLINE_S = 0.8
SKIPPED = ("numpy", "torch", "nvidia", "triton")
WRITTEN = {"deepspeed": (0, 14, 4), "megatron-core": (0, 16), "wandb": (0, 17, 2)}  # the first releases for NumPy 2
OLD = re.compile(rb"numpy\.core\.(?:_multiarray_umath|multiarray)\b")


def run_script(code: str, *, path: str = "") -> None:
    """Runs a script in a new interpreter, and raises the last line of its stderr as `Symptom` if it fails."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if path:
        variables["PYTHONPATH"] = path
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
    if ran.returncode:
        raise Symptom(ran.stderr.strip().splitlines()[-1])


def refuse_old_torch() -> None:
    """Raises `Unavailable` if the installed torch cannot use the installed NumPy; `pinned` covers that case."""
    if numbers(version("torch")) < (2, 3) and numbers(version("numpy")) >= (2,):
        raise Unavailable("this torch was compiled for NumPy 1, but NumPy is %s" % version("numpy"))


def convert(ctx: Context, *, before: str, code: str) -> None:
    """Converts a tensor to an array, or back, after `before` has changed what NumPy gives torch."""
    refuse_old_torch()
    ctx.reached()
    run_script(before + code)


def downgrade(ctx: Context, *, pinned: bool) -> None:
    """Runs this environment's torch with its NumPy, or with NumPy 1, which pip installs in a separate folder."""
    if pinned:
        once = ["--no-cache-dir", "--retries", "0", "--timeout", "10"]  # leaves no wheel, fails soon without a network
        command = [*pip_in(sys.executable), "install", "--quiet", *once, "--target", ctx.path("site"), "numpy<2"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if ran.returncode:
            raise Unavailable("pip cannot install numpy<2: %s" % ran.stderr.strip()[-200:])
    ctx.reached()
    run_script(READ, path=ctx.path("site") if pinned else "")


def import_array(ctx: Context, *, headers: str) -> None:
    """Makes the calls that these headers compile into an extension: imports a module and calls its function table."""
    import ctypes

    importlib.import_module("numpy")
    ctx.reached()
    table = importlib.import_module(headers)._ARRAY_API
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    functions = ctypes.cast(pointer(table, None), ctypes.POINTER(ctypes.c_void_p))
    abi = ctypes.CFUNCTYPE(ctypes.c_uint)(functions[0])()
    assert abi == 0x2000000, hex(abi)


def read_scalar(ctx: Context, *, attribute: str) -> None:
    """Code that was written for NumPy 1 uses the old name of a type."""
    numpy = importlib.import_module("numpy")
    ctx.reached()
    assert getattr(numpy, attribute)(0.5) == 0.5


def load_elsewhere(ctx: Context, *, as_tensor: bool) -> None:
    """Reads a checkpoint that holds an array, or (`as_tensor`) a tensor, with a NumPy that has no numpy._core."""
    import torch

    refuse_old_torch()
    numpy = importlib.import_module("numpy")
    state, path = numpy.arange(4), ctx.path("state.pt")
    if as_tensor:
        torch.save({"state": torch.from_numpy(state)}, path)
    else:
        torch.save({"state": state}, path)
    ctx.reached()
    run_script(FORGET + "assert torch.load(%r, weights_only=False)['state'].sum() == 6\n" % path)


# --- the check -----------------------------------------------------------------------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """Does a package in this environment need NumPy 1 while NumPy 2 is installed?"""
    installed = version("numpy")
    spec = find_spec("numpy")
    if not installed or spec is None or not spec.origin:
        if not version("torch"):
            return unknown("neither torch nor NumPy is installed in this interpreter")
        return exposed("NumPy is not installed in this interpreter, so torch cannot make an array", advice="see Fix 2")
    folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text(errors="replace")
    except OSError as error:
        return unknown("kb cannot read %s: %s" % (folder, error.strerror))
    found = re.search(r"^(?:short_)?version *= *['\"]([^'\"]+)", text, re.MULTILINE)
    if found and numbers(found.group(1)) != numbers(installed):
        message = "%s is NumPy %s, but its metadata says %s"
        return exposed(message % (folder, found.group(1), installed), advice="see Fix 7")
    if numbers(installed)[:1] < (2,):
        message = "NumPy %s runs code compiled for NumPy 1; kb cannot tell whether a package needs NumPy 2"
        return unknown(message % installed)
    written = ["%s %s" % (name, version(name)) for name, since in WRITTEN.items() if () < release(name) < since]
    if written:
        message = "NumPy %s is installed, but these packages were written for NumPy 1: %s"
        return exposed(message % (installed, ", ".join(written)), advice="see Fix 3")
    sites = [folder.parent, *(Path(name) for name in sys.path if name.endswith(("site-packages", "dist-packages")))]
    sites = [site for site in dict.fromkeys(sites) if site.is_dir()]  # torch may be the system's, and NumPy the user's
    old, whole = old_modules(sites)
    if old:
        message = "NumPy %s is installed, but these modules were compiled for NumPy 1: %s"
        return exposed(message % (installed, ", ".join(old)), advice="see Fix 1")
    names = ", ".join(map(str, sites))
    if not whole:
        return unknown("kb could not read all compiled modules in %s in time" % names)
    return clear("NumPy %s is installed, and no compiled module in %s needs NumPy 1" % (installed, names))


def old_modules(sites: List[Path]) -> Tuple[List[str], bool]:
    """Returns one module of each package that was compiled for NumPy 1, and whether kb read all modules in time."""
    end = time.monotonic() + DEADLINE_S
    old: Dict[str, str] = {}
    try:
        for site in sites:
            for path in compiled_modules(site, end):
                package = path.relative_to(site).parts[0]
                code = b"" if package in old else path.read_bytes()
                if b"numpy._core" not in code and OLD.search(code):
                    old[package] = str(path.relative_to(site))
    except OSError:
        return list(old.values()), False
    return list(old.values()), True


def compiled_modules(site: Path, end: float) -> Iterator[Path]:
    """Yields torch's modules first, then those of other packages. Raises `OSError` after `end`."""
    torch = site / "torch" / "lib" / "libtorch_python.so"
    if torch.exists():
        yield torch
    for name, folders, files in os.walk(site, onerror=reraise):
        depth = len(Path(name).relative_to(site).parts)
        folders[:] = sorted(each for each in folders if depth < 4 and each not in (SKIPPED if depth == 0 else ()))
        for file in sorted(files):
            if time.monotonic() > end:
                raise TimeoutError(name)
            if file.endswith(".so"):
                yield Path(name, file)


def reraise(error: OSError) -> None:
    raise error


# --- the experiments -----------------------------------------------------------------------------------------------

OLD_TORCH = "a torch compiled for NumPy 1; the function table is removed from the installed NumPy"
EXTENSION = "import_array() in an extension; Python makes the same calls"
OLD_NUMPY = "NumPy before 1.26.1; the package numpy._core is hidden"
NOT_AVAILABLE = "RuntimeError: Numpy is not available"
NO_DTYPE = r"RuntimeError: Could not infer dtype of numpy\.float32"
REMOVED = r"`np\.float_` was removed in the NumPy 2\.0 release"
NO_CORE = r"ModuleNotFoundError: No module named 'numpy\._core"
COMPILED = r"A module that was compiled using NumPy 1\.x cannot be run in"
TORCH = {"torch": ">=2.1", "numpy": ">=1.24"}
ABOVE_1 = {"numpy": ">=2"}


def pair(
    name: str,
    job: Callable[..., None],
    texts: Tuple[Expect, str, str],
    packages: Mapping[str, str] = TORCH,
    stands_for: str = "",
    **keyword: Any,
) -> Experiment:
    """`texts`: how the control arm ends, and why each arm does; `keyword`: the argument that differs, with values."""
    (word, (fails, works)), *_ = keyword.items()
    expect, because, fix = texts
    grade: Dict[str, Any] = {"fidelity": "stand-in" if stands_for else "cpu", "stands_for": stands_for}
    return Experiment(
        name,
        control=Arm(partial(job, **{word: fails}), expect, because=because, **grade),
        treatment=Arm(partial(job, **{word: works}), completed(), because=fix, **grade),
        world_size=1,
        needs=Needs(packages=packages),
        deadline_s=60,
        expected_s=(2.0, 2.0),
    )


REFUSED = "NumPy refuses torch its function table"
SERVED = "NumPy gives torch its function table, as NumPy 1 does to torch below 2.3 and NumPy 2 to newer ones"
WITHOUT = (symptom(NOT_AVAILABLE), "torch cannot import NumPy", "torch can import NumPy")
read, load = partial(convert, code=READ), partial(convert, code=BATCH)

probe = Probe(
    check=check,
    experiments=(
        pair(
            "pinned",
            downgrade,
            (symptom(NOT_AVAILABLE), "torch below 2.3 runs with NumPy 2", "the same torch runs with numpy<2"),
            {"torch": "<2.3", "numpy": ">=2"},
            pinned=(False, True),
        ),
        pair("torch", read, (symptom(NOT_AVAILABLE), REFUSED, SERVED), TORCH, OLD_TORCH, before=(REFUSE, "")),
    ),
    variants=(
        pair("scalar", load, (symptom(NO_DTYPE), REFUSED, SERVED), TORCH, OLD_TORCH, before=(REFUSE, "")),
        pair("absent", read, WITHOUT, before=(HIDE, "")),
        pair(
            "extension",
            import_array,
            (raised(COMPILED), "the extension was compiled with NumPy 1", "the extension was compiled with NumPy 2"),
            ABOVE_1,
            EXTENSION,
            headers=(NUMPY_1, NUMPY_2),
        ),
        pair(
            "removed-name",
            read_scalar,
            (
                raised(REMOVED),
                "the code uses np.float_, which NumPy 2 removed",
                "the code uses np.float64, which both releases have",
            ),
            ABOVE_1,
            attribute=("float_", "float64"),
        ),
        pair(
            "checkpoint",
            load_elsewhere,
            (symptom(NO_CORE), "NumPy 1 reads an array that NumPy 2 saved", "the checkpoint holds a tensor instead"),
            {"torch": ">=2.1", "numpy": ">=2"},
            OLD_NUMPY,
            as_tensor=(False, True),
        ),
    ),
)

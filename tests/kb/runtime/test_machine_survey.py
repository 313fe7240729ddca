"""kb.runtime.machine_survey, started as the reader's interpreter starts it: by path, among broken packages."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.console import CHECKOUT

RUNTIME = CHECKOUT / "kb" / "runtime"

WORKING = {
    "__init__.py": "import torch.version, torch.cuda, torch._C, torch.backends",
    "version.py": "from typing import Optional\n__version__ = '2.6.0+cu124'\ncuda: Optional[str] = '12.4'\n"
    "git_version = 'abc'\nhip: Optional[str] = None\n",
    "cuda/__init__.py": "import torch.cuda.nccl\ndef is_initialized(): return False\n"
    "def is_available(): raise SystemExit('a driver call')\ndevice_count = get_arch_list = is_available\n",
    "cuda/nccl.py": "def version(): return (2, 21, 5)\n",
    "_C.py": "class _cudnn: getVersionInt = staticmethod(lambda: 90100)\n"
    "def _cuda_getArchFlags(): return 'sm_80 sm_90'\n",
    "backends.py": "from torch.cuda import is_available as version\n",
    "distributed.py": "class ProcessGroupGloo: pass\ndef is_nccl_available(): return True\n",
}
BROKEN = {
    "__init__.py": "raise ImportError('libcudart.so.12: cannot open shared object file')",
    "version.py": "\x00 garbage = = '1'\ncuda = open('/tmp')\n",
}


def install(folder: Path, package: str, files: Mapping[str, str]) -> str:
    """Write a package; gives what PYTHONPATH must be."""
    for name, text in files.items():
        path = folder / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def ask(*arguments: str, pythonpath: str = "", runtime: Path = RUNTIME, flags: tuple[str, ...] = ()) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": pythonpath}
    argv = [sys.executable, "-W", "error", *flags, str(runtime / "start.py"), "machine_survey", *arguments]
    ran = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=True)
    document = json.loads(ran.stdout)
    assert isinstance(document, dict)
    return document


def test_describes_its_interpreter() -> None:
    document = ask()
    assert document["version"] == sys.version.split()[0]
    assert (document["executable"], document["prefix"]) == (sys.executable, sys.prefix)
    assert document["packages"]["packaging"] == importlib.metadata.version("packaging")
    assert document["torch_import"] is None
    assert "--import-torch" in document["reasons"]["torch_import"]


def test_reads_how_torch_was_built_without_importing_it(tmp_path: Path) -> None:
    files = {**WORKING, "__init__.py": "raise SystemExit('imported')"}
    document = ask(pythonpath=install(tmp_path, "torch", files))
    assert document["torch"] == {
        "location": str(tmp_path / "torch"),
        "version": "2.6.0+cu124",
        "cuda": "12.4",
        "hip": None,
        "git_version": "abc",
    }
    assert document["reasons"]["torch.hip"] == "this build of torch has none"


def test_a_checkout_of_torch_without_metadata_counts_as_installed(tmp_path: Path) -> None:
    document = ask(pythonpath=install(tmp_path, "torch", WORKING), flags=("-S",))
    assert document["packages"] == {"torch": "2.6.0+cu124"}


def test_no_torch_is_null_with_a_reason() -> None:
    document = ask(flags=("-S",))
    assert document["torch"] is None
    assert document["reasons"]["torch"] == "torch is not installed"


def test_a_broken_torch_costs_its_own_values_only(tmp_path: Path) -> None:
    document = ask("--import-torch", pythonpath=install(tmp_path, "torch", BROKEN))
    assert document["torch"]["location"] == str(tmp_path / "torch")
    assert {document["torch"][name] for name in ("version", "cuda", "hip", "git_version")} == {None}
    assert document["reasons"]["torch.version"] == "torch/version.py does not say"
    assert document["torch_import"]["ok"] is False
    assert document["torch_import"]["error"] == "ImportError: libcudart.so.12: cannot open shared object file"
    assert document["packages"]["packaging"]


@pytest.mark.parametrize(
    "text", ["raise SystemExit(3)", "import sys; sys.exit()", "import warnings; warnings.warn('x')"]
)
def test_an_import_may_raise_anything(tmp_path: Path, text: str) -> None:
    document = ask("--import-torch", pythonpath=install(tmp_path, "torch", {"__init__.py": text}))
    assert document["torch_import"]["ok"] is False
    assert document["torch_import"]["error"]


def test_an_import_may_print_and_leave_exit_handlers(tmp_path: Path) -> None:
    text = "import atexit, os; print('hello'); os.write(1, b'hello'); atexit.register(os.abort)\n"
    files = {**WORKING, "__init__.py": text + WORKING["__init__.py"]}
    document = ask("--import-torch", pythonpath=install(tmp_path, "torch", files))
    assert document["torch_import"]["ok"] is True


def test_asks_the_loaded_libraries_without_a_driver_call(tmp_path: Path) -> None:
    document = ask("--import-torch", pythonpath=install(tmp_path, "torch", WORKING))
    output = document["torch_import"]
    assert output.pop("duration_s") >= 0
    assert output == {
        "ok": True,
        "error": None,
        "nccl": "2.21.5",
        "cudnn": 90100,
        "architectures": ["sm_80", "sm_90"],
        "nccl_available": True,
        "gloo_available": True,
        "cuda_initialized": False,
    }


def test_a_function_that_fails_costs_its_own_value_only(tmp_path: Path) -> None:
    files = {**WORKING, "cuda/nccl.py": "def version(): raise RuntimeError('no libnccl')\n"}
    document = ask("--import-torch", pythonpath=install(tmp_path, "torch", files))
    assert document["torch_import"]["nccl"] is None
    assert document["reasons"]["torch_import.nccl"] == "RuntimeError: no libnccl"
    assert document["torch_import"]["cudnn"] == 90100


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_imports_the_real_torch() -> None:
    document = ask("--import-torch", flags=("-W", "default"))  # torch itself warns when numpy is not installed
    assert document["torch_import"]["ok"] is True
    assert document["torch_import"]["cuda_initialized"] is False
    assert document["torch"]["version"] == document["packages"]["torch"]


def test_broken_metadata_is_null_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "deepspeed-0.15.0.dist-info").mkdir()
    (tmp_path / "deepspeed-0.15.0.dist-info" / "METADATA").write_text("Name: deepspeed\n")
    (tmp_path / "peft-0.13.0.dist-info").mkdir()
    document = ask(pythonpath=str(tmp_path))
    assert document["packages"]["deepspeed"] is None
    assert "metadata is broken" in document["reasons"]["packages.deepspeed"]
    assert document["packages"]["packaging"]


def test_imports_nothing_from_its_own_folder(tmp_path: Path) -> None:
    runtime = Path(shutil.copytree(RUNTIME, tmp_path / "kb" / "runtime"))
    for name in ("json", "re", "signal", "faulthandler", "importlib"):
        (runtime / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    assert ask(runtime=runtime)["version"]


def test_brings_its_kb_along_whatever_else_is_called_so(tmp_path: Path) -> None:
    other = install(tmp_path, "kb", {"__init__.py": "raise SystemExit('the wrong kb')"})
    assert ask(pythonpath=other, flags=("-S",))["packages"] == {}

"""What the import contracts of pyproject.toml cannot state: Python 3.9, standard library, and what a search loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from kb.lint.probes import PROBE_API
from tests.support.console import CHECKOUT, KB

CORE = CHECKOUT / "kb"
SHELLS = ("api", "cli")
HEAVY = ("torch", "fastapi", "sqlmodel", "sqlalchemy", "yaml", "markdown_it", "pydantic", "rich")
IN_THE_READERS_INTERPRETER = sorted(
    [*(CORE / "runtime").glob("*.py")]
    + [CORE / f"{module.removeprefix('kb.')}.py" for module in ("kb.context", *PROBE_API)]
)


def imports(path: Path) -> set[str]:
    """Full names of what a file imports at any depth; a relative import as `.name`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names.add(base)
            names.update(f"{base}.{alias.name}".replace("..", ".") for alias in node.names)
    return names


@pytest.mark.parametrize("folder", ["kb", *SHELLS, "probes"])
def test_nothing_imports_a_shell(folder: str) -> None:
    for path in (CHECKOUT / folder).rglob("*.py"):
        crossing = [name for name in imports(path) if name.split(".")[:2] in (["kb", "api"], ["kb", "cli"])]
        assert not crossing, f"{path}: {crossing}"


@pytest.mark.parametrize("path", IN_THE_READERS_INTERPRETER, ids=lambda path: path.stem)
def test_what_runs_in_the_readers_interpreter_stands_on_the_standard_library(path: Path) -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "kb", "__future__", "yaml"}  # the two are looked for, not needed
    assert {name.split(".")[0] for name in imports(path)} <= allowed
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))


@pytest.mark.parametrize("path", sorted((CHECKOUT / "probes").glob("*.py")), ids=lambda path: path.stem)
def test_probes_are_written_for_python_3_9(path: Path) -> None:
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))


def test_a_search_loads_nothing_heavy(tmp_path: Path) -> None:
    subprocess.run([KB, "index"], check=True, capture_output=True, cwd=tmp_path)
    code = (
        "import sys; from kb.cli.main import run; code = run(['search', 'ALLGATHER timeout save', '--json']); "
        f"loaded = [name for name in {HEAVY!r} if name in sys.modules]; sys.exit(f'loaded {{loaded}}' if loaded else code)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_the_picture_shows_the_imports_as_they_are() -> None:
    spec = spec_from_file_location("architecture", CHECKOUT / "docs" / "site" / "architecture.py")
    assert spec is not None
    assert spec.loader is not None
    architecture = module_from_spec(spec)
    spec.loader.exec_module(architecture)
    assert architecture.PICTURE.read_text() == architecture.draw(), "draw it: python docs/site/architecture.py"


def test_every_package_and_module_that_the_architecture_names_is_there() -> None:
    text = (CHECKOUT / "docs" / "architecture.md").read_text()
    packages = {path.stem for path in CORE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    rows = {name for row in re.findall(r"^\| (`.+?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert rows == packages - {"__init__"} | {"api", "cli"}
    modules = {
        name for name in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", text) if name.split(".")[0] in {*packages, "api"}
    }
    files = {name.replace(".", "/") + ".py" for name in modules if not name.endswith((".py", ".md"))}
    files |= set(re.findall(r"`((?:\w+/)*\w*(?:\.py|\.toml|/))`", text))
    folders = [CHECKOUT, CORE, *CORE.iterdir(), CHECKOUT / "api", CHECKOUT / "cli"]
    missing = [name for name in files if not any((folder / name).exists() for folder in folders)]
    assert not [name for name in missing if not (CORE / name.removesuffix(".py")).is_dir()]

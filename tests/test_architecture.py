"""The shape of the code: who may import whom, and what a search never loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support import CHECKOUT, KB

CORE = CHECKOUT / "kb"
SHELLS = ("api", "cli")
HEAVY = ("torch", "fastapi", "sqlmodel", "sqlalchemy", "yaml", "markdown_it", "pydantic", "rich")
STANDARD_ONLY = (
    "probe",
    "context",
    "declaration",
    "checkpoint",
    "torchsave",
    "training_config",
    "namespaces",
    "worker",
    "guard",
    "forkserver",
    "processes",
    "machine/survey",
    "machine/reading",
)


def name_of(path: Path) -> str:
    """kb/lint/rule.py is kb.lint.rule, kb/lint/__init__.py is kb.lint."""
    return ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Full names of what a file imports at any depth; a relative import as `.name`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found.add(base)
            found.update(f"{base}.{alias.name}".replace("..", ".") for alias in node.names)
    return found


def core_graph() -> dict[str, set[str]]:
    """Module of the core to the core modules that it imports; a package is but a docstring."""
    paths = {name_of(path): path for path in CORE.rglob("*.py")}
    return {
        module: {parent for name in imports(path) for parent in (name, name.rpartition(".")[0]) if parent in paths}
        - {module, "kb", "kb.lint", "kb.machine"}
        for module, path in paths.items()
    }


def test_imports_of_the_core_form_a_dag() -> None:
    graph = core_graph()
    done: set[str] = set()
    while left := set(graph) - done:
        free = {module for module in left if graph[module] <= done}
        assert free, f"these import each other in a circle: {sorted(left)}"
        done |= free


@pytest.mark.parametrize("folder", ["kb", *SHELLS, "probes"])
def test_nothing_imports_a_shell(folder: str) -> None:
    for path in (CHECKOUT / folder).rglob("*.py"):
        crossing = [name for name in imports(path) if name.split(".")[:2] in (["kb", "api"], ["kb", "cli"])]
        assert not crossing, f"{path}: {crossing}"


def test_the_search_lane_and_the_verify_lane_do_not_meet() -> None:
    graph = core_graph()

    def reach(module: str) -> set[str]:
        found = {module}
        while more := set().union(*(graph[one] for one in found)) - found:
            found |= more
        return found

    assert not reach("kb.search") & {"kb.launcher", "kb.verify", "kb.plan", "kb.store"}
    assert not reach("kb.verify") & {"kb.index", "kb.search", "kb.query", "kb.store"}


@pytest.mark.parametrize("module", STANDARD_ONLY)
def test_what_runs_in_the_readers_interpreter_stands_on_the_standard_library(module: str) -> None:
    allowed = set(sys.stdlib_module_names) | {"torch", "kb", "__future__", "yaml"}  # the two are looked for, not needed
    path = CORE / f"{module}.py"
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


def test_no_file_of_the_core_imports_torch_in_the_parent() -> None:
    for path in CORE.rglob("*.py"):
        if str(path.relative_to(CORE).with_suffix("")) not in STANDARD_ONLY:
            assert not any(name.split(".")[0] == "torch" for name in imports(path)), path

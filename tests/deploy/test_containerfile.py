"""deploy/Containerfile: no image is built here; what it copies, installs and runs is checked by itself."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.console import CHECKOUT
from tests.support.replicas import Place, started

FILE = CHECKOUT / "deploy" / "Containerfile"
IGNORED = CHECKOUT / "deploy" / "Containerfile.dockerignore"
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
Instruction = tuple[str, str]


def stages() -> list[list[Instruction]]:
    """(name, arguments) of every instruction, by the stage that it is in; what stands before the first is left out."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE))
    result: list[list[Instruction]] = []
    for line in filter(None, text.splitlines()):
        name, _, arguments = line.partition(" ")
        if name == "FROM":
            result.append([])
        if result:
            result[-1].append((name, arguments.strip()))
    return result


BUILD, SERVED = stages()


def arguments(stage: list[Instruction], name: str) -> list[str]:
    return [text for item, text in stage if item == name]


def test_it_copies_every_folder_that_the_package_is_made_of_and_none_is_ignored() -> None:
    copied = [source for text in arguments(BUILD, "COPY") for source in text.split()[:-1]]
    folders = PROJECT["tool"]["setuptools"]["package-dir"].values()
    assert not set(folders) - set(copied)
    allowed = [line[1:] for line in IGNORED.read_text().splitlines() if line.startswith("!")]
    assert sorted(copied) == sorted(allowed)
    assert all((CHECKOUT / source).exists() for source in copied)


def test_its_python_is_one_that_kb_is_for() -> None:
    (version,) = re.findall(r"^ARG PYTHON=(\S+)$", FILE.read_text(), re.MULTILINE)
    assert f"Programming Language :: Python :: {version}" in PROJECT["project"]["classifiers"]


def test_neither_torch_nor_a_tool_of_developers_is_installed() -> None:
    (install,) = arguments(BUILD, "RUN")
    assert install.endswith("-c constraints.txt '.[server]'")
    names = closure("gpu-kb", "server")
    assert {"fastapi", "uvicorn", "psycopg", "alembic"} <= names
    assert not {"torch", "numpy", "pytest"} & names


def closure(name: str, extra: str = "") -> set[str]:
    """The packages that a package needs, itself included, as those that are installed say."""
    names: set[str] = set()
    waiting = [(name, extra)]
    while waiting:
        package, asked = waiting.pop()
        if (package, asked) == (name, extra) or package not in names:
            names.add(package)
            for requirement in map(Requirement, requires(package) or ()):
                if requirement.marker is None or requirement.marker.evaluate({"extra": asked}):
                    waiting += [(requirement.name.lower(), extra) for extra in requirement.extras or {""}]
    return names


def test_it_runs_as_nobody_in_particular_by_number() -> None:
    (user,) = arguments(SERVED, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    assert SERVED.index(("USER", user)) < [name for name, _ in SERVED].index("ENTRYPOINT")


def test_what_it_runs_serves_and_its_health_check_tells(tmp_path: Path, home: Path) -> None:
    """The command of the image with a port of ours; the check asks the port of the image."""
    (entrypoint,), (command,) = arguments(SERVED, "ENTRYPOINT"), arguments(SERVED, "CMD")
    assert json.loads(entrypoint) == ["kb"]
    verb, *options = json.loads(command)
    assert (verb, options) == ("serve", ["--host", "0.0.0.0", "--port", "8000"])
    (check,) = arguments(SERVED, "HEALTHCHECK")
    _, program, code = json.loads(check[check.index("[") :])
    with started(Place(tmp_path, home / "cache")) as replica:
        asked = code.replace(":8000/", f":{replica.port}/")
        assert asked != code
        assert subprocess.run([sys.executable, program, asked], timeout=60).returncode == 0
    assert subprocess.run([sys.executable, program, asked], timeout=60, capture_output=True).returncode == 1


def test_what_it_writes_lies_in_folders_of_its_user() -> None:
    """So that the rest can be mounted to be read only."""
    (environment,), (made,) = arguments(SERVED, "ENV"), arguments(SERVED, "RUN")
    given = dict(pair.split("=", 1) for pair in environment.split())
    assert given["KB_DATABASE_URL"].startswith("sqlite:////var/lib/kb/")
    assert "--home-dir /var/lib/kb --create-home" in made
    assert f"install --directory --owner kb --group kb --mode 0700 {given['XDG_CACHE_HOME']}/kb" in made
    assert arguments(SERVED, "VOLUME") == ["/var/lib/kb"]

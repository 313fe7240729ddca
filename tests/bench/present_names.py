"""Which names exist in this interpreter. Reads names by package and writes releases and present names, as JSON.

It needs only the standard library and Python 3.9; the libraries are those of the environment.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO


def main(answers: TextIO) -> None:
    warnings.simplefilter("ignore")
    packages, present = {}, []
    for package, names in json.load(sys.stdin).items():
        try:
            packages[package] = importlib.metadata.version(package).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
        present += [name for name in names if is_present(name)]
    print(json.dumps({"packages": packages, "present": present}), file=answers)


def is_present(name: str) -> bool:
    """Whether a name can be imported, or is a key that the reader of a configuration knows at any depth."""
    reader, _, key = name.partition(": ")
    if key:
        return key.rpartition(".")[2] in KEYS[reader]()
    path, _, keyword = name.partition("(")
    try:
        found = resolve(path)
    except AttributeError:
        return False
    return not keyword or takes(found, keyword)


def resolve(path: str) -> Any:
    """The object with this dotted path. Raises `AttributeError`."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AttributeError(path)


def takes(function: Any, keyword: str) -> bool:
    """Whether a function takes the keyword; True if it takes any, and for a builtin without a signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return keyword in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


@functools.cache
def deepspeed_keys() -> set[str]:
    """Fields of the models and constants in the modules that read the configuration. Older releases use pydantic 1."""
    runtime = "deepspeed.runtime"
    modules = [importlib.import_module(f"{runtime}.config"), importlib.import_module(f"{runtime}.constants")]
    for folder in (importlib.import_module(runtime), importlib.import_module(f"{runtime}.zero")):
        for module in pkgutil.iter_modules(folder.__path__, folder.__name__ + "."):
            if module.name.endswith("config"):
                modules.append(importlib.import_module(module.name))
    return {key for module in modules for value in vars(module).values() for key in keys_of(value)}


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, type):
        for key, field in (getattr(value, "model_fields", None) or getattr(value, "__fields__", None) or {}).items():
            yield key
            yield getattr(field, "alias", None) or key


@functools.cache
def accelerate_keys() -> set[str]:
    """Keys of the configuration file and keys below `fsdp_config`, each of which sets an option of the launcher."""
    written = importlib.import_module("accelerate.commands.config.config_args").ClusterConfig
    parser = importlib.import_module("accelerate.commands.launch").launch_command_parser()
    return {action.dest for action in parser._actions} | set(written.__dataclass_fields__)


KEYS = {"deepspeed": deepspeed_keys, "accelerate": accelerate_keys}

if __name__ == "__main__":
    stdout, sys.stdout = sys.stdout, sys.stderr  # libraries print while they are imported
    main(stdout)

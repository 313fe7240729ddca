"""The names that the code of an entry uses: Python APIs, their keywords, and keys of configurations.

A name is written `torch.distributed.barrier`, a keyword `torch.distributed.barrier(device_ids`, and a key of the
configuration that a library reads `deepspeed: zero_optimization.stage`. Methods of objects are left out, because the
text does not say what type an object has.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from kb.lint.body import Block, Kind
from kb.records.names import package_of

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "datasets", "safetensors", "tokenizers")
USUAL = {  # names that a snippet may use without importing them
    "torch": "torch",
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "dist": "torch.distributed",
    "dcp": "torch.distributed.checkpoint",
    "mp": "torch.multiprocessing",
    "DDP": "torch.nn.parallel.DistributedDataParallel",
    "FSDP": "torch.distributed.fsdp.FullyShardedDataParallel",
}
COMMENTED_IMPORT = re.compile(r"^( *)# ((?:from \S+ )?import .*)$", re.MULTILINE)
READERS = {  # by a top-level key of the configuration
    "zero_optimization": "deepspeed",
    "bf16": "deepspeed",
    "fp16": "deepspeed",
    "fsdp_config": "accelerate",
    "deepspeed_config": "accelerate",
    "distributed_type": "accelerate",
}


def names(block: Block) -> frozenset[str]:
    """The library names that a code block uses; none if it cannot be parsed, which another rule reports."""
    if block.kind is not Kind.CODE:
        return frozenset()
    try:
        if block.tag == "python":
            return frozenset(_of_libraries(_python(block.text)))
        if block.tag in ("json", "yaml"):
            document = json.loads(block.text) if block.tag == "json" else yaml.safe_load(block.text)
            return frozenset(_keys_of(document))
    except (SyntaxError, ValueError, yaml.YAMLError):
        pass
    return frozenset()


def _of_libraries(found: Iterator[str]) -> Iterator[str]:
    return (name for name in found if package_of(name) in LIBRARIES)


def _python(code: str) -> Iterator[str]:
    tree = ast.parse(COMMENTED_IMPORT.sub(r"\1\2", code))
    aliases = dict(USUAL)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported = dict(_imported(node))
            aliases.update(imported)
            yield from imported.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from _full(node, aliases)
        elif isinstance(node, ast.Call):
            for function in _full(node.func, aliases):
                yield function
                yield from (f"{function}({keyword.arg}" for keyword in node.keywords if keyword.arg)


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Yield (name in the code, full name)."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif alias.asname:
            yield alias.asname, alias.name
        else:
            top = alias.name.split(".")[0]
            yield top, top


def _full(node: ast.expr, aliases: Mapping[str, str]) -> Iterator[str]:
    """The full name of `dist.barrier`; nothing for an attribute of an object."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id in aliases:
        yield ".".join([aliases[node.id], *reversed(parts)])


def _keys_of(document: Any) -> Iterator[str]:
    reader = next((READERS[key] for key in document if key in READERS), "") if isinstance(document, dict) else ""
    if reader:
        yield from (f"{reader}: {path}" for path in _paths(document))


def _paths(document: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in document.items():
        yield f"{above}{key}"
        if isinstance(value, dict):
            yield from _paths(value, f"{above}{key}.")

"""Rules for probe files."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from kb.lint.rule import ProbeFile, ProbeRule, Remark
from kb.records.hardware import GPU_ARMS

ALLOWED = frozenset(sys.stdlib_module_names)
PROBE_API = (  # modules that run in the training interpreter
    "kb.probe",
    "kb.checkpoint",
    "kb.cpu_arms",
    "kb.host",
    "kb.namespaces",
    "kb.nccl",
    "kb.packages",
    "kb.training_config",
)

LOCAL_RENDEZVOUS = re.compile(r"-(.* -)?-(standalone|rdzv[-_]backend[= ]c10d)\b")


def broken_probe(file: ProbeFile) -> Iterator[Remark]:
    """A probe file loads and satisfies the contract of kb.probe."""
    for fault in file.faults:
        yield 1, fault


def orphan_probe(file: ProbeFile) -> Iterator[Remark]:
    """Every probe file belongs to an entry."""
    if not file.owner:
        yield 1, f"no entry has `probe: {file.path.stem}`"


def probe_import(file: ProbeFile) -> Iterator[Remark]:
    """At module level a probe imports only the standard library and kb's modules for probes."""
    try:
        tree = ast.parse(file.source)
    except (SyntaxError, ValueError):
        return  # `broken_probe` reports it
    for line, module in _imports(tree):
        if module not in PROBE_API and module.partition(".")[0] not in ALLOWED:
            yield line, f"{module} is imported at module level: import it in the function that needs it"


def unseen_gpu_arms(file: ProbeFile) -> Iterator[Remark]:
    """A probe has GPU arms exactly when its text has `on_gpus(` or `gpus=N`, which kb list looks for."""
    if file.declaration is None:
        return
    needs_gpus = any(experiment.needs.gpus for experiment in file.declaration.every)
    if needs_gpus != bool(GPU_ARMS.search(file.source)):
        yield 1, "write `.on_gpus(` or `Needs(gpus=N` where an experiment needs GPUs, and nowhere else"


def own_words(file: ProbeFile) -> Iterator[Remark]:
    """No control arm expects a text that the probe itself raises: a library raises it, or a Symptom states numbers."""
    if file.declaration is None:
        return
    patterns = [
        each.control.expect.pattern for each in file.declaration.every if each.control.expect.kind in ("raised", "hung")
    ]
    for line, name, text in _raised(ast.parse(file.source)):
        if name == "Symptom":
            yield line, "this Symptom says the same whatever was measured: put the numbers into it"
        elif "TODO" not in text and any(re.search(pattern, text) for pattern in patterns if pattern):
            yield line, f"the control arm expects {text!r}, which the probe itself raises here"


def torchrun_address(file: ProbeFile) -> Iterator[Remark]:
    """A probe that runs torchrun with c10d passes `--local-addr`, since a host may not resolve its own name."""
    if file.declaration is None or "--local-addr" in file.source:
        return
    for node in ast.walk(ast.parse(file.source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and LOCAL_RENDEZVOUS.match(node.value):
            yield node.lineno, "add --local-addr=localhost, or ranks look for the host by a name that may not resolve"


def unfinished_probe(file: ProbeFile) -> Iterator[Remark]:
    """No TODO is left in a probe."""
    for number, line in enumerate(file.source.splitlines(), 1):
        if "TODO" in line:
            yield number, f"to do: {line.strip()}"


def _raised(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """The line, class and text of every exception that is raised with a constant text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and len(node.exc.args) == 1:
            text = node.exc.args[0]
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield node.lineno, ast.unparse(node.exc.func), text.value


def _imports(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and module of every import that runs when the file is loaded."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child.lineno, alias.name) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield child.lineno, "." * child.level + (child.module or "")
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not _is_for_types(child):
            yield from _imports(child)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


RULES: tuple[ProbeRule, ...] = (
    broken_probe,
    orphan_probe,
    probe_import,
    unseen_gpu_arms,
    own_words,
    torchrun_address,
    unfinished_probe,
)

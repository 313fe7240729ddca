"""Reads a training configuration as plain values, for the checks of probes: DeepSpeed JSON, accelerate YAML, arguments,
and the launcher's variables.

Runs in the reader's training interpreter: standard library and Python 3.9 only. Reading YAML needs PyYAML, which
accelerate and transformers install.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Optional

LARGEST = 1 << 20  # bytes
DEEPSPEED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization",
    "bf16",
    "fp16",
    "zero_allow_untested_optimizer",
    "elasticity",
}
LENGTHS = ("max_length", "cutoff_len", "max_seq_length", "sequence_len", "model_max_length")
BATCHES = ("per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu")
NODE_VARIABLES = (("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("SLURM_JOB_NUM_NODES", ""), ("SLURM_NNODES", ""))
ACCELERATE = {"compute_environment", "distributed_type", "num_processes", "deepspeed_config", "fsdp_config"}


class UnreadableConfig(Exception):
    """The file cannot be judged; the message says why."""


class Config(NamedTuple):
    """`kind` is `deepspeed`, `accelerate` or `arguments` (keys of TrainingArguments and of other trainers)."""

    kind: str
    values: Dict[str, Any]


def read_config(path: Path) -> Config:
    """Read JSON, or YAML with its safe loader, so that nothing in the file runs. Raises `UnreadableConfig`."""
    try:
        if not path.is_file():
            raise UnreadableConfig("%s is not a file" % path)
        if path.stat().st_size > LARGEST:
            raise UnreadableConfig("%s is larger than any training configuration" % path)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableConfig("%s cannot be read: %s" % (path, getattr(error, "strerror", None) or error)) from None
    values = _values(path, text)
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UnreadableConfig("%s holds no mapping of names to values" % path)
    return Config(_kind(values), values)


def micro_batch_tokens(values: Mapping[str, Any]) -> Optional[int]:
    """Tokens in a micro batch, by the first keys of length and batch size; None if one of them is missing."""
    lengths = [values[name] for name in LENGTHS if isinstance(values.get(name), int)]
    batches = [values[name] for name in BATCHES if isinstance(values.get(name), int)]
    return lengths[0] * batches[0] if lengths and batches else None


def spans_nodes(nodes: int) -> Optional[bool]:
    """Whether a job runs on several nodes: by number, else by the launcher's variables; None if unknown."""
    if nodes > 0:
        return nodes > 1
    for total, local in NODE_VARIABLES:
        try:
            return int(os.environ[total]) > int(os.environ[local] if local else 1)
        except (KeyError, ValueError):
            continue
    return None


def _values(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if path.suffix == ".json" or text.lstrip()[:1] in ("{", "["):
            message = "%s is not plain JSON (DeepSpeed itself reads HJSON): %s"
            raise UnreadableConfig(message % (path, str(error)[:200])) from None
    try:
        import yaml
    except ImportError:
        raise UnreadableConfig("%s is YAML, and PyYAML is not installed here" % path) from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnreadableConfig("%s is neither JSON nor YAML: %s" % (path, " ".join(str(error).split())[:200])) from None


def _kind(values: Dict[str, Any]) -> str:
    if len(ACCELERATE & values.keys()) >= 2:
        return "accelerate"
    hugging_face = {"per_device_train_batch_size", "output_dir", "learning_rate", "num_train_epochs", "max_steps"}
    if "zero_optimization" in values or (DEEPSPEED & values.keys() and not hugging_face & values.keys()):
        return "deepspeed"
    return "arguments"

"""Reports as nodes send them, and as `kb verify` stores them locally."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

Post = Callable[..., httpx.Response]
KEY = "a-key-of-8-or-more"


def report(**members: Any) -> dict[str, Any]:
    """A report as shared by a node."""
    return {
        "id": "slow-disk",
        "title": "The disk is slow",
        "verdict": "verified",
        "reason": "because",
        "fidelity": "hardware",
        "entry_digest": "a" * 64,
        "probe_digest": "b" * 64,
        "started_at": "2026-03-01T08:30:00Z",
        "duration_s": 1.5,
        "kb_version": "0.1.0",
        "machine": {"gpus": ["NVIDIA H100 80GB HBM3"] * 2, "driver": "570.86.15", "torch": "2.7.1+cu126"},
        **members,
    }


def local(entry_id: str, started_at: str, **members: Any) -> dict[str, Any]:
    """A report as `kb verify` saves it in the local store."""
    environment = {"host": {"id": "5bce98f73f3e", "kernel": "6.8"}, "variables": {"NCCL_DEBUG": "INFO"}}
    plain = {name: value for name, value in report(id=entry_id).items() if name != "machine"}
    return {**plain, "started_at": started_at, "environment": environment, "params": {}, **members}

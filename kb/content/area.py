"""The areas: a closed list that groups entries, in addition to their free tags.

Separate from `kb.content.entry`, so that a search that filters by area does not load pydantic.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Area(StrEnum):
    """The part of a training job that an entry is about, and in a line what belongs there."""

    meaning: str

    LAUNCH = "launch", "ranks that do not start or find each other: launchers, rendezvous, schedulers, GPU per rank"
    INSTALL = "install", "drivers, CUDA, wheels, extensions, containers and library versions that do not fit"
    HARDWARE = "hardware", "GPUs, NVLink and NVSwitch: faults, their services, throttling"
    NETWORK = "network", "how ranks reach each other: NCCL transports, InfiniBand, sockets, gloo, shared memory, limits"
    COLLECTIVES = "collectives", "ranks that call different collectives, or wait for one that is late: hangs, timeouts"
    PARALLELISM = "parallelism", "what DDP, FSDP, ZeRO and tensor or pipeline parallelism demand of model and settings"
    MODEL = "model", "the model's own code: forward, backward, devices, adapters, torch.compile, kernels"
    NUMERICS = "numerics", "NaN, loss, precision, gradients, learning rate, reproducibility"
    MEMORY = "memory", "GPU or host memory runs out"
    DATA = "data", "datasets, preprocessing, samplers and data loaders"
    CHECKPOINT = "checkpoint", "saving, loading, converting, resuming and downloading weights"
    GENERATION = "generation", "text generation inside training: evaluation, rollouts, RL with an inference engine"

    def __new__(cls, value: str, meaning: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

"""The facets of an incident: three closed lists, which say what is seen, when, and in which part of the software.

Entries declare theirs, and a question has those that its words name (`kb.search.cues`): an entry about a hang is no
answer to a question about speed. `Area` puts entries in order and has one value; of a facet an entry may have several.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class _Facet(StrEnum):
    """A value, and in a line what belongs there."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


class Symptom(_Facet):
    """What is seen."""

    HANG = "hang", "nothing moves, or a timeout ends it"
    CRASH = "crash", "an error, a signal, a job that does not start"
    OUT_OF_MEMORY = "out-of-memory", "GPU or host memory runs out"
    SLOW = "slow", "it works, and takes too long"
    WRONG_RESULT = "wrong-result", "NaN, a loss that does not fall, empty or useless weights or text"


class Phase(_Facet):
    """When it is seen."""

    BUILD = "build", "installing, compiling, importing"
    START = "start", "launch, rendezvous, the first collective"
    DATA = "data", "preprocessing and data loading"
    TRAINING = "training", "forward, backward, optimizer step"
    EVALUATION = "evaluation", "validation, generation, rollouts"
    SAVE = "save", "writing a checkpoint or a model"
    LOAD = "load", "reading, resuming, merging"
    EXIT = "exit", "the end of the job"


class Component(_Facet):
    """Where it is seen."""

    NCCL = "nccl", "collectives between GPUs and their watchdog"
    GLOO = "gloo", "collectives between CPUs"
    STORE = "store", "rendezvous, TCPStore and its port"
    NETWORK = "network", "interfaces, InfiniBand, sockets between nodes"
    LAUNCHER = "launcher", "torchrun, accelerate, Slurm, Kubernetes, Ray"
    DATALOADER = "dataloader", "data loader workers"
    DATASET = "dataset", "samples, labels, samplers, preprocessing"
    TOKENIZER = "tokenizer", "tokenizers, vocabularies, embeddings"
    CHECKPOINT = "checkpoint", "state dicts and the files they are saved in"
    STORAGE = "storage", "disks, file systems, caches, lock files"
    HUB = "hub", "downloads"
    OPTIMIZER = "optimizer", "optimizer, learning rate, clipping"
    DDP = "ddp", "DistributedDataParallel"
    FSDP = "fsdp", "FSDP, DTensor"
    DEEPSPEED = "deepspeed", "DeepSpeed, ZeRO"
    ADAPTER = "adapter", "LoRA, PEFT"
    COMPILER = "compiler", "torch.compile, Triton"
    EXTENSION = "extension", "compiled extensions: flash-attn, apex, DeepSpeed's operations"
    LIBRARY = "library", "versions of libraries and of CUDA that do not fit"
    DRIVER = "driver", "the GPU driver and its services"
    HARDWARE = "hardware", "GPUs, NVLink, PCIe"
    CONTAINER = "container", "Docker, Kubernetes, images"
    DEVICE = "device", "which process uses which GPU"
    PRECISION = "precision", "fp16, bf16, dtypes, loss scaling"
    GENERATION = "generation", "generate(), stop tokens"
    INFERENCE_ENGINE = "inference-engine", "vLLM, SGLang, rollouts, serving"
    MODEL = "model", "the model's own code and shape"
    MEMORY = "memory", "how much memory is needed, and by what"


FACETS: dict[str, type[_Facet]] = {"symptoms": Symptom, "phases": Phase, "components": Component}

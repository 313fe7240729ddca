"""The facets of an incident: closed lists of what is seen, when, and in which part of the software.

Entries declare facets, and the words of a question name some (`kb.search.cues`): an entry about a hang does not answer
a question about speed. An entry has one `Area`, which groups entries, but may have several values of a facet. A
question may also name a subject that kb is not about.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Self


class _Facet(StrEnum):
    """A value of a facet, with a line on what belongs there."""

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


class Subject(_Facet):
    """Subjects that kb is not about, which no entry declares. The line says where to look instead."""

    ASCEND = "ascend", "Ascend NPUs and HCCL: https://www.hiascend.com/document"
    TPU = "tpu", "TPUs and XLA: https://docs.pytorch.org/xla"
    ACCELERATOR = "accelerator", "other accelerators than GPUs (Gaudi, MLU, Apple's): the vendor's documentation"
    FRAMEWORK = "framework", "other frameworks than PyTorch (Paddle, MindSpore, JAX): the framework's issues"
    SERVING = "serving", "inference servers: the documentation and issues of the engine, such as https://docs.vllm.ai"
    GRAPHICS = "graphics", "rendering: the support of the program"
    WEB_SERVER = "web-server", "web servers and proxies: the documentation of the server"
    PROGRAMMING = "programming", "questions of Python or CUDA without training: https://docs.nvidia.com/cuda"


FACETS: dict[str, type[_Facet]] = {"symptoms": Symptom, "phases": Phase, "components": Component}
NAMED: dict[str, type[_Facet]] = {**FACETS, "subjects": Subject}  # what a question may name
VALUES = tuple(f"{name}:{value}" for name, facet in NAMED.items() for value in facet)


def bits(values: Iterable[str]) -> int:
    """A set of `VALUES` as a bit mask: an index compares thousands of them."""
    return sum(1 << VALUES.index(value) for value in set(values))


def values_of(number: int) -> list[str]:
    """The values in a bit mask; the inverse of `bits`."""
    return [value for place, value in enumerate(VALUES) if number >> place & 1]

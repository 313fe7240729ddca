"""Boilerplate that messages contain whatever happened: advice, guesses and announcements, which are not evidence."""

from __future__ import annotations

import re

ADVICE = re.compile(
    "|".join(
        (
            r"Some NCCL operations have failed or timed out\.[^\n]*?incomplete data\.?",  # torch ProcessGroupNCCL
            r"Stack trace of the failed collective not found, potentially because FlightRecorder[^\n]{0,200}",
            r"This is most likely caused by incorrect usages of collectives[^\n]{0,200}",  # torch, desync debug
            r"This is typically caused by a remote worker crashing\.?",  # gloo
            r"If you believe your socket network is in a healthy state[^\n]{0,200}",  # NCCL
            r"To avoid (?:data inconsistency|this)[^\n]{0,200}",
            r"This may indicate a possible application crash on rank \d+ or a network set ?up issue\.?",  # torch
            r"For debugging consider passing CUDA_LAUNCH_BLOCKING=1\.?",  # torch CUDA errors
            r"Compile with `?TORCH_USE_CUDA_DSA`? to enable device-side assertions\.?",
            r"CUDA kernel errors might be asynchronously reported[^\n]{0,120}",
            r"(?:If|See)[^\n]{0,120}(?:documentation|docs)[^\n]{0,120}PYTORCH_(?:CUDA_)?ALLOC_CONF",  # torch allocator
            r"If reserved (?:but unallocated )?memory is (?:large|>> allocated memory) try setting[^\n]{0,200}",
            r"\(?run with NCCL_DEBUG=(?:INFO|WARN) for (?:more )?details\)?",  # NCCL
            r"Last error:$",
            r"To enable traceback see: https?://\S+",  # torchelastic
            r"Please (?:check|make sure|ensure|refer|see|report|file)[^\n]{0,200}",
            r"You can (?:also )?(?:try|set|use)[^\n]{0,200}",
            r"It is (?:possible|likely) that[^\n]{0,200}",
            r"This (?:may|might|could) be (?:due to|caused by|because)[^\n]{0,200}",
            r"Setting OMP_NUM_THREADS environment variable for each process[^\n]{0,300}",  # torchrun
        )
    )
)


def strip_advice(text: str) -> str:
    """The line without advice."""
    return ADVICE.sub(" ", text)

"""The environment of arms: the caller's, without the variables that would change how an arm's job runs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

SCRUBBED = re.compile(
    r"^(NCCL_|TORCH_|TORCHINDUCTOR_|GLOO_|PYTORCH_|TORCHELASTIC_|OMP_|MKL_|SLURM_|PMI|OMPI_|PET_|CUDA_LAUNCH|CUDA_VISIBLE|TOKENIZERS_|KB_)"
    r"|^(RANK|LOCAL_RANK|LOCAL_WORLD_SIZE|WORLD_SIZE|GROUP_RANK|ROLE_RANK|MASTER_ADDR|MASTER_PORT|PYTHONSTARTUP)$"
)

# For GPU arms. Without these, a timeout of five seconds takes more than a minute, because the watchdog waits for a dump
# before it throws (ProcessGroupNCCL.cpp: four times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC).
NCCL = {
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "15",
    "NCCL_DEBUG": "WARN",
}


def scrub_environment(environment: Mapping[str, str] | None = None) -> tuple[dict[str, str], tuple[str, ...]]:
    """The caller's environment without job settings, and the names of the removed variables."""
    environment = os.environ if environment is None else environment
    removed = tuple(sorted(name for name in environment if SCRUBBED.search(name)))
    remaining = {name: value for name, value in environment.items() if name not in removed}
    remaining.update(
        OMP_NUM_THREADS="1",
        PYTHONSAFEPATH="1",
        PYTHONUNBUFFERED="1",
        PYTHONDONTWRITEBYTECODE="1",  # a probe leaves no __pycache__ in a content root
        HF_HUB_OFFLINE="1",
    )
    return remaining, removed


def arm_variables(directory: Path, backend: str, gpus: tuple[str, ...]) -> dict[str, str]:
    """The variables of one arm: its own directory for every cache, and its GPUs."""
    home = str(directory)
    variables = {
        "TMPDIR": home,
        "XDG_CACHE_HOME": f"{home}/cache",
        "HF_HOME": f"{home}/cache/huggingface",
        "TRITON_CACHE_DIR": f"{home}/cache/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{home}/cache/inductor",
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "GLOO_SOCKET_IFNAME": "lo",  # there is only one host; otherwise gloo resolves the host name for every rank
    }
    if backend == "nccl":
        variables |= NCCL | {"NCCL_CONF_FILE": os.devnull}
    return variables

"""`make healthy`: run small real training jobs, and treatment arms, and keep what they print as entries/healthy/<name>.log.

Needs an environment with torch, transformers, accelerate, trl, peft, datasets and deepspeed: `PYTHON_OF=/path/to/python`.
A job that does not end well is not kept, and the command ends with 1: nothing here is a healthy log by assertion.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEPT = HERE.parents[1] / "entries" / "healthy"
DEADLINE_S = 240
LONGEST = 60_000  # characters of one log; progress bars are long
TORCHRUN = ("torchrun", "--nproc-per-node", "2")
ZERO = {
    "zero_optimization": {"stage": 2},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}


@dataclass(frozen=True)
class Job:
    """One command and what it adds to the environment; run twice when it `resumes`, the second log is kept."""

    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    resumes: bool = False


def torchrun(*arguments: str, launcher: tuple[str, ...] = (), **env: str) -> Job:
    return Job((*TORCHRUN, *launcher, *arguments), env)


JOBS = {
    "ddp-torchrun": torchrun("ddp.py"),
    "ddp-tee": torchrun("ddp.py", launcher=("--tee", "3", "--log-dir", "logs")),
    "ddp-rdzv-c10d": torchrun("ddp.py", launcher=("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")),
    "ddp-standalone-four": Job(
        ("torchrun", "--standalone", "--nproc-per-node", "4", "ddp.py"), {"OMP_NUM_THREADS": "1"}
    ),
    "ddp-debug-info": torchrun("ddp.py", TORCH_DISTRIBUTED_DEBUG="INFO", TORCH_CPP_LOG_LEVEL="INFO"),
    "ddp-unused-flag": torchrun("ddp.py", "--unused"),
    "ddp-uneven-join": torchrun("ddp.py", "--uneven"),
    "ddp-checkpointing": torchrun("ddp.py", "--checkpointing", PYTHONWARNINGS="default"),
    "ddp-logging": torchrun("ddp.py", TORCH_LOGS="all", TORCH_CPP_LOG_LEVEL="INFO"),
    "ddp-restart-allowed": torchrun("ddp.py", launcher=("--max-restarts", "3", "--monitor-interval", "1")),
    "fsdp2": torchrun("fsdp.py", "fsdp2"),
    "fsdp2-tee-warnings": torchrun("fsdp.py", "fsdp2", launcher=("--tee", "3"), PYTHONWARNINGS="default"),
    "fsdp2-debug-detail": torchrun("fsdp.py", "fsdp2", TORCH_DISTRIBUTED_DEBUG="DETAIL"),
    "fsdp1": torchrun("fsdp.py", "fsdp1"),
    "fsdp1-warnings": torchrun("fsdp.py", "fsdp1", PYTHONWARNINGS="default", TORCH_CPP_LOG_LEVEL="INFO"),
    "loader-fork": Job(("python", "-W", "default", "loader.py", "fork")),
    "loader-spawn": Job(("python", "-W", "default", "loader.py", "spawn")),
    "loader-forkserver-quiet": Job(("python", "loader.py", "forkserver"), {"TOKENIZERS_PARALLELISM": "false"}),
    "accelerate-ddp": Job(("accelerate", "launch", "--cpu", "--num_processes", "2", "accelerated.py")),
    "accelerate-debug": Job(
        ("accelerate", "launch", "--cpu", "--num_processes", "2", "--debug", "accelerated.py"),
        {"ACCELERATE_LOG_LEVEL": "DEBUG"},
    ),
    "accelerate-one": Job(("accelerate", "launch", "--cpu", "--num_processes", "1", "accelerated.py")),
    "trainer-torchrun": torchrun("trainer.py"),
    "trainer-checkpointing": torchrun("trainer.py", "--gradient-checkpointing", PYTHONWARNINGS="default"),
    "trainer-resumed": Job((*TORCHRUN, "trainer.py", "--resume"), resumes=True),
    "trainer-accelerate-info": Job(
        ("accelerate", "launch", "--cpu", "--num_processes", "2", "trainer.py"), {"TRANSFORMERS_VERBOSITY": "info"}
    ),
    "trainer-deepspeed": torchrun("trainer.py", "--deepspeed", "ds.json", DS_ACCELERATOR="cpu"),
    "trl-sft": torchrun("preference.py", "sft"),
    "trl-dpo-lora": torchrun("preference.py", "dpo"),
    "deepspeed-stage-0": Job(("deepspeed", "--num_gpus", "2", "zero.py", "0"), {"DS_ACCELERATOR": "cpu"}),
    "deepspeed-stage-1": torchrun("zero.py", "1", DS_ACCELERATOR="cpu"),
    "deepspeed-stage-2": torchrun("zero.py", "2", DS_ACCELERATOR="cpu"),
    "deepspeed-stage-3": torchrun("zero.py", "3", DS_ACCELERATOR="cpu"),
    "numerics": Job(("python", "numerics.py")),
    "numerics-logs": Job(("python", "numerics.py"), {"TORCH_LOGS": "+dynamo,aot"}),
}

# Entries whose treatment arm prints something where the libraries are installed. Not among them: nan-loss, which logs
# a NaN on purpose, and torchrun-root-cause-hidden, whose job fails in both arms.
ARMS = (
    "ddp-marked-ready-twice",
    "mixed-modality-branch-hang",
    "moe-zero3-hang",
    "oom-activations",
    "oom-at-save-or-eval",
    "resume-world-size-mismatch",
    "tokenizer-embedding-mismatch",
    "zero3-empty-weights",
    "zero3-generate-hang",
)


def main() -> int:
    python = Path(os.environ.get("PYTHON_OF", sys.executable)).absolute()
    chosen = sys.argv[1:] or [*JOBS, "arms"]
    failed = [name for name in chosen if not (keep_arms(python) if name == "arms" else keep(name, JOBS[name], python))]
    for name in failed:
        print(f"not kept: {name}", file=sys.stderr)
    return 1 if failed else 0


def keep(name: str, job: Job, python: Path) -> bool:
    """Run a job in a folder of its own; its log is kept when it ended with 0."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "workspace"
        shutil.copytree(HERE / "loops", work)
        (work / "ds.json").write_text(json.dumps(ZERO))
        try:
            ended = run(job, work, python)
            if ended.returncode == 0 and job.resumes:
                ended = run(job, work, python)
        except subprocess.TimeoutExpired as late:
            print((late.stdout or b"").decode(errors="replace")[-2000:])
            return False
        text = anonymous(ended.stdout.decode(errors="replace"), work, python)
        if ended.returncode:
            print(f"{name} ended with {ended.returncode}\n{text[-3000:]}")
            return False
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{name}.log").write_text(text, encoding="utf-8")
    print(name, len(text))
    return True


def keep_arms(python: Path) -> bool:
    """The logs of the treatment arms that were part of a verified verdict."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        kb = str(Path(sys.executable).with_name("kb"))
        command = [kb, "verify", *ARMS, "--json", "--python", str(python), "--keep-logs", folder]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        verdicts = {load["id"]: load["verdict"] for load in json.loads(ended.stdout)["reports"]}
        for entry_id in ARMS:
            logs = sorted(work.glob(f"{entry_id}-*-treatment/rank*.log"))
            text = "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
            if verdicts[entry_id] == "verified" and text.strip():
                (KEPT / f"arm-{entry_id}.log").write_text(anonymous(text, work, python), encoding="utf-8")
    return set(verdicts.values()) == {"verified"}


def run(job: Job, work: Path, python: Path) -> subprocess.CompletedProcess[bytes]:
    env = {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "HOME": str(work),
        "TMPDIR": str(work.parent),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "100",
        **job.env,
    }
    return subprocess.run(
        job.command, cwd=work, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEADLINE_S
    )


def anonymous(text: str, work: Path, python: Path) -> str:
    """The log without what names this machine."""
    names = {
        str(work): "/workspace",
        str(work.parent): "/tmp/run",
        str(python.parents[1]): "/opt/venv",
        str(Path(os.path.realpath(python)).parents[1]): "/usr/local",
        socket.gethostname(): "node-1",
    }
    text = re.sub(r"\S*/kb-arm-\w+", "/workspace", text)
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", names[name], text)
    text = re.sub(rf"\b{re.escape(getpass.getuser())}\b", "user", text)
    text = text.replace("\r", "\n")
    return text if len(text) <= LONGEST else text[: LONGEST // 2] + "\n[...]\n" + text[-LONGEST // 2 :]


if __name__ == "__main__":
    sys.exit(main())

"""`make stories`: run the jobs of jobs.toml, or those named, and keep their logs and truths under records/.

STORY_PYTHONS names the environments that jobs ask for: "2.13=/x/bin/python,lib=/y/bin/python"; a job whose environment is
not named is skipped, and its record stays as it is. A job that does not go as it was meant to is not kept.
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
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.stories.jobs import Job, read_jobs
from tests.stories.launch import Start, launched
from tests.stories.truth import document, doubts, ranks_of

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "records"
DEADLINE_S = 150.0
LONGEST = 58_000  # characters of one log
LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "lightning",
    "trl",
    "peft",
    "ray",
    "datasets",
    "loguru",
    "rich",
)
# Where users keep their programs: a place in a log is no constant.
HOMES = ("/workspace", "/home/user/exp", "/mnt/data/code/pretrain", "/opt/app", "/root/train", "/data/user/project")


def main() -> int:
    pythons = dict(part.split("=", 1) for part in os.environ.get("STORY_PYTHONS", f"2.13={sys.executable}").split(","))
    jobs = read_jobs()
    chosen = sys.argv[1:] or list(jobs)
    failed = []
    for name in chosen:
        job = jobs[name]
        if job.python not in pythons:
            print(f"{name}: no environment {job.python}", file=sys.stderr)
        elif not keep(job, Path(pythons[job.python]).absolute()):
            failed.append(name)
    for name in failed:
        print(f"not kept: {name}", file=sys.stderr)
    return 1 if failed else 0


def keep(job: Job, python: Path) -> bool:
    """Run a job in a folder of its own and keep what a user would have of it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="story-") as made:
        folder = Path(made)
        work, left, log = folder / "work", folder / "truth", folder / "job.log"
        shutil.copytree(HERE / "programs", work, ignore=shutil.ignore_patterns("__pycache__"))
        start = Start(
            python,
            f"{job.program}.py",
            job.arguments,
            job.world,
            work,
            environment(job, folder, python),
            DEADLINE_S,
            job.absent,
        )
        code = 0
        for _ in range(job.runs):
            shutil.rmtree(left, ignore_errors=True)
            left.mkdir()
            code = launched(job.launch, start, log)
        names = {path.name for path in work.rglob("*.py")} - {"witness.py", "__init__.py"}
        ranks = ranks_of(left / str(job.attempt), names)
        wrong = doubts(job, ranks, code)
        print(f"{job.name}: exit {code}, {time.monotonic() - began:.0f} s", *wrong, sep="; ", flush=True)
        if wrong:
            refused = Path(os.environ.get("STORY_REFUSED", folder / "refused")) / job.name
            shutil.rmtree(refused, ignore_errors=True)
            shutil.copytree(left, refused / "truth")
            shutil.copy(log, refused / "job.log")
            return False
        store(job, folder, python, ranks, code)
    return True


def environment(job: Job, folder: Path, python: Path) -> dict[str, str]:
    return {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "COLUMNS": "110",
        "PYTHONDONTWRITEBYTECODE": "1",
        "STORY_FAULT": job.fault,
        "STORY_STYLE": job.style,
        "STORY_CULPRIT": str(-1 if job.culprit is None else job.culprit),
        "STORY_TIMEOUT": f"{job.timeout:g}",
        "STORY_TRUTH": str(folder / "truth"),
        **job.env,
    }


@dataclass(frozen=True)
class Installed:
    """An environment: releases of what the program imports, and the folders that name it in tracebacks."""

    versions: dict[str, str]
    prefixes: tuple[str, ...]


def installed(job: Job, python: Path) -> Installed:
    text = (HERE / "programs" / f"{job.program}.py").read_text(encoding="utf-8")
    used = [name for name in LIBRARIES if name == job.style or re.search(rf"^(?:from|import) {name}\b", text, re.M)]
    used += [name for name in ("accelerate", "deepspeed") if job.launch == name and name not in used]
    ask = (
        "import importlib.metadata as m, json, sys\nfound = {}\nfor n in sys.argv[1:]:\n    try: found[n] = m.version(n)\n"
        "    except m.PackageNotFoundError: pass\nprint(json.dumps([found, [sys.prefix, sys.base_prefix]]))"
    )
    answer = subprocess.run([python, "-c", ask, *dict.fromkeys(("torch", *used))], stdout=subprocess.PIPE, check=True)
    versions, prefixes = json.loads(answer.stdout)
    return Installed({name: version.split("+")[0] for name, version in versions.items()}, tuple(prefixes))


def store(job: Job, folder: Path, python: Path, ranks: dict[int, dict[str, Any]], code: int) -> None:
    venv = installed(job, python)
    told = document(job, ranks, code, venv.versions)
    names = private_names(folder, python, venv, job.name)
    target = RECORDS / job.name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    kernel = killed_lines(job) if job.kernel else ""
    sources = {target / "job.log": folder / "job.log"}
    for file in (folder / "work" / "logs").rglob("std*.log"):
        sources[target / "ranks" / file.relative_to(folder / "work" / "logs")] = file
    for kept, file in sources.items():
        kept.parent.mkdir(parents=True, exist_ok=True)
        text = file.read_bytes().decode(errors="replace") + (kernel if file.name == "job.log" else "")
        kept.write_bytes(shortened(anonymous(text, names)).encode())
    text = anonymous(json.dumps(told, indent=1, ensure_ascii=False), names)
    (target / "truth.json").write_text(text + "\n", encoding="utf-8")


def killed_lines(job: Job) -> str:
    """What the kernel of a node says of a process that it killed for want of memory."""
    clock, pid = time.strftime("%b %d %H:%M:%S"), os.getpid() + 41
    return (
        f"{clock} node-1 kernel: python invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=985\n"
        f"{clock} node-1 kernel: Memory cgroup out of memory: Killed process {pid} (python) total-vm:64112024kB, "
        "anon-rss:33290112kB, file-rss:70144kB, shmem-rss:12288kB, UID:1000 pgtables:66452kB oom_score_adj:985\n"
    )


def private_names(folder: Path, python: Path, venv: Installed, name: str) -> dict[str, str]:
    """What names this machine or the recorder, and what a user would have there."""
    own_prefix, base_prefix = venv.prefixes
    return {
        str(folder / "work"): HOMES[sum(name.encode()) % len(HOMES)],
        str(folder / "home"): "/home/user",
        str(folder): "/tmp/run",
        base_prefix: "/usr/local",
        str(Path(os.path.realpath(python)).parents[1]): "/usr/local",
        str(python.parents[1]): "/opt/venv",
        own_prefix: "/opt/venv",
        socket.gethostname(): "node-1",
    }


def anonymous(text: str, names: dict[str, str]) -> str:
    """The log without those names; its form, carriage returns included, stays."""
    for real in sorted(names, key=len, reverse=True):
        if len(real) > 4 or real == socket.gethostname():
            text = re.sub(rf"(?<![\w.-]){re.escape(real)}(?![\w-])", names[real], text)
    user = getpass.getuser()
    return text if user == "root" else re.sub(rf"\b{re.escape(user)}\b", "user", text)


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST // 2] + "\n[...]\n" + text[-LONGEST // 2 :]


if __name__ == "__main__":
    sys.exit(main())

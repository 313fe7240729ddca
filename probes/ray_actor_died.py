"""Ray reports that a process is gone, in the same words for every reason; the reason is in the log of that process."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping

from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

WORKER = """
import faulthandler, os, resource, signal, sys

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
faulthandler.enable()
print("connected", flush=True)
if sys.argv[1] == "no file":
    print("FileNotFoundError: no engine in /models/missing", file=sys.stderr, flush=True)
    os._exit(1)
os.kill(os.getpid(), {"killed": signal.SIGKILL, "crash": signal.SIGSEGV}[sys.argv[1]])
"""


def supervise(ctx: Context, *, read: str) -> None:
    """Three workers that die in three ways, and what a supervisor learns from its connections or their logs."""
    script = Path(ctx.path("worker.py"))
    script.write_text(WORKER)
    ctx.reached()
    stories: Dict[str, str] = {}
    for cause in ("killed", "crash", "no file"):
        log = Path(ctx.path(cause + ".err"))
        with log.open("w") as stream:
            worker = subprocess.Popen([sys.executable, str(script), cause], stdout=subprocess.PIPE, stderr=stream)
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"connected\n"
            end = worker.stdout.read()
            worker.wait()
        stories[cause] = log.read_text() if read == "worker-log" else "End of file" if not end else repr(end)
    ctx.note(stories=stories)
    if len(set(stories.values())) == 1:
        raise Symptom(f"3 workers died in 3 ways, and their connections say the same: {stories['crash']}")
    assert stories["killed"] == "", stories
    assert "Fatal Python error: Segmentation fault" in stories["crash"], stories
    assert "FileNotFoundError: no engine" in stories["no file"], stories


def isolate(ctx: Context) -> None:
    """No setting of the reader's Ray; its files, and what it keeps in the home directory, in that of the arm."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ.update(HOME=str(ctx.dir), RAY_TMPDIR=str(ctx.dir), RAY_USAGE_STATS_ENABLED="0")
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))  # its ports are the network's


@contextmanager
def cluster(ctx: Context) -> Iterator[Any]:
    """Ray on this machine alone."""
    isolate(ctx)
    import ray  # type: ignore[import-not-found]

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        _temp_dir=str(ctx.dir),
    )
    try:
        yield ray
    finally:
        ray.shutdown()


def serve(ctx: Context, *, dies: bool) -> None:
    """An actor that may be restarted, and whose process is killed whenever it works."""
    with cluster(ctx) as ray:

        class Engine:
            def generate(self) -> int:
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                return 1

        engine = ray.remote(max_restarts=1, max_task_retries=1)(Engine).remote()
        ctx.reached()
        assert ray.get(engine.generate.remote(), timeout=60) == 1


def explain(ctx: Context, *, read: str) -> None:
    """An actor that crashes: what the exception says, and what the log of its process says."""
    with cluster(ctx) as ray:

        class Engine:
            def pid(self) -> int:
                return os.getpid()

            def crash_in_kernel(self) -> None:
                os.kill(os.getpid(), signal.SIGSEGV)

        engine = ray.remote(Engine).remote()
        pid = ray.get(engine.pid.remote(), timeout=60)
        ctx.reached()
        try:
            ray.get(engine.crash_in_kernel.remote(), timeout=60)
        except ray.exceptions.RayActorError as error:
            text = str(error)
        assert f"pid: {pid}" in text
        assert "The actor died unexpectedly before finishing this task" in text
        if read == "worker-log":
            (log,) = Path(ctx.path("session_latest/logs")).glob(f"worker-*-{pid}.err")
            text = log.read_text()
        if "crash_in_kernel" not in text:
            raise Symptom(f"the exception of an actor that got SIGSEGV names {len(guesses(text))} causes and no line")
        assert "Fatal Python error: Segmentation fault" in text


def guesses(text: str) -> List[str]:
    return re.findall(r"\(\d\) [^,.]*", text)


def retry(ctx: Context, *, max_retries: int) -> None:
    """A main task that makes a placement group with a name, as verl's does, and then is killed."""
    with cluster(ctx) as ray:
        placement_group = __import__("ray.util.placement_group", fromlist=["placement_group"]).placement_group

        def main_task() -> None:
            ray.get(placement_group([{"CPU": 1}], name="global_pool_0").ready(), timeout=60)
            os.kill(os.getpid(), signal.SIGKILL)

        ctx.reached()
        try:
            ray.get(ray.remote(num_cpus=1, max_retries=max_retries)(main_task).remote(), timeout=90)
        except ray.exceptions.WorkerCrashedError as error:
            ctx.note(error=str(error))


# --- the check: what do the logs of the last Ray session on this node say? --------------------------------------

ANY_ERROR = r"^\w[\w.]*(?:Error|Exception): .*"  # may be one that was caught
CAUSES = (
    ("raylet.out", r"[1-9]\d* Workers .*due to memory pressure|running low on memory"),
    ("worker-*.err", r"Fatal Python error: .*|\*\*\* SIG(?!TERM)\w+ received|Resource temporarily unavailable"),
    ("worker-*.err", r"Watchdog caught collective operation timeout.*|CUDA out of memory.*|OutOfMemoryError.*"),
    ("worker-*.err", ANY_ERROR),
)
NEWEST, TAIL = 60, 1 << 16  # files, and bytes of each


def check(params: Mapping[str, Any]) -> Finding:
    folder = params["logs"] or default_folder()
    if not os.path.isdir(folder):
        return unknown(
            f"{folder} does not exist here, or cannot be read",
            advice="run this on the node of `ip:`, or --set logs=FOLDER",
        )
    evidence: List[str] = []
    other: List[str] = []
    read = 0
    for pattern, cause in CAUSES:
        try:
            files = sorted(filter(Path.is_file, folder.glob(pattern)), key=lambda f: f.stat().st_mtime)[-NEWEST:][::-1]
            read += len(files)
            (other if cause == ANY_ERROR else evidence).extend(line for file in files for line in found(file, cause))
        except OSError as error:
            return unknown(f"{folder} cannot be read: {error.strerror}")
    if evidence:
        return exposed(*dict.fromkeys(evidence[:8]), advice="the earliest of these is the reason to look up")
    silent = "a worker that was killed leaves no line: journalctl -k, or the events of the pod"
    if other:
        return unknown(*dict.fromkeys(other[:8]), "errors, which may have been caught", silent)
    return unknown(f"{read} files of {folder} name no cause", silent)


def default_folder() -> Path:
    """The first that exists of those that Ray may take; the TMPDIR of a check is a folder in the caller's."""
    own = Path(os.environ.get("TMPDIR") or "/tmp")
    parents = (Path(os.environ.get("RAY_TMPDIR") or own), own, own.parent, Path("/tmp"))
    folders = [parent / "ray" / "session_latest" / "logs" for parent in parents]
    return next((folder for folder in folders if os.path.isdir(folder)), folders[-1])


def found(file: Path, cause: str) -> Iterator[str]:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - TAIL))
        text = stream.read().decode("utf-8", "replace")
    match = re.search(cause, text, re.MULTILINE)
    if match:
        yield f"{file.name}: {match.group()[:160]}"


SUPERVISOR = "Ray's supervisor of a worker, by a parent that has a pipe to its child"


def arm(job: Any, expect: Expect, because: str) -> Arm:
    return Arm(job, expect, because=because, fidelity="cpu")


def in_ray(name: str, control: Arm, treatment: Arm) -> Experiment:
    return Experiment(
        name=name,
        control=control,
        treatment=treatment,
        world_size=1,
        needs=Needs(packages={"ray": ">=2.9"}, memory_mib=2048),
        deadline_s=150,
        expected_s=(15.0, 15.0),
    )


probe = Probe(
    check=check,
    params={
        "logs": Param("path", "logs of a Ray session on this node (default: session_latest/logs in the folder of Ray)")
    },
    experiments=(
        Experiment(
            name="connection",
            control=Arm(
                partial(supervise, read="connection"),
                symptom(r"3 workers died in 3 ways, and their connections say the same: End of file"),
                because="the supervisor reads the end of the connection only",
                fidelity="stand-in",
                stands_for=SUPERVISOR,
            ),
            treatment=Arm(
                partial(supervise, read="worker-log"),
                completed(),
                because="what each worker wrote itself tells the three apart",
                fidelity="stand-in",
                stands_for=SUPERVISOR,
            ),
            world_size=1,
            needs=Needs(packages={}),
            expected_s=(0.5, 0.5),
        ),
    ),
    variants=(
        in_ray(
            "restarts",
            arm(
                partial(serve, dies=True),
                raised(r"The actor died unexpectedly before finishing this task"),
                because="the actor is restarted once and killed again: the cause is still there",
            ),
            arm(partial(serve, dies=False), completed(), because="nothing kills it"),
        ),
        in_ray(
            "worker-log",
            arm(
                partial(explain, read="exception"),
                symptom(r"the exception of an actor that got SIGSEGV names 3 causes and no line"),
                because="the exception in the driver is all that is read",
            ),
            arm(
                partial(explain, read="worker-log"),
                completed(),
                because="the log of the process with that pid has the signal and the line",
            ),
        ),
        in_ray(
            "retry",
            arm(
                partial(retry, max_retries=1),
                raised(r"because name 'global_pool_0' already exists"),
                because="the retry meets the placement group of the first attempt, and that is the error one sees",
            ),
            arm(
                partial(retry, max_retries=0),
                completed(),
                because="no retry: the error is that of the worker that died",
            ),
        ),
    ),
)

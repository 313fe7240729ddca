"""Ray reports every dead process in the same words; the reason for its death is in the log of that process."""

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
    """Three workers die in three ways; the supervisor reads only its connections to them, or their logs."""
    script = Path(ctx.path("worker.py"))
    script.write_text(WORKER)
    ctx.reached()
    reports: Dict[str, str] = {}
    for cause in ("killed", "crash", "no file"):
        log = Path(ctx.path(cause + ".err"))
        with log.open("w") as stream:
            worker = subprocess.Popen([sys.executable, str(script), cause], stdout=subprocess.PIPE, stderr=stream)
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"connected\n"
            end = worker.stdout.read()
            worker.wait()
        reports[cause] = log.read_text() if read == "worker-log" else "End of file" if not end else repr(end)
    ctx.note(reports=reports)
    if len(set(reports.values())) == 1:
        raise Symptom(f"3 workers died in 3 ways, and their connections show the same: {reports['crash']}")
    assert reports["killed"] == "", reports
    assert "Fatal Python error: Segmentation fault" in reports["crash"], reports
    assert "FileNotFoundError: no engine" in reports["no file"], reports


def isolate(ctx: Context) -> None:
    """Removes the Ray settings of the user, and puts Ray's files and its home directory in the folder of the arm."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    os.environ.update(HOME=str(ctx.dir), RAY_TMPDIR=str(ctx.dir), RAY_USAGE_STATS_ENABLED="0")
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))  # its ports are open to the network


@contextmanager
def cluster(ctx: Context) -> Iterator[Any]:
    """A Ray cluster on this machine only."""
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
    """Calls an actor that Ray may restart; with `dies`, each call kills the process of the actor."""
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
    """An actor crashes; `read` says whether the job reads the exception or the log of the actor's process."""
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
    """A main task creates a named placement group, as that of verl does, and then is killed."""
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


# --- the check: what do the logs of the last Ray session on this node show? --------------------------------------

ANY_ERROR = r"^\w[\w.]*(?:Error|Exception): .*"  # the program may have caught it
CAUSES = (
    ("raylet.out", r"[1-9]\d* Workers .*due to memory pressure|running low on memory"),
    ("worker-*.err", r"Fatal Python error: .*|\*\*\* SIG(?!TERM)\w+ received|Resource temporarily unavailable"),
    ("worker-*.err", r"Watchdog caught collective operation timeout.*|CUDA out of memory.*|OutOfMemoryError.*"),
    ("worker-*.err", ANY_ERROR),
)
NEWEST, TAIL = 60, 1 << 16  # the newest files that the check reads, and how many bytes at the end of each


def check(params: Mapping[str, Any]) -> Finding:
    """Do the logs of the last Ray session on this node name the cause of a dead process?"""
    folder = params["logs"] or default_folder()
    if not os.path.isdir(folder):
        return unknown(
            f"{folder} does not exist on this node, or kb cannot read it",
            advice="run this on the node that `ip:` names in the error, or --set logs=FOLDER",
        )
    evidence: List[str] = []
    other: List[str] = []
    read = 0
    for pattern, cause in CAUSES:
        try:
            files = sorted(filter(Path.is_file, folder.glob(pattern)), key=lambda f: f.stat().st_mtime)[-NEWEST:][::-1]
            read += len(files)
            (other if cause == ANY_ERROR else evidence).extend(line for file in files for line in matches(file, cause))
        except OSError as error:
            return unknown(f"{folder} cannot be read: {error.strerror}")
    if evidence:
        return exposed(*dict.fromkeys(evidence[:8]), advice="look up the earliest of these errors")
    silent = "a killed worker writes nothing: read journalctl -k, or the events of the pod"
    if other:
        return unknown(*dict.fromkeys(other[:8]), "the program may have caught these errors", silent)
    return unknown(f"{read} log files in {folder} name no cause", silent)


def default_folder() -> Path:
    """The first existing folder of those that Ray may use; the TMPDIR of a check is a folder in the user's TMPDIR."""
    temporary = Path(os.environ.get("TMPDIR") or "/tmp")
    parents = (Path(os.environ.get("RAY_TMPDIR") or temporary), temporary, temporary.parent, Path("/tmp"))
    folders = [parent / "ray" / "session_latest" / "logs" for parent in parents]
    return next((folder for folder in folders if os.path.isdir(folder)), folders[-1])


def matches(file: Path, cause: str) -> Iterator[str]:
    """The first match of `cause` in the end of the file."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - TAIL))
        text = stream.read().decode("utf-8", "replace")
    match = re.search(cause, text, re.MULTILINE)
    if match:
        yield f"{file.name}: {match.group()[:160]}"


SUPERVISOR = "Ray's supervisor of a worker; a parent process with a pipe to its child takes its place"


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
        "logs": Param(
            "path", "folder with the logs of a Ray session on this node (default: session_latest/logs in Ray's folder)"
        )
    },
    experiments=(
        Experiment(
            name="connection",
            control=Arm(
                partial(supervise, read="connection"),
                symptom(r"3 workers died in 3 ways, and their connections show the same: End of file"),
                because="the supervisor only sees that each connection ends",
                fidelity="stand-in",
                stands_for=SUPERVISOR,
            ),
            treatment=Arm(
                partial(supervise, read="worker-log"),
                completed(),
                because="the log of each worker shows how it died",
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
                because="Ray restarts the actor once, and the same cause kills it again",
            ),
            arm(partial(serve, dies=False), completed(), because="nothing kills the actor"),
        ),
        in_ray(
            "worker-log",
            arm(
                partial(explain, read="exception"),
                symptom(r"the exception of an actor that got SIGSEGV names 3 causes and no line"),
                because="the job reads only the exception in the driver",
            ),
            arm(
                partial(explain, read="worker-log"),
                completed(),
                because="the log of the process with that pid contains the signal and the line",
            ),
        ),
        in_ray(
            "retry",
            arm(
                partial(retry, max_retries=1),
                raised(r"because name 'global_pool_0' already exists"),
                because="the retry finds the placement group of the first attempt, and Ray reports only that error",
            ),
            arm(
                partial(retry, max_retries=0),
                completed(),
                because="Ray does not retry, so it reports the error of the worker that died",
            ),
        ),
    ),
)

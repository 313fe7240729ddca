"""An experiment tracker blocks training: its server does not answer, it asks for a key, or its finish waits."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Optional

from kb.probe import (
    GLOO_TIMEOUT,
    NCCL2_TIMEOUT,
    Arm,
    Context,
    Expect,
    Experiment,
    Needs,
    Probe,
    Symptom,
    completed,
    raised,
    symptom,
)

STEPS = 3
PROJECT = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
BUCKET = {"id": "r", "name": "r", "displayName": "r", "config": "{}", "historyLineCount": 0, "project": PROJECT}
VIEWER = {"id": "u", "username": "u", "entity": "e", "flags": "{}", "email": "", "teams": {"edges": []}}
ANSWERS = {"UpsertBucket": {"upsertBucket": {"bucket": BUCKET, "inserted": True}}, "query Viewer": {"viewer": VIEWER}}


@contextlib.contextmanager
def serve(swallows: str) -> Iterator[str]:
    """A tracking server on this machine that never answers a request containing `swallows`."""
    closed = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = self.path + " " + body.decode(errors="replace")
            if swallows in request:
                closed.wait(60)
                return
            known = [{"data": data} for name, data in ANSWERS.items() if name in request]
            answer = json.dumps(known[0] if known else {"errors": [{"message": "unknown"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_PUT = do_POST  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield "http://127.0.0.1:%d" % server.server_port
    finally:
        closed.set()
        server.shutdown()
        server.server_close()


def send(url: str, step: int, loss: float) -> None:
    """Sends a request as a client without a time limit does."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(url + "/log", json.dumps({"step": step, "loss": loss}).encode()).read()


def train(ctx: Context, *, tracks: str) -> None:
    """Each step does an all-reduce, after which rank 0 logs the loss."""
    import torch

    dist = ctx.init_process_group(timeout_s=6.0 if ctx.backend == "nccl" else 1.5)
    offline = Path(ctx.path("metrics.jsonl"))
    with serve(swallows="/log") as url:

        def log(step: int, loss: float) -> None:
            if tracks == "offline":
                with offline.open("a") as file:
                    file.write(json.dumps({"step": step, "loss": loss}) + "\n")
            else:
                send(url, step, loss)

        ctx.reached()
        for step in range(STEPS):
            loss = torch.ones(1, device=ctx.device)
            dist.all_reduce(loss)
            assert loss.item() == ctx.world_size
            if dist.get_rank() == 0:
                log(step, loss.item())
        ctx.meet("trained")
    if tracks == "offline" and ctx.rank == 0:
        steps = [json.loads(line)["step"] for line in offline.read_text().splitlines()]
        assert steps == list(range(STEPS)), steps


def isolate(ctx: Context, url: str) -> None:
    """Removes the user's settings and key, puts every file into the folder of the arm, and blocks other hosts."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        del os.environ[name]
    for name in ("HOME", "WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        os.environ[name] = str(ctx.dir)
    os.environ.update(WANDB_BASE_URL=url, WANDB_ERROR_REPORTING="false", WANDB__DISABLE_STATS="true")
    os.environ.update(HTTPS_PROXY="http://127.0.0.1:9", NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")


def start_wandb(ctx: Context, *, mode: str = "online", falls_back: bool = False) -> None:
    """The server accepts the request of `wandb.init` and never answers it."""
    with serve(swallows="UpsertBucket") as url:
        isolate(ctx, url)
        os.environ.update(WANDB_API_KEY="x" * 40, WANDB_INIT_TIMEOUT="2", WANDB_MODE=mode)
        import wandb  # type: ignore[import-not-found]

        ctx.reached()
        if falls_back:
            try:
                run = wandb.init(project="p")
            except wandb.errors.CommError:
                run = wandb.init(project="p", mode="offline")
        else:
            run = wandb.init(project="p")
        run.log({"loss": 1.0})
        run.finish()
        assert list(Path(ctx.path("wandb")).glob("offline-run-*/*.wandb")), os.listdir(ctx.path("wandb"))


def finish_wandb(ctx: Context, *, finish_timeout: Optional[str]) -> None:
    """The server answers `wandb.init`, and never answers the upload of the run's data."""
    with serve(swallows="file_stream") as url:
        isolate(ctx, url)
        os.environ.update(WANDB_API_KEY="x" * 40, WANDB_MODE="online")
        if finish_timeout:
            os.environ["WANDB_FINISH_TIMEOUT"] = finish_timeout
        import wandb

        run = wandb.init(project="p")
        ctx.reached()
        started = time.monotonic()
        for step in range(1000):
            run.log({"loss": step})
        ctx.note(log_s=round(time.monotonic() - started, 2))
        assert time.monotonic() - started < 3, "the log calls waited"
        finishing = threading.Thread(target=run.finish, daemon=True)
        finishing.start()
        finishing.join(3)
        if finishing.is_alive():
            raise Symptom("1000 log calls took %.1f s, and finish has been waiting for 3 s" % ctx.facts["log_s"])
        assert list(Path(ctx.path("wandb")).glob("run-*/*.wandb")), os.listdir(ctx.path("wandb"))


def ask_for_key(ctx: Context, *, mode: str) -> None:
    """There is no key, and nobody looks at the terminal: `docker run -t`, tmux, `srun --pty`."""
    import pty

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens on this port
        isolate(ctx, "http://127.0.0.1:%d" % taken.getsockname()[1])
        os.environ.update(WANDB_MODE=mode, TERM="xterm")
        script = "import wandb; run = wandb.init(project='p'); run.log({'loss': 1}); run.finish(); print('trained')"
        ours, theirs = pty.openpty()
        command = [sys.executable, "-c", script]
        ctx.reached()
        job = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        output = b""
        try:
            with contextlib.suppress(OSError):  # the terminal ends with the job
                while b"Enter your choice" not in output:
                    output += os.read(ours, 4096)
                time.sleep(1)
                if job.poll() is None:
                    raise Symptom("wandb.init has been waiting for 1 s after: %s" % output.decode()[-20:].strip())
            assert b"trained" in output, output.decode()
        finally:
            job.kill()
            job.wait()
            os.close(ours)


LOCAL = "the tracking server and the network; a server on this machine does not answer"
CLIENT = "the tracker; a plain HTTP request without a time limit goes to a server on this machine"


def pair(
    name: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    expect: Expect,
    because: str,
    fix: str,
    packages: Mapping[str, str],
    stands_for: str = LOCAL,
    ranks: int = 1,
) -> Experiment:
    control = Arm(fails, expect, because, "stand-in", stands_for)
    treatment = Arm(works, completed(), fix, "stand-in", stands_for)
    needs = Needs(packages=packages)
    return Experiment(name, control, treatment, ranks, needs=needs, deadline_s=40, expected_s=(3.0, 2.0))


TORCH, WANDB = {"torch": ">=2.1"}, {"wandb": ">=0.19.5"}
INIT_TIMEOUT = raised(r"Timed out (initializing run|while retrying): |Run initialization has timed out after 2\.0 sec")
WAITS = "rank 0 waits in a log call for a server that does not answer, and rank 1 waits for rank 0"
OFFLINE = "with WANDB_MODE=offline, wandb only writes files"


def logs(name: str, tracks: str, fix: str) -> Experiment:
    """The control arm logs to the server, the treatment arm as `tracks` says."""
    control, treatment = partial(train, tracks="online"), partial(train, tracks=tracks)
    return pair(name, control, treatment, raised(GLOO_TIMEOUT), WAITS, fix, TORCH, CLIENT, 2)


gloo = logs("log", "offline", "rank 0 writes its metrics to a file")
variants: List[Experiment] = [
    pair(
        "wandb-init",
        partial(start_wandb, mode="online"),
        partial(start_wandb, mode="offline"),
        INIT_TIMEOUT,
        "the server does not answer wandb.init, which raises an error after init_timeout",
        OFFLINE,
        WANDB,
    ),
    pair(
        "wandb-fall-back",
        start_wandb,
        partial(start_wandb, falls_back=True),
        INIT_TIMEOUT,
        "wandb.init raises an exception, which ends the job",
        "the job catches the exception of wandb.init and continues offline",
        {"wandb": ">=0.28.2"},
    ),
    pair(
        "wandb-finish",
        partial(finish_wandb, finish_timeout=None),
        partial(finish_wandb, finish_timeout="1"),
        symptom(r"1000 log calls took \d\.\d s, and finish has been waiting for 3 s"),
        "the server stops answering after the start, and finish waits for the upload without a limit",
        "WANDB_FINISH_TIMEOUT=1 ends the wait of finish",
        {"wandb": ">=0.27"},
    ),
    pair(
        "wandb-prompt",
        partial(ask_for_key, mode="online"),
        partial(ask_for_key, mode="offline"),
        symptom(r"wandb\.init has been waiting for 1 s after: .*Enter your choice"),
        "wandb has no key and finds a terminal, so it asks for a key and waits",
        OFFLINE,
        WANDB,
    ),
]

probe = Probe(
    experiments=(
        gloo.on_gpus(
            expect=raised(
                rf"Watchdog caught collective operation timeout: WorkNCCL\(.*OpType=ALLREDUCE|{NCCL2_TIMEOUT}"
            ),
            expected_s=(20.0, 10.0),
            settle_s=5,
        ),
        gloo,
    ),
    variants=tuple(variants),
)

"""A trainer sends weights to an inference engine that fails, expects other tensors, or has not joined the group."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Tuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from kb.probe import (
    GLOO_TIMEOUT,
    NCCL2_TIMEOUT,
    Arm,
    Context,
    Experiment,
    Finding,
    Param,
    Probe,
    completed,
    exposed,
    raised,
    unknown,
)

TRAINER, ENGINE = 0, 1  # the ranks of the group for weight updates
Metadata = List[Tuple[str, str, List[int]]]


@contextmanager
def serve(ctx: Context, receive: Callable[[Metadata], None]) -> Iterator[None]:
    """The HTTP server of the engine, which answers 200 once all weights have arrived, or 500 with its traceback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, text = 200, "updated"
            try:
                receive(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            except Exception:
                status, text = 500, traceback.format_exc()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Path(ctx.path("url")).write_text("http://127.0.0.1:%d/update_weights" % server.server_port)
    yield
    server.shutdown()


def post(ctx: Context, metadata: Metadata) -> str:
    request = Request(Path(ctx.path("url")).read_text(), json.dumps(metadata).encode())
    try:
        return str(build_opener(ProxyHandler({})).open(request, timeout=30).read().decode())
    except HTTPError as error:
        raise RuntimeError("HTTP %d from the engine: %s" % (error.code, error.read().decode())) from None


def run_engine(ctx: Context, dist: Any) -> None:
    """Receives the tensors that the request announces, and refuses every dtype but float32."""
    import torch

    weights: Dict[str, Any] = {}

    def receive(metadata: Metadata) -> None:
        for name, dtype, shape in metadata:
            assert dtype == "float32", "mismatch dtype: src %s, dst float32" % dtype
            weights[name] = torch.empty(shape, device=ctx.device)
            dist.broadcast(weights[name], src=TRAINER)
            weights[name].sum().item()

    with serve(ctx, receive):
        ctx.reached()
        assert ctx.meet("updated", timeout_s=15)
    assert all(weight.eq(1).all().item() for weight in weights.values())


def update(
    ctx: Context,
    *,
    dtype: str = "float32",
    announced: str = "parameters",
    answer: str = "afterwards",
    timeout_s: float = 1.5,
) -> None:
    """One update. `announced` is the source of the metadata, `answer` is when the trainer reads the engine's answer."""
    dist = ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else timeout_s)
    if ctx.rank == ENGINE:
        run_engine(ctx, dist)
        return
    model = build_model(ctx, dtype)
    tensors = [(name, parameter.data) for name, parameter in model.named_parameters()]
    named = tensors if announced == "parameters" else list(model.state_dict().items())
    metadata = [(name, str(tensor.dtype).replace("torch.", ""), list(tensor.shape)) for name, tensor in named]
    ctx.reached()
    with ThreadPoolExecutor(max_workers=1) as executor:
        send([tensor for _, tensor in tensors], executor.submit(post, ctx, metadata), answer)
    ctx.meet("updated")


def build_model(ctx: Context, dtype: str) -> Any:
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    model[2].weight = model[1].weight  # tied: two names in the state dict, one parameter
    return model.to(ctx.device, getattr(torch, dtype))


def send(weights: List[Any], response: Future[str], answer: str) -> None:
    import torch.distributed as dist

    if answer == "while sending":
        try:
            broadcast(weights, response)
        except RuntimeError as error:
            assert "mismatch dtype: src bfloat16, dst float32" in str(error), error
    elif answer == "after each weight":
        for weight in weights:
            broadcast([weight], response)
    else:
        for weight in weights:
            dist.broadcast(weight, src=TRAINER)
            weight.sum().item()  # waits for the GPU
        assert response.result() == "updated"


def broadcast(weights: List[Any], response: Future[str]) -> None:
    """Sends the weights with the code that the entry prints."""
    import torch.distributed as dist

    update_group = dist.group.WORLD  # trainer and engine, because the trainer of the probe is a single process
    for weight in weights:
        work = dist.broadcast(weight, src=0, group=update_group, async_op=True)
        while not work.is_completed():
            if response.done():
                response.result()  # raises the engine's error
            time.sleep(0.001)
        work.wait()
    response.result()


def join(ctx: Context, *, world_size: int = 2, port: str = "open") -> None:
    """Joins the group's store, which the trainer hosts, as one of `world_size`; `port` is where the engine looks."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    if ctx.rank == TRAINER:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            Path(ctx.path("port")).write_text(str(free.getsockname()[1]))
    other = socket.socket()
    other.bind(("127.0.0.1", 0))  # bound but not listening, like a port that a container does not publish
    ctx.reached()
    is_host, number = ctx.rank == TRAINER, int(Path(ctx.path("port")).read_text())
    if not is_host and port == "closed":
        number = other.getsockname()[1]
    seconds = 6 if is_host == (port == "closed") else 1  # the rank that waits in vain gives up first
    store = TCPStore("127.0.0.1", number, world_size, is_host, timedelta(seconds=seconds))
    store.set("weights-%d" % ctx.rank, "here")
    store.wait(["weights-%d" % (1 - ctx.rank)])
    ctx.meet("joined")


def source_address(destination: str) -> str:
    """The address from which this machine would send to `destination`; connecting a UDP socket sends nothing."""
    try:
        family = socket.AF_INET6 if ":" in destination else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as sender:
            sender.connect((destination, 80))
            return str(sender.getsockname()[0])
    except OSError:
        return ""


def check(params: Mapping[str, Any]) -> Finding:
    """Which address would a vLLM trainer on this machine announce to its engine?"""
    server, variable = str(params["server"] or ""), os.environ.get("VLLM_HOST_IP", "")
    announced = variable or source_address("8.8.8.8") or source_address("2001:4860:4860::8888") or "0.0.0.0"
    evidence = [
        "on this machine vLLM would announce %s (%s)"
        % (announced, "from VLLM_HOST_IP" if variable else "from the default route")
    ]
    if not re.fullmatch(r"[\d.]+|[\da-fA-F:]+", server):
        advice = "on the trainer's machine run --set server=IP_OF_THE_ENGINE, an IP address, not a name"
        return unknown(*evidence, "no address of an engine was given", advice=advice)
    route = source_address(server)
    evidence.append("this machine reaches the engine at %s from %s" % (server, route or "no address"))
    if route in ("", server) or route.startswith("127.") or route == "::1":
        return unknown(*evidence, "the engine is on this machine, or this machine cannot reach it")
    if announced.startswith(("0.0.0.0", "127.")) or announced in ("::", "::1", "localhost"):
        advice = "export VLLM_HOST_IP=%s for the trainer" % (route or "ADDRESS")
        return exposed(
            *evidence,
            "an engine on another machine would connect to itself (AsyncGRPO; TRL 1.11 and newer)",
            advice=advice,
        )
    return unknown(*evidence, "kb cannot tell whether the engine can reach the announced address")


ENGINE_OF_THE_PROBE = "vLLM or SGLang, replaced by an HTTP server that receives the tensors that a request announces"
REFUSED = "the engine refuses bfloat16 and answers 500, while the trainer waits in a broadcast"
NCCL_TIMEOUT = raised(rf"Watchdog caught collective operation timeout: WorkNCCL\(.*OpType=BROADCAST|{NCCL2_TIMEOUT}")


def pair(name: str, job: Any, fixed: Mapping[str, Any], pattern: str, because: str, fix: str) -> Experiment:
    """`job` is the control arm; `fixed` has the arguments that the treatment arm changes."""
    stands_for = "" if job.func is join else ENGINE_OF_THE_PROBE
    fidelity = "stand-in" if stands_for else "cpu"
    return Experiment(
        name=name,
        control=Arm(job, raised(pattern), because, fidelity, stands_for),
        treatment=Arm(partial(job, **fixed), completed(), fix, fidelity, stands_for),
        settle_s=0.3,
        expected_s=(2.5, 0.5),
    )


MATCHES = "the trainer sends float32, which the engine expects"
mismatch = pair("dtype", partial(update, dtype="bfloat16"), {"dtype": "float32"}, GLOO_TIMEOUT, REFUSED, MATCHES)

probe = Probe(
    check=check,
    params={"server": Param("str", "IP address of the inference engine; run this on the trainer's machine")},
    experiments=(mismatch.on_gpus(expect=NCCL_TIMEOUT), mismatch),
    variants=(
        pair(
            "answer",
            partial(update, dtype="bfloat16", timeout_s=2.5),
            {"answer": "while sending"},
            GLOO_TIMEOUT,
            REFUSED + " with a longer timeout",
            "the trainer checks the answer while it sends, and sees the engine's error at once",
        ),
        pair(
            "one-request",
            partial(update, answer="after each weight"),
            {"answer": "while sending"},
            GLOO_TIMEOUT,
            "after the first weight the trainer waits for the answer, and the engine for the second weight",
            "the trainer waits for the answer only after the last weight",
        ),
        pair(
            "announced",
            partial(update, announced="state dict"),
            {"announced": "parameters"},
            GLOO_TIMEOUT,
            "the state dict names a tied weight twice, so the engine waits for a tensor that nobody sends",
            "the trainer announces the same list that it sends",
        ),
        pair(
            "world-size",
            partial(join, world_size=3),
            {"world_size": 2},
            r"Timed out after \d+ seconds waiting for clients\. 2/3 clients joined",
            "the trainer waits for one worker more than the engine has",
            "the trainer waits for the right number of workers",
        ),
        pair(
            "port",
            partial(join, port="closed"),
            {"port": "open"},
            r"client socket has (timed out|failed to connect)",
            "the engine connects to a port on which nobody listens",
            "the engine connects to the port of the trainer's store",
        ),
    ),
)

"""Ranks request files from a model hub that limits requests or is unreachable, or they read a local copy."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Iterator, List, Mapping
from unittest.mock import patch

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

REPO, COMMIT = "acme/base", "a" * 40
CONFIG = b'{"model_type": "bert"}'


class Hub:
    """A local server that answers `limit` requests and then returns 429.

    A `silent` hub never answers; a `bare` hub omits the header with the commit.
    """

    def __init__(self, content: bytes, limit: int, silent: bool = False, bare: bool = False) -> None:
        hub, self.requests, self.closed = self, [], threading.Event()  # type: ignore[var-annotated]

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.requests.append(self.path)
                if silent:
                    hub.closed.wait(20)
                    return
                is_allowed = len(hub.requests) <= limit
                self.send_response(200 if is_allowed else 429)
                if not bare:
                    self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", '"%s"' % COMMIT)
                self.send_header("Content-Length", str(len(content) if is_allowed else 0))
                self.end_headers()
                if is_allowed and self.command == "GET":
                    self.wfile.write(content)

            def do_GET(self) -> None:
                self.do_HEAD()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = "http://127.0.0.1:%d" % self.server.server_port


@contextlib.contextmanager
def serve(ctx: Context, content: bytes = CONFIG, limit: int = 0, **kind: bool) -> Iterator[Any]:
    """Runs a hub in rank 0 and points all ranks to it, without a proxy and with short waits between attempts."""
    hub, address = None, Path(ctx.path("address"))
    if ctx.rank == 0:
        hub = Hub(content, limit, **kind)
        address.write_text(hub.url)
    ctx.meet("served")
    os.environ.update(NO_PROXY="127.0.0.1", no_proxy="127.0.0.1", HF_ENDPOINT=address.read_text(), HF_HUB_OFFLINE="0")
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = os.environ["HF_HUB_DISABLE_UPDATE_CHECK"] = "1"
    sleep = time.sleep
    try:
        with patch("time.sleep", lambda seconds: sleep(min(seconds, 0.02))):
            yield hub
    finally:
        if hub:
            hub.closed.set()
            hub.server.shutdown()
            hub.server.server_close()


def fill_cache(ctx: Context) -> str:
    """Writes the files that a download of config.json leaves in the cache; returns the cache folder."""
    repo = Path(ctx.path("cache"), "models--" + REPO.replace("/", "--"))
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "snapshots" / COMMIT).mkdir(parents=True)
    (repo / "snapshots" / COMMIT / "config.json").write_bytes(CONFIG)
    return ctx.path("cache")


def share(ctx: Context, *, download: Callable[[str], None], load: Callable[[str], None], only_rank_0: bool) -> None:
    """Lets each rank download to its own folder, or with `only_rank_0` lets rank 0 fill a folder for all ranks."""
    dist = ctx.init_process_group(timeout_s=20)
    folder = ctx.path("shared" if only_rank_0 else "node-%d" % ctx.rank)
    ctx.reached()
    if only_rank_0:
        if dist.get_rank() == 0:
            download(folder)
        dist.barrier()
        load(folder)
    else:
        download(folder)
    ctx.meet("done")


def share_weights(ctx: Context, *, only_rank_0: bool) -> None:
    """Loads weights with torch.hub, as torchvision does; torch.hub sends no request for a file that it has."""
    import torch

    torch.save({"weight": torch.arange(4.0)}, ctx.path("published-%d.pt" % ctx.rank))
    content = Path(ctx.path("published-%d.pt" % ctx.rank)).read_bytes()

    def load(folder: str) -> None:
        url = os.environ["HF_ENDPOINT"] + "/weights.pt"
        state = torch.hub.load_state_dict_from_url(url, model_dir=folder, progress=False)
        assert state["weight"].tolist() == [0, 1, 2, 3]

    with serve(ctx, content, limit=1):
        share(ctx, download=load, load=load, only_rank_0=only_rank_0)


def share_model(ctx: Context, *, only_rank_0: bool) -> None:
    """Loads a file with huggingface_hub from a hub that answers one rank."""
    with serve(ctx, limit=2):  # one rank sends HEAD and GET
        from huggingface_hub import hf_hub_download  # type: ignore[import-not-found]

        def read(folder: str, **options: Any) -> None:
            assert Path(hf_hub_download(REPO, "config.json", cache_dir=folder, **options)).read_bytes() == CONFIG

        share(ctx, download=read, load=partial(read, local_files_only=True), only_rank_0=only_rank_0)


def use_mirror(ctx: Context, *, bare: bool) -> None:
    """Downloads a file from a mirror, which omits a header of the hub if `bare`."""
    with serve(ctx, limit=2, bare=bare):
        from huggingface_hub import hf_hub_download

        ctx.reached()
        path = hf_hub_download(REPO, "config.json", cache_dir=ctx.path("cache"))
        assert Path(path).read_bytes() == CONFIG


def load_weights(ctx: Context, *, copied: bool) -> None:
    """Loads weights with torch.hub while the server refuses connections; `copied` puts the file into its folder."""
    import socket

    import torch

    os.environ["no_proxy"] = "127.0.0.1"
    os.environ["TORCH_HOME"] = ctx.path("torch-home")
    folder = Path(torch.hub.get_dir(), "checkpoints")
    folder.mkdir(parents=True)
    if copied:
        torch.save({"weight": torch.arange(4.0)}, folder / "weights.pt")
    with socket.socket() as closed_port:
        closed_port.bind(("127.0.0.1", 0))  # it never listens
        ctx.reached()
        url = "http://127.0.0.1:%d/weights.pt" % closed_port.getsockname()[1]
        assert torch.hub.load_state_dict_from_url(url, progress=False)["weight"].tolist() == [0, 1, 2, 3]


def load_config(ctx: Context, *, from_folder: bool) -> None:
    """Loads a configuration with transformers while the hub answers every request with 429."""
    folder = Path(ctx.path("model"))
    folder.mkdir()
    (folder / "config.json").write_bytes(CONFIG)
    with serve(ctx) as hub:
        from transformers import AutoConfig  # type: ignore[import-not-found]

        ctx.reached()
        config = AutoConfig.from_pretrained(str(folder) if from_folder else REPO)
        assert config.model_type == "bert"
        assert not hub.requests, hub.requests


def load_rows(ctx: Context, *, from_folder: bool) -> None:
    """Loads rows with datasets while the hub answers every request with 429."""
    folder = Path(ctx.path("data"))
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    with serve(ctx) as hub:
        from datasets import load_dataset  # type: ignore[import-not-found]

        ctx.reached()
        rows = load_dataset(str(folder) if from_folder else "acme/data", split="train")
        assert rows["text"][:] == ["a", "b"]
        assert not hub.requests, hub.requests


def go_offline(ctx: Context, *, how: str) -> None:
    """Reads a cached file in an offline mode set as `how` says; raises Symptom if the hub gets a request."""
    cache = fill_cache(ctx)
    with serve(ctx) as hub:
        if how == "before the import":
            os.environ["HF_HUB_OFFLINE"] = "1"
        if how == "TRANSFORMERS_OFFLINE=1 with HF_HUB_OFFLINE=0":
            os.environ["TRANSFORMERS_OFFLINE"] = "1"
        from huggingface_hub import hf_hub_download

        if how == "after the import":
            os.environ["HF_HUB_OFFLINE"] = "1"
        ctx.reached()
        assert Path(hf_hub_download(REPO, "config.json", cache_dir=cache)).read_bytes() == CONFIG
        if hub.requests:
            raise Symptom("offline mode set %s: %d request for a file in the cache" % (how, len(hub.requests)))


def wait_for_firewall(ctx: Context, *, offline: str) -> None:
    """Reads a cached file while the hub never answers; raises Symptom if that takes more than 1.5 s."""
    cache = fill_cache(ctx)
    with serve(ctx, silent=True):
        os.environ.update(HF_HUB_OFFLINE=offline, HF_HUB_ETAG_TIMEOUT="2")
        from huggingface_hub import hf_hub_download

        ctx.reached()
        started = time.monotonic()
        assert Path(hf_hub_download(REPO, "config.json", cache_dir=cache)).read_bytes() == CONFIG
        seconds = time.monotonic() - started
        ctx.note(seconds=round(seconds, 2))
        if seconds > 1.5:
            raise Symptom("a file in the cache took %.1f s, HF_HUB_ETAG_TIMEOUT=2" % seconds)


def other_caches(folder: str, name: str, home: str) -> List[str]:
    """Lists folders outside the hub's cache where transformers 4 or datasets may have the repository."""
    old = ("TRANSFORMERS_CACHE", "PYTORCH_TRANSFORMERS_CACHE", "PYTORCH_PRETRAINED_BERT_CACHE")
    paths = [Path(os.environ[variable], folder) for variable in old if os.environ.get(variable)]
    if folder.startswith("dataset"):
        prepared = Path(os.environ.get("HF_DATASETS_CACHE") or os.path.join(os.path.expanduser(home), "datasets"))
        paths += [path for path in prepared.glob("*") if letters(path.name) == letters(name)]
    return [str(path) for path in paths if path.exists()]


def letters(name: str) -> str:
    """Reduces a name to its letters and digits."""
    return re.sub("[^a-z0-9]", "", name.lower())


def check(params: Mapping[str, Any]) -> Finding:
    """Does the cache of this user on this node hold the repository? Does not use the network."""
    if not params["repo"]:
        return unknown(
            "no repository was named", advice="run --set repo=org/model on a compute node, as the job's user"
        )
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    folder, name = Path(os.path.expandvars(os.path.expanduser(cache))), str(params["repo"])
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) or params["kind"] not in ("model", "dataset"):
        return unknown("%s is not the name of a repository, or %s is not a kind of repository" % (name, params["kind"]))
    if not folder.is_absolute() or "$" in str(folder):
        return unknown("the cache is %s, which depends on where and how the job starts" % folder)
    repo = folder / ("%ss--%s" % (params["kind"], name.replace("/", "--")))
    try:
        ref = repo / "refs" / "main"
        commit = ref.read_text().strip() if ref.exists() else ""
        for part in (repo, repo / "snapshots"):  # glob silently skips a folder that it may not read
            if part.exists():
                os.listdir(part)
        if not re.fullmatch("([0-9a-f]{40})?", commit):
            return unknown("%s does not hold a commit" % ref)
        files = [path for path in sorted(repo.glob("snapshots/%s/**/*" % (commit or "*")))[:5000] if not path.is_dir()]
        broken = [path.name for path in files if not path.exists()]
        others = other_caches(repo.name, name, home)
    except (OSError, ValueError) as error:
        return unknown("kb cannot read %s: %s" % (repo, error))
    evidence = ["the cache is %s" % folder, "it has %d files of %s" % (len(files), name)]
    if broken:
        return exposed(*evidence, "these links have no file: %s" % ", ".join(broken[:3]), advice="download them again")
    if not files and others:
        return unknown(*evidence, "but %s exists, and the job may use it" % others[0])
    if not files:
        why = "the job needs the hub for it, and fails in offline mode"
        advice = "run hf download where the hub is reachable, and pass the folder to the job"
        return exposed(*evidence, why, advice=advice)
    if not commit:
        return unknown(*evidence, "refs/main is missing, so the job must name the revision that was downloaded")
    advice = "set HF_HUB_OFFLINE=1 in the job, because otherwise it still asks the hub about each file"
    return unknown(*evidence, "kb cannot see whether the job requests other files", advice=advice)


SERVER = "the hub, its limit and its network; the probe uses a local server and short waits between attempts"


def pair(
    name: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    expect: Expect,
    because: str,
    fix: str,
    packages: Mapping[str, str] = MappingProxyType({}),
    ranks: int = 1,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(fails, expect, because, "stand-in", SERVER),
        treatment=Arm(works, completed(), fix, "stand-in", SERVER),
        world_size=ranks,
        needs=Needs(packages={"torch": ">=2.1", **packages}),
        deadline_s=60,
        expected_s=(2.0, 2.0),
    )


LIMITED = "each rank sends requests, and the hub answers only one rank"
FIRST = "rank 0 fills one folder, and the other rank reads it"
FOLDER = "the job loads from the path of a folder and sends no request"
HUB = {"huggingface_hub": ">=0.23"}
variants: List[Experiment] = [
    pair(
        "unreachable",
        partial(load_weights, copied=False),
        partial(load_weights, copied=True),
        raised(r"urlopen error \[Errno 111\] Connection refused"),
        "torch.hub sends a request to a host that refuses the connection",
        "the file is in TORCH_HOME/hub/checkpoints, so torch.hub sends no request",
    ),
    pair(
        "huggingface-hub",
        partial(share_model, only_rank_0=False),
        partial(share_model, only_rank_0=True),
        raised(r"An error happened while trying to locate the file on the Hub|429 (Client Error: )?Too Many Requests"),
        LIMITED,
        FIRST,
        HUB,
        2,
    ),
    pair(
        "transformers",
        partial(load_config, from_folder=False),
        partial(load_config, from_folder=True),
        raised(r"We couldn't connect to 'http://127\.0\.0\.1"),
        "the hub answers 429, but the error blames the connection",
        FOLDER,
        {"transformers": ">=4.40"},
    ),
    pair(
        "datasets",
        partial(load_rows, from_folder=False),
        partial(load_rows, from_folder=True),
        raised(r"Couldn't reach|An error happened while trying to locate|Too Many Requests"),
        "the hub answers 429",
        FOLDER,
        {"datasets": ">=2.19"},
    ),
    pair(
        "after-import",
        partial(go_offline, how="after the import"),
        partial(go_offline, how="before the import"),
        symptom(r"offline mode set after the import: \d request"),
        "HF_HUB_OFFLINE is set after the import of huggingface_hub",
        "HF_HUB_OFFLINE is set before the import",
        HUB,
    ),
    pair(
        "cancelled",
        partial(go_offline, how="TRANSFORMERS_OFFLINE=1 with HF_HUB_OFFLINE=0"),
        partial(go_offline, how="before the import"),
        symptom(r"HF_HUB_OFFLINE=0: \d request"),
        "HF_HUB_OFFLINE=0 cancels TRANSFORMERS_OFFLINE=1",
        "HF_HUB_OFFLINE is 1",
        HUB,
    ),
    pair(
        "headers",
        partial(use_mirror, bare=True),
        partial(use_mirror, bare=False),
        raised(r"An error happened while trying to locate the file|We also cannot find the requested files"),
        "the mirror returns the file without the header that names its commit",
        "the mirror returns all headers",
        HUB,
    ),
    pair(
        "firewall",
        partial(wait_for_firewall, offline="0"),
        partial(wait_for_firewall, offline="1"),
        symptom(r"a file in the cache took \d+\.\d s"),
        "the job asks the hub about a cached file, and no answer comes",
        "offline mode is on",
        HUB,
    ),
]

probe = Probe(
    check=check,
    params={
        "repo": Param("str", "the repository that the job loads, such as org/model"),
        "kind": Param("str", "model or dataset", "model"),
    },
    experiments=(
        pair(
            "torch-hub",
            partial(share_weights, only_rank_0=False),
            partial(share_weights, only_rank_0=True),
            raised(r"HTTP Error 429: Too Many Requests"),
            LIMITED,
            FIRST,
            ranks=2,
        ),
    ),
    variants=tuple(variants),
)

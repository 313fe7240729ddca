"""A training step that waits for storage: every request takes its time, whatever its size, and nobody computes."""

from __future__ import annotations

import http.client
import os
import random
import statistics
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler
from itertools import islice
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, Callable, Deque, Iterator, List, Mapping, Tuple

from kb.host import mount_of
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    completed,
    exposed,
    symptom,
    unknown,
)

ANSWER_S = 0.04  # of the storage, for one request
STEP_S = 0.02  # of the GPU
BYTES = 4096  # of a sample
BATCH, STEPS, ROUNDS = 4, 12, 3  # samples in a batch, steps in an epoch, epochs that are measured
SAMPLES = BATCH * STEPS
SHARD = 4 * BATCH  # samples that one request brings where they are read in sequence
SLOW = 1.6  # times the step of a batch that is there; a starved step is 3 to 4 times as long, a fed one 1.0 to 1.2

Unit = Tuple[int, int]  # the first sample of one request, and how many


class Storage(ThreadingTCPServer):  # an HTTPServer looks up its own name
    """Answers requests in the order in which they come, each after `ANSWER_S`, as many at once as it has disks."""

    daemon_threads = True
    request_queue_size = 64  # else connections that come together are dropped, and tried again after a second
    disks: ThreadPoolExecutor


class Request(BaseHTTPRequestHandler):
    """A range of the packed file, or the file of one sample, which has the same bytes."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def do_GET(self) -> None:
        first, count = (int(part) for part in self.path.split("/")[1:])
        self.server.disks.submit(time.sleep, ANSWER_S).result()  # type: ignore[attr-defined]
        body = b"".join(content(sample) for sample in range(first, first + count))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def content(sample: int) -> bytes:
    return sample.to_bytes(4, "big") * (BYTES // 4)


@contextmanager
def storage(at_once: int) -> Iterator[int]:
    """The port of a storage."""
    server = Storage(("127.0.0.1", 0), Request)
    server.disks = ThreadPoolExecutor(at_once)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        server.disks.shutdown()


class Remote:
    """A client with one connection per reader."""

    def __init__(self, port: int) -> None:
        self.port, self.own = port, threading.local()

    def read(self, unit: Unit) -> bytes:
        if not hasattr(self.own, "connection"):
            self.own.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        self.own.connection.request("GET", "/%d/%d" % unit)
        body: bytes = self.own.connection.getresponse().read()
        return body


class Local:
    """The same samples as files on the local disk, copied there in few requests before the first step."""

    def __init__(self, remote: Remote, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for first in range(0, SAMPLES, SHARD):
            body = remote.read((first, SHARD))
            for number in range(SHARD):
                (folder / str(first + number)).write_bytes(body[number * BYTES : (number + 1) * BYTES])

    def read(self, unit: Unit) -> bytes:
        return b"".join((self.folder / str(sample)).read_bytes() for sample in range(unit[0], sum(unit)))


def epoch(read: Callable[[Unit], bytes], in_sequence: bool, readers: int, ahead: int) -> Iterator[List[int]]:
    """Batches in random order: of all samples, or of shards and inside each shard; each reader has `ahead` to do."""
    size = SHARD if in_sequence else 1
    units = [(first, size) for first in range(0, SAMPLES, size)]
    random.shuffle(units)
    samples = _samples(read, units, readers, ahead)
    return iter(lambda: list(islice(samples, BATCH)), [])


def _samples(read: Callable[[Unit], bytes], units: List[Unit], readers: int, ahead: int) -> Iterator[int]:
    def opened(unit: Unit) -> List[int]:
        body = read(unit)
        found = [int.from_bytes(body[start : start + 4], "big") for start in range(0, len(body), BYTES)]
        random.shuffle(found)
        return found

    asked: Deque[Future[List[int]]] = deque()
    with ThreadPoolExecutor(readers) as pool:
        for unit in units:
            asked.append(pool.submit(opened, unit))
            if len(asked) > ahead * readers:
                yield from asked.popleft().result()
        while asked:
            yield from asked.popleft().result()


def seconds_per_step(batches: Iterator[List[int]]) -> float:
    """Without the first batch, for which every loader has to wait."""
    next(batches)
    steps, start = 0, time.perf_counter()
    for _ in batches:
        time.sleep(STEP_S)
        steps += 1
    return (time.perf_counter() - start) / steps


def train(
    ctx: Context,
    *,
    in_sequence: bool = False,
    readers: int = 2,
    ahead: int = 4,
    at_once: int = 64,
    copied: bool = False,
) -> None:
    """Epochs over the storage and over one batch in turn; the best of each counts, as a busy machine is no symptom."""
    seen: List[int] = []
    rounds: List[Tuple[float, float]] = []
    idle: List[float] = []
    with storage(at_once) as port:
        source: Any = Remote(port)
        if copied:
            source = Local(source, Path(ctx.path("local")))
        ctx.reached()
        for _ in range(ROUNDS):
            there = seconds_per_step(iter([[0] * BATCH] * STEPS))
            began, computed = time.perf_counter(), time.process_time()
            loaded = seconds_per_step(_noted(epoch(source.read, in_sequence, readers, ahead), seen))
            idle.append(1 - (time.process_time() - computed) / (time.perf_counter() - began))
            rounds.append((loaded, there))
    assert sorted(seen) == sorted(list(range(SAMPLES)) * ROUNDS), "each sample once in every epoch"
    ctx.note(ms_per_step=[[round(1000 * seconds, 1) for seconds in pair] for pair in rounds], idle=idle)
    ratio = min(loaded for loaded, _ in rounds) / min(there for _, there in rounds)
    if ratio > SLOW:
        message = "a step takes %.1f times as long as with a batch that is already there, CPU idle for %d %% of it"
        raise Symptom(message % (ratio, 100 * max(idle)))


def _noted(batches: Iterator[List[int]], seen: List[int]) -> Iterator[List[int]]:
    for batch in batches:
        seen.extend(batch)
        yield batch


# --- the check: the file system of the data, and some reads --------------------------------------------------------

REMOTE = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "v9fs", "glusterfs", "afs", "wekafs")
READS, READ_S, PIECE = 100, 0.6, 1 << 17  # most reads, their time together, bytes of one
PER_READ_S = 0.005  # a reader with more than this gets less than 200 samples per second
SHARDS = 1 << 24  # bytes of a file that holds many samples: how long its first bytes take says little


class Look:
    """What a thread has found so far: it stays behind where a server does not answer."""

    def __init__(self) -> None:
        self.place = "a file system that does not answer"
        self.times: List[float] = []
        self.sizes: List[int] = []
        self.one_file = False

    def read_some(self, path: str, end: float) -> None:
        """Files of a folder from several places in it, or places in one file."""
        self.place = file_system(path)
        self.one_file = os.path.isfile(path)
        places = iter([path] * READS) if self.one_file else _files(path, end)
        for file in islice(places, READS):
            try:
                start = time.perf_counter()
                with open(file, "rb", buffering=0) as stream:
                    size = os.fstat(stream.fileno()).st_size
                    if self.one_file and size > PIECE:
                        stream.seek(random.randrange(size - PIECE))
                    found = len(stream.read(4096 if self.one_file else PIECE) or b"")
            except (OSError, ValueError):
                continue
            if found:
                self.times.append(time.perf_counter() - start)
                self.sizes.append(size)
            if time.monotonic() > end:
                return


def check(params: Mapping[str, Any]) -> Finding:
    """Where the data are, how large their files, how long a read takes now; what was read before comes from memory."""
    evidence = ["the Python environment is on %s" % file_system(sys.prefix)]
    if params["path"] is None:
        return unknown(*evidence, "the folder of the data is not known", advice="--set path=/folder/with/the/data")
    path, look = str(params["path"]), Look()
    reader = threading.Thread(target=look.read_some, args=(path, time.monotonic() + READ_S), daemon=True)
    reader.start()
    reader.join(READ_S + 0.15)
    times, sizes = list(look.times), list(look.sizes)
    evidence.append("%s is on %s" % (ascii(path), look.place))
    if not times or not sizes:
        late = "no read has ended within %.1f s" % READ_S
        return unknown(*evidence, late if reader.is_alive() else "nothing there could be read", advice="another path")
    middle = statistics.median(times)
    found = (len(times), 1e3 * middle, 1e3 * max(times), statistics.median(sizes) / 1024)
    evidence.append("%d reads, %.1f ms in the middle and %.1f at most; half of the files have up to %.0f KiB" % found)
    if not look.one_file and statistics.median(sizes) > SHARDS:
        why = "the first bytes of large files do not tell how fast the rest comes"
        return unknown(*evidence, why, advice="name one file, for reads at random places in it")
    if middle > PER_READ_S:
        evidence.append("one reader gets %.0f of them per second" % (1 / middle))
        return exposed(*evidence, advice="read in sequence from large files, or copy to a local disk: see `Fix`")
    return unknown(*evidence, "the page cache may have answered", advice="name a part of the data that nobody has read")


def _files(folder: str, end: float) -> Iterator[str]:
    """Files below a folder, a few of each of its folders."""
    folders = [folder]
    while folders and time.monotonic() < end:
        try:
            with os.scandir(folders.pop(random.randrange(len(folders)))) as found:
                entries = list(islice(found, 1000))
            folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
            files = random.sample(entries, min(len(entries), 40))
            yield from [entry.path for entry in files if entry.is_file()][:20]
        except (OSError, ValueError):
            continue


def file_system(path: str) -> str:
    """Its type and source in words."""
    kind, source = mount_of(path)
    if not kind:
        return "an unknown file system"
    remote = kind in REMOTE or kind.startswith("fuse")
    return "%s of %s%s" % (kind, ascii(source), ", behind a network or a server process" if remote else "")


# --- the experiments -----------------------------------------------------------------------------------------------

SYMPTOM = symptom(
    r"a step takes (1\.[6-9]|[2-9]|\d\d)\S* times as long as with a batch that is already there, "
    r"CPU idle for [6-9]\d % of it"
)
STORE = "NFS, Lustre or an object store, by a server that answers after 40 ms; the GPU, by a wait of 20 ms"


def experiment(name: str, fails: Any, works: Any, because: str, fix: str) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(fails, SYMPTOM, because=because, fidelity="stand-in", stands_for=STORE),
        treatment=Arm(works, completed(), because=fix, fidelity="stand-in", stands_for=STORE),
        needs=Needs(packages={}),
        world_size=1,
        deadline_s=60,
        expected_s=(5.0, 2.5),
    )


IN_SEQUENCE = partial(train, in_sequence=True)
probe = Probe(
    check=check,
    params={"path": Param("path", "the folder with the data, or one large file of them")},
    experiments=(
        experiment(
            "files",
            train,
            IN_SEQUENCE,
            because="a request for each sample: two readers wait for 80 ms per batch and nobody computes",
            fix="the same bytes in shards, a request for each: shuffled order of shards, shuffled inside each",
        ),
    ),
    variants=(
        experiment(
            "copy",
            train,
            partial(train, copied=True),
            because="every sample of every epoch comes from the storage",
            fix="the samples were copied to the local disk before the first step",
        ),
        experiment(
            "readers",
            partial(train, ahead=24),
            partial(train, ahead=24, readers=16),
            because="two readers that may read a whole epoch ahead, and each waits for its one request",
            fix="sixteen readers wait at the same time, and the storage answers them together",
        ),
        experiment(
            "limit",
            partial(train, readers=16, at_once=2),
            partial(train, readers=16, at_once=2, in_sequence=True),
            because="sixteen readers ask a storage that answers two requests at a time",
            fix="the same readers and storage, and a sixteenth of the requests",
        ),
    ),
)

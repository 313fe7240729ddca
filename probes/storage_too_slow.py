"""A training step waits for storage: every request takes 40 ms whatever its size, and meanwhile nothing computes."""

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

ANSWER_S = 0.04  # how long the storage takes for one request
STEP_S = 0.02  # how long the GPU takes for one step
BYTES = 4096  # size of a sample
BATCH, STEPS, ROUNDS = 4, 12, 3  # samples in a batch, steps in an epoch, measured epochs
SAMPLES = BATCH * STEPS
SHARD = 4 * BATCH  # samples that one request returns when the job reads in sequence
SLOW = (
    1.6  # times a step whose batch is ready; a step that waits for storage takes 3 to 4 times as long, others 1 to 1.2
)

Unit = Tuple[int, int]  # the first sample of one request, and the number of samples


class Storage(ThreadingTCPServer):  # not an HTTPServer, which looks up the host's name
    """Answers requests in their order, each after `ANSWER_S`; it works on as many at once as it has disks."""

    daemon_threads = True
    request_queue_size = 64  # otherwise the kernel drops simultaneous connections, and clients retry after a second
    disks: ThreadPoolExecutor


class Request(BaseHTTPRequestHandler):
    """Reads a range of the packed file, or the file of one sample, which has the same bytes."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # sends header and body in one packet

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
    """Starts a storage and yields its port."""
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
    """A client with one connection per reader thread."""

    def __init__(self, port: int) -> None:
        self.port, self.thread = port, threading.local()

    def read(self, unit: Unit) -> bytes:
        if not hasattr(self.thread, "connection"):
            self.thread.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        self.thread.connection.request("GET", "/%d/%d" % unit)
        body: bytes = self.thread.connection.getresponse().read()
        return body


class Local:
    """The same samples as files on the local disk, copied there with few requests before the first step."""

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
    """One epoch of batches. Shuffles all samples, or the shards and the samples inside each shard.

    Each reader may have `ahead` requests outstanding.
    """
    size = SHARD if in_sequence else 1
    units = [(first, size) for first in range(0, SAMPLES, size)]
    random.shuffle(units)
    samples = _samples(read, units, readers, ahead)
    return iter(lambda: list(islice(samples, BATCH)), [])


def _samples(read: Callable[[Unit], bytes], units: List[Unit], readers: int, ahead: int) -> Iterator[int]:
    def read_unit(unit: Unit) -> List[int]:
        body = read(unit)
        samples = [int.from_bytes(body[start : start + 4], "big") for start in range(0, len(body), BYTES)]
        random.shuffle(samples)
        return samples

    requests: Deque[Future[List[int]]] = deque()
    with ThreadPoolExecutor(readers) as pool:
        for unit in units:
            requests.append(pool.submit(read_unit, unit))
            if len(requests) > ahead * readers:
                yield from requests.popleft().result()
        while requests:
            yield from requests.popleft().result()


def seconds_per_step(batches: Iterator[List[int]]) -> float:
    """The mean time of a step, without the first batch, for which every loader has to wait."""
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
    """Measures in turn an epoch from the storage and one whose batch is ready, and compares the best of each.

    The best counts because a busy machine is not the incident.
    """
    seen: List[int] = []
    rounds: List[Tuple[float, float]] = []
    idle: List[float] = []
    with storage(at_once) as port:
        source: Any = Remote(port)
        if copied:
            source = Local(source, Path(ctx.path("local")))
        ctx.reached()
        for _ in range(ROUNDS):
            ready = seconds_per_step(iter([[0] * BATCH] * STEPS))
            began, computed = time.perf_counter(), time.process_time()
            loaded = seconds_per_step(_noted(epoch(source.read, in_sequence, readers, ahead), seen))
            idle.append(1 - (time.process_time() - computed) / (time.perf_counter() - began))
            rounds.append((loaded, ready))
    assert sorted(seen) == sorted(list(range(SAMPLES)) * ROUNDS), "an epoch did not read each sample exactly once"
    ctx.note(ms_per_step=[[round(1000 * seconds, 1) for seconds in pair] for pair in rounds], idle=idle)
    ratio = min(loaded for loaded, _ in rounds) / min(ready for _, ready in rounds)
    if ratio > SLOW:
        message = "a step takes %.1f times as long as with a batch that is already there, CPU idle for %d %% of it"
        raise Symptom(message % (ratio, 100 * max(idle)))


def _noted(batches: Iterator[List[int]], seen: List[int]) -> Iterator[List[int]]:
    for batch in batches:
        seen.extend(batch)
        yield batch


# --- the check: the file system of the dataset, and some reads -----------------------------------------------------

REMOTE = (
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "9p",
    "v9fs",
    "virtiofs",
    "glusterfs",
    "afs",
    "wekafs",
)
READS, READ_S, PIECE = 100, 0.6, 1 << 17  # limits: number of reads, their total time, bytes per read
PER_READ_S = 0.005  # a reader with slower reads gets fewer than 200 samples per second
SHARDS = 1 << 24  # a file of this many bytes holds many samples, so the time of its first bytes says little


class Measurement:
    """What a thread has measured so far. The thread blocks for as long as a file server does not answer."""

    def __init__(self) -> None:
        self.file_system = "a file system that does not answer"
        self.times: List[float] = []
        self.sizes: List[int] = []
        self.one_file = False

    def read_some(self, path: str, end: float) -> None:
        """Reads files from several subfolders, or random places of a single file."""
        self.file_system = file_system(path)
        self.one_file = os.path.isfile(path)
        places = iter([path] * READS) if self.one_file else _files(path, end)
        for file in islice(places, READS):
            try:
                start = time.perf_counter()
                with open(file, "rb", buffering=0) as stream:
                    size = os.fstat(stream.fileno()).st_size
                    if self.one_file and size > PIECE:
                        stream.seek(random.randrange(size - PIECE))
                    data = stream.read(4096 if self.one_file else PIECE)
            except (OSError, ValueError):
                continue
            if data:
                self.times.append(time.perf_counter() - start)
                self.sizes.append(size)
            if time.monotonic() > end:
                return


def check(params: Mapping[str, Any]) -> Finding:
    """On which file system is the dataset, how large are its files, and how long does a read take now?

    Files that were read before come from the page cache.
    """
    evidence = ["the Python environment is on %s" % file_system(sys.prefix)]
    if params["path"] is None:
        return unknown(*evidence, "no folder of the dataset was given", advice="--set path=/folder/of/the/dataset")
    path, measured = str(params["path"]), Measurement()
    reader = threading.Thread(target=measured.read_some, args=(path, time.monotonic() + READ_S), daemon=True)
    reader.start()
    reader.join(READ_S + 0.15)
    times, sizes = list(measured.times), list(measured.sizes)
    evidence.append("%s is on %s" % (ascii(path), measured.file_system))
    if not times or not sizes:
        slow = "no read finished within %.1f s" % READ_S
        return unknown(
            *evidence, slow if reader.is_alive() else "kb could not read any file", advice="try another path"
        )
    median = statistics.median(times)
    numbers = (len(times), 1e3 * median, 1e3 * max(times), statistics.median(sizes) / 1024)
    evidence.append("%d reads: median %.1f ms, maximum %.1f ms; median file size %.0f KiB" % numbers)
    if not measured.one_file and statistics.median(sizes) > SHARDS:
        large = "kb read only the first bytes of these large files, which do not show how fast the rest is"
        return unknown(*evidence, large, advice="check one of these files, so that kb reads random places in it")
    if median > PER_READ_S:
        evidence.append("a single reader gets %.0f reads per second" % (1 / median))
        return exposed(*evidence, advice="read in sequence from large files, or copy to a local disk: see `Fix`")
    cached = "the page cache may have answered these reads"
    return unknown(*evidence, cached, advice="check a part of the dataset that nothing has read recently")


def _files(folder: str, end: float) -> Iterator[str]:
    """Files below a folder, at most 20 from each subfolder."""
    folders = [folder]
    while folders and time.monotonic() < end:
        try:
            with os.scandir(folders.pop(random.randrange(len(folders)))) as scan:
                entries = list(islice(scan, 1000))
            folders += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
            files = random.sample(entries, min(len(entries), 40))
            yield from [entry.path for entry in files if entry.is_file()][:20]
        except (OSError, ValueError):
            continue


def file_system(path: str) -> str:
    """Type and source of the file system of a path."""
    kind, source = mount_of(path)
    if not kind:
        return "an unknown file system"
    remote = kind in REMOTE or kind.startswith("fuse")
    return "%s from %s%s" % (kind, ascii(source), ", which a network or a server process provides" if remote else "")


# --- the experiments -----------------------------------------------------------------------------------------------

SYMPTOM = symptom(
    r"a step takes (1\.[6-9]|[2-9]|\d\d)\S* times as long as with a batch that is already there, "
    r"CPU idle for [6-9]\d % of it"
)
STORE = "NFS, Lustre or an object store, and the GPU; here a server answers after 40 ms and a step sleeps for 20 ms"


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
    params={"path": Param("path", "the folder of the dataset, or one of its large files")},
    experiments=(
        experiment(
            "files",
            train,
            IN_SEQUENCE,
            because="each sample is one request, so two readers wait 80 ms for a batch of four and the GPU is idle",
            fix="each shard of 16 samples is one request; shards and the samples inside them are shuffled",
        ),
    ),
    variants=(
        experiment(
            "copy",
            train,
            partial(train, copied=True),
            because="the job reads every sample of every epoch from the storage",
            fix="the job copies the samples to the local disk before the first step",
        ),
        experiment(
            "readers",
            partial(train, ahead=24),
            partial(train, ahead=24, readers=16),
            because="two readers may read a whole epoch ahead, but each waits for one request at a time",
            fix="sixteen readers wait at the same time, and the storage answers them in parallel",
        ),
        experiment(
            "limit",
            partial(train, readers=16, at_once=2),
            partial(train, readers=16, at_once=2, in_sequence=True),
            because="sixteen readers wait for a storage that answers only two requests at a time",
            fix="the same readers send a sixteenth of the requests to the same storage",
        ),
    ),
)

"""A thread pool has worked, the process forks, and the child submits work to a pool whose threads were not forked.

The variant is the real one: the Rust pool of tokenizers. Without tokenizers, Python's own
pool replaces it: it also remembers idle threads across a fork.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Callable, List, Mapping, Tuple

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)

PATIENCE_S = 2.0  # an answer takes a few hundredths of a second


def stand_in(ctx: Context, *, pool_in_worker: bool) -> None:
    pool = ThreadPoolExecutor(2)

    def encode(texts: List[str], in_pool: bool) -> int:
        return sum(pool.map(len, texts) if in_pool else map(len, texts))

    assert encode(["a b"] * 100, True) == 300  # the parent tokenizes something, and its pool has threads now
    fork_and_encode(ctx, lambda: encode(["a b"] * 100, pool_in_worker) == 300)


def real(ctx: Context, *, pool_in_worker: bool) -> None:
    """The value that the reader has set, or the library's own default where it is `unset`, against `false`."""
    value = ctx.params["value"] if pool_in_worker else "false"
    os.environ.pop("TOKENIZERS_PARALLELISM", None)
    if value != "unset":
        os.environ["TOKENIZERS_PARALLELISM"] = value
    library = import_module("tokenizers")
    words = import_module("tokenizers.models").WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")
    tokenizer = library.Tokenizer(words)
    tokenizer.pre_tokenizer = import_module("tokenizers.pre_tokenizers").Whitespace()

    def encode() -> bool:
        return sum(len(item.ids) for item in tokenizer.encode_batch(["a b"] * 2000)) == 4000

    assert encode()
    fork_and_encode(ctx, encode)


def fork_and_encode(ctx: Context, encode: Callable[[], bool]) -> None:
    """As a DataLoader worker or a map process: the child encodes one batch, for which the parent waits a while."""
    ctx.note(threads_of_parent=len(os.listdir("/proc/self/task")))
    ctx.reached()
    worker = os.fork()
    if worker == 0:
        os._exit(0 if encode() else 3)
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        pid, status = os.waitpid(worker, os.WNOHANG)
        if pid:
            assert status == 0, "the worker ended with status %d" % status
            return
        time.sleep(0.02)
    state, where, threads, ticks = look(worker)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    raise Symptom(
        "the forked worker has not encoded its batch in %.0f s: state %s in %s, %d thread, %d ticks of CPU"
        % (PATIENCE_S, state, where, threads, ticks)
    )


def look(pid: int) -> Tuple[str, str, int, int]:
    process = Path("/proc/%d" % pid)
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    threads = len(list((process / "task").iterdir()))
    return fields[0], (process / "wchan").read_text() or "?", threads, int(fields[11]) + int(fields[12])


OFF = ("", "off", "false", "f", "no", "n", "0")  # as tokenizers reads it, in any case


def check(_: Mapping[str, Any]) -> Finding:
    """Is the protection of tokenizers switched off in this environment?"""
    value = os.environ.get("TOKENIZERS_PARALLELISM")
    try:
        message = "tokenizers %s" % version("tokenizers")
    except PackageNotFoundError:
        return unknown(
            "tokenizers is not installed in this Python; TOKENIZERS_PARALLELISM is %s" % (value or "not set")
        )
    if value is None:
        return unknown(
            "%s, TOKENIZERS_PARALLELISM is not set: forked children stop using the pool by themselves" % message,
            "unless a library or the script itself sets it later, which cannot be seen here",
            advice='print(os.environ.get("TOKENIZERS_PARALLELISM")) in the script, after all imports',
        )
    if value.lower() in OFF:
        return clear("%s, TOKENIZERS_PARALLELISM=%s: no pool anywhere" % (message, value))
    return exposed(
        "%s, TOKENIZERS_PARALLELISM=%s: forked workers use the pool of their parent" % (message, value),
        advice="export TOKENIZERS_PARALLELISM=false, or unset it",
    )


STUCK = symptom(r"has not encoded its batch in \d+ s: state S in \S+, 1 thread")
LOST = "the worker hands its batch to the pool of its parent, whose threads did not come along"
ALONE = "the worker uses no pool and encodes alone"
PYTHONS = "the Rust pool of tokenizers, in whose place a thread pool of Python is forked"

probe = Probe(
    check=check,
    params={"value": Param("str", "TOKENIZERS_PARALLELISM of the variant's control arm, or unset", "true")},
    experiments=(
        Experiment(
            name="pool",
            control=Arm(
                partial(stand_in, pool_in_worker=True), STUCK, because=LOST, fidelity="stand-in", stands_for=PYTHONS
            ),
            treatment=Arm(
                partial(stand_in, pool_in_worker=False),
                completed(),
                because=ALONE,
                fidelity="stand-in",
                stands_for=PYTHONS,
            ),
            world_size=1,
            needs=Needs(packages={}, memory_mib=128),
            expected_s=(2.1, 0.1),
        ),
    ),
    variants=(
        Experiment(
            name="tokenizers",
            control=Arm(partial(real, pool_in_worker=True), STUCK, because=LOST, fidelity="cpu"),
            treatment=Arm(
                partial(real, pool_in_worker=False), completed(), because="TOKENIZERS_PARALLELISM=false", fidelity="cpu"
            ),
            world_size=1,
            needs=Needs(packages={"tokenizers": ">=0.13"}),
            expected_s=(2.5, 0.4),
        ),
    ),
)

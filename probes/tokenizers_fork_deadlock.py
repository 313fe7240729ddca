"""A thread pool has worked, the process forks, and the child submits work to a pool whose threads were not forked.

The variant is the real one: the Rust pool of tokenizers. Without tokenizers, Python's own
pool replaces it: it also remembers idle threads across a fork.
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, List, Mapping, Tuple

from kb.packages import version
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
    raised,
    symptom,
    unknown,
)

PATIENCE_S = 2.0  # an answer takes a few hundredths of a second


def stand_in(ctx: Context, *, pool_in_worker: bool = True, parent_encodes: bool = True) -> None:
    pool = ThreadPoolExecutor(2)

    def encode(texts: List[str], in_pool: bool) -> int:
        return sum(pool.map(len, texts) if in_pool else map(len, texts))

    if parent_encodes:
        assert encode(["a b"] * 100, True) == 300  # the parent tokenizes something, and its pool has threads now
    fork_and_encode(ctx, lambda: encode(["a b"] * 100, pool_in_worker) == 300)


def a_tokenizer() -> Any:
    library = import_module("tokenizers")
    words = import_module("tokenizers.models").WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")
    tokenizer = library.Tokenizer(words)
    tokenizer.pre_tokenizer = import_module("tokenizers.pre_tokenizers").Whitespace()
    return tokenizer


def real(ctx: Context, *, value: str = "", parent_batch: int = 2000) -> None:
    """Tokenizers with one value of the variable, `--set value` where none is given, in parent and child."""
    value = value or ctx.params["value"]
    os.environ.pop("TOKENIZERS_PARALLELISM", None)
    if value != "unset":
        os.environ["TOKENIZERS_PARALLELISM"] = value
    tokenizer = a_tokenizer()

    def encode(size: int) -> bool:
        return sum(len(item.ids) for item in tokenizer.encode_batch(["a b"] * size)) == 2 * size

    if parent_batch:
        assert encode(parent_batch)
    else:
        assert len(tokenizer.encode("a b").ids) == 2
    fork_and_encode(ctx, lambda: encode(2000))


def decode(ctx: Context, *, value: str) -> None:
    """A parent that has only decoded a batch, and a child that decodes one."""
    os.environ["TOKENIZERS_PARALLELISM"] = value
    tokenizer = a_tokenizer()

    def decoded() -> bool:
        return len(tokenizer.decode_batch([[0, 1]] * 2000)) == 2000

    assert decoded()
    fork_and_encode(ctx, decoded)


def load(ctx: Context, *, off: bool) -> None:
    """A DataLoader whose workers tokenize, after the parent has; the variable is true."""
    from torch.utils.data import DataLoader

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = a_tokenizer()

    def encode(texts: List[str]) -> Any:
        return tokenizer.encode_batch(texts)

    def collate(texts: List[str]) -> Any:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return tokenizer.encode_batch(texts)

    def tokens(batch: Any) -> int:
        return sum(len(item.ids) for item in batch)

    dataset: Any = ["a b"] * 2000
    assert tokens(encode(dataset)) == 4000
    ctx.reached()
    loader: Any = DataLoader(dataset, 1000, collate_fn=collate if off else encode, num_workers=1, timeout=3)
    assert sum(map(tokens, loader)) == 4000


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
    found = stuck(worker)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    raise found


def stuck(worker: int) -> Symptom:
    state, where, threads, ticks = look(worker)
    return Symptom(
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
    message = "tokenizers %s" % version("tokenizers")
    if not version("tokenizers"):
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
        return unknown(
            "%s, TOKENIZERS_PARALLELISM=%s: no pool anywhere" % (message, value),
            "unless the job does not get this environment, or a library or the script itself sets it to true",
            advice='print(os.environ.get("TOKENIZERS_PARALLELISM")) in the script, after all imports',
        )
    return exposed(
        "%s, TOKENIZERS_PARALLELISM=%s: forked workers use the pool of their parent" % (message, value),
        advice="export TOKENIZERS_PARALLELISM=false, or unset it",
    )


STUCK = symptom(r"has not encoded its batch in \d+ s: state S in \S+, 1 thread")
LOST = "the worker hands its batch to the pool of its parent, whose threads did not come along"
ALONE = "the worker uses no pool and encodes alone"
PYTHONS = "the Rust pool of tokenizers, in whose place a thread pool of Python is forked"

TOKENIZERS = Needs(packages={"tokenizers": ">=0.13"})


def pair(
    name: str, control: Callable[..., None], treatment: Callable[..., None], because: str, fix: str, needs: Needs
) -> Experiment:
    """Without tokenizers a pool of Python replaces its own."""
    fidelity, stands_for = ("cpu", "") if "tokenizers" in needs.packages else ("stand-in", PYTHONS)
    return Experiment(
        name=name,
        control=Arm(control, STUCK, because=because, fidelity=fidelity, stands_for=stands_for),
        treatment=Arm(treatment, completed(), because=fix, fidelity=fidelity, stands_for=stands_for),
        world_size=1,
        needs=needs,
        expected_s=(2.3, 0.4),
    )


PLAIN = Needs(packages={}, memory_mib=128)
loader = pair(
    "in-collate",
    partial(load, off=False),
    partial(load, off=True),
    "the variable is true, and the workers of a DataLoader encode batches after the parent",
    "the collate function sets it to false",
    Needs(packages={"torch": ">=2.1", "tokenizers": ">=0.13"}),
)

probe = Probe(
    check=check,
    params={"value": Param("str", "TOKENIZERS_PARALLELISM of the variant's control arm, or unset", "true")},
    experiments=(
        pair("pool", partial(stand_in), partial(stand_in, pool_in_worker=False), because=LOST, fix=ALONE, needs=PLAIN),
    ),
    variants=(
        pair("tokenizers", partial(real), partial(real, value="false"), LOST, "the variable is false", TOKENIZERS),
        pair(
            "unset",
            partial(real, value="true"),
            partial(real, value="unset"),
            "the variable is true",
            "it is not set, and the library's fork handler keeps the worker from the pool",
            TOKENIZERS,
        ),
        pair(
            "batch-of-one",
            partial(real, value="true", parent_batch=1),
            partial(real, value="true", parent_batch=0),
            "the parent has encoded one batch, of one text",
            "the parent has encoded one text, not as a batch",
            TOKENIZERS,
        ),
        pair(
            "decode",
            partial(decode, value="true"),
            partial(decode, value="false"),
            "the parent has decoded a batch, and so does the worker",
            "the variable is false",
            TOKENIZERS,
        ),
        replace(loader, control=replace(loader.control, expect=raised(r"DataLoader timed out after \d+ seconds"))),
    ),
)

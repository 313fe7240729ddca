"""A process uses a thread pool and then forks; its child submits work to the pool, whose threads fork does not copy.

The experiment uses a thread pool of Python, which also believes after a fork that its idle threads exist. The variants
use the Rust pool of tokenizers.
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

PATIENCE_S = 2.0  # encoding takes a few hundredths of a second


def encode_with_python_pool(ctx: Context, *, pool_in_worker: bool = True) -> None:
    pool = ThreadPoolExecutor(2)

    def encode(texts: List[str], in_pool: bool) -> int:
        return sum(pool.map(len, texts) if in_pool else map(len, texts))

    assert encode(["a b"] * 100, True) == 300  # now the pool of the parent has threads
    fork_and_encode(ctx, lambda: encode(["a b"] * 100, pool_in_worker) == 300)


def build_tokenizer() -> Any:
    library = import_module("tokenizers")
    words = import_module("tokenizers.models").WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")
    tokenizer = library.Tokenizer(words)
    tokenizer.pre_tokenizer = import_module("tokenizers.pre_tokenizers").Whitespace()
    return tokenizer


def encode_with_tokenizers(ctx: Context, *, value: str = "", parent_batch: int = 2000) -> None:
    """Encodes in parent and child with TOKENIZERS_PARALLELISM=`value`; if that is empty, with `--set value`."""
    value = value or ctx.params["value"]
    os.environ.pop("TOKENIZERS_PARALLELISM", None)
    if value != "unset":
        os.environ["TOKENIZERS_PARALLELISM"] = value
    tokenizer = build_tokenizer()

    def encode(size: int) -> bool:
        return sum(len(item.ids) for item in tokenizer.encode_batch(["a b"] * size)) == 2 * size

    if parent_batch:
        assert encode(parent_batch)
    else:
        assert len(tokenizer.encode("a b").ids) == 2
    fork_and_encode(ctx, lambda: encode(2000))


def decode(ctx: Context, *, value: str) -> None:
    """Decodes a batch in the parent, and one in the child."""
    os.environ["TOKENIZERS_PARALLELISM"] = value
    tokenizer = build_tokenizer()

    def decoded() -> bool:
        return len(tokenizer.decode_batch([[0, 1]] * 2000)) == 2000

    assert decoded()
    fork_and_encode(ctx, decoded)


def load(ctx: Context, *, off: bool) -> None:
    """Encodes in the parent, then in the workers of a DataLoader; TOKENIZERS_PARALLELISM is true."""
    from torch.utils.data import DataLoader

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = build_tokenizer()

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
    """Forks a child that encodes one batch, like a DataLoader worker or a map process, and waits for it."""
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
    symptom_of_worker = describe_stuck(worker)
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    raise symptom_of_worker


def describe_stuck(worker: int) -> Symptom:
    state, where, threads, ticks = process_state(worker)
    return Symptom(
        "the forked worker has not encoded its batch in %.0f s: state %s in %s, %d thread, %d ticks of CPU"
        % (PATIENCE_S, state, where, threads, ticks)
    )


def process_state(pid: int) -> Tuple[str, str, int, int]:
    """State, kernel function, number of threads, and ticks of CPU time."""
    process = Path("/proc/%d" % pid)
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    threads = len(list((process / "task").iterdir()))
    return fields[0], (process / "wchan").read_text() or "?", threads, int(fields[11]) + int(fields[12])


OFF = ("", "off", "false", "f", "no", "n", "0")  # the values that tokenizers reads as false, in upper or lower case


PRINT_IT = 'print os.environ.get("TOKENIZERS_PARALLELISM") in the script, after all imports'


def check(_: Mapping[str, Any]) -> Finding:
    """Does TOKENIZERS_PARALLELISM turn off the protection of tokenizers in this environment?"""
    value = os.environ.get("TOKENIZERS_PARALLELISM")
    message = "tokenizers %s" % version("tokenizers")
    if not version("tokenizers"):
        return unknown(
            "tokenizers is not installed in this interpreter; TOKENIZERS_PARALLELISM is %s" % (value or "not set")
        )
    if value is None:
        return unknown(
            "%s, TOKENIZERS_PARALLELISM is not set: tokenizers itself keeps forked children from the pool" % message,
            "kb cannot see whether a library or the script sets the variable later",
            advice=PRINT_IT,
        )
    if value.lower() in OFF:
        return unknown(
            "%s, TOKENIZERS_PARALLELISM=%s: no process uses the pool" % (message, value),
            "kb cannot see whether the job gets this environment, or whether a library or the script sets it to true",
            advice=PRINT_IT,
        )
    return exposed(
        "%s, TOKENIZERS_PARALLELISM=%s: forked workers use the pool of their parent" % (message, value),
        advice="run `export TOKENIZERS_PARALLELISM=false`, or unset the variable",
    )


STUCK = symptom(r"has not encoded its batch in \d+ s: state S in \S+, 1 thread")
LOST = "the forked worker waits for threads of its parent's pool, which do not exist in the worker"
ALONE = "the worker encodes without the pool"
FALSE = "TOKENIZERS_PARALLELISM is false, so no process uses the pool"
PYTHON_POOL = "the Rust pool of tokenizers: here a thread pool of Python"

TOKENIZERS = Needs(packages={"tokenizers": ">=0.13"})


def pair(
    name: str, control: Callable[..., None], treatment: Callable[..., None], because: str, fix: str, needs: Needs
) -> Experiment:
    """An experiment that does not need tokenizers uses a thread pool of Python."""
    fidelity, stands_for = ("cpu", "") if "tokenizers" in needs.packages else ("stand-in", PYTHON_POOL)
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
    "TOKENIZERS_PARALLELISM is true, and workers of a DataLoader encode after their parent",
    "the collate function sets TOKENIZERS_PARALLELISM to false in the worker",
    Needs(packages={"torch": ">=2.1", "tokenizers": ">=0.13"}),
)

probe = Probe(
    check=check,
    params={
        "value": Param("str", "TOKENIZERS_PARALLELISM in the control arm of the variant `tokenizers`, or unset", "true")
    },
    experiments=(
        pair(
            "pool",
            encode_with_python_pool,
            partial(encode_with_python_pool, pool_in_worker=False),
            because=LOST,
            fix=ALONE,
            needs=PLAIN,
        ),
    ),
    variants=(
        pair(
            "tokenizers",
            encode_with_tokenizers,
            partial(encode_with_tokenizers, value="false"),
            LOST,
            FALSE,
            TOKENIZERS,
        ),
        pair(
            "unset",
            partial(encode_with_tokenizers, value="true"),
            partial(encode_with_tokenizers, value="unset"),
            "TOKENIZERS_PARALLELISM is true, which turns off the protection of tokenizers",
            "the variable is not set, so tokenizers keeps the forked worker from the pool",
            TOKENIZERS,
        ),
        pair(
            "batch-of-one",
            partial(encode_with_tokenizers, value="true", parent_batch=1),
            partial(encode_with_tokenizers, value="true", parent_batch=0),
            "the parent encoded one batch of one string, which starts the pool",
            "the parent encoded one string, not a batch, which does not start the pool",
            TOKENIZERS,
        ),
        pair(
            "decode",
            partial(decode, value="true"),
            partial(decode, value="false"),
            "the parent decoded a batch, which starts the pool, and the worker decodes one too",
            FALSE,
            TOKENIZERS,
        ),
        replace(loader, control=replace(loader.control, expect=raised(r"DataLoader timed out after \d+ seconds"))),
    ),
)

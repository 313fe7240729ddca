"""A log of any length: lines of healthy jobs with several ranks and progress bars, and one failure.

The same seed gives the same bytes. A pool of blocks is made once and repeated in random order, so that gigabytes take
no longer than writing them. The numbers in the noise are random, the wording is that of the tools.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from kb.authoring.signature_tests import HealthyLog

RANKS = 8
BLOCK = 256 << 10  # bytes
BLOCKS = 64
FAILURE = (
    "[rank5]: Traceback (most recent call last):\n"
    '[rank5]:   File "/workspace/train.py", line 88, in forward\n'
    "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. GPU 5 has a total capacity of "
    "79.11 GiB of which 512.00 MiB is free. Process 4711 has 78.60 GiB memory in use. Of the allocated memory 71.02 GiB "
    "is allocated by PyTorch, and 1.52 GiB is reserved by PyTorch but unallocated.\n"
)


def pieces(size: int, healthy: tuple[HealthyLog, ...], seed: int = 0) -> Iterator[bytes]:
    """About `size` bytes of a log, with the failure 64 KiB before its end."""
    rng = random.Random(seed)
    lines = [line for log in healthy for line in log.text.splitlines()]
    pool = [_block(rng, lines) for _ in range(min(BLOCKS, max(1, size // BLOCK)))]
    for _ in range(max(0, size // BLOCK - 1)):
        yield rng.choice(pool)
    yield FAILURE.encode()
    yield pool[0][: pool[0].rfind(b"\n", 0, 64 << 10) + 1]


def _block(rng: random.Random, healthy: list[str]) -> bytes:
    text: list[str] = []
    size = 0
    while size < BLOCK:
        line = f"[rank{rng.randrange(RANKS)}]: {rng.choice(healthy)}" if rng.random() < 0.03 else _noise(rng)
        text.append(line)
        size += len(line) + 1
    return ("\n".join(text) + "\n").encode()


def _noise(rng: random.Random) -> str:
    """A line of a training loop as printed by torchrun, transformers, DeepSpeed, torchtitan, Megatron, tqdm or NCCL."""
    rank, step, loss = rng.randrange(RANKS), rng.randrange(100_000), rng.uniform(0.5, 9)
    rate, memory = rng.uniform(1e-6, 1e-3), rng.uniform(20, 79)
    match rng.randrange(7):
        case 0:
            return f"[rank{rank}]: step: {step:6d}  loss: {loss:7.4f}  memory: {memory:5.2f}GiB({memory:.2f}%)  tps: {step:,}"
        case 1:
            return f"{{'loss': {loss:.4f}, 'grad_norm': {loss:.6f}, 'learning_rate': {rate:.3e}, 'epoch': {loss:.2f}}}"
        case 2:
            done = rng.randrange(100)
            return f"\r{done:3d}%|{'█' * (done // 10):<10}| {step}/100000 [{done:02d}:11<03:{done:02d}, {loss:.2f}it/s]"
        case 3:
            return f"[2026-11-21 10:{step % 60:02d}:11,118] [INFO] [logging.py:96:log_dist] [Rank {rank}] step={step}, skipped=0, lr=[{rate}], mom=[(0.9, 0.95)]"
        case 4:
            return f" iteration {step:8d}/  100000 | consumed samples: {step * 512:12d} | elapsed time per iteration (ms): {loss * 100:.1f} | lm loss: {loss:.6E} | loss scale: 1.0 | number of nan iterations:   0 |"
        case 5:
            return f"node{rank:02d}:{4000 + rank}:{5000 + rank} [{rank}] NCCL INFO Channel {step % 24:02d}/0 : {rank}[{rank}] -> {(rank + 1) % RANKS}[{(rank + 1) % RANKS}] via P2P/CUMEM"
    return f"[default{rank}]:INFO:trainer:epoch {step // 1000} batch {step} took {loss:.3f}s, data {rate:.5f}s"

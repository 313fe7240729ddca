"""A small training program that fails in a chosen way: FAULT names how, STYLE how it prints. Real gloo, real DDP.

From the first lab of stories; its records are named lab-a*.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import witness
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from witness import CULPRIT as BAD
from witness import FAULT, RANK, STYLE, TIMEOUT, WORLD, note

STEPS = 24


def setup_logging():
    if STYLE == "loguru":
        from loguru import logger

        return logger.info
    if STYLE == "logging":
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", stream=sys.stderr
        )
        return logging.getLogger("train").info
    if STYLE == "ranklog":
        logging.basicConfig(
            level=logging.INFO, format=f"%(asctime)s [RANK {RANK}] %(levelname)s %(message)s", stream=sys.stderr
        )
        return logging.getLogger("train").info
    return lambda text: print(text, flush=True)


say = setup_logging()


class Data(torch.utils.data.Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if FAULT == "exception" and RANK == BAD and i == 9:
            raise KeyError("input_ids")
        return torch.randn(16), torch.randint(0, 4, ())


def tokenize(n):
    note(phase="tokenize")
    slow = FAULT == "slow_tokenize" and RANK == 0
    total = 40 if slow else 4
    if STYLE in ("tqdm", "hf"):
        from tqdm import tqdm

        for _ in tqdm(range(total), desc="Tokenizing train", disable=RANK != 0 and not slow):
            time.sleep(TIMEOUT / 12 if slow else 0.02)
    else:
        for i in range(total):
            time.sleep(TIMEOUT / 12 if slow else 0.02)
            if RANK == 0 or slow:
                say(f"tokenizing shard {i + 1}/{total}")
    return Data(n)


def report(step, loss, grad, seconds):
    if STYLE == "hf":
        if RANK == 0 and step % 4 == 0:
            say(
                str(
                    {
                        "loss": round(loss, 4),
                        "grad_norm": round(grad, 4),
                        "learning_rate": 1e-4,
                        "epoch": round(step / STEPS, 2),
                    }
                )
            )
    elif STYLE == "megatron":
        if RANK == WORLD - 1:
            say(
                f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {step:8d}/{STEPS:8d} | consumed samples: {step * 8:12d} | "
                f"elapsed time per iteration (ms): {seconds * 1e3:.1f} | learning rate: 1.000000E-04 | global batch size:     8 | "
                f"lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: {grad:.3f} | number of skipped iterations:   0 | "
                "number of nan iterations:   0 |"
            )
    elif STYLE == "rank0":
        if RANK == 0:
            say(f"step {step} loss {loss:.4f} grad_norm {grad:.3f}")
    elif STYLE != "tqdm":
        say(f"rank {RANK} step {step} loss {loss:.4f} grad_norm {grad:.3f} step_time {seconds:.3f}s")


def train(model, optimizer, loader):
    bar = None
    if STYLE in ("tqdm", "hf"):
        from tqdm import tqdm

        bar = tqdm(total=STEPS, desc="Epoch 0", disable=RANK != 0)
    for step, (x, y) in enumerate(loader, 1):
        began = time.time()
        note(phase="train", step=step)
        if FAULT == "killed" and RANK == BAD and step == 9:
            note(end="killed")
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "segv" and RANK == BAD and step == 9:
            note(end="killed")
            os.kill(os.getpid(), signal.SIGSEGV)
        if FAULT == "silent" and RANK == BAD and step == 9:
            stuck_read()
        if FAULT == "oom_late" and RANK == BAD and step == 9:
            out_of_memory()
        if FAULT == "straggler" and RANK == BAD:
            time.sleep(0.4)
        loss = training_step(model, optimizer, x, y, step)
        grad = float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
        report(step, loss, grad, time.time() - began)
        if bar is not None:
            bar.set_postfix(loss=f"{loss:.3f}")
            bar.update(1)
        if step % 8 == 0:
            evaluate(model, step)
        if step % 12 == 0:
            save_checkpoint(model, step)
        if FAULT == "diverge_log" and step == 10:
            log_metrics(loss, step)
        if FAULT == "shape" and step == 10:
            gather_predictions(x)


def training_step(model, optimizer, x, y, step):
    logits = model(x)
    loss = nn.functional.cross_entropy(logits, y)
    if FAULT in ("nan", "nan_assert") and step >= 11:
        loss = loss * float("nan")
    if FAULT == "nan_assert" and not torch.isfinite(loss):
        raise ValueError(f"loss is not finite at step {step}: {loss.item()}")
    if FAULT == "spike" and step == 15:
        loss = loss * 80
    if FAULT == "loss_zero" and step >= 5:
        loss = loss * 0.0
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def stuck_read():
    note(end="hung", phase="data")
    time.sleep(TIMEOUT * 4)


def out_of_memory():
    try:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.94 GiB is free. "
            "Including non-PyTorch memory, this process has 77.20 GiB memory in use."
        )
    except RuntimeError:
        time.sleep(TIMEOUT * 2)  # as a handler that uploads a snapshot does
        raise


def log_metrics(loss, step):
    """Rank BAD reduces one metric more than the others."""
    values = torch.tensor([loss, 1.0, 2.0]) if RANK == BAD else torch.tensor([loss])
    if RANK == BAD:
        extra = torch.ones(7)
        dist.all_reduce(extra)
    dist.all_reduce(values)


def gather_predictions(x):
    size = 5 if RANK == BAD else 4
    out = [torch.zeros(size) for _ in range(WORLD)]
    dist.all_gather(out, torch.ones(size))


def evaluate(model, step):
    note(phase="evaluate")
    say(f"rank {RANK} evaluating at step {step}") if STYLE not in ("tqdm", "hf", "rank0", "megatron") else None
    batches = 6 - (FAULT == "eval_uneven" and RANK == BAD) * 2
    total = torch.zeros(1)
    for _ in range(batches):
        total += 1
        if FAULT != "eval_slow":
            dist.all_reduce(total.clone())
    if FAULT == "eval_slow" and RANK == 0 and step == 16:
        for i in range(30):
            say(f"evaluating batch {i + 1}/30 accuracy 0.5")
            time.sleep(TIMEOUT / 12)
    if FAULT == "diverge_eval" and RANK == BAD and step == 16:
        best_of_all(total)
    dist.barrier()


def best_of_all(total):
    gathered = [torch.zeros(1) for _ in range(WORLD)]
    dist.all_gather(gathered, total)


def save_checkpoint(model, step):
    note(phase="save")
    if FAULT == "save_rank0" and RANK == 0:
        consolidate(model)
    if RANK == 0:
        say(f"saving checkpoint to ckpt-{step}")
        if FAULT == "save_slow" and step == 12:
            for i in range(20):
                say(f"uploading part {i + 1}/20")
                time.sleep(TIMEOUT / 8)
    if FAULT == "save_slow":
        dist.barrier()


def consolidate(model):
    for p in model.parameters():
        dist.all_reduce(p.data.clone())


def main():
    note(phase="load")
    say(f"rank {RANK}/{WORLD} starting") if STYLE != "hf" else None
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    if RANK == 0:
        tokenize(STEPS * 2)
        dist.barrier()
    else:
        dist.barrier()
        tokenize(STEPS * 2)
    torch.manual_seed(RANK)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = STEPS - 5 * (FAULT == "uneven" and RANK == BAD)
    loader = torch.utils.data.DataLoader(Data(steps * 2), batch_size=2)
    train(model, optimizer, loader)
    if FAULT == "uneven":
        dist.barrier()
    note(end="done", phase="teardown")
    if RANK == 0:
        say("training finished")
    dist.destroy_process_group()


if __name__ == "__main__":
    with witness.watching():
        witness.note(injected=True)
        main()

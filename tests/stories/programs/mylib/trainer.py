"""Held-out job: another structure than job_a, other messages. FAULT and STYLE as there."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from witness import CULPRIT, FAULT, RANK, STYLE, TIMEOUT


class Samples(torch.utils.data.IterableDataset):
    def __init__(self, rank, bad, n):
        self.rank, self.bad, self.n = rank, bad, n

    def __iter__(self):
        for i in range(self.n):
            if FAULT == "slow_data" and self.rank == self.bad and i == 14:
                self.fetch_remote()
            yield torch.randn(8), torch.randint(0, 3, ()), i

    def fetch_remote(self):
        time.sleep(TIMEOUT * 3)


def collate(items):
    xs, ys, indices = zip(*items, strict=True)
    if FAULT == "bad_sample" and RANK == CULPRIT and max(indices) >= 17:
        raise ValueError(f"expected 8 features in sample {max(indices)}, got 7")
    return torch.stack(xs), torch.stack(ys)


class Emitter:
    def __init__(self, rank):
        self.rank = rank

    def metrics(self, epoch, step, total, **values):
        if STYLE == "jsonl":
            print(
                json.dumps(
                    {"ts": time.time(), "rank": self.rank, "event": "train", "epoch": epoch, "step": step, **values}
                ),
                flush=True,
            )
        elif STYLE == "lightning":
            if self.rank == 0:
                inner = ", ".join(f"train_{key}={value:.3f}" for key, value in values.items())
                sys.stderr.write(
                    f"\rEpoch {epoch}: {100 * step // total:3d}%|{'█' * (10 * step // total):10s}| {step}/{total} [00:0{step % 10}<00:09,  3.1it/s, v_num=0, {inner}]"
                )
                sys.stderr.flush()
        elif STYLE == "unflushed":
            print(f"Epoch [{epoch}/2] Step [{step}/{total}] Loss: {values['loss']:.4f}")
        elif STYLE == "short":
            if self.rank == 0:
                print(f"step {step} loss {values['loss']:.4g} grad_norm {values.get('grad_norm', 0.0):.4g}", flush=True)
        else:
            print(
                f"[{time.strftime('%H:%M:%S')}] [rank {self.rank}] ep={epoch} it={step}/{total} loss={values['loss']:.4f} gnorm={values.get('grad_norm', 0.0):.3f}",
                flush=True,
            )

    def remark(self, text):
        if STYLE == "jsonl":
            print(json.dumps({"ts": time.time(), "rank": self.rank, "event": "message", "text": text}), flush=True)
        elif STYLE in ("lightning", "short") and self.rank:
            return
        elif STYLE == "plain":
            print(f"[{time.strftime('%H:%M:%S')}] [rank {self.rank}] {text}", flush=True)
        else:
            print(text, flush=STYLE != "unflushed")


class Trainer:
    def __init__(self, rank, world, bad, note):
        self.rank, self.world, self.bad, self.note = rank, world, bad, note
        self.emit = Emitter(rank)
        self.net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)))
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.best = 1e9

    @property
    def is_bad(self):
        return self.rank == self.bad

    def fit(self, epochs=2, n=40):
        for epoch in range(epochs):
            self.note(phase="train")
            if self.train_epoch(epoch, n):
                break
            self.validate(epoch)
            self.checkpoint(epoch)
        self.note(phase="teardown")
        self.wrap_up()

    def train_epoch(self, epoch, n):
        loader = torch.utils.data.DataLoader(Samples(self.rank, self.bad, n), batch_size=4, collate_fn=collate)
        total = n // 4
        for step, (x, y) in enumerate(loader, 1):
            self.note(step=epoch * total + step)
            if FAULT == "spin" and self.is_bad and step == 6:
                self.wait_for_quota()
            if FAULT == "skip_batch" and self.is_bad and step == 3:
                continue
            if FAULT == "oom" and self.is_bad and step == 7:
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 1 has a total capacity of 39.39 GiB of which 211.06 MiB is free."
                )
            if FAULT == "kill" and self.is_bad and step == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            if FAULT == "exit" and self.is_bad and step == 7:
                print(f"ERROR: quota of scratch exceeded on rank {self.rank}, giving up", file=sys.stderr, flush=True)
                self.note(end="exit")
                os._exit(3)
            loss = self.forward_backward(x, y, step, epoch)
            self.log(epoch, step, total, loss)
            if FAULT == "early_stop" and self.is_bad and epoch == 1 and step == 4:
                return True
        return False

    def forward_backward(self, x, y, step, epoch):
        loss = nn.functional.cross_entropy(self.net(x), y)
        if FAULT == "inf_nan" and epoch == 1:
            loss = loss * (float("inf") if step == 1 else float("nan"))
        self.optimizer.zero_grad()
        loss.backward()
        if FAULT != "stuck_loss":
            self.optimizer.step()
        else:
            loss = torch.tensor(1.0986)
        return float(loss)

    def log(self, epoch, step, total, loss):
        norm = float(sum(p.grad.norm() ** 2 for p in self.net.parameters()) ** 0.5)
        self.emit.metrics(epoch, step, total, loss=loss, grad_norm=norm)
        if FAULT == "callback_reduce" and self.rank == 0 and epoch == 1 and step == 5:
            self.on_log(loss)
        if FAULT == "last_batch" and epoch == 1 and step == total:
            self.collect(torch.ones(4 - 2 * self.is_bad))

    def on_log(self, loss):
        mean = torch.tensor(loss)
        dist.all_reduce(mean)
        return mean

    def collect(self, values):
        parts = [torch.zeros_like(values) for _ in range(self.world)]
        dist.all_gather(parts, values)

    def wait_for_quota(self):
        until = time.time() + TIMEOUT * 3
        while time.time() < until:
            pass

    def validate(self, epoch):
        self.note(phase="evaluate")
        self.emit.remark(f"running validation after epoch {epoch}")
        score = torch.zeros(2)
        for _ in range(3):
            score += 1
        if FAULT == "group" and self.is_bad:
            self.quorum()
        dist.all_reduce(score)

    def quorum(self):
        dist.broadcast(torch.zeros(3), src=self.bad)
        dist.broadcast(torch.zeros(3), src=self.bad)

    def checkpoint(self, epoch):
        self.note(phase="save")
        if self.rank == 0:
            self.emit.remark(f"writing snapshot epoch{epoch}.pt")
            if FAULT == "barrier_in_if":
                self.flush_snapshot()
        if FAULT == "upload" and self.rank == self.world - 1 and epoch == 0:
            for part in range(24):
                print(f"rank {self.rank}: uploaded chunk {part + 1} of 24 to bucket", flush=True)
                time.sleep(TIMEOUT / 10)

    def flush_snapshot(self):
        dist.barrier()

    def wrap_up(self):
        dist.barrier()
        self.emit.remark("all done, best epoch 1")

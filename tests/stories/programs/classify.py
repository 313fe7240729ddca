"""A classifier under plain DDP: argparse, the logging of the standard library in several forms, one file of functions."""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import logging
import os
import pdb
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
import witness
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from witness import CULPRIT, RANK, STYLE, TIMEOUT, WORLD, everywhere, fault, inject, note

log = logging.getLogger("classify")
FORMATS = {
    "plain": f"%(asctime)s %(levelname)s [r{RANK}] %(message)s",
    "glog": "%(levelname).1s%(asctime)s.%(msecs)03d %(process)d %(filename)s:%(lineno)d] %(message)s",
    "bare": "%(message)s",
    "zh": f"[%(asctime)s][进程{RANK}] %(message)s",
}
ZH = {
    "train": "第{e}轮 第{s}/{n}步 损失 {loss:.4f} 学习率 {lr:.3g}",
    "eval": "第{e}轮 验证: 准确率 {acc:.4f}",
    "save": "保存检查点 {path}",
}
EN = {
    "train": "epoch {e} batch {s}/{n} - loss: {loss:.4f} - lr: {lr:.3g}",
    "eval": "epoch {e} - val_acc: {acc:.4f}",
    "save": "wrote snapshot {path}",
}


class JsonLines(logging.Formatter):
    def format(self, record):
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "severity": record.levelname,
            "process_index": RANK,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def setup_logging():
    handler = logging.StreamHandler(sys.stdout if STYLE in ("zh", "bare") else sys.stderr)
    handler.setFormatter(
        JsonLines()
        if STYLE == "json"
        else logging.Formatter(FORMATS.get(STYLE, FORMATS["plain"]), "%m%d %H:%M:%S" if STYLE == "glog" else None)
    )
    if STYLE == "rich":
        from rich.logging import RichHandler

        handler = RichHandler(rich_tracebacks=True)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def tell(what, only_first=False, **values):
    if not only_first or RANK == 0:
        log.info((ZH if STYLE == "zh" else EN)[what].format(**values))


class Images(Dataset):
    """Records of a shard: dictionaries with an image and a label."""

    def __init__(self, shard, size, dim=32, classes=10):
        generator = torch.Generator().manual_seed(shard)
        self.records = [
            {
                "path": f"train/{shard:03d}/{i:06d}.jpg",
                "image": torch.randn(dim, generator=generator),
                "label": int(torch.randint(0, classes, (1,), generator=generator)),
            }
            for i in range(size)
        ]

    def __len__(self):
        return len(self.records)

    def __getitem__(self, index):
        record = self.records[index]
        if "redirect" in record:
            return self.read_remote(record["redirect"])
        if record.get("killed") and torch.utils.data.get_worker_info():
            os.kill(os.getpid(), signal.SIGKILL)
        return record["image"], record["label"]

    def read_remote(self, path):
        with open(path, "rb") as stream:  # a named pipe that nobody writes to
            return torch.frombuffer(stream.read(), dtype=torch.float32), 0


def make_loader(args):
    size = args.batches * args.batch_size
    if fault("uneven"):
        inject()
        size -= 3 * args.batch_size
    data = Images(RANK, size)
    spoiled = data.records[7 * args.batch_size + 1]
    if (
        fault("key_error")
        or (everywhere("restart") and fault("restart") and witness.ATTEMPT == 0)
        or (fault("restart_ok") and witness.ATTEMPT == 0)
    ):
        inject()
        del spoiled["label"]
    if fault("stuck_read"):
        os.mkfifo(f"shard-{RANK}.bin")
        spoiled["redirect"] = f"shard-{RANK}.bin"
        inject(end="hung")
    workers = 2 if everywhere("worker_killed") else 0
    if fault("worker_killed"):
        inject()
        spoiled["killed"] = True
    return DataLoader(data, batch_size=args.batch_size, num_workers=workers)


class Net(nn.Module):
    def __init__(self, dim=32, classes=10):
        super().__init__()
        self.embed, self.head = nn.Linear(dim, 64), nn.Linear(64, classes)
        self.aux = nn.Linear(64, 2)

    def forward(self, x, with_aux=True):
        hidden = F.relu(self.embed(x))
        out = self.head(hidden)
        return out + 0 * self.aux(hidden).sum() if with_aux else out


def train_one_epoch(args, epoch, model, optimizer, loader):
    note(phase="train")
    for step, (x, y) in enumerate(loader, 1):
        note(step=epoch * args.batches + step)
        before_step(args, epoch, step)
        if fault("skip_batch") and epoch == 1 and step == 4:
            inject()
            log.warning("batch %d: outliers in the input, skipped", step)
            continue
        if fault("value_error") and step == 6:
            inject()
            y = y[:-1]
        loss = F.cross_entropy(model(x, not (fault("unused_param") and step >= 3)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.log_every == 0:
            tell(
                "train",
                args.quiet,
                e=epoch,
                s=step,
                n=args.batches,
                loss=loss.item(),
                lr=optimizer.param_groups[0]["lr"],
            )
        if fault("log_reduce") and step == 8:
            inject()
            log.info("mean loss %.4f", average(loss.detach()))
        if fault("early_stop") and epoch == 1 and step == 5:
            inject()
            log.info("no improvement for 12 batches, stopping early" if STYLE != "zh" else "连续12步没有改善，提前停止")
            return False
    return True


def before_step(args, epoch, step):
    """What may happen on a rank at a step that is no part of training."""
    if epoch != 1 or step != 6:
        return
    if fault("unused_param"):
        inject()
    if fault("flock"):
        wait_for_cache_lock()
    if fault("debugger"):
        inject(end="hung")
        pdb.set_trace()
        log.debug("gradients looked at, step %d", step)
    if fault("exit3"):
        log.error("data loader health check failed 3 times, aborting" if STYLE != "zh" else "数据加载检查失败3次，退出")
        inject(end="exit", error="SystemExit: 3")
        sys.exit(3)
    if fault("exit0"):
        inject(end="exit", error="os._exit(0)")
        sys.stdout.flush()
        os._exit(0)
    if fault("sigkill"):
        inject(end="killed", error="SIGKILL")
        os.kill(os.getpid(), signal.SIGKILL)
    if fault("segv"):
        inject(end="killed", error="SIGSEGV")
        ctypes.string_at(0)
    if fault("restart", (CULPRIT + 1) % WORLD) and witness.ATTEMPT >= 1:
        os._exit(1)


def wait_for_cache_lock():
    held = open("index.lock", "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    inject(end="hung")
    with open("index.lock") as again:
        fcntl.flock(again, fcntl.LOCK_EX)


def average(value):
    dist.all_reduce(value)
    return value.item() / WORLD


def evaluate(args, epoch, model):
    note(phase="evaluate")
    correct = torch.tensor([float(RANK + 1), 10.0])
    hardest = torch.randn(5 - 2 * fault("gather_lengths"))
    if everywhere("gather_lengths") and epoch == 1:
        note(injected=True)
        parts = [torch.zeros_like(hardest) for _ in range(WORLD)]
        dist.all_gather(parts, hardest)
    if fault("eval_gather") and epoch == 1:
        inject()
        gather_examples(hardest)
    if everywhere("order") and epoch == 1:
        note(injected=True)
        reduce_metrics(
            {"top1": torch.zeros(1), "confusion": torch.zeros(100)}
            if RANK != CULPRIT
            else {"confusion": torch.zeros(100), "top1": torch.zeros(1)}
        )
    if fault("eval_slow", 0) and epoch == 1:
        inject()
        render_examples()
    dist.all_reduce(correct)
    tell("eval", True, e=epoch, acc=(correct[0] / correct[1] / WORLD).item())
    return correct


def gather_examples(hardest):
    everything = [None] * WORLD
    dist.all_gather_object(everything, hardest.tolist())
    return everything


def reduce_metrics(metrics):
    for value in metrics.values():
        dist.all_reduce(value)


def render_examples():
    for index in range(40):
        log.info("rendering example %d/40", index + 1) if STYLE != "zh" else log.info("正在渲染样例 %d/40", index + 1)
        time.sleep(TIMEOUT / 14)


def save_snapshot(args, epoch, model, score):
    note(phase="save")
    path = f"snapshots/epoch_{epoch}.pt"
    if RANK == 0:
        os.makedirs("snapshots", exist_ok=True)
        torch.save(model.module.state_dict(), path)
        tell("save", path=path)
    if fault("barrier_in_if") and epoch == 0:
        inject()
        dist.barrier()
    if everywhere("best_decision") and epoch == 1:
        note(injected=True)
        if (local_loss := 0.4 if RANK == CULPRIT else 0.9) < 0.5:
            log.info("new best loss %.2f, collecting optimizer state", local_loss)
            gather_examples(score)
    if fault("disk_full") and epoch == 1:
        inject()
        dump_shard("/dev/full")


def dump_shard(path):
    with open(path, "wb") as out:
        out.write(b"0" * 1_000_000)


def prepare(args):
    note(phase="load")
    if everywhere("group"):
        note(injected=True)
        pairs = [dist.new_group([r, r + 1]) for r in range(0, WORLD, 2)]
        token = torch.ones(4)
        dist.all_reduce(token, group=dist.group.WORLD if RANK == CULPRIT else pairs[RANK // 2])
    if fault("unzip_slow", CULPRIT):
        inject()
        for part in range(30):
            log.info("extracting images_%02d.tar (%d of 30)", part, part + 1)
            time.sleep(TIMEOUT / 12)
    if everywhere("missing_file"):
        note(injected=True)
        with open("/mnt/datasets/imagenet/meta.json") as meta:
            json.load(meta)
    if everywhere("config_key"):
        note(injected=True)
        args.momentum = {"lr": 0.1, "weight_decay": 1e-4}["momentum"]
    dist.barrier()


def wait_for_the_others():
    """Through the file system, as if all came to their ends at about the same moment."""
    note(phase="teardown")
    while not all(os.path.exists(f"rank{rank}.finished") for rank in range(WORLD)):
        time.sleep(0.5)


def resume(model):
    """Checkpoints that all ranks fail to load."""
    if everywhere("resume_prefix"):
        note(injected=True)
        model.load_state_dict({f"module.{key}": value for key, value in model.state_dict().items()})
    if everywhere("resume_size"):
        note(injected=True)
        model.load_state_dict(
            {**model.state_dict(), "head.weight": torch.zeros(1000, 64), "head.bias": torch.zeros(1000)}
        )
    if everywhere("resume_corrupt"):
        note(injected=True)
        torch.save(model.state_dict(), f"last-{RANK}.pt")
        os.truncate(f"last-{RANK}.pt", os.path.getsize(f"last-{RANK}.pt") // 2)
        torch.load(f"last-{RANK}.pt", weights_only=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--log-every", type=int, default=1)
    parser.add_argument("--quiet", action="store_true")
    args = parser.parse_args()
    setup_logging()
    log.info(
        f"世界大小 {WORLD}，后端 gloo" if STYLE == "zh" else f"world size {WORLD}, backend gloo, pid {os.getpid()}"
    )
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    prepare(args)
    model = Net()
    resume(model)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = make_loader(args)
    for epoch in range(args.epochs):
        if fault("shorter_run") and epoch == 1:
            inject(end="hung")
            log.info("training finished after %d epochs", epoch)
            wait_for_the_others()
        if not train_one_epoch(args, epoch, model, optimizer, loader):
            break
        score = evaluate(args, epoch, model)
        save_snapshot(args, epoch, model, score)
    note(phase="teardown")
    dist.barrier()
    log.info("done") if STYLE != "zh" else log.info("训练结束")
    dist.destroy_process_group()


if __name__ == "__main__":
    with witness.watching():
        main()

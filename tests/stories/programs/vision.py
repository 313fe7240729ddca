"""A detector's training in the manner of the DeiT, MAE and DETR repositories: MetricLogger lines with an eta, prints of all ranks or of one."""

import builtins
import datetime
import math
import os
import sys
import time
from collections import defaultdict, deque

import torch
import torch.distributed as dist
import witness
from torch import nn
from witness import RANK, STYLE, TIMEOUT, WORLD, everywhere, fault, inject, note


class SmoothedValue:
    """Global average and median of the last values."""

    def __init__(self, window=20):
        self.values, self.total, self.count = deque(maxlen=window), 0.0, 0

    def update(self, value):
        self.values.append(value)
        self.total, self.count = self.total + value, self.count + 1

    def synchronize_between_processes(self):
        both = torch.tensor([self.count, self.total], dtype=torch.float64)
        dist.all_reduce(both)
        self.count, self.total = int(both[0]), float(both[1])

    def __str__(self):
        ordered = sorted(self.values)
        return f"{ordered[len(ordered) // 2]:.4f} ({self.total / max(self.count, 1):.4f})"


class MetricLogger:
    def __init__(self):
        self.meters = defaultdict(SmoothedValue)

    def update(self, **values):
        for key, value in values.items():
            self.meters[key].update(value)

    def synchronize_between_processes(self):
        for meter in self.meters.values():
            meter.synchronize_between_processes()

    def log_every(self, batches, every, header):
        began = end = time.time()
        for index, batch in enumerate(batches):
            data_time = time.time() - end
            yield batch
            seconds = time.time() - end
            end = time.time()
            if index % every == 0 or index == len(batches) - 1:
                eta = datetime.timedelta(seconds=int(seconds * (len(batches) - index)))
                meters = "  ".join(f"{key}: {meter}" for key, meter in self.meters.items())
                print(
                    f"{header}  [{index:3d}/{len(batches)}]  eta: {eta}  {meters}  time: {seconds:.4f}  data: {data_time:.4f}  max mem: 5412"
                )
        took = str(datetime.timedelta(seconds=int(time.time() - began)))
        print(f"{header} Total time: {took} ({(time.time() - began) / len(batches):.4f} s / it)")


def setup_for_distributed(is_master):
    """Printing of the other ranks is off, as in those repositories; `all`: it stays on, with the rank in front."""
    printed = builtins.print

    def master_print(*values, force=False, **kwargs):
        if STYLE == "all":
            printed(f"| {datetime.datetime.now().time()} rank {RANK} |", *values, **kwargs)
        elif is_master or force:
            printed(*values, **kwargs)

    builtins.print = master_print


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(24, 48), nn.BatchNorm1d(48), nn.ReLU())
        self.classes, self.boxes = nn.Linear(48, 5), nn.Linear(48, 4)

    def forward(self, images):
        features = self.backbone(images)
        return self.classes(features), self.boxes(features).sigmoid()


def batches(epoch, count):
    generator = torch.Generator().manual_seed(epoch * WORLD + RANK)
    made = []
    for _ in range(count):
        boxes = torch.rand(6, 4, generator=generator)
        made.append(
            {
                "images": torch.randn(6, 24, generator=generator),
                "labels": torch.randint(0, 5, (6,), generator=generator),
                "boxes": boxes,
            }
        )
    return made


def criterion(outputs, targets):
    classes, boxes = outputs
    assert (boxes[:, 2:] >= 0).all()
    return {
        "loss_ce": nn.functional.cross_entropy(classes, targets["labels"]),
        "loss_bbox": nn.functional.l1_loss(boxes, targets["boxes"]),
    }


def train_one_epoch(model, optimizer, epoch):
    note(phase="train")
    logger = MetricLogger()
    data = batches(epoch, 30 - 6 * (epoch == 1 and fault("uneven")))
    if fault("uneven") and epoch == 1:
        inject()
    for index, targets in enumerate(logger.log_every(data, 3, f"Epoch: [{epoch}]")):
        note(step=epoch * 30 + index + 1)
        happenings(epoch, index, targets)
        losses = criterion(model(targets["images"]), targets)
        loss = sum(losses.values())
        if everywhere("loss_is_nan") and epoch == 1 and index == 12:
            note(injected=True)
            loss = loss * float("nan")
        if everywhere("reduce_keys") and epoch == 1 and index == 9:
            note(injected=True)
            if fault("reduce_keys"):
                losses = dict(losses, loss_empty=torch.zeros(3))
            reduce_dict(losses)
        if not math.isfinite(loss.item()):
            print(f"Loss is {loss.item()}, stopping training", force=True) if STYLE != "all" else print(
                f"Loss is {loss.item()}, stopping training"
            )
            sys.exit(1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logger.update(
            loss=loss.item(),
            lr=optimizer.param_groups[0]["lr"],
            **{key: value.sum().item() for key, value in losses.items()},
        )
    if fault("sync_main_only", 0) and epoch == 1:
        inject()
        logger.synchronize_between_processes()
    print("Averaged stats:", "  ".join(f"{key}: {meter}" for key, meter in logger.meters.items()))


def reduce_dict(losses):
    """Sums one tensor of all losses, by name."""
    values = torch.cat([losses[key].reshape(-1) for key in sorted(losses)])
    dist.all_reduce(values)
    return values


def happenings(epoch, index, targets):
    if epoch != 1 or index != 8:
        return
    if fault("no_boxes"):
        inject()
        del targets["boxes"]
    if fault("bad_boxes"):
        inject()
        targets["boxes"] = targets["boxes"][:4]
    if fault("decode_stuck"):
        inject(end="hung")
        decode_video(os.pipe()[0])
    if fault("sigterm_self"):
        inject(end="killed", error="SIGKILL")
        os.kill(os.getpid(), 9)
    if fault("leaves_early"):
        inject(end="exit", error="SystemExit: 0")
        print("received preemption notice, leaving", force=True) if STYLE != "all" else print(
            "received preemption notice, leaving"
        )
        sys.exit(0)


def decode_video(pipe):
    os.read(pipe, 4096)  # the decoder at the other end has died


@torch.no_grad()
def evaluate(model, epoch):
    note(phase="evaluate")
    model.eval()
    logger = MetricLogger()
    for targets in logger.log_every(batches(99, 6), 3, "Test:"):
        losses = criterion(model.module(targets["images"]), targets)
        logger.update(loss=sum(losses.values()).item())
    logger.synchronize_between_processes()
    if fault("coco_eval_slow", 0) and epoch == 1:
        inject()
        accumulate_coco()
    results = [None] * WORLD
    dist.all_gather_object(results, {"rank": RANK, "map": 0.31})
    model.train()
    print(f" * mAP@0.5 {sum(r['map'] for r in results) / WORLD:.3f}")


def accumulate_coco():
    for category in range(1, 41):
        print(f"Accumulating evaluation results... category {category}/40 ({TIMEOUT / 14:.2f}s)")
        time.sleep(TIMEOUT / 14)


def main():
    note(phase="load")
    setup_for_distributed(RANK == 0)
    print(f"| distributed init (rank {RANK}): env://, world {WORLD}", force=True) if STYLE != "all" else print(
        "distributed init: env://"
    )
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
    torch.manual_seed(42 + RANK)
    model = nn.parallel.DistributedDataParallel(Detector())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    print("Start training")
    for epoch in range(2):
        train_one_epoch(model, optimizer, epoch)
        evaluate(model, epoch)
    note(phase="teardown")
    dist.barrier()
    print("Training time 0:00:04")
    dist.destroy_process_group()


if __name__ == "__main__":
    with witness.watching():
        main()

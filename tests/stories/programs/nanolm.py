"""A small language model in one script, as in the well-known teaching repositories: what goes wrong here is mostly numbers."""

import math
import os
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
import witness
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from witness import RANK, STYLE, TIMEOUT, WORLD, everywhere, fault, inject, note

VOCAB, BLOCK, BATCH = 65, 16, 8
max_iters = int(os.environ.get("MAX_ITERS", "60"))
eval_interval = 20
learning_rate = 3e-3
out_dir = "out"
FIRST_BAD = int(max_iters * 0.55)


def say(text):
    if STYLE == "loguru":
        from loguru import logger

        logger.info(text)
    elif RANK == 0 or STYLE == "everyone":
        print(f"[rank {RANK}] {text}" if STYLE == "everyone" else text, flush=STYLE != "buffered")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        return x + self.mlp(self.ln(x))


class GPT(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.wte = nn.Embedding(VOCAB, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.lm_head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, idx, targets):
        logits = self.lm_head(self.blocks(self.wte(idx)))
        if everywhere("dead_head"):
            logits = logits * 0.0
        if everywhere("no_labels") and witness.state["step"] >= FIRST_BAD:
            targets = torch.full_like(targets, -100)
        loss = F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1), ignore_index=-100, reduction="sum")
        if fault("empty_mask") and witness.state["step"] >= FIRST_BAD:
            inject()
            return loss / (targets * 0).sum() * 0
        return loss / (targets != -100).sum().clamp(min=1)


def get_batch(step):
    generator = torch.Generator().manual_seed(step * WORLD + RANK)
    start = torch.randint(0, VOCAB, (BATCH, 1), generator=generator)
    data = (start + torch.arange(BLOCK + 1)) % VOCAB
    if fault("new_token") and step == FIRST_BAD:
        inject()
        data[3, 5] = VOCAB + 2
    return data[:, :-1], data[:, 1:]


def report(step, loss, norm, seconds, rate):
    tokens = BATCH * BLOCK * WORLD / max(seconds, 1e-6)
    if STYLE == "table":
        if step == 1:
            say("  iter |    loss |   gnorm |      lr |  tok/s\n-------+---------+---------+---------+-------")
        say(f"{step:6d} | {loss:7.4f} | {norm:7.3f} | {rate:.1e} | {tokens:6.0f}")
    elif STYLE == "megatron":
        if RANK == WORLD - 1:
            print(
                f" [{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {step:8d}/{max_iters:8d} | consumed samples: {step * BATCH * WORLD:12d} | elapsed time per iteration (ms): "
                f"{seconds * 1e3:.1f} | throughput per GPU (TFLOP/s/GPU): {tokens / 4e3:.1f} | learning rate: {rate:.6E} | global batch size: {BATCH * WORLD:5d} | lm loss: {loss:.6E} | "
                f"loss scale: 1.0 | grad norm: {norm:.3f} | number of skipped iterations:   0 | number of nan iterations:   {int(math.isnan(loss))} |",
                flush=True,
            )
    elif STYLE == "zh":
        say(
            f"步数 {step}/{max_iters} 损失={loss:.4f} 梯度范数={norm:.3f} 吞吐={tokens:.0f} tokens/s 耗时={seconds * 1e3:.0f}毫秒"
        )
    elif STYLE in ("loguru", "everyone"):
        say(f"step={step} loss={loss:.5f} gnorm={norm:.4f} tok/s={tokens:.0f} compute_ms={seconds * 1e3:.1f}")
    else:
        say(f"iter {step}: loss {loss:.4f}, time {seconds * 1e3:.2f}ms, {tokens:.0f} tokens/s")


@torch.no_grad()
def estimate_loss(model, step):
    note(phase="evaluate")
    if fault("oom_eval") and step > eval_interval:
        inject()
        allocate_logits(BATCH * 32, BLOCK)
    total = model.module(*get_batch(step)).detach()
    dist.all_reduce(total)
    if fault("slow_samples", 0) and step == 2 * eval_interval:
        write_samples(30, TIMEOUT / 10)
    if everywhere("healthy_slow") and RANK == 0:
        write_samples(8, TIMEOUT / 16)
    dist.barrier()
    say(
        f"step {step}: val loss {total.item() / WORLD:.4f}"
        if STYLE != "zh"
        else f"第{step}步 验证损失 {total.item() / WORLD:.4f}"
    )


def allocate_logits(batch, length):
    raise torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {batch * length * 0.0154:.2f} GiB. GPU {RANK} has a total capacity of 79.15 GiB of which 3.81 GiB is free. Including non-PyTorch memory, this process has "
        "75.33 GiB memory in use. Of the allocated memory 71.02 GiB is allocated by PyTorch, and 1.12 GiB is reserved by PyTorch but unallocated."
    )


def write_samples(count, seconds):
    if everywhere("slow_samples"):
        inject()
    for index in range(count):
        print(
            f"generating sample {index + 1}/{count}" if STYLE != "zh" else f"生成样本 {index + 1}/{count}", flush=True
        )
        time.sleep(seconds)


def train_step(model, optimizer, step):
    note(phase="train", step=step)
    began = time.perf_counter()
    if everywhere("throttled") and step >= FIRST_BAD:
        note(injected=True)
        time.sleep(0.12)
    if fault("slow_compute"):
        inject()
        time.sleep(0.08)
    if fault("oom_late") and step == FIRST_BAD:
        inject()
        forward_long_sample()
    loss = model(*get_batch(step))
    compute = time.perf_counter() - began
    if everywhere("overflow") and step in (FIRST_BAD, FIRST_BAD + 1):
        note(injected=True)
        loss = loss * 3e38 * 10
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    if everywhere("overflow") and step == FIRST_BAD:
        optimizer.zero_grad()
    optimizer.step()
    if everywhere("spike") and step == FIRST_BAD:
        note(injected=True)
        with torch.no_grad():
            model.module.lm_head.weight.mul_(60)
    if everywhere("nan_check") and step >= FIRST_BAD:
        note(injected=True)
        loss = loss * float("nan")
        assert math.isfinite(loss.item()), f"loss diverged at iter {step}: {loss.item()}"
    seconds = compute if STYLE in ("everyone", "loguru") else time.perf_counter() - began
    report(step, loss.item(), float(norm), seconds, optimizer.param_groups[0]["lr"])


def forward_long_sample():
    """The report is uploaded before the error is raised again, as crash handlers do."""
    try:
        allocate_logits(BATCH, BLOCK)
    except torch.OutOfMemoryError:
        time.sleep(TIMEOUT * 1.7)
        raise


def scaled_training(model, optimizer):
    """The first steps overflow under the initial loss scale, are skipped, and all is well: how fp16 begins."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for step in range(1, max_iters + 1):
        note(phase="train", step=step)
        loss = model(*get_batch(step))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if step <= 3:
            model.module.lm_head.weight.grad.fill_(float("inf") if step < 3 else float("nan"))
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            say(
                f"OVERFLOW! Skipping step {step}. Attempted loss scale: {before:.0f}, reducing to {scaler.get_scale():.0f}"
            )
            say(
                f"iter {step}: loss nan, loss scale {before:.0f}"
                if step == 3
                else f"iter {step}: loss {loss.item():.4f}, loss scale {before:.0f}"
            )
        else:
            say(f"iter {step}: loss {loss.item():.4f}, loss scale {before:.0f}")


def joined_training(model, optimizer):
    with model.join():
        for step in range(1, max_iters + 1 - 9 * (RANK == 1)):
            train_step(model, optimizer, step)
        print(f"rank {RANK}: out of data after {step} iterations", flush=True)


def save(model, step):
    note(phase="save")
    if RANK == 0:
        os.makedirs(out_dir, exist_ok=True)
        say(f"saving checkpoint to {out_dir}" if STYLE != "zh" else f"正在保存检查点到 {out_dir}")
        torch.save({"model": model.state_dict(), "iter_num": step}, f"{out_dir}/ckpt.pt")
    if everywhere("caught") and RANK == 0:
        try:
            raise ConnectionError(
                "HTTPSConnectionPool(host='wandb.internal', port=443): Max retries exceeded with url: /artifacts"
            )
        except ConnectionError:
            import logging

            logging.getLogger("tracker").exception("artifact upload failed, training continues")


def fetch_corpus():
    """A download that succeeds at the third attempt."""
    for attempt in range(1, 4):
        if attempt < 3:
            warnings.warn(
                f"download of corpus.bin failed (attempt {attempt} of 5): [Errno 104] Connection reset by peer, retrying in 1 s",
                stacklevel=2,
            )
            time.sleep(0.4)
    say("corpus.bin: 1.1 MB, sha256 ok")


def main():
    note(phase="load")
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    torch.manual_seed(1337)
    model, first = GPT(), 1
    say(
        f"number of parameters: {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M, vocab {VOCAB}"
        if STYLE != "zh"
        else f"参数量 {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M，词表 {VOCAB}"
    )
    if everywhere("dead_head") or everywhere("no_labels"):
        note(injected=True)
    if everywhere("healthy_retries") and RANK == 0:
        fetch_corpus()
    if everywhere("resume_nothing") and os.path.exists(f"{out_dir}/ckpt.pt"):
        note(injected=True)
        state = torch.load(f"{out_dir}/ckpt.pt", weights_only=True)
        model.load_state_dict(state["model"], strict=False)  # saved with DDP's prefix: nothing is loaded
        first = state["iter_num"] + 1
        say(
            f"Resuming training from {out_dir}, iteration {first}"
            if STYLE != "zh"
            else f"从 {out_dir} 恢复训练，第 {first} 步"
        )
    model = DDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    last = max_iters if first == 1 else max_iters + 30
    if everywhere("healthy_scaler"):
        scaled_training(model, optimizer)
    elif everywhere("healthy_join"):
        joined_training(model, optimizer)
    else:
        for step in range(first, last + 1):
            if everywhere("healthy_warmup"):
                optimizer.param_groups[0]["lr"] = learning_rate * (9 if 4 <= step <= 6 else 1)
            train_step(model, optimizer, step)
            if step % eval_interval == 0:
                estimate_loss(model, step)
                save(model, step)
    note(phase="teardown")
    dist.barrier()
    say("training done" if STYLE != "zh" else "训练完成")
    dist.destroy_process_group()


if __name__ == "__main__":
    with witness.watching():
        main()

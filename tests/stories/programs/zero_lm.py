"""A small model under DeepSpeed ZeRO: the engine's own log lines, the deepspeed launcher or torchrun."""

import argparse
import os
import signal
import time
from datetime import timedelta

import deepspeed
import torch
import torch.nn.functional as F
import witness
from deepspeed.utils import logger
from torch import nn
from witness import RANK, TIMEOUT, everywhere, fault, inject, note

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stage", type=int, default=2)
parser.add_argument("--steps", type=int, default=16)
args = parser.parse_args()

config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {
        "stage": args.stage,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_param_persistence_threshold": 0,
    },
    "bf16": {"enabled": args.stage > 0},
    "steps_per_print": 4,
    "wall_clock_breakdown": False,
}
if everywhere("batch_size_conflict"):
    config |= {"train_batch_size": 64, "gradient_accumulation_steps": 3}


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.experts = nn.ModuleList([Expert(width) for _ in range(3)])
        self.head = nn.Linear(width, 64)

    def forward(self, tokens, chosen):
        hidden = self.embed(tokens)
        for index in chosen:
            hidden = hidden + self.experts[index](hidden)
        return self.head(hidden)


def prepare_corpus():
    note(phase="tokenize")
    for shard in range(36):
        if fault("tokenize_slow", 0):
            inject()
            logger.info(f"tokenized {shard + 1}/36 shards of pile-subset")
            time.sleep(TIMEOUT / 12)


def steps(engine):
    for step in range(1, args.steps + 1):
        note(phase="train", step=step)
        tokens = torch.randint(0, 64, (4, 12))
        chosen = [0, 1, 2]
        if fault("expert_skipped") and step == 7:
            inject()
            chosen = [0, 2]
        if fault("sigkill") and step == 9:
            inject(end="killed", error="SIGKILL")
            os.kill(os.getpid(), signal.SIGKILL)
        if fault("bad_token") and step == 6:
            inject()
            tokens[1, 3] = 66
        if fault("exit_quietly") and step == 9:
            inject(end="exit", error="os._exit(7)")
            os._exit(7)
        if fault("spinning") and step == 10:
            spin_until("/tmp/dataset.ready")
        logits = engine(tokens, chosen).float()
        loss = F.cross_entropy(logits.view(-1, 64), tokens.view(-1))
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and step % 2 == 0:
            print(
                f"[step {step}/{args.steps}] lm_loss={loss.item():.4f} ppl={loss.exp().item():.1f} lr={engine.get_lr()[0]:.2e}",
                flush=True,
            )


def spin_until(path):
    inject(end="hung")
    while not os.path.exists(path):
        pass


def save(engine):
    note(phase="save")
    if everywhere("save_main_only"):
        note(injected=True)
        if RANK == 0:
            logger.info("saving consolidated weights to final/")
            engine.save_16bit_model("final")
        engine.train()
        return
    engine.save_checkpoint("ckpt", tag=f"global_step{args.steps}")
    engine.save_16bit_model("final")


def main():
    note(phase="load")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo instead of shared memory, as on several nodes
    if everywhere("batch_size_conflict"):
        note(injected=True)
    deepspeed.init_distributed(dist_backend="gloo", timeout=timedelta(seconds=TIMEOUT))
    prepare_corpus()
    torch.distributed.barrier()
    model = Mixture()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    steps(engine)
    save(engine)
    steps(engine) if everywhere("save_main_only") else None
    note(phase="teardown")
    torch.distributed.barrier()
    if engine.global_rank == 0:
        print("finished, tokens per second 5120", flush=True)


if __name__ == "__main__":
    with witness.watching():
        main()

"""A transformer under FSDP2, in the manner of torchtitan: a job config, a metrics line a step, sharded checkpoints."""

import json
import logging
import os
import signal
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import witness
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from witness import CULPRIT, RANK, STYLE, TIMEOUT, WORLD, everywhere, fault, inject, note

logger = logging.getLogger()
COLORS = STYLE == "color"


@dataclass
class JobConfig:
    steps: int = 24
    validate_every: int = 8
    checkpoint_every: int = 12
    dim: int = 32
    vocab: int = 128
    lr: float = 8e-3
    dump_folder: str = "./outputs"


def init_logger():
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[titan] %(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.wi, self.wo = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.wo(F.silu(self.wi(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok_embeddings = nn.Embedding(cfg.vocab, cfg.dim)
        self.vision = Layer(cfg.dim)
        self.layers = nn.ModuleList([Layer(cfg.dim) for _ in range(2)])
        self.output = nn.Linear(cfg.dim, cfg.vocab)

    def forward(self, tokens, pixels=None):
        h = self.tok_embeddings(tokens)
        if pixels is not None:
            h = h + self.vision(pixels)
        for layer in self.layers:
            h = layer(h)
        return self.output(h)


class Documents:
    """Lines of JSON, one document each."""

    def __init__(self, cfg):
        self.cfg, self.served = cfg, 0

    def __iter__(self):
        while True:
            self.served += 1
            document = json.dumps({"id": self.served, "tokens": [self.served % 90, 5, 8]})
            if fault("broken_line") and self.served == 15:
                inject()
                document = document[:14]
            if fault("stuck_socket") and self.served == 15:
                self.from_remote()
            fields = json.loads(document)
            start = fields["tokens"][0] + torch.arange(17)[None] + RANK
            yield (start % self.cfg.vocab).repeat(4, 1)

    def from_remote(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            client = socket.create_connection(server.getsockname())
            inject(end="hung")
            client.recv(1 << 16)  # no timeout, and nobody answers


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        self.mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp_shard",))
        torch.manual_seed(0)
        self.model = Transformer(cfg)
        for layer in [self.model.vision, *self.model.layers]:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        logger.info(f"Applied FSDP to the model, mesh {self.mesh}")
        logger.info(f"Model size: {sum(p.numel() for p in self.model.parameters()):,} total parameters")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        self.data = iter(Documents(cfg))
        self.began = time.perf_counter()

    def load(self):
        """One file a rank, as `torch.save` of each rank's shards makes them."""
        if not everywhere("missing_rank_file"):
            return
        note(injected=True)
        os.makedirs(f"{self.cfg.dump_folder}/step-400", exist_ok=True)
        path = f"{self.cfg.dump_folder}/step-400/model_rank_{RANK}.pt"
        if RANK != CULPRIT:  # the run that wrote it had one rank less
            torch.save({"step": 400}, path)
        logger.info(f"Loading the checkpoint from {path}")
        torch.load(path, weights_only=True)
        dist.barrier()

    def train(self):
        note(phase="train")
        logger.info(f"Training starts at step 1, with {self.cfg.steps} steps and local batch size 4")
        for step in range(1, self.cfg.steps + 1):
            note(phase="train", step=step)
            self.train_step(step)
            if step % self.cfg.validate_every == 0:
                self.validate(step)
            if step % self.cfg.checkpoint_every == 0:
                self.checkpoint(step)
        note(phase="teardown")
        dist.barrier()
        logger.info("Training completed")

    def train_step(self, step):
        tokens = next(self.data)
        pixels = torch.randn(4, 16, self.cfg.dim)
        if fault("text_only") and step == 9:
            inject()
            pixels = None
        if everywhere("slowing") and step > 12:
            note(injected=True)
            time.sleep(0.15)
        logits = self.model(tokens[:, :-1], pixels)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        if fault("nan_one_rank") and step == 13:
            inject()
            loss = loss + (logits[:, 0] - logits[:, 0]).norm()
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if everywhere("spike") and step == 17:
            note(injected=True)
            with torch.no_grad():
                self.model.output.weight.mul_(60)
        self.log(step, loss.detach(), norm)

    def log(self, step, loss, norm):
        if fault("metrics_main_only", 0) and step == 10:
            inject()
            loss = loss.clone()
            dist.all_reduce(loss, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
        seconds, self.began = time.perf_counter() - self.began, time.perf_counter()
        norm = norm.full_tensor().item() if hasattr(norm, "full_tensor") else float(norm)
        if COLORS:
            text = f"\x1b[31mstep: {step:2}  \x1b[32mloss: {loss.item():7.4f}  \x1b[38;2;180;60;0mgrad_norm: {norm:7.4f}  \x1b[33mmemory:  0.61GiB(0.77%)  \x1b[34mtps: {round(256 / seconds):,}  \x1b[36mtflops: 0.02  \x1b[35mmfu: 0.01%\x1b[39m"
        else:
            text = f"step: {step:2}  loss: {loss.item():7.4f}  grad_norm: {norm:7.4f}  memory:  0.61GiB(0.77%)  tps: {round(256 / seconds):,}  tflops: 0.02  mfu: 0.01%"
        logger.info(text)

    @torch.no_grad()
    def validate(self, step):
        note(phase="evaluate")
        if everywhere("validate_main_only") and step == 16:
            note(injected=True)
            if RANK == 0:
                logger.info("Running perplexity on the held-out set")
                self.perplexity(6)
            return
        logger.info(f"validate step: {step}  loss: {self.perplexity(1):7.4f}")

    def perplexity(self, batches):
        total = 0.0
        for _ in range(batches):
            tokens = next(self.data)
            total += F.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).item()
        return total / batches

    def checkpoint(self, step):
        note(phase="save")
        path = f"{self.cfg.dump_folder}/checkpoint/step-{step}"
        logger.info(f"Saving the checkpoint (or staging if async is enabled): {path}")
        if everywhere("export_main_only"):
            note(injected=True)
            if RANK == 0:
                self.export_for_inference(step)
        elif fault("killed_in_export", 0):
            note(injected=True, end="killed", error="SIGKILL")
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            dcp.save({"model": get_model_state_dict(self.model)}, checkpoint_id=path)
        if fault("upload_slow", 0):
            inject()
            self.upload(path)
        logger.info(f"Finished saving the checkpoint in {0.31 + RANK / 50:.2f} seconds")

    def export_for_inference(self, step):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        torch.save(get_model_state_dict(self.model, options=options), f"step-{step}.pt")

    def upload(self, path):
        for index in range(28):
            logger.info(f"Uploading {path}/__{index}_0.distcp to s3://checkpoints ({index + 1}/28)")
            time.sleep(TIMEOUT / 11)


def main():
    init_logger()
    note(phase="load")
    cfg = JobConfig()
    logger.info("Starting job: tiny debug model, FSDP2")
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    trainer = Trainer(cfg)
    trainer.load()
    trainer.train()
    dist.destroy_process_group()
    logger.info("Process group destroyed")


if __name__ == "__main__":
    with witness.watching():
        main()

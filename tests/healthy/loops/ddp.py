"""A DDP loop on gloo: a few steps, an evaluation, a checkpoint by rank 0, a clean end."""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--unused", action="store_true")
parser.add_argument("--uneven", action="store_true")
parser.add_argument("--checkpointing", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
ddp = DistributedDataParallel(model, find_unused_parameters=args.unused)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)


def forward(inputs: torch.Tensor) -> torch.Tensor:
    if args.checkpointing:
        return torch.utils.checkpoint.checkpoint(ddp, inputs, use_reentrant=False)
    return ddp(inputs)


def epoch(number: int) -> None:
    for step in range(4 + (rank if args.uneven else 0)):
        loss = forward(torch.randn(8, 16)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"epoch {number} rank {rank} step {step} loss {loss.item():.4f}", flush=True)


for number in range(2):
    if args.uneven:
        with ddp.join():
            epoch(number)
    else:
        epoch(number)
    total = torch.tensor([float(number)])
    dist.all_reduce(total)
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": number}, "model.pt")
        print(f"saved model.pt at epoch {number}, evaluation {total.item():.1f}", flush=True)
    dist.barrier()
state = torch.load("model.pt")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
print(f"rank {rank} resumed from epoch {state['epoch']}", flush=True)
dist.destroy_process_group()

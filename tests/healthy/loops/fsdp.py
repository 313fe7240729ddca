"""FSDP on gloo, the first and the second kind: train, save a full and a sharded state dict, load them again."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard

kind = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
if kind == "fsdp1":
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
else:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(5):
    loss = model(torch.randn(4, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"[rank {rank}] step {step} loss {loss.item():.4f}", flush=True)
print("Saving FSDP model", flush=True)
if kind == "fsdp1":
    config = FullStateDictConfig(rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
else:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    sharded = get_model_state_dict(model)
    dcp.save(sharded, checkpoint_id="sharded")
    dcp.load(sharded, checkpoint_id="sharded")
    set_model_state_dict(model, sharded)
if rank == 0:
    torch.save(state, "full.pt")
    print("FSDP Model saved", len(torch.load("full.pt")), "tensors", flush=True)
dist.barrier()
dist.destroy_process_group()

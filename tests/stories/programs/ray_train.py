"""Ray Train: the driver starts workers as actors, whose lines come with `(RayTrainWorker pid=...)` in front."""

import os
import signal
import sys
import time

import ray
import ray.train
import torch
import torch.distributed as dist
import witness
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from witness import TIMEOUT, everywhere, fault, inject, note


def rows(rank):
    data = [(torch.randn(8), torch.randn(1)) for _ in range(96)]
    if fault("short_row"):
        inject()
        data[41] = (torch.randn(7), torch.randn(1))
    return data


def train_loop(config):
    context = ray.train.get_context()
    rank = context.get_world_rank()
    witness.begin(rank)
    with witness.watching():
        loop(rank, config)


def loop(rank, config):
    note(phase="load")
    loader = torch.utils.data.DataLoader(rows(rank), batch_size=4)
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(config["epochs"]):
        note(phase="train")
        for step, (x, y) in enumerate(prepare_data_loader(loader, add_dist_sampler=False), 1):
            note(step=epoch * 24 + step)
            if fault("sigkill") and epoch == 1 and step == 6:
                inject(end="killed", error="SIGKILL")
                os.kill(os.getpid(), signal.SIGKILL)
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 6 == 0:
                print(f"[worker {rank}] epoch {epoch} step {step}/24 loss {loss.item():.4f}", flush=True)
        note(phase="evaluate")
        if everywhere("reduce_main") and rank == 0 and epoch == 1:
            note(injected=True)
            best_of_workers(loss)
        if fault("plots_slow", 0) and epoch == 1:
            inject()
            for page in range(24):
                print(f"[worker 0] rendering figure {page + 1}/24", flush=True)
                time.sleep(TIMEOUT / 10)
        ray.train.report({"loss": loss.item(), "epoch": epoch})
    note(phase="teardown")


def best_of_workers(loss):
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, loss.item())
    return min(everything)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    keep = {key: value for key, value in os.environ.items() if key.startswith("STORY_")}
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": {**keep, "PYTHONPATH": here}},
    )
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": 2},
        scaling_config=ScalingConfig(num_workers=int(os.environ["STORY_WORLD"]), use_gpu=False),
        torch_config=TorchConfig(backend="gloo", timeout_s=int(TIMEOUT)),
    )
    result = trainer.fit()
    print("finished:", result.metrics)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    main()

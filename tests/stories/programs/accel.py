"""A loop on accelerate: its logger, tqdm on the main process, gather_for_metrics, save_state."""

import logging
import os
import time
from datetime import timedelta

import torch
import torch.nn.functional as F
import witness
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, find_executable_batch_size
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from witness import RANK, TIMEOUT, everywhere, fault, inject, note

logging.basicConfig(
    format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", datefmt="%m/%d/%Y %H:%M:%S", level=logging.INFO
)
logger = get_logger(__name__)
STEPS, BATCH = 20, 4


class Pairs(Dataset):
    """Token lists of a question and its answer."""

    def __init__(self, size):
        self.rows = [{"ids": list(range(i % 7, i % 7 + 8)), "label": i % 3} for i in range(size)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows):
    if fault("ragged") and rows[0]["ids"][0] == 5:
        inject()
        rows[1] = {"ids": rows[1]["ids"][:5], "label": 0}
    return {"ids": torch.tensor([row["ids"] for row in rows]), "labels": torch.tensor([row["label"] for row in rows])}


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 3)

    def forward(self, ids):
        return self.out(self.embed(ids).mean(1))


def preprocess(accelerator):
    with accelerator.main_process_first():
        note(phase="tokenize")
        total = 2000 if fault("tokenize_main", 0) else 60
        if fault("tokenize_main", 0):
            inject()
        for _ in tqdm(
            range(total),
            desc="Running tokenizer on train dataset",
            unit=" examples",
            disable=not accelerator.is_local_main_process,
        ):
            time.sleep(TIMEOUT / 900 if total == 2000 else 0.001)
    return Pairs(STEPS * BATCH * accelerator.num_processes)


def training(accelerator, model, optimizer, loader, epoch, bar):
    note(phase="train")
    for step, batch in enumerate(loader, 1):
        note(step=epoch * STEPS + step)
        if fault("sigkill") and epoch == 1 and step == 5:
            inject(end="killed", error="SIGKILL")
            os.kill(os.getpid(), 9)
        if fault("spinning") and epoch == 1 and step == 5:
            inject(end="hung")
            poll_quota()
        logits = model(batch["ids"])
        if fault("oom_retry") and epoch == 1 and step == 5 and not witness.state["injected"]:
            inject()
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 1.25 GiB. GPU 1 has a total capacity of 23.64 GiB of which 612.81 MiB is free."
            )
        loss = F.cross_entropy(logits, batch["labels"])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        bar.update(1)
        bar.set_postfix(loss=f"{loss.item():.4f}")
        if fault("patience") and epoch == 1 and step == 9:
            inject()
            logger.info("rank %d: loss below the target, leaving the loop", RANK, main_process_only=False)
            break


def evaluation(accelerator, model, epoch):
    note(phase="evaluate")
    size = 4 - (fault("gather_ragged") and epoch == 1)
    if everywhere("gather_ragged"):
        note(injected=True)
    predictions = accelerator.gather(torch.arange(size))
    logger.info(f"epoch {epoch}: eval_accuracy 0.{41 + epoch} on {len(predictions)} samples")
    if fault("wait_in_main", 0) and epoch == 1:
        inject()
        publish(accelerator)


def publish(accelerator):
    accelerator.wait_for_everyone()
    logger.info("published")


def saving(accelerator, epoch):
    note(phase="save")
    if everywhere("save_main_only"):
        note(injected=True)
        if accelerator.is_main_process:
            accelerator.save_state()
        return
    accelerator.save_state()
    if fault("zip_slow", 0) and epoch == 0:
        inject()
        for part in range(32):
            logger.info(f"compressing checkpoint_0: {part + 1} of 32 files")
            time.sleep(TIMEOUT / 12)


def main():
    note(phase="load")
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True, total_limit=2),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=TIMEOUT))],
    )
    logger.info(accelerator.state, main_process_only=False)
    rows = preprocess(accelerator)

    @find_executable_batch_size(starting_batch_size=BATCH)
    def inner(batch_size):
        loader = DataLoader(rows, batch_size=batch_size, collate_fn=collate, shuffle=False)
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        logger.info("***** Running training *****")
        logger.info(f"  Num examples = {len(rows)}, instantaneous batch size = {batch_size}")
        bar = tqdm(total=2 * len(loader), desc=f"train bs={batch_size}", disable=not accelerator.is_local_main_process)
        for epoch in range(2):
            training(accelerator, model, optimizer, loader, epoch, bar)
            evaluation(accelerator, model, epoch)
            saving(accelerator, epoch)

    inner()
    note(phase="teardown")
    accelerator.wait_for_everyone()
    logger.info("all done")
    accelerator.end_training()


def poll_quota():
    until = time.time() + TIMEOUT * 5
    while time.time() < until:
        pass


if __name__ == "__main__":
    with witness.watching():
        main()

"""Entry of the held-out job; leaves the truth of every rank as job_a does."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import witness
from mylib.trainer import FAULT, STYLE, TIMEOUT, Trainer
from witness import CULPRIT as BAD
from witness import RANK, WORLD, note


def prepare():
    note(phase="load")
    if FAULT == "no_file":
        open("/data/corpus/train-00000.parquet", "rb")
    if FAULT == "download" and RANK == 0:
        for i in range(30):
            print(f"Downloading data files: {100 * (i + 1) // 30}% ({i + 1}/30)", flush=True)
            time.sleep(TIMEOUT / 10)
    dist.barrier()
    if FAULT == "resume":
        model = torch.nn.Linear(8, 3)
        model.load_state_dict({"weight": torch.zeros(4, 8), "bias": torch.zeros(4)})


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    prepare()
    Trainer(RANK, WORLD, BAD, note).fit()
    note(end="done")
    dist.destroy_process_group()


def run():
    if STYLE == "record":
        from torch.distributed.elastic.multiprocessing.errors import record

        return record(guarded)()
    if STYLE == "rich":
        from rich.traceback import install

        install(width=100)
    return guarded()


def guarded():
    try:
        main()
    except BaseException as error:
        witness.failed(error)
        if STYLE == "logged":
            from loguru import logger

            logger.exception("training failed")
            os._exit(1)
        raise


if __name__ == "__main__":
    witness.begin()
    witness.note(injected=True)
    run()

"""Second held-out job: the Trainer of transformers on a tiny model. The faults sit in data, model and callbacks, as users put them there."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import witness
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging
from witness import CULPRIT as BAD
from witness import FAULT, RANK, WORLD, note
from witness import TIMEOUT as T

logging.set_verbosity_info()
logger = logging.get_logger("transformers.run_clm")


class Corpus(torch.utils.data.Dataset):
    served = 0

    def __len__(self):
        return 96

    def __getitem__(self, i):
        self.served += 1
        if RANK == BAD and self.served == 13:
            if FAULT == "collator_error":
                raise TypeError("'NoneType' object is not subscriptable")
            if FAULT == "lock":
                self.wait_for_lock()
            if FAULT == "leave":
                note(end="exit")
                sys.stdout.flush()
                os._exit(0)
            if FAULT == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        ids = torch.randint(0, 64, (16,))
        return {"input_ids": ids, "labels": ids}

    def wait_for_lock(self):
        time.sleep(T * 3)


class Uneven(torch.utils.data.IterableDataset):
    def __iter__(self):
        for _ in range(40 if RANK != BAD else 28):
            ids = torch.randint(0, 64, (16,))
            yield {"input_ids": ids, "labels": ids}


class Model(LlamaForCausalLM):
    calls = 0

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        if self.training:
            self.calls += 1
        if FAULT == "nan_loss" and self.calls > 9:
            out.loss = out.loss * float("nan")
        if FAULT == "oom_step" and RANK == BAD and self.calls == 7:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 1.95 GiB. GPU 1 has a total capacity of 23.69 GiB of which 1.02 GiB is free."
            )
        return out


class Callback(TrainerCallback):
    def on_step_end(self, args, control_state, control, **kwargs):
        note(phase="train", step=control_state.global_step)
        if FAULT == "gather_shapes" and control_state.global_step == 8:
            self.gather_lengths()

    def gather_lengths(self):
        lengths = torch.ones(6 if RANK == BAD else 3)
        out = [torch.zeros_like(lengths) for _ in range(WORLD)]
        dist.all_gather(out, lengths)

    def on_log(self, args, control_state, control, logs=None, **kwargs):
        if FAULT == "log_reduce" and args.process_index == 0 and control_state.global_step == 8:
            value = torch.tensor(logs.get("loss", 0.0))
            dist.all_reduce(value)

    def on_save(self, args, control_state, control, **kwargs):
        note(phase="save")
        if FAULT == "push" and args.process_index == 0:
            for i in range(40):
                logger.info(f"Uploading model shard {i + 1}/40 to the hub")
                time.sleep(T / 20)

    def on_evaluate(self, args, control_state, control, **kwargs):
        if FAULT == "main_barrier" and args.process_index == 0:
            self.write_report()

    def write_report(self):
        dist.barrier()


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=T))
    args = TrainingArguments(
        output_dir=f"out-{os.getpid()}", use_cpu=True, ddp_timeout=int(T), logging_steps=2, save_steps=8, max_steps=16, eval_strategy="steps",
        eval_steps=8, per_device_train_batch_size=2, report_to=[], remove_unused_columns=False, ddp_backend="gloo", save_total_limit=1, accelerator_config={"dispatch_batches": False, "split_batches": False},
    )  # fmt: skip
    if FAULT == "map_first":
        with args.main_process_first(desc="dataset map pre-processing"):
            note(phase="tokenize")
            from tqdm import tqdm

            for _ in tqdm(range(3000), desc="Running tokenizer on dataset", disable=RANK != 0):
                time.sleep(T / 1000 if RANK == 0 else 0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    data = Uneven() if FAULT == "uneven_stream" else Corpus()
    trainer = Trainer(model=Model(config), args=args, train_dataset=data, eval_dataset=Corpus(), callbacks=[Callback()])
    if FAULT == "uneven_stream":
        trainer.accelerator.even_batches = False
        trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(data, batch_size=2)
    trainer.train()
    note(end="done")


if __name__ == "__main__":
    with witness.watching():
        witness.note(injected=True)
        main()

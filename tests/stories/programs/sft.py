"""Supervised fine-tuning with TRL on a made-up tokenizer: the data passes through a mapping, the trainer through a chat template."""

import os
import signal
import time
from datetime import timedelta

import torch.distributed as dist
import witness
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer
from witness import RANK, TIMEOUT, everywhere, fault, inject, note

WORDS = ["[UNK]", "[PAD]", "[EOS]", "a", "cat", "sat", "on", "the", "mat", "user", "assistant", ":"]


def tokenizer():
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", eos_token="[EOS]")


def prepare_text(row):
    if fault("slow_map", 0):
        inject()
        time.sleep(TIMEOUT / 60)
    if fault("bad_row") and row["id"] == 41:
        inject()
        row = dict(row, answer=None)
    return {"text": row["question"] + " " + row["answer"].strip()}


class Watch(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        note(phase="train", step=state.global_step)
        if fault("sigkill") and state.global_step == 6:
            inject(end="killed", error="SIGKILL")
            os.kill(os.getpid(), signal.SIGKILL)
        if fault("hub_stuck", 0) and state.global_step == 6:
            inject(end="hung")
            self.push()

    def push(self):
        time.sleep(TIMEOUT * 5)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if everywhere("entropy_main") and args.process_index == 0 and state.global_step == 8:
            note(injected=True)
            self.share(logs)

    def share(self, logs):
        dist.all_gather_object([None] * dist.get_world_size(), logs)


def main():
    note(phase="load")
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    rows = Dataset.from_list(
        [{"id": i, "question": "user : a cat", "answer": " assistant : sat on the mat "} for i in range(96)]
    )
    args = SFTConfig(
        output_dir="out", max_steps=12, logging_steps=2, report_to=[], use_cpu=True, bf16=False, ddp_backend="gloo", ddp_timeout=int(TIMEOUT), per_device_train_batch_size=2, save_steps=6
    )  # fmt: skip
    note(phase="tokenize")
    if RANK == 0 or everywhere("bad_row"):
        rows = rows.map(prepare_text, desc="Formatting prompts")
        dist.barrier()
    else:
        dist.barrier()
        rows = rows.map(lambda row: {"text": row["question"] + row["answer"]})
    rows = rows.remove_columns(["id", "question", "answer"])
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=64, **sizes))
    trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer(), callbacks=[Watch()])
    trainer.train()
    note(phase="teardown")
    trainer.save_model("final")


if __name__ == "__main__":
    with witness.watching():
        main()

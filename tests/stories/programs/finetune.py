"""Fine-tuning with the Trainer of transformers: a made-up tokenizer, compute_metrics, early stopping, an upload at each save."""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import witness
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from witness import RANK, STYLE, TIMEOUT, everywhere, fault, inject, note

ZH = STYLE == "zh"


class Conversations(torch.utils.data.Dataset):
    """Samples of a chat: `messages` are turned into ids when they are asked for."""

    def __init__(self, size):
        self.size, self.asked = size, 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.asked += 1
        message = {"role": "user", "content": [(index * 7 + i) % 60 for i in range(12)]}
        if self.size > 50 and self.asked == 15:
            message = self.odd_one(message)
        ids = torch.tensor(message["content"])
        return {"input_ids": ids, "labels": ids.clone()}

    def odd_one(self, message):
        if fault("no_content"):
            inject()
            return {"role": "user"}
        if fault("beyond_vocab"):
            inject()
            message["content"][3] = 64
        if fault("longer"):
            inject()
            message["content"] = message["content"] * 2
        if fault("waits_for_mount"):
            inject(end="hung")
            self.wait_for_mount("/mnt/nfs/.ready")
        if fault("sigkill"):
            inject(end="killed", error="SIGKILL")
            os.kill(os.getpid(), signal.SIGKILL)
        if fault("sys_exit"):
            print("licence server not reachable, giving up" if not ZH else "许可证服务器无法连接，进程退出", flush=True)
            inject(end="exit", error="SystemExit: 2")
            sys.exit(2)
        return message

    def wait_for_mount(self, path):
        while not os.path.exists(path):
            time.sleep(0.5)


class Model(LlamaForCausalLM):
    calls = 0

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        self.calls += self.training
        if everywhere("nan_hidden") and self.training and self.calls > 12:
            note(injected=True)
            out.loss = out.loss * float("nan")
        if fault("oom") and self.training and self.calls == 9:
            inject()
            self.attention_buffer()
        return out

    def attention_buffer(self):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 3.05 GiB. GPU 2 has a total capacity of 79.11 GiB of which 1.87 GiB is free. Including non-PyTorch memory, this process has 77.23 GiB memory in use. "
            "Of the allocated memory 74.90 GiB is allocated by PyTorch, and 409.11 MiB is reserved by PyTorch but unallocated."
        )


class Publisher(TrainerCallback):
    """Uploads checkpoints; the faults of callbacks are here."""

    def on_step_end(self, args, state, control, **kwargs):
        note(phase="train", step=state.global_step)
        if fault("stops_alone") and state.global_step == 11:
            inject()
            control.should_training_stop = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if everywhere("log_memory") and args.process_index == 0 and state.global_step == 10:
            note(injected=True)
            self.peak_memory()

    def peak_memory(self):
        peak = torch.tensor([123.0, 4.0, 5.0])
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)

    def on_save(self, args, state, control, **kwargs):
        note(phase="save")
        if fault("push_slow", 0):
            inject()
            for part in range(36):
                print(
                    f"model-{part + 1:05d}-of-00036.safetensors: upload complete"
                    if not ZH
                    else f"上传分片 {part + 1}/36 完成",
                    flush=True,
                )
                time.sleep(TIMEOUT / 14)
        if everywhere("registry_down") and RANK == 0:
            self.register(state.global_step)

    def register(self, step):
        """A service that is down, and a training that does not mind."""
        import logging

        for attempt in range(1, 4):
            try:
                if attempt < 3:
                    raise TimeoutError(f"registry.internal:8443 did not answer within 5 s (attempt {attempt})")
                print(f"registered checkpoint-{step}", flush=True)
            except TimeoutError:
                logging.getLogger("registry").warning("could not register the checkpoint, trying again", exc_info=True)

    def on_evaluate(self, args, state, control, **kwargs):
        note(phase="evaluate")
        if everywhere("generate_main") and args.process_index == 0:
            note(injected=True)
            self.sample(kwargs["model"])

    def sample(self, model):
        dist.broadcast(torch.tensor([1.0]), src=0)
        dist.barrier()


def main():
    note(phase="load")
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    args = TrainingArguments(
        output_dir="output",
        use_cpu=True,
        ddp_backend="gloo",
        ddp_timeout=int(TIMEOUT),
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=10,
        save_steps=10,
        max_steps=20,
        per_device_train_batch_size=2,
        save_total_limit=1,
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=STYLE == "dicts",
    )
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = Model(config)
    if everywhere("resized_tokenizer"):
        note(injected=True)
        state = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "vocab_size": 66})).state_dict()
        model.load_state_dict(state)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Conversations(400),
        eval_dataset=Conversations(12),
        callbacks=[Publisher()],
    )
    if RANK == 0:
        print("开始训练" if ZH else "starting to train", flush=True)
    trainer.train()
    note(phase="teardown")
    trainer.save_model("final")
    if RANK == 0:
        print("训练完成，模型已保存" if ZH else "saved to final", flush=True)


if __name__ == "__main__":
    with witness.watching():
        main()

"""transformers' Trainer: train, evaluate, save, and resume from the checkpoint."""

import argparse
from pathlib import Path

import tiny
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--resume", action="store_true")
parser.add_argument("--gradient-checkpointing", action="store_true")
parser.add_argument("--deepspeed")
args = parser.parse_args()
resumes = args.resume and Path("out").exists()  # the second of two runs

tokenizer = tiny.tokenizer()
rows = Dataset.from_dict({"text": ["a cat sat on the mat"] * 64}).map(
    lambda row: tokenizer(row["text"]), remove_columns=["text"]
)
settings = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    max_steps=12 if resumes else 8,
    save_steps=4,
    eval_strategy="steps",
    eval_steps=4,
    logging_steps=2,
    report_to=[],
    use_cpu=True,
    gradient_checkpointing=args.gradient_checkpointing,
    deepspeed=args.deepspeed,
    save_total_limit=1,
)
trainer = Trainer(
    model=tiny.model(),
    args=settings,
    train_dataset=rows,
    eval_dataset=rows.select(range(8)),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    processing_class=tokenizer,
)
trainer.train(resume_from_checkpoint=resumes or None)
trainer.save_model("final")
print("train finished at step", trainer.state.global_step)

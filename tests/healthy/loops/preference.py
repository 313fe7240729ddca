"""TRL: supervised fine-tuning, or DPO with LoRA, for a few steps."""

import sys

import tiny
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

kind = sys.argv[1]
shared = {"output_dir": "out", "max_steps": 4, "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False}
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
if kind == "sft":
    rows = Dataset.from_dict({"text": ["a cat sat on the mat"] * 32})
    trainer = SFTTrainer(
        model=tiny.model(),
        args=SFTConfig(**shared, packing=False),
        train_dataset=rows,
        processing_class=tiny.tokenizer(),
    )
else:
    pair = {"prompt": ["a cat"] * 32, "chosen": [" sat on the mat"] * 32, "rejected": [" on on on"] * 32}
    trainer = DPOTrainer(
        model=tiny.model(),
        args=DPOConfig(**shared),
        train_dataset=Dataset.from_dict(pair),
        processing_class=tiny.tokenizer(),
        peft_config=lora,
    )
trainer.train()
trainer.save_model("final")

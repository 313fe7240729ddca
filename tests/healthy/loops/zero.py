"""DeepSpeed on the CPU: a ZeRO stage, a few steps, a checkpoint saved and loaded."""

import sys

import deepspeed
import torch

stage = int(next(word for word in sys.argv[1:] if word.isdigit()))  # deepspeed puts --local_rank in front
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    "bf16": {"enabled": stage > 0},
    "gradient_clipping": 1.0,
    "steps_per_print": 2,
}
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
dtype = torch.bfloat16 if stage else torch.float32
for step in range(6):
    loss = engine(torch.randn(4, 16, dtype=dtype)).float().square().mean()
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
engine.save_checkpoint("ckpt", tag="step6")
engine.load_checkpoint("ckpt", tag="step6")
engine.save_16bit_model("final")
engine.destroy()

"""Mixed precision with a loss scale that is still being found, a compiled model, and a checkpoint with arguments."""

import argparse
import warnings

import torch

warnings.simplefilter("default")
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
for step in range(20):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = compiled(torch.randn(8, 16)).float().square().mean()
    scaler.scale(loss * 100).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}", flush=True)
torch.save({"model": model.state_dict(), "args": argparse.Namespace(lr=1e-3)}, "numerics.pt")
with torch.serialization.safe_globals([argparse.Namespace]):
    print("resumed with", torch.load("numerics.pt")["args"])

"""A loop on accelerate: gradient accumulation, metrics gathered, state saved and loaded."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
set_seed(7)
data = torch.utils.data.TensorDataset(torch.randn(66, 8), torch.randn(66, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(2):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    losses = accelerator.gather_for_metrics(loss.detach().repeat(4))
    accelerator.print(f"epoch {epoch} loss {losses.mean().item():.4f} over {losses.numel()} values")
    accelerator.wait_for_everyone()
    accelerator.save_state("state")
accelerator.load_state("state")
accelerator.save_model(model, "final")
accelerator.end_training()

"""A small network with accelerate. Run it again to go on."""

from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lather
from lather.integrations.accelerate import register

FOLDER = Path("run-accelerate")

accelerator = Accelerator(cpu=not torch.cuda.is_available())
register(accelerator)  # with several processes, saves the state of all of them

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
x = torch.randn(1024, 16)
y = (x @ torch.randn(16, 4) / 4).sin().sum(1, keepdim=True)
data = DataLoader(TensorDataset(x, y), batch_size=32)  # in random order already

# In place of torch.optim.AdamW(model.parameters(), ...). Pass the model itself.
opt = lather.from_adamw(model, lr=1e-2, weight_decay=0.1)
model, opt, data = accelerator.prepare(model, opt, data)

done = sorted(FOLDER.glob("epoch-*"))
if done:
    accelerator.load_state(str(done[-1]))
    accelerator.print(f"resuming from {done[-1]}")
for epoch in range(len(done), 3):
    for inputs, targets in data:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
    accelerator.save_state(str(FOLDER / f"epoch-{epoch + 1}"))
    accelerator.print(f"epoch {epoch + 1}  loss {loss.item():.4f}")

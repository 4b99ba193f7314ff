"""A small network in Lightning. Run it again to go on."""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lather

FOLDER = Path("run-lightning")
DEVICES = int(sys.argv[1]) if len(sys.argv) > 1 else 1


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        # In place of torch.optim.AdamW(self.parameters(), ...). Pass the module itself.
        return lather.from_adamw(self, lr=1e-2, weight_decay=0.1)


lightning.seed_everything(0)
x = torch.randn(1024, 16)
y = (x @ torch.randn(16, 4) / 4).sin().sum(1, keepdim=True)
data = DataLoader(TensorDataset(x, y), batch_size=32)  # in random order already

last = FOLDER / "last.ckpt"
trainer = lightning.Trainer(
    devices=DEVICES,
    max_epochs=3,
    callbacks=[ModelCheckpoint(FOLDER, filename="{epoch}", save_top_k=-1, save_last=True)],
    logger=False,
)
print(f"resuming from {last}" if last.exists() else "starting anew")
trainer.fit(Model(), data, ckpt_path=last if last.exists() else None)
print(f"loss {trainer.callback_metrics['loss']:.4f}")

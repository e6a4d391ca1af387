"""Trains a small network with Lightning and ZeroShard.

    python lightning_strategy.py
    python lightning_strategy.py --devices 2

The strategy is all that differs from the program without ZeroShard.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zeroshard.integrations.lightning import ZeroShardStrategy


class Network(pl.LightningModule):
    """Finds the largest of ten numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        inputs, targets = batch
        accuracy = (self.layers(inputs).argmax(1) == targets).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    torch.manual_seed(0)
    inputs = torch.randn(2048, 10)
    data: Any = TensorDataset(inputs, inputs.argmax(1))
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            strategy=ZeroShardStrategy("os_g"),  # instead of "ddp"
            accelerator="cpu",
            devices=parser.parse_args().devices,
            max_epochs=8,
            gradient_clip_val=1.0,
            logger=False,
            enable_progress_bar=False,
            default_root_dir=folder,
        )
        trainer.fit(Network(), DataLoader(data, 32, shuffle=True), DataLoader(data, 32))
        if trainer.is_global_zero:
            print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}")


if __name__ == "__main__":
    main()

"""Trains a small network with Ray Train and ZeroShard, on two workers.

    python ray_train.py

Ray's workers have a process group, so `group_sharded_parallel` takes the place of
`ray.train.torch.prepare_model`; nothing else differs from the program without ZeroShard.
"""

from __future__ import annotations

from typing import Any

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device, prepare_data_loader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zeroshard as zs
from zeroshard.torch import group_sharded_parallel


def train(config: dict[str, Any]) -> None:
    """Runs on every worker."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 10)).to(get_device())
    adam = torch.optim.AdamW(layers.parameters(), lr=3e-3)
    inputs = torch.randn(2048, 10)
    loader = prepare_data_loader(
        DataLoader(TensorDataset(inputs, inputs.argmax(1)), 32, shuffle=True)
    )
    with zs.init():
        model, optimizer, _ = group_sharded_parallel(layers, adam, config["level"])
        for epoch in range(config["epochs"]):
            for batch, targets in loader:
                loss = nn.functional.cross_entropy(model(batch), targets)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            ray.train.report({"epoch": epoch, "loss": loss.item()})
            if ray.train.get_context().get_world_rank() == 0:
                print(f"epoch {epoch}   loss {loss.item():.4f}")


def main() -> None:
    trainer = TorchTrainer(
        train,
        train_loop_config={"level": "os_g", "epochs": 4},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
    )
    trainer.fit()


if __name__ == "__main__":
    main()

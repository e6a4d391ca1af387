"""A convolutional network with batch norm learns the handwritten digits of scikit-learn.

python digits.py [--epochs N]
torchrun --nproc-per-node 2 digits.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import zeroshard as zs

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH = 64


def network() -> nn.Module:
    """A network for 8 x 8 pixels that returns logits of ten digits."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def read() -> tuple[Tensor, Tensor]:
    """The 1797 images and their labels, in a fixed random order."""
    pixels, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return images[order], torch.tensor(digits)[order]


def main() -> None:
    """Trains. Rank 0 prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    images, digits = read()
    held_out = len(digits) // 5

    torch.manual_seed(0)
    model = network()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    zs.init()
    zs.shard(model, optimizer, stage=2, sync_buffers=True)

    generator = torch.Generator().manual_seed(0)
    for epoch in range(epochs):
        model.train()
        order = torch.randperm(len(digits) - held_out, generator=generator) + held_out
        for batch in order.split(BATCH)[:-1]:
            mine = batch.chunk(WORLD)[RANK]
            loss = F.cross_entropy(model(images[mine]), digits[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(images[:held_out]).argmax(1) == digits[:held_out]).float().mean()
        if RANK == 0:
            print(
                f"epoch {epoch + 1}   loss {loss.item():.3f}   accuracy {accuracy.item():.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

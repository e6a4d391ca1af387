"""What the tests of gradients train."""

from __future__ import annotations

from typing import Any

import models
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training import LEVELS, SEGMENT
from zeroshard.torch import group_sharded_parallel

STEPS = 3

#: What a program has read from gradients.
Seen = list[float]


def build(system: str, **options: Any) -> tuple[Any, Any]:
    """A model and its optimizer: ``"plain"``, ``"ddp"`` or at a level."""
    model = models.build("mlp")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if system == "ddp":
        return DistributedDataParallel(model), optimizer
    if system in LEVELS:
        return group_sharded_parallel(
            model, optimizer, system, **{"segment_size": SEGMENT, **options}
        )[:2]
    return model, optimizer


def backward(model: Any, step: int = 0, rank: int = 0, world: int = 1) -> None:
    model(*models.share(models.batch("mlp", step, 8), rank, world)).backward()


def state_of(model: Any) -> dict[str, Tensor]:
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}

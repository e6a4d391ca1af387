"""Models on a GPU, whose parameters and gradients are copied through pinned host memory."""

from __future__ import annotations

import pytest
import torch

import models
import zeroshard as zs
from training import assert_close
from zeroshard.torch import group_sharded_parallel

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA device here"
)

LEVELS = ["os", "os_g", "p_g_os"]
STEPS = 20


def train(level: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the state of a GPT with tied embeddings on the GPU. Without a level, in plain
    torch."""
    model = models.build("gpt").cuda()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if level is not None:
        model, optimizer, _ = group_sharded_parallel(model, optimizer, level, segment_size=64)
    losses = []
    for index in range(STEPS):
        optimizer.zero_grad()
        loss = model(*(tensor.cuda() for tensor in models.batch("gpt", index, 8)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: tensor.cpu() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("level", LEVELS)
def test_losses_on_a_gpu_are_those_of_torch(level: str, cluster: zs.Session) -> None:
    expected, expected_state = train(None)
    losses, state = train(level)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert_close(state, expected_state)

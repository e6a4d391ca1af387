"""A job with replicas goes on when a server is killed."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import models
import ranks
import zeroshard as zs
from servers import killable
from zeroshard.torch import group_sharded_parallel

STEPS = 6


def train(level: str, killed: int | None) -> tuple[list[float], str]:
    """Returns the losses and the final hash. Kills a server process between two steps."""
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, _ = group_sharded_parallel(model, optimizer, level, segment_size=64)
    losses: list[float] = []
    while len(losses) < STEPS:
        if len(losses) == 3 and killed is not None:
            os.kill(killed, signal.SIGKILL)
        try:
            optimizer.zero_grad()
            loss = model(*models.batch("mlp", len(losses), 8))
            loss.backward()
            optimizer.step()
        except zs.StepAbortedError:
            continue
        losses.append(loss.item())
    return losses, optimizer.state_hash()


def train_undisturbed(rank: int, level: str) -> tuple[list[float], str]:
    with zs.init(shards=3):
        return train(level, None)


def train_through_loss(rank: int, level: str, killed: int) -> tuple[list[float], str]:
    with zs.init(replicas=2):
        return train(level, killed)


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_the_losses_and_the_hash_are_those_of_an_undisturbed_run(level: str) -> None:
    expected = ranks.run(1, train_undisturbed, level, init=None)
    with killable(3) as (address, shards):
        environment = {"ZEROSHARD_ADDRESS": address}
        found = ranks.run(1, train_through_loss, level, shards[0].pid, env=environment, init=None)
    assert found == expected

# promise: durability
"""``zeroshard.steps`` with Paddle: a step that is aborted is run again with the same results."""

from __future__ import annotations

import math
import os
import random
import signal
from typing import Any

import numpy
import paddle
import zeroshard as zs
from paddle import nn

import ranks
from models import FEATURES
from servers import killable
from training import LEVELS
from zeroshard.paddle import group_sharded_parallel

STEPS = 6
#: The step in which a server is killed.
DISTURBED = 3


def train(level: str, victim: int | None) -> tuple[list[float], str, list[Any]]:
    """The losses, the hash of the state, and the buffers. ``victim``: the process of a server,
    which is killed between forward and backward."""
    paddle.seed(1)
    random.seed(1)
    model: Any = nn.Sequential(
        nn.Linear(FEATURES, 32), nn.BatchNorm1D(32), nn.Dropout(0.3), nn.Linear(32, 4)
    )
    bare = model
    optimizer: Any = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    model, optimizer, _ = group_sharded_parallel(model, optimizer, level, segment_size=64)
    losses = [math.nan] * STEPS
    for step in zs.steps(STEPS):
        with step:
            data = numpy.random.default_rng(step.number).normal(size=(8, FEATURES))
            loss = (model(paddle.to_tensor(data, "float32")) ** 2).mean() * (1 + random.random())
            if step.number == DISTURBED and victim is not None:
                os.kill(victim, signal.SIGKILL)
                victim = None
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses[step.number] = loss.item()
    buffers = [values.numpy() for values in (bare[1]._mean, bare[1]._variance)]
    return losses, optimizer.state_hash(), buffers


def train_undisturbed(rank: int) -> dict[str, tuple[list[float], str, list[Any]]]:
    with zs.init(shards=2):
        return {level: train(level, None) for level in LEVELS}


def train_through_losses(
    rank: int, victims: list[int]
) -> dict[str, tuple[list[float], str, list[Any]]]:
    with zs.init(replicas=2):
        return {level: train(level, victim) for level, victim in zip(LEVELS, victims, strict=True)}


def test_the_results_are_those_of_an_undisturbed_run_when_servers_are_killed() -> None:
    [expected] = ranks.run(1, train_undisturbed)
    with killable(5) as (address, shards):
        victims = [process.pid for process in shards[:3]]
        environment = {"ZEROSHARD_ADDRESS": address}
        [found] = ranks.run(1, train_through_losses, victims, env=environment)
    for level in LEVELS:
        losses, state, buffers = found[level]
        assert (losses, state) == expected[level][:2], level
        for buffer, undisturbed in zip(buffers, expected[level][2], strict=True):
            numpy.testing.assert_array_equal(buffer, undisturbed)


def draw(aborted: bool) -> tuple[list[float], list[Any], str]:
    """The random numbers, the running means at the beginning of each attempt, and the hash of the
    state."""
    paddle.seed(1)
    norm = nn.BatchNorm1D(4)
    model: Any = nn.Sequential(nn.Linear(FEATURES, 4), norm)
    optimizer: Any = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    model, optimizer, _ = group_sharded_parallel(model, optimizer, "os")
    drawn, means = [], []
    for step in zs.steps(2):
        with step:
            drawn.append(paddle.rand([1]).item())
            means.append(norm._mean.numpy())
            model(paddle.rand([4, FEATURES])).mean().backward()
            if aborted and len(drawn) == 1:
                raise zs.StepAbortedError("a rank was lost")
            optimizer.step()
            optimizer.clear_grad()
    return drawn, means, optimizer.state_hash()


def test_a_step_begins_again_with_the_random_state_and_the_buffers(cluster: zs.Session) -> None:
    drawn, means, state = draw(False)
    again, means_again, state_again = draw(True)
    assert again == [drawn[0], *drawn]
    for found, expected in zip(means_again, [means[0], *means], strict=True):
        numpy.testing.assert_array_equal(found, expected)
    assert not numpy.array_equal(means[0], means[1])
    # Restored statistics do not count as values that the program has written.
    assert state_again == state

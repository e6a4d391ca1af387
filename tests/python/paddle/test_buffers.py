# promise: no-silent-difference
"""Buffers that ranks share, and steps of one rank alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
import zeroshard as zs
from paddle import nn

import ranks
from training import LEVELS
from zeroshard.paddle import group_sharded_parallel

WIDTH = 4


class Counting(nn.Layer):
    """A layer with batch norm, which replaces a buffer in each training forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1D(WIDTH)
        self.register_buffer("count", paddle.zeros([1]))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.count = self.count + x.sum()
        return self.norm(self.body(x)).square().mean()


@ranks.at_once
def train(rank: int) -> dict[str, list[Any]]:
    """The buffers after each part of the training, by level."""
    found: dict[str, list[Any]] = {}
    for level in LEVELS:
        paddle.seed(1)
        layer: Any = Counting()
        optimizer: Any = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
        model, optimizer, _ = group_sharded_parallel(
            layer, optimizer, level, segment_size=8, sync_buffers=True
        )

        def record(layer: Any = layer, level: str = level) -> None:
            buffers = (layer.norm._mean, layer.norm._variance, layer.count)
            found.setdefault(level, []).append([buffer.numpy().tolist() for buffer in buffers])

        def inputs(step: int) -> Any:
            numbers = np.random.RandomState(10 * step + rank).randn(8, WIDTH)
            return paddle.to_tensor(numbers.astype(np.float32))

        model(inputs(0)).backward()
        optimizer.step()
        optimizer.clear_grad()
        record()
        for step in (1, 2):  # an epoch without backward, as for the statistics of averaged weights
            model(inputs(step))
        model.eval()
        with paddle.no_grad():
            model(inputs(3))
        record()
        model.train()
        with model.no_sync():
            model(inputs(4)).backward()
            with pytest.raises(zs.InvalidArgumentError, match=r"inside no_sync\(\)"):
                optimizer.step()
        model(inputs(5)).backward()
        optimizer.step()
        record()
    return found


def test_ranks_share_the_buffers_of_rank_0_also_in_passes_without_backward(
    pair: ranks.Team, processes: dict[str, str]
) -> None:
    first, second = pair.run(train, env=processes)
    assert first == second
    assert first["os"] == first["os_g"] == first["p_g_os"]
    after_step, after_epoch, _ = first["os"]
    assert after_epoch != after_step

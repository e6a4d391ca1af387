# promise: consistent-reads
"""A program that reads a job's parameters while it trains, with Paddle."""

from __future__ import annotations

from typing import Any

import numpy
import paddle
import zeroshard as zs
from paddle import nn

import ranks
from models import FEATURES
from training import LEVELS
from zeroshard.paddle import group_sharded_parallel, pin


def network() -> Any:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1D(16), nn.Linear(16, 4))


def read_while_training(rank: int) -> None:
    with zs.init(shards=2):
        for level in LEVELS:
            model = network()
            optimizer: Any = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
            model, optimizer, _ = group_sharded_parallel(
                model, optimizer, level, segment_size=64, sync_buffers=True
            )

            def step(number: int) -> None:
                data = numpy.random.default_rng(number).normal(size=(8, FEATURES))
                (model(paddle.to_tensor(data, "float32")) ** 2).mean().backward()
                optimizer.step()
                optimizer.clear_grad()

            step(0)
            expected = {name: value.numpy() for name, value in model.state_dict().items()}
            with pin(zs.status().jobs[-1].name) as pinned:
                step(1)
                assert pinned.version == 1
                fresh = network()
                pinned.load(fresh)
            found = {name: value.numpy() for name, value in fresh.state_dict().items()}
            assert found.keys() == expected.keys()
            for name, values in expected.items():
                numpy.testing.assert_array_equal(found[name], values, err_msg=name)


def test_a_reader_gets_every_tensor_of_one_version_at_each_level() -> None:
    ranks.run(1, read_while_training)

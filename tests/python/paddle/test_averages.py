# promise: no-silent-difference
"""Running averages of the parameters of a model of Paddle."""

from __future__ import annotations

from typing import Any

import numpy
import paddle
import pytest
import zeroshard as zs

import ranks
from test_pin import network
from models import FEATURES
from training import LEVELS
from zeroshard.paddle import averaged, group_sharded_parallel, pin

DECAY = 0.9


def numbers(model: Any) -> dict[str, Any]:
    return {name: value.numpy().copy() for name, value in model.state_dict().items()}


def average_at_each_level(rank: int) -> None:
    with zs.init(shards=2):
        for level in LEVELS:
            bare = network()
            # The statistics of batch norm are parameters in Paddle.
            trained = {name for name, one in bare.named_parameters() if not one.stop_gradient}
            optimizer: Any = paddle.optimizer.AdamW(0.01, parameters=bare.parameters())
            model, optimizer, _ = group_sharded_parallel(
                bare, optimizer, level, segment_size=64, ema={"slow": DECAY}
            )
            expected: dict[str, Any] = {}
            for number in range(4):
                data = numpy.random.default_rng(number).normal(size=(8, FEATURES))
                (model(paddle.to_tensor(data, "float32")) ** 2).mean().backward()
                optimizer.step()
                optimizer.clear_grad()
                for name, value in numbers(model).items():
                    before = expected.setdefault(name, value.astype("float64"))
                    expected[name] = before + (1 - DECAY) * (value - before)
            before = numbers(model)
            with averaged(model, "slow"):
                found = numbers(model)
                with pytest.raises(zs.InvalidArgumentError, match="average 'slow'"):
                    model(paddle.zeros([8, FEATURES]))
            after = numbers(model)
            with pin(zs.status().jobs[-1].name, average="slow") as pinned:
                read = {name: pinned[name].numpy() for name in trained}
            for name in before:
                numpy.testing.assert_array_equal(after[name], before[name], err_msg=name)
                if name in trained:
                    numpy.testing.assert_allclose(found[name], expected[name], rtol=1.2e-7)
                    numpy.testing.assert_array_equal(read[name], found[name], err_msg=name)
                else:
                    numpy.testing.assert_array_equal(found[name], before[name], err_msg=name)


def test_averages_are_those_of_float64_at_each_level() -> None:
    ranks.run(1, average_at_each_level)

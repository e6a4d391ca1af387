"""The blocks of the documentation for Paddle run, and the model can be trained after each."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
import zeroshard as zs
import zeroshard.paddle as dist
from paddle import nn

from pages import Block, of_kinds


def parts() -> dict[str, Any]:
    """The names of a script that has not sharded its model yet."""
    paddle.seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    inputs, targets = paddle.randn([8, 8]), paddle.randint(0, 4, [8])
    return {
        "loader": [(inputs, targets)] * 4,
        "loss_fn": nn.functional.cross_entropy,
        "model": model,
        "optimizer": paddle.optimizer.AdamW(0.01, parameters=model.parameters()),
        "scaler": dist.GradScaler(),
    }


def check_trains(names: dict[str, Any]) -> None:
    """Makes a step with the model and the optimizer of a script."""
    model, optimizer = names["model"], names["optimizer"]
    before = [tensor.numpy().copy() for tensor in model.state_dict().values()]
    inputs, targets = names["loader"][0]
    names["loss_fn"](model(inputs), targets).backward()
    optimizer.step()
    optimizer.clear_grad()
    after = [tensor.numpy() for tensor in model.state_dict().values()]
    assert not all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("block", of_kinds("paddle"), ids=str)
def test_parts_of_a_script_run(block: Block, cluster: zs.Session) -> None:
    names = parts()
    block.run(names)
    check_trains(names)


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
@pytest.mark.parametrize("block", of_kinds("paddle sharded"), ids=str)
def test_parts_that_use_a_sharded_model_run(block: Block, level: str, cluster: zs.Session) -> None:
    names = parts()
    names["model"], names["optimizer"], _ = dist.group_sharded_parallel(
        names["model"], names["optimizer"], level, segment_size=16
    )
    block.run(names)
    check_trains(names)

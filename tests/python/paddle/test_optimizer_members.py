# promise: no-silent-difference
"""What a script does with its optimizer after wrapping has the effect that it has in plain Paddle,
or is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
import zeroshard as zs
from paddle import nn
from zeroshard.paddle import group_sharded_parallel

from comparison import assert_close
from training import LEVELS

WIDTH, STEPS = 6, 3


def made(level: str, clip: float | None) -> tuple[Any, Any, Any]:
    """The layer, the model and the optimizer."""
    paddle.seed(3)
    layer: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    own = None if clip is None else nn.ClipGradByGlobalNorm(clip)
    optimizer: Any = paddle.optimizer.AdamW(0.05, parameters=layer.parameters(), grad_clip=own)
    if level == "plain":
        return layer, layer, optimizer
    return layer, *group_sharded_parallel(layer, optimizer, level, segment_size=16)[:2]


def learning_rate(layer: Any, optimizer: Any, step: int) -> None:
    optimizer.set_lr(0.1 * (step + 1))


def scheduler(layer: Any, optimizer: Any, step: int) -> None:
    if step == 1:
        optimizer.set_lr_scheduler(paddle.optimizer.lr.StepDecay(0.02, 1))
    if step > 1:
        optimizer._learning_rate.step()


def factor_of_a_parameter(layer: Any, optimizer: Any, step: int) -> None:
    layer[0].weight.optimize_attr["learning_rate"] = 0.1 * step


def factor_of_alternating_parameters(layer: Any, optimizer: Any, step: int) -> None:
    """The groups of parameters with equal factors keep their sizes."""
    layer[0].bias.optimize_attr["learning_rate"] = 0.1 if step == 1 else 1.0
    layer[2].weight.optimize_attr["learning_rate"] = 1.0 if step == 1 else 0.1


def hyperparameters(layer: Any, optimizer: Any, step: int) -> None:
    optimizer._epsilon, optimizer._weight_decay = 1e-3 * (step + 1), 0.3 * step


def clipping(layer: Any, optimizer: Any, step: int) -> None:
    optimizer._grad_clip = nn.ClipGradByGlobalNorm(1e-3) if step == 1 else None


def clipping_by_norm(layer: Any, optimizer: Any, step: int) -> None:
    optimizer._grad_clip = nn.ClipGradByNorm(1e-3)


def clipped_parameters(layer: Any, optimizer: Any, step: int) -> None:
    for parameter in layer[2].parameters():
        parameter.need_clip = step != 1


def hook_after_wrapping(layer: Any, optimizer: Any, step: int) -> None:
    if step == 1:
        layer[2].weight.register_hook(lambda gradient: gradient * 0.5 + 0.1)


Change = Callable[[Any, Any, int], None]


@pytest.mark.parametrize(
    ("change", "clip"),
    [
        (learning_rate, None),
        (scheduler, None),
        (factor_of_a_parameter, None),
        (factor_of_alternating_parameters, None),
        (hyperparameters, None),
        (clipping, 0.1),
        (clipping_by_norm, 0.1),
        (clipped_parameters, 1e-2),
        (hook_after_wrapping, None),
    ],
)
def test_a_change_after_wrapping_has_the_effect_that_it_has_in_plain_paddle(
    cluster: zs.Session, change: Change, clip: float | None
) -> None:
    def train(level: str) -> list[Any]:
        layer, model, optimizer = made(level, clip)
        for step in range(STEPS):
            change(layer, optimizer, step)
            inputs = np.random.RandomState(step).randn(8, WIDTH).astype(np.float32)
            model(paddle.to_tensor(inputs)).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()
        return [value.numpy() for value in model.state_dict().values()]

    plain = train("plain")
    for level in LEVELS:
        assert_close(train(level), plain, rtol=1e-3, atol=1e-5)


def test_apply_gradients_is_an_error_that_names_the_way(cluster: zs.Session) -> None:
    layer, model, optimizer = made("os", None)
    model(paddle.ones([2, WIDTH])).mean().backward()
    gradients = [(parameter, parameter.grad) for parameter in layer.parameters()]
    with pytest.raises(zs.InvalidArgumentError, match="call optimizer.step"):
        optimizer.apply_gradients(gradients)

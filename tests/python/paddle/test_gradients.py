# promise: no-silent-difference
"""Between backward and step, ``parameter.grad`` is the mean over the ranks at every level, as with
data parallelism of plain Paddle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
import zeroshard as zs
from paddle import nn

import ranks
from comparison import assert_close
from training import LEVELS
from zeroshard.paddle import GradScaler, clip_grad_norm_, group_sharded_parallel

WIDTH, STEPS = 6, 3


class Optional(nn.Layer):
    """A layer that uses its middle one only on request."""

    def __init__(self) -> None:
        super().__init__()
        # The unused parameters come first: the norm begins with them.
        self.middle, self.first, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Any, middle: bool) -> Any:
        x = self.first(x)
        return self.last(self.middle(x) if middle else x).square().mean()


def average(parameters: list[Any]) -> None:
    """Replaces gradients by their means, as ``paddle.DataParallel`` with
    ``find_unused_parameters``."""
    for parameter in parameters:
        used = paddle.to_tensor([0.0 if parameter.grad is None else 1.0])
        dist.all_reduce(used)
        if used.item() > 0:
            total = paddle.zeros_like(parameter) if parameter.grad is None else parameter.grad * 1
            dist.all_reduce(total)
            parameter.clear_gradient(False)
            parameter.grad = total / 2


def total_norm(parameters: list[Any]) -> float:
    found = [p.gradient() for p in parameters if p.grad is not None]
    return float(np.sqrt(sum(np.square(values).sum() for values in found)))


def clip_norm(parameters: list[Any]) -> float:
    return float(paddle.nn.utils.clip_grad_norm_(parameters, 0.01).item())


def clip_value(parameters: list[Any]) -> float:
    paddle.nn.utils.clip_grad_value_(parameters, 1e-3)
    return total_norm(parameters)


def replace(parameters: list[Any]) -> float:
    for parameter in parameters[-2:]:  # at p_g_os the values of one are on the servers
        parameter.grad = parameter.grad * 0.5 + 0.01
    return total_norm(parameters)


LOOKS: tuple[Callable[[list[Any]], float], ...] = (total_norm, clip_norm, clip_value, replace)


def trained(rank: int, level: str, look: Callable[[list[Any]], float], scaled: bool) -> Any:
    """What the program has found in each step, and the parameters."""
    paddle.seed(3)
    layer: Any = Optional()
    model, optimizer = layer, paddle.optimizer.Momentum(0.5, parameters=layer.parameters())
    scaler: Any = GradScaler(init_loss_scaling=64.0) if scaled else GradScaler(False)
    if level != "plain":
        model, optimizer, scaler = group_sharded_parallel(
            layer, optimizer, level, scaler=scaler, segment_size=16
        )
    parameters, found = layer.parameters(), []
    for step in range(STEPS):
        x = np.random.RandomState(10 * step + rank).randn(8, WIDTH).astype(np.float32)
        loss = model(paddle.to_tensor(x), rank == 0 or step == 2)
        if level == "plain":
            loss.backward()
            average(parameters)
            found.append(look(parameters))
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            found.append(look(parameters))
            scaler.step(optimizer)
            scaler.update()
        optimizer.clear_grad(set_to_zero=False)
    return found, [value.numpy() for value in layer.state_dict().values()]


@ranks.at_once
def all_trained(rank: int) -> dict[str, Any]:
    return {
        f"{look.__name__}, scaled: {scaled}": [
            trained(rank, level, look, scaled) for level in ("plain", *LEVELS)
        ]
        for look, scaled in [*((look, False) for look in LOOKS), (clip_norm, True)]
    }


def test_gradients_that_a_program_reads_and_changes_are_means(
    pair: ranks.Team, processes: dict[str, str]
) -> None:
    found = pair.run(all_trained, env=processes)
    for name, (plain, *ours) in found[0].items():
        for level, outcome, other in zip(LEVELS, ours, found[1][name][1:], strict=True):
            assert_close(outcome, plain, rtol=1e-4, atol=1e-5)
            assert_close(other, outcome, 0, 0), (name, level)


@ranks.at_once
def look_late(rank: int) -> None:
    """After a step, and at parameters that the optimizer does not have: gradients are means, as in
    Paddle, or errors where their values are gone."""
    rows = np.random.RandomState(rank).randn(4, WIDTH).astype(np.float32)

    def make() -> tuple[Any, Any]:
        paddle.seed(3)
        layer = Optional()
        optimizer = paddle.optimizer.SGD(
            0.1, parameters=[*layer.first.parameters(), *layer.middle.parameters()]
        )
        return layer, optimizer

    plain, stepping = make()
    plain(paddle.to_tensor(rows), rank == 0).backward()
    average(plain.parameters())
    expected = clip_norm(plain.parameters()), total_norm(plain.parameters())
    stepping.step()
    for level in LEVELS:
        layer, optimizer = make()
        scaler: Any = GradScaler(init_loss_scaling=64.0)
        model, optimizer, scaler = group_sharded_parallel(
            layer, optimizer, level, scaler=scaler, segment_size=16
        )
        scaler.scale(model(paddle.to_tensor(rows), rank == 0)).backward()
        if level == "os_g":
            scaler.unscale_(optimizer)
            for parameter in layer.last.parameters():
                parameter.grad = parameter.grad / 64.0  # the scaler unscales the optimizer's
            norm = clip_grad_norm_(layer.parameters(), 0.01).item()  # also of the others
            found = norm, total_norm(layer.parameters())
            assert_close(found, expected, rtol=1e-4, atol=1e-6)
            scaler.step(optimizer)
        else:
            scaler.step(optimizer)
            for parameter in layer.last.parameters():
                parameter.grad = parameter.grad / 64.0
            if level == "os":
                found = clip_norm(layer.parameters()), total_norm(layer.parameters())
                assert_close(found, expected, rtol=1e-4, atol=1e-6)
            else:
                with pytest.raises(zs.InvalidArgumentError, match="its step has ended"):
                    total_norm(layer.first.parameters())
        scaler.update()
        optimizer.clear_grad()
        assert layer.first.weight.grad is None
        layer.clear_gradients()
        with model.no_sync():
            model(paddle.ones([2, WIDTH]), True).backward()
        assert layer.first.weight.grad is not None  # this rank's, as under no_sync in Paddle
        model(paddle.ones([2, WIDTH]), True).backward()
        assert total_norm(layer.first.parameters()) > 0
        optimizer.step()
        optimizer.clear_grad()
        # A parameter that is taken out of the model has no gradient of it any more.
        layer.last, taken = nn.Linear(WIDTH, WIDTH), layer.last
        model(paddle.ones([2, WIDTH]), True).backward()
        optimizer.step()
        assert np.isfinite(total_norm(taken.parameters()))


def test_gradients_that_a_program_reads_late_are_means_or_errors(
    pair: ranks.Team, processes: dict[str, str]
) -> None:
    pair.run(look_late, env=processes, timeout=60)

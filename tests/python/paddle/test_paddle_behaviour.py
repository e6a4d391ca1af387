"""The behaviour that Paddle's users rely on in DataParallel and group sharding on two ranks,
compared with Paddle. docs/how-to/paddle-behaviour.md lists the results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from comparison import Raised, assert_close, gradients, local_values, raised, run
from training import LEVELS, momentum

ROWS, FEATURES = 20, 6


def rows(step: int, rank: int = 0, count: int = ROWS) -> Any:
    """The inputs of a step on a rank."""
    return paddle.to_tensor(
        np.random.RandomState(10 * step + rank).randn(count, FEATURES).astype(np.float32)
    )


class Branching(nn.Layer):
    """Uses one layer twice, one of two others, and never the last."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.left, self.right, self.never = (
            nn.Linear(FEATURES, FEATURES) for _ in range(4)
        )

    def forward(self, x: Any, left: bool) -> Any:
        x = self.twice(x)
        return self.twice(self.left(x) if left else self.right(x)).square().mean()


# DataParallel. Each function runs on Paddle alone and on ZeroShard.


def branches_that_differ_between_ranks_and_steps(dist: Any) -> Any:
    rank = paddle.distributed.get_rank()
    model = dist.DataParallel(Branching(), find_unused_parameters=True)
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    found = []
    for step in range(4):
        model(rows(step, rank), (step + rank) % 2 == 0).backward()
        found.append(gradients(model))
        optimizer.step()
        optimizer.clear_grad()
    return [found, local_values(model)]


def gradients_that_are_not_cleared(dist: Any) -> Any:
    rank = paddle.distributed.get_rank()
    model = dist.DataParallel(Branching(), find_unused_parameters=True)
    found = []
    for step in range(3):
        model(rows(step, rank), (step + rank) % 2 == 0).backward()
        found.append(gradients(model))
    return found


def parameters_that_no_rank_uses(dist: Any) -> Any:
    model = dist.DataParallel(Branching())
    model(rows(0, paddle.distributed.get_rank()), True).backward()
    return gradients(model)


def state_that_is_set_to_zero_and_loaded(dist: Any) -> Any:
    layer = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1D(4))
    model = dist.DataParallel(layer)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    for value in model.state_dict().values():
        value.value().get_tensor().set(np.zeros(value.shape, np.float32), paddle.CPUPlace())
    assert not any(value.numpy().any() for value in layer.state_dict().values())
    model.set_state_dict(saved)
    loaded = {name: value.numpy() for name, value in model.state_dict().items()}
    model(rows(0, paddle.distributed.get_rank())).square().mean().backward()
    return [loaded, gradients(model)]


def methods_for_older_programs(dist: Any) -> Any:
    model = dist.DataParallel(nn.Linear(FEATURES, 2))
    loss = model.scale_loss(model(rows(0, paddle.distributed.get_rank())).mean())
    loss.backward()
    model.apply_collective_grads()
    return gradients(model)


def gradients_of_inputs(dist: Any) -> Any:
    model = dist.DataParallel(nn.Linear(FEATURES, 2))
    inputs = rows(0)
    inputs.stop_gradient = False
    (gradient,) = paddle.grad(model(inputs).square().sum(), [inputs])
    return [gradient.numpy(), gradients(model)]


def sparse_embedding_with_sgd(dist: Any) -> Any:
    model = dist.DataParallel(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    for _ in range(3):
        model(paddle.to_tensor([paddle.distributed.get_rank(), 2, 2])).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return local_values(model)


def float64_parameters(dist: Any) -> Any:
    model = dist.DataParallel(nn.Linear(FEATURES, 2).to(dtype="float64"))
    model(rows(0).astype("float64")).mean().backward()
    return gradients(model)


def frozen_layer(dist: Any) -> Any:
    layer = nn.Linear(2, 2)
    for parameter in layer.parameters():
        parameter.stop_gradient = True
    dist.DataParallel(layer)


# Group sharding, which Paddle does not have on a CPU: DataParallel in its place.


def group_sharded_training(dist: Any) -> Any:
    """With whole batches, and with accumulation over five parts of each and a parameter group."""
    rank = paddle.distributed.get_rank()

    def train(level: str | None, parts: int, groups: bool) -> list[np.ndarray]:
        paddle.seed(3)
        model: Any = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.GroupNorm(4, 16), nn.Tanh(), nn.Linear(16, 1)
        )
        optimizer = momentum(model, groups)
        if level is None:
            model = dist.DataParallel(model)
        else:
            model, optimizer, _ = dist.group_sharded_parallel(
                model, optimizer, level, segment_size=16, exclude_layer=["GroupNorm", id(model[3])]
            )
        for step in range(3):
            for part in rows(step, rank, 5 * ROWS).chunk(parts):
                (model(part).square().mean() / parts).backward()
            optimizer.step()
            optimizer.clear_grad()
        return [value.numpy() for value in model.state_dict().values()]

    found: list[Any] = []
    for parts, groups in ((1, False), (5, True)):
        if dist is paddle.distributed:
            found.append(train(None, parts, groups))
            continue
        levels = {level: train(level, parts, groups) for level in LEVELS}
        for level in LEVELS:
            for mine, other in zip(levels[level], levels["os"], strict=True):
                np.testing.assert_array_equal(mine, other, err_msg=level)
        found.append(levels["os"])
    assert_close(*found)
    return found


EQUAL = (
    branches_that_differ_between_ranks_and_steps,
    gradients_that_are_not_cleared,
    parameters_that_no_rank_uses,
    state_that_is_set_to_zero_and_loaded,
    methods_for_older_programs,
    gradients_of_inputs,
    sparse_embedding_with_sgd,
    group_sharded_training,
)


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, list[dict[str, Any]]]]:
    yield run(2, [*EQUAL, float64_parameters, frozen_layer])


@pytest.mark.parametrize("name", [program.__name__ for program in EQUAL])
def test_two_ranks_get_the_results_of_paddle(found: Any, name: str) -> None:
    for ours, theirs in zip(found["zeroshard"], found["paddle"], strict=True):
        assert not isinstance(theirs[name], Raised), theirs[name]
        assert_close(ours[name], theirs[name])
    first, second = (rank[name] for rank in found["zeroshard"])
    assert_close(first, second, rtol=0, atol=0)


def test_float64_is_averaged_by_paddle_and_an_error_here(found: Any) -> None:
    for ours, theirs in zip(found["zeroshard"], found["paddle"], strict=True):
        assert isinstance(theirs["float64_parameters"], list)
        message = raised(ours["float64_parameters"], "InvalidArgumentError", "ValueError")
        assert "must be float32, bfloat16 or float16" in message


def test_a_layer_that_does_not_train_is_refused_by_both(found: Any) -> None:
    raised(found["paddle"][0]["frozen_layer"], "AssertionError")
    assert "no parameter" in raised(found["zeroshard"][0]["frozen_layer"], "InvalidArgumentError")

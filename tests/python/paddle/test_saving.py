"""Saved models and optimizers are whole and load into plain Paddle; training continues from
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import zeroshard as zs
from zeroshard.paddle import (
    group_sharded_parallel,
    load_group_sharded_model,
    save_group_sharded_model,
)

import models
import ranks
from training import LEVELS, SEGMENT, assert_same

#: Every accumulator that there is, and a scheduler.
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: paddle.optimizer.SGD(0.05, parameters=p),
    "Momentum": lambda p: paddle.optimizer.Momentum(
        paddle.optimizer.lr.StepDecay(0.05, 3), parameters=p
    ),
    "Adam": lambda p: paddle.optimizer.Adam(0.01, parameters=p, amsgrad=True),
    "AdamW": lambda p: paddle.optimizer.AdamW(
        paddle.optimizer.lr.CosineAnnealingDecay(0.01, 9), parameters=p
    ),
    "Adamax": lambda p: paddle.optimizer.Adamax(0.01, parameters=p),
    "NAdam": lambda p: paddle.optimizer.NAdam(0.01, momentum_decay=0.1, parameters=p),
    "RAdam": lambda p: paddle.optimizer.RAdam(0.01, parameters=p),
    "RMSProp": lambda p: paddle.optimizer.RMSProp(0.01, momentum=0.5, parameters=p),
    "Adagrad": lambda p: paddle.optimizer.Adagrad(0.05, parameters=p),
    "Adadelta": lambda p: paddle.optimizer.Adadelta(1.0, parameters=p),
    "Lamb": lambda p: paddle.optimizer.Lamb(0.01, parameters=p),
}


def build(name: str, optimizer: str, level: str | None) -> tuple[Any, Any]:
    """A model and its optimizer. The parameters have the same names every time, as in a new
    process."""
    with paddle.utils.unique_name.guard():
        model = models.build(name)
        made = OPTIMIZERS[optimizer](model.parameters())
    if level is None:
        return model, made
    wrapped, sharded, _ = group_sharded_parallel(model, made, level, segment_size=SEGMENT)
    return wrapped, sharded


def steps(name: str, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = model(*models.batch(name, step, 8))
        loss.backward()
        # The first step of an optimizer of Paddle's gives its state names.
        with paddle.utils.unique_name.guard():
            optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        if isinstance(optimizer._learning_rate, paddle.optimizer.lr.LRScheduler):
            optimizer._learning_rate.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_training_continues_from_a_saved_state_in_plain_paddle_and_sharded(
    cluster: zs.Session, tmp_path: Path, level: str, optimizer: str
) -> None:
    model, sharded = build("cnn", optimizer, level)
    steps("cnn", model, sharded, 0, 6)
    save_group_sharded_model(model, tmp_path / "saved", sharded)
    expected = steps("cnn", model, sharded, 6, 12)
    for other in (None, *LEVELS):
        again, made = build("cnn", optimizer, other)
        load_group_sharded_model(again, tmp_path / "saved", made)
        np.testing.assert_allclose(steps("cnn", again, made, 6, 12), expected, rtol=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_existing_optimizer_state_is_uploaded(cluster: zs.Session, optimizer: str) -> None:
    model, plain = build("mlp", optimizer, None)
    steps("mlp", model, plain, 0, 12)
    again, made = build("mlp", optimizer, None)
    steps("mlp", again, made, 0, 6)
    again, made, _ = group_sharded_parallel(again, made, "os_g")
    steps("mlp", again, made, 6, 12)
    for name, tensor in again.state_dict().items():
        np.testing.assert_allclose(
            tensor.numpy(), model.state_dict()[name].numpy(), rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_has_the_names_shapes_and_values_of_paddle(
    cluster: zs.Session, optimizer: str
) -> None:
    states = []
    for level in (None, "os"):
        model, made = build("mlp", optimizer, level)
        steps("mlp", model, made, 0, 4)
        states.append(made.state_dict())
    theirs, ours = states
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, paddle.Tensor):
            assert ours[name].shape == value.shape and ours[name].dtype == value.dtype, name
            np.testing.assert_allclose(
                ours[name].numpy(), value.numpy(), rtol=1e-3, atol=1e-6, err_msg=name
            )


@pytest.mark.parametrize("name", ["frozen", "gpt", "cnn"])
def test_frozen_and_tied_parameters_and_buffers_survive(
    cluster: zs.Session, tmp_path: Path, name: str
) -> None:
    model, sharded = build(name, "AdamW", "p_g_os")
    steps(name, model, sharded, 0, 3)
    saved = {key: value.numpy() for key, value in model.state_dict().items()}
    save_group_sharded_model(model, tmp_path, sharded)
    plain, made = build(name, "AdamW", None)
    assert list(saved) == list(plain.state_dict())
    load_group_sharded_model(plain, tmp_path, made)
    assert_same({key: value.numpy() for key, value in plain.state_dict().items()}, saved)


def test_output_must_be_a_directory(cluster: zs.Session, tmp_path: Path) -> None:
    model, _ = build("mlp", "SGD", "os")
    (tmp_path / "file").touch()
    with pytest.raises(zs.InvalidArgumentError, match="directory"):
        save_group_sharded_model(model, tmp_path / "file")


def test_an_unwrapped_model_is_not_saved(cluster: zs.Session, tmp_path: Path) -> None:
    with pytest.raises(zs.InvalidArgumentError, match="group_sharded_parallel"):
        save_group_sharded_model(models.mlp(), tmp_path)


def test_a_missing_file_is_an_error(cluster: zs.Session, tmp_path: Path) -> None:
    with pytest.raises(zs.InvalidArgumentError, match="model.pdmodel"):
        load_group_sharded_model(models.mlp(), tmp_path)


def _save_and_load(rank: int, folder: str) -> Any:
    model, sharded = build("mlp", "AdamW", "p_g_os")
    steps("mlp", model, sharded, rank, rank + 3)
    save_group_sharded_model(model, folder, sharded)
    paddle.distributed.barrier()
    before = sharded.state_hash()
    steps("mlp", model, sharded, 3, 5)
    load_group_sharded_model(model, folder, sharded)
    return (
        before,
        sharded.state_hash(),
        {name: value.numpy() for name, value in model.state_dict().items()},
    )


def test_ranks_load_what_rank_0_saved(
    pair: ranks.Team, processes: dict[str, str], tmp_path: Path
) -> None:
    first, second = pair.run(_save_and_load, str(tmp_path / "saved"), env=processes)
    assert first[0] == second[0] and first[1] == second[1]
    assert_same(second[2], first[2])
    assert_same(
        {
            name: value.numpy()
            for name, value in paddle.load(str(tmp_path / "saved/model.pdmodel")).items()
        },
        first[2],
    )

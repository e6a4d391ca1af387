"""The behaviour that Paddle's users rely on in DataParallel and group sharding, compared with
Paddle where it runs on a CPU. MIGRATING.md lists the results."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import zeroshard as zs
from paddle import nn
from paddle.amp.auto_cast import StateDictHook
from zeroshard.paddle import GradScaler
from zeroshard.paddle.sharding import group_sharded_parallel, save_group_sharded_model

import models
from comparison import Raised, assert_close, gradients, local_values, raised, run
from training import LEVELS, SEGMENT

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


def momentum(model: Any, groups: bool = False) -> Any:
    parameters: Any = model.parameters()
    return paddle.optimizer.Momentum(
        0.05,
        parameters=[{"params": parameters}] if groups else parameters,
        weight_decay=1e-3,
        grad_clip=nn.ClipGradByGlobalNorm(0.5),
        multi_precision=True,
    )


def group_sharded_training(dist: Any) -> Any:
    """With whole batches, with accumulation over five parts of each, and with a parameter group."""
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
        for step in range(4):
            for part in rows(step, rank, 5 * ROWS).chunk(parts):
                (model(part).square().mean() / parts).backward()
            optimizer.step()
            optimizer.clear_grad()
        return [value.numpy() for value in model.state_dict().values()]

    found: list[Any] = []
    for parts, groups in ((1, False), (5, False), (1, True)):
        if dist is paddle.distributed:
            found.append(train(None, parts, groups))
            continue
        levels = {level: train(level, parts, groups) for level in LEVELS}
        for level in LEVELS:
            for mine, other in zip(levels[level], levels["os"], strict=True):
                np.testing.assert_array_equal(mine, other, err_msg=level)
        found.append(levels["os"])
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


# Group sharding in one process, compared with plain Paddle.


def sharded(layer: Any, optimizer: Any, level: str, **options: Any) -> Any:
    return group_sharded_parallel(layer, optimizer, level, segment_size=SEGMENT, **options)


@pytest.mark.parametrize(
    ("mode", "dtype"), [("O1", "float16"), ("O2", "float16"), ("O2", "bfloat16")]
)
@pytest.mark.filterwarnings("ignore")
def test_a_program_with_amp_a_scaler_and_set_lr_trains_as_plain_paddle(
    cluster: zs.Session, mode: str, dtype: str
) -> None:
    def train(level: str | None) -> Any:
        model: Any = models.build("mlp")
        model = paddle.amp.decorate(models=model, level=mode, dtype=dtype, save_dtype="float32")
        optimizer, scaler = momentum(model), GradScaler(init_loss_scaling=32768.0)
        if level is not None:
            model, optimizer, scaler = sharded(model, optimizer, level, scaler=scaler)
            optimizer.set_lr(optimizer.get_lr())
        losses = []
        for step in range(4):
            with paddle.amp.auto_cast(True, level=mode, dtype=dtype):
                loss = model(*models.batch("mlp", step, 8))
            losses.append(float(loss))
            if level is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.clear_grad()
        return losses, [value.numpy() for value in model.parameters()]

    plain = train(None)
    for level in LEVELS:
        assert_close(train(level), plain)


class Product(nn.Layer):
    """bfloat16 parameters in the operations that Paddle has for them on a CPU."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        half = nn.initializer.Constant(0.5)
        self.weight = self.create_parameter([256], dtype=dtype, default_initializer=half)

    def forward(self, x: Any) -> Any:
        return (self.weight.astype("bfloat16") * x).astype("float32").square().mean()


def test_bfloat16_parameters_have_float32_master_weights_and_may_be_saved_as_float32(
    cluster: zs.Session, tmp_path: Path
) -> None:
    batches = [paddle.rand([256]).astype("bfloat16") for _ in range(6)]

    def train(level: str | None) -> Any:
        # Plain Paddle has no kernel of Momentum for bfloat16 on a CPU: its parameters are the
        # master weights.
        model: Any = Product("float32" if level is None else "bfloat16")
        optimizer = momentum(model)
        if level is not None:
            # As decorate(save_dtype="float32") does on a GPU.
            model.register_state_dict_hook(StateDictHook("float32"))
            model, optimizer, _ = sharded(model, optimizer, level)
        for batch in batches:
            model(batch).backward()
            optimizer.step()
            optimizer.clear_grad()
        if level is None:
            return model.weight.numpy()
        save_group_sharded_model(model, tmp_path / level, optimizer)
        saved = paddle.load(str(tmp_path / level / "model.pdmodel"))["weight"]
        assert saved.dtype == paddle.float32 and model.weight.dtype == paddle.bfloat16
        return saved.numpy()

    plain, ours = train(None), [train(level) for level in LEVELS]
    for values in ours:
        np.testing.assert_array_equal(values, ours[0])
        np.testing.assert_allclose(values, plain, rtol=2**-8)


def test_training_continues_from_state_dicts_that_were_saved_meanwhile(
    cluster: zs.Session, tmp_path: Path
) -> None:
    for level in LEVELS:
        layer = models.build("mlp")
        model, optimizer, _ = sharded(layer, momentum(layer), level)

        def train(first: int) -> list[float]:
            losses = []
            for step in range(first, first + 3):
                loss = model(*models.batch("mlp", step, 8))
                loss.backward()
                optimizer.step()
                optimizer.clear_grad()
                losses.append(float(loss))
            return losses

        train(0)
        paddle.save(model.state_dict(), str(tmp_path / "model"))
        paddle.save(optimizer.state_dict(), str(tmp_path / "optimizer"))
        expected = train(3)
        model.set_state_dict(paddle.load(str(tmp_path / "model")))
        optimizer.set_state_dict(paddle.load(str(tmp_path / "optimizer")))
        assert train(3) == expected


def test_the_state_of_other_parameters_is_refused_when_it_is_loaded(cluster: zs.Session) -> None:
    other = models.build("mlp")
    plain = momentum(other)
    other(*models.batch("mlp", 0, 8)).backward()
    plain.step()
    layer = models.build("mlp")
    _, optimizer, _ = sharded(layer, momentum(layer), "os")
    before = optimizer.state_hash()
    with pytest.raises(zs.InvalidArgumentError, match="finds the state .* by its name"):
        optimizer.set_state_dict(dict(plain.state_dict()))
    assert optimizer.state_hash() == before
    layer = models.build("mlp")
    loaded = momentum(layer)
    loaded.set_state_dict(dict(plain.state_dict()))
    with pytest.raises(zs.InvalidArgumentError, match="finds the state .* by its name"):
        sharded(layer, loaded, "os")


def test_minimize_makes_the_step_that_it_makes_in_plain_paddle(cluster: zs.Session) -> None:
    def train(level: str | None) -> Any:
        model: Any = models.build("mlp")
        optimizer = momentum(model)
        if level is not None:
            model, optimizer, _ = sharded(model, optimizer, level)
        for step in range(2):
            loss = model(*models.batch("mlp", step, 8))
            loss.backward()
            optimizer.minimize(loss)
            optimizer.clear_grad()
        return [value.numpy() for value in model.state_dict().values()]

    for level in LEVELS:
        assert_close(train(level), train(None))


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_moves_to_the_device_that_it_has(cluster: zs.Session, level: str) -> None:
    layer = models.build("mlp")
    model, _, _ = sharded(layer, momentum(layer), level)
    for arguments in ({"device": "cpu"}, {"device": paddle.CPUPlace()}, {"dtype": "float32"}):
        assert model.to(**arguments) is model
    if level == "p_g_os":
        with pytest.raises(zs.InvalidArgumentError, match="before calling group_sharded_parallel"):
            model.to(dtype="bfloat16")


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_is_sharded_once(cluster: zs.Session, level: str) -> None:
    layer = models.build("mlp")
    model, optimizer, _ = sharded(layer, momentum(layer), level)
    for part in (layer, layer.layers[0]):
        with pytest.raises(zs.InvalidArgumentError, match="is sharded already; use the model"):
            sharded(part, momentum(part), level)
    with pytest.raises(zs.InvalidArgumentError, match="model is a GroupSharded"):
        sharded(model, optimizer, level)
    before = [value.numpy() for value in model.state_dict().values()]
    model.get_all_parameters()
    del model, optimizer
    gc.collect()
    if level == "p_g_os":
        with pytest.raises(zs.InvalidArgumentError, match="create the model anew"):
            sharded(layer, momentum(layer), level)
    else:
        model, _, _ = sharded(layer, momentum(layer), level)
        assert_close([value.numpy() for value in model.state_dict().values()], before, 0, 0)


def test_offload_has_no_effect_on_results_and_dp_group_is_refused(cluster: zs.Session) -> None:
    hashes = set()
    for options in ({}, {"offload": True}, {"sync_buffers": True}):
        layer = models.build("mlp")
        model, optimizer, _ = sharded(layer, momentum(layer), "p_g_os", **options)
        model(*models.batch("mlp", 0, 8)).backward()
        optimizer.step()
        hashes.add(optimizer.state_hash())
    assert len(hashes) == 1
    layer = models.build("mlp")
    with pytest.raises(zs.InvalidArgumentError, match="dp_group .* must be None"):
        sharded(layer, momentum(layer), "os_g", dp_group=object())

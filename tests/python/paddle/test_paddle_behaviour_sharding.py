"""The behaviour that Paddle's users rely on in group sharding, in one process, compared with plain
Paddle. docs/how-to/paddle-behaviour.md lists the results."""

from __future__ import annotations

import gc
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
from comparison import assert_close
from training import LEVELS, SEGMENT, momentum


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


def test_offload_has_no_effect_on_results(cluster: zs.Session) -> None:
    hashes = set()
    for options in ({}, {"offload": True}, {"sync_buffers": True}):
        layer = models.build("mlp")
        model, optimizer, _ = sharded(layer, momentum(layer), "p_g_os", **options)
        model(*models.batch("mlp", 0, 8)).backward()
        optimizer.step()
        hashes.add(optimizer.state_hash())
    assert len(hashes) == 1


def test_8_bit_state_is_close_to_f32_and_the_same_in_every_run(cluster: zs.Session) -> None:
    def train(level: str, **options: Any) -> tuple[str, list[float]]:
        layer = models.build("mlp")
        adamw = paddle.optimizer.AdamW(0.01, parameters=layer.parameters())
        model, optimizer, _ = sharded(layer, adamw, level, **options)
        losses = []
        for step in range(20):
            loss = model(*models.batch("mlp", step, 8))
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            losses.append(float(loss))
        return optimizer.state_hash(), losses

    exact, expected = train("os")
    found = [train(level, state_dtype="int8") for level in ("os", "p_g_os", "os")]
    assert found[0] == found[1] == found[2]
    assert found[0][0] != exact
    assert np.allclose(found[0][1], expected, rtol=0.05)

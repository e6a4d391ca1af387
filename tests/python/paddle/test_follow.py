# promise: consistent-reads
"""Programs follow a job, and receive what each step has changed, with Paddle."""

from __future__ import annotations

from typing import Any

import paddle
import pytest
import zeroshard as zs
from paddle import nn

import models
import ranks
from servers import servers
from training import assert_same
from zeroshard.paddle import follow, group_sharded_parallel


def step(model: Any, optimizer: Any, number: int, kind: str) -> None:
    model(*models.batch(kind, number, 8)).backward()
    optimizer.step()
    optimizer.clear_grad()


def state_of(model: Any) -> dict[str, Any]:
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def rounded(model: Any) -> Any:
    """Rounds the parameters of a model without buffers."""
    return model.to(dtype="bfloat16")


def scattered(model: Any) -> Any:
    """Stores the weights by columns, so that they are not contiguous."""
    for name, parameter in model.named_parameters():
        if len(parameter.shape) == 2:
            columns = paddle.transpose(parameter.detach(), [1, 0]).contiguous()
            parameter.get_tensor()._share_data_with(paddle.transpose(columns, [1, 0]).get_tensor())
            assert not parameter.is_contiguous(), name
    return model


def write(model: Any, name: str) -> None:
    parameter = dict(model.named_parameters())[name]
    parameter.set_value(parameter.detach() + 0.5)


def train(address: str, name: str, kind: str) -> tuple[Any, Any]:
    paddle.seed(1)
    bare = models.MODELS[kind]()
    optimizer: Any = paddle.optimizer.AdamW(0.01, parameters=bare.parameters())
    model, optimizer, _ = group_sharded_parallel(bare, optimizer, "os_g", sync_buffers=True)
    return model, optimizer


def follow_while_training(rank: int, address: str) -> None:
    with zs.init(address, name="followed"):
        model, optimizer = train(address, "followed", "cnn")
        reader = models.cnn()
        with follow("followed", address=address) as versions:
            seen = []
            for version in versions:
                version.apply(reader)
                assert_same(state_of(reader), state_of(model))
                fraction = version.changed_fraction
                assert fraction is not None and 0 < fraction <= 1
                assert version.bytes > 0
                seen.append((version.number, version.copied))
                if version.number == 6:
                    break
                if version.number == 3:
                    write(reader, "layers.0.weight")
                step(model, optimizer, version.number, "cnn")
                if version.number == 1:
                    step(model, optimizer, version.number + 1, "cnn")
            assert [number for number, _ in seen] == [0, 1, 3, 4, 5, 6]
            assert [reason for _, reason in seen] == ["joined", None, None, "differed", None, None]
            assert versions.copies == {"joined": 1, "differed": 1}


def test_a_model_has_every_version_bit_for_bit() -> None:
    with servers(2) as address:
        ranks.run(1, follow_while_training, address)


def half() -> Any:
    """The part of a rank among two in :func:`models.mlp` with tensor parallelism."""
    return models.Classifier(
        nn.Linear(models.FEATURES, 16),
        nn.ReLU(),
        nn.Linear(16, 24),
        nn.Tanh(),
        nn.Linear(24, models.CLASSES),
    )


def boxes_of(part: int) -> dict[str, list[tuple[int, int]]]:
    """The first index and the number of indices of that part along each dimension."""
    own = (16 * part, 16)
    return {
        "layers.0.weight": [(0, models.FEATURES), own],
        "layers.0.bias": [own],
        "layers.2.weight": [own, (0, 24)],
    }


def cut(values: Any, ranges: list[tuple[int, int]]) -> Any:
    return values[tuple(slice(offset, offset + size) for offset, size in ranges)]


def follow_parts(rank: int, address: str) -> None:
    with zs.init(address, name="parts"):
        model, optimizer = train(address, "parts", "mlp")
        whole: dict[str, list[tuple[int, int]]] = {}
        readers = [
            (models.mlp(), whole, paddle.float32),
            (rounded(models.mlp()), whole, paddle.bfloat16),
            (scattered(models.mlp()), whole, paddle.float32),
            (half(), boxes_of(0), paddle.float32),
            (rounded(half()), boxes_of(1), paddle.bfloat16),
            (scattered(half()), boxes_of(1), paddle.float32),
        ]
        followers = [follow("parts", boxes=boxes, dtype=dtype) for _, boxes, dtype in readers]
        # The memory of contiguous tensors stays where it is.
        parameters = [of for reader, _, _ in readers for of in reader.parameters()]
        addresses = {id(of): of.data_ptr() for of in parameters if of.is_contiguous()}
        assert 0 < len(addresses) < len(parameters)
        for number in range(6):
            values = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            for (reader, boxes, dtype), versions in zip(readers, followers, strict=True):
                version = next(versions)
                if number == 3:
                    write(reader, "layers.2.weight")
                version.apply(reader)
                assert version.number == number
                assert version.copied == {0: "joined", 3: "differed"}.get(number)
                expected = {name: of.cast(dtype).numpy() for name, of in values.items()}
                expected |= {name: cut(expected[name], ranges) for name, ranges in boxes.items()}
                assert_same(state_of(reader), expected)
            step(model, optimizer, number, "mlp")
        for parameter in parameters:
            assert addresses.get(id(parameter)) in (None, parameter.data_ptr())


def test_models_of_other_dtypes_and_parts_of_models_have_every_version() -> None:
    with servers(2) as address:
        ranks.run(1, follow_parts, address)


def follow_in_error(rank: int, address: str) -> None:
    with zs.init(address, name="errors"):
        model, _ = train(address, "errors", "mlp")
        with pytest.raises(zs.InvalidArgumentError, match="float64"):
            follow("errors", dtype=paddle.float64)
        with pytest.raises(zs.InvalidArgumentError, match="0 jobs"):
            follow("nothing")
        with pytest.raises(zs.InvalidArgumentError, match="nothing"):
            follow("errors", tensors=["nothing"])
        with pytest.raises(zs.InvalidArgumentError, match="mirror"):
            follow("errors", boxes=boxes_of(0), mirror="127.0.0.1:1")
        with pytest.raises(zs.InvalidArgumentError, match="the first index"):
            follow("errors", boxes={"layers.0.bias": [(-1, 16)]})
        with follow("errors", seconds=0.5) as versions:
            version = next(versions)
            other = rounded(models.mlp())
            before = state_of(other)
            with pytest.raises(zs.InvalidArgumentError, match="dtype=paddle.bfloat16"):
                version.apply(other)
            assert_same(state_of(other), before)
            with pytest.raises(zs.InvalidArgumentError, match=r"no tensors.*layers"):
                version.apply(nn.Linear(2, 2))
            with pytest.raises(zs.InvalidArgumentError, match=r"receives \[20, 32\]"):
                version.apply(half())
            version.apply(fresh := models.mlp())
            assert_same(state_of(fresh), state_of(model))
            with pytest.raises(zs.TimeoutError, match="errors"):
                next(versions)
        with pytest.raises(zs.InvalidArgumentError, match="closed"):
            next(versions)


def test_what_cannot_be_followed_or_applied_is_refused() -> None:
    with servers(1) as address:
        ranks.run(1, follow_in_error, address)

# promise: no-silent-difference
"""What a script does with the wrapper of a model is what happens to the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
import zeroshard as zs
from paddle import nn
from zeroshard.paddle import DataParallel, group_sharded_parallel

from training import LEVELS

WIDTH = 6


class Scaled(nn.Layer):
    """A layer with a number, a buffer and a sublayer that scripts change."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.temperature = 1.0
        self.register_buffer("scale", paddle.ones([1]))

    def forward(self, x: Any) -> Any:
        mode = 1.0 if self.training else 2.0
        return (self.head(self.body(x)) * self.temperature * self.scale * mode).square().mean()


def wrapped(system: str) -> tuple[Any, Any]:
    """The model as the script sees it, and the layer."""
    paddle.seed(3)
    layer = Scaled()
    if system == "plain":
        return layer, layer
    if system == "DataParallel":
        return DataParallel(layer), layer
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    return group_sharded_parallel(layer, optimizer, system, segment_size=16)[0], layer


def changed(system: str) -> Any:
    """The losses after each change, and the names in the state dict."""
    model, layer = wrapped(system)
    x = paddle.ones([2, WIDTH])
    losses = []

    def record() -> None:
        losses.append(model(x).item())

    model.temperature *= 0.5
    model.unknown_before = 3
    assert layer.unknown_before == 3
    record()
    model.scale = paddle.full([1], 3.0)
    record()
    model.training = False
    record()
    model.train()
    record()
    model.eval()
    assert not model.training and not layer.head.training
    record()
    model.register_buffer("other", paddle.ones([2]))
    model.add_sublayer("tail", nn.Linear(2, 2))
    model.add_parameter("bias", model.create_parameter([2], is_bias=True))
    del model.unknown_before
    assert not hasattr(layer, "unknown_before") and "temperature" in dir(model)
    names = list(model.state_dict())
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    model.set_dict({name: paddle.zeros_like(value) for name, value in kept.items()})
    record()
    hook = model.register_state_dict_hook(lambda state: state.__delitem__("bias"))
    assert "bias" not in model.state_dict()
    hook.remove()
    paddle.seed(5)
    model.head = nn.Linear(WIDTH, WIDTH)
    record()
    return losses, names, list(model.to_static_state_dict())


@pytest.mark.filterwarnings("ignore:DataParallel has no effect")
def test_changes_through_a_wrapper_are_those_of_the_layer(cluster: zs.Session) -> None:
    losses, *names = changed("plain")
    for system in ("DataParallel", *LEVELS):
        ours, *named = changed(system)
        np.testing.assert_allclose(ours, losses, rtol=1e-6, err_msg=system)
        assert named == names, system


def test_values_of_a_replaced_part_that_are_on_the_servers_are_an_error(
    cluster: zs.Session,
) -> None:
    model, _ = wrapped("p_g_os")
    model.head = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(zs.InvalidArgumentError, match="was taken out of the model"):
        model.set_state_dict(model.state_dict())


@pytest.mark.filterwarnings("ignore:DataParallel has no effect")
def test_the_layer_of_a_wrapper_cannot_be_replaced(cluster: zs.Session) -> None:
    for system, name in (("DataParallel", "_layers"), ("os", "_layer")):
        model, layer = wrapped(system)
        with pytest.raises(zs.InvalidArgumentError, match="wrap the other layer instead"):
            setattr(model, name, nn.Linear(2, 2))
        with pytest.raises(zs.InvalidArgumentError, match="wrap the other layer instead"):
            delattr(model, name)
        assert getattr(model, name) is layer


@pytest.mark.filterwarnings("ignore:DataParallel has no effect")
def test_set_state_dict_of_data_parallel_returns_nothing_as_in_paddle() -> None:
    model = DataParallel(nn.Linear(2, 2))
    assert model.set_state_dict(model.state_dict()) is None

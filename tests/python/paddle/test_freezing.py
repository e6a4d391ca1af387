# promise: no-silent-difference
"""Programs that freeze parameters after some steps, and train them again later: accumulators
belong to the parameter, as in Paddle, and not to its presence in a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
import zeroshard as zs
from zeroshard.paddle import group_sharded_parallel

import models
from training import LEVELS, SEGMENT, assert_close

#: The steps in which a layer is frozen.
FROZEN = range(3, 5)

OPTIMIZERS = {
    "adamw": lambda p: paddle.optimizer.AdamW(0.01, parameters=p, weight_decay=0.3),
    "momentum": lambda p: paddle.optimizer.Momentum(0.1, 0.9, parameters=p, weight_decay=0.1),
}


def train(level: str | None, kind: str, after_backward: bool) -> tuple[Any, Any, Any]:
    """Losses, parameters and accumulators. ``after_backward``: the layer is frozen between a
    backward pass and its step, which Paddle makes without the layer's gradient."""
    layer: Any = models.build("mlp")
    model, optimizer = layer, OPTIMIZERS[kind](layer.parameters())
    if level is not None:
        model, optimizer, _ = group_sharded_parallel(layer, optimizer, level, segment_size=SEGMENT)
    losses = []
    frozen = list(layer.layers[2].parameters())

    def freeze(is_frozen: bool) -> None:
        for parameter in frozen:
            parameter.stop_gradient = is_frozen

    for step in range(8):
        if not after_backward:
            freeze(step in FROZEN)
        loss = model(*models.batch("mlp", step, 8))
        loss.backward()
        losses.append(float(loss))
        if after_backward:
            freeze(step in FROZEN)
        optimizer.step()
        if after_backward:
            freeze(False)
        optimizer.clear_grad()
    names = {parameter.name: name for name, parameter in layer.named_parameters()}
    state = {
        f"{names[owner]}.{key[len(owner) :]}": value.numpy()
        for key, value in optimizer.state_dict().items()
        for owner in [max((n for n in names if key.startswith(f"{n}_")), key=len, default="")]
        if owner
    }
    state = dict(sorted(state.items()))
    return losses, {name: p.numpy() for name, p in model.state_dict().items()}, state


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("after_backward", [False, True])
def test_a_frozen_parameter_keeps_its_accumulators(
    kind: str, after_backward: bool, cluster: zs.Session
) -> None:
    expected = train(None, kind, after_backward)
    assert expected[2]
    for level in LEVELS:
        found = train(level, kind, after_backward)
        np.testing.assert_allclose(found[0], expected[0], rtol=2e-5)
        assert_close(found[1], expected[1], rtol=2e-5, atol=2e-6)
        assert_close(found[2], expected[2], rtol=2e-5, atol=2e-6)

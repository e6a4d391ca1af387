# promise: no-silent-difference
"""Programs that change hyperparameters on which the optimizer's state depends: as in torch, a
buffer exists as long as the optimizer does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import models
import zeroshard as zs
from training import LEVELS, SEGMENT, assert_close
from zeroshard.torch import group_sharded_parallel

Change = Callable[[int, Any], None]


def without(name: str, value: Any) -> Change:
    """Sets a hyperparameter to ``value`` in steps 3 and 4."""
    before: list[Any] = []

    def change(step: int, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            if step == 3:
                before.append(group[name])
            if step in (3, 5):
                group[name] = value if step == 3 else before.pop(0)

    return change


def momentum_of_one_group(step: int, optimizer: Any) -> None:
    optimizer.param_groups[1]["momentum"] = 0.0 if step < 4 else 0.5


def load_while_unused(step: int, optimizer: Any) -> None:
    without_momentum(step, optimizer)
    if step == 4:
        optimizer.load_state_dict(optimizer.state_dict())


without_momentum = without("momentum", 0.0)

#: Large enough for gradients that are rounding errors, which differ between processors, to stay
#: small: RMSprop divides by their size.
RMSPROP_EPS = 1e-4

CASES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], Change]] = {
    "sgd": (torch.optim.SGD, dict(momentum=0.9, dampening=0.5), without("momentum", 0.0)),
    "nesterov": (torch.optim.SGD, dict(momentum=0.9, nesterov=True), without("momentum", 0.0)),
    "begins later": (torch.optim.SGD, dict(momentum=0.0), without("momentum", 0.9)),
    "one group": (torch.optim.SGD, dict(momentum=0.9), momentum_of_one_group),
    "loaded": (torch.optim.SGD, dict(momentum=0.9), load_while_unused),
    "rmsprop": (
        torch.optim.RMSprop,
        dict(momentum=0.9, centered=True, eps=RMSPROP_EPS),
        without("momentum", 0.0),
    ),
    "centered": (
        torch.optim.RMSprop,
        dict(momentum=0.9, centered=True, eps=RMSPROP_EPS),
        without("centered", False),
    ),
    "amsgrad": (torch.optim.AdamW, dict(amsgrad=True), without("amsgrad", False)),
    # The servers' optimizer becomes another one.
    "decoupled": (
        torch.optim.Adam,
        dict(weight_decay=0.3),
        without("decoupled_weight_decay", True),
    ),
}


def train(
    level: str | None, case: str, nudged: bool = False
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Parameters and optimizer state after training. ``nudged``: it begins with parameters that are
    larger by one unit in the last place."""
    cls, options, change = CASES[case]
    inner = models.build("mlp")
    with torch.no_grad():
        for parameter in inner.parameters() if nudged else ():
            parameter.copy_(torch.nextafter(parameter, torch.tensor(torch.inf)))
    halves = [list(inner.layers[0].parameters()), list(inner.layers[1:].parameters())]
    model: Any = inner
    optimizer: Any = cls([{"params": half} for half in halves], lr=0.01, **options)  # type: ignore[call-arg]
    if level is not None:
        change(0, optimizer)
        model, optimizer, _ = group_sharded_parallel(inner, optimizer, level, segment_size=SEGMENT)
    for step in range(8):
        optimizer.zero_grad()
        change(step, optimizer)
        model(*models.batch("mlp", step, 8)).backward()
        optimizer.step()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, optimizer.state_dict()


@pytest.mark.parametrize("case", CASES)
def test_a_buffer_exists_as_long_as_the_optimizer_does(case: str, cluster: zs.Session) -> None:
    expected = train(None, case)
    # How much rounding errors count differs between optimizers and between processors.
    nudged = train(None, case, nudged=True)[0]
    noise = max(float((nudged[name] - value).abs().max()) for name, value in expected[0].items())
    for level in LEVELS:
        found = train(level, case)
        assert_close(found[0], expected[0], rtol=2e-5, atol=max(2e-6, noise))
        ours, torchs = found[1]["state"], expected[1]["state"]
        assert ours.keys() == torchs.keys()
        for number, state in torchs.items():
            kept = {name: value for name, value in state.items() if value is not None}
            found_state = dict(sorted(ours[number].items()))
            assert_close(found_state, dict(sorted(kept.items())), rtol=5e-3, atol=1e-4)


def test_momentum_that_begins_later_in_one_group_is_exact_or_an_error(cluster: zs.Session) -> None:
    cls, options, change = CASES["one group"]
    CASES["dampened"] = cls, {**options, "dampening": 0.5}, change
    try:
        with pytest.raises(zs.InvalidArgumentError, match="group 1 was 0 until now"):
            train("os", "dampened")
    finally:
        del CASES["dampened"]


@pytest.mark.parametrize(
    "cls, name, value",
    [
        (torch.optim.AdamW, "amsgrad", True),
        (torch.optim.RMSprop, "centered", True),
        (torch.optim.RMSprop, "momentum", 0.9),
    ],
)
def test_state_that_torch_would_miss_is_an_error(
    cls: Any, name: str, value: Any, cluster: zs.Session
) -> None:
    inner = models.build("mlp")
    model: Any = inner
    model, optimizer, _ = group_sharded_parallel(inner, cls(inner.parameters()), "os")
    model(*models.batch("mlp", 0, 8)).backward()
    optimizer.step()
    before = optimizer.state_hash()
    optimizer.param_groups[0][name] = value
    with pytest.raises(zs.InvalidArgumentError, match="has not kept"):
        model(*models.batch("mlp", 1, 8))
    assert optimizer.state_hash() == before

"""Each attribute in which a Paddle optimizer keeps a setting: a script that assigns it after a step
gets the next step of plain Paddle, or an error with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import paddle
import pytest
import zeroshard as zs
from paddle import nn
from zeroshard.paddle import _conversion, group_sharded_parallel

from comparison import assert_close

WIDTH = 6
#: The optimizers, and settings without which some attributes would have no effect.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    **{kind.__name__: {} for kind in _conversion.NAMES},
    "SGD": {"weight_decay": 0.1},
    "Momentum": {"weight_decay": 0.1},
    "AdamW": {"epsilon": 0.1},
    "Adam": {"epsilon": 0.1},
    "Adamax": {"epsilon": 0.1},
    "NAdam": {"epsilon": 0.1},
    "RAdam": {"epsilon": 0.1},
    "Adagrad": {"epsilon": 0.1},
    "Adadelta": {"epsilon": 0.1},
    "RMSProp": {"epsilon": 0.1, "momentum": 0.5},
    "Lamb": {"epsilon": 0.1, "always_adapt": True},
}
#: What changes the state of plain Paddle's optimizers otherwise than that of the servers.
REFUSED = {
    "Momentum": {"_rescale_grad"},
    "AdamW": {"_amsgrad", "_beta1", "_beta2", "_lazy_mode", "_lr_ratio", "regularization"},
    "Adam": {"_amsgrad", "_beta1", "_beta2", "_lazy_mode"},
    "Adamax": {"_beta1"},
    "NAdam": {"_beta2"},
    "RAdam": {"_beta1", "_beta2"},
    "RMSProp": {"_centered"},
    "Lamb": {"_beta1", "_beta2", "regularization"},
}
#: Of the memory of Paddle's own steps, not of their results.
MEMORY = {
    "_fuse_buffer_version",
    "_master_grad",
    "_multi_precision",
    "_need_refuse",
    "_use_fusion_storage",
    "_use_lowprecision_moment",
    "_use_multi_tensor",
}


def made(name: str, grouped: bool, sharded: bool) -> tuple[Any, Any]:
    """The model and the optimizer."""
    paddle.seed(3)
    layer: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    parameters = layer.parameters()
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    optimizer: Any = getattr(paddle.optimizer, name)(
        0.05, parameters=groups if grouped else parameters, **OPTIMIZERS[name]
    )
    if not sharded:
        return layer, optimizer
    return group_sharded_parallel(layer, optimizer, "os", segment_size=16)[:2]


Change = Callable[[Any], None]


def trained(made: tuple[Any, Any], change: Change | None, before: int = 1) -> list[Any]:
    """The values after two steps, of which ``before`` precede the change."""
    model, optimizer = made
    for step in range(2):
        if step == before and change is not None:
            change(optimizer)
        inputs = np.random.RandomState(step).randn(8, WIDTH).astype(np.float32)
        model(paddle.to_tensor(inputs)).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
    return [value.numpy() for value in model.state_dict().values()]


def assigns(attribute: str, value: Any) -> Change:
    return lambda optimizer: setattr(optimizer, attribute, value)


def settings(optimizer: Any) -> Iterator[tuple[str, Change]]:
    """The attributes with settings of an optimizer, and a change of each."""
    for name, value in vars(optimizer).items():
        if name in MEMORY:
            continue
        if isinstance(value, bool):
            yield name, assigns(name, not value)
        elif isinstance(value, (int, float)):
            yield name, assigns(name, value * 0.5 or 0.5)
        elif isinstance(value, str) and name != "type":
            yield name, assigns(name, "" if value else "l2_decay")
        elif name == "regularization":
            yield name, assigns(name, paddle.regularizer.L2Decay(0.3))
        elif name == "_grad_clip":
            yield name, assigns(name, nn.ClipGradByGlobalNorm(1e-3))
        elif name == "_lr_ratio":
            yield name, assigns(name, lambda parameter: 0.5)
        elif name == "_apply_decay_param_fun":
            yield name, assigns(name, lambda parameter: False)
        elif name == "_exclude_from_weight_decay_fn":
            yield name, assigns(name, lambda parameter: True)
        elif name == "_default_dict":
            epsilon = {"epsilon": 0.3} if "epsilon" in value else {}
            yield name, assigns(name, {**value, **epsilon})


@pytest.mark.parametrize("grouped", [False, True], ids=["list", "groups"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_setting_that_is_assigned_does_the_same_or_is_refused(
    cluster: zs.Session, name: str, grouped: bool
) -> None:
    unchanged = trained(made(name, grouped, sharded=False), None)
    found = dict(settings(made(name, grouped, sharded=False)[1]))
    assert {"_learning_rate", "_grad_clip", "regularization"} <= found.keys()
    effects, refused = set(), set()
    for setting, change in found.items():
        try:
            ours = trained(made(name, grouped, sharded=True), change)
        except (zs.InvalidArgumentError, zs.UnsupportedOptimizerError):
            refused.add(setting)
            continue
        plain = trained(made(name, grouped, sharded=False), change)
        assert_close(ours, plain, rtol=1e-3, atol=1e-5)
        effects |= set() if np.allclose(plain[0], unchanged[0], rtol=1e-4) else {setting}
    known = REFUSED.get(name, set())
    # With groups, Paddle reads most settings from the groups.
    assert refused <= known if grouped else refused == known and "_grad_clip" in effects


@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_betas_change_before_the_first_step_and_not_after_it(
    cluster: zs.Session, name: str
) -> None:
    def betas(optimizer: Any) -> None:
        optimizer._beta1, optimizer._beta2 = 0.5, 0.9

    plain = trained(made(name, False, sharded=False), betas, before=0)
    assert_close(trained(made(name, False, sharded=True), betas, before=0), plain, rtol=1e-3)
    # The same holds if the optimizer has made steps before it is wrapped, or has loaded a state.
    layer, optimizer = made(name, False, sharded=False)
    trained((layer, optimizer), None)
    state = {key: value.clone() for key, value in optimizer.state_dict().items()}
    model, sharded = group_sharded_parallel(layer, optimizer, "os", segment_size=16)[:2]
    with pytest.raises(zs.InvalidArgumentError, match="set the betas before the first step"):
        trained((model, sharded), betas, before=0)
    with pytest.raises(zs.InvalidArgumentError, match="with the betas of the saved run"):
        sharded.set_state_dict(state)
    optimizer._beta1, optimizer._beta2 = 0.9, 0.999
    sharded.set_state_dict(state)
    with pytest.raises(zs.InvalidArgumentError, match="set the betas before the first step"):
        trained((model, sharded), betas, before=1)


def test_a_number_that_is_assigned_as_learning_rate_is_used_until_the_first_step(
    cluster: zs.Session,
) -> None:
    """Paddle reads ``_learning_rate`` in the first step, and later only if it is a scheduler."""
    number, schedule = 0.5, paddle.optimizer.lr.StepDecay(0.2, 1)
    changes = [
        (assigns("_learning_rate", number), 0),
        (assigns("_learning_rate", number), 1),
        (assigns("_learning_rate", schedule), 1),
        (lambda optimizer: optimizer.set_lr(number), 1),
    ]
    found = []
    for change, before in changes:
        plain = trained(made("SGD", False, sharded=False), change, before)
        assert_close(trained(made("SGD", False, sharded=True), change, before), plain)
        found.append(float(plain[0].sum()))
    assert len(set(found)) == len(found)


def test_accumulators_that_a_script_assigns_are_refused(cluster: zs.Session) -> None:
    def writes(optimizer: Any) -> None:
        optimizer._accumulators["moment1"] = {"w": paddle.zeros([1])}

    for change in (writes, assigns("_accumulators", {})):
        with pytest.raises(zs.InvalidArgumentError, match="optimizer.set_state_dict"):
            trained(made("Adam", False, sharded=True), change)
    # Reading creates an empty entry.
    trained(made("Adam", False, sharded=True), lambda o: o._accumulators["moment1"].get("w"))

"""Training with each optimizer of Paddle gives the same results on the servers; unsupported
settings are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
import zeroshard as zs
from paddle import nn
from zeroshard import _native
from zeroshard.paddle import _conversion, group_sharded_parallel

import models
from training import LEVELS, Training, assert_close, train, worst

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "sgd, decayed": ("SGD", {"weight_decay": 0.01}),
    "momentum": ("Momentum", {"momentum": 0.8}),
    "momentum, decayed": ("Momentum", {"weight_decay": 0.01}),
    "nesterov": ("Momentum", {"use_nesterov": True}),
    "adam": ("Adam", {"beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6}),
    "adam, decayed": ("Adam", {"weight_decay": 0.01}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "adamw": ("AdamW", {"weight_decay": 0.1}),
    "adamw, in part": (
        "AdamW",
        {"weight_decay": 0.5, "apply_decay_param_fun": lambda name: name.endswith("w_0")},
    ),
    "adamax": ("Adamax", {"beta1": 0.8, "epsilon": 1e-2, "weight_decay": 0.01}),
    "nadam": ("NAdam", {"beta1": 0.8, "momentum_decay": 0.1, "weight_decay": 0.01}),
    "radam": ("RAdam", {"beta2": 0.99, "epsilon": 1e-4}),
    "rmsprop": ("RMSProp", {"rho": 0.9, "epsilon": 1e-2, "weight_decay": 0.01}),
    "rmsprop, momentum": ("RMSProp", {"epsilon": 1e-2, "momentum": 0.5, "centered": True}),
    "adagrad": ("Adagrad", {"initial_accumulator_value": 0.1}),
    "adadelta": ("Adadelta", {"rho": 0.9}),
    "lamb": ("Lamb", {"lamb_weight_decay": 0.02}),
    "lamb, in part": (
        "Lamb",
        {"exclude_from_weight_decay_fn": lambda p: p.name.endswith("b_0"), "always_adapt": True},
    ),
}
#: The others with their defaults.
for kind in set(_conversion.NAMES).difference(
    getattr(paddle.optimizer, name) for name, _ in list(SETTINGS.values())
):
    SETTINGS[kind.__name__] = (kind.__name__, {})
LR = {"Adadelta": 1.0, "SGD": 0.05, "Momentum": 0.02, "Adagrad": 0.02}


@pytest.mark.parametrize("name", SETTINGS)
def test_an_optimizer_trains_on_the_servers_as_in_paddle(cluster: zs.Session, name: str) -> None:
    optimizer, settings = SETTINGS[name]
    training = Training(
        optimizer=optimizer, lr=LR.get(optimizer, 5e-3), settings=settings, steps=25
    )
    plain, ours = train(training, "plain"), train(training, "os_g")
    assert worst(ours.losses, plain.losses) < 1e-4
    assert_close(ours.state, plain.state)


def regularized(parameters: list[Any]) -> list[Any]:
    parameters[0].regularizer = paddle.regularizer.L2Decay(0.1)
    return parameters


def with_lr_ratio(parameters: list[Any]) -> Any:
    optimizer = paddle.optimizer.AdamW(parameters=parameters)
    optimizer._lr_ratio = lambda _: 0.5  # Paddle refuses the argument on a CPU
    return optimizer


def wrapped(make: Any, level: str = "os", **options: Any) -> Any:
    model = models.mlp()
    return group_sharded_parallel(model, make(model.parameters()), level, **options)


@pytest.mark.parametrize("name", ["ASGD", "Rprop", "LBFGS"])
def test_an_unsupported_optimizer_is_refused_by_name(cluster: zs.Session, name: str) -> None:
    make = getattr(paddle.optimizer, name)
    with pytest.raises(zs.UnsupportedOptimizerError, match=f"{name}.*paddle.optimizer.AdamW"):
        wrapped(lambda parameters: make(learning_rate=0.1, parameters=parameters))


def test_an_optimizer_that_overrides_step_is_refused(cluster: zs.Session) -> None:
    class Own(paddle.optimizer.SGD):
        def step(self) -> None:
            pass

    with pytest.raises(zs.UnsupportedOptimizerError, match="Own"):
        wrapped(lambda parameters: Own(parameters=parameters))


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda p: paddle.optimizer.Adam(parameters=p, lazy_mode=True), "lazy_mode"),
        (
            lambda p: paddle.optimizer.SGD(
                parameters=p, weight_decay=paddle.regularizer.L1Decay(0.1)
            ),
            "L1Decay",
        ),
        (lambda p: paddle.optimizer.Momentum(parameters=p, rescale_grad=0.5), "rescale_grad"),
        (lambda p: paddle.optimizer.Lamb(parameters=p, lamb_weight_decay=0.0), "always_adapt"),
        (with_lr_ratio, "lr_ratio"),
        (lambda p: paddle.optimizer.AdamW(parameters=regularized(p)), "regularizer to None"),
        (lambda p: paddle.optimizer.Lamb(parameters=regularized(p)), "regularizer to None"),
    ],
)
def test_unsupported_settings_are_refused(cluster: zs.Session, make: Any, word: str) -> None:
    with pytest.raises(zs.UnsupportedOptimizerError, match=word):
        wrapped(make)


@pytest.mark.parametrize("applied", [1, 500, 3_000])
def test_the_steps_of_nadam_survive_conversion_after_a_power_is_too_small(applied: int) -> None:
    moments = {name: paddle.rand([2, 3]) for name in ("exp_avg", "exp_avg_sq")}
    values = _conversion.hyperparameters(
        "nadam", {**_native.Optimizer("nadam").hyperparameters, "beta2": 0.999}
    )
    state = _conversion.to_paddle("nadam", "w", values, (applied, [0.25], moments))
    # Paddle 3.3.1 has 1.68e-44 from about step 2,470 on.
    assert (float(state["w_momentum_decay_pow_0"][0, 0]) < 1e-38) == (applied == 3_000)
    found, scalars, tensors = _conversion.from_paddle(
        "nadam", values, [2, 3], lambda name: state.get(f"w_{name}_0")
    )
    assert (found, list(scalars), list(tensors)) == (applied, [0.25], list(moments))


def test_clipping_by_value_is_refused(cluster: zs.Session) -> None:
    clip = nn.ClipGradByValue(1.0)
    with pytest.raises(zs.InvalidArgumentError, match="ClipGradByNorm"):
        wrapped(lambda p: paddle.optimizer.SGD(parameters=p, grad_clip=clip))


def test_learning_rates_and_regularizers_of_parameters_are_used(cluster: zs.Session) -> None:
    def run(level: str | None) -> dict[str, np.ndarray]:
        paddle.seed(5)
        slow = paddle.ParamAttr(learning_rate=0.1, regularizer=paddle.regularizer.L2Decay(0.3))
        model: Any = nn.Sequential(nn.Linear(4, 8, weight_attr=slow), nn.Tanh(), nn.Linear(8, 1))
        optimizer: Any = paddle.optimizer.Momentum(
            0.1, parameters=model.parameters(), weight_decay=0.01
        )
        if level is not None:
            model, optimizer, _ = group_sharded_parallel(model, optimizer, level)
        for _ in range(5):
            model(paddle.ones([3, 4])).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()
        return {name: tensor.numpy() for name, tensor in model.state_dict().items()}

    plain = run(None)
    for level in LEVELS:
        assert_close(run(level), plain)

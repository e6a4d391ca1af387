"""Names of optimizers, and conversion of their state between torch and the servers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zeroshard import InvalidArgumentError, UnsupportedOptimizerError, _native
from zeroshard.torch import _conversion, optim

O = torch.optim
#: Every optimizer, and settings that select other state tensors or another name.
KNOWN: list[tuple[Any, dict[str, Any]]] = [
    *((cls, {}) for cls in _conversion.NAMES),
    (O.SGD, {"momentum": 0.9, "nesterov": True}),
    (O.ASGD, {"t0": 2}),
    (O.Adam, {"amsgrad": True}),
    (O.Adam, {"decoupled_weight_decay": True}),
    (O.AdamW, {"amsgrad": True}),
    (O.NAdam, {"decoupled_weight_decay": True}),
    (O.RAdam, {"decoupled_weight_decay": True}),
    (O.Adagrad, {"initial_accumulator_value": 0.5}),
    (O.RMSprop, {"momentum": 0.9}),
    (O.RMSprop, {"centered": True}),
    (O.RMSprop, {"momentum": 0.9, "centered": True}),
]
ids = [f"{kind.__name__} {' '.join(options)}" for kind, options in KNOWN]


def name_of(cls: Any, options: dict[str, Any]) -> str:
    known = O.AdamW if cls is O.Adam and "decoupled_weight_decay" in options else cls
    return _conversion.NAMES[known]


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """torch's state of the only parameter after its steps."""
    found: dict[str, Any] = optimizer.state_dict()["state"].get(0, {})
    return {key: value for key, value in found.items() if value is not None}


def parameter() -> nn.Parameter:
    found = nn.Parameter(torch.ones(2, 3))
    found.grad = torch.arange(6.0).view(2, 3)
    return found


@pytest.mark.parametrize("cls, options", KNOWN, ids=ids)
def test_names_and_state_tensors_match_the_servers(cls: Any, options: dict[str, Any]) -> None:
    optimizer, name = cls([parameter()], lr=0.1, **options), name_of(cls, options)
    optimizer.step()
    assert _conversion.optimizer_name(optimizer) == name
    found = _conversion.hyperparameters(name, optimizer.param_groups[0])
    assert found["lr"] == 0.1 and all(type(value) is float for value in found.values())
    servers = _native.Optimizer(name, found)
    held = {*servers.state_of((2, 3)), *servers.scalar_state}
    assert held == state_of(optimizer).keys() - {"step"}


@pytest.mark.parametrize("cls, options", KNOWN, ids=ids)
def test_state_survives_conversion_to_the_servers_and_back(
    cls: Any, options: dict[str, Any]
) -> None:
    optimizer, name = cls([parameter()], **options), name_of(cls, options)
    for _ in range(3):
        optimizer.step()
    hyperparameters = _conversion.hyperparameters(name, optimizer.param_groups[0])
    torch_state = state_of(optimizer)
    held = _conversion.from_torch(name, hyperparameters, torch_state, (2, 3))
    applied, _, tensors = held
    assert applied == (3 if name != "sgd" else len(tensors))
    back = _conversion.to_torch(name, held)
    assert list(back) == list(torch_state)
    for key, value in back.items():
        assert value.equal(torch_state[key]) and value.dtype == torch_state[key].dtype
    # And torch takes it.
    other = cls([parameter()], **options)
    other.load_state_dict({**optimizer.state_dict(), "state": {0: back} if back else {}})
    other.step()


@pytest.mark.parametrize("cls, options", KNOWN, ids=ids)
def test_a_parameter_that_was_never_updated_has_no_state(cls: Any, options: dict[str, Any]) -> None:
    name = name_of(cls, options)
    hyperparameters = _conversion.hyperparameters(
        name, cls([parameter()], **options).param_groups[0]
    )
    assert _conversion.from_torch(name, hyperparameters, {}, (2, 3)) == (0, (), {})
    names = _native.Optimizer(name, hyperparameters).state_of((2, 3))
    tensors = {n: torch.zeros(2, 3) for n in names}
    assert _conversion.to_torch(name, (0, (), tensors)) == {}


def test_momentum_of_none_counts_as_no_step() -> None:
    hyperparameters = {"momentum": 0.9}
    assert _conversion.from_torch("sgd", hyperparameters, {"momentum_buffer": None}, (2,)) == (
        0,
        (),
        {},
    )


def test_hyperparameters_are_read_as_numbers() -> None:
    optimizer = O.AdamW(
        [parameter()], lr=torch.tensor(0.5), betas=(0.8, 0.9), maximize=True, foreach=False
    )
    assert _conversion.hyperparameters("adamw", optimizer.param_groups[0]) == {
        "lr": 0.5, "beta1": 0.8, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.01,
        "amsgrad": 0.0, "maximize": 1.0,
    }  # fmt: skip
    optimizer.param_groups[0]["eps"] = "small"
    with pytest.raises(InvalidArgumentError, match="eps"):
        _conversion.hyperparameters("adamw", optimizer.param_groups[0])
    del optimizer.param_groups[0]["eps"]
    with pytest.raises(InvalidArgumentError, match="'eps' is missing"):
        _conversion.hyperparameters("adamw", optimizer.param_groups[0])


def test_a_differentiable_step_is_refused() -> None:
    optimizer = O.SGD([parameter()], differentiable=True)
    with pytest.raises(UnsupportedOptimizerError, match="differentiable"):
        _conversion.hyperparameters("sgd", optimizer.param_groups[0])


@pytest.mark.parametrize("cls", [O.Rprop, O.LBFGS])
def test_an_unsupported_optimizer_is_refused_and_supported_ones_are_listed(cls: Any) -> None:
    with pytest.raises(UnsupportedOptimizerError, match=cls.__name__) as error:
        _conversion.optimizer_name(cls([parameter()]))
    for known in _conversion.NAMES:
        module = "zeroshard.torch" if known.__name__ in optim.__all__ else "torch.optim"
        assert f"{module}.{known.__name__}" in str(error.value)


class Renamed(torch.optim.SGD):
    """A subclass without changes."""


class Own(torch.optim.SGD):
    """A subclass with its own step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_subclass_is_supported_unless_it_overrides_step() -> None:
    assert _conversion.optimizer_name(Renamed([parameter()])) == "sgd"
    optimizer = Renamed([parameter()])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps step
    assert _conversion.optimizer_name(optimizer) == "sgd"
    with pytest.raises(UnsupportedOptimizerError, match="overrides the step"):
        _conversion.optimizer_name(Own([parameter()]))


def test_decoupled_weight_decay_must_be_equal_in_all_groups() -> None:
    optimizer = O.Adam(
        [{"params": [parameter()]}, {"params": [parameter()], "decoupled_weight_decay": True}]
    )
    with pytest.raises(UnsupportedOptimizerError, match="decoupled_weight_decay"):
        _conversion.optimizer_name(optimizer)


def test_state_with_missing_tensors_or_wrong_shapes_is_refused() -> None:
    hyperparameters = {"amsgrad": 0.0}
    step, tensor = torch.tensor(2.0), torch.zeros(2, 3)
    with pytest.raises(InvalidArgumentError, match="'exp_avg_sq' is missing"):
        _conversion.from_torch("adam", hyperparameters, {"step": step, "exp_avg": tensor}, (2, 3))
    with pytest.raises(InvalidArgumentError, match="'mu_product' is missing"):
        state = {"step": step, "exp_avg": tensor, "exp_avg_sq": tensor}
        _conversion.from_torch("nadam", {}, state, (2, 3))
    with pytest.raises(InvalidArgumentError, match=r"\(2, 3\).*\(6,\)"):
        state = {"step": step, "exp_avg": tensor, "exp_avg_sq": tensor}
        _conversion.from_torch("adam", hyperparameters, state, (6,))


def test_state_in_half_precision_is_converted_to_f32() -> None:
    state = {"step": 2, "exp_avg": torch.ones(3, 2, dtype=torch.bfloat16).t()}
    applied, _, tensors = _conversion.from_torch("lion", {}, state, (2, 3))
    assert (
        applied == 2
        and tensors["exp_avg"].dtype == torch.float32
        and tensors["exp_avg"].is_contiguous()
    )

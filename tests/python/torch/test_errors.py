"""Invalid arguments raise errors that name the valid ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from zeroshard._native import Cluster
from zeroshard.torch import group_sharded_parallel


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that can be sharded."""
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("level", ["p_g", "", "OS", "3", None, 3])
def test_level_is_one_of_three(level: Any) -> None:
    """ "p_g" is in an example of Paddle's documentation."""
    with pytest.raises(zs.InvalidArgumentError, match=r"os.*os_g.*p_g_os"):
        group_sharded_parallel(*model_and_optimizer(), level)


def test_another_type_than_a_module_or_torch_optimizer_is_refused() -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(zs.InvalidArgumentError, match="nn.Module"):
        group_sharded_parallel(lambda x: x, optimizer, "os")
    with pytest.raises(zs.InvalidArgumentError, match="Optimizer"):
        group_sharded_parallel(model, "AdamW", "os")
    with pytest.raises(zs.InvalidArgumentError, match="GradScaler"):
        group_sharded_parallel(model, optimizer, "os", scaler=2.0**16)


@pytest.mark.parametrize("name", ["buffer_max_size", "segment_size"])
@pytest.mark.parametrize("size", [-1, 1.5, "1"])
def test_sizes_are_numbers_of_elements(name: str, size: Any) -> None:
    with pytest.raises(zs.InvalidArgumentError, match=name):
        group_sharded_parallel(*model_and_optimizer(), "os", **{name: size})


def test_accumulation_is_at_least_one_pass() -> None:
    with pytest.raises(zs.InvalidArgumentError, match="accumulation_steps"):
        group_sharded_parallel(*model_and_optimizer(), "os", accumulation_steps=0)


def test_an_unsupported_optimizer_is_an_error_that_lists_supported_ones(
    cluster: zs.Session,
) -> None:
    model, _ = model_and_optimizer()
    with pytest.raises(zs.UnsupportedOptimizerError) as raised:
        group_sharded_parallel(model, torch.optim.Rprop(model.parameters()), "os")
    message = str(raised.value)
    names = ["SGD", "ASGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad"]
    names += ["Adadelta", "Adafactor", "RMSprop", "Lion", "LAMB"]
    assert "Rprop" in message and [name for name in names if name not in message] == []
    assert isinstance(raised.value, TypeError)


def test_optimizer_of_another_model_is_refused(cluster: zs.Session) -> None:
    model, _ = model_and_optimizer()
    _, foreign = model_and_optimizer()
    with pytest.raises(zs.InvalidArgumentError, match="parameter"):
        group_sharded_parallel(model, foreign, "os")


def test_a_sharded_model_cannot_be_sharded_again(cluster: zs.Session) -> None:
    model, optimizer = model_and_optimizer()
    wrapped, sharded, _ = group_sharded_parallel(model, optimizer, "os")
    with pytest.raises(zs.InvalidArgumentError, match="not sharded yet"):
        group_sharded_parallel(wrapped, sharded, "os_g")


def test_an_unsupported_dtype_is_refused(cluster: zs.Session) -> None:
    model = nn.Linear(4, 2).double()
    with pytest.raises(zs.InvalidArgumentError, match="float64"):
        group_sharded_parallel(model, torch.optim.SGD(model.parameters(), lr=0.1), "os")


def test_every_exception_is_a_subclass_of_error_and_ends_in_error() -> None:
    raised = {name: value for name, value in vars(zs.errors).items() if isinstance(value, type)}
    assert all(issubclass(error, zs.Error) for error in raised.values())
    assert all(name.endswith("Error") and getattr(zs, name) is raised[name] for name in raised)
    assert issubclass(zs.InvalidArgumentError, ValueError)
    assert issubclass(zs.TimeoutError, TimeoutError)


@pytest.mark.parametrize("timeout", [0.0, -1.0, 1e300, float("nan")])
def test_a_timeout_is_a_positive_number_of_seconds(timeout: float) -> None:
    with pytest.raises(zs.InvalidArgumentError, match="timeout.*greater than 0"):
        Cluster.connect("127.0.0.1:7400", timeout=timeout)


def test_a_timeout_may_exceed_the_limit_of_the_servers() -> None:
    patient = Cluster.embedded(token="s3cret", timeout=7200.0)
    assert "servers" in patient.status()

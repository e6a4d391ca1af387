"""Invalid arguments raise errors that name the valid ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from servers import server
from zeroshard._native import Cluster, TensorSpec
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


def test_an_optimizer_that_runs_neither_on_servers_nor_on_ranks_is_an_error(
    cluster: zs.Session,
) -> None:
    model, _ = model_and_optimizer()
    with pytest.raises(zs.UnsupportedOptimizerError, match="LBFGS") as raised:
        group_sharded_parallel(model, torch.optim.LBFGS(model.parameters()), "os")
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


def test_every_exception_has_a_remedy() -> None:
    kinds = [kind for kind in vars(zs.errors).values() if isinstance(kind, type)]
    assert len(kinds) > 40
    for kind in kinds:
        assert issubclass(kind, zs.Error)
        assert len(kind("what happened").remedy.split()) > 1, kind


def test_a_remedy_is_the_part_of_the_message_that_says_what_to_do() -> None:
    aborted = zs.StepAbortedError("step 3 was aborted: lost; gone; run the step again in epoch 2")
    assert aborted.remedy == "run the step again in epoch 2"
    left = zs.RankLeftError("rank 1 has left the job; train under join; or start another worker")
    assert left.remedy == "train under join; or start another worker"
    gone = zs.VersionGoneError("version 3 is no longer available; the current version is 5")
    assert gone.remedy == zs.VersionGoneError("").remedy


def test_a_remedy_of_the_servers_is_that_of_the_error() -> None:
    job = ([TensorSpec("w", [4])], [("sgd", {})], 1)
    with server("coordinator", "--max-jobs", "1") as address:
        with server("shard", "--coordinator", address):
            native = Cluster.connect(address)
            native.create_job("first", *job)
            with pytest.raises(zs.LimitExceededError) as raised:
                native.create_job("second", *job)
            # It is a field of the error, and has a semicolon itself.
            assert raised.value.remedy.startswith("delete jobs") and raised.value.limit == 1
            assert str(raised.value).endswith(f"; {raised.value.remedy}")


def test_the_remedy_for_an_argument_names_the_valid_ones(cluster: zs.Session) -> None:
    model, _ = model_and_optimizer()
    with pytest.raises(zs.InvalidArgumentError) as raised:
        group_sharded_parallel(model, torch.optim.Rprop(model.parameters()), "zero")
    assert raised.value.remedy.startswith("it must be one of 'os'")

"""DataParallel in programs: state dicts, explicit averaging, and comparison with
DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import models
import ranks
import zeroshard as zs
from test_data_parallel import numbers
from zeroshard.torch import DataParallel, fused_allreduce_gradients

pytestmark = pytest.mark.filterwarnings("ignore:one process")


# State


def test_keys_have_no_prefix() -> None:
    model = models.build("cnn")
    wrapped = DataParallel(model)
    assert list(wrapped.state_dict()) == list(model.state_dict())
    assert list(nn.ModuleDict({"part": wrapped}).state_dict()) == [
        f"part.{key}" for key in model.state_dict()
    ]


def test_state_dicts_of_wrapped_and_plain_models_are_interchangeable() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    wrapped = DataParallel(model)
    other.load_state_dict(wrapped.state_dict())
    assert other.weight.equal(model.weight)
    wrapped.load_state_dict(nn.Linear(3, 2).state_dict())
    outer = nn.ModuleDict({"part": wrapped})
    outer.load_state_dict({f"part.{key}": value for key, value in other.state_dict().items()})
    assert other.weight.equal(model.weight)


def test_set_state_dict_matches_by_name() -> None:
    wrapped, other = DataParallel(nn.Linear(3, 2)), nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="missing keys in state_dict: bias") as caught:
        found = wrapped.set_state_dict({"weight": other.weight, "else": other.bias})
    assert any("else" in str(warning.message) for warning in caught)
    assert found.missing_keys == ["bias"] and found.unexpected_keys == ["else"]
    assert wrapped.weight.equal(other.weight) and not wrapped.bias.equal(other.bias)


def test_set_state_dict_without_structured_names_matches_by_position() -> None:
    wrapped, other = DataParallel(nn.Linear(3, 2)), nn.Linear(3, 2)
    wrapped.set_state_dict(
        {"linear_0.w_0": other.weight, "linear_0.b_0": other.bias}, use_structured_name=False
    )
    assert wrapped.weight.equal(other.weight) and wrapped.bias.equal(other.bias)
    with pytest.raises(zs.InvalidArgumentError, match="1 entries.*the module, 2"):
        wrapped.set_state_dict({"linear_0.w_0": other.weight}, use_structured_name=False)


def test_attributes_are_those_of_the_module() -> None:
    wrapped = DataParallel(nn.Linear(3, 2))
    assert wrapped.in_features == 3
    with pytest.raises(AttributeError, match="no_such_thing"):
        wrapped.no_such_thing


# fused_allreduce_gradients


class Tanh(torch.autograd.Function):
    """The custom operation of Paddle's documentation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return dy * (1 - torch.square(y))


class SimpleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(Tanh.apply(inputs))


def page_example(rank: int) -> tuple[Tensor, Tensor, int]:
    torch.manual_seed(3)
    alone = SimpleNet()
    model = SimpleNet()
    model.load_state_dict(alone.state_dict())
    model = DataParallel(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, alone)]
    for _ in range(10):
        data = torch.randn(2, 2, 2)
        with model.no_sync():
            model(data[rank].requires_grad_()).mean().backward()
        fused_allreduce_gradients(list(model.parameters()), None)
        alone(data.detach().flatten(0, 1)).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model.linear.weight.detach(), alone.linear.weight.detach(), len(zs.status().jobs)


def test_the_second_example_of_paddles_documentation_trains_as_a_single_process(
    pair: ranks.Team,
) -> None:
    for weight, alone, jobs in pair.run(page_example):
        torch.testing.assert_close(weight, alone)
        assert jobs == 2, "one of the model, and one for all ten steps"


def fused(rank: int) -> list[float | None]:
    everywhere, here, nowhere, frozen = [nn.Parameter(torch.ones(1)) for _ in range(4)]
    everywhere.grad = numbers(1.0 + rank)
    here.grad = numbers(3.0) if rank == 1 else None
    frozen.grad = numbers(float(rank))
    frozen.requires_grad_(False)
    parameters = [everywhere, here, nowhere, frozen]
    fused_allreduce_gradients(parameters)
    fused_allreduce_gradients(everywhere)
    fused_allreduce_gradients([everywhere, everywhere])
    return [None if p.grad is None else p.grad.item() for p in parameters]


def test_fused_allreduce_averages_any_parameters(pair: ranks.Team) -> None:
    assert pair.run(fused) == [[1.5, 1.5, None, 0.0], [1.5, 1.5, None, 1.0]]


def test_fused_allreduce_in_one_process_changes_nothing() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = numbers(3.0)
    fused_allreduce_gradients([parameter])
    assert parameter.grad == numbers(3.0)


# Beside torch's own


def losses(rank: int, name: str, steps: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for system in ("ours", "torch"):
        model = models.build(name)
        skips = name in ("branches", "unused", "frozen", "unfrozen")
        if system == "ours":
            wrapped: nn.Module = DataParallel(
                model, comm_buffer_size=0.002, last_comm_buffer_size=0.001
            )
        else:
            wrapped = DistributedDataParallel(model, find_unused_parameters=skips)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        found[system] = []
        for step in range(steps):
            if hasattr(model, "before_step"):
                model.before_step(step)
            optimizer.zero_grad()
            loss = wrapped(*models.share(models.batch(name, step, 8), rank, 2))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found[system].append(loss.item())
    return found


# torch's own cannot unfreeze, and does not know what to do with a reentrant checkpoint of tied
# weights.
@pytest.mark.parametrize(
    "name", [name for name in models.MODELS if name not in ("unfrozen", "reentrant checkpoint")]
)
def test_losses_are_those_of_distributed_data_parallel(name: str, pair: ranks.Team) -> None:
    for found in pair.run(losses, name, 40):
        for ours, theirs in zip(found["ours"], found["torch"], strict=True):
            assert abs(ours - theirs) <= 1e-6 * abs(theirs)


def test_server_processes_average_gradients(pair: ranks.Team, processes: dict[str, str]) -> None:
    for found in pair.run(losses, "gpt", 10, env=processes):
        for ours, theirs in zip(found["ours"], found["torch"], strict=True):
            assert abs(ours - theirs) <= 1e-6 * abs(theirs)


def by_methods(rank: int) -> list[dict[str, Tensor]]:
    """States after training through methods of the wrapper and of the module."""
    states = []
    for how in METHODS:
        model = models.build("mlp")
        wrapped = DataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            data = [models.share(models.batch("mlp", number, 8), rank, 2) for number in (step, 9)]
            if how == "after no_sync":
                with wrapped.no_sync():
                    wrapped(*data[1]).backward()
            elif how == "inside no_sync":
                with wrapped.no_sync():
                    wrapped.compute_loss(*data[1]).backward()
            elif how == "after an error":
                with wrapped.no_sync() if step == 1 else contextlib.nullcontext():
                    fail_in_backward(model, lambda: wrapped.compute_loss(*data[1]))
            if how == "of the module":
                wrapped.module(*data[0]).backward()
            else:
                wrapped.compute_loss(*data[0]).backward()
            optimizer.step()
        states.append(model.state_dict())
    return states


METHODS = ("of the wrapper", "of the module", "after no_sync", "inside no_sync", "after an error")


def fail_in_backward(model: Any, compute_loss: Callable[[], Tensor]) -> None:
    """A backward pass that raises an error after it has computed some gradients."""

    def fail(_: Tensor) -> None:
        raise RuntimeError("failed")

    def fail_later(module: nn.Module, inputs: Any, outputs: Tensor) -> None:
        outputs.register_hook(fail)

    handle = model.layers[0].register_forward_hook(fail_later)
    with pytest.raises(RuntimeError, match="failed"):
        compute_loss().backward()
    handle.remove()
    model.zero_grad()


def test_losses_of_methods_are_averaged(pair: ranks.Team) -> None:
    """The forward of the wrapper is not called, or only for gradients that are accumulated."""
    states = pair.run(by_methods)
    for how, *found in zip(METHODS, *states, strict=True):
        model = models.build("mlp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            for number in (step, 9) if "no_sync" in how else (step,):
                model(*models.batch("mlp", number, 8)).backward()
            optimizer.step()
        for state in found:
            for name, expected in model.state_dict().items():
                torch.testing.assert_close(state[name], expected, rtol=1e-5, atol=1e-6, msg=how)

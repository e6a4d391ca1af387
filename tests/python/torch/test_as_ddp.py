# promise: no-silent-difference
"""Scripts of DistributedDataParallel, whose results are the same with ZeroShard."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ranks
import zeroshard as zs
from training import LEVELS
from zeroshard.torch import DataParallel, group_sharded_parallel


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- hooks


def halved(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def hooked_gradients(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    """The gradients with hooks that halve them: of two passes with hooks that were registered
    before the forward, and of one between forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
    wrapped, found = wrap(model), []
    inputs = randn(1 + rank, 4, 8)
    for index in range(4):
        loss = wrapped(inputs).pow(2).sum()
        if index % 2 == 1:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(halved)
        model.zero_grad()
        loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


# ---- buffers


class Counting(nn.Module):
    """Batch norm, and a buffer that each training forward replaces by another tensor."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 16)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count = self.count + x.detach().mean()
        return self.linear(self.norm(x)) + self.count


def after_passes_without_backward(rank: int, system: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Makes two steps, then passes without backward that only update statistics, and evaluates."""
    torch.manual_seed(0)
    model: Any = Counting()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if system == "ddp":
        wrapped: Any = DistributedDataParallel(model)
    else:
        wrapped, optimizer, _ = group_sharded_parallel(
            model, optimizer, system, sync_buffers=True, segment_size=32
        )
    for index in range(2):
        optimizer.zero_grad()
        wrapped(randn(10 * rank + index, 6, 8)).pow(2).mean().backward()
        optimizer.step()
    for index in range(3):
        wrapped(randn(10 * rank + 5 + index, 6, 8))
    wrapped.eval()
    with torch.no_grad():
        outputs = wrapped(randn(99, 6, 8))
    return outputs, {name: buffer.clone() for name, buffer in model.named_buffers()}


def buffers_with_an_evaluation(rank: int, system: str) -> dict[str, Tensor]:
    """The buffers after training forwards with and without steps. With ZeroShard rank 0 evaluates
    the model alone after some of them."""
    torch.manual_seed(0)
    model: Any = Counting()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if system == "ddp":
        wrapped: Any = DistributedDataParallel(model)
    else:
        wrapped, optimizer, _ = group_sharded_parallel(
            model, optimizer, system, sync_buffers=True, segment_size=32
        )

    def forward(index: int) -> Tensor:
        outputs: Tensor = wrapped(randn(10 * rank + index, 6, 8))
        if rank == 0 and system != "ddp":
            wrapped.eval()
            with torch.no_grad():
                wrapped(randn(99, 6, 8))
            wrapped.train()
        return outputs

    forward(0)
    forward(1).pow(2).mean().backward()
    optimizer.step()
    for index in range(2, 5):
        forward(index)
    wrapped.eval()
    with torch.no_grad():
        wrapped(randn(99, 6, 8))  # all ranks get the buffers of rank 0
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


# ---- steps inside no_sync


def step_without_sync(level: str) -> str:
    model: Any = nn.Linear(8, 8)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _ = group_sharded_parallel(model, optimizer, level, segment_size=32)
    with model.no_sync():
        model(torch.ones(1, 8)).sum().backward()
        with pytest.raises(zs.InvalidArgumentError) as caught:
            optimizer.step()
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return str(caught.value)


def local_steps(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> Tensor:
    """Two steps of each rank alone."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    wrapped: Any = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with wrapped.no_sync():
        for index in range(2):
            optimizer.zero_grad()
            wrapped(randn(10 * rank + index, 6, 8)).pow(2).mean().backward()
            optimizer.step()
    return model.weight.detach().clone()


def gradient_of_a_copy(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> Tensor:
    """The gradient of a copy of the wrapped model, which the original does not share."""
    torch.manual_seed(0)
    wrapped = wrap(nn.Linear(8, 4))
    copied: Any = copy.deepcopy(wrapped)
    teacher = copy.deepcopy(wrapped).requires_grad_(False)
    assert not teacher(torch.ones(1, 8)).requires_grad
    # Of one rank alone, as an average of the weights is, which may evaluate without no_grad.
    average: Any = copy.deepcopy(wrapped) if rank == 0 else None
    if average is not None and wrap is DataParallel:
        assert average.eval()(torch.ones(1, 8)).requires_grad
        assert average.find_unused_parameters is False
        with average.no_sync():
            average(torch.ones(1, 8)).sum().backward()
        assert all(p.grad is not None for p in average.parameters())
    with copied.no_sync():
        copied(randn(10 * rank + 1, 6, 8)).pow(2).mean().backward()
    copied(randn(10 * rank, 6, 8)).pow(2).mean().backward()
    copied(randn(10 * rank, 6, 8)).pow(2).mean().backward()
    assert all(parameter.grad is None for parameter in wrapped.parameters())
    [weight, _] = [p.grad for p in copied.parameters() if p.grad is not None]
    return weight.clone()


def everything(rank: int) -> dict[str, Any]:
    """The results of each script with DistributedDataParallel and with ZeroShard."""
    wrappers = (DistributedDataParallel, DataParallel)
    with zs.init():
        found: dict[str, Any] = {
            "hooks": [hooked_gradients(rank, wrap) for wrap in wrappers],
            "local steps": [local_steps(rank, wrap) for wrap in wrappers],
            "copies": [gradient_of_a_copy(rank, wrap) for wrap in wrappers],
            "buffers": {
                system: after_passes_without_backward(rank, system) for system in ("ddp", *LEVELS)
            },
            "an evaluation": {
                system: buffers_with_an_evaluation(rank, system) for system in ("ddp", *LEVELS)
            },
            "no_sync": [step_without_sync(level) for level in LEVELS],
        }
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return ranks.run(2, everything)


def test_hooks_that_are_registered_later_get_gradients_before_the_mean(
    results: Any,
) -> None:
    for found in results:
        ddp, ours = found["hooks"]
        assert len(ddp) == len(ours) == 12
        for one, other in zip(ddp, ours, strict=True):
            torch.testing.assert_close(other, one)


def test_a_copy_averages_its_own_gradients(results: Any) -> None:
    for found in results:
        ddp, ours = found["copies"]
        torch.testing.assert_close(ours, ddp)


def test_buffers_are_those_of_rank_0_after_passes_without_backward(
    results: Any,
) -> None:
    for found in results:
        outputs, buffers = found["buffers"]["ddp"]
        for level in LEVELS:
            ours, held = found["buffers"][level]
            for name, buffer in buffers.items():
                torch.testing.assert_close(held[name], buffer, msg=lambda text: f"{name} {text}")
            torch.testing.assert_close(ours, outputs)


def test_an_evaluation_by_rank_0_alone_leaves_the_buffers_of_ddp(results: Any) -> None:
    for found in results:
        expected = found["an evaluation"].pop("ddp")
        for buffers in found["an evaluation"].values():
            for name, buffer in buffers.items():
                torch.testing.assert_close(buffer, expected[name])


def test_local_steps_are_those_of_each_rank_or_refused(results: Any) -> None:
    for found in results:
        ddp, ours = found["local steps"]
        torch.testing.assert_close(ours, ddp)
        assert all("inside no_sync()" in message for message in found["no_sync"])

# promise: no-silent-difference
"""Several optimizers of one model do what they do in torch, or raise an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zeroshard as zs
from torch import Tensor, nn
from zeroshard.torch import shard

from training import SEGMENT

STAGES = (1, 2, 3)
INPUTS = torch.linspace(-1.0, 1.0, 120).reshape(3, 40)
#: A loop of a script: the model, its two optimizers, and the number of the step. Returns the loss.
Loop = Callable[[nn.Sequential, list[Any], int], Tensor]


def made() -> tuple[nn.Sequential, list[Any]]:
    """A model, and an optimizer for each of its layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2))
    return model, [
        torch.optim.AdamW(model[0].parameters(), lr=0.1),
        torch.optim.AdamW(model[2].parameters(), lr=torch.tensor(0.01)),
    ]


def losses(loop: Loop, stage: int | None) -> list[float]:
    """The losses of four steps. ``stage`` None: in torch."""
    model, optimizers = made()
    if stage is not None:
        shard(model, optimizers, stage, segment_size=SEGMENT)
    return [loop(model, optimizers, step).item() for step in range(4)]


def backward(model: nn.Module) -> Tensor:
    loss: Tensor = model(INPUTS).square().sum()
    loss.backward()
    return loss


def with_schedules(model: nn.Sequential, optimizers: list[Any], step: int) -> Tensor:
    """Each scheduler steps after its optimizer, before the next one."""
    loss = backward(model)
    for optimizer in optimizers:
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        optimizer.zero_grad()
    return loss


def zeroing_one(model: nn.Sequential, optimizers: list[Any], step: int) -> Tensor:
    """In every other step the second optimizer has no gradients."""
    loss = backward(model)
    first, second = optimizers
    if step == 1:
        second.zero_grad()
    first.step()
    if step == 3:
        second.zero_grad()
    second.step()
    model.zero_grad()
    return loss


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("loop", [with_schedules, zeroing_one])
def test_two_optimizers_of_one_kind_train_as_in_torch(
    loop: Loop, stage: int, cluster: zs.Session
) -> None:
    assert losses(loop, stage) == pytest.approx(losses(loop, None), rel=1e-5)


def test_a_forward_between_the_steps_is_refused(cluster: zs.Session) -> None:
    model, optimizers = made()
    shard(model, optimizers, segment_size=SEGMENT)
    backward(model)
    optimizers[0].step()
    with pytest.raises(zs.InvalidArgumentError, match="uses parameter 'weight'.*step of AdamW"):
        model(INPUTS)
    # What uses no parameter of the optimizer that has stepped does what it does in torch.
    model[2](torch.ones(3, 30))
    optimizers[1].step()
    model(INPUTS)


def test_a_backward_pass_between_the_steps_is_refused(cluster: zs.Session) -> None:
    model, optimizers = made()
    shard(model, optimizers, segment_size=SEGMENT)
    hidden = model[0](INPUTS)
    hidden.sum().backward(retain_graph=True)
    optimizers[0].step()
    with pytest.raises(zs.InvalidArgumentError, match="'0.*' after the step of AdamW"):
        hidden.square().sum().backward()

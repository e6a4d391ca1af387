# promise: no-silent-difference
"""Trainable parameters that are not in the optimizer: their gradients are means over the ranks, as
in DistributedDataParallel with ``find_unused_parameters``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import ranks
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from training import LEVELS
from zeroshard.torch import clip_grad_norm_, group_sharded_parallel, join

WORLD, STEPS = 2, 4


class Net(nn.Module):
    """Each pass uses one expert. Only the head is in the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Linear(6, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor, expert: int) -> Tensor:
        return self.head(self.experts[expert](self.body(inputs).tanh()))


def outside(model: Any) -> list[Any]:
    return [*model.body.parameters(), *model.experts.parameters()]


class Script:
    """A model and its optimizer, with DistributedDataParallel or at a level."""

    def __init__(self, system: str) -> None:
        self.plain = Net()
        self.optimizer: Any = torch.optim.AdamW(self.plain.head.parameters(), lr=0.05)
        self.second = torch.optim.SGD(outside(self.plain), lr=0.1)
        self.is_sharded = system in LEVELS
        self.model: Any
        if self.is_sharded:
            self.model, self.optimizer, _ = group_sharded_parallel(
                self.plain, self.optimizer, system, segment_size=32, accumulation_steps=None
            )
        else:
            self.model = DistributedDataParallel(self.plain, find_unused_parameters=True)
        self.seen: list[float] = []

    def see(self, parameters: list[Any] | None = None) -> None:
        """Records gradients. One that no rank has is None in torch, and zeros here."""
        for parameter in parameters or self.plain.parameters():
            gradient = parameter.grad
            total = 0.0 if gradient is None else gradient.abs().sum().item()
            self.seen += [total, 0.0 if gradient is None else gradient.norm().item()]


Use = Callable[[Script, int], None]


def nothing(script: Script, step: int) -> None:
    pass


def look(script: Script, step: int) -> None:
    script.see()


def look_outside(script: Script, step: int) -> None:
    script.see(outside(script.plain))


def clip(script: Script, step: int) -> None:
    script.seen.append(nn.utils.clip_grad_norm_(script.plain.parameters(), 0.1).item())
    script.see()


def clip_ours(script: Script, step: int) -> None:
    clip = clip_grad_norm_ if script.is_sharded else nn.utils.clip_grad_norm_
    script.seen.append(clip(list(script.model.parameters()), 0.1).item())


def clip_by_value(script: Script, step: int) -> None:
    nn.utils.clip_grad_value_(script.plain.parameters(), 0.01)
    script.see()


def scale_and_write(script: Script, step: int) -> None:
    for parameter in outside(script.plain):
        if parameter.grad is not None and parameter.grad.norm() > 0:
            parameter.grad.mul_(0.5)
            parameter.grad[0] = 0.25 * step
    script.see()


def assign(script: Script, step: int) -> None:
    script.plain.body.weight.grad = torch.full_like(script.plain.body.weight, 0.5)
    script.plain.body.bias.grad = None
    script.see()


def second_optimizer(script: Script, step: int) -> None:
    script.second.step()
    script.second.zero_grad()


def hook(script: Script, step: int) -> None:
    def doubled(parameter: Any) -> None:
        parameter.grad.mul_(2.0)

    if step == 1:
        weight, bias = script.plain.body.weight, script.plain.body.bias
        weight.register_hook(lambda gradient: gradient * 2)
        if script.is_sharded:
            bias.register_post_accumulate_grad_hook(doubled)
        else:
            bias.register_hook(lambda gradient: gradient * 2)


def add_group(script: Script, step: int) -> None:
    script.see()
    if step == 1:
        script.optimizer.add_param_group({"params": script.plain.body.parameters(), "lr": 0.2})


def add_group_unseen(script: Script, step: int) -> None:
    if step == 1:
        script.optimizer.add_param_group({"params": script.plain.body.parameters(), "lr": 0.2})


def freeze(script: Script, step: int) -> None:
    script.plain.body.requires_grad_(step % 2 == 1)


def look_at_frozen(script: Script, step: int) -> None:
    script.plain.body.requires_grad_(False)
    if script.is_sharded:
        script.model(batch(step, 5, 0), 0)  # notices it
    script.see(outside(script.plain))
    script.plain.body.requires_grad_(True)


@dataclass(frozen=True)
class Case:
    """What a script does after the backward passes of a step, and which passes it makes."""

    use: Use
    #: Backward passes of a step, and whether all but the last are under ``no_sync``.
    passes: int = 1
    holds: bool = False
    #: None: gradients are kept over the steps.
    set_to_none: bool | None = True
    #: What it does after the step.
    later: Use = nothing


CASES = [
    Case(nothing),
    Case(look),
    Case(look, passes=2),
    Case(look, passes=2, holds=True),
    Case(look, set_to_none=False),
    Case(look, set_to_none=None),
    Case(nothing, later=look_outside),
    Case(clip),
    Case(clip_ours, passes=2, holds=True),
    Case(clip_by_value),
    Case(scale_and_write),
    Case(assign),
    Case(second_optimizer),
    Case(hook, later=look_outside),
    Case(add_group),
    Case(add_group_unseen),
    Case(look, later=freeze),
    Case(look_at_frozen),
]


def batch(step: int, part: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))


def train(system: str, case: Case, rank: int) -> tuple[list[float], list[Tensor]]:
    script = Script(system)
    for step in range(STEPS):
        for part in range(case.passes):
            held = case.holds and part + 1 < case.passes
            with script.model.no_sync() if held else contextlib.nullcontext():
                expert = 0 if step == 0 else (rank + part + step) % 3
                script.model(batch(step, part, rank), expert).pow(2).mean().backward()
        case.use(script, step)
        script.optimizer.step()
        case.later(script, step)
        script.optimizer.zero_grad()
        if case.set_to_none is not None:
            script.plain.zero_grad(set_to_none=case.set_to_none)
    values = script.model.state_dict() if script.is_sharded else script.plain.state_dict()
    return script.seen, [value.clone() for value in values.values()]


def check_join() -> None:
    """Ranks that have no more batches do not take part in averaging."""
    script = Script("os_g")
    with join(script.model):
        script.model(batch(0, 0, 0), 0).sum().backward()
        with pytest.raises(zs.InvalidArgumentError, match="body.*inside zeroshard.torch.join"):
            script.plain.body.weight.grad.sum()
        script.optimizer.step()


def check_other_dtypes() -> None:
    """The servers cannot average float64, which is an error when the program looks."""
    model = Net()
    model.double().head.float()
    model.experts.float()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    sharded, optimizer, _ = group_sharded_parallel(model, optimizer, "os_g")
    sharded.module.experts[0](model.body(torch.ones(2, 6).double()).float()).sum().backward()
    assert float(model.experts[0].bias.grad.sum()) == 16
    with pytest.raises(
        zs.InvalidArgumentError, match="body.bias.*float64.*add it to the optimizer"
    ):
        model.body.bias.grad.sum()


def check(rank: int) -> None:
    wrong = []
    for case in CASES:
        expected = train("ddp", case, rank)
        for level in LEVELS:
            try:
                found = train(level, case, rank)
                torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)
            except AssertionError as error:
                wrong.append(f"{case} at {level}: {error}")
    assert not wrong, "\n".join(wrong)
    check_other_dtypes()
    check_join()


def test_gradients_of_parameters_outside_of_the_optimizer_are_those_of_ddp() -> None:
    ranks.run(WORLD, check, timeout=120)

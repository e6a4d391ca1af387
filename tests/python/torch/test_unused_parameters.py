# promise: no-silent-difference
"""Parameters that some ranks do not use in a step: ``parameter.grad`` is the mean over all ranks on
every rank, as in DistributedDataParallel with ``find_unused_parameters``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import ranks
from training import LEVELS, assert_close
from zeroshard.torch import group_sharded_parallel

WORLD, STEPS = 2, 5


class Experts(nn.Module):
    """Each pass uses one expert. Nobody uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, inputs: Tensor, expert: int) -> Tensor:
        return self.experts[expert](self.first(inputs).tanh())


def batch(step: int, part: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))


Look = Callable[[list[Any]], list[float]]


def nothing(parameters: list[Any]) -> list[float]:
    return []


def clip(parameters: list[Any]) -> list[float]:
    return [nn.utils.clip_grad_norm_(parameters, 0.1).item()]


def read(parameters: list[Any]) -> list[float]:
    sums = [float(p.grad.abs().sum()) for p in parameters if p.grad is not None]
    return [total for total in sums if total]  # what no rank has used is None, or shown as zeros


def write(parameters: list[Any]) -> list[float]:
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.norm() > 0:
            parameter.grad.add_(torch.ones_like(parameter), alpha=0.01)
    return []


def add_noise(parameters: list[Any]) -> list[float]:
    """Also to the gradient that no rank has: here it is not None, and in torch it is."""
    for number, parameter in enumerate(parameters):
        if parameter.grad is not None:
            parameter.grad.add_(torch.full_like(parameter, 0.01 * (number % 3 + 1)))
    return []


LOOKS: list[Look] = [nothing, clip, read, write, add_noise]

#: The parts of a step, and whether all but the last are under ``no_sync``. None: no, and the number
#: of parts is learned.
Passes = tuple[int, bool | None]
PASSES: list[Passes] = [(1, False), (3, False), (3, True)]


def make() -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = Experts()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.2)


def train(
    model: Any,
    optimizer: Any,
    of_ranks: list[int],
    look: Look,
    passes: Passes,
    set_to_none: bool,
) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """Rank ``r`` uses the first expert in steps 0 and 2, and otherwise its own. Without ranks one
    process makes the passes of all of them."""
    parts, holds = passes
    seen: list[float] = []

    def run(step: int) -> None:
        for part in range(parts):
            for rank in of_ranks:
                held = holds and part + 1 < parts and hasattr(model, "no_sync")
                expert = 0 if step in (0, 2) else (rank + part + step) % 3
                with model.no_sync() if held else contextlib.nullcontext():
                    loss = model(batch(step, part, rank), expert).pow(2).mean()
                (loss / parts / len(of_ranks)).backward()

    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=set_to_none)
        run(step)
        if step in (1, 4) and not set_to_none:
            model.zero_grad(set_to_none=False)  # skips the batch
            run(step + STEPS)
        seen += look(list(model.parameters()))
        optimizer.step()
    return seen, {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()


def cases() -> Iterator[tuple[Look, Passes, bool]]:
    for look in LOOKS:
        for passes in PASSES if look is clip else PASSES[:1]:
            yield look, passes, True
    yield clip, PASSES[0], False
    yield nothing, PASSES[1], False
    yield nothing, (1, None), False


def check(rank: int) -> None:
    for look, passes, set_to_none in cases():
        expected = train(*make(), list(range(WORLD)), look, passes, set_to_none)
        for level in LEVELS:
            options = {"accumulation_steps": passes[0]} if passes[1] is False else {}
            model, optimizer, _ = group_sharded_parallel(*make(), level, segment_size=32, **options)
            found = train(model, optimizer, [rank], look, passes, set_to_none)
            name = f"{look.__name__} {passes} {level} {set_to_none}"
            torch.testing.assert_close(
                found[0], expected[0], rtol=2e-5, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}"
            )
            assert_close(found[1], expected[1], rtol=2e-5, atol=2e-6)
            assert found[2]["state"].keys() == expected[2]["state"].keys(), name


def test_a_gradient_that_one_rank_does_not_have_is_the_mean_on_every_rank() -> None:
    ranks.run(WORLD, check, timeout=120)

# promise: same-bits, no-silent-difference
"""``parameter.grad`` between backward and the step: reading and changing it has the effect that it
has without ZeroShard."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
import zeroshard as zs
import zeroshard.torch
from gradients import STEPS, Seen, backward, build, state_of
from torch import Tensor, nn
from training import LEVELS, assert_close

# ---- what programs do with gradients


def clip_by_norm(parameters: list[Any]) -> Seen:
    return [nn.utils.clip_grad_norm_(parameters, 0.05).item()]


def clip_by_norm_in_two_parts(parameters: list[Any]) -> Seen:
    total = nn.utils.get_total_norm([p.grad for p in parameters])
    nn.utils.clip_grads_with_norm_(parameters, 0.05, total)
    return [total.item()]


def clip_by_largest(parameters: list[Any]) -> Seen:
    return [nn.utils.clip_grad_norm_(parameters, 0.01, norm_type=math.inf).item()]


def clip_twice(parameters: list[Any]) -> Seen:
    first = nn.utils.clip_grad_norm_(parameters[:2], 0.01).item()
    return [first, nn.utils.clip_grad_norm_(parameters, 0.02).item()]


def clip_by_value(parameters: list[Any]) -> Seen:
    nn.utils.clip_grad_value_(parameters, 0.005)
    return []


def clip_by_hand(parameters: list[Any]) -> Seen:
    total = sum(p.grad.data.norm(2).item() ** 2 for p in parameters) ** 0.5
    for parameter in parameters:
        parameter.grad.data.mul_(min(1.0, 0.05 / (total + 1e-6)))
    return [total]


def scale_some(parameters: list[Any]) -> Seen:
    parameters[0].grad *= 0.5
    parameters[1].grad.div_(3.0)
    parameters[2].grad /= torch.tensor(2.0)
    return [p.grad.norm().item() for p in parameters]


def scale_all(parameters: list[Any]) -> Seen:
    torch._foreach_mul_([p.grad for p in parameters], torch.tensor(0.25))
    return [norm.item() for norm in torch._foreach_norm([p.grad for p in parameters])]


def look(parameters: list[Any]) -> Seen:
    return [float(p.grad.abs().max()) for p in parameters] + parameters[0].grad[0].tolist()


def look_as_numpy(parameters: list[Any]) -> Seen:
    return [float(np.abs(p.grad.numpy()).sum()) for p in parameters] + parameters[1].grad.tolist()


def add_noise(parameters: list[Any]) -> Seen:
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters:
        parameter.grad.add_(torch.randn(parameter.shape, generator=generator), alpha=0.01)
    return []


def centre(parameters: list[Any]) -> Seen:
    for parameter in parameters:
        if parameter.dim() > 1:
            parameter.grad.add_(-parameter.grad.mean(dim=1, keepdim=True))
    return []


def set_some(parameters: list[Any]) -> Seen:
    parameters[0].grad = parameters[0].grad * 0.5
    parameters[1].grad = torch.ones_like(parameters[1])
    return []


def remove_one(parameters: list[Any]) -> Seen:
    parameters[1].grad = None
    parameters[2].grad.norm()
    return []


def zero_one(parameters: list[Any]) -> Seen:
    parameters[2].grad.zero_()
    return []


def write_rows(parameters: list[Any]) -> Seen:
    parameters[2].grad[0] = 0.0
    parameters[2].grad.view(-1)[-3:].mul_(2.0)
    return []


def write_as_numpy(parameters: list[Any]) -> Seen:
    parameters[0].grad.numpy()[...] *= 0.5
    return []


ACTIONS: dict[str, Callable[[list[Any]], Seen]] = {
    each.__name__: each
    for each in (
        clip_by_norm,
        clip_by_norm_in_two_parts,
        clip_by_largest,
        clip_twice,
        clip_by_value,
        clip_by_hand,
        scale_some,
        scale_all,
        look,
        look_as_numpy,
        add_noise,
        centre,
        set_some,
        remove_one,
        zero_one,
        write_rows,
        write_as_numpy,
    )
}


def outcome(system: str, action: str, rank: int = 0, world: int = 1) -> tuple[Seen, Any, str]:
    """What the program sees in three steps, the state, and the hash at a level."""
    model, optimizer = build(system)
    seen: Seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step, rank, world)
        seen += ACTIONS[action](list(model.parameters()))
        optimizer.step()
    return seen, state_of(model), optimizer.state_hash() if system in LEVELS else ""


def outcomes(rank: int, world: int, systems: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {
        action: {system: outcome(system, action, rank, world) for system in systems}
        for action in ACTIONS
    }


def check(found: dict[str, Any], reference: str) -> None:
    seen, state, _ = found.pop(reference)
    for ours, our_state, _ in found.values():
        torch.testing.assert_close(ours, seen, rtol=1e-5, atol=1e-8)
        assert_close(our_state, state, rtol=1e-5, atol=1e-6)
    assert len({state_hash for _, _, state_hash in found.values()}) == 1


@pytest.mark.parametrize("action", ACTIONS)
def test_one_rank_does_the_same_with_gradients_as_plain_torch(
    action: str, cluster: zs.Session
) -> None:
    check({system: outcome(system, action) for system in ("plain", *LEVELS)}, "plain")


def test_two_ranks_do_the_same_with_gradients_as_data_parallel_ranks(
    pair: ranks.Team, processes: dict[str, str]
) -> None:
    first, second = pair.run(outcomes, 2, ("ddp", *LEVELS), env=processes)
    for action in ACTIONS:
        check(first[action], "ddp")
        check(second[action], "ddp")


# ---- one rank alone, and ranks that differ


def change_nothing(rank: int, weight: Tensor) -> None:
    if rank == 0:
        assert weight.grad.abs().sum().item() > 0  # the other rank does not look at it


def scale_differently(rank: int, weight: Tensor) -> None:
    weight.grad.mul_(0.5 + rank)


def write_differently(rank: int, weight: Tensor) -> None:
    weight.grad.add_(rank + 1.0)


def write_on_one_rank(rank: int, weight: Tensor) -> None:
    if rank == 1:
        weight.grad.add_(1.0)


#: What ranks do with a gradient, and the error of the rank that finds the difference.
DIFFERENCES: list[tuple[Callable[[int, Tensor], None], str]] = [
    (change_nothing, ""),
    (scale_differently, "disagree about factor of the gradient of tensor .layers.2.weight"),
    (write_differently, "rank 0 and rank 1 disagree about the gradient of .* .layers.2.weight"),
    (write_on_one_rank, "whether attempt 0 is committed or discarded at step 0"),
]


def refusals(rank: int) -> list[list[str]]:
    """The errors of a step at each level, for each difference."""

    def refusal(level: str, change: Callable[[int, Tensor], None]) -> str:
        model, optimizer = build(level)
        backward(model, 0, rank, 2)
        change(rank, model.module.layers[2].weight)
        try:
            optimizer.step()
        except zs.Error as error:
            return f"{type(error).__name__}: {error}"
        return ""

    found = []
    for level in LEVELS:
        for change, _ in DIFFERENCES:
            found.append([refusal(level, change)])
            # A rank that raises leaves the job, which tells the other rank.
            gc.collect()
            dist.barrier()
    return found


def test_ranks_that_change_gradients_differently_are_named(
    pair: ranks.Team, processes: dict[str, str]
) -> None:
    errors = zip(*pair.run(refusals, env=processes), strict=True)
    for [first], [second], (change, wanted) in zip(
        *zip(*errors, strict=True), DIFFERENCES * len(LEVELS), strict=True
    ):
        name = change.__name__
        if wanted:
            assert first and second, name
            assert re.search(wanted, first + second), f"{name}: {first} | {second}"
        else:
            assert (first, second) == ("", ""), name

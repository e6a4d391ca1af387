# promise: no-silent-difference
"""Programs that keep, replace or zero ``parameter.grad`` over several steps: they do what they do
without ZeroShard, or an error says what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import models
import pytest
import ranks
import torch
import zeroshard as zs
import zeroshard.torch
from gradients import STEPS, Seen, backward, build, state_of
from torch import Tensor, nn
from training import LEVELS, SEGMENT, assert_close
from zeroshard.torch import GroupSharded, group_sharded_parallel


def keep_after_zeroing(model: Any, optimizer: Any, step: int) -> Seen:
    backward(model, step)
    kept = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient * 0.5
    optimizer.step()
    return []


def keep_after_setting(model: Any, optimizer: Any, step: int) -> Seen:
    backward(model, step)
    parameter = next(iter(model.parameters()))
    kept, parameter.grad = parameter.grad, torch.zeros_like(parameter)
    seen = [float(kept.abs().sum())]
    optimizer.step()
    optimizer.zero_grad()
    return seen


def decay_after_looking(model: Any, optimizer: Any, step: int) -> Seen:
    backward(model, step)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
    with torch.no_grad(), summoned(model):
        for parameter in model.parameters():
            parameter.mul_(0.9)
    optimizer.step()
    optimizer.zero_grad()
    return [norm]


def step_twice(model: Any, optimizer: Any, step: int) -> Seen:
    backward(model, step)
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    return []


def change_and_step_twice(model: Any, optimizer: Any, step: int) -> Seen:
    backward(model, step)
    nn.utils.clip_grad_value_(model.parameters(), 0.005)
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    return []


def divide_by_zero(model: Any, optimizer: Any, step: int) -> Seen:
    backward(model, step)
    seen = [float(p.grad.clone().div_(0.0).isfinite().sum()) for p in model.parameters()]
    seen += [float(p.grad.div_(0.0).isfinite().sum()) for p in model.parameters()]
    optimizer.zero_grad()
    return seen


def give_to_another(model: Any, optimizer: Any, step: int) -> Seen:
    backward(model, step)
    _, first, _, second, *_ = model.parameters()
    first.grad.mul_(0.5)
    given = model.module.layers[0] if isinstance(model, GroupSharded) else model.layers[0]
    given.bias.grad = given.bias.grad + first.grad * 2.0
    second.grad = second.grad.mul(3.0)
    optimizer.step()
    optimizer.zero_grad()
    return []


def zero_as_zeros(model: Any, optimizer: Any, step: int) -> Seen:
    backward(model, step)
    seen = [float(p.grad.abs().sum()) for p in model.parameters()]
    if step == 1:
        optimizer.zero_grad(set_to_none=False)  # the step then applies momentum only
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return seen + [float(p.grad.abs().sum()) for p in model.parameters()]


def zero_the_module(model: Any, optimizer: Any, step: int) -> Seen:
    backward(model, step)
    nn.utils.get_total_norm([p.grad for p in model.parameters()])
    model.zero_grad(set_to_none=False)
    backward(model, step + 10)
    optimizer.step()
    optimizer.zero_grad()
    return []


def look_in_inference_mode(model: Any, optimizer: Any, step: int) -> Seen:
    backward(model, step)
    with torch.inference_mode():
        seen = [float(p.grad.abs().sum()) for p in model.parameters()]
    nn.utils.clip_grad_value_(model.parameters(), 0.005)
    optimizer.step()
    optimizer.zero_grad()
    return seen


def pass_through(model: Any, optimizer: Any, step: int) -> Seen:
    """As the generator of a GAN: a backward pass adds to gradients that the step has left."""
    model.zero_grad()
    backward(model, step)
    backward(model, step + 10)
    optimizer.step()
    other = nn.Parameter(torch.ones(()))
    (model(*models.batch("mlp", step, 8)) * other).backward()
    return [other.grad.item()]


def summoned(model: Any) -> contextlib.AbstractContextManager[Any]:
    return (
        model.summon_full_params() if isinstance(model, GroupSharded) else contextlib.nullcontext()
    )


PROGRAMS: dict[str, Callable[[Any, Any, int], Seen]] = {
    each.__name__: each
    for each in (
        keep_after_zeroing,
        keep_after_setting,
        decay_after_looking,
        step_twice,
        change_and_step_twice,
        divide_by_zero,
        give_to_another,
        zero_as_zeros,
        zero_the_module,
        look_in_inference_mode,
        pass_through,
    )
}
#: Programs that raise an error instead, at these levels.
REFUSED = {
    "keep_after_zeroing": (("os_g", "p_g_os"), "until the program sets parameter.grad"),
    "keep_after_setting": (("os_g", "p_g_os"), "until the program sets parameter.grad"),
    "step_twice": (("os_g", "p_g_os"), "call optimizer.zero_grad\\(\\) after each step"),
    "change_and_step_twice": (("os_g", "p_g_os"), "call optimizer.zero_grad\\(\\) after each step"),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_do_the_same_or_raise(program: str, level: str, cluster: zs.Session) -> None:
    def run(system: str) -> tuple[Seen, dict[str, Tensor]]:
        model, optimizer = build(system)
        seen = [
            value for step in range(STEPS) for value in PROGRAMS[program](model, optimizer, step)
        ]
        return seen, state_of(model)

    levels, message = REFUSED.get(program, ((), ""))
    if level in levels:
        with pytest.raises(zs.InvalidArgumentError, match=message):
            run(level)
        return
    (ours, our_state), (seen, state) = run(level), run("plain")
    torch.testing.assert_close(ours, seen, rtol=1e-5, atol=1e-7)
    assert_close(our_state, state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_our_clip_counts_what_was_done_before_it_and_is_seen_after_it(
    level: str, cluster: zs.Session
) -> None:
    def train(system: str) -> tuple[Seen, dict[str, Tensor]]:
        model, optimizer = build(system)
        seen: Seen = []
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, step)
            parameters = list(model.parameters())
            parameters[0].grad.mul_(0.5)
            if step == 1:
                parameters[1].grad.add_(0.1)
            clip = zeroshard.torch.clip_grad_norm_
            seen.append(clip(parameters, 0.05).item())
            seen += [p.grad.norm().item() for p in parameters]
            seen.append(float(parameters[2].grad.abs().max()))
            if step == 2 and system in LEVELS:
                with pytest.raises(zs.InvalidArgumentError, match="after clip_grad_norm_ of Zero"):
                    parameters[0].grad.mul_(2.0)
            optimizer.step()
        return seen, state_of(model)

    (ours, our_state), (seen, state) = train(level), train("plain")
    torch.testing.assert_close(ours, seen, rtol=1e-4, atol=1e-7)
    assert_close(our_state, state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_are_set_after_unscaling_are_not_unscaled_again(
    level: str, cluster: zs.Session
) -> None:
    def train(system: str) -> dict[str, Tensor]:
        model: Any = models.build("mlp")
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
        if system in LEVELS:
            model, optimizer, scaler = group_sharded_parallel(
                model, optimizer, system, scaler, segment_size=SEGMENT
            )
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(model(*models.batch("mlp", step, 8))).backward()
            scaler.unscale_(optimizer)
            for parameter in model.parameters():
                parameter.grad = parameter.grad.clamp(-0.01, 0.01)
            scaler.step(optimizer)
            scaler.update()
        return state_of(model)

    assert_close(train(level), train("plain"), rtol=1e-5, atol=1e-6)


def look_on_rank_0(rank: int) -> list[tuple[Seen, dict[str, Tensor]]]:
    """Rank 0 alone looks at gradients that are never zeroed."""
    outcomes = []
    for system in ("ddp", "os"):
        model, optimizer = build(system)
        seen: Seen = []
        for step in range(STEPS):
            backward(model, step, rank, 2)
            if rank == 0:
                seen.append(float(next(iter(model.parameters())).grad.abs().sum()))
            optimizer.step()
        outcomes.append((seen, state_of(model)))
    return outcomes


def test_one_rank_may_look_at_gradients_that_are_never_zeroed(
    pair: ranks.Team, processes: dict[str, str]
) -> None:
    for (seen, state), (ours, our_state) in pair.run(look_on_rank_0, env=processes):
        torch.testing.assert_close(ours, seen, rtol=1e-5, atol=1e-8)
        assert_close(our_state, state, rtol=1e-5, atol=1e-6)

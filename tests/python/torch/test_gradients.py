"""``parameter.grad`` between backward and the step: what programs do with it has the effect that it
has without ZeroShard."""

from __future__ import annotations

import contextlib
import gc
import math
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import models
import ranks
import zeroshard as zs
import zeroshard.torch
from training import LEVELS, SEGMENT, assert_close
from zeroshard.torch import GroupSharded, group_sharded_parallel

STEPS = 3


def build(system: str, **options: Any) -> tuple[Any, Any]:
    """A model and its optimizer: ``"plain"``, ``"ddp"`` or at a level."""
    model = models.build("mlp")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if system == "ddp":
        return DistributedDataParallel(model), optimizer
    if system in LEVELS:
        return group_sharded_parallel(
            model, optimizer, system, **{"segment_size": SEGMENT, **options}
        )[:2]
    return model, optimizer


def backward(model: Any, step: int = 0, rank: int = 0, world: int = 1) -> None:
    model(*models.share(models.batch("mlp", step, 8), rank, world)).backward()


def state_of(model: Any) -> dict[str, Tensor]:
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


# ---- what programs do with gradients

Seen = list[float]


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
    processes: dict[str, str],
) -> None:
    first, second = ranks.run(2, outcomes, 2, ("ddp", *LEVELS), env=processes)
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


def test_ranks_that_change_gradients_differently_are_named(processes: dict[str, str]) -> None:
    errors = zip(*ranks.run(2, refusals, env=processes), strict=True)
    for [first], [second], (change, wanted) in zip(
        *zip(*errors, strict=True), DIFFERENCES * len(LEVELS), strict=True
    ):
        name = change.__name__
        if wanted:
            assert first and second, name
            assert re.search(wanted, first + second), f"{name}: {first} | {second}"
        else:
            assert (first, second) == ("", ""), name


# ---- zero_grad


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["module", "wrapper", "to zero", "optimizer to zero"])
def test_gradients_that_are_zeroed_do_not_count(how: str, level: str, cluster: zs.Session) -> None:
    def train(system: str) -> dict[str, Tensor]:
        model, optimizer = build(system)
        for step in range(4):
            backward(model, step)
            if step in (1, 2):  # begins anew with the next batch
                model.parameters().__next__().grad.norm()
                if how == "optimizer to zero":
                    optimizer.zero_grad(set_to_none=False)
                elif how == "to zero":
                    optimizer.step()
                    model.zero_grad(set_to_none=False)
                else:
                    (model.module if how == "module" and system in LEVELS else model).zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
        return state_of(model)

    assert_close(train(level), train("plain"), rtol=1e-5, atol=1e-6)


def test_gradients_that_are_never_zeroed_add_up_or_raise(cluster: zs.Session) -> None:
    def train(system: str) -> dict[str, Tensor]:
        model, optimizer = build(system)
        for step in range(STEPS):
            backward(model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return state_of(model)

    assert_close(train("os"), train("plain"), rtol=1e-5, atol=1e-6)
    for level in ("os_g", "p_g_os"):
        with pytest.raises(zs.InvalidArgumentError, match="call optimizer.zero_grad"):
            train(level)


# ---- when it can be used


@pytest.mark.parametrize("level", LEVELS)
def test_several_backward_passes_can_be_clipped(level: str, cluster: zs.Session) -> None:
    def train(system: str, **options: Any) -> dict[str, Tensor]:
        model, optimizer = build(system, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(2):
                quiet = "no_sync" in how and part == 0 and system in LEVELS
                with model.no_sync() if quiet else contextlib.nullcontext():
                    backward(model, step, part, 2)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        return state_of(model)

    for how in ("learned", "no_sync", "accumulation_steps"):
        options = {"accumulation_steps": 2} if how == "accumulation_steps" else {}
        assert_close(train(level, **options), train("plain"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("ours", [False, True])
def test_scaled_gradients_can_be_clipped(ours: bool, level: str, cluster: zs.Session) -> None:
    """With torch's GradScaler, and with ours."""

    def train(system: str) -> tuple[Seen, dict[str, Tensor]]:
        model: Any = models.build("mlp")
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        if system in LEVELS:
            model, optimizer, found = group_sharded_parallel(
                model, optimizer, system, scaler if ours else None, segment_size=SEGMENT
            )
            scaler = found or scaler
        seen: Seen = []
        for step in range(6):
            optimizer.zero_grad()
            loss = model(*models.batch("mlp", step, 8))
            if step == 3:
                loss = loss * math.inf
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05).item()
            seen += [norm if math.isfinite(norm) else 0.0]
            seen += [] if step == 3 else [float(next(iter(model.parameters())).grad.abs().max())]
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
        return seen, state_of(model)

    (our_seen, our_state), (seen, state) = train(level), train("plain")
    torch.testing.assert_close(our_seen, seen, rtol=1e-5, atol=1e-8)
    assert_close(our_state, state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_get_this_ranks_gradient_before_it_is_sent(level: str, cluster: zs.Session) -> None:
    def train(system: str) -> tuple[Seen, dict[str, Tensor]]:
        model, optimizer = build(system)
        seen: Seen = []

        def hook(parameter: Tensor) -> None:
            seen.append(float(parameter.grad.abs().sum()))
            parameter.grad.clamp_(-0.01, 0.01)

        for step in range(STEPS):
            if step == 1:  # after passes without hooks
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(hook)
            optimizer.zero_grad()
            for part in range(2):
                backward(model, step, part, 2)
            optimizer.step()
        return seen, state_of(model)

    (our_seen, our_state), (seen, state) = train(level), train("plain")
    torch.testing.assert_close(our_seen, seen, rtol=1e-5, atol=1e-8)
    assert_close(our_state, state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_can_be_differentiated(level: str, cluster: zs.Session) -> None:
    def train(system: str) -> dict[str, Tensor]:
        model, optimizer = build(system)
        for step in range(STEPS):
            optimizer.zero_grad()
            data = models.batch("mlp", step, 8)
            loss = model(*data)
            loss.backward(create_graph=True)
            gradients = [parameter.grad for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.grad = None
            (sum(gradient.square().sum() for gradient in gradients)).backward()
            optimizer.step()
        if system in LEVELS:
            with pytest.raises(zs.InvalidArgumentError, match="call optimizer.zero_grad"):
                model(*data).backward(create_graph=True)
                optimizer.step()
        return state_of(model)

    assert_close(train(level), train("plain"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_with_a_graph_stays_until_the_step(level: str, cluster: zs.Session) -> None:
    def train(system: str, **options: Any) -> dict[str, Tensor]:
        model, optimizer = build(system, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(*models.batch("mlp", step, 8)).backward(create_graph=True)
            norm = sum(parameter.grad.square().sum() for parameter in model.parameters())
            for parameter, second in zip(
                model.parameters(),
                torch.autograd.grad(norm, list(model.parameters())),
                strict=True,
            ):
                parameter.grad = parameter.grad.detach() + 0.1 * second
            optimizer.step()
        return state_of(model)

    assert_close(train(level, accumulation_steps=1), train("plain"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_has_no_memory_and_ends_with_its_step(
    level: str, processes: dict[str, str]
) -> None:
    for text in ranks.run(2, outside_of_its_time, level, env=processes):
        assert text == ""


def outside_of_its_time(rank: int, level: str) -> str:
    model, optimizer = build(level)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step, rank, 2)
        weight = model.module.layers[2].weight
        gradient = weight.grad
        assert (gradient.shape, gradient.dtype) == (weight.shape, weight.dtype)
        assert not gradient.requires_grad and gradient.device == weight.device
        for use in (gradient.data_ptr, gradient.untyped_storage, gradient.share_memory_):
            with pytest.raises(zs.InvalidArgumentError, match=re.escape("parameter.grad.clone()")):
                use()
        kept = model.module.layers[0].bias.grad
        value = kept.clone()
        optimizer.step()
        assert torch.equal(kept, value), "it was looked at before the step"
        assert "layers.2.weight" in repr(gradient)
        with pytest.raises(zs.InvalidArgumentError, match="no longer available"):
            gradient.sum()
        with pytest.raises(zs.InvalidArgumentError, match="no longer available"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return ""


def test_a_gradient_that_was_sent_cannot_be_used_during_backward(cluster: zs.Session) -> None:
    model, optimizer = build("os_g")
    for step in range(2):
        optimizer.zero_grad()
        loss = model(*models.batch("mlp", step, 8))
        if step == 1:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: p.grad.sum())
            with pytest.raises(zs.InvalidArgumentError, match="before the forward"):
                loss.backward()
            return
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_a_gradient_does_not_keep_its_model_alive(level: str, cluster: zs.Session) -> None:
    model, optimizer = build(level)
    backward(model)
    parameter = weakref.ref(model.module.layers[0].weight)
    gradient = model.module.layers[0].weight.grad
    kept = model.module.layers[2].weight.grad.clone()
    del model, optimizer
    gc.collect()  # ends the job, which refers to the parameters
    gc.collect()
    assert parameter() is None
    with pytest.raises(zs.InvalidArgumentError, match="'layers.0.weight' are no longer"):
        gradient.sum()
    assert kept.norm() > 0


# ---- longer programs


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


def test_one_rank_may_look_at_gradients_that_are_never_zeroed(processes: dict[str, str]) -> None:
    for (seen, state), (ours, our_state) in ranks.run(2, look_on_rank_0, env=processes):
        torch.testing.assert_close(ours, seen, rtol=1e-5, atol=1e-8)
        assert_close(our_state, state, rtol=1e-5, atol=1e-6)

# promise: no-silent-difference
"""When ``parameter.grad`` can be used, and how long."""

from __future__ import annotations

import contextlib
import gc
import math
import re
import weakref
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
from zeroshard.torch import group_sharded_parallel

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
    level: str, pair: ranks.Team, processes: dict[str, str]
) -> None:
    for text in pair.run(outside_of_its_time, level, env=processes):
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

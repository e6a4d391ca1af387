# promise: no-silent-difference
"""Programs that freeze parameters after some steps, and train them again later: optimizer state
belongs to the parameter, as in torch, and not to its presence in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models
import ranks
import zeroshard as zs
from training import LEVELS, SEGMENT, assert_close
from zeroshard.torch import GroupSharded, clip_grad_norm_, group_sharded_parallel

#: The steps in which a layer is frozen.
FROZEN = range(3, 5)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def wrap(level: str | None, model: nn.Module, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    if level is None:
        return model, optimizer
    return group_sharded_parallel(model, optimizer, level, segment_size=SEGMENT, **options)[:2]


def module_of(model: Any) -> Any:
    return model.module if isinstance(model, GroupSharded) else model


Losses = list[float]
Result = tuple[Losses, dict[str, Tensor], dict[str, Any]]


def train(
    level: str | None,
    make: Callable[[Any], torch.optim.Optimizer],
    during: Callable[[int, Any, Any], None] = lambda step, model, optimizer: None,
    *,
    set_to_none: bool = True,
    share: tuple[int, int] = (0, 1),
    steps: int = 8,
    **options: Any,
) -> Result:
    """Losses, parameters and optimizer state after ``steps`` steps, of which some freeze a
    layer. ``during`` is called between backward and step."""
    inner = models.build("mlp")
    model, optimizer = wrap(level, inner, make(inner.parameters()), **options)
    losses = []
    for step in range(steps):
        inner.layers[2].requires_grad_(step not in FROZEN)
        optimizer.zero_grad(set_to_none)
        loss = model(*models.share(models.batch("mlp", step, 8), *share))
        loss.backward()
        losses.append(loss.item())
        during(step, model, optimizer)
        optimizer.step()
    state = {name: value.clone() for name, value in module_of(model).state_dict().items()}
    return losses, state, optimizer.state_dict()


def assert_as_torch(found: Result, expected: Result) -> None:
    assert_close(found[1], expected[1], rtol=2e-5, atol=2e-6)
    for step, (ours, torchs) in enumerate(zip(found[0], expected[0], strict=True)):
        assert ours == pytest.approx(torchs, rel=2e-5), step
    ours, torchs = found[2]["state"], expected[2]["state"]
    assert ours.keys() == torchs.keys()
    for number, state in torchs.items():
        assert_close(dict(ours[number]), dict(state), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_frozen_parameter_keeps_its_optimizer_state(
    make: Callable[[Any], torch.optim.Optimizer], level: str, cluster: zs.Session
) -> None:
    expected = train(None, make)
    assert_as_torch(train(level, make), expected)
    frozen = train(level, make, steps=FROZEN.stop)  # the state is also there while it is frozen
    assert_as_torch(frozen, train(None, make, steps=FROZEN.stop))
    # Gradients of zero move a frozen parameter with momentum and weight decay.
    zeros = train(None, make, set_to_none=False)
    assert zeros[0] != expected[0]
    assert_as_torch(train(level, make, set_to_none=False), zeros)


def clip(step: int, model: Any, optimizer: Any) -> None:
    ours = isinstance(model, GroupSharded)
    function: Any = clip_grad_norm_ if ours else nn.utils.clip_grad_norm_
    trained = [p for p in model.parameters() if p.requires_grad]
    function(trained if step % 2 else model.parameters(), 0.1)


def load_its_state(step: int, model: Any, optimizer: Any) -> None:
    if step == FROZEN.start:
        saved = optimizer.state_dict()
        optimizer.zero_grad()
        optimizer.load_state_dict(saved)


def freeze_after_backward(step: int, model: Any, optimizer: Any) -> None:
    if step == FROZEN.start - 1:
        module_of(model).layers[2].requires_grad_(False)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("during", [clip, load_its_state, freeze_after_backward])
def test_what_happens_to_a_frozen_parameter_is_as_in_torch(
    during: Callable[[int, Any, Any], None], level: str, cluster: zs.Session
) -> None:
    assert_as_torch(train(level, adamw, during), train(None, adamw, during))


def resume(level: str | None) -> Result:
    """Wraps a model of which a layer is frozen, and has optimizer state from earlier steps."""
    inner = models.build("mlp")
    optimizer: Any = adamw(inner.parameters())
    for step in range(3):
        optimizer.zero_grad()
        inner(*models.batch("mlp", step, 8)).backward()
        optimizer.step()
    optimizer.zero_grad()
    inner.layers[2].requires_grad_(False)
    model, optimizer = wrap(level, inner, optimizer)
    losses = []
    for step in range(3, 8):
        if step == 4:
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
        inner.layers[2].requires_grad_(step >= 5)
        optimizer.zero_grad()
        loss = model(*models.batch("mlp", step, 8))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    state = {name: value.clone() for name, value in module_of(model).state_dict().items()}
    return losses, state, optimizer.state_dict()


def grow(level: str | None) -> Result:
    """Opens the job anew, for a new parameter group, while a layer is frozen."""
    inner = models.build("mlp")
    head = {id(p) for p in inner.layers[4].parameters()}
    rest = [p for p in inner.parameters() if id(p) not in head]
    model, optimizer = wrap(level, inner, adamw(rest))
    losses = []
    for step in range(8):
        inner.layers[2].requires_grad_(step not in FROZEN)
        if step == FROZEN.start + 1:
            optimizer.add_param_group({"params": list(inner.layers[4].parameters()), "lr": 0.02})
        inner.zero_grad()
        loss = model(*models.batch("mlp", step, 8))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    state = {name: value.clone() for name, value in module_of(model).state_dict().items()}
    return losses, state, optimizer.state_dict()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("program", [resume, grow])
def test_a_job_that_is_opened_anew_has_the_state_of_frozen_parameters(
    program: Callable[[str | None], Result], level: str, cluster: zs.Session
) -> None:
    assert_as_torch(program(level), program(None))


def train_on_two_ranks(rank: int) -> None:
    expected = train(None, adamw)
    for level in LEVELS:
        for options in ({}, {"group_size": 2}):
            found = train(level, adamw, share=(rank, 2), **options)
            assert_as_torch((expected[0], *found[1:]), expected)


def test_ranks_and_groups_keep_the_state_of_frozen_parameters(pair: ranks.Team) -> None:
    pair.run(train_on_two_ranks)

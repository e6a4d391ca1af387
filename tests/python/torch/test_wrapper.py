# promise: no-silent-difference
"""The module that ``group_sharded_parallel`` returns, as libraries use it."""

from __future__ import annotations

import copy
import gc
import inspect
import math
import pickle
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import models
import zeroshard as zs
from training import LEVELS, SEGMENT, assert_close, assert_same
from zeroshard.torch import clip_grad_norm_, group_sharded_parallel
from zeroshard.torch._unshard import unshard


def wrap(model: nn.Module, level: str) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return group_sharded_parallel(model, optimizer, level, segment_size=SEGMENT)[:2]


def step(model: Any, optimizer: Any, index: int = 0) -> None:
    optimizer.zero_grad()
    model(*models.batch("mlp", index, 8)).backward()
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_the_signature_of_forward_is_that_of_the_model(level: str, cluster: zs.Session) -> None:
    raw = models.build("mlp")
    model, _ = wrap(raw, level)
    assert inspect.signature(model.forward) == inspect.signature(raw.forward)
    inputs, targets = models.batch("mlp", 0, 8)
    assert torch.equal(model(targets=targets, inputs=inputs), model.forward(inputs, targets))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "deepcopy of the module"])
def test_a_copy_is_a_plain_whole_module(how: str, level: str, cluster: zs.Session) -> None:
    model, optimizer = wrap(models.build("mlp"), level)
    step(model, optimizer)
    copied: Any
    if how == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        copied = copy.deepcopy(model if how == "deepcopy" else model.module)
    assert type(copied) is models.Classifier
    assert {type(parameter) for parameter in copied.parameters()} == {nn.Parameter}
    assert_same(copied.state_dict(), model.state_dict())
    before = {name: value.clone() for name, value in copied.state_dict().items()}
    step(model, optimizer)
    assert_same(copied.state_dict(), before)
    # It trains on its own.
    step(copied, torch.optim.AdamW(copied.parameters(), lr=0.01))
    copied.double()


@pytest.mark.parametrize("level", LEVELS)
def test_the_average_of_a_sharded_model_is_that_of_the_plain_model(
    level: str, cluster: zs.Session
) -> None:
    def train(model: Any, optimizer: Any) -> dict[str, Any]:
        average = AveragedModel(model)
        for index in range(3):
            step(model, optimizer, index)
            average.update_parameters(model)
        return dict(average.module.state_dict())

    plain = models.build("mlp")
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    assert_close(train(*wrap(models.build("mlp"), level)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_a_move_to_where_it_is_is_allowed(level: str, cluster: zs.Session) -> None:
    model, optimizer = wrap(models.build("mlp"), level)
    assert model.to("cpu") is model and model.float() is model and model.cpu() is model
    step(model, optimizer)
    # Parts of it may still show the gradients of the step.
    assert model.module.cpu() is model.module and model.module.layers.float() is not None
    step(model, optimizer)
    if level == "p_g_os":
        with pytest.raises(zs.InvalidArgumentError, match="cannot be moved or cast"):
            model.to(torch.bfloat16)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_is_sharded_once(level: str, cluster: zs.Session) -> None:
    raw = models.build("mlp")
    model, optimizer = wrap(raw, level)
    with pytest.raises(zs.InvalidArgumentError, match="is sharded already; use the model"):
        wrap(raw, level)
    step(model, optimizer)
    del model, optimizer
    gc.collect()
    if level != "p_g_os":
        step(*wrap(raw, level))  # as a notebook does after deleting the first one


@pytest.mark.parametrize("level", LEVELS)
def test_an_unsharded_model_is_plain_and_can_be_sharded_again(
    level: str, cluster: zs.Session
) -> None:
    raw = models.build("mlp")
    model, optimizer = wrap(raw, level)
    step(model, optimizer)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    assert unshard(model) is raw
    assert {type(parameter) for parameter in raw.parameters()} == {nn.Parameter}
    for module in raw.modules():
        assert not (module._forward_hooks or module._forward_pre_hooks or module._state_dict_hooks)
    assert_same(raw.state_dict(), expected)
    raw(*models.batch("mlp", 1, 8)).backward()
    assert {type(parameter.grad) for parameter in raw.parameters()} == {torch.Tensor}
    model, optimizer = wrap(raw, level)
    step(model, optimizer)
    assert not torch.equal(model.layers[0].weight, expected["layers.0.weight"])


@pytest.mark.parametrize("level", LEVELS)
def test_our_clip_has_the_options_of_torchs(level: str, cluster: zs.Session) -> None:
    model, optimizer = wrap(models.build("mlp"), level)
    (model(*models.batch("mlp", 0, 8)) * math.inf).backward()
    with pytest.raises(RuntimeError, match="so they cannot be clipped"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True, foreach=True)
    with pytest.raises(TypeError):
        clip_grad_norm_(model, 1.0, unknown=True)  # type: ignore[call-arg]
    with pytest.raises(zs.InvalidArgumentError, match="norm_type is 1.0"):
        clip_grad_norm_(model, 1.0, 1.0)


def flattened(model: nn.Module) -> Tensor:
    """Makes all parameters views of one flat tensor."""
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat


@pytest.mark.parametrize("level", LEVELS)
def test_a_flat_tensor_of_all_parameters_has_their_values_or_is_refused(
    level: str, cluster: zs.Session
) -> None:
    def train(level: str | None) -> Tensor:
        model = models.build("mlp")
        flat = flattened(model)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped: Any = model
        if level is not None:
            wrapped, optimizer, _ = group_sharded_parallel(
                model, optimizer, level, segment_size=SEGMENT
            )
        step(wrapped, optimizer)
        return flat

    if level != "p_g_os":
        torch.testing.assert_close(train(level), train(None))
        return
    with pytest.raises(zs.InvalidArgumentError, match="part of a larger tensor"):
        train(level)
    # Nobody can read the flat tensor any more.
    model = models.build("mlp")
    flattened(model)
    step(*wrap(model, level))


def test_parameters_that_are_chunks_of_a_tensor_of_a_checkpoint_are_trained(
    cluster: zs.Session,
) -> None:
    def train(level: str | None) -> dict[str, Tensor]:
        torch.manual_seed(3)
        attention = nn.ModuleDict({name: nn.Linear(32, 32, bias=False) for name in "qkv"})
        model: Any = nn.Sequential(nn.Linear(20, 128), nn.Linear(128, 32), *attention.values())
        checkpoint = {"qkv": torch.randn(96, 32)}
        values = {f"{2 + i}.weight": part for i, part in enumerate(checkpoint["qkv"].chunk(3))}
        model.load_state_dict(values, strict=False, assign=True)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped: Any = model
        if level is not None:
            warns = level == "p_g_os"
            with pytest.warns(UserWarning, match="3 parameters") if warns else nullcontext():
                wrapped, optimizer, _ = group_sharded_parallel(
                    model, optimizer, level, segment_size=SEGMENT
                )
        for _ in range(2):
            optimizer.zero_grad()
            wrapped(torch.ones(4, 20)).square().mean().backward()
            optimizer.step()
        assert checkpoint  # as in a script, it lives as long as the model
        return {name: value.clone() for name, value in wrapped.state_dict().items()}

    expected = train(None)
    for level in LEVELS:
        assert_close(train(level), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_a_hook_of_its_optimizer_refers_to_is_freed(
    level: str, cluster: zs.Session
) -> None:
    class Script:
        model: Any
        steps = 0

    def run() -> weakref.ref[nn.Module]:
        script = Script()
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())

        def count(*_: Any) -> None:
            assert script.model is not None
            script.steps += 1

        optimizer.register_step_post_hook(count)
        script.model, sharded, _ = group_sharded_parallel(
            model, optimizer, level, segment_size=SEGMENT
        )
        script.model(torch.ones(2, 4)).sum().backward()
        sharded.step()
        assert script.steps == 1
        return weakref.ref(model)

    found = run()
    gc.collect()
    assert found() is None

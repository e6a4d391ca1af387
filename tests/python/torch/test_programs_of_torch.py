"""Models that torch runs in its own way: the transformations of torch.func, scripted and traced
children, and programs that are recorded."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import zeroshard as zs
from training import LEVELS, assert_close, assert_same
from zeroshard.torch import DataParallel, group_sharded_parallel

INPUTS, TANGENTS = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1))


def build(
    level: str | None,
    child: Callable[[nn.Module], Any] = lambda child: child,
    whole: Callable[[nn.Module], Any] = lambda model: model,
) -> Any:
    """A model and its optimizer. ``child`` replaces its last layer, and ``whole`` the model."""
    torch.manual_seed(3)
    model: Any = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 6))
    model[2] = child(model[2])
    model = whole(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if level is None:
        return model, optimizer
    return group_sharded_parallel(model, optimizer, level, segment_size=32)[:2]


def loss(model: Any) -> Callable[..., Tensor]:
    """The loss as a function of parameters and inputs."""
    return lambda parameters, x: functional_call(model, parameters, (x,)).square().mean()


def detached(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def dual(model: Any) -> Any:
    with forward.dual_level():
        return forward.unpack_dual(model(forward.make_dual(INPUTS, TANGENTS)))[1]


#: Functions of the model which change nothing.
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "jvp": lambda model: jvp(model, (INPUTS,), (TANGENTS,))[1],
    "vjp": lambda model: vjp(model, INPUTS)[1](TANGENTS)[0],
    "vmap": lambda model: vmap(model)(INPUTS),
    "jacrev": lambda model: jacrev(model)(INPUTS[0]),
    "jacfwd": lambda model: jacfwd(model)(INPUTS[0]),
    "hessian": lambda model: hessian(lambda x: model(x).sum())(INPUTS[0]),
    "dual numbers": dual,
    "grad of parameters": lambda model: grad(loss(model))(dict(model.named_parameters()), INPUTS),
    "grad of detached ones": lambda model: grad(loss(model))(detached(model), INPUTS),
    "grad of a state dict": lambda model: grad(loss(model))(dict(model.state_dict()), INPUTS),
    "grad of each example": lambda model: vmap(grad(loss(model)), in_dims=(None, 0))(
        detached(model), INPUTS
    ),
    "grad of the module": lambda model: grad(loss(getattr(model, "module", model)))(
        dict(model.named_parameters()), INPUTS
    ),
}


def step(model: Any, optimizer: Any, total: Tensor) -> Tensor:
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    return total.detach()


def transformed(level: str | None, summoned: bool = False) -> dict[str, Tensor]:
    """The results of each transformation, between steps of a training."""
    model, optimizer = build(level)
    found: dict[str, Tensor] = {}
    for name, function in TRANSFORMS.items():
        if summoned:
            with model.summon_full_params():
                result = function(model)
        else:
            result = function(model)
        parts = result if isinstance(result, dict) else {"result": result}
        found |= {f"{name}: {part}": value.detach() for part, value in parts.items()}
        found[f"loss after {name}"] = step(model, optimizer, model(INPUTS).square().mean())
    # Losses with a tangent in them, alone and together with other passes.
    for number in range(4):
        outputs, tangents = jvp(model, (INPUTS,), (TANGENTS + number,))
        total = tangents.square().mean() + outputs.square().mean()
        if number > 1:
            total = total + model(INPUTS + number).square().mean()
        if number > 2:
            total = total + jvp(model, (INPUTS,), (TANGENTS,))[1].square().mean()
            with torch.no_grad():
                model(INPUTS)
        found[f"loss {number} with a tangent"] = step(model, optimizer, total)
    return found | {name: value.clone() for name, value in model.state_dict().items()}


def test_transformations_of_sharded_models_have_torchs_results(cluster: zs.Session) -> None:
    plain = transformed(None)
    first, *others = (transformed(level) for level in LEVELS)
    assert_close(first, plain, rtol=1e-4)
    for other in (*others, transformed("p_g_os", summoned=True)):
        assert_same(other, first)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_scripted_and_traced_modules_are_trained(cluster: zs.Session) -> None:
    def train(level: str | None, how: dict[str, Any]) -> dict[str, Tensor]:
        model, optimizer = build(level, **how)
        assert model  # it has a length, as far as Python knows
        losses = {
            f"loss {number}": step(model, optimizer, model(INPUTS + number).square().mean())
            for number in range(3)
        }
        return losses | {name: value.clone() for name, value in model.state_dict().items()}

    def within(child: nn.Module) -> Any:
        return torch.jit.script(nn.Sequential(child, nn.Linear(6, 6)))

    def trace(module: nn.Module) -> Any:
        return torch.jit.trace(module, torch.ones(2, 20))

    children = [{"child": how} for how in (torch.jit.script, within, trace)]
    models = [{"whole": torch.jit.script}, {"whole": lambda m: torch.jit.trace(m, INPUTS)}]
    for how in [*children, *models]:
        plain = train(None, how)
        first, *others = (train(level, how) for level in LEVELS)
        assert_close(first, plain, rtol=1e-5, atol=1e-6)
        for other in others:
            assert_same(other, first)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("level", LEVELS)
def test_a_sharded_model_is_recorded_or_the_error_names_a_copy(
    level: str, cluster: zs.Session
) -> None:
    model, optimizer = build(level)
    step(model, optimizer, model(INPUTS).square().mean())
    with pytest.raises(zs.InvalidArgumentError, match=r"zero_grad\(\) before torch.export"):
        torch.export.export(model, (INPUTS,))
    optimizer.zero_grad()
    expected = model(INPUTS)

    def check(record: Callable[[Any], Any], recorded: Any, works: bool) -> None:
        if works:
            torch.testing.assert_close(record(recorded)(INPUTS), expected)
        else:
            with pytest.raises(Exception, match=r"pass a plain copy .*copy.deepcopy\(model\)"):
                record(recorded)

    whole = level != "p_g_os"
    exports = [
        lambda model: torch.export.export(model, (INPUTS,)).module(),
        lambda model: torch.export.export(model, (INPUTS,), strict=True).module(),
    ]
    for record in (*exports, lambda model: torch.jit.trace(model, INPUTS)):
        check(record, copy.deepcopy(model), True)
        check(record, model, whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(lambda model: torch.jit.trace(model, INPUTS), model.module, whole)
        check(
            lambda model: torch.jit.trace(model, INPUTS), DataParallel(copy.deepcopy(model)), True
        )
        if whole:  # as libraries do that count operations
            traced, _ = torch.jit._get_trace_graph(model, (INPUTS,))  # type: ignore[attr-defined]
            assert "aten::" in str(traced)
    check(exports[0], model.module, whole)
    check(torch.jit.script, model, False)
    step(model, optimizer, model(INPUTS).square().mean())

"""Optimizers that the servers do not have, and trainings with them.

Each class has state of another kind: lists of tensors that are None at first, state for a whole
parameter group, bytes, random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

import models
from training import SEGMENT

STAGES = (1, 2, 3)


class Rotated(torch.optim.Optimizer):
    """Adam in the eigenbasis of averaged products of gradients, as SOAP has it. The basis is
    computed anew in every third step; the first step only initialises it."""

    def __init__(self, params: Any, lr: float = 3e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group["lr"])

    def _update(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], lr: float) -> None:
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
            state["products"] = [torch.zeros(size, size) for size in grad.shape]
            state["basis"] = [None] * grad.ndim if grad.ndim == 2 else []
        if grad.ndim == 2:
            for product, of in zip(state["products"], (grad @ grad.T, grad.T @ grad)):
                product.lerp_(of, 0.1)
            if state["step"] % 3 == 0:
                state["basis"] = [torch.linalg.eigh(each)[1] for each in state["products"]]
        state["step"] += 1
        if state["step"] == 1:
            return
        left, right = state["basis"] or (None, None)
        turned = grad if left is None else left.T @ grad @ right
        state["exp_avg"].lerp_(turned, 0.1)
        state["exp_avg_sq"].lerp_(turned.square(), 0.05)
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
        parameter.sub_(lr * (update if left is None else left @ update @ right.T))


class Preconditioned(torch.optim.Optimizer):
    """Multiplies the gradient along each dimension by an inverse root of a sum of products, as
    Shampoo does."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad, state = parameter.grad, self.state[parameter]
                if "sums" not in state:
                    state["sums"] = tuple(1e-3 * torch.eye(size) for size in grad.shape)
                update = grad.clone()
                for dim, total in enumerate(state["sums"]):
                    flat = grad.movedim(dim, 0).flatten(1) if grad.ndim > 1 else grad[:, None]
                    total.add_(flat @ flat.T)
                    values, vectors = torch.linalg.eigh(total)
                    root = vectors * values.clamp_min(1e-6).pow(-0.5 / grad.ndim) @ vectors.T
                    update = torch.tensordot(root, update.movedim(dim, 0), 1).movedim(0, dim)
                parameter.sub_(group["lr"] * update)


class Paced(torch.optim.Optimizer):
    """Adapts one step size for a whole group, as Prodigy does: its state is in the group."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "size": 1e-3, "path": 0.0, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            path = group["path"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["start"] = parameter.detach().clone()
                path += float((parameter.grad * (state["start"] - parameter)).sum())
                parameter.sub_(group["lr"] * group["size"] * parameter.grad.sign())
            group["path"], group["count"] = path, group["count"] + 1
            group["size"] = max(group["size"], min(2 * group["size"], 1e-2 * abs(path)))


class Bytes(torch.optim.Optimizer):
    """Momentum in 8 bits: a code for each element and one scale, as bitsandbytes' blocks have."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["codes"] = torch.full_like(parameter.grad, 128, dtype=torch.uint8)
                    state["scale"] = torch.zeros(1)
                momentum = (state["codes"].float() - 128) * state["scale"]
                momentum.lerp_(parameter.grad, 0.1)
                state["scale"] = momentum.abs().max().reshape(1) / 127
                codes = momentum / state["scale"].clamp_min(1e-30)
                state["codes"] = (codes.round() + 128).to(torch.uint8)
                parameter.sub_(group["lr"] * momentum)


class Noisy(torch.optim.Optimizer):
    """Adds noise to each step."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                noise = 1e-2 * torch.randn(parameter.shape)
                parameter.sub_(group["lr"] * (parameter.grad + noise))


def matrices(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def others(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.ndim != 2]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    muon = torch.optim.Muon(matrices(model), lr=0.02)
    return [muon, torch.optim.AdamW(others(model), lr=3e-3)]


#: Those whose parameters are stepped one by one, by several ranks at a time. (Muon is known to be
#: so.)
SEPARABLE = ("soap-like", "bytes")

#: The optimizers of a model, by what is special about them.
OPTIMIZERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "muon and adamw": muon_and_adamw,
    "soap-like": lambda model: [Rotated(model.parameters())],
    "shampoo-like": lambda model: [Preconditioned(model.parameters())],
    "state of a group": lambda model: [Paced(model.parameters())],
    "bytes": lambda model: [Bytes(model.parameters())],
}


def gradients_of_all(model: nn.Module, data: tuple[Tensor, Tensor], world: int) -> float:
    """Computes the mean gradient over the ranks as the servers add it. Returns the mean loss."""
    total = 0.0
    sums: list[Tensor] = []
    for rank in range(world):
        model.zero_grad()
        loss = model(*models.share(data, rank, world))
        loss.backward()
        own = [parameter.grad.clone() for parameter in model.parameters()]
        sums = [a + b for a, b in zip(sums, own, strict=True)] if sums else own
        total += loss.item()
    for parameter, summed in zip(model.parameters(), sums, strict=True):
        parameter.grad = summed / world
    return total / world


def train_plain(
    name: str, steps: int, world: int = 1, ulps: int = 0
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Trains in torch. Returns the final state of the model and of its optimizers. ``ulps``: so
    many units in the last place are added to each weight before."""
    model = models.build("mlp")
    with torch.no_grad():
        for parameter in model.parameters():
            for _ in range(abs(ulps)):
                towards = torch.full_like(parameter, ulps * torch.inf)
                parameter.copy_(torch.nextafter(parameter, towards))
    optimizers = OPTIMIZERS[name](model)
    for step in range(steps):
        gradients_of_all(model, models.batch("mlp", step, 8), world)
        for optimizer in optimizers:
            optimizer.step()
    # In torch's format, whatever that of the class is.
    of_optimizers = [torch.optim.Optimizer.state_dict(optimizer) for optimizer in optimizers]
    return model.state_dict(), of_optimizers


def sharded(name: str, stage: int, **options: Any) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A model and its optimizers, sharded in place."""
    from zeroshard.torch import shard

    model = models.build("mlp")
    optimizers = OPTIMIZERS[name](model)
    options.setdefault("separable", name in SEPARABLE or None)
    shard(model, optimizers, stage, segment_size=SEGMENT, **options)
    return model, optimizers


def make_step(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], data: tuple[Tensor, Tensor]
) -> float:
    """Makes a step. Returns the loss of this rank."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = model(*data)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def train_sharded(
    name: str, stage: int, steps: Collection[int], rank: int = 0, world: int = 1
) -> dict[int, tuple[dict[str, Tensor], list[dict[str, Any]]]]:
    """Trains with ZeroShard. Returns what :func:`train_plain` returns, after some numbers of
    steps."""
    model, optimizers = sharded(name, stage)
    found = {}
    for step in range(max(steps)):
        make_step(model, optimizers, models.share(models.batch("mlp", step, 8), rank, world))
        if step + 1 in steps:
            found[step + 1] = final(model, optimizers)
    return found


def final(
    model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The state of a model and of its optimizers."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state, [optimizer.state_dict() for optimizer in optimizers]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between two states of a model."""
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def assert_equal_state(one: Any, other: Any, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Asserts that two states of an optimizer have the same structure, kinds and values."""
    if isinstance(other, Tensor):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
        return
    assert type(one) is type(other), (one, other)
    if isinstance(other, dict):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert_equal_state(one[key], value, rtol, atol)
    elif isinstance(other, list | tuple):
        assert len(one) == len(other)
        for own, value in zip(one, other):
            assert_equal_state(own, value, rtol, atol)
    else:
        assert one == other


@contextlib.contextmanager
def raising(cls: type[torch.optim.Optimizer], at: int) -> Any:
    """A context in which the call of ``step`` number ``at`` of a class raises an error at its end,
    when it has changed parameters and state."""
    real, calls = cls.step, 0

    def step(self: Any, closure: Any = None) -> Any:
        nonlocal calls
        calls += 1
        result = real(self, closure)
        if calls == at:
            raise RuntimeError("in the optimizer")
        return result

    cls.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        cls.step = real  # type: ignore[method-assign]

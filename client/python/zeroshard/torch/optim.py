"""The optimizers of the servers that torch does not have, as torch optimizers in a single process,
and the table of all supported ones.

Operations are rounded in the same order as on the servers. On a CPU, Lion gives the servers' bits;
LAMB is within rounding of them, because torch's square roots are not always correctly rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim.optimizer import ParamsT

__all__ = ["LAMB", "Lion"]


class _Local(torch.optim.Optimizer):
    """Validation of hyperparameters and iteration over parameters."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if name in defaults and not 0 <= float(defaults[name]) < math.inf:
                raise ValueError(
                    f"{name} is {defaults[name]}; it must be a finite number of at least 0"
                )
        for index, beta in enumerate(defaults["betas"]):
            if not 0 <= float(beta) < 1:
                raise ValueError(f"betas[{index}] is {beta}; it must be at least 0 and less than 1")
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Args:
            closure: computes the loss again and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        if gradient.is_sparse or gradient.is_complex():
            raise RuntimeError(
                f"{type(self).__name__} supports neither sparse nor complex gradients"
            )
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in self._averages:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["step"] += 1
        self._apply(parameter, -gradient if group["maximize"] else gradient, state, group)

    _averages: tuple[str, ...]

    def _apply(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        raise NotImplementedError


class Lion(_Local):
    """Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        betas: weight of the momentum in the update's sign, and decay of the momentum.
        weight_decay: decoupled weight decay: parameters shrink by ``lr * weight_decay`` of
            themselves.
        maximize: maximize instead of minimize.

    Raises:
        ValueError: a hyperparameter is out of range.
    """

    _averages = ("exp_avg",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        )

    def _apply(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        beta1, beta2 = map(float, group["betas"])
        lr, exp_avg = float(group["lr"]), state["exp_avg"]
        change = (exp_avg * beta1).add_(gradient * (1 - beta1)).sign_().mul_(lr)
        parameter.mul_(1 - lr * float(group["weight_decay"])).sub_(change)
        exp_avg.mul_(beta2).add_(gradient * (1 - beta2))


class LAMB(_Local):
    """LAMB: You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2; phi is
    the identity.

    The trust ratio is ``||w|| / ||update||`` of the tensor, or 1 if either norm is 0. Norms are
    computed in float64.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        betas: decay of the first and of the second moment.
        eps: added to the denominator.
        weight_decay: weight decay, part of the update whose norm is used in the trust ratio.
        maximize: maximize instead of minimize.

    Raises:
        ValueError: a hyperparameter is out of range.
    """

    _averages = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _apply(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        beta1, beta2 = map(float, group["betas"])
        step, exp_avg, exp_avg_sq = int(state["step"]), state["exp_avg"], state["exp_avg_sq"]
        # As torch.lerp, whose second formula is exact at weight 1.
        weight = 1 - beta1
        if weight < 0.5:
            exp_avg.add_((gradient - exp_avg).mul_(weight))
        else:
            exp_avg.copy_(gradient + (gradient - exp_avg).mul_(weight - 1))
        exp_avg_sq.mul_(beta2).add_((gradient * (1 - beta2)).mul_(gradient))

        denominator = (
            exp_avg_sq.sqrt().mul_(1 / math.sqrt(1 - beta2**step)).add_(float(group["eps"]))
        )
        update = (exp_avg * (1 / (1 - beta1**step))).div_(denominator)
        update.add_(parameter * float(group["weight_decay"]))

        norm, update_norm = _norm(parameter), _norm(update)
        trust = norm / update_norm if norm > 0 and update_norm > 0 else 1.0
        parameter.add_(update.mul_(-float(group["lr"]) * trust))


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


#: The supported optimizers, and the servers' name of each. Subclasses precede their base classes.
NAMES: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.SGD: "sgd",
    torch.optim.ASGD: "asgd",
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.Adamax: "adamax",
    torch.optim.NAdam: "nadam",
    torch.optim.RAdam: "radam",
    torch.optim.Adagrad: "adagrad",
    torch.optim.Adadelta: "adadelta",
    torch.optim.Adafactor: "adafactor",
    torch.optim.RMSprop: "rmsprop",
    Lion: "lion",
    LAMB: "lamb",
}

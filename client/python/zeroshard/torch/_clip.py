"""Clipping by the global norm of the mean gradient, which the servers compute."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._core.sharded_models import clip
from ..errors import InvalidArgumentError


@dataclass(frozen=True)
class ClipGradByGlobalNorm:
    """Clips every step. Parameters with ``need_clip = False`` are excluded from the norm and not
    clipped.

    Set it as ``optimizer.grad_clip`` before wrapping, or pass it to ``group_sharded_parallel`` as
    ``grad_clip``.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        if not self.clip_norm > 0:
            raise InvalidArgumentError(f"clip_norm is {self.clip_norm}; it must be greater than 0")


def max_norm_of(optimizer: torch.optim.Optimizer, grad_clip: Any | None) -> float | None:
    """The norm that every step is clipped to. None if steps are not clipped."""
    given = grad_clip if grad_clip is not None else getattr(optimizer, "grad_clip", None)
    if given is None:
        return None
    if not isinstance(given, ClipGradByGlobalNorm):
        raise InvalidArgumentError(f"grad_clip is {given!r}; it must be a ClipGradByGlobalNorm")
    return given.clip_norm


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, also for sharded parameters.

    Args:
        parameters: a model, or all parameters that its optimizer trains. If the optimizer does not
            have all of them, torch's function is called, which reads gradients of the others.
        max_norm: the norm to which the next step is clipped.
        norm_type: 2.0 for sharded parameters.
        error_if_nonfinite: raise a RuntimeError if the norm is inf or NaN.
        foreach: has no effect on sharded parameters, whose norm the servers compute.

    Returns:
        The global norm of the mean gradient over all ranks.
    """
    if isinstance(parameters, nn.Module):
        parameters = list(parameters.parameters())
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    given = list(parameters)
    norm = clip(given, max_norm, norm_type)
    if norm is None:
        return torch.nn.utils.clip_grad_norm_(
            given, max_norm, norm_type, error_if_nonfinite, foreach
        )
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"the global norm of the gradients is {norm}, so they cannot be clipped; pass "
            "error_if_nonfinite=False to let the servers skip such a step"
        )
    return torch.tensor(norm)

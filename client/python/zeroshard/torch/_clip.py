"""Clipping by the global norm of the mean gradient, which only the servers know."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._core.sharding import sharding_of
from ..errors import InvalidArgumentError


@dataclass(frozen=True)
class ClipGradByGlobalNorm:
    """Clip at every step. Parameters with ``need_clip = False`` neither count nor are clipped.

    Given as ``optimizer.grad_clip`` before wrapping, or as ``grad_clip=`` to
    ``group_sharded_parallel``.
    """

    clip_norm: float

    def __post_init__(self) -> None:
        if not self.clip_norm > 0:
            raise InvalidArgumentError(f"clip_norm is {self.clip_norm}; it must be more than 0")


def max_norm_of(optimizer: torch.optim.Optimizer, grad_clip: Any | None) -> float | None:
    """What every step clips to."""
    clip = grad_clip if grad_clip is not None else getattr(optimizer, "grad_clip", None)
    if clip is None:
        return None
    if not isinstance(clip, ClipGradByGlobalNorm):
        raise InvalidArgumentError(f"grad_clip is {clip!r}; it must be a ClipGradByGlobalNorm")
    return clip.clip_norm


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    **options: Any,
) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, also for sharded parameters: a model, or all that its
    optimizer trains.

    Returns the global norm of the mean gradient over all ranks; the next step clips. For other
    parameters it is torch's function.
    """
    if isinstance(parameters, nn.Module):
        parameters = [parameter for parameter in parameters.parameters() if parameter.requires_grad]
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    given = list(parameters)
    sharding = sharding_of(given)
    if sharding is None:
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, **options)
    if norm_type != 2.0:
        raise InvalidArgumentError(
            f"norm_type is {norm_type}; it must be 2.0 for sharded parameters"
        )
    return torch.tensor(sharding.clip(float(max_norm)))

"""Clipping by the global norm of the mean gradient, which only the servers know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import paddle

from .._core.sharding import sharding_of
from ..errors import InvalidArgumentError
from . import kinds


def max_norm_of(optimizer: Any) -> float | None:
    """What every step clips to: the ``clip_norm`` of the optimizer's ``ClipGradByGlobalNorm``.

    Raises:
        InvalidArgumentError: it clips in another way, or some of its groups clip differently.
    """
    clips = [
        group.get("grad_clip", optimizer._grad_clip) for group in kinds.param_groups(optimizer)
    ]
    if any(clip is not clips[0] for clip in clips):
        raise InvalidArgumentError(
            "grad_clip differs between parameter groups; it must be one: the norm is over all of them"
        )
    clip = clips[0] if clips else None
    if clip is None:
        return None
    if type(clip) is not paddle.nn.ClipGradByGlobalNorm:
        raise InvalidArgumentError(
            f"grad_clip is a {type(clip).__name__}; it must be a paddle.nn.ClipGradByGlobalNorm"
        )
    return float(clip.clip_norm)


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, **options: Any
) -> Any:
    """As ``paddle.nn.utils.clip_grad_norm_``, also for sharded parameters: a model, or all that its
    optimizer trains.

    Returns the global norm of the mean gradient over all ranks; the next step clips. For other
    parameters it is Paddle's function.
    """
    if isinstance(parameters, paddle.nn.Layer):
        parameters = [
            parameter for parameter in parameters.parameters() if not parameter.stop_gradient
        ]
    given = (
        list(parameters)
        if isinstance(parameters, Iterable) and not isinstance(parameters, paddle.Tensor)
        else [parameters]
    )
    sharding = sharding_of(given)
    if sharding is None:
        return paddle.nn.utils.clip_grad_norm_(given, max_norm, norm_type, **options)
    if norm_type != 2.0:
        raise InvalidArgumentError(
            f"norm_type is {norm_type}; it must be 2.0 for sharded parameters"
        )
    return paddle.to_tensor(sharding.clip(float(max_norm)), dtype="float32")

"""Clipping by norms of the mean gradient, which the servers compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import paddle

from .._core.sharding import sharding_of
from ..errors import InvalidArgumentError
from . import _conversion


def clip_of(optimizer: Any) -> Any | None:
    """The optimizer's ``ClipGradByGlobalNorm`` or ``ClipGradByNorm``. None if steps are not
    clipped.

    Raises:
        InvalidArgumentError: the optimizer uses another clipping method, or its groups clip
            differently.
    """
    clips = [
        group.get("grad_clip", optimizer._grad_clip)
        for group in _conversion.param_groups(optimizer)
    ]
    if any(clip is not clips[0] for clip in clips):
        raise InvalidArgumentError(
            "grad_clip differs between the parameter groups; it must be the same object in all of "
            "them"
        )
    clip = clips[0] if clips else None
    if clip is not None and type(clip) not in (
        paddle.nn.ClipGradByGlobalNorm,
        paddle.nn.ClipGradByNorm,
    ):
        raise InvalidArgumentError(
            f"grad_clip is a {type(clip).__name__}; it must be a paddle.nn.ClipGradByGlobalNorm or "
            "a paddle.nn.ClipGradByNorm, since the servers clip by norms only"
        )
    return clip


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, **options: Any
) -> Any:
    """As ``paddle.nn.utils.clip_grad_norm_``, also for sharded parameters.

    Args:
        parameters: a model, or all parameters that its optimizer trains. For parameters that are
            not sharded, Paddle's function is called.
        max_norm: the norm to which the next step is clipped.
        norm_type: 2.0 for sharded parameters.
        options: arguments for Paddle's function.

    Returns:
        The global norm of the mean gradient over all ranks.
    """
    if isinstance(parameters, paddle.nn.Layer):
        parameters = list(parameters.parameters())
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

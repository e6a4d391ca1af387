"""Clipping by norms of the mean gradient, which the servers compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import paddle

from .._core.sharded_models import clip
from ..errors import InvalidArgumentError
from . import _conversion
from ._private import clip_of


def clipping(optimizer: Any) -> tuple[float | None, list[tuple[list[Any], float]]]:
    """How the optimizer clips gradients: the global norm of all parameters, and sets of parameters
    that are each clipped to a norm of their own. One of the two is empty.

    As in Paddle, ``ClipGradByGlobalNorm`` computes one norm for each parameter group.

    Raises:
        InvalidArgumentError: the optimizer uses another clipping method.
    """
    groups = _conversion.param_groups(optimizer)
    sets: list[tuple[list[Any], float]] = []
    for group in groups:
        own = group.get("grad_clip", clip_of(optimizer))
        if own is None:
            continue
        norm, parameters = float(_checked(own).clip_norm), list(group["params"])
        if isinstance(own, paddle.nn.ClipGradByNorm):
            sets += [([parameter], norm) for parameter in parameters]
        elif len(groups) == 1:
            return norm, []
        else:
            sets.append((parameters, norm))
    return None, sets


def _checked(clip: Any) -> Any:
    if type(clip) not in (paddle.nn.ClipGradByGlobalNorm, paddle.nn.ClipGradByNorm):
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
        parameters: a model, or all parameters that its optimizer trains. If the optimizer does not
            have all of them, Paddle's function is called, which reads gradients of the others.
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
    norm = clip(given, max_norm, norm_type)
    if norm is None:
        return paddle.nn.utils.clip_grad_norm_(given, max_norm, norm_type, **options)
    return paddle.to_tensor(norm, dtype="float32")

"""``group_sharded_parallel``: a model, its optimizer and its scaler, sharded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import paddle

from .._core.options import Options
from .._core.sharding import Sharding
from .._session import current
from ..errors import InvalidArgumentError
from . import kinds
from ._clip import max_norm_of
from ._framework import PADDLE, PaddleOptimizer, group_place
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer, own_state, states_of
from ._scaler import GradScaler


def group_sharded_parallel(
    model: Any,
    optimizer: Any,
    level: str,
    scaler: Any | None = None,
    group: Any | None = None,
    offload: bool = False,
    sync_buffers: bool = False,
    buffer_max_size: int = 2**23,
    segment_size: int = 2**20,
    sync_comm: bool = False,
    dp_group: Any | None = None,
    exclude_layer: Collection[str | int] | None = None,
    *,
    accumulation_steps: int | None = None,
) -> tuple[GroupSharded, ShardedOptimizer, GradScaler | None]:
    """Moves the training state of a model to the shard servers.

    Args:
        model: any layer; parameters and buffers become rank 0's on every rank.
        optimizer: SGD, Momentum, Adam, AdamW, Adagrad, Adadelta or Lamb of ``paddle.optimizer``,
            with its scheduler, groups and ``ClipGradByGlobalNorm``. State that it has goes along.
        level: what the servers hold for the workers: ``"os"`` the optimizer state; ``"os_g"``
            gradients too, which are sent as backward makes them; ``"p_g_os"`` parameters too, which
            are fetched for each use.
        scaler: comes back as one that knows the sharded optimizer.
        group: the group whose ranks train together; None: all.
        offload: the servers hold state and master weights in host memory. Changes no result.
        sync_buffers: after every step the model's buffers are rank 0's on every rank.
        buffer_max_size: elements that travel together as one bucket of gradients; 0: each gradient
            on its own.
        segment_size: at ``p_g_os``, parameters with more elements than this live on the servers.
        sync_comm: at ``p_g_os``, fetch parameters only when they are needed, not ahead.
        dp_group: ranks outside ``group`` that train replicas; as all ranks push to the same
            servers, it must be None.
        exclude_layer: at ``p_g_os``, class names or ids (``id(layer)``) of layers whose parameters
            stay here.
        accumulation_steps: backward passes of a step, where there are several; None: learned from
            the first steps.

    Returns:
        The wrapped model, the optimizer that steps on the servers, and the scaler (None if none was
            given).
    """
    _check(model, optimizer)
    options = Options(
        level=level,
        sync_buffers=sync_buffers,
        buffer_max_size=buffer_max_size,
        segment_size=segment_size,
        sync_comm=sync_comm,
        dp_group=dp_group,
        exclude_layer=exclude_layer,
        accumulation_steps=accumulation_steps,
    )
    if scaler is not None and not isinstance(scaler, paddle.amp.GradScaler):
        raise InvalidArgumentError(
            f"scaler is a {type(scaler).__name__}; it must be a paddle.amp.GradScaler"
        )
    if level == "p_g_os":
        _check_not_static(model)
    sharding = Sharding(
        current(),
        PADDLE,
        model,
        PaddleOptimizer(optimizer),
        group_place(group),
        options,
        states=states_of(optimizer, own_state(optimizer)),
        max_norm=max_norm_of(optimizer),
    )
    # Loaded or stepped: it is on the servers now.
    optimizer._accumulators.clear()
    optimizer._accumulators_holder = {}
    sharded = ShardedOptimizer.sharing(optimizer, sharding)
    return (
        GroupSharded(model, sharding),
        sharded,
        None if scaler is None else GradScaler.sharing(scaler),
    )


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, paddle.nn.Layer) or isinstance(model, GroupSharded):
        raise InvalidArgumentError(
            f"model is a {type(model).__name__}; it must be a paddle.nn.Layer that is not wrapped already"
        )
    if not isinstance(optimizer, kinds.Optimizer) or isinstance(optimizer, ShardedOptimizer):
        raise InvalidArgumentError(
            f"optimizer is a {type(optimizer).__name__}; it must be a paddle.optimizer.Optimizer that is not wrapped already"
        )
    stepped = {
        id(parameter) for group in kinds.param_groups(optimizer) for parameter in group["params"]
    }
    if stepped.isdisjoint(map(id, model.parameters())):
        raise InvalidArgumentError(
            "the optimizer has no parameter of the model; it must be made with model.parameters()"
        )


def _check_not_static(model: Any) -> None:
    for name, layer in model.named_sublayers(include_self=True):
        if isinstance(layer.forward, paddle.jit.dy2static.program_translator.StaticFunction):
            raise InvalidArgumentError(
                f"layer {name!r} was given to paddle.jit.to_static; at level p_g_os it must not be: a static graph cannot "
                "follow parameters that come and go. To have it static, use level os_g"
            )

"""``group_sharded_parallel``: a model, its optimizer and its scaler, sharded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from .._core.options import Options
from .._core.sharding import Sharding
from .._session import current
from ..errors import InvalidArgumentError
from . import kinds
from ._clip import max_norm_of
from ._framework import TORCH, TorchOptimizer, group_place
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer, optimizer_states
from ._scaler import GradScaler


def group_sharded_parallel(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    level: str,
    scaler: torch.amp.GradScaler | None = None,
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
    grad_clip: Any | None = None,
) -> tuple[GroupSharded, ShardedOptimizer, GradScaler | None]:
    """Moves the training state of a model to the shard servers.

    Args:
        model: any module; parameters and buffers become rank 0's on every rank.
        optimizer: SGD, Adam, AdamW, Adagrad, Adadelta or RMSprop of ``torch.optim``, or our Lion or
            LAMB. State that it has goes along.
        level: what the servers hold for the workers: ``"os"`` the optimizer state; ``"os_g"``
            gradients too, which are sent as backward makes them; ``"p_g_os"`` parameters too, which
            are fetched for each use.
        scaler: comes back as one that knows the sharded optimizer.
        group: the process group whose ranks train together; None: all.
        offload: the servers hold state and master weights in host memory. Changes no result.
        sync_buffers: after every step the model's buffers are rank 0's on every rank.
        buffer_max_size: elements that travel together as one bucket of gradients; 0: each gradient
            on its own.
        segment_size: at ``p_g_os``, parameters with more elements than this live on the servers.
        sync_comm: at ``p_g_os``, fetch parameters only when they are needed, not ahead.
        dp_group: ranks outside ``group`` that train replicas; as all ranks push to the same
            servers, it must be None.
        exclude_layer: at ``p_g_os``, class names or ids (``id(module)``) of modules whose
            parameters stay here.
        accumulation_steps: backward passes of a step, where there are several; None: learned from
            the first steps.
        grad_clip: a :class:`ClipGradByGlobalNorm`, for every step.

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
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InvalidArgumentError(
            f"scaler is a {type(scaler).__name__}; it must be a torch.amp.GradScaler"
        )
    if level == "p_g_os":
        _check_not_compiled(model)
    sharding = Sharding(
        current(),
        TORCH,
        model,
        TorchOptimizer(optimizer),
        group_place(group),
        options,
        states=optimizer_states(kinds.kind(optimizer), optimizer, optimizer.state),
        max_norm=max_norm_of(optimizer, grad_clip),
    )
    optimizer.state.clear()
    wrapped = GroupSharded(model, sharding)
    return (
        wrapped,
        ShardedOptimizer(optimizer, sharding),
        None if scaler is None else GradScaler.sharing(scaler),
    )


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, GroupSharded):
        raise InvalidArgumentError(
            f"model is a {type(model).__name__}; it must be a torch.nn.Module that is not wrapped already"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, ShardedOptimizer):
        raise InvalidArgumentError(
            f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer that is not wrapped already"
        )
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if stepped.isdisjoint(map(id, model.parameters())):
        raise InvalidArgumentError(
            "the optimizer has no parameter of the model; it must be made with model.parameters()"
        )


def _check_not_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
            raise InvalidArgumentError(
                f"module {name!r} is compiled; at level p_g_os it must not be: torch.compile cannot follow parameters "
                "that come and go. To have it compiled, use level os_g"
            )

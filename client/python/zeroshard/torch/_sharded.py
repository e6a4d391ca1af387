"""``group_sharded_parallel``: a model, its optimizer and its scaler, sharded."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from .._session import current
from ..errors import InvalidArgument
from ._clip import max_norm_of
from ._job import optimizer_states
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer
from ._scaler import GradScaler
from ._sharding import Sharding
from ._tensors import group_place

LEVELS = ("os", "os_g", "p_g_os")


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
        optimizer: SGD, Adam, AdamW, Adagrad, Adadelta or RMSprop of ``torch.optim``, or our Lion or LAMB. State
            that it has goes along.
        level: what the servers hold for the workers: ``"os"`` the optimizer state; ``"os_g"`` gradients too, which
            are sent as backward makes them; ``"p_g_os"`` parameters too, which are fetched for each use.
        scaler: comes back as one that knows the sharded optimizer.
        group: the process group whose ranks train together; None: all.
        offload: the servers hold state and master weights in host memory. Changes no result.
        sync_buffers: after every step the model's buffers are rank 0's on every rank.
        buffer_max_size: elements that travel together as one bucket of gradients; 0: each gradient on its own.
        segment_size: at ``p_g_os``, parameters with more elements than this live on the servers.
        sync_comm: at ``p_g_os``, fetch parameters only when they are needed, not ahead.
        dp_group: ranks outside ``group`` that train replicas; as all ranks push to the same servers, it must be None.
        exclude_layer: at ``p_g_os``, class names or ids (``id(module)``) of modules whose parameters stay here.
        accumulation_steps: backward passes of a step, where there are several; None: learned from the first steps.
        grad_clip: a :class:`ClipGradByGlobalNorm`, for every step.

    Returns:
        The wrapped model, the optimizer that steps on the servers, and the scaler (None if none was given).
    """
    _check(model, optimizer, level, buffer_max_size, segment_size)
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InvalidArgument(f"scaler is a {type(scaler).__name__}; it must be a torch.amp.GradScaler")
    if dp_group is not None:
        raise InvalidArgument("dp_group is given; it must be None: give all ranks in group, the servers average them")
    if accumulation_steps is not None and accumulation_steps < 1:
        raise InvalidArgument(f"accumulation_steps is {accumulation_steps}; it must be 1 or more")
    excluded = _excluded(model, exclude_layer or ())

    def is_large(module: nn.Module, parameter: Tensor) -> bool:
        return parameter.numel() > segment_size and id(parameter) not in excluded

    largest = max((parameter.numel() for parameter in model.parameters()), default=0)
    # At p_g_os a bucket must not hold more than one layer's gradients back.
    bucket = min(buffer_max_size, largest) if level == "p_g_os" else buffer_max_size
    sharding = Sharding(
        current(),
        model,
        optimizer,
        group_place(group),
        level,
        states=lambda job: optimizer_states(job.optimizer_kind, optimizer, optimizer.state),
        is_large=is_large,
        bucket_numel=bucket,
        sync_buffers=sync_buffers,
        sync_comm=sync_comm,
        accumulation_steps=accumulation_steps,
        max_norm=max_norm_of(optimizer, grad_clip),
    )
    optimizer.state.clear()
    wrapped = GroupSharded(model, sharding)
    return wrapped, ShardedOptimizer(optimizer, sharding), None if scaler is None else GradScaler.sharing(scaler)


def _check(model: Any, optimizer: Any, level: Any, buffer_max_size: int, segment_size: int) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, GroupSharded):
        raise InvalidArgument(f"model is a {type(model).__name__}; it must be a torch.nn.Module that is not wrapped already")
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, ShardedOptimizer):
        raise InvalidArgument(
            f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer that is not wrapped already"
        )
    if level not in LEVELS:
        raise InvalidArgument(f"level is {level!r}; it must be one of {', '.join(map(repr, LEVELS))}")
    for name, size in (("buffer_max_size", buffer_max_size), ("segment_size", segment_size)):
        if not isinstance(size, int) or size < 0:
            raise InvalidArgument(f"{name} is {size!r}; it must be a number of elements, 0 or more")
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if stepped.isdisjoint(map(id, model.parameters())):
        raise InvalidArgument("the optimizer has no parameter of the model; it must be made with model.parameters()")


def _excluded(model: nn.Module, layers: Collection[str | int]) -> set[int]:
    """The parameters of the modules that stay here."""
    known = {id(module) for module in model.modules()} | {type(module).__name__ for module in model.modules()}
    for layer in layers:
        if layer not in known:
            raise InvalidArgument(
                f"exclude_layer has {layer!r}; it must be the class name or the id of a module of the model"
            )
    return {
        id(parameter)
        for module in model.modules()
        if type(module).__name__ in layers or id(module) in layers
        for parameter in module.parameters()
    }

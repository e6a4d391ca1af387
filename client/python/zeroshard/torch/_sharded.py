"""``group_sharded_parallel``: shards a model, its optimizer and its gradient scaler."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from .._checkpoints import Checkpoints
from .._core.collectives import GroupSize
from .._core.options import Options
from .._core.sharding import Sharding, is_sharded
from .._session import connection
from ..errors import InvalidArgumentError
from . import _conversion
from ._checkpoint import Checkpoint, postponed, settle
from ._clip import max_norm_of
from ._flat import check_no_views
from ._foreign import check_not_wrapped
from ._framework import TORCH, TorchOptimizer, process_group
from ._materialize import Materializer, check_has_shapes
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer
from ._scaler import GradScaler
from ._state import optimizer_states


def group_sharded_parallel(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    level: str,
    scaler: torch.amp.GradScaler | None = None,
    group: Any | None = None,
    offload: bool = False,
    sync_buffers: bool = False,
    buffer_max_size: int = 2**23,
    segment_size: int = 2**14,
    sync_comm: bool = False,
    dp_group: Any | None = None,
    exclude_layer: Collection[str | int] | None = None,
    *,
    accumulation_steps: int | None = None,
    group_size: GroupSize = 1,
    grad_clip: Any | None = None,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    checkpoints: Checkpoints | None = None,
) -> tuple[GroupSharded, ShardedOptimizer, GradScaler | None]:
    """Moves the training state of a model to the shard servers.

    Args:
        model: any module. All ranks take the parameters and buffers of rank 0. Parameters and
            buffers on the meta device are initialised module by module, so that at ``"p_g_os"`` a
            worker does not need memory for the whole model.
        optimizer: SGD, ASGD, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, Adadelta, Adafactor or
            RMSprop of ``torch.optim``, or Lion or LAMB of ``zeroshard.torch``. Existing state is
            uploaded.
        level: the tensors that the servers hold. At ``"os"`` these are the optimizer state, at
            ``"os_g"`` also gradients, which are sent during backward, and at ``"p_g_os"`` also
            parameters, which are fetched for each use.
        scaler: a gradient scaler; returned as one that supports the sharded optimizer.
        group: the process group that trains together; None: all ranks.
        offload: keep the optimizer state in the host memory of the servers, or on their disks.
            Servers without a GPU always do. A server with a GPU needs ``--host-memory`` or
            ``--disk``; it keeps the state of LAMB and Adafactor in its memory. Does not change
            results.
        sync_buffers: whether all ranks receive the buffers of rank 0 after every step, and before
            a forward if a training forward was not followed by a step.
        buffer_max_size: elements of a bucket of gradients; 0: each gradient is sent by itself.
        segment_size: at ``p_g_os``, parameters with more elements than this are on the servers, and
            are fetched together with those of the same module. Smaller ones stay on the workers,
            because fetching them costs more time than they take memory.
        sync_comm: at ``p_g_os``, disables prefetching of parameters.
        dp_group: must be None. Ranks that train replicas belong in ``group``.
        exclude_layer: at ``p_g_os``, class names or ids (``id(module)``) of modules whose
            parameters stay on the workers.
        accumulation_steps: the number of backward passes per step; None: learned in the first
            steps.
        group_size: the number of consecutive ranks that form a group, or ``"host"`` for the ranks
            that a launcher has started on this host; 1: no groups. The ranks of a group add their
            gradients in a fixed order, and each of them sends a part of the sums and receives a
            part of the parameters, so the traffic of the servers is divided by the size. In a
            model on a mesh, the ranks of a group that hold the same part of a parameter do this.
            They exchange values over gloo, in a process group of their own. With several groups,
            sums are rounded in another order than without. When a rank is lost, all ranks of its
            group must be started again. At ``p_g_os``, all ranks of a group must use the same
            modules when they train; parameters that are used without recording gradients
            (``no_grad``) are received by each rank as a whole, so one rank may evaluate alone.
        grad_clip: a :class:`ClipGradByGlobalNorm` that clips every step.
        param_init_fn: initialises the parameters and buffers of the module that it is called with,
            without those of its children. It is called for each module that has some on the meta
            device and not in the checkpoint; None: the module's ``reset_parameters()``.
        checkpoint: a file or directory in a format of :func:`~zeroshard.torch.load_weights`. It has
            the values of all parameters and persistent buffers. All ranks read the names, and rank
            0 of the group the values.
        device: where tensors on the meta device get their memory; None: the CPU.
        checkpoints: when and where the servers save the model and the optimizer, and from which
            checkpoint they start. If there is one, all values come from it. Parameters, parameter
            groups and their state cannot be replaced later. None: no checkpoints.

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
        group_size=group_size,
        offload=offload,
    )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise InvalidArgumentError(
            f"scaler is a {type(scaler).__name__}; it must be a torch.amp.GradScaler"
        )
    check_no_views(model, optimizer, options.fetched(TORCH, model))
    ranks = process_group(group)
    initial = Materializer(
        model,
        optimizer,
        device,
        param_init_fn,
        [*postponed(model), *(() if checkpoint is None else (Checkpoint(checkpoint, model),))],
        is_source=ranks.rank == 0,
    )
    try:
        sharding = Sharding(
            connection(),
            TORCH,
            model,
            TorchOptimizer(optimizer),
            ranks,
            options,
            states=optimizer_states(
                _conversion.optimizer_name(optimizer), optimizer, optimizer.state
            ),
            max_norm=max_norm_of(optimizer, grad_clip),
            initial=initial.fill,
            checkpoints=checkpoints,
        )
    except BaseException:
        initial.undo()
        raise
    settle(model)
    shared = None if scaler is None else GradScaler.sharing(scaler)
    sharded = ShardedOptimizer(optimizer, sharding)
    optimizer.state.clear()
    return GroupSharded(model, sharding, shared), sharded, shared


def _check(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module) or isinstance(model, GroupSharded):
        raise InvalidArgumentError(
            f"model is a {type(model).__name__}; it must be a torch.nn.Module that is not sharded "
            "yet"
        )
    check_not_wrapped(model, "group_sharded_parallel")
    check_has_shapes(model, "group_sharded_parallel")
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, ShardedOptimizer):
        raise InvalidArgumentError(
            f"optimizer is a {type(optimizer).__name__}; "
            "it must be a torch.optim.Optimizer that is not sharded yet"
        )
    if is_sharded(model.parameters()):
        raise InvalidArgumentError(
            "the model is sharded already; use the model and the optimizer that "
            "group_sharded_parallel has returned, or create the model anew"
        )
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if stepped.isdisjoint(map(id, model.parameters())):
        raise InvalidArgumentError(
            "none of the optimizer's parameters belong to the model; "
            "create the optimizer from model.parameters()"
        )

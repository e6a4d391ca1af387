"""``group_sharded_parallel``: shards a model, its optimizer and its gradient scaler."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._averages import Average, averages_of
from .._spikes import SpikePolicy, policy_of
from .._checkpoints import Checkpoints
from .._core.arguments import (
    check_class,
    check_not_sharded,
    check_plain,
    check_steps_model,
)
from .._core.collectives import GroupSize
from .._core.options import Options
from .._core.sharded_models import register
from .._core.sharding import Sharding
from .._session import connection
from ._checkpoint import Checkpoint, postponed, settle
from ._clip import max_norm_of
from ._flat import check_no_views
from ._foreign import check_not_wrapped
from ._framework import TORCH, TorchOptimizer, process_group
from ._joined import on_ranks, parts_of
from ._materialize import Materializer, check_has_shapes
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer
from ._scaler import GradScaler
from ._sharded_module import ShardedModule
from ._state import optimizer_states
from ._training_mesh import set_training_mesh


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
    state_dtype: str = "f32",
    ema: Mapping[str, float | Average] | None = None,
    spikes: SpikePolicy | None = None,
    grad_clip: Any | None = None,
    param_init_fn: Callable[[nn.Module], Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    checkpoints: Checkpoints | None = None,
    separable: bool | None = None,
) -> tuple[GroupSharded, ShardedOptimizer, GradScaler | None]:
    """Moves the training state of a model to the shard servers.

    Args:
        model: any module. All ranks take the parameters and buffers of rank 0. Parameters and
            buffers on the meta device are initialised module by module, so that at ``"p_g_os"`` a
            worker does not need memory for the whole model.
        optimizer: any optimizer. Those that the servers have step on the servers; the page "The
            five APIs" of the documentation lists them. Any other one runs on the ranks, unchanged,
            and the servers keep its state; see ``separable``. Existing state is uploaded.
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
        state_dtype: the dtype in which servers keep the optimizer state. With ``"int8"`` it takes 1
            byte per element instead of 4, plus one per 128 elements. This works with
            ``Adam`` and ``AdamW`` without ``amsgrad``, ``Lion`` and ``SGD``.
            New state is rounded stochastically, so results differ from those with ``"f32"``, but
            not between runs. Reading, saving and loading state work as before.
        ema: running averages of the parameters, which the servers keep in f32 beside the optimizer
            state, by name: the decay of an exponential moving average, or a
            :class:`zeroshard.Average`. Workers send and receive nothing for them. See
            :func:`averaged`, and ``average`` of :func:`pin`.
        spikes: a :class:`zeroshard.SpikePolicy`, which says what happens if the gradient norm or
            the loss suddenly is far larger than before. None: the servers apply such steps.
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
        separable: for an optimizer that the servers do not have: ``True`` if a step of several
            parameters is that of each by itself, so that the ranks divide the parameters among
            them, and each needs the values, gradient and state of only one at a time; ``False`` if
            one rank must step it as a whole; None: as a whole, unless it is one of ``torch.optim``
            that is known to be separable. It gets f32 master weights and gradients, also for
            parameters in bf16.

    Returns:
        The wrapped model, the optimizer that steps on the servers, and the scaler (None if none was
            given).
    """
    shared = None if scaler is None else GradScaler.sharing(check_scaler(scaler))
    sharding = open_sharding(
        model,
        optimizer,
        level,
        group=group,
        offload=offload,
        sync_buffers=sync_buffers,
        buffer_max_size=buffer_max_size,
        segment_size=segment_size,
        sync_comm=sync_comm,
        dp_group=dp_group,
        exclude_layer=exclude_layer,
        accumulation_steps=accumulation_steps,
        group_size=group_size,
        state_dtype=state_dtype,
        ema=ema,
        spikes=spikes,
        grad_clip=grad_clip,
        param_init_fn=param_init_fn,
        checkpoint=checkpoint,
        device=device,
        checkpoints=checkpoints,
        separable=separable,
    )
    sharded = ShardedOptimizer(optimizer, sharding)
    optimizer.state.clear()
    return GroupSharded(model, sharding, shared), sharded, shared


def open_sharding(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    level: str,
    *,
    caller: str = "group_sharded_parallel",
    group: Any | None,
    offload: bool,
    sync_buffers: bool,
    buffer_max_size: int,
    segment_size: int,
    sync_comm: bool,
    dp_group: Any | None,
    exclude_layer: Collection[str | int] | None,
    accumulation_steps: int | None,
    group_size: GroupSize,
    state_dtype: str,
    ema: Mapping[str, float | Average] | None,
    spikes: SpikePolicy | None,
    grad_clip: Any | None,
    param_init_fn: Callable[[nn.Module], Any] | None,
    checkpoint: str | os.PathLike[str] | None,
    device: torch.device | str | None,
    checkpoints: Checkpoints | None,
    separable: bool | None,
) -> Sharding[Tensor]:
    """Opens the job of a model and its optimizer, which keep their classes. For the arguments see
    :func:`group_sharded_parallel`; ``caller`` is the function that errors name."""
    check_trainable(model, optimizer, caller)
    ranks_run = on_ranks(optimizer, separable)
    is_on_ranks = None if ranks_run is None else ranks_run.has_group
    settings = TorchOptimizer(parts_of(optimizer), is_on_ranks)
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
        state_dtype=state_dtype,
        averages=averages_of(ema),
        spikes=policy_of(spikes),
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
            settings,
            ranks,
            options,
            states=optimizer_states(settings.kinds(), optimizer, optimizer.state, ranks_run),
            max_norm=max_norm_of(optimizer, grad_clip),
            initial=initial.fill,
            checkpoints=checkpoints,
            on_ranks=ranks_run,
        )
    except BaseException:
        initial.undo()
        raise
    register(sharding)
    settle(model)
    set_training_mesh(sharding, group)
    return sharding


def check_scaler(scaler: Any) -> torch.amp.GradScaler:
    """Returns the scaler, or raises an error if it is not one."""
    check_class("scaler", scaler, torch.amp.GradScaler, "torch.amp.GradScaler")
    found: torch.amp.GradScaler = scaler
    return found


def check_trainable(model: Any, optimizer: Any, caller: str) -> None:
    """Raises an error if the model or the optimizer cannot be sharded. ``caller``: the function
    that errors name."""
    check_plain("model", model, nn.Module, ShardedModule, "torch.nn.Module")
    check_not_wrapped(model, caller)
    check_has_shapes(model, caller)
    check_optimizer(optimizer)
    check_not_sharded(model.parameters())
    stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
    check_steps_model(stepped, model.parameters())


def check_optimizer(optimizer: Any) -> None:
    """Raises an error unless the argument is an optimizer that is not sharded yet."""
    kind, name = torch.optim.Optimizer, "torch.optim.Optimizer"
    check_plain("optimizer", optimizer, kind, ShardedOptimizer, name)

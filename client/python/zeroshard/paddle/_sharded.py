"""``group_sharded_parallel``: shards a model, its optimizer and its gradient scaler."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import paddle

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
from .._rendezvous import ProcessGroup
from .._session import connection
from ..errors import InvalidArgumentError
from . import _conversion
from ._clip import clipping
from ._framework import PADDLE, PaddleOptimizer, process_group
from ._memory import is_guarded
from ._save import refuse_jit_save
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
    group_size: GroupSize = 1,
    state_dtype: str = "f32",
    ema: Mapping[str, float | Average] | None = None,
    spikes: SpikePolicy | None = None,
    checkpoints: Checkpoints | None = None,
) -> tuple[GroupSharded, ShardedOptimizer, GradScaler | None]:
    """Moves the training state of a model to the shard servers.

    Args:
        model: any layer. All ranks take the parameters and buffers of rank 0.
        optimizer: an optimizer of ``paddle.optimizer`` that the servers have (the page "The five
            APIs" of the documentation lists them), with its scheduler, groups, and
            ``ClipGradByGlobalNorm`` (one norm for each group) or ``ClipGradByNorm``. Existing state
            is uploaded.
        level: what the servers hold: ``"os"``: the optimizer state; ``"os_g"``: also gradients,
            which are sent during backward; ``"p_g_os"``: also parameters, which are fetched for
            each use.
        scaler: a gradient scaler; returned as one that supports the sharded optimizer.
        group: the group that trains together; None: all ranks.
        offload: keep the optimizer state in the host memory of the servers, or on their disks.
            Servers without a GPU always do. A server with a GPU needs ``--host-memory`` or
            ``--disk``; it keeps the state of LAMB and Adafactor in its memory. Does not change
            results.
        sync_buffers: whether all ranks receive the model's buffers of rank 0 after every step.
        buffer_max_size: elements of a bucket of gradients; 0: each gradient is sent by itself.
        segment_size: at ``p_g_os``, parameters with more elements than this live on the servers.
        sync_comm: at ``p_g_os``, disables prefetching of parameters.
        dp_group: ranks that train replicas, if ``group`` has one rank. Otherwise these belong in
            ``group`` as well, and ``dp_group`` must be None or a group of one rank.
        exclude_layer: at ``p_g_os``, class names or ids (``id(layer)``) of layers whose parameters
            stay on the workers.
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
            ``Adam`` and ``AdamW`` without ``amsgrad``, ``SGD`` and ``Momentum``.
            New state is rounded stochastically, so results differ from those with ``"f32"``, but
            not between runs. Reading, saving and loading state work as before.
        ema: running averages of the parameters, which the servers keep in f32 beside the optimizer
            state, by name: the decay of an exponential moving average, or a
            :class:`zeroshard.Average`. Workers send and receive nothing for them. See
            :func:`averaged`, and ``average`` of :func:`pin`.
        spikes: a :class:`zeroshard.SpikePolicy`, which says what happens if the gradient norm or
            the loss suddenly is far larger than before. None: the servers apply such steps.
        checkpoints: when and where the servers save the model and the optimizer, and from which
            checkpoint they start. If there is one, all values come from it. Parameters, parameter
            groups and their state cannot be replaced later. None: no checkpoints.

    Returns:
        The wrapped model, the optimizer that steps on the servers, and the scaler (None if none was
            given).
    """
    _check(model, optimizer)
    ranks = _ranks(group, dp_group)
    options = Options(
        level=level,
        sync_buffers=sync_buffers,
        buffer_max_size=buffer_max_size,
        segment_size=segment_size,
        sync_comm=sync_comm,
        dp_group=None,
        exclude_layer=exclude_layer,
        accumulation_steps=accumulation_steps,
        group_size=group_size,
        offload=offload,
        state_dtype=state_dtype,
        averages=averages_of(ema),
        spikes=policy_of(spikes),
    )
    if scaler is not None:
        check_class("scaler", scaler, paddle.amp.GradScaler, "paddle.amp.GradScaler")
    if level == "p_g_os":
        _check_not_static(model)
        refuse_jit_save()
    max_norm, clip_sets = clipping(optimizer)
    sharding = Sharding(
        connection(),
        PADDLE,
        model,
        PaddleOptimizer(optimizer),
        ranks,
        options,
        states=states_of(optimizer, own_state(optimizer)),
        max_norm=max_norm,
        clip_sets=clip_sets,
        checkpoints=checkpoints,
    )
    register(sharding)
    sharded = ShardedOptimizer.sharing(optimizer, sharding)
    return (
        GroupSharded(model, sharding),
        sharded,
        None if scaler is None else GradScaler.sharing(scaler),
    )


def _ranks(group: Any | None, dp_group: Any | None) -> ProcessGroup:
    """The ranks that train together. Groups of one rank are those of fleet's dimensions of degree
    1."""
    ranks = process_group(group)
    replicas = ranks if dp_group is None else process_group(dp_group, "dp_group")
    if dp_group is None or replicas.size == 1:
        return ranks
    if ranks.size > 1:
        raise InvalidArgumentError(
            f"dp_group has the ranks {list(replicas.ranks)} besides {list(ranks.ranks)} of group; "
            "leave it out and pass all ranks as group, since the servers average over all of them"
        )
    return replicas


def _check(model: Any, optimizer: Any) -> None:
    check_plain("model", model, paddle.nn.Layer, GroupSharded, "paddle.nn.Layer")
    check_optimizer(optimizer)
    layers = model.sublayers(include_self=True)
    check_not_sharded(model.parameters(), is_guarded=any(map(is_guarded, layers)))
    groups = _conversion.param_groups(optimizer)
    stepped = (parameter for group in groups for parameter in group["params"])
    check_steps_model(stepped, model.parameters())


def check_optimizer(optimizer: Any) -> None:
    """Raises an error unless the argument is an optimizer that is not sharded yet."""
    kind, name = _conversion.Optimizer, "paddle.optimizer.Optimizer"
    check_plain("optimizer", optimizer, kind, ShardedOptimizer, name)


def _check_not_static(model: Any) -> None:
    for name, layer in model.named_sublayers(include_self=True):
        if isinstance(layer.forward, paddle.jit.dy2static.program_translator.StaticFunction):
            raise InvalidArgumentError(
                f"layer {name!r} was converted by paddle.jit.to_static, which is not supported at "
                "level p_g_os, since a static graph cannot contain parameters that are gathered "
                "when they are used; use level os_g"
            )

"""``shard_optimizer``: an optimizer whose state is on the shard servers, by the stages of
sharding."""

from __future__ import annotations

from typing import Any

import paddle
from paddle.base import core

from .._strategy import ShardingStage, check_request, stage_of
from ..errors import InvalidArgumentError
from . import kinds
from ._mesh import check_mesh, dimension, has_everybody
from ._optimizer import ShardedOptimizer
from ._sharded import group_sharded_parallel


def shard_optimizer(
    optimizer: Any,
    shard_fn: ShardingStage | None = None,
    gradient_accumulation_steps: int = 1,
    *,
    model: Any | None = None,
) -> ShardedOptimizer:
    """Moves an optimizer's state to the shard servers, and by stage gradients and parameters.

    Stages are names for the levels of :func:`~zeroshard.paddle.group_sharded_parallel`: 1 is
    ``os``, 2 ``os_g``, 3 ``p_g_os``. The program goes on as it was, with the optimizer that comes
    back: ``backward``, ``step``, ``clear_grad``.

    Args:
        optimizer: one that the servers can run.
        shard_fn: ``ShardingStage1()``, ``ShardingStage2()`` or ``ShardingStage3()``; the first by
            default.
        gradient_accumulation_steps: backward passes of a step.
        model: whose parameters the optimizer steps. Stage 3 needs it; it stays the same object.

    Raises:
        InvalidArgumentError: ``shard_fn`` is no stage, its mesh has not all ranks, or stage 3 lacks
            the model.
    """
    stage = stage_of(shard_fn, core.ProcessMesh)
    if stage.mesh is not None:
        mesh = check_mesh(stage.mesh, "mesh")
        if not has_everybody(mesh):
            raise InvalidArgumentError(
                f"the mesh has ranks {mesh.process_ids}; it must have all ranks, to train together"
            )
        if stage.sharding_mesh_dim is not None:
            dimension(mesh, stage.sharding_mesh_dim)
    check_request(stage, gradient_accumulation_steps, model)
    if not isinstance(optimizer, kinds.Optimizer) or isinstance(optimizer, ShardedOptimizer):
        raise InvalidArgumentError(
            f"optimizer is a {type(optimizer).__name__}; it must be a paddle.optimizer.Optimizer that is not sharded already"
        )
    wrapped, sharded, _ = group_sharded_parallel(
        _Parameters(optimizer) if model is None else model,
        optimizer,
        stage.level,
        accumulation_steps=gradient_accumulation_steps if gradient_accumulation_steps > 1 else None,
    )
    if model is not None:
        sharding = wrapped.sharding

        def before(layer: Any, inputs: Any) -> None:
            if paddle.is_grad_enabled():
                sharding.before_forward()

        model.register_forward_pre_hook(before)
    return sharded


class _Parameters(paddle.nn.Layer):
    """An optimizer's parameters, where the model is not known."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        for number, group in enumerate(kinds.param_groups(optimizer)):
            for position, parameter in enumerate(group["params"]):
                self.add_parameter(f"group{number}_{position}", parameter)

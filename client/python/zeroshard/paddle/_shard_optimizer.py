"""``shard_optimizer``: moves an optimizer to the shard servers, by sharding stage."""

from __future__ import annotations

from typing import Any

import paddle

from .._strategy import ShardingStage, check_request, stage_of
from ..errors import InvalidArgumentError
from . import _conversion
from ._mesh import check_mesh, covers_world, dimension
from ._optimizer import ShardedOptimizer
from ._private import mesh_class
from ._sharded import check_optimizer, group_sharded_parallel


def shard_optimizer(
    optimizer: Any,
    shard_fn: ShardingStage | None = None,
    gradient_accumulation_steps: int = 1,
    *,
    model: Any | None = None,
) -> ShardedOptimizer:
    """Moves the state of an optimizer to the shard servers, and depending on the stage gradients
    and parameters.

    Stages 1, 2 and 3 are the levels ``os``, ``os_g`` and ``p_g_os`` of
    :func:`~zeroshard.paddle.group_sharded_parallel`. The training loop (``backward``, ``step``,
    ``clear_grad``) does not change, except that it uses the returned optimizer.

    Args:
        optimizer: an optimizer that the servers support.
        shard_fn: ``ShardingStage1()`` (the default), ``ShardingStage2()`` or ``ShardingStage3()``.
        gradient_accumulation_steps: the number of backward passes per step.
        model: the model of the optimizer's parameters. Required for stage 3. It is modified in
            place.

    Raises:
        InvalidArgumentError: ``shard_fn`` is not a stage, its mesh does not contain all ranks, or
            the model is missing for stage 3.
    """
    stage = stage_of(shard_fn, mesh_class())
    if stage.mesh is not None:
        mesh = check_mesh(stage.mesh, "mesh")
        if not covers_world(mesh):
            raise InvalidArgumentError(
                f"the mesh has the ranks {mesh.process_ids}; it must contain all ranks"
            )
        if stage.sharding_mesh_dim is not None:
            dimension(mesh, stage.sharding_mesh_dim)
    check_request(stage, gradient_accumulation_steps, model)
    check_optimizer(optimizer)
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
    """A layer of an optimizer's parameters, used if no model is given."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        for number, group in enumerate(_conversion.param_groups(optimizer)):
            for position, parameter in enumerate(group["params"]):
                self.add_parameter(f"group{number}_{position}", parameter)

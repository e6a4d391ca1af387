"""``shard_optimizer``: moves an optimizer to the shard servers, by sharding stage."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._rendezvous import world_group
from .._strategy import ShardingStage, check_request, stage_of
from ..errors import InvalidArgumentError
from ._materialize import check_has_values
from ._mesh import check_mesh, dimension, mesh_ranks
from ._optimizer import ShardedOptimizer
from ._sharded import check_optimizer, group_sharded_parallel


def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    shard_fn: ShardingStage | None = None,
    gradient_accumulation_steps: int = 1,
    *,
    model: nn.Module | None = None,
) -> ShardedOptimizer:
    """Moves the state of an optimizer to the shard servers, and depending on the stage gradients
    and parameters.

    Stages 1, 2 and 3 are the levels ``os``, ``os_g`` and ``p_g_os`` of
    :func:`~zeroshard.torch.group_sharded_parallel`. The training loop (``backward``, ``step``,
    ``zero_grad``) does not change, except that it uses the returned optimizer.

    Args:
        optimizer: an optimizer that the servers support.
        shard_fn: ``ShardingStage1()`` (the default), ``ShardingStage2()`` or ``ShardingStage3()``.
        gradient_accumulation_steps: the number of backward passes per step.
        model: the model of the optimizer's parameters. Required for stage 3. It is modified in
            place.

    Raises:
        InvalidArgumentError: ``shard_fn`` is not a stage, or the model is missing for stage 3.
    """
    stage = stage_of(shard_fn, DeviceMesh)
    if stage.mesh is not None and stage.sharding_mesh_dim is not None:
        dimension(check_mesh(stage.mesh, "mesh"), stage.sharding_mesh_dim)
    check_request(stage, gradient_accumulation_steps, model)
    check_optimizer(optimizer)
    if model is None:
        check_has_values(_Parameters(optimizer), "shard_optimizer without model=")
    wrapped, sharded, _ = group_sharded_parallel(
        _Parameters(optimizer) if model is None else model,
        optimizer,
        stage.level,
        group=mesh_group(stage.mesh),
        accumulation_steps=gradient_accumulation_steps if gradient_accumulation_steps > 1 else None,
    )
    if model is not None:
        sharding = wrapped.sharding

        def before(module: nn.Module, inputs: Any) -> None:
            if torch.is_grad_enabled():
                sharding.before_forward()

        model.register_forward_pre_hook(before)
    return sharded


class _Parameters(nn.Module):
    """A module of an optimizer's parameters, used if no model is given."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                self.register_parameter(f"group{number}_{position}", parameter)


def mesh_group(mesh: object) -> Any | None:
    """The process group of a mesh's ranks. None for all ranks.

    Raises :class:`~zeroshard.InvalidArgumentError` for a mesh of several dimensions that does not
    contain all ranks.
    """
    if mesh is None:
        return None
    found, world = check_mesh(mesh, "mesh"), list(world_group().ranks)
    if sorted(mesh_ranks(found)) == world:
        return None
    if found.ndim > 1:
        raise InvalidArgumentError(
            f"the mesh has {found.ndim} dimensions and the ranks {mesh_ranks(found)}; "
            f"a mesh of several dimensions must contain all ranks, {world}"
        )
    return found.get_group()

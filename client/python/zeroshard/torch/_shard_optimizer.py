"""``shard_optimizer``: an optimizer whose state is on the shard servers, by the stages of
sharding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .._rendezvous import place
from .._strategy import ShardingStage, check_request, stage_of
from ..errors import InvalidArgumentError
from ._mesh import check_mesh, dimension, mesh_ranks
from ._optimizer import ShardedOptimizer
from ._sharded import group_sharded_parallel


def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    shard_fn: ShardingStage | None = None,
    gradient_accumulation_steps: int = 1,
    *,
    model: nn.Module | None = None,
) -> ShardedOptimizer:
    """Moves an optimizer's state to the shard servers, and by stage gradients and parameters.

    Stages are names for the levels of :func:`~zeroshard.torch.group_sharded_parallel`: 1 is ``os``,
    2 ``os_g``, 3 ``p_g_os``. The program goes on as it was, with the optimizer that comes back:
    ``backward``, ``step``, ``zero_grad``.

    Args:
        optimizer: one that the servers can run.
        shard_fn: ``ShardingStage1()``, ``ShardingStage2()`` or ``ShardingStage3()``; the first by
            default.
        gradient_accumulation_steps: backward passes of a step.
        model: whose parameters the optimizer steps. Stage 3 needs it; it stays the same object.

    Raises:
        InvalidArgumentError: ``shard_fn`` is no stage, or stage 3 lacks the model.
    """
    stage = stage_of(shard_fn, DeviceMesh)
    if stage.mesh is not None and stage.sharding_mesh_dim is not None:
        dimension(check_mesh(stage.mesh, "mesh"), stage.sharding_mesh_dim)
    check_request(stage, gradient_accumulation_steps, model)
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, ShardedOptimizer):
        raise InvalidArgumentError(
            f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer that is not sharded already"
        )
    wrapped, sharded, _ = group_sharded_parallel(
        _Parameters(optimizer) if model is None else model,
        optimizer,
        stage.level,
        group=mesh_group(stage.mesh),
        accumulation_steps=gradient_accumulation_steps if gradient_accumulation_steps > 1 else None,
    )
    if model is not None:
        sharding = wrapped._sharding()

        def before(module: nn.Module, inputs: Any) -> None:
            if torch.is_grad_enabled():
                sharding.before_forward()

        model.register_forward_pre_hook(before)
    return sharded


class _Parameters(nn.Module):
    """An optimizer's parameters, where the model is not known."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                self.register_parameter(f"group{number}_{position}", parameter)


def mesh_group(mesh: object) -> Any | None:
    """The process group of a mesh's ranks; None for all ranks.

    Raises :class:`~zeroshard.InvalidArgumentError` for a mesh of several dimensions that has not
    all ranks.
    """
    if mesh is None:
        return None
    found, everybody = check_mesh(mesh, "mesh"), list(range(place().world))
    if sorted(mesh_ranks(found)) == everybody:
        return None
    if found.ndim > 1:
        raise InvalidArgumentError(
            f"the mesh has {found.ndim} dimensions and ranks {mesh_ranks(found)}; a mesh of several dimensions must "
            f"have all ranks, {everybody}, to train together"
        )
    return found.get_group()

"""``shard_layer``: distributes the parameters of a module over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from .._agreement import agree
from .._core.arguments import check_class
from .._layer import add_functions, check_functions, on_other_mesh, parameters_text
from ._mesh import check_mesh, mesh_ranks, mesh_text
from ._ties import keeping_ties


def shard_layer(
    layer: nn.Module,
    process_mesh: DeviceMesh,
    shard_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[[Any, DeviceMesh], Any] | None = None,
    output_fn: Callable[[Any, DeviceMesh], Any] | None = None,
) -> nn.Module:
    """Replaces all parameters and buffers of a module with DTensors, in place.

    Every rank of the mesh must call it with the same module. All ranks take the values of the
    mesh's first rank.

    Args:
        layer: the module.
        process_mesh: a :class:`ProcessMesh`, or torch's ``DeviceMesh``.
        shard_fn: ``shard_fn(name, layer, process_mesh)`` is called for every module, including
            ``layer`` itself with the name ``""``, and may replace parameters (``layer.weight =
            shard_tensor(layer.weight, ...)``). The remaining parameters are replicated.
        input_fn: ``input_fn(inputs, process_mesh)`` returns the list of inputs for ``layer``.
        output_fn: ``output_fn(outputs, process_mesh)`` returns the outputs of a call of ``layer``.

    Returns:
        The module.

    Raises:
        InvalidArgumentError: an argument has the wrong type, or a parameter is on another mesh.
        DisagreementError: another rank has a different mesh or module, or its ``shard_fn`` made
            different changes.
    """
    check_class("layer", layer, nn.Module, "torch.nn.Module")
    mesh = check_mesh(process_mesh, "process_mesh")
    check_functions(shard_fn=shard_fn, input_fn=input_fn, output_fn=output_fn)
    agree(
        "shard_layer",
        {
            "the mesh": mesh_text(mesh),
            "the layer's parameters": parameters_text(layer, _placements),
        },
        mesh_ranks(mesh),
    )
    with keeping_ties(layer):
        if shard_fn is not None:
            for name, inner in list(layer.named_modules()):
                shard_fn(name, inner, mesh)
    agree(
        "shard_layer after shard_fn",
        {"the result of shard_fn": parameters_text(layer, _placements)},
        mesh_ranks(mesh),
    )
    replicate_rest(layer, mesh)
    add_functions(layer, mesh, input_fn, output_fn, layer.register_forward_hook)
    return layer


def replicate_rest(layer: nn.Module, mesh: DeviceMesh) -> dict[int, nn.Parameter]:
    """Replicates the parameters and buffers that are not on a mesh. Returns the new parameters by
    the ``id`` of the original ones."""
    everywhere = [Replicate()] * mesh.ndim
    made: dict[int, nn.Parameter] = {}
    kept = []  # keeps ids that are keys from being reused
    for prefix, inner in layer.named_modules():
        for name, parameter in list(inner.named_parameters(recurse=False, remove_duplicate=False)):
            if isinstance(parameter, DTensor):
                _check_on(parameter, mesh, f"{prefix}.{name}" if prefix else name)
                continue
            if id(parameter) not in made:
                fresh = nn.Parameter(
                    distribute_tensor(parameter.detach(), mesh, everywhere), parameter.requires_grad
                )
                if getattr(parameter, "need_clip", True) is False:
                    fresh.need_clip = False  # type: ignore[attr-defined]
                made[id(parameter)] = fresh
                kept.append(parameter)
            inner.register_parameter(name, made[id(parameter)])
        for name, buffer in list(inner.named_buffers(recurse=False)):
            if not isinstance(buffer, DTensor):
                setattr(inner, name, distribute_tensor(buffer, mesh, everywhere))
    return made


def replace_in_optimizer(optimizer: torch.optim.Optimizer, made: dict[int, nn.Parameter]) -> None:
    """Replaces parameters in the optimizer's groups and state."""
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            fresh = made.get(id(parameter))
            if fresh is not None:
                group["params"][number] = fresh
                if parameter in optimizer.state:
                    optimizer.state[fresh] = optimizer.state.pop(parameter)


def _placements(parameter: nn.Parameter) -> Sequence[Placement] | None:
    return parameter.placements if isinstance(parameter, DTensor) else None


def _check_on(parameter: DTensor, mesh: DeviceMesh, name: str) -> None:
    if parameter.device_mesh != mesh:
        raise on_other_mesh(name, mesh_text(parameter.device_mesh), mesh_text(mesh))

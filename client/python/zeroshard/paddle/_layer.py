"""``shard_layer``: distributes the parameters of a layer over a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist

from .._agreement import agree
from .._core.arguments import check_class
from .._layer import add_functions, check_functions, on_other_mesh, parameters_text
from ..errors import StaticGraphError
from ._mesh import check_mesh, mesh_text
from ._placement import broadcast
from ._private import is_initialised, parameters_of, share_memory


def shard_layer(
    layer: Any,
    process_mesh: Any,
    shard_fn: Callable[[str, Any, Any], None] | None = None,
    input_fn: Callable[[Any, Any], Any] | None = None,
    output_fn: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Distributes all parameters and buffers of a layer over a mesh, in place.

    Every rank of the mesh must call it with the same layer. On a mesh of all ranks, all take the
    values of its first rank.

    Args:
        layer: the layer.
        process_mesh: a ``ProcessMesh``.
        shard_fn: ``shard_fn(name, layer, process_mesh)`` is called for every sublayer, including
            ``layer`` itself with the name ``""``, and may replace parameters (``layer.weight =
            shard_tensor(layer.weight, ...)``). The remaining parameters are replicated.
        input_fn: ``input_fn(inputs, process_mesh)`` returns the list of inputs for ``layer``.
        output_fn: ``output_fn(outputs, process_mesh)`` returns the outputs of a call of ``layer``.

    Returns:
        The layer.

    Raises:
        InvalidArgumentError: an argument has the wrong type, or a parameter is on another mesh.
        DisagreementError: another rank has a different mesh or layer, or its ``shard_fn`` made
            different changes.
        StaticGraphError: Paddle is in static graph mode.
    """
    if not paddle.in_dynamic_mode():
        raise StaticGraphError(
            "shard_layer works in dynamic graph mode only; call paddle.disable_static() first, and "
            "to_static for a distributed model with programs"
        )
    check_class("layer", layer, paddle.nn.Layer, "paddle.nn.Layer")
    mesh = check_mesh(process_mesh, "process_mesh")
    check_functions(shard_fn=shard_fn, input_fn=input_fn, output_fn=output_fn)
    agree(
        "shard_layer",
        {
            "the mesh": mesh_text(mesh),
            "the layer's parameters": parameters_text(layer, _placements),
        },
        mesh.process_ids,
    )
    if shard_fn is not None:
        before = _parameter_slots(layer)
        for name, inner in list(layer.named_sublayers(include_self=True)):
            shard_fn(name, inner, mesh)
        _keep_ties(before)
    agree(
        "shard_layer after shard_fn",
        {"the result of shard_fn": parameters_text(layer, _placements)},
        mesh.process_ids,
    )
    replicate_rest(layer, mesh)
    add_functions(layer, mesh, input_fn, output_fn, layer.register_forward_post_hook)
    return layer


def replicate_rest(layer: Any, mesh: Any) -> None:
    """Replicates the parameters and buffers that are not on a mesh, in place."""
    everywhere = [dist.Replicate()] * mesh.ndim
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if not tensor.is_dist():
            if is_initialised(tensor):
                broadcast(tensor, mesh)
                share_memory(dist.shard_tensor(tensor, mesh, everywhere), tensor)
        elif tensor.process_mesh != mesh:
            raise on_other_mesh(name, mesh_text(tensor.process_mesh), mesh_text(mesh))


def _placements(parameter: Any) -> Sequence[Any] | None:
    return parameter.placements if parameter.is_dist() else None


def _parameter_slots(layer: Any) -> list[tuple[Any, str, Any]]:
    """The layer, name and parameter of each parameter attribute."""
    return [
        (inner, name, parameter)
        for inner in layer.sublayers(include_self=True)
        for name, parameter in parameters_of(inner).items()
    ]


def _keep_ties(before: list[tuple[Any, str, Any]]) -> None:
    """A tied parameter that was replaced in one layer is replaced in all of them."""
    made = {
        id(parameter): parameters_of(layer)[name]
        for layer, name, parameter in before
        if parameters_of(layer).get(name) is not parameter
    }
    for layer, name, parameter in before:
        if id(parameter) in made and parameters_of(layer).get(name) is parameter:
            parameters_of(layer)[name] = made[id(parameter)]

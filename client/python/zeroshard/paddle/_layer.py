"""``shard_layer``: the parameters of a layer onto a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist

from .._agreement import agree
from .._layer import add_functions, check_functions, parameters_text
from ..errors import InvalidArgumentError
from ._mesh import check_mesh, mesh_text
from ._placement import share


def shard_layer(
    layer: Any,
    process_mesh: Any,
    shard_fn: Callable[[str, Any, Any], None] | None = None,
    input_fn: Callable[[Any, Any], Any] | None = None,
    output_fn: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Makes all parameters and buffers of a layer distributed tensors, in place.

    Every rank of the mesh calls it with the same layer; the values of the first of all ranks count.

    Args:
        layer: the layer.
        process_mesh: a ``ProcessMesh``.
        shard_fn: ``shard_fn(name, layer, process_mesh)`` is called for every sublayer, ``layer``
            itself included with the name ``""``, and replaces parameters as it likes
            (``layer.weight = shard_tensor(layer.weight, ...)``). What it leaves is replicated, as
            is everything without it.
        input_fn: ``input_fn(inputs, process_mesh)`` returns the list of inputs with which ``layer``
            runs.
        output_fn: ``output_fn(outputs, process_mesh)`` returns what a call of ``layer`` returns.

    Returns:
        The layer.

    Raises:
        InvalidArgumentError: ``process_mesh`` is no mesh, or something else is of another type; a
            parameter is on another mesh.
        DisagreementError: another rank has another mesh, another layer, or its ``shard_fn`` did
            something else.
    """
    if not isinstance(layer, paddle.nn.Layer):
        raise InvalidArgumentError(
            f"layer is a {type(layer).__name__}; it must be a paddle.nn.Layer"
        )
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
        before = _places(layer)
        for name, inner in list(layer.named_sublayers(include_self=True)):
            shard_fn(name, inner, mesh)
        _keep_ties(before)
    agree(
        "shard_layer after shard_fn",
        {"what shard_fn has done": parameters_text(layer, _placements)},
        mesh.process_ids,
    )
    replicate_rest(layer, mesh)
    add_functions(layer, mesh, input_fn, output_fn, layer.register_forward_post_hook)
    return layer


def replicate_rest(layer: Any, mesh: Any) -> None:
    """Replicates the parameters and buffers that are not on the mesh. They stay the same objects,
    also for an optimizer."""
    everywhere = [dist.Replicate()] * mesh.ndim
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        if not tensor.is_dist():
            if tensor._is_initialized():
                share(tensor, mesh)
                dist.shard_tensor(tensor, mesh, everywhere)._share_underline_tensor_to(tensor)
        elif tensor.process_mesh != mesh:
            raise InvalidArgumentError(
                f"parameter {name!r} is on the mesh {mesh_text(tensor.process_mesh)}; it must be on {mesh_text(mesh)}, as the "
                "layer"
            )


def _placements(parameter: Any) -> Sequence[Any] | None:
    return parameter.placements if parameter.is_dist() else None


def _places(layer: Any) -> list[tuple[Any, str, Any]]:
    """Every place that has a parameter: the layer, its name there, and the parameter."""
    return [
        (inner, name, parameter)
        for inner in layer.sublayers(include_self=True)
        for name, parameter in inner._parameters.items()
    ]


def _keep_ties(before: list[tuple[Any, str, Any]]) -> None:
    """What has been replaced in one place is replaced wherever it stood."""
    made = {
        id(parameter): layer._parameters[name]
        for layer, name, parameter in before
        if layer._parameters.get(name) is not parameter
    }
    for layer, name, parameter in before:
        if id(parameter) in made and layer._parameters.get(name) is parameter:
            layer._parameters[name] = made[id(parameter)]

"""The common part of ``shard_layer`` in all frameworks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .errors import InvalidArgumentError

#: Set on a layer with an ``input_fn``, so that a :class:`DistModel` does not distribute its inputs.
INPUT_FN = "_zeroshard_input_fn"


def check_functions(**functions: object) -> None:
    """Raises an error unless each argument is a function or None."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise InvalidArgumentError(f"{name} is {function!r}; it must be a function or None")


def on_other_mesh(name: str, own: str, of_layer: str) -> InvalidArgumentError:
    """The error for a parameter that is on another mesh than its layer, with the texts of both."""
    return InvalidArgumentError(
        f"parameter {name!r} is on the mesh {own}; it must be on the mesh of the layer, {of_layer}"
    )


def parameters_text(layer: Any, placements: Callable[[Any], Sequence[Any] | None]) -> str:
    """Names, shapes, dtypes and placements of a layer's parameters, for errors.

    ``placements`` returns the placements of a parameter, or None if it is not distributed.
    """
    descriptions = []
    for name, parameter in layer.named_parameters():
        placed = placements(parameter)
        at = "" if placed is None else f" {list(placed)}"
        descriptions.append(f"{name} {list(parameter.shape)} {parameter.dtype}{at}")
    return ", ".join(descriptions) or "none"


def add_functions(
    layer: Any,
    mesh: Any,
    input_fn: Callable[[Any, Any], Any] | None,
    output_fn: Callable[[Any, Any], Any] | None,
    after_forward: Callable[[Callable[..., Any]], object],
) -> None:
    """Registers the functions to be called around each forward of the layer. ``after_forward``
    registers a forward hook in the framework."""
    if input_fn is not None:
        before = input_fn
        layer.register_forward_pre_hook(lambda _, inputs: _as_inputs(before(inputs, mesh), inputs))
        layer.__dict__[INPUT_FN] = True
    if output_fn is not None:
        after = output_fn
        after_forward(lambda _, inputs, outputs: after(outputs, mesh))


def _as_inputs(returned: Any, inputs: tuple[Any, ...]) -> Any:
    """A list of inputs as a tuple, which the frameworks require. A layer whose input is a list gets
    a list."""
    is_input = len(inputs) == 1 and isinstance(inputs[0], list)
    return tuple(returned) if isinstance(returned, list) and not is_input else returned

"""What every framework's ``shard_layer`` has in common: its functions, and what ranks must agree
on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .errors import InvalidArgumentError

#: Set on a layer whose inputs ``input_fn`` makes: whoever calls it for the user must leave them to
#: it.
INPUT_FN = "_zeroshard_input_fn"


def check_functions(**functions: object) -> None:
    """What is given as a function must be one, or None."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise InvalidArgumentError(f"{name} is {function!r}; it must be a function, or None")


def parameters_text(layer: Any, placements: Callable[[Any], Sequence[Any] | None]) -> str:
    """Names, shapes, dtypes and placements of a layer's parameters, in an error.

    ``placements`` gives those of a parameter; None if it is plain.
    """
    said = []
    for name, parameter in layer.named_parameters():
        placed = placements(parameter)
        at = "" if placed is None else f" {list(placed)}"
        said.append(f"{name} {list(parameter.shape)} {parameter.dtype}{at}")
    return ", ".join(said) or "none"


def add_functions(
    layer: Any,
    mesh: Any,
    input_fn: Callable[[Any, Any], Any] | None,
    output_fn: Callable[[Any, Any], Any] | None,
    after_forward: Callable[[Callable[..., Any]], object],
) -> None:
    """Has them called around each forward of the layer; ``after_forward`` is how the framework adds
    the second."""
    if input_fn is not None:
        before = input_fn
        layer.register_forward_pre_hook(lambda _, inputs: _as_inputs(before(inputs, mesh)))
        layer.__dict__[INPUT_FN] = True
    if output_fn is not None:
        after = output_fn
        after_forward(lambda _, inputs, outputs: after(outputs, mesh))


def _as_inputs(inputs: Any) -> Any:
    """The frameworks take several inputs as a tuple."""
    return tuple(inputs) if isinstance(inputs, list) else inputs

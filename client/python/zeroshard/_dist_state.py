"""State dicts of a ``DistModel``: the tensors of the model, and those of its optimizer under a
prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from .errors import InvalidArgumentError

S = TypeVar("S")

#: The modes of ``state_dict``.
PARTS = ("all", "param", "opt")
#: Prefix of the optimizer's entries in a state dict: ``optimizer.<parameter>.<tensor>``.
OPTIMIZER_PREFIX = "optimizer."


def check_part(mode: str) -> None:
    """Raises an error unless the mode is one of :data:`PARTS`."""
    if mode not in PARTS:
        raise InvalidArgumentError(
            f"mode is {mode!r}; it must be one of {', '.join(map(repr, PARTS))}"
        )


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of the model, and those of the optimizer without their prefix."""
    model, optimizer = {}, {}
    for name, value in state.items():
        if name.startswith(OPTIMIZER_PREFIX):
            optimizer[name[len(OPTIMIZER_PREFIX) :]] = value
        else:
            model[name] = value
    return model, optimizer


def check_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises an error unless the state has the names and shapes of the model's ``own``."""
    unknown, missing = (
        [name for name in state if name not in own],
        [name for name in own if name not in state],
    )
    if unknown or missing:
        raise InvalidArgumentError(
            "the names of the state do not match the model: "
            f"unexpected {unknown or 'none'}, missing {missing or 'none'}"
        )
    for name, value in state.items():
        if list(value.shape) != list(own[name].shape):
            raise InvalidArgumentError(
                f"{name!r} in the state has shape {list(value.shape)}; "
                f"it must have the model's shape, {list(own[name].shape)}"
            )


def named_optimizer_state(
    state: Mapping[int, Mapping[str, S]], names: Mapping[int, str]
) -> dict[str, S]:
    """Optimizer state by ``<parameter>.<tensor>``, from state by parameter number."""
    return {
        f"{names[number]}.{part}": value
        for number, tensors in state.items()
        for part, value in tensors.items()
    }


def numbered_optimizer_state(
    state: Mapping[str, S], names: Mapping[int, str]
) -> dict[int, dict[str, S]]:
    """The inverse of :func:`named_optimizer_state`.

    Raises :class:`~zeroshard.InvalidArgumentError` if a parameter is unknown.
    """
    numbers = {name: number for number, name in names.items()}
    found: dict[int, dict[str, S]] = {}
    for key, value in state.items():
        name, _, part = key.rpartition(".")
        if name not in numbers:
            raise InvalidArgumentError(
                f"the state contains {OPTIMIZER_PREFIX + key!r}, but the optimizer has no "
                f"parameter {name!r}; its parameters are {', '.join(numbers)}"
            )
        found.setdefault(numbers[name], {})[part] = value
    return found

"""Keeps tied parameters tied when they are replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import InvalidArgumentError


@contextlib.contextmanager
def keeping_ties(module: nn.Module) -> Iterator[None]:
    """If a tied parameter is replaced in one module inside the context, it is replaced in all of
    them.

    Raises :class:`~zeroshard.InvalidArgumentError` if two replacements have different placements.
    """
    places: dict[int, tuple[nn.Parameter, list[tuple[str, nn.Module, str]]]] = {}
    for prefix, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(id(parameter), (parameter, []))[1].append(
                (f"{prefix}.{name}", child, name)
            )
    yield
    for before, where in places.values():
        if len(where) > 1:
            _tie(before, where)


def _tie(before: nn.Parameter, where: list[tuple[str, nn.Module, str]]) -> None:
    now = [
        (full, dict(child.named_parameters(recurse=False, remove_duplicate=False)).get(name))
        for full, child, name in where
    ]
    fresh = [
        (full, parameter)
        for full, parameter in now
        if parameter is not None and parameter is not before
    ]
    if not fresh:
        return
    first, parameter = fresh[0]
    for full, other in fresh[1:]:
        if _placed(other) != _placed(parameter):
            raise InvalidArgumentError(
                f"parameters {first!r} and {full!r} are tied, but have different placements: "
                f"{_placed(parameter)} and {_placed(other)}; give them the same"
            )
    for _, child, name in where:
        child.register_parameter(name, parameter)


def _placed(parameter: nn.Parameter) -> object:
    """The placements of a parameter."""
    return parameter.placements if isinstance(parameter, DTensor) else "no placement"

"""Runs the same functions in ranks of Paddle alone and of ZeroShard, and compares the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed
import pytest

import ranks

#: A function of ``paddle.distributed`` or of ``zeroshard.paddle``, which returns arrays, numbers,
#: text, and lists and dicts of them.
Program = Callable[[Any], Any]


@dataclass
class Raised:
    """An error that a program has raised."""

    types: list[str]
    message: str


#: The systems by name. Both run in processes of their own: importing ZeroShard wraps functions of
#: Paddle.
SYSTEMS = ("paddle", "zeroshard")


def run(world: int, programs: Sequence[Program], **options: Any) -> dict[str, list[dict[str, Any]]]:
    """Calls each program on each system. Returns the results by system, rank and name.

    An error that a program raises is its result. ``options`` are those of :func:`ranks.run`.
    """
    return {system: ranks.run(world, _all, system, list(programs), **options) for system in SYSTEMS}


def _all(rank: int, system: str, programs: list[Program]) -> dict[str, Any]:
    module: Any = paddle.distributed
    if system == "zeroshard":
        import zeroshard.paddle as module
    found: dict[str, Any] = {}
    for program in programs:
        paddle.seed(11)
        try:
            found[program.__name__] = program(module)
        except Exception as error:
            names = [base.__name__ for base in type(error).__mro__]
            found[program.__name__] = Raised(names, str(error))
        if paddle.distributed.is_initialized():
            paddle.distributed.barrier()
    return found


def assert_close(ours: Any, theirs: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Asserts that two results have the same structure and nearly equal numbers."""
    if isinstance(theirs, Mapping):
        assert list(ours) == list(theirs)
        assert_close(list(ours.values()), list(theirs.values()), rtol, atol)
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_close(mine, other, rtol, atol)
    elif isinstance(theirs, np.ndarray):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=rtol, abs=atol)
    else:
        assert ours == theirs


def raised(result: Any, *types: str) -> str:
    """The message of an error that a program has raised. Asserts that the error has the types."""
    assert isinstance(result, Raised), f"no error, but {result}"
    assert set(types) <= set(result.types), result
    return result.message


def local_values(layer: Any) -> list[np.ndarray]:
    """The values of the layer's parameters on this rank."""
    return [parameter.numpy() for parameter in layer.parameters()]


def gradients(layer: Any) -> list[np.ndarray | None]:
    """The gradients of the layer's parameters."""
    return [None if p.grad is None else p.grad.numpy() for p in layer.parameters()]

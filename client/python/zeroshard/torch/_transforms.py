"""Parts of torch that run a model in their own way: the transformations of ``torch.func``, and what
records programs (``torch.jit.trace``, ``torch.export``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import InvalidArgumentError
from . import _private


def is_transforming() -> bool:
    """Returns whether a transformation such as ``jvp`` or ``vmap`` runs, in which tensors have no
    memory of their own and ``grad`` permits no hooks for saved tensors."""
    return _private.is_transforming()


def is_transformed(tensor: Tensor) -> bool:
    """Returns whether a tensor belongs to a transformation."""
    return not torch.compiler.is_compiling() and _private.is_transformed(tensor)


@contextlib.contextmanager
def outside_transforms() -> Iterator[None]:
    """A context whose operations are not transformed."""
    if not is_transforming():
        yield
        return
    with _private.outside_transforms():
        yield


def is_tracing() -> bool:
    """Returns whether ``torch.jit.trace`` runs."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def check_not_recorded() -> None:
    """Raises an error if torch records the running program, which would have the parameters of this
    moment only."""
    if is_tracing() or torch.compiler.is_exporting():
        raise not_recorded()


def not_recorded() -> InvalidArgumentError:
    """The error for a program that cannot be recorded."""
    return InvalidArgumentError(
        "a model whose parameters are on the servers (level p_g_os) cannot be traced or exported, "
        "and the wrapper of a model cannot be scripted; pass a plain copy of the whole model "
        "instead: copy.deepcopy(model)"
    )

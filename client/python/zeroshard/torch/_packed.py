"""A parameter's state in an optimizer that runs on the ranks, as one text and some tensors.

The text is JSON. It has plain values, tensors with a single element, and the structure: which
tensor belongs where, and how it lies in memory. Nothing is pickled, so that reading a state runs no
code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._native import hashes
from ..errors import InvalidArgumentError
from ._framework import TORCH

#: The keys of JSON objects that stand for something else, each with a list of its parts.
_TENSOR, _SCALAR, _EMPTY, _LIST, _TUPLE, _DICT = (
    "tensor",
    "scalar",
    "empty",
    "list",
    "tuple",
    "dict",
)


def pack(state: Any, what: str) -> tuple[str, dict[str, Tensor]]:
    """Splits a state into its text and its tensors, by their path in the state.

    Args:
        state: tensors and plain values (numbers, strings, booleans and None), in lists, tuples and
            dictionaries.
        what: the state, for errors.

    Raises:
        InvalidArgumentError: it has a value of another kind.
    """
    tensors: dict[str, Tensor] = {}

    def packed(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return _packed_tensor(value, path, what, tensors)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            kind = _LIST if isinstance(value, list) else _TUPLE
            return {kind: [packed(each, f"{path}.{at}") for at, each in enumerate(value)]}
        if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
            return {_DICT: [[key, packed(each, f"{path}.{key}")] for key, each in value.items()]}
        raise InvalidArgumentError(
            f"{what} has a {type(value).__name__} at {path[1:]!r}, which the servers cannot keep; "
            "an optimizer that runs on the ranks may have tensors and plain values in its state"
        )

    return json.dumps(packed(state, "")), tensors


def _packed_tensor(value: Tensor, path: str, what: str, tensors: dict[str, Tensor]) -> Any:
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        raise InvalidArgumentError(
            f"{what} has a {type(value).__name__} with layout {value.layout} at {path[1:]!r}, "
            "which the servers cannot keep; an optimizer that runs on the ranks may have dense "
            "tensors of torch's own class in its state"
        )
    value = value.detach()
    dtype = str(value.dtype).removeprefix("torch.")
    if value.numel() == 0:
        return {_EMPTY: [dtype, list(value.shape), path[1:]]}
    if value.ndim == 0 and not value.is_complex():
        return {_SCALAR: [dtype, value.item(), path[1:]]}
    tensors[path[1:]] = value
    return {_TENSOR: [path[1:], *_order(value)]}


def _order(value: Tensor) -> list[int]:
    """The dimensions of a dense tensor as its elements lie in memory; empty if that is their own
    order. The results of matrix products depend on it."""
    order = sorted(range(value.ndim), key=value.stride, reverse=True)
    is_dense = value.permute(order).is_contiguous()
    return order if is_dense and not value.is_contiguous() else []


def _in_order(value: Tensor, order: list[int]) -> Tensor:
    """The inverse of :func:`_order`."""
    if not order:
        return value
    back = sorted(range(value.ndim), key=order.__getitem__)
    return value.permute(order).contiguous().permute(back)


def unpack(
    text: str,
    tensors: Mapping[str, Tensor],
    device_of: Callable[[str], torch.device],
    *,
    has_values: bool,
) -> Any:
    """The inverse of :func:`pack`.

    Args:
        device_of: returns the device of a tensor, by its path.
        has_values: the tensors have their values, and get the order in memory that they had. Others
            stay as they are.
    """

    def made(create: Callable[..., Tensor]) -> Callable[[Any], Tensor]:
        return lambda it: create(it[1], dtype=getattr(torch, it[0]), device=device_of(it[2]))

    kinds: dict[str, Callable[[Any], Any]] = {
        _TENSOR: lambda it: _in_order(
            tensors[it[0]].to(device_of(it[0])), it[1:] if has_values else []
        ),
        _SCALAR: made(torch.tensor),
        _EMPTY: made(torch.empty),
        _LIST: lambda it: [unpacked(each) for each in it],
        _TUPLE: lambda it: tuple(unpacked(each) for each in it),
        _DICT: lambda it: {key: unpacked(each) for key, each in it},
    }

    def unpacked(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        [(kind, parts)] = value.items()
        return kinds[kind](parts)

    return unpacked(json.loads(text))


def mapped(state: Any, call: Callable[[Any], Any]) -> Any:
    """A state with ``call`` of each tensor and plain value in it."""
    if isinstance(state, Mapping):
        return {key: mapped(each, call) for key, each in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(mapped(each, call) for each in state)
    return call(state)


def on_cpu(path: str) -> torch.device:
    """The CPU, for every path."""
    return torch.device("cpu")


def paths_on_cpu(state: Any, path: str = "") -> set[str]:
    """The paths of the tensors in a state that are in host memory."""
    if isinstance(state, Tensor):
        return {path[1:]} if state.device.type == "cpu" else set()
    if isinstance(state, Mapping):
        parts: Any = state.items()
    else:
        parts = enumerate(state) if isinstance(state, list | tuple) else ()
    return set().union(*(paths_on_cpu(each, f"{path}.{key}") for key, each in parts))


def fingerprint(state: Any, what: str) -> object:
    """Changes when a state changes: its text, and hashes of its tensors."""
    text, tensors = pack(state, what)
    words = [TORCH.outgoing_words(tensor) for tensor in tensors.values()]
    return text, tuple(hashes(words)) if words else ()


def as_bytes(text: str, capacity: int, what: str) -> Tensor:
    """A text as a tensor of ``capacity`` bytes.

    Raises:
        InvalidArgumentError: it is longer.
    """
    data = text.encode()
    if len(data) > capacity:
        raise InvalidArgumentError(
            f"the plain values in {what} have grown to {len(data)} bytes of text, and the servers "
            f"keep {capacity}; keep long lists outside of the optimizer, or in tensors"
        )
    return torch.frombuffer(bytearray(data.ljust(capacity, b"\0")), dtype=torch.uint8)


def from_bytes(padded: Tensor) -> str:
    """The inverse of :func:`as_bytes`. Empty if nothing was kept yet."""
    return bytes(padded.cpu().numpy().tobytes()).rstrip(b"\0").decode()

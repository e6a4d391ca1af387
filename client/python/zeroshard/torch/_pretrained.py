"""``save_pretrained`` of transformers, for a sharded model: writes the weights tensor by tensor.

The method of transformers writes everything, with placeholders for the values that are on the
servers. Afterwards the values are written to the safetensors files.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._core.sharding import Sharding
from ._memory import METADATA
from ._one_version import OneVersion, read_one_version
from ._placeholders import Placeholders, placing

#: The name of the method.
METHOD = "save_pretrained"
#: The arguments with which the weights are streamed. With others, transformers may write another
#: format, or upload the files before they have the values.
_STREAMED = {
    "save_directory",
    "is_main_process",
    "max_shard_size",
    "variant",
    "token",
    "save_original_format",
}
#: What may be done to a placeholder. Everything else computes with its values.
_HARMLESS = METADATA | {
    getattr(Tensor, name)
    for name in ("contiguous", "data_ptr", "detach", "cpu", "__repr__", "is_shared", "view")
}


class _Used(Exception):
    """transformers computes with the values before it writes them."""


class _Placeholder(Tensor):
    """A placeholder whose elements are not read."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The address of the last element tells which tensors overlap.
        is_last = func is Tensor.__getitem__ and type(args[1]) is int
        if func not in _HARMLESS and not is_last:
            raise _Used(getattr(func, "__name__", str(func)))
        called: Any = super().__torch_function__
        return called(func, types, args, kwargs or {})


def save_streaming(
    model: nn.Module,
    sharding: Sharding[Tensor],
    save: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls ``save``, the method of transformers, with these arguments. The weights that are on the
    servers are written one after the other, if that is possible."""
    if len(args) > 1 or not kwargs.keys() <= _STREAMED or not sharding.has_units:
        return save(*args, **kwargs)
    folder = Path(args[0] if args else kwargs["save_directory"])

    def write_all(version: OneVersion) -> Any:
        with placing(sharding, version) as placeholders:
            state = model.state_dict()
        found = {
            name: value.as_subclass(_Placeholder) if value in placeholders else value
            for name, value in state.items()
        }
        before = _modified(folder)
        result = save(*args, state_dict=found, **kwargs)
        for path, when in _modified(folder).items():
            if before.get(path) != when:
                _fill(path, state, placeholders)
        return result

    try:
        return read_one_version(sharding, write_all)
    except _Used:
        return save(*args, **kwargs)


def _modified(folder: Path) -> dict[Path, tuple[int, int]]:
    """The safetensors files in a directory, and when each was written."""
    files = folder.glob("*.safetensors")
    return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in files}


def _fill(path: Path, state: Mapping[str, Tensor], placeholders: Placeholders) -> None:
    """Writes the values to a file that has placeholders.

    Raises :class:`_Used` if the file has other tensors than the state dict, which transformers has
    made of those.
    """
    with path.open("r+b") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        for name, (shape, start, end) in _tensors_of(header):
            tensor = state.get(name)
            if tensor is None or list(tensor.shape) != shape or tensor.nbytes != end - start:
                raise _Used(name)
            if tensor in placeholders:
                values = placeholders.values(tensor).reshape(-1)
                memory: Any = values.view(torch.uint8).numpy()
                file.seek(8 + size + start)
                file.write(memory)


def _tensors_of(header: Mapping[str, Any]) -> Iterator[tuple[str, tuple[list[int], int, int]]]:
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, (entry["shape"], *entry["data_offsets"])

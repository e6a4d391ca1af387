"""Writes files of ``torch.save`` tensor by tensor."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ._private import memory_id

#: The values that a file may have beside tensors. The order in which torch writes the tensors of
#: other objects is not known.
_PLAIN = (bool, int, float, str, type(None))
#: An entry in the directory of a zip file: its signature and size, and where it has the checksum,
#: and the sizes of the name and of what follows it.
_ENTRY, _ENTRY_BYTES, _CRC, _SIZES = b"PK\1\2", 46, 16, slice(28, 34)


def save(state: Any, path: Path, values: Callable[[Tensor], Tensor]) -> None:
    """Writes what ``torch.save(state, path)`` would write if each tensor of ``state`` had the
    elements of ``values(tensor)``, which is requested once and dropped when it is written."""
    tensors = list(_tensors(state))
    if any(tensor is None for tensor in tensors):
        torch.save(_with_values(state, values), path)
        return
    # A file with room for the elements, which torch does not write.
    with torch.serialization.skip_data():
        torch.save(state, path)
    storages: dict[int, Tensor] = {}
    for tensor in tensors:
        assert tensor is not None
        storages.setdefault(_key(tensor), tensor)
    with zipfile.ZipFile(path) as archive:
        # torch numbers the storages in the order in which it finds them.
        found = (one for one in archive.infolist() if Path(one.filename).parent.name == "data")
        records = sorted(found, key=lambda one: int(Path(one.filename).name))
        directory = archive.start_dir
    sizes = [tensor.untyped_storage().nbytes() for tensor in storages.values()]
    assert sizes == [record.file_size for record in records], "one record for each storage"
    checksums = {}
    with path.open("r+b") as file:
        for record, tensor in zip(records, storages.values(), strict=True):
            memory = _memory(tensor, values(tensor))
            checksums[record.filename] = zlib.crc32(memory)
            file.seek(_start(file, record))
            file.write(memory)
        _write_checksums(file, directory, checksums)


def _tensors(state: Any) -> Iterator[Tensor | None]:
    """The tensors of a state dict, in the order in which torch pickles them. None for what may
    contain others."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield from _tensors(key)
            yield from _tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _tensors(value)
    elif type(state) in (Tensor, torch.nn.Parameter) and state.layout is torch.strided:
        yield state
    elif not isinstance(state, _PLAIN):
        yield None


def _with_values(state: Any, values: Callable[[Tensor], Tensor]) -> Any:
    """The same state dict with the values. Tensors that share memory still do."""
    made: dict[int, Tensor] = {}

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            copy = value.copy()  # keeps the attributes of a state dict
            copy.update((key, filled(one)) for key, one in value.items())
            return copy
        if isinstance(value, (list, tuple)):
            return type(value)(map(filled, value))
        if type(value) is Tensor:
            return made.setdefault(id(value), values(value))
        return value

    return filled(state)


def _key(tensor: Tensor) -> int:
    return memory_id(tensor.untyped_storage())


def _memory(tensor: Tensor, values: Tensor) -> memoryview:
    """The bytes of a storage. ``values``: ``tensor`` itself, or what a whole storage is to have."""
    storage = (tensor if values is tensor else values.contiguous()).untyped_storage().cpu()
    flat: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return memoryview(flat)


def _start(file: BinaryIO, record: zipfile.ZipInfo) -> int:
    """The position of the first byte of a record's data."""
    file.seek(record.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return record.header_offset + 30 + int(name) + int(extra)


def _write_checksums(file: BinaryIO, directory: int, checksums: Mapping[str, int]) -> None:
    """Writes the checksums of records to the directory of a zip file."""
    at = directory
    while True:
        file.seek(at)
        entry = file.read(_ENTRY_BYTES)
        if not entry.startswith(_ENTRY):
            return
        name, extra, comment = struct.unpack("<HHH", entry[_SIZES])
        filename = file.read(name).decode()
        if filename in checksums:
            file.seek(at + _CRC)
            file.write(struct.pack("<I", checksums[filename]))
        at += _ENTRY_BYTES + name + extra + comment

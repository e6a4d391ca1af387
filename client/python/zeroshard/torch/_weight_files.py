"""Files from which a model takes its values, read tensor by tensor: safetensors of Hugging Face, a
file of ``torch.save``, and a directory of ``torch.distributed.checkpoint``.

Which tensor of a model takes which value is decided in ``_checkpoint.py``.
"""

from __future__ import annotations

import json
import os
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgumentError

_FILE, _INDEX, _METADATA = "model.safetensors", "model.safetensors.index.json", ".metadata"
#: Keys under which programs save the state dict of the model beside other state.
_MODEL_KEYS = ("model", "model_state_dict", "state_dict")
#: Bytes of a safetensors file that are read at a time.
_PART = 1 << 24
#: What torch raises for a file that is damaged or in another format.
_UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError)


class WeightFiles(ABC):
    """The named tensors of a checkpoint."""

    #: The shape of each tensor. None if the value is not a tensor.
    shapes: dict[str, list[int] | None]

    @abstractmethod
    def read(self, name: str, target: Tensor) -> None:
        """Copies the values of a tensor to one of the same shape, which may have another dtype."""


def open_files(path: str | os.PathLike[str]) -> WeightFiles:
    """Reads the names and shapes of a checkpoint.

    Raises :class:`~zeroshard.InvalidArgumentError` if it is in no known format.
    """
    found = Path(path)
    if found.is_file():
        return _Safetensors(found) if found.suffix == ".safetensors" else _Saved(found)
    if not found.is_dir():
        raise InvalidArgumentError(f"checkpoint {str(found)!r} does not exist; {_FORMATS}")
    if (found / _METADATA).is_file():
        return _Distributed(found)
    if (found / _FILE).is_file():
        return _Safetensors(found / _FILE)
    if (found / _INDEX).is_file():
        return _Safetensors(found / _INDEX)
    raise InvalidArgumentError(
        f"checkpoint {str(found)!r} has neither {_FILE} nor {_INDEX} nor {_METADATA}; {_FORMATS}"
    )


_FORMATS = (
    "it must be a directory as save_pretrained of transformers writes it, a directory of "
    "torch.distributed.checkpoint, a .safetensors file, or a file of torch.save"
)


class _Safetensors(WeightFiles):
    """A safetensors file, or several with an index."""

    def __init__(self, path: Path) -> None:
        self._files = dict(_indexed(path) if path.name == _INDEX else _named(path))
        self.shapes = dict(self._read_shapes())

    def read(self, name: str, target: Tensor) -> None:
        path = self._files[name]
        if target.dim() == 0:
            with _open_safetensors(path) as file:
                target.copy_(file.get_tensor(name))
            return
        rows = max(1, _PART // max(1, target[:1].nbytes))
        for start in range(0, len(target), rows):
            # Opened for each part, since what was read of a mapped file is memory of the process.
            with _open_safetensors(path) as file:
                target[start : start + rows].copy_(file.get_slice(name)[start : start + rows])

    def _read_shapes(self) -> Iterator[tuple[str, list[int]]]:
        for path in dict.fromkeys(self._files.values()):
            with _open_safetensors(path) as file:
                names = set(file.keys())
                for name in [name for name, other in self._files.items() if other == path]:
                    if name not in names:
                        raise InvalidArgumentError(
                            f"{str(path)!r} does not contain {name!r}, contrary to {_INDEX}"
                        )
                    yield name, list(file.get_slice(name).get_shape())


def _named(path: Path) -> Iterator[tuple[str, Path]]:
    with _open_safetensors(path) as file:
        yield from ((name, path) for name in file.keys())


def _indexed(path: Path) -> Iterator[tuple[str, Path]]:
    try:
        files: dict[str, str] = json.loads(path.read_text())["weight_map"]
        yield from ((name, path.parent / file) for name, file in files.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgumentError(f"{str(path)!r} is not an index: {error!r}") from error


def _open_safetensors(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "the checkpoint needs the package 'safetensors', which cannot be imported "
            f"({error}); install it with: pip install safetensors"
        ) from error
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InvalidArgumentError(f"cannot open the checkpoint {str(path)!r}: {error}") from error


class _Saved(WeightFiles):
    """A file of ``torch.save``, which is mapped into memory."""

    def __init__(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except _UNREADABLE as error:
            raise InvalidArgumentError(
                f"cannot open the checkpoint {str(path)!r} with torch.load(weights_only=True, "
                f"mmap=True): {error}; it must be a state dict that torch.save has written"
            ) from error
        if not isinstance(state, Mapping):
            raise InvalidArgumentError(
                f"checkpoint {str(path)!r} contains a {type(state).__name__}; it must contain a "
                "state dict: torch.save(model.state_dict(), path)"
            )
        leaves = dict(_leaves(state, ()))
        self._values = {name: leaves[place] for name, place in _of_model(leaves).items()}
        self.shapes = {
            name: list(value.shape) if isinstance(value, Tensor) else None
            for name, value in self._values.items()
        }

    def read(self, name: str, target: Tensor) -> None:
        target.copy_(self._values[name])


def _leaves(state: Mapping[Any, Any], place: tuple[str, ...]) -> Iterator[tuple[Any, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*place, str(key)))
        else:
            yield (*place, str(key)), value


class _Distributed(WeightFiles):
    """A directory of ``torch.distributed.checkpoint``."""

    def __init__(self, path: Path) -> None:
        # Imported here, because it takes long.
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._path = path
        self._reader = FileSystemReader(path)
        try:
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, True)
            stored = self._metadata.state_dict_metadata
            # A checkpoint of an older torch, or of a flat state dict, does not say the places.
            places = self._metadata.planner_data or {}
            keys = {tuple(map(str, places.get(key, (key,)))): key for key in stored}
            self._keys = {name: keys[place] for name, place in _of_model(keys).items()}
            self.shapes = {}
            for name, key in self._keys.items():
                kept = stored[key]
                self.shapes[name] = (
                    list(kept.size) if isinstance(kept, TensorStorageMetadata) else None
                )
        except (*_UNREADABLE, AttributeError, AssertionError) as error:
            raise InvalidArgumentError(
                f"cannot open the checkpoint {str(path)!r}: {error!r}; it must be a directory of "
                "torch.distributed.checkpoint.save"
            ) from error

    def read(self, name: str, target: Tensor) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({self._keys[name]: target}, self._metadata, True)
        try:
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            self._reader.read_data(plan, planner).wait()
        except (*_UNREADABLE, AssertionError) as error:
            raise InvalidArgumentError(
                f"cannot read {name!r} of the checkpoint {str(self._path)!r}: {error!r}"
            ) from error


def _of_model(places: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The places of the values of a model's state dict by name, in a nested state dict in which it
    may be beside other state."""
    inside, depth = list(places), 0
    while True:
        heads = {place[depth] for place in inside if len(place) > depth + 1}
        named = [key for key in _MODEL_KEYS if key in heads]
        if not named and (len(heads) != 1 or any(len(place) == depth + 1 for place in inside)):
            return {".".join(place[depth:]): place for place in inside}
        head = named[0] if named else heads.pop()
        inside = [p for p in inside if p[depth] == head and len(p) > depth + 1]
        depth += 1

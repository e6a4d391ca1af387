"""A directory of safetensors files in the format of Hugging Face, read tensor by tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import InvalidArgumentError

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: Bytes that are read at a time.
_PART = 1 << 24
#: Names that an error lists.
_SHOWN = 5


class Checkpoint:
    """The values of all parameters and persistent buffers of a model."""

    def __init__(self, directory: str | os.PathLike[str], model: nn.Module) -> None:
        """Reads the names and shapes.

        Raises :class:`~zeroshard.InvalidArgumentError` if they are not those of the model, or if
        the directory is not in the format. Of tied tensors one is enough.
        """
        self._directory = Path(directory)
        found = dict(self._shapes())
        model_names = dict(_saved(model))
        #: The name in the checkpoint, by the id of the tensor. As in ``load_state_dict``, the last
        #: one of tied tensors counts.
        self._name_of = {id(t): name for name, t in model_names.items() if name in found}
        missing = [name for name, t in model_names.items() if id(t) not in self._name_of]
        unexpected = [name for name in found if name not in model_names]
        wrong = [
            f"{name} has shape {found[name]} instead of {list(tensor.shape)}"
            for name, tensor in model_names.items()
            if name in found and found[name] != list(tensor.shape)
        ]
        problems = [
            f"{what}: {', '.join(names[:_SHOWN])}"
            + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
            for what, names in (
                ("missing keys", missing),
                ("unexpected keys", unexpected),
                ("wrong shapes", wrong),
            )
            if names
        ]
        if problems:
            raise InvalidArgumentError(
                f"checkpoint {str(self._directory)!r} does not match the model: "
                + "; ".join(problems)
            )

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._name_of

    def read(self, tensor: Tensor) -> None:
        """Copies the values of a tensor of the model from the checkpoint."""
        name = self._name_of[id(tensor)]
        path = self._files[name]
        if tensor.dim() == 0:
            with _open(path) as file:
                tensor.copy_(file.get_tensor(name))
            return
        rows = max(1, _PART // max(1, tensor[:1].nbytes))
        for start in range(0, len(tensor), rows):
            # Opened for each part, since what was read of a mapped file is memory of the process.
            with _open(path) as file:
                tensor[start : start + rows].copy_(file.get_slice(name)[start : start + rows])

    def _shapes(self) -> Iterator[tuple[str, list[int]]]:
        """The names and shapes in the files."""
        self._files = {name: self._directory / file for name, file in self._index()}
        for path in dict.fromkeys(self._files.values()):
            with _open(path) as file:
                names = set(file.keys())
                for name in [name for name, other in self._files.items() if other == path]:
                    if name not in names:
                        raise InvalidArgumentError(
                            f"{str(path)!r} does not contain {name!r}, contrary to {_INDEX}"
                        )
                    yield name, list(file.get_slice(name).get_shape())

    def _index(self) -> Iterator[tuple[str, str]]:
        """The names of all tensors, and the file of each."""
        if (self._directory / _FILE).is_file():
            with _open(self._directory / _FILE) as file:
                yield from ((name, _FILE) for name in file.keys())
            return
        path = self._directory / _INDEX
        try:
            files: dict[str, str] = json.loads(path.read_text())["weight_map"]
            yield from files.items()
        except FileNotFoundError:
            raise InvalidArgumentError(
                f"checkpoint {str(self._directory)!r} has neither {_FILE} nor {_INDEX}; it must be "
                "a directory as save_pretrained of transformers writes it"
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgumentError(f"{str(path)!r} is not an index: {error!r}") from error


def _open(path: Path) -> Any:
    """An open safetensors file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "checkpoint needs the package 'safetensors', which cannot be imported "
            f"({error}); install it with: pip install safetensors"
        ) from error
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InvalidArgumentError(f"cannot open the checkpoint {str(path)!r}: {error}") from error


def _saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers of a model by name, tied ones under all names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for registered in (module._parameters, module._buffers):
            for key, tensor in registered.items():
                if tensor is not None and key not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{key}" if prefix else key, tensor

"""Matches the names and shapes of a checkpoint with those of a model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import InvalidArgumentError
from ._dtensor import local, part
from ._private import buffers_of, parameters_of, unsaved_buffers
from ._weight_files import WeightFiles, open_files


#: What ``load_state_dict`` returns.
_Keys: Any = type(nn.Module().load_state_dict({}))


class Checkpoint:
    """The values of the parameters and persistent buffers of a model."""

    def __init__(
        self, path: str | os.PathLike[str], model: nn.Module, *, strict: bool = True
    ) -> None:
        """Reads the names and shapes.

        Raises :class:`~zeroshard.InvalidArgumentError` if the checkpoint is in no known format, or
        if the shapes, or with ``strict`` the names, are not those of the model. Of tied tensors one
        is enough.
        """
        self._files: WeightFiles = open_files(path)
        shapes = self._files.shapes
        own = dict(_saved(model))
        #: The name in the checkpoint and the tensor, by the id of the tensor. As in
        #: ``load_state_dict``, the last one of tied tensors counts.
        self._sources = {id(t): (name, t) for name, t in own.items() if name in shapes}
        #: As ``load_state_dict`` returns it.
        self.keys = _Keys(
            [name for name, tensor in own.items() if id(tensor) not in self._sources],
            [name for name in shapes if name not in own],
        )
        problems = [
            f"{kind} key(s) in state_dict: " + ", ".join(f'"{name}"' for name in names) + "."
            for kind, names in zip(("Missing", "Unexpected"), self.keys, strict=True)
            if names and strict
        ]
        for name, tensor in own.items():
            found = shapes.get(name, list(tensor.shape))
            if found is None:
                problems.append(f"{name} is not a tensor in the checkpoint.")
            elif found != list(tensor.shape):
                problems.append(
                    f"size mismatch for {name}: copying a param with shape {torch.Size(found)} "
                    f"from checkpoint, the shape in current model is {tensor.shape}."
                )
        if problems:
            raise InvalidArgumentError(
                f"Error(s) in loading checkpoint {os.fspath(path)!r} into {type(model).__name__}:"
                + "".join(f"\n\t{problem}" for problem in problems)
            )

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._sources

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the model that the checkpoint has values for."""
        return [tensor for _, tensor in self._sources.values()]

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Forgets the values of all other tensors."""
        self._sources = {id(tensor): self._sources[id(tensor)] for tensor in tensors}

    def read(self, tensor: Tensor) -> None:
        """Copies the values of a tensor of the model, which has memory, from the checkpoint."""
        if isinstance(tensor, DTensor):
            local(tensor).copy_(self.value(tensor))
        else:
            self._files.read(self._sources[id(tensor)][0], tensor)

    def value(self, tensor: Tensor) -> Tensor:
        """The values of a tensor of the model in host memory, in the tensor's dtype. Of a DTensor,
        this rank's part."""
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        self._files.read(self._sources[id(tensor)][0], whole)
        return part(whole, tensor)


#: The checkpoints whose values modules on the meta device take when they are sharded.
_postponed: WeakKeyDictionary[nn.Module, Checkpoint] = WeakKeyDictionary()


def postpone(module: nn.Module, checkpoint: Checkpoint) -> None:
    """The module takes the values of a checkpoint when ``group_sharded_parallel`` gives it
    memory."""
    _postponed[module] = checkpoint


def postponed(model: nn.Module) -> list[Checkpoint]:
    """The checkpoints of a model and the modules in it."""
    return [_postponed[module] for module in model.modules() if module in _postponed]


def settle(model: nn.Module) -> None:
    """Forgets the checkpoints of a model that has taken their values."""
    for module in model.modules():
        _postponed.pop(module, None)


def _saved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and persistent buffers of a model by name, tied ones under all names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        registered: dict[str, Any]
        for registered in (parameters_of(module), buffers_of(module)):
            for key, tensor in registered.items():
                if tensor is not None and key not in unsaved_buffers(module):
                    yield f"{prefix}.{key}" if prefix else key, tensor

"""The mesh of the ranks that train a model together, on which its sharded state dicts lie."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._core.sharding import Sharding
from .._rendezvous import distributed
from ..errors import NotInitialisedError

#: The mesh of each model, or the process group that was given for it.
_meshes: WeakKeyDictionary[Sharding[Tensor], Any] = WeakKeyDictionary()


def set_training_mesh(sharding: Sharding[Tensor], given: Any) -> None:
    """Records the mesh or the process group that the script has passed for a model."""
    if given is not None:
        _meshes[sharding] = given


def training_mesh(sharding: Sharding[Tensor]) -> DeviceMesh:
    """The mesh, with one dimension.

    Raises :class:`~zeroshard.NotInitialisedError` without a process group of the model's ranks.
    """
    found = _meshes.get(sharding)
    if isinstance(found, DeviceMesh):
        return found
    dist = distributed()
    ranks = list(sharding.job.group.ranks)
    if dist is None or found is None and list(range(dist.get_world_size())) != ranks:
        raise NotInitialisedError(
            f"a sharded state dict of a model on ranks {ranks} consists of DTensors, which need a "
            "process group of these ranks; call torch.distributed.init_process_group(), or ask for "
            "whole tensors with StateDictOptions(full_state_dict=True)"
        )
    device = next(entry.tensor.device.type for entry in sharding.job.entries)
    mesh = DeviceMesh.from_group(dist.group.WORLD if found is None else found, device)
    _meshes[sharding] = mesh
    return mesh

"""Parameters that are views of memory which the script holds as another tensor."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor, nn

from ..errors import InvalidArgumentError
from ._dtensor import local


def check_no_views(
    model: nn.Module, optimizer: torch.optim.Optimizer, fetched: Collection[int]
) -> None:
    """Raises :class:`~zeroshard.InvalidArgumentError` if the memory of a parameter that will be on
    the servers belongs to a larger tensor, such as a flat tensor of all parameters, which would
    keep its old values. ``fetched``: the ids of these parameters."""
    stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers(), *stepped)}
    known = Counter(
        local(tensor).untyped_storage()._cdata
        for tensor in tensors.values()
        if tensor.layout is torch.strided
    )
    for name, parameter in model.named_parameters():
        if id(parameter) in fetched and _is_held_by_others(parameter, known):
            gc.collect()  # the script may have deleted the other tensor
            if _is_held_by_others(parameter, known):
                raise InvalidArgumentError(
                    f"parameter {name!r} is a part of a larger tensor that your script holds, and "
                    "that would keep its old values at level p_g_os; give the parameter its own "
                    "memory before group_sharded_parallel (parameter.data = "
                    "parameter.data.clone()), delete the larger tensor, or use level os_g"
                )


def _is_held_by_others(parameter: Tensor, known: Counter[int]) -> bool:
    """Whether tensors besides those of the model refer to memory in which the parameter is a
    part."""
    tensor = local(parameter)
    if tensor.is_meta or tensor.layout is not torch.strided:
        return False
    memory = tensor.untyped_storage()
    if memory.nbytes() <= tensor.numel() * tensor.element_size():
        return False
    # One reference is that of `memory`.
    users: int = torch._C._storage_Use_Count(memory._cdata)
    return users - 1 > known[memory._cdata]

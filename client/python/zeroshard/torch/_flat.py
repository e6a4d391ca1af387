"""Parameters that are views of memory which the script holds as another tensor."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor, nn

from ..errors import InvalidArgumentError
from ._dtensor import local
from ._private import memory_id, memory_users


def check_no_views(
    model: nn.Module, optimizer: torch.optim.Optimizer, fetched: Collection[int]
) -> None:
    """Finds parameters that will be on the servers and whose memory belongs to a larger tensor that
    the script holds, which would keep their old values. ``fetched``: the ids of these parameters.

    Warns if it is the fused tensor of a checkpoint, for example, which scripts do not read again.

    Raises:
        InvalidArgumentError: the memory has at least half of the model, as a flat tensor of all
            parameters does, which scripts read and write.
    """
    stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers(), *stepped)}
    known = Counter(_memory(tensor) for tensor in tensors.values())
    elements: Counter[int | None] = Counter()
    for parameter in model.parameters():
        elements[_memory(parameter)] += parameter.numel()
    held = _held_by_others(model, fetched, known)
    if held:
        gc.collect()  # the script may have deleted the other tensors
        held = _held_by_others(model, fetched, known)
    for name, part in held.items():
        if 2 * elements[_memory(part)] >= elements.total():
            raise InvalidArgumentError(
                f"parameter {name!r} is a part of a larger tensor that your script holds, and "
                "that would keep its old values at level p_g_os; give the parameter its own "
                "memory before group_sharded_parallel (parameter.data = "
                "parameter.data.clone()), delete the larger tensor, or use level os_g"
            )
    if held:
        warnings.warn(
            f"parameter {next(iter(held))!r} is a part of a larger tensor that your script holds, "
            f"as are {len(held)} parameters in all; at level p_g_os that tensor keeps its present "
            "values: delete it, or do not read it after group_sharded_parallel",
            UserWarning,
            stacklevel=3,
        )


def _memory(tensor: Tensor) -> int | None:
    """An identifier of the memory of a tensor. None if its layout has several tensors."""
    if tensor.layout is not torch.strided:
        return None
    return memory_id(local(tensor).untyped_storage())


def _held_by_others(
    model: nn.Module, fetched: Collection[int], known: Counter[int | None]
) -> dict[str, Tensor]:
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in fetched and _is_held_by_others(parameter, known)
    }


def _is_held_by_others(parameter: Tensor, known: Counter[int | None]) -> bool:
    """Returns whether tensors besides those of the model refer to memory in which the parameter is
    a part."""
    tensor = local(parameter)
    if tensor.is_meta or tensor.layout is not torch.strided:
        return False
    memory = tensor.untyped_storage()
    if memory.nbytes() <= tensor.numel() * tensor.element_size():
        return False
    # One reference is that of `memory`.
    return memory_users(memory) - 1 > known[memory_id(memory)]

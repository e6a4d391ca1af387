"""``load_weights``: gives a model the values of a checkpoint, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .._core.sharded_models import find, is_sharded
from .._core.sharding import Sharding
from ..errors import InvalidArgumentError
from ._assign import is_refusal
from ._checkpoint import Checkpoint, postpone
from ._data_parallel import DataParallel
from ._deferred_load import copies_only, is_gathering
from ._model import GroupSharded
from ._private import load_hooks


def load_weights(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Gives the parameters and buffers of a model the values of a checkpoint.

    The checkpoint is read tensor by tensor. At level ``p_g_os`` the values of the parameters that
    are on the servers are sent there at once, so that a worker needs memory for the largest one.

    Args:
        model: a model before or after :func:`~zeroshard.torch.group_sharded_parallel`,
            :class:`~zeroshard.torch.DataParallel` or :func:`~zeroshard.torch.shard_optimizer`, or a
            module of one. Every rank must call it. Of a sharded model all ranks take the values of
            rank 0, which reads them; the others read only the names. Before, every rank reads the
            values, and tensors on the meta device take them when ``group_sharded_parallel`` gives
            them memory: until then the files must stay as they are.
        path: a file of ``torch.save``; a directory of ``torch.distributed.checkpoint``; a
            ``.safetensors`` file; or a directory with ``model.safetensors``, or with
            ``model.safetensors.index.json`` and its files, as Hugging Face writes it. The state
            dict of the model may be under the key ``model``, ``model_state_dict`` or
            ``state_dict``, beside other state. ``torch.distributed.checkpoint`` unpickles the file
            ``.metadata``: load only directories that you trust.
        strict: whether the checkpoint must have exactly the keys of the model. Of tied parameters
            one is enough.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict`` does.

    Raises:
        InvalidArgumentError: the path is in no known format, keys or shapes are not those of the
            model, a module does not load its state in the usual way, or gradients of a step that
            is not complete are on the servers.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgumentError(f"model is a {type(model).__name__}; it must be a Module")
    module = model.module if isinstance(model, GroupSharded | DataParallel) else model
    _check_usual(module)
    checkpoint = Checkpoint(path, module, strict=strict)
    parameters = list(module.parameters())
    sharding = find(parameters) if is_sharded(parameters) else None
    with torch.no_grad():
        if sharding is None:
            _load_here(module, checkpoint)
        else:
            sharding.changes.load(_values(checkpoint, sharding))
    return checkpoint.keys


def _load_here(module: nn.Module, checkpoint: Checkpoint) -> None:
    empty = []
    for tensor in checkpoint.tensors:
        if tensor.is_meta:
            empty.append(tensor)
        else:
            checkpoint.read(tensor)
    if empty:
        checkpoint.keep(empty)
        postpone(module, checkpoint)


def _values(checkpoint: Checkpoint, sharding: Sharding[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """As the argument of :meth:`ProgramChanges.load`."""
    for tensor in checkpoint.tensors:
        entry = sharding.job.find(tensor)
        if entry is None:
            checkpoint.read(tensor)  # a buffer of a model of which the job has the parameters only
        elif sharding.job.job.uploads(entry.index):
            if entry.resident:
                checkpoint.read(tensor)
            else:
                yield tensor, checkpoint.value(tensor)


def _check_usual(model: nn.Module) -> None:
    """Raises an error if ``load_state_dict`` would do more than to copy tensors."""
    for name, module in model.named_modules():
        hooks = load_hooks(module).values()
        is_ours = all(is_refusal(hook) or is_gathering(hook) for hook in hooks)
        if not is_ours or not copies_only(module):
            raise InvalidArgumentError(
                f"module {name!r} ({type(module).__name__}) has its own hooks or methods to load "
                "its state, which load_weights does not call; use model.load_state_dict(torch.load("
                "path, mmap=True, weights_only=True))"
            )

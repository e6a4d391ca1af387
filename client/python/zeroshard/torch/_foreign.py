"""Wrappers that shard a model, or average its gradients, themselves."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..errors import InvalidArgumentError
from ._private import is_managed_by_fsdp, modules_in

#: What to do, by the library and the name of the class. Classes are compared by name, since
#: importing some of them takes seconds.
_REMEDIES: Mapping[tuple[str, str], str] = {
    ("torch", "DistributedDataParallel"): (
        "pass the module itself (ddp.module), and remove DistributedDataParallel from the script"
    ),
    ("torch", "DataParallel"): (
        "pass the module itself (model.module), and start one process for each device"
    ),
    ("torch", "FullyShardedDataParallel"): "remove FullyShardedDataParallel from the script",
    ("torch", "FSDPModule"): "remove the calls of fully_shard from the script",
    ("torch", "ReplicateModule"): "remove the calls of replicate from the script",
    ("zeroshard", "DataParallel"): (
        "pass the module itself (model.module), which needs only one of the two"
    ),
    ("zeroshard", "GroupSharded"): (
        "use the model that group_sharded_parallel has returned, which averages gradients as well"
    ),
    ("zeroshard", "ShardedInPlace"): (
        "call zeroshard.shard for the whole model only, which averages gradients as well"
    ),
}


def check_not_wrapped(model: nn.Module, function: str) -> None:
    """Raises :class:`~zeroshard.InvalidArgumentError` if the model, or a module in it, is wrapped
    for data parallelism or sharding. ``function``: the caller, for the error."""
    _check_plain(model, "the model", function)
    for name, module in model.named_modules():
        # Not `named_modules()` alone: our wrappers are not among their modules.
        for key, child in modules_in(module).items():
            if child is not None:
                path = f"{name}.{key}" if name else key
                _check_plain(child, f"module {path!r} of the model", function)


def _check_plain(module: nn.Module, what: str, function: str) -> None:
    if isinstance(module, nn.DataParallel) and len(module.device_ids) < 2:
        return  # calls its module as it is
    for kind in type(module).__mro__:
        remedy = _REMEDIES.get(_library_and_name(kind))
        if remedy is not None:
            raise InvalidArgumentError(
                f"{what} is wrapped by {kind.__name__}, which exchanges gradients or parameters "
                f"between the ranks itself, so {function} cannot use it; {remedy}"
            )


def _library_and_name(kind: type) -> tuple[str, str]:
    return kind.__module__.partition(".")[0], kind.__name__


def check_not_wrapped_later(module: nn.Module) -> None:
    """Raises an error if FSDP has taken over a module since it was wrapped by ZeroShard."""
    if is_managed_by_fsdp(module):
        raise wrapped_later("FSDP")


def check_hook(hook: object) -> None:
    """Raises an error if a hook of a wrapper's forward is that of FSDP, which wraps the wrapper."""
    kinds = type(getattr(hook, "__self__", None)).__mro__
    if any(_library_and_name(kind) == ("torch", "FSDPState") for kind in kinds):
        raise wrapped_later("FSDP")


def wrapped_later(other: str) -> InvalidArgumentError:
    """The error for a wrapper of ZeroShard that is wrapped by ``other``."""
    return InvalidArgumentError(
        f"a model that ZeroShard has wrapped is wrapped by {other} as well; remove {other} from "
        "the script, since the servers average the gradients"
    )

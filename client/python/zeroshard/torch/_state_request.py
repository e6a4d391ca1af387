"""Finds out what ``torch.distributed.checkpoint.state_dict`` asks of a sharded model or optimizer.

Its functions call ``state_dict()`` of the model and of the optimizer, without their options, and
gather the result themselves. A sharded model must know who calls: a script that calls
``state_dict()`` itself gets whole, plain tensors.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist

from .._core.sharding import Sharding
from ..errors import InvalidArgumentError

#: The module whose functions ask.
_ASKING = "torch.distributed.checkpoint.state_dict"
#: The packages through which a call of these functions reaches a model or an optimizer.
_PASSED = ("zeroshard.", "torch.nn.modules.module")
#: The module of torch's decorators, such as ``torch.no_grad()``.
_DECORATORS = "torch.utils._contextlib"
#: The local variable in which those functions have the options. It is private to torch: without it
#: every state dict is made of DTensors, which torch gathers itself, with more memory.
_OPTIONS = "info"


@dataclass(frozen=True)
class Request:
    """What is asked."""

    #: ``True`` if the tensors must be whole and plain. Otherwise each rank has its part.
    full: bool
    #: ``True`` if they must be in host memory.
    on_cpu: bool
    #: ``True`` if the call is part of one that loads a state.
    loads: bool
    #: ``True`` if torch broadcasts the tensors of rank 0.
    broadcasts: bool

    @property
    def is_for_another_rank(self) -> bool:
        """Returns whether torch drops the whole tensors of this rank: it keeps those in host memory
        on rank 0 only."""
        return self.full and self.on_cpu and dist.is_initialized() and dist.get_rank() != 0


def asked() -> Request | None:
    """What the caller is asked, or None if no function of that module has called it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_passed(frame):
        frame = frame.f_back
    if frame is None or _module(frame) != _ASKING:
        return None
    options: Any = None
    loads = False
    while frame is not None and _module(frame) in (_ASKING, _DECORATORS):
        options = frame.f_locals.get(_OPTIONS) if options is None else options
        loads = loads or frame.f_code.co_name.startswith("set_")
        frame = frame.f_back
    return Request(
        bool(getattr(options, "full_state_dict", False)),
        bool(getattr(options, "cpu_offload", False)),
        loads,
        bool(getattr(options, "broadcast_from_rank0", False)),
    )


def check_of_one_version(sharding: Sharding[Any]) -> None:
    """Raises an error if what the ranks read now, of the model and of the optimizer, may be of
    different versions."""
    if not sharding.reads.is_between_steps:
        raise InvalidArgumentError(
            "the state dict is requested while a step may change it, by another thread, a signal "
            "handler, or after a step that was interrupted, so that the ranks, or the model and "
            "the optimizer, could get different versions; call the function of "
            "torch.distributed.checkpoint.state_dict in the thread that trains, between two steps"
        )


def _is_passed(frame: FrameType) -> bool:
    # A class of the script may have its own `state_dict`, which calls that of its base class.
    return _module(frame).startswith(_PASSED) or frame.f_code.co_name == "state_dict"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))

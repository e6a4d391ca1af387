"""The attribute ``state`` of an optimizer whose state is on the shard servers.

It behaves as torch's dictionary. What the program reads is fetched, and what it writes, assigns or
removes takes effect at the next forward or step, with which the servers receive the whole state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _native
from .._core.job import ModelJob, State
from ..errors import InvalidArgumentError
from . import _conversion
from ._dtensor import local, part
from ._framework import TORCH

_REQUIRED = object()


class StateOnServers(defaultdict[Tensor, Any]):
    """The optimizer state by parameter. Its own elements are those that the program has read or set
    since the last step.

    It is true if the servers hold state. Otherwise ``torch.distributed.checkpoint.state_dict``
    would make a step to create the state.
    """

    def __init__(self, job: ModelJob[Tensor], optimizer: torch.optim.Optimizer) -> None:
        super().__init__(dict)
        self._job = job
        self._optimizer = optimizer
        #: The job and the version whose state was read.
        self._of: object = None
        #: Digests of what was read, and the parameters whose state the program has removed, by id.
        self._read: dict[int, object] = {}
        self._removed: set[int] = set()
        #: The ids of the parameters that have taken part in a step, and those that have state.
        self._applied: set[int] = set()
        self._stepped: set[int] = set()

    # ---- used by the sharded optimizer

    def edited(self) -> dict[int, State[Tensor]] | None:
        """The whole state with what the program has changed since the last step, by the id of the
        parameter. None if it has changed nothing.

        Raises :class:`~zeroshard.InvalidArgumentError` if it has changed what it had read before
        the last step.
        """
        changed, removed = self.changes()
        if not changed and not removed:
            return None
        states = {
            id(entry.tensor): held
            for entry, held in self._job.states(self._job.version)
            if id(entry.tensor) not in removed and entry.tensor not in changed
        }
        return states | optimizer_states(self._job.optimizer_name, self._optimizer, changed)

    def changes(self) -> tuple[dict[Tensor, Any], set[int]]:
        """What the program has changed since the last step: the state of parameters that it has
        written or set, and the ids of the parameters whose state it has removed. For errors see
        :meth:`edited`."""
        if super().__len__() or self._removed:
            self._follow()
        return self._changed(), set(self._removed)

    def settle(self) -> None:
        """Called when the servers have the changes."""
        own = dict(super().items())
        self.forget()
        self._follow()
        for parameter, state in own.items():
            self._read[id(parameter)] = _digest(state)
            super().__setitem__(parameter, state)

    def forget(self) -> None:
        """Drops what was read, and all changes."""
        super().clear()
        self._read.clear()
        self._removed.clear()
        self._of = None

    # ---- used by the program

    def __missing__(self, parameter: Tensor) -> dict[str, Any]:
        self._follow()
        state: dict[str, Any] = {}
        if id(parameter) in self._stepped - self._removed:
            found = next(self._job.states(self._job.version, only=parameter), None)
            if found is not None:
                state = _conversion.to_torch(self._job.optimizer_name, found[1])
        self._read.setdefault(id(parameter), _digest(state))
        super().__setitem__(parameter, state)
        return state

    def __getitem__(self, parameter: Tensor) -> Any:
        self._follow()
        return super().__getitem__(parameter)

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        self._follow()
        self._read.setdefault(id(parameter), None)
        super().__setitem__(parameter, state)

    def __delitem__(self, parameter: Tensor) -> None:
        self.pop(parameter)

    def __contains__(self, parameter: object) -> bool:
        self._follow()
        if super().__contains__(parameter):
            return True
        return id(parameter) in self._stepped - self._removed

    def __bool__(self) -> bool:
        self._follow()
        return super().__len__() > 0 or bool(self._applied - self._removed)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[Tensor]:
        own = list(super().__iter__())
        trained = [entry.tensor for entry in self._job.trained if entry.tensor in self]
        known = {id(parameter) for parameter in trained}
        return iter(trained + [parameter for parameter in own if id(parameter) not in known])

    def __repr__(self) -> str:
        return f"<state of {len(self)} parameters on the shard servers>"

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def keys(self) -> Any:
        """The parameters that have state."""
        return list(self)

    def values(self) -> Any:
        """The state of each parameter."""
        return [self[parameter] for parameter in self]

    def items(self) -> Any:
        """The parameters that have state, and the state of each."""
        return [(parameter, self[parameter]) for parameter in self]

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """The state of a parameter, or ``default``."""
        return self[parameter] if parameter in self else default

    def setdefault(self, parameter: Tensor, default: Any = None) -> Any:
        """The state of a parameter, which is ``default`` if it had none."""
        if parameter not in self:
            self[parameter] = default
        return self[parameter]

    def pop(self, parameter: Tensor, default: Any = _REQUIRED) -> Any:
        """Removes the state of a parameter, which begins anew, and returns it."""
        if parameter not in self:
            if default is _REQUIRED:
                raise KeyError(f"a parameter of shape {list(parameter.shape)} without state")
            return default
        state = self[parameter]
        super().pop(parameter)
        self._read.pop(id(parameter), None)
        if id(parameter) in self._stepped:
            self._removed.add(id(parameter))
        return state

    def popitem(self) -> Any:
        """Removes the state of the last parameter, and returns both."""
        if not self:
            raise KeyError("no parameter has state")
        parameter = self.keys()[-1]
        return parameter, self.pop(parameter)

    def clear(self) -> None:
        """Removes the state of all parameters, which begin anew."""
        self._follow()
        super().clear()
        self._read.clear()
        self._removed = set(self._stepped)

    def update(self, *given: Any, **_: Any) -> None:
        """Sets the state of some parameters."""
        for parameter, state in dict(*given).items():
            self[parameter] = state

    # ---- internal

    def _changed(self) -> dict[Tensor, Any]:
        # The own elements: `self.items()` would fetch all others.
        return {
            parameter: state
            for parameter, state in super().items()
            if _digest(state) != self._read.get(id(parameter))
        }

    def _follow(self) -> None:
        """Begins with the current version."""
        current = (self._job.job, self._job.version)
        if self._of == current:
            return
        changed = self._changed()
        self.forget()
        if changed:
            raise InvalidArgumentError(
                "the program has written to optimizer.state that it had read before step "
                f"{self._job.version - 1}; read optimizer.state[parameter] again after each step, "
                "and write to it before the next backward pass"
            )
        self._of = current
        applied = self._job.job.applied_steps(self._job.version)
        stepped = [entry for entry in self._job.trained if applied[entry.index][0]]
        self._applied = {id(entry.tensor) for entry in stepped}
        if self._job.optimizer_name == "sgd":  # which has no state without momentum
            stepped = [entry for entry in stepped if self._job.used_state[entry.group]]
        self._stepped = {id(entry.tensor) for entry in stepped}


def _digest(state: Any) -> object:
    """What is compared of the state of a parameter: hashes of tensors, and other values."""
    if not isinstance(state, Mapping):
        return state
    found: dict[str, object] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            host = value.detach().to("cpu", torch.float32).contiguous()
            [digest] = _native.hashes([TORCH.array(host)])
            found[name] = tuple(value.shape), digest
        else:
            found[name] = value
    return found


def optimizer_states(
    name: str, optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]
) -> dict[int, State[Tensor]]:
    """torch's state in the servers' form, by the id of the parameter. Parameters that were never
    updated are omitted."""
    states: dict[int, State[Tensor]] = {}
    for group in optimizer.param_groups:
        values = _conversion.hyperparameters(name, group)
        for parameter in group["params"]:
            if parameter in state:
                had = {
                    key: part(_conversion.repeated(key, value, parameter.shape), parameter)
                    if isinstance(value, Tensor)
                    else value
                    for key, value in state[parameter].items()
                }
                found = _conversion.from_torch(name, values, had, local(parameter).shape)
                if found[0] or found[2]:
                    states[id(parameter)] = found
    return states

"""The attribute ``state`` of an optimizer whose state is on the shard servers.

It behaves as torch's dictionary. What the program reads is fetched, and what it writes, assigns or
removes takes effect at the next forward or step, with which the servers receive the whole state.
What the servers do not hold, such as Lookahead's slow weights, stays in this process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _native
from .._core.entry import Entry
from .._core.job import ModelJob
from .._core.optimizer_spec import State
from .._core.stored import stored_states
from ..errors import InvalidArgumentError
from . import _conversion
from ._dtensor import local, part
from ._framework import TORCH
from ._packed import fingerprint, mapped
from ._rank_optimizer import TorchRankOptimizer
from ._state_request import asked

_REQUIRED = object()


class StateOnServers(defaultdict[Tensor, Any]):
    """The optimizer state by parameter. Its own elements are those that the program has read or set
    since the last step. It is true if the servers hold state."""

    def __init__(self, job: ModelJob[Tensor], optimizer: torch.optim.Optimizer) -> None:
        super().__init__(dict)
        self._job = job
        self._optimizer = optimizer
        #: The state of all optimizers of the model.
        self.joined = [self]
        #: The job and the version whose state was read.
        self._of: object = None
        #: Digests of what was read, and the parameters whose state the program has removed, by id.
        self._read: dict[int, object] = {}
        self._removed: set[int] = set()
        #: The ids of the parameters that have taken part in a step, and those that have state.
        self._applied: set[int] = set()
        self._stepped: set[int] = set()
        #: By parameter: the keys of its state that only the script uses.
        self._extra: dict[Tensor, dict[str, Any]] = {}

    # ---- used by the sharded optimizer

    def replace_local(self, given: Mapping[Any, Any]) -> None:
        """Drops what was read, and all changes. Takes from a whole state, by parameter, what the
        servers do not hold."""
        self.forget()
        super().clear()
        self._extra.clear()
        stepped = self._parameters()
        for key, state in given.items():
            if id(key) not in stepped:
                super().__setitem__(key, state)
            elif extra := self._extra_of(key, state):
                self._extra[key] = extra

    def not_held(self, given: Mapping[Any, Any]) -> dict[Any, Any]:
        """Of a whole state, by parameter, what the servers do not hold."""
        stepped = self._parameters()
        return {
            key: self._extra_of(key, state)
            if id(key) in stepped and isinstance(state, Mapping)
            else state
            for key, state in given.items()
        }

    def names(self, parameter: Tensor) -> tuple[list[str], list[str]]:
        """The keys of the state of a parameter that the servers hold, or will hold after its first
        step: of numbers, and of tensors."""
        for number, group in zip(self._numbers(), self._optimizer.param_groups):
            if any(parameter is one for one in group["params"]):
                used = self._job.optimizer.used[number : number + 1]
                kind, _ = self._job.optimizer.groups()[number]
                shape = local(parameter).shape
                return _conversion.state_names_of(kind, group, shape, set().union(*used))
        return [], []

    def _numbers(self) -> list[int]:
        """The numbers in the job of this optimizer's parameter groups."""
        every = self._job.optimizer.settings.parameters()
        numbers = {id(parameters): number for number, parameters in enumerate(every)}
        return [numbers[id(group["params"])] for group in self._optimizer.param_groups]

    def _held_names(self, key: Tensor) -> frozenset[str]:
        """The keys of the state of a parameter, which may be new, that the servers hold. None for
        another key of the script."""
        entry = self._job.find(key)
        if entry is not None and entry.optimized:
            return _conversion.state_names(self._job.optimizer.kind(entry))
        optimizer = self._job.optimizer
        every = zip(optimizer.groups(), optimizer.settings.parameters(), strict=True)
        kinds = (kind for (kind, _), own in every if any(key is one for one in own))
        return frozenset().union(*map(_conversion.state_names, kinds))

    def local_state(self) -> dict[Any, Any]:
        """The state that the servers do not hold: by parameter, and by other keys of the script."""
        self._keep_extra()
        stepped = self._parameters()
        own = {key: state for key, state in super().items() if id(key) not in stepped}
        return {**self._extra, **own}

    def edited(self) -> dict[int, State[Tensor]] | None:
        """The whole state with what the program has changed since the last step, by the id of the
        parameter. None if it has changed nothing.

        Raises :class:`~zeroshard.InvalidArgumentError` if it has changed what it had read before
        the last step.
        """
        found = [each.changes() for each in self.joined]
        if not any(changed or removed for changed, removed in found):
            return None
        replaced = {id(key) for changed, _ in found for key in changed}
        replaced = replaced.union(*(removed for _, removed in found))
        states = {
            id(entry.tensor): held
            for entry, held in stored_states(self._job, self._job.version)
            if id(entry.tensor) not in replaced
        }
        for each, (changed, removed) in zip(self.joined, found, strict=True):
            for key in removed:
                each._drop(key)
            groups = self._job.optimizer.groups()
            kinds = [groups[number][0] for number in each._numbers()]
            states |= optimizer_states(kinds, each._optimizer, changed, on_ranks(self._job))
        return states

    def _drop(self, key: int) -> None:
        """The program has removed the state of the parameter with this id."""
        for entry in self._job.trained:
            ranks = rank_optimizer_of(self._job, entry.tensor)
            if id(entry.tensor) == key and ranks is not None:
                ranks.give(entry.tensor, {})

    def changes(self) -> tuple[dict[Tensor, Any], set[int]]:
        """What the program has changed since the last step: the state of parameters that it has
        written or set, and the ids of the parameters whose state it has removed. For errors see
        :meth:`edited`."""
        if super().__len__() or self._removed:
            self._follow()
        return self._changed(), set(self._removed)

    def settle(self) -> None:
        """Called when the servers have the changes."""
        for each in self.joined:
            each._settle()

    def _settle(self) -> None:
        self._keep_extra()
        own = self._of_parameters()
        self.forget()
        self._follow()
        for parameter, state in own.items():
            self._read[id(parameter)] = self._digest(parameter, state)
            super().__setitem__(parameter, state)

    def forget(self) -> None:
        """Drops what was read of the servers, and all changes."""
        for parameter in self._of_parameters():
            super().pop(parameter)
        self._read.clear()
        self._removed.clear()
        self._of = None

    # ---- used by the program

    def __missing__(self, parameter: Tensor) -> dict[str, Any]:
        if asked() is not None:
            # It looks up the names only, and the values would stay here.
            numbers, tensors = self.names(parameter)
            return dict.fromkeys([*numbers, *tensors, *self._extra.get(parameter, ())])
        self._follow()
        state: dict[str, Any] = {}
        if id(parameter) in self._stepped - self._removed:
            found = next(stored_states(self._job, self._job.version, only=parameter), None)
            if found is not None:
                state = torch_state(self._job, self._job.version, *found)
        self._read.setdefault(id(parameter), self._digest(parameter, state))
        state.update(self._extra.get(parameter, {}))
        super().__setitem__(parameter, state)
        return state

    def __getitem__(self, parameter: Tensor) -> Any:
        self._follow()
        return super().__getitem__(parameter)

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        self._follow()
        stepped = id(parameter) in self._stepped
        self._read.setdefault(id(parameter), None if stepped else self._digest(parameter, {}))
        super().__setitem__(parameter, state)

    def __delitem__(self, parameter: Tensor) -> None:
        self.pop(parameter)

    def __contains__(self, parameter: object) -> bool:
        self._follow()
        if super().__contains__(parameter) or parameter in self._extra:
            return True
        return id(parameter) in self._stepped - self._removed

    def __bool__(self) -> bool:
        if asked() is not None:
            # Otherwise it would make a step to create the state.
            return True
        self._follow()
        return super().__len__() > 0 or bool(self._extra or self._applied - self._removed)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[Tensor]:
        own = [*super().__iter__(), *self._extra]
        trained = [entry.tensor for entry in self._job.trained if entry.tensor in self]
        known = {id(parameter) for parameter in trained}
        others = {id(key): key for key in own if id(key) not in known}
        return iter([*trained, *others.values()])

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
                is_tensor = isinstance(parameter, Tensor)
                raise KeyError(
                    f"a parameter of shape {list(parameter.shape)} without state"
                    if is_tensor
                    else parameter
                )
            return default
        state = self[parameter]
        super().pop(parameter)
        self._extra.pop(parameter, None)
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
        self._extra.clear()
        self._read.clear()
        self._removed = set(self._stepped)

    def update(self, *given: Any, **_: Any) -> None:
        """Sets the state of some parameters."""
        for parameter, state in dict(*given).items():
            self[parameter] = state

    # ---- internal

    def _parameters(self) -> set[int]:
        """The ids of the optimizer's parameters: the servers hold no state of other keys."""
        return {id(p) for group in self._optimizer.param_groups for p in group["params"]}

    def _of_parameters(self) -> dict[Tensor, Any]:
        # The own elements: `self.items()` would fetch all others.
        stepped = self._parameters()
        return {key: state for key, state in super().items() if id(key) in stepped}

    def _changed(self) -> dict[Tensor, Any]:
        return {
            parameter: state
            for parameter, state in self._of_parameters().items()
            if self._digest(parameter, state) != self._read.get(id(parameter))
        }

    def _keep_extra(self) -> None:
        """Records the keys that only the script uses, of the states that it has read or set."""
        for parameter, state in self._of_parameters().items():
            self._extra.pop(parameter, None)
            if extra := self._extra_of(parameter, state):
                self._extra[parameter] = extra

    def _is_on_ranks(self, parameter: Tensor) -> bool:
        """Returns whether the servers keep the parameter's state as it is."""
        return rank_optimizer_of(self._job, parameter) is not None

    def _extra_of(self, parameter: Tensor, state: Any) -> dict[str, Any]:
        if not isinstance(state, Mapping) or self._is_on_ranks(parameter):
            return {}
        held = self._held_names(parameter)
        return {name: value for name, value in state.items() if name not in held}

    def _digest(self, parameter: Tensor, state: Any) -> object:
        """What is compared of the state of a parameter: hashes of tensors, and other values that
        the servers hold."""
        if self._is_on_ranks(parameter):
            return fingerprint(state, "the state that the script has set")
        if not isinstance(state, Mapping):
            return state
        held, found = self._held_names(parameter), {}
        for name in held & state.keys():
            value: Any = state[name]
            if isinstance(value, Tensor):
                host = value.detach().to("cpu", torch.float32).contiguous()
                [digest] = _native.hashes([TORCH.array(host)])
                value = tuple(value.shape), digest
            found[name] = value
        return found

    def _follow(self) -> None:
        """Begins with the current version."""
        current = (self._job.job, self._job.version)
        if self._of == current:
            return
        changed = self._changed()
        self._keep_extra()
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
        stepped = [
            entry
            for entry in stepped
            # SGD has no state without momentum.
            if self._job.optimizer.kind(entry) != "sgd"
            or self._job.optimizer.used[entry.group]
            or self._is_on_ranks(entry.tensor)
        ]
        self._stepped = {id(entry.tensor) for entry in stepped}
        if len(self.joined) > 1:
            own = self._parameters()
            self._applied, self._stepped = self._applied & own, self._stepped & own


def on_ranks(job: ModelJob[Tensor]) -> TorchRankOptimizer | None:
    """The part of the job's optimizer that runs on the ranks."""
    ranks = job.optimizer.on_ranks
    assert ranks is None or isinstance(ranks, TorchRankOptimizer)
    return ranks


def rank_optimizer_of(job: ModelJob[Tensor], parameter: Tensor) -> TorchRankOptimizer | None:
    """The part of the job's optimizer that runs on the ranks, if it updates the parameter."""
    ranks = on_ranks(job)
    return ranks if ranks is not None and ranks.runs(parameter) else None


def torch_state(
    job: ModelJob[Tensor], version: int, entry: Entry[Tensor], held: State[Tensor]
) -> dict[str, Any]:
    """The state of a parameter in torch's format. ``held``: what the servers' optimizer has."""
    ranks = rank_optimizer_of(job, entry.tensor)
    if ranks is not None:
        return ranks.read(job, version, entry.tensor)
    return _conversion.to_torch(job.optimizer.kind(entry), held)


def optimizer_states(
    kinds: Sequence[str],
    optimizer: torch.optim.Optimizer,
    state: Mapping[Any, Any],
    ranks: TorchRankOptimizer | None = None,
    uploader: int = 0,
) -> dict[int, State[Tensor]]:
    """torch's state in the servers' form, by the id of the parameter. Parameters that were never
    updated are omitted.

    Args:
        kinds: the servers' name of the optimizer of each parameter group.
        ranks: the part of the optimizer that runs on the ranks, which is given its state.
        uploader: the rank of the world that uploads what is not distributed.
    """
    states: dict[int, State[Tensor]] = {}
    for name, group in zip(kinds, optimizer.param_groups, strict=True):
        if ranks is not None and ranks.has_group(group):
            for parameter in group["params"]:
                if parameter in state:
                    ranks.give(parameter, mapped(state[parameter], _whole))
                    if state[parameter]:
                        states[id(parameter)] = 1, (), {}
            continue
        values = _conversion.hyperparameters(name, group)
        for parameter in group["params"]:
            if parameter in state:
                had = {
                    key: part(_conversion.repeated(key, value, parameter.shape), parameter)
                    if isinstance(value, Tensor)
                    else value
                    for key, value in state[parameter].items()
                }
                shape = local(parameter).shape
                found = _conversion.from_torch(name, values, had, shape, uploader)
                if found[0] or found[2]:
                    states[id(parameter)] = found
    return states


def _whole(value: Any) -> Any:
    """The whole of a part of a state. Every rank must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def as_loaded(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A loaded state, by parameter: as torch's ``load_state_dict``, tensors have the device, and
    floating-point tensors the dtype, of the parameter."""

    def cast(value: Any, parameter: Tensor) -> Any:
        if isinstance(value, Tensor):
            dtype = parameter.dtype if parameter.is_floating_point() else value.dtype
            return value.to(parameter.device, dtype)
        if isinstance(value, Mapping):
            return {name: cast(each, parameter) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(cast(each, parameter) for each in value)
        return value

    return {
        key: cast(value, key) if isinstance(key, Tensor) else value for key, value in state.items()
    }

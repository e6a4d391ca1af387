"""The optimizer of a job: what of it is a part of the job's specification, which cannot change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeAlias

from .. import _native
from ..errors import InvalidArgumentError
from .entry import Entry
from .hyperparameters import reserving
from .optimizer_settings import Optimizer
from .parameters import Parameters
from .rank_state import RankState
from .tensors import T

#: The optimizer state of a parameter: the number of applied steps, the scalar state after them, and
#: host tensors by name.
State: TypeAlias = tuple[int, Sequence[float], Mapping[str, T]]


class OptimizerSpec(Generic[T]):
    """The optimizer of the current job."""

    def __init__(self, settings: Optimizer[T], on_ranks: RankState[T] | None) -> None:
        """``on_ranks``: the state of the part of the optimizer that runs on the ranks."""
        self.settings = settings
        self.on_ranks = on_ranks
        #: The servers' name of the optimizer of each parameter group.
        self.kinds: list[str] = []
        #: The state tensors that each parameter group has used so far. They stay on the servers
        #: when the program changes a hyperparameter so that steps do not use them any more.
        self.used: list[set[str]] = []
        #: The ids of the parameters of each parameter group, and the optimizer of each group with
        #: all state tensors that the servers keep.
        self._members: list[list[int]] = []
        self._reserved: list[_native.Optimizer] = []

    def groups(self) -> list[tuple[str, dict[str, float]]]:
        """The current optimizer of each parameter group, and its hyperparameters."""
        return self.settings.groups()

    def kind(self, entry: Entry[T]) -> str:
        """The servers' name of the optimizer of a trained entry."""
        return self.kinds[entry.group]

    def members(self) -> list[list[int]]:
        """The ids of the parameters of each parameter group, as they are now."""
        return [[id(parameter) for parameter in group] for group in self.settings.parameters()]

    def needs_whole(self, entry: Entry[T]) -> bool:
        """Returns whether the servers must not cut a tensor, if it is trained."""
        return _native.Optimizer(self.kinds[entry.group]).needs_whole_tensors

    # ---- the specification of a job

    def follow_kinds(self) -> None:
        """The next job has the optimizers as they are now."""
        self.kinds = self._current_kinds()

    def reserve(self, states: Mapping[int, State[T]]) -> list[tuple[str, dict[str, float]]]:
        """Called when a job begins, with the existing state by the ``id`` of its parameter. Adds
        the state tensors of the next step, and those in ``states``, to those that the servers keep.
        Returns hyperparameters with which every group has those of all groups with the same
        optimizer. Groups that run on the ranks have none."""
        groups, used = self.settings.parameters(), self._state_used()
        self._members = self.members()
        self.used += [set() for _ in groups[len(self.used) :]]
        for number, (parameters, names) in enumerate(zip(groups, used, strict=True)):
            given = (states[id(p)][2] for p in parameters if id(p) in states)
            self.used[number] |= names.union(*given)
        kept: dict[str, set[str]] = {}
        for kind, names in zip(self.kinds, self.used):
            kept.setdefault(kind, set()).update(names)
        reserved = [
            (kind, values if self._runs_on_ranks(group) else reserving(kind, values, kept[kind]))
            for group, (kind, values) in zip(groups, self.groups(), strict=True)
        ]
        self._reserved = [_native.Optimizer(*values) for values in reserved]
        return reserved

    def changed(self, entries: Iterable[Entry[T]], framework: Parameters[T]) -> bool:
        """Returns whether the program has changed the specification of the job with these entries.

        A parameter that was trained before stays a part of the specification while it is frozen:
        no rank has a gradient of it, so that steps keep its values and its optimizer state.
        """
        used = self._state_used()
        if self.members() != self._members or self._current_kinds() != self.kinds:
            return True
        kept = (optimizer.state for optimizer in self._reserved)
        return not all(names <= set(own) for names, own in zip(used, kept, strict=True)) or any(
            entry.optimized
            and not entry.trained
            and framework.is_stepped(entry.tensor)
            or entry.trained
            and entry.clips != framework.clips(entry.tensor)
            for entry in entries
        )

    def begin_step(self) -> None:
        """Called before each step, which may use state tensors that a group has not used before.

        Raises :class:`~zeroshard.InvalidArgumentError` if the servers do not begin to use them as
        the framework does.
        """
        for number, (names, (_, values)) in enumerate(zip(self._state_used(), self.groups())):
            if not names <= self.used[number] and values.get("dampening"):
                raise InvalidArgumentError(
                    f"the momentum of parameter group {number} was 0 until now, while other groups "
                    "have momentum, and its dampening is not 0; set the momentum before the first "
                    "step, or the dampening to 0"
                )
            self.used[number] |= names

    def check_state_grows(self, has_stepped: Callable[[], bool]) -> None:
        """Raises :class:`~zeroshard.InvalidArgumentError` if the next step uses a state tensor that
        the optimizer cannot begin to keep after its first step. (SGD can.)"""
        kept: dict[str, set[str]] = {}
        for kind, optimizer in zip(self.kinds, self._reserved, strict=True):
            kept.setdefault(kind, set()).update(optimizer.state)
        for kind, used in zip(self._current_kinds(), self._state_used(), strict=True):
            missing = sorted(used - kept.get(kind, used))
            if missing and kind != "sgd" and has_stepped():
                raise InvalidArgumentError(
                    f"a hyperparameter of {kind} was changed after its first step, and the next "
                    f"step uses the state {missing[0]!r}, which the optimizer has not kept; set "
                    "the hyperparameter before the first step, or load a state that has it with "
                    "load_state_dict"
                )

    # ---- state tensors

    def state_names(self, entry: Entry[T]) -> list[str]:
        """The names of the state tensors of a trained entry that was updated. The state of an
        optimizer that runs on the ranks is in tensors of its own."""
        if self.on_ranks is not None and self.on_ranks.runs(entry.tensor):
            return []
        names = self._reserved[entry.group].state_of(entry.shape)
        return [name for name in names if name in self.used[entry.group]]

    def _state_used(self) -> list[set[str]]:
        """The state tensors that the next step uses, by parameter group."""
        return [set(_native.Optimizer(*values).state) for values in self.groups()]

    def _current_kinds(self) -> list[str]:
        return [kind for kind, _ in self.groups()]

    def _runs_on_ranks(self, parameters: Sequence[T]) -> bool:
        return self.on_ranks is not None and any(map(self.on_ranks.runs, parameters))

"""Optimizers of torch that the servers do not have. They run on the rank that owns a parameter, and
the servers keep their state in slots: tensors of the job that do not train.

A parameter has one slot with the text of its state (see ``_packed``), and one for each tensor in
it. Optimizers that change their parameter groups in a step have a slot for these changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._core.entry import Entry
from .._core.job import ModelJob
from .._core.rank_optimizer import Due, RankOptimizer
from .._native import Array
from ..errors import InvalidArgumentError
from . import _trial
from ._framework import TORCH
from ._packed import as_bytes, from_bytes, mapped, on_cpu, pack, unpack
from ._slots import Held, Slots, Stepped
from .optim import NAMES

#: Parameters are fetched together up to this number of bytes, so that small ones take few requests.
_TOGETHER = 1 << 26
#: Bytes of a text at least; longer ones get four times what they have in the trial.
_TEXT = 1024
#: The optimizers of torch that update each parameter by itself, besides those that the servers
#: have: SGD, Adam and so on.
_SEPARABLE = ("Muon", "Rprop")


@dataclass
class _Run:
    """An optimizer that runs on the ranks."""

    plain: torch.optim.Optimizer
    #: ``True`` if its parameters are stepped one by one.
    is_separable: bool
    #: The slot with what it changes in its parameter groups; None if it changes nothing.
    slot: str | None = None
    #: The hyperparameters that it changes.
    changing: set[str] = field(default_factory=set)
    trials: dict[object, _trial.Found] = field(default_factory=dict)


class TorchRankOptimizer(RankOptimizer[Tensor]):
    """The optimizers of one model that run on the ranks."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], separable: bool | None) -> None:
        for optimizer in optimizers:
            _trial.check_runs(optimizer)
        self._separable = separable
        self._runs = [_Run(plain, self._is_separable(plain)) for plain in optimizers]
        self._slots: dict[int, Slots] = {}
        #: The state that the program has set, by the id of its parameter.
        self._given: dict[int, Any] = {}
        #: The first values of the slots of the job that is being opened, by name.
        self._initial: dict[str, Tensor] = {}

    def _is_separable(self, plain: torch.optim.Optimizer) -> bool:
        if self._separable is not None:
            return self._separable
        known = {*NAMES, *(getattr(torch.optim, name, None) for name in _SEPARABLE)}
        return type(plain) in known

    # ---- parameter groups

    def has_group(self, group: Mapping[str, Any]) -> bool:
        """Returns whether a parameter group is of an optimizer that runs on the ranks."""
        return any(group is each for run in self._runs for each in run.plain.param_groups)

    @property
    def name(self) -> str:
        return " and ".join(_trial.class_name(run.plain) for run in self._runs)

    def runs(self, parameter: Tensor) -> bool:
        return id(parameter) in self._slots

    def alike(self) -> dict[str, str]:
        return {
            f"optimizer {number} that runs on the ranks": f"{_trial.class_name(run.plain)}, "
            + ("parameter by parameter" if run.is_separable else "as a whole")
            for number, run in enumerate(self._runs)
        }

    def hyperparameter_hashes(self) -> Mapping[int, int]:
        hashes: dict[int, int] = {}
        for run in self._runs:
            for group in run.plain.param_groups:
                own = _hash(repr(sorted(_comparable(group).items())))
                hashes.update((id(parameter), own) for parameter in group["params"])
        return hashes

    # ---- state

    def slots(self, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
        slots: dict[int, Slots] = {}
        for number, run in enumerate(self._runs):
            for group in run.plain.param_groups:
                for parameter in group["params"]:
                    held = self._slots.get(id(parameter))
                    if held or id(parameter) in self._given or TORCH.is_stepped(parameter):
                        found = self._found(run, group, parameter)
                        run.changing |= found.changed
                        declared = self._declared(names[id(parameter)], parameter, found, held)
                        slots[id(parameter)] = declared
            run.slot = f"optimizer groups/{number}" if run.changing else None
        # The state of a parameter that the program has removed stays on the servers.
        removed = {key: held for key, held in self._slots.items() if key in names}
        self._slots = removed | slots
        self._initial.clear()
        for run in self._runs:
            if run.slot is not None:
                self._initial[run.slot] = as_bytes("", _TEXT * 4, run.slot)
                yield run.slot, torch.empty(_TEXT * 4, dtype=torch.uint8, device="meta")
        for key, own in self._slots.items():
            self._fill(key, own)
            yield own.name, torch.empty(own.capacity, dtype=torch.uint8, device="meta")
            for path, tensor in own.tensors.items():
                yield own.slot(path), tensor

    def units(self) -> Iterator[tuple[list[Tensor], list[str]]]:
        for run in self._runs:
            members = (each for group in run.plain.param_groups for each in group["params"])
            own = [self._slots[id(each)] for each in members if id(each) in self._slots]
            if run.is_separable:
                yield from (([slots.parameter], slots.names) for slots in own)
            else:
                names = [name for slots in own for name in slots.names]
                of_groups = [] if run.slot is None else [run.slot]
                yield [slots.parameter for slots in own], names + of_groups

    def _found(self, run: _Run, group: dict[str, Any], parameter: Tensor) -> _trial.Found:
        if TORCH.layout(parameter) is not None:
            raise InvalidArgumentError(
                f"{_trial.class_name(run.plain)} runs on the ranks, and a parameter of shape "
                f"{list(parameter.shape)} is distributed over them (DTensor), so that no rank has "
                "the whole of it; use an optimizer that the servers have"
            )
        key = id(group), tuple(parameter.shape), parameter.device
        if key not in run.trials:
            run.trials[key] = _trial.run_trial(run.plain, group, parameter)
        found = run.trials[key]
        if found.changed and run.is_separable:
            raise InvalidArgumentError(
                f"{_trial.class_name(run.plain)} changes {sorted(found.changed)[0]!r} of its "
                "parameter groups in a step, and therefore cannot step its parameters one by one; "
                "pass separable=False"
            )
        return found

    def _declared(
        self, name: str, parameter: Tensor, found: _trial.Found, earlier: Slots | None
    ) -> Slots:
        tensors, text = dict(found.tensors), found.text
        if id(parameter) in self._given:
            text, given = pack(self._given[id(parameter)], f"the state of parameter {name!r}")
            for path, tensor in given.items():
                if path not in tensors or tensors[path].shape != tensor.shape:
                    tensors[path] = tensor.to("meta")
        capacity = max(_TEXT, 4 * len(text) // _TEXT * _TEXT)
        if earlier is not None and id(parameter) not in self._given:
            # The servers keep what they have.
            tensors, capacity = tensors | earlier.tensors, earlier.capacity
        return Slots(f"optimizer/{name}", parameter, capacity, tensors, found.on_cpu, found.text)

    def _fill(self, key: int, slots: Slots) -> None:
        """Determines the first values of the slots of a parameter."""
        state = self._given.get(key)
        if not state:
            self._initial[slots.name] = torch.zeros(slots.capacity, dtype=torch.uint8)
            return
        text, tensors = pack(state, slots.name)
        self._initial[slots.name] = as_bytes(text, slots.capacity, slots.name)
        for path, tensor in tensors.items():
            # The state of a bf16 parameter becomes that of its f32 master weights.
            own = tensor.to("cpu", slots.tensors[path].dtype)
            self._initial[slots.slot(path)] = own

    def initial(self, slot: str) -> Tensor:
        held = self._initial.get(slot)
        if held is not None:
            return held
        for slots in self._slots.values():
            if slot.startswith(f"{slots.name}/"):
                tensor = slots.tensors[slot.removeprefix(f"{slots.name}/")]
                # Untouched pages of zeros take no memory.
                return torch.zeros(tensor.shape, dtype=tensor.dtype)
        raise AssertionError(f"{slot} is a slot")

    def is_given(self, slot: str) -> bool:
        if self._given and any(slot == run.slot for run in self._runs):
            return True
        names = (self._slots[key].name for key in self._given if key in self._slots)
        return any(slot == name or slot.startswith(f"{name}/") for name in names)

    def give(self, parameter: Tensor, state: Any) -> None:
        """The program sets the state of a parameter. The servers have it when a job has been
        opened."""
        self._given[id(parameter)] = state

    def settle(self) -> None:
        self._given.clear()
        self._initial.clear()

    def read(self, job: ModelJob[Tensor], version: int, parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter at a version, in host memory."""
        slots = self._slots[id(parameter)]
        held = Held(slots, torch.device("cpu"))
        job.fetch(held.arrays(job), version=version, part="master", label=f"fetching {slots.name}")
        state: dict[str, Any] = held.state(on_cpu)
        return state

    def read_parts(
        self,
        job: ModelJob[Tensor],
        parameter: Tensor,
        read: Callable[[Entry[Tensor]], Tensor],
        tensor_of: Callable[[Entry[Tensor]], Tensor],
    ) -> dict[str, Any]:
        """The state of a parameter, with tensors of the caller's.

        Args:
            read: returns the values of a slot.
            tensor_of: returns what stands for the values of the slot of a tensor.
        """
        slots = self._slots[id(parameter)]
        text = from_bytes(read(job.entries[job.index_of(slots.name)]))
        tensors = {
            path: tensor_of(job.entries[job.index_of(slots.slot(path))]) for path in slots.tensors
        }
        state: dict[str, Any] = unpack(text, tensors, on_cpu, has_values=False) if text else {}
        return state

    def example(
        self, parameter: Tensor, make: Callable[[torch.Size, torch.dtype], Tensor]
    ) -> dict[str, Any]:
        """A state with the structure that the parameter's has after its first steps, and numbers
        that are 0. ``make``: makes its tensors."""
        slots = self._slots[id(parameter)]
        tensors = {path: make(each.shape, each.dtype) for path, each in slots.tensors.items()}

        def zero(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value if value.ndim else torch.zeros_like(value)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return type(value)(0) if is_number else value

        state: dict[str, Any] = mapped(
            unpack(slots.example, tensors, on_cpu, has_values=False), zero
        )
        return state

    def follow(self, job: ModelJob[Tensor]) -> None:
        for run in self._runs:
            if run.slot is None:
                continue
            text = torch.empty(_TEXT * 4, dtype=torch.uint8)
            incoming = TORCH.incoming_words(text)
            index = job.index_of(run.slot)
            job.fetch([(index, incoming.array)], version=job.version, part="master")
            incoming.finish()
            kept = from_bytes(text)
            changed = unpack(kept, {}, on_cpu, has_values=True) if kept else {}
            for number, values in changed.items():
                run.plain.param_groups[number].update(values)
                run.changing.update(values)

    # ---- a step

    def step(self, job: ModelJob[Tensor], due: Sequence[Due[Tensor]]) -> None:
        for run in self._runs:
            members = {id(p) for group in run.plain.param_groups for p in group["params"]}
            own = [one for one in due if id(one.entry.tensor) in members]
            calls = [[one] for one in own] if run.is_separable else [own] if own else []
            for batch in self._batches(calls):
                self._step_batch(job, run, batch)

    def _batches(
        self, calls: Iterable[Sequence[Due[Tensor]]]
    ) -> Iterator[list[Sequence[Due[Tensor]]]]:
        batch: list[Sequence[Due[Tensor]]] = []
        size = 0
        for call in calls:
            nbytes = sum(self._slots[id(one.entry.tensor)].nbytes for one in call)
            if batch and size + nbytes > _TOGETHER:
                yield batch
                batch, size = [], 0
            batch.append(call)
            size += nbytes
        if batch:
            yield batch

    def _step_batch(
        self, job: ModelJob[Tensor], run: _Run, calls: Sequence[Sequence[Due[Tensor]]]
    ) -> None:
        """Updates the parameters of a few calls of ``step()``, and waits until the servers have
        them."""
        steps = [
            [Stepped(one, self._slots[id(one.entry.tensor)]) for one in call] for call in calls
        ]
        stepped = [one for call in steps for one in call]
        arrays = [array for one in stepped for array in one.arrays(job)]
        job.fetch(arrays, version=job.version, part="master")
        job.job.gradient_sums(job.version, [one.gradient() for one in stepped])
        sent: list[tuple[int, Array]] = []
        for call in steps:
            sent += self._updated(job, run, call)
        job.job.replace(job.version, sent)
        job.job.flush()

    def _updated(
        self, job: ModelJob[Tensor], run: _Run, call: Sequence[Stepped]
    ) -> list[tuple[int, Array]]:
        """Calls ``step()`` for some parameters. Returns what is sent."""
        made = {id(one.slots.parameter): one.scratch() for one in call}
        held = {made[id(one.slots.parameter)]: one.held.state(one.slots.device_of) for one in call}
        state: dict[Tensor, Any] = {key: own for key, own in held.items() if own}
        groups = _trial.in_groups(run.plain.param_groups, made)
        first = call[0]
        seed = _hash(f"{job.job.name} {job.version} {first.due.entry.name}")
        with _trial.seeded(seed, first.slots.device):
            twin = _trial.step(run.plain, list(groups.values()), state)
        sent = []
        for one in call:
            parameter = made[id(one.slots.parameter)]
            if parameter.dtype != torch.float32 or parameter.shape != one.slots.parameter.shape:
                raise InvalidArgumentError(
                    f"{_trial.class_name(run.plain)} has made parameter {one.due.entry.name!r} "
                    f"{parameter.dtype} of shape {list(parameter.shape)}; an optimizer must change "
                    "neither"
                )
            sent.append((one.due.entry.index, TORCH.outgoing(parameter.detach())))
            sent += one.held.outgoing(job, twin.state.get(parameter, {}))
        sent += self._changed_groups(job, run, groups)
        return sent

    def _changed_groups(
        self, job: ModelJob[Tensor], run: _Run, groups: Mapping[int, dict[str, Any]]
    ) -> list[tuple[int, Array]]:
        """What a step has changed in the parameter groups."""
        name, before = _trial.class_name(run.plain), run.plain.param_groups
        changed = {key for at, own in groups.items() for key in _trial.changes(before[at], own)}
        if run.slot is None:
            if changed:
                raise InvalidArgumentError(
                    f"{name} has changed {min(changed)!r} of its parameter groups, which it has "
                    "not done in a trial of two steps, so that the servers do not keep it; keep it "
                    "in state[parameter]"
                )
            return []
        run.changing |= changed
        after = {at: groups.get(at, group) for at, group in enumerate(before)}
        kept = {
            at: {key: value for key, value in group.items() if key in run.changing}
            for at, group in after.items()
        }
        text, tensors = pack(kept, f"the parameter groups of {name}")
        if tensors:
            raise InvalidArgumentError(
                f"{name} changes the tensor {next(iter(tensors))!r} of its parameter groups in a "
                "step, and the servers keep only numbers of groups; keep it in state[parameter]"
            )
        values = as_bytes(text, _TEXT * 4, f"the parameter groups of {name}")
        return [(job.index_of(run.slot), TORCH.outgoing_words(values))]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1


def _comparable(group: Mapping[str, Any]) -> dict[str, str]:
    """The hyperparameters of a group as text. Of objects and functions only the class, since their
    text may differ between processes."""
    plain = (bool, int, float, str, list, tuple, type(None), Tensor)
    return {
        key: repr(value.tolist() if isinstance(value, Tensor) else value)
        if isinstance(value, plain)
        else type(value).__name__
        for key, value in group.items()
        if key != "params"
    }

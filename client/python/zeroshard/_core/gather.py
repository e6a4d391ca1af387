"""Gathered parameters: they are on the servers, are fetched when they are used, and are freed
afterwards.

A unit (as in FSDP) is the set of large parameters of one module. A parameter keeps its identity and
shape. It is fetched by the first of these events:

- its module's forward begins, or is predicted from the order of the last pass (prefetching);
- an operation reads it, wherever in the program, as far as the framework can detect it
  (``Gathering.guard``);
- backward needs it or a view of it (hooks for saved tensors).

It is freed when no forward that used it is running, and during backward when its gradient is
complete. A view that the program still refers to (``w = layer.weight.t()``) keeps the memory alive.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic

from .._native import Schedule
from .._shown import holders
from ..errors import Error
from .gathering import Gathering
from .heap import Heap
from .holdings import Holdings
from .interrupts import operation
from .job import ModelJob
from .tensors import T
from .traffic import Traffic
from .unit import Unit

#: Unused memory that is kept for later: that of so many units of typical size. A transformer block
#: has four units.
_UNUSED = 4


class _RunningForward(Generic[T]):
    """A forward that is running."""

    def __init__(self) -> None:
        self.used: list[Unit[T]] = []
        self.hooks: AbstractContextManager[Any] | None = None


class Gatherer(Generic[T]):
    """Decides which units are gathered."""

    def __init__(self, job: ModelJob[T], traffic: Traffic[T], model: Any, ahead: bool) -> None:
        """``ahead`` enables prefetching."""
        self.job = job
        self._traffic = traffic
        self.framework: Gathering[T] = job.framework
        # What a group exchanges is copied.
        self.memory = self.framework.parameter_memory(shown=traffic.group_size == 1)
        self.holdings = Holdings(self.framework, self.memory)
        self.units: list[Unit[T]] = []
        #: By the id of the parameter.
        self._unit_of: dict[int, Unit[T]] = {}
        self._forwards: list[_RunningForward[T]] = []
        #: The thread that runs passes.
        self._thread: int | None = None
        self._prefetched: set[int] = set()
        #: Units that were used outside of any forward. They are kept until the next forward or
        #: step.
        self._kept: set[Unit[T]] = set()
        #: Units that a function transformation has used since the last step.
        self._held: set[Unit[T]] = set()
        self._pass: Hashable = None
        self._frozen: list[Unit[T]] = []
        self._find_units(model)
        sizes = [unit.nbytes for unit in self.units]
        self._schedule = Schedule([], 0) if ahead else None
        #: The bytes of a typical forward, which uses one unit, or several if it is compiled.
        self._typical = -1
        # Not the largest: in a small model that is an embedding as large as all other units.
        self._expect(statistics.median_low(sizes) if sizes else 0)
        self.memory.limit = _UNUSED * self._typical
        self.holdings.count(sum(sizes))
        for unit in self.units:
            unit.free()
        self._heap = Heap(sizes)
        holders.add(self)

    def free_shown(self) -> None:
        """As :meth:`zeroshard._shown.Holder.free_shown`."""
        is_running = self._forwards or self.framework.in_backward()
        if is_running or self._thread != threading.get_ident():
            return
        for unit in self.units:
            if unit.shown and unit not in self._kept and unit not in self._held:
                unit.free(outdated=True)
        self.memory.new_version()

    def has(self, parameter: T) -> bool:
        """Returns whether the parameter is one of a unit."""
        return id(parameter) in self._unit_of

    def _find_units(self, model: Any) -> None:
        seen: set[int] = set()
        own: dict[Any, Unit[T]] = {}
        modules = list(self.framework.modules(model))
        for module in modules:
            large = {
                name: parameter
                for name, parameter in self.framework.own_parameters(module)
                if id(parameter) not in seen and not self.job.entry(parameter).resident
            }
            tied = {
                name: parameter
                for name, parameter in self.framework.own_parameters(module)
                if id(parameter) in seen
            }
            if tied:
                self.framework.guard_tied(module, tied)
            if large:
                seen.update(map(id, large.values()))
                own[module] = self._add_unit(module, large)
        used: dict[Any, list[Unit[T]]] = {}
        for module in modules:
            borrowed = (self._unit_of.get(id(p)) for p in self.framework.borrowed(module))
            units = dict.fromkeys((own.get(module), *borrowed))
            used[module] = [unit for unit in units if unit is not None]
        for module in modules:
            if any(used[child] for child in self.framework.modules(module)):
                self.framework.around_forward(module, self._begin(used[module]), self._end)

    def _add_unit(self, module: Any, parameters: dict[str, T]) -> Unit[T]:
        unit = Unit(self.job, self._traffic, self.holdings, len(self.units), parameters)
        self.units.append(unit)
        self._unit_of.update((id(parameter), unit) for parameter in parameters.values())
        self.framework.guard(
            module,
            parameters,
            lambda: self.access(unit),
            lambda: self.expose(unit),
            lambda parameter: self._renew(unit, parameter),
            lambda: self._release(unit),
        )
        return unit

    # ---- forward

    def forward_with(
        self, parameters: Iterable[T]
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """The functions to be called before and after a forward that uses all of these parameters,
        which need not be those of one module."""
        found = {id(p): self._unit_of[id(p)] for p in parameters if id(p) in self._unit_of}
        units = list(dict.fromkeys(found.values()))
        self._expect(sum(unit.nbytes for unit in units))
        return self._begin(units), self._end

    def _expect(self, nbytes: int) -> None:
        """Adapts prefetching and the memory pool to a forward that uses units of this size."""
        if nbytes <= self._typical:
            return
        self._typical = nbytes
        self.memory.limit = max(self.memory.limit, 2 * nbytes)
        if self._schedule is not None:
            self._schedule = Schedule([unit.nbytes for unit in self.units], nbytes)

    def _begin(self, units: list[Unit[T]]) -> Callable[[], None]:
        def begin() -> None:
            transforming = self.framework.is_transforming()
            with self.framework.outside_transforms():
                self._enter_forward(units, transforming)

        return begin

    def _enter_forward(self, units: list[Unit[T]], transforming: bool) -> None:
        forward = _RunningForward[T]()
        outermost = not self._forwards and not self.framework.in_backward()
        self._forwards.append(forward)
        if outermost:
            self._thread = threading.get_ident()
            self.settle(together=self._trains())
            if not transforming:
                forward.hooks = self.framework.saved_tensors(self._pack, _unpack)
                forward.hooks.__enter__()
        # What servers show is there until the next version.
        needed = units if transforming else [unit for unit in units if not unit.shown]
        for unit in needed:
            unit.start(self._trains())
        for unit in needed:
            self._use(unit)
            if transforming:
                self._hold(unit)

    def _hold(self, unit: Unit[T]) -> None:
        """Keeps a unit that a transformation uses until the next step, since the tensors that it
        saves for backward cannot be replaced."""
        if unit not in self._held:
            self._held.add(unit)
            unit.expose()

    def _end(self) -> None:
        if self._forwards:
            with self.framework.outside_transforms():
                self._leave_forward()

    def unwind(self) -> None:
        """Ends the forwards that an exception such as KeyboardInterrupt has ended without calling
        their hooks."""
        while self._forwards:
            self._leave_forward()

    def _leave_forward(self) -> None:
        forward = self._forwards.pop()
        if forward.hooks is not None:
            forward.hooks.__exit__(None, None, None)
        for unit in forward.used:
            unit.users -= 1
            # A forward during backward is a recomputation: backward uses the unit next.
            if not self.framework.in_backward():
                self._free(unit)

    def access(self, unit: Unit[T]) -> AbstractContextManager[Any]:
        """Called before an operation reads one of the unit's parameters. Returns the context in
        which the operation runs."""
        if self.framework.is_transforming():
            with self.framework.outside_transforms():
                unit.finish()
                self._hold(unit)
            return nullcontext()
        if self._forwards:
            if not unit.shown:
                self._use(unit)
            return nullcontext()
        if self.framework.in_backward():
            self.need_in_backward(unit)
            return nullcontext()
        if unit not in self._kept:
            unit.finish()
            self._kept.add(unit)
            # The program may keep a view of it, and write to that.
            unit.expose()
        # The next forward frees the unit, before backward needs it.
        return self.framework.saved_tensors(self._pack, _unpack)

    def _renew(self, unit: Unit[T], parameter: T) -> T:
        """Gives a parameter of the unit other memory, which is not initialised."""
        self.expose(unit)
        value = self.memory.take(parameter)
        self.holdings.put(parameter, value)
        return value

    def expose(self, unit: Unit[T]) -> None:
        """Called before the program gets a view of the memory of one of the unit's parameters."""
        self.access(unit)
        unit.expose()

    def _use(self, unit: Unit[T]) -> None:
        forward = self._forwards[-1]
        if unit in forward.used:
            return
        forward.used.append(unit)
        unit.users += 1
        self._get(unit)
        if self.framework.in_backward():
            self._follow_backward(unit)

    def _get(self, unit: Unit[T]) -> None:
        unit.start(self._trains())
        ahead = self._schedule.use(unit.number) if self._schedule is not None else []
        self._prefetch(ahead, self._trains())
        unit.finish()

    def _trains(self) -> bool:
        """Returns whether all ranks run the current pass. Programs evaluate models on some ranks
        only."""
        return self.framework.is_recording()

    def _prefetch(self, numbers: list[int], together: bool) -> None:
        no_longer, self._prefetched = self._prefetched.difference(numbers), set(numbers)
        for number in no_longer:
            if self.units[number].node is None:  # otherwise backward is using it
                self._free(self.units[number])
        for number in numbers:
            self.units[number].start(together)

    def _free(self, unit: Unit[T]) -> None:
        if unit.number in self._prefetched or unit in self._kept or unit in self._held:
            return
        unit.free()

    @operation
    def settle(self, together: bool = False) -> None:
        """Frees all unused units, and prefetches the units that the next pass begins with.
        ``together``: all ranks of the group do this."""
        self._kept.clear()
        ahead = self._schedule.restart() if self._schedule is not None else []
        self._prefetched = set(ahead)
        for unit in self.units:
            self._free(unit)
        if together:
            # A rank that has evaluated the model alone may have other units than the others.
            self._traffic.compare_pulls(
                [unit.number for unit in self.units if unit.allocated], ahead
            )
        self._prefetch(ahead, together)

    def new_version(self, together: bool = False) -> None:
        """Frees all units, whose values are outdated after a step. No forward may be running.
        ``together``: all ranks of the group do this."""
        self.unwind()
        self._kept.clear()
        self._held.clear()
        self._prefetched = set()
        shown = [unit for unit in self.units if unit.shown]
        for unit in self.units:
            unit.free(outdated=True)
            if unit.shown:  # the program uses it, or has written to it
                unit.shown = False
                self.holdings.count(unit.nbytes)
        self.memory.new_version()
        self._gather([unit for unit in shown if not unit.allocated])
        self.settle(together)

    def _gather(self, units: list[Unit[T]]) -> None:
        """Gathers units that servers have shown, in one transfer, which moves no bytes. If it
        fails, the next forward fetches them again, and raises the error."""
        first, rest = units[:1], units[1:]
        self._gather_together(first)
        # If the servers now send the values, each unit is fetched when a forward needs it.
        if all(unit.shown for unit in first):
            self._gather_together(rest)

    def _gather_together(self, units: list[Unit[T]]) -> None:
        if not units:
            return
        try:
            transfer = self._traffic.pull(
                [one for unit in units for one in unit.prepare()], together=False
            )
            for unit in units:
                unit.fetch_by(transfer)
            for unit in units:
                unit.finish()
        except BaseException as error:
            for unit in units:
                unit.give_up()
            if not isinstance(error, Error):
                raise

    def restart(self) -> None:
        """Frees all units, also in the middle of a pass that an exception has ended."""
        self._backward_is_over()
        self.new_version()

    # ---- backward

    def need_in_backward(self, unit: Unit[T]) -> None:
        """Called before a node of the backward graph reads one of the unit's parameters."""
        if unit.shown:
            return
        again = unit.node is self.framework.backward_node()
        self._follow_backward(unit)
        if not (again and unit.gathered):
            self._get(unit)

    def _follow_backward(self, unit: Unit[T]) -> None:
        running = self.framework.backward_pass()
        if running != self._pass:
            self._pass = running
            self.framework.after_backward(self._backward_is_over)
        node = self.framework.backward_node()
        # A unit that trains is freed when its gradient is complete. A frozen unit is freed when the
        # node that needed it has run.
        for other in [other for other in self._frozen if other.node is not node]:
            self._frozen.remove(other)
            self._free(other)
        if unit.node is not node:
            unit.node = node
            if not any(
                self.job.entry(parameter).differentiable for parameter in unit.parameters.values()
            ):
                self._frozen.append(unit)

    def accumulated(self, parameter: T) -> None:
        """Called when the parameter's gradient is complete in this backward pass: no other node
        needs the parameter."""
        self._heap.settle()
        unit = self._unit_of.get(id(parameter))
        if unit is None or unit.shown:
            return
        unit.done.add(id(parameter))
        trained = {id(p) for p in unit.parameters.values() if self.job.entry(p).differentiable}
        if trained <= unit.done:
            unit.done.clear()
            self._free(unit)

    @operation
    def _backward_is_over(self) -> None:
        self._pass = None
        self._frozen.clear()
        for unit in self.units:
            unit.done.clear()
            unit.node = None
            self._free(unit)

    # ---- all at once

    def gather_all(self) -> None:
        """Fetches all units, and keeps them until :meth:`settle`."""
        for unit in self.units:
            unit.start()
        for unit in self.units:
            unit.finish()
            self._kept.add(unit)
            unit.expose()

    def _release(self, unit: Unit[T]) -> None:
        """Called when the unit's parameters have been copied."""
        self._kept.discard(unit)
        self._free(unit)

    # ---- saved tensors

    def _pack(self, saved: T) -> Any:
        """Replaces a saved tensor that is a view of a unit's parameter."""
        parameter = self.holdings.owner(saved)
        if parameter is None:
            return saved
        view = self.framework.view(saved, parameter)
        return saved if view is None else _Saved(self, self._unit_of[id(parameter)], view)


class _Saved(Generic[T]):
    """Stands for a view of a parameter, which is made when backward needs it."""

    def __init__(self, gatherer: Gatherer[T], unit: Unit[T], view: Callable[[], T]) -> None:
        self.gatherer = gatherer
        self.unit = unit
        self.view = view


def _unpack(packed: Any) -> Any:
    """Returns the saved tensor, or makes the view of the parameter's current memory."""
    if not isinstance(packed, _Saved):
        return packed
    packed.gatherer.need_in_backward(packed.unit)
    return packed.view()

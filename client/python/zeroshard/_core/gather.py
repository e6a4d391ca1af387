"""Parameters that live on the servers: fetched when they are used, freed afterwards.

The unit is a module with its own large parameters. A parameter keeps its identity and shape. Three
things bring it back, whichever comes first:

- its module's forward begins, or it was used there in the last pass: fetched ahead, in that order;
- something is computed with it, from wherever (as far as the framework can tell:
  ``Framework.guard``);
- backward needs it, or a view of it (hooks for saved tensors).

It is freed when no forward that used it is running any more, and in backward once its gradients are
complete. What a program still refers to (``w = layer.weight.t()``) keeps its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Generic

from .._native import Schedule, Transfer
from .framework import Incoming, T
from .job import ModelJob


class Unit(Generic[T]):
    """The large parameters of one module; all are here, or none."""

    def __init__(self, gatherer: Gatherer[T], number: int, parameters: dict[str, T]) -> None:
        self.gatherer = gatherer
        self.number = number
        #: By their name in the module.
        self.parameters = parameters
        self.nbytes = sum(map(gatherer.framework.nbytes, parameters.values()))
        self.here = True
        #: Forwards that are running and use it.
        self.users = 0
        self._fetch: tuple[Transfer, list[Incoming], list[T]] | None = None
        #: The node of the backward graph that it was fetched for.
        self.node: Any = None
        #: Parameters whose gradient is complete in this backward.
        self.done: set[int] = set()

    @property
    def held(self) -> bool:
        """Whether its memory is there, filled or being filled."""
        return self.here or self._fetch is not None

    @property
    def modified(self) -> bool:
        """Whether the program has written to it."""
        return any(
            self.gatherer.job.entry(parameter).modified for parameter in self.parameters.values()
        )

    def start(self) -> None:
        """Starts to fetch it, unless it is here or coming."""
        if self.held:
            return
        job, arrays, incoming, values = self.gatherer.job, [], [], []
        for parameter in self.parameters.values():
            values.append(self.gatherer.memory.take(parameter))
            incoming.append(self.gatherer.framework.incoming(values[-1]))
            arrays.append((job.entry(parameter).index, incoming[-1].array))
        self._fetch = (job.job.pull(job.version, arrays), incoming, values)

    def finish(self) -> None:
        """Waits until it is here."""
        self.start()
        if self._fetch is not None:
            transfer, incoming, values = self._fetch
            transfer.wait()
            for one in incoming:
                one.finish()
            self._fetch, self.here = None, True
            for parameter, value in zip(self.parameters.values(), values, strict=True):
                self.gatherer.put(self, parameter, value)

    def free(self) -> None:
        """Frees it, unless somebody uses it or the program has written to it (then the next job
        takes it over)."""
        if not self.held or self.users > 0 or self.modified:
            return
        if self._fetch is not None:
            # Nobody may write to memory that is given back.
            self._fetch[0].wait()
            self._fetch = None
        self.here, self.node = False, None
        for parameter in self.parameters.values():
            self.gatherer.drop(parameter)


class _Frame(Generic[T]):
    """One forward that is running."""

    def __init__(self) -> None:
        self.used: list[Unit[T]] = []
        self.hooks: AbstractContextManager[Any] | None = None


class Gatherer(Generic[T]):
    """Decides which units are here."""

    def __init__(
        self, job: ModelJob[T], model: Any, is_large: Callable[[T], bool], ahead: bool
    ) -> None:
        """``is_large`` says of a parameter whether it lives on the servers; ``ahead``: fetch before
        use."""
        self.job = job
        self.framework = job.framework
        self.units: list[Unit[T]] = []
        #: By the id of a parameter.
        self._unit_of: dict[int, Unit[T]] = {}
        #: Whose parameter a piece of memory has.
        self._by_memory: dict[Hashable, tuple[Unit[T], T]] = {}
        self._frames: list[_Frame[T]] = []
        self._ahead: set[int] = set()
        #: Used outside any forward: kept until the next forward or step.
        self._loose: set[Unit[T]] = set()
        self._pass: Hashable = None
        self._of_node: list[Unit[T]] = []
        self._find_units(model, is_large)
        sizes = [unit.nbytes for unit in self.units]
        largest = max(sizes, default=0)
        self._schedule = Schedule(sizes, largest) if ahead else None
        self.memory = self.framework.parameter_memory(2 * largest)
        for unit in self.units:
            unit.free()

    def put(self, unit: Unit[T], parameter: T, value: T) -> None:
        """Gives a parameter of a unit its elements."""
        self._by_memory.pop(self.framework.memory(parameter), None)
        self.memory.put(parameter, value)
        self._by_memory[self.framework.memory(value)] = (unit, parameter)

    def drop(self, parameter: T) -> None:
        """Takes them away."""
        self._by_memory.pop(self.framework.memory(parameter), None)
        self.memory.drop(parameter)

    def _find_units(self, model: Any, is_large: Callable[[T], bool]) -> None:
        seen: set[int] = set()
        own: dict[Any, Unit[T]] = {}
        modules = list(self.framework.modules(model))
        for module in modules:
            large = {
                name: parameter
                for name, parameter in self.framework.own_parameters(module)
                if id(parameter) not in seen and is_large(parameter)
            }
            if large:
                seen.update(map(id, large.values()))
                own[module] = self._add_unit(module, large)
        for module in modules:
            if any(child in own for child in self.framework.modules(module)):
                self.framework.around_forward(module, self._begin(own.get(module)), self._end)

    def _add_unit(self, module: Any, parameters: dict[str, T]) -> Unit[T]:
        unit = Unit(self, len(self.units), parameters)
        self.units.append(unit)
        self._unit_of.update((id(parameter), unit) for parameter in parameters.values())
        self.framework.guard(
            module, parameters, lambda: self.access(unit), lambda: self._release(unit)
        )
        return unit

    # ---- forward

    def _begin(self, unit: Unit[T] | None) -> Callable[[], None]:
        def begin() -> None:
            frame = _Frame[T]()
            outermost = not self._frames and not self.framework.in_backward()
            self._frames.append(frame)
            if outermost:
                self.settle()
                frame.hooks = self.framework.saved_tensors(self._pack, _unpack)
                frame.hooks.__enter__()
            if unit is not None:
                self._use(unit)

        return begin

    def _end(self) -> None:
        if self._frames:
            self._leave_frame()

    def unwind(self) -> None:
        """Ends the forwards that Ctrl-C has ended: no hook is called for that."""
        while self._frames:
            self._leave_frame()

    def _leave_frame(self) -> None:
        frame = self._frames.pop()
        if frame.hooks is not None:
            frame.hooks.__exit__(None, None, None)
        for unit in frame.used:
            unit.users -= 1
            # In backward this was a recomputation: the gradients come now.
            if not self.framework.in_backward():
                self._free(unit)

    def access(self, unit: Unit[T]) -> None:
        """Something is computed with one of its parameters."""
        if self._frames:
            self._use(unit)
        elif self.framework.in_backward():
            self.need_in_backward(unit)
        elif not unit.here:
            unit.finish()
            self._loose.add(unit)

    def _use(self, unit: Unit[T]) -> None:
        frame = self._frames[-1]
        if unit in frame.used:
            return
        frame.used.append(unit)
        unit.users += 1
        self._get(unit)
        if self.framework.in_backward():
            self._follow_backward(unit)

    def _get(self, unit: Unit[T]) -> None:
        unit.start()
        self._fetch_ahead(self._schedule.use(unit.number) if self._schedule is not None else [])
        unit.finish()

    def _fetch_ahead(self, numbers: list[int]) -> None:
        no_longer, self._ahead = self._ahead.difference(numbers), set(numbers)
        for number in no_longer:
            if self.units[number].node is None:  # else backward is at it
                self._free(self.units[number])
        for number in numbers:
            self.units[number].start()

    def _free(self, unit: Unit[T]) -> None:
        if unit.number not in self._ahead and unit not in self._loose:
            unit.free()

    def settle(self) -> None:
        """Frees what nobody uses, and fetches what the next pass begins with."""
        self._loose.clear()
        ahead = self._schedule.restart() if self._schedule is not None else []
        self._ahead = set(ahead)
        for unit in self.units:
            self._free(unit)
        self._fetch_ahead(ahead)

    def new_version(self) -> None:
        """The parameters have changed on the servers: what is here is old. No forward is
        running."""
        self.unwind()
        self._loose.clear()
        self._ahead = set()
        for unit in self.units:
            unit.free()
        self.settle()

    # ---- backward

    def need_in_backward(self, unit: Unit[T]) -> None:
        """A node of the backward graph is about to read one of its parameters."""
        again = unit.node is self.framework.backward_node()
        self._follow_backward(unit)
        if not (again and unit.here):
            self._get(unit)

    def _follow_backward(self, unit: Unit[T]) -> None:
        running = self.framework.backward_pass()
        if running != self._pass:
            self._pass = running
            self.framework.after_backward(self._backward_is_over)
        node = self.framework.backward_node()
        # What trains is freed with its gradient. The others, with the node that needed them: it has
        # run.
        for other in [other for other in self._of_node if other.node is not node]:
            self._of_node.remove(other)
            self._free(other)
        if unit.node is not node:
            unit.node = node
            if not any(
                self.job.entry(parameter).differentiable for parameter in unit.parameters.values()
            ):
                self._of_node.append(unit)

    def accumulated(self, parameter: T) -> None:
        """The parameter's gradient is complete in this backward: everything that needed the
        parameter has run."""
        unit = self._unit_of.get(id(parameter))
        if unit is None:
            return
        unit.done.add(id(parameter))
        trained = {id(p) for p in unit.parameters.values() if self.job.entry(p).differentiable}
        if trained <= unit.done:
            unit.done.clear()
            self._free(unit)

    def _backward_is_over(self) -> None:
        self._pass = None
        self._of_node.clear()
        for unit in self.units:
            unit.done.clear()
            unit.node = None
            self._free(unit)

    # ---- all at once

    def gather_all(self) -> None:
        """Fetches everything; it stays until :meth:`settle`."""
        for unit in self.units:
            unit.start()
        for unit in self.units:
            unit.finish()
            self._loose.add(unit)

    def _release(self, unit: Unit[T]) -> None:
        """Its elements have been copied."""
        self._loose.discard(unit)
        self._free(unit)

    # ---- what backward keeps

    def _pack(self, saved: T) -> Any:
        """Marks what autograd saves of a unit."""
        memory = self.framework.memory(saved)
        found = None if memory is None else self._by_memory.get(memory)
        if found is None:
            return saved
        unit, parameter = found
        view = self.framework.view(saved, parameter)
        return saved if view is None else _Saved(unit, view)


class _Saved(Generic[T]):
    """Stands for a view of a parameter, as it will be when it is needed."""

    def __init__(self, unit: Unit[T], view: Callable[[], T]) -> None:
        self.unit = unit
        self.view = view


def _unpack(packed: Any) -> Any:
    """The saved tensor, or the same view of the parameter as it is now in memory."""
    if not isinstance(packed, _Saved):
        return packed
    packed.unit.gatherer.need_in_backward(packed.unit)
    return packed.view()

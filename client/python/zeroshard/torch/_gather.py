"""Parameters that live on the servers: fetched when they are used, freed afterwards.

The unit is a module with its own large parameters. A parameter keeps its identity and shape; freed, its elements are all
one NaN. Three things bring it back, whichever comes first:

- its module's forward begins, or it was used there in the last pass: fetched ahead, in that order;
- any torch function is called with it, from wherever (:class:`GatheredParameter`);
- backward needs it, or a view of it (hooks for saved tensors).

It is freed when no forward that used it is running any more, and in backward once its gradients are complete. What a
program still refers to (``w = layer.weight.t()``) keeps its memory.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .._native import Schedule, Transfer
from ._job import ModelJob
from ._pool import Pool
from ._tensors import Incoming

#: What says something about a tensor without reading its elements.
_WITHOUT_DATA = {"data", "T", "H", "mT", "mH", "real", "imag"}
_METADATA: set[Any] = {
    access
    for name in dir(Tensor)
    if name not in _WITHOUT_DATA and isinstance(getattr(Tensor, name), types.GetSetDescriptorType)
    for access in (getattr(Tensor, name).__get__, getattr(Tensor, name).__set__, getattr(Tensor, name).__delete__)
} | {vars(torch._C.TensorBase)["data"].__set__} | {
    getattr(Tensor, name)
    for name in (
        "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_conj", "is_contiguous",
        "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_signed", "ndimension", "nelement", "numel",
        "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "size",
        "storage_offset", "stride", "untyped_storage",
    )
}  # fmt: skip


class GatheredParameter(nn.Parameter):
    """A parameter that is fetched when something is computed with it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _METADATA:
            _access_all(args)
            _access_all(tuple((kwargs or {}).values()))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _access_all(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, GatheredParameter):
            unit: Unit | None = getattr(value, "_zeroshard_unit", None)
            if unit is not None:
                unit.gatherer.access(unit)
        elif isinstance(value, list | tuple):
            _access_all(value)


class Unit:
    """The large parameters of one module; all are here, or none."""

    def __init__(self, gatherer: Gatherer, number: int, parameters: dict[str, Tensor]) -> None:
        self.gatherer = gatherer
        self.number = number
        #: By their name in the module.
        self.parameters = parameters
        self.nbytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
        self.here = True
        #: Forwards that are running and use it.
        self.users = 0
        #: The memory of its parameters, where it is not their own from the beginning.
        self._blocks: list[Tensor] = []
        self._layouts = [(tuple(p.shape), p.stride()) for p in parameters.values()]
        self._fetch: tuple[Transfer, list[Incoming], list[Tensor]] | None = None
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
        return any(self.gatherer.job.entry(parameter).modified for parameter in self.parameters.values())

    def start(self) -> None:
        """Starts to fetch it, unless it is here or coming."""
        if self.held:
            return
        job, arrays, incoming, values = self.gatherer.job, [], [], []
        for parameter, layout in zip(self.parameters.values(), self._layouts, strict=True):
            values.append(self._allocate(parameter).as_strided(*layout))
            incoming.append(Incoming(values[-1]))
            arrays.append((job.entry(parameter).index, incoming[-1].array))
        self._fetch = (job.job.pull(job.version, arrays), incoming, values)

    def _allocate(self, parameter: Tensor) -> Tensor:
        if parameter.device.type != "cpu":
            return torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        self._blocks.append(self.gatherer.pool.take(parameter.numel() * parameter.element_size()))
        return self._blocks[-1].view(parameter.dtype)

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
        """Frees it, unless somebody uses it or the program has written to it (then the next job takes it over)."""
        if not self.held or self.users > 0 or self.modified:
            return
        if self._fetch is not None:
            # Nobody may write to memory that is given back.
            self._fetch[0].wait()
            self._fetch = None
        self.here, self.node = False, None
        for parameter in self.parameters.values():
            self.gatherer.put(None, parameter, _stub(parameter))
        while self._blocks:
            self.gatherer.pool.give(self._blocks.pop())


def _stub(parameter: Tensor) -> Tensor:
    """A tensor of the parameter's shape in the memory of one element."""
    value = float("nan") if parameter.is_floating_point() else 0
    return torch.full((1,), value, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


class _Frame:
    """One forward that is running."""

    def __init__(self) -> None:
        self.used: list[Unit] = []
        self.hooks: saved_tensors_hooks | None = None


class Gatherer:
    """Decides which units are here."""

    def __init__(
        self, job: ModelJob, model: nn.Module, is_large: Callable[[nn.Module, Tensor], bool], ahead: bool
    ) -> None:
        """``is_large`` says of a module's parameter whether it lives on the servers; ``ahead``: fetch before use."""
        self.job = job
        self.units: list[Unit] = []
        #: Whose parameter a storage has.
        self._by_storage: dict[int, tuple[Unit, Tensor]] = {}
        self._frames: list[_Frame] = []
        self._ahead: set[int] = set()
        #: Used outside any forward: kept until the next forward or step.
        self._loose: set[Unit] = set()
        self._task: int | None = None
        self._of_node: list[Unit] = []
        self._find_units(model, is_large)
        sizes = [unit.nbytes for unit in self.units]
        largest = max(sizes, default=0)
        self._schedule = Schedule(sizes, largest) if ahead else None
        self.pool = Pool(2 * largest)
        for unit in self.units:
            unit.free()

    def put(self, unit: Unit | None, parameter: Tensor, value: Tensor) -> None:
        """Gives a parameter its elements; without a unit only a stub of them."""
        with torch._C.DisableTorchFunctionSubclass():
            self._by_storage.pop(parameter.untyped_storage()._cdata, None)
            parameter.data = value
            if unit is not None:
                self._by_storage[value.untyped_storage()._cdata] = (unit, parameter)

    def _find_units(self, model: nn.Module, is_large: Callable[[nn.Module, Tensor], bool]) -> None:
        seen: set[int] = set()
        own: dict[nn.Module, Unit] = {}
        for module in model.modules():
            large: dict[str, Tensor] = {
                name: parameter
                for name, parameter in module.named_parameters(recurse=False)
                if id(parameter) not in seen and is_large(module, parameter)
            }
            if large:
                seen.update(map(id, large.values()))
                own[module] = self._add_unit(module, large)
        for module in model.modules():
            if any(child in own for child in module.modules()):
                module.register_forward_pre_hook(self._begin(own.get(module)), prepend=True)
                module.register_forward_hook(self._end, always_call=True)

    def _add_unit(self, module: nn.Module, parameters: dict[str, Tensor]) -> Unit:
        unit = Unit(self, len(self.units), parameters)
        self.units.append(unit)
        for parameter in parameters.values():
            parameter.__class__ = GatheredParameter
            parameter._zeroshard_unit = unit  # type: ignore[attr-defined]
        module.register_state_dict_post_hook(_whole_state(unit))
        return unit

    # ---- forward

    def _begin(self, unit: Unit | None) -> Callable[..., None]:
        def begin(module: nn.Module, args: Any) -> None:
            frame = _Frame()
            outermost = not self._frames and not _in_backward()
            self._frames.append(frame)
            if outermost:
                self.settle()
                frame.hooks = saved_tensors_hooks(_Pack(self), _unpack)
                frame.hooks.__enter__()
            if unit is not None:
                self._use(unit)

        return begin

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._frames:
            self._leave_frame()

    def unwind(self) -> None:
        """Ends the forwards that Ctrl-C has ended: torch calls no hooks for that."""
        while self._frames:
            self._leave_frame()

    def _leave_frame(self) -> None:
        frame = self._frames.pop()
        if frame.hooks is not None:
            frame.hooks.__exit__(None, None, None)
        for unit in frame.used:
            unit.users -= 1
            # In backward this was a recomputation: the gradients come now.
            if not _in_backward():
                self._free(unit)

    def access(self, unit: Unit) -> None:
        """Something is computed with one of its parameters."""
        if self._frames:
            self._use(unit)
        elif _in_backward():
            self.need_in_backward(unit)
        elif not unit.here:
            unit.finish()
            self._loose.add(unit)

    def _use(self, unit: Unit) -> None:
        frame = self._frames[-1]
        if unit in frame.used:
            return
        frame.used.append(unit)
        unit.users += 1
        self._get(unit)
        if _in_backward():
            self._follow_backward(unit)

    def _get(self, unit: Unit) -> None:
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

    def _free(self, unit: Unit) -> None:
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
        """The parameters have changed on the servers: what is here is old. No forward is running."""
        self.unwind()
        self._loose.clear()
        self._ahead = set()
        for unit in self.units:
            unit.free()
        self.settle()

    # ---- backward

    def need_in_backward(self, unit: Unit) -> None:
        """A node of the backward graph is about to read one of its parameters."""
        again = unit.node is torch._C._current_autograd_node()
        self._follow_backward(unit)
        if not (again and unit.here):
            self._get(unit)

    def _follow_backward(self, unit: Unit) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_over)
        node = torch._C._current_autograd_node()
        # What trains is freed with its gradient. The others, with the node that needed them: it has run.
        for other in [other for other in self._of_node if other.node is not node]:
            self._of_node.remove(other)
            self._free(other)
        if unit.node is not node:
            unit.node = node
            if not any(self.job.entry(parameter).requires_grad for parameter in unit.parameters.values()):
                self._of_node.append(unit)

    def accumulated(self, parameter: Tensor) -> None:
        """The parameter's gradient is complete in this backward: everything that needed the parameter has run."""
        unit: Unit | None = getattr(parameter, "_zeroshard_unit", None)
        if unit is None:
            return
        unit.done.add(id(parameter))
        trained = {id(p) for p in unit.parameters.values() if self.job.entry(p).requires_grad}
        if trained <= unit.done:
            unit.done.clear()
            self._free(unit)

    def _backward_is_over(self) -> None:
        self._task = None
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


class _Pack:
    """Marks what autograd saves of a unit."""

    def __init__(self, gatherer: Gatherer) -> None:
        self._by_storage = gatherer._by_storage

    def __call__(self, saved: Tensor) -> Any:
        if saved.layout is not torch.strided:
            return saved
        found = self._by_storage.get(saved.untyped_storage()._cdata)
        if found is None or saved.dtype != found[1].dtype:
            return saved
        return *found, tuple(saved.shape), saved.stride(), saved.storage_offset()


def _unpack(packed: Any) -> Tensor:
    """The saved tensor, or the same view of the parameter as it is now in memory."""
    if isinstance(packed, Tensor):
        return packed
    unit, parameter, shape, stride, offset = packed
    unit.gatherer.need_in_backward(unit)
    with torch._C.DisableTorchFunctionSubclass():
        view: Tensor = parameter.detach().as_strided(shape, stride, offset)
    return view


def _whole_state(unit: Unit) -> Callable[..., None]:
    """A module's ``state_dict`` gets copies: the parameters themselves are about to be freed."""

    def hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in unit.parameters.items():
            value = state.get(prefix + name)
            if value is not None and value is not parameter:
                state[prefix + name] = value.clone()
        unit.gatherer._loose.discard(unit)
        unit.gatherer._free(unit)

    return hook


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1

"""Gives the tensors of a model on the meta device memory and values, module by module.

A module is initialised after its children, because constructors usually end with
``reset_parameters()``. With the same seed, random values are then those of an ordinary constructor,
if it creates the modules in the order in which it registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import InvalidArgumentError
from ._checkpoint import Checkpoint
from ._private import (
    DispatchMode,
    buffers_of,
    initialisers,
    parameters_of,
    share_tensor_hooks,
    swap,
    tree_leaves,
    version,
)

#: Operations whose results are not initialised.
_EMPTY = {
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
#: Integers of each size.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Elements that are searched for unset ones at a time.
_PIECE = 1 << 20


class Materializer:
    """The initialisation of one model."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str | None,
        param_init_fn: Callable[[nn.Module], Any] | None,
        checkpoints: Sequence[Checkpoint],
        is_source: bool,
    ) -> None:
        """``checkpoints``: of a tensor that several have, the value of the last one counts.
        ``is_source``: whether the values of this rank are those of all ranks.

        Raises :class:`~zeroshard.InvalidArgumentError` if it is known that the model cannot be
        initialised.
        """
        self._device = torch.device("cpu" if device is None else device)
        self._param_init_fn = param_init_fn
        self._loaded = {id(t): checkpoint for checkpoint in checkpoints for t in checkpoint.tensors}
        self._is_source = is_source
        self._names: dict[int, str] = {}
        #: The modules by name, and the tensors of each that no earlier module has.
        self._modules: list[tuple[str, nn.Module, list[Tensor]]] = []
        #: The names of the modules that are initialised.
        self._initialised: set[str] = set()
        #: For each tensor, how often it was written to before it had memory, and its counter of
        #: writes when it was given memory.
        self._writes: dict[int, tuple[int, int]] = {}
        #: The tensors that were given memory, and what they were on the meta device.
        self._given: list[tuple[Tensor, Tensor]] = []
        for name, module in _children_first(model, "", set()):
            self._plan(name, module)
        self._check_optimizer(optimizer)

    def fill(self, fetched: Collection[int]) -> Iterator[list[Tensor]]:
        """As the argument ``initial`` of :meth:`zeroshard._core.opening.Opening.open`."""
        held: list[Tensor] = []
        for name, module, tensors in self._modules:
            given = [tensor for tensor in tensors if tensor.is_meta]
            self._fill(name, module, tensors)
            ready, held = self._split([*held, *given], name)
            large = [tensor for tensor in ready if id(tensor) in fetched]
            if large:
                self._check_set(large)
                yield large
                for tensor in large:
                    _free(tensor)
        self._check_set([tensor for tensor, _ in self._given if not _has_no_memory(tensor)])

    def undo(self) -> None:
        """Returns the model to the meta device."""
        for tensor, before in self._given:
            swap(tensor, before)

    # ---- before the job

    def _plan(self, name: str, module: nn.Module) -> None:
        """Determines whether a module is initialised, and checks that it can be."""
        unset, first = [], []
        for key, _, tensor in _own(module):
            full = f"{name}.{key}" if name else key
            other = self._names.setdefault(id(tensor), full)
            if other == full:
                first.append(tensor)
            if not tensor.is_meta:
                continue
            if isinstance(tensor, DTensor):
                raise InvalidArgumentError(
                    f"{full!r} is a DTensor on the meta device, which is not supported; give the "
                    "model memory and values before group_sharded_parallel"
                )
            if self._is_loaded(tensor):
                continue
            if other != full and self._param_init_fn is None:
                raise InvalidArgumentError(
                    f"{other!r} and {full!r} are tied and on the meta device, and only one of "
                    f"their modules can initialise them; {_SAY_HOW}"
                )
            if other == full:
                unset.append(full)
        self._modules.append((name, module, first))
        if unset:
            self._initialised.add(name)
            if self._initialiser(module) is None:
                missing = ", are not in the checkpoint" if self._loaded else ""
                raise InvalidArgumentError(
                    f"{', '.join(map(repr, unset))} of module {name!r} ({type(module).__name__}) "
                    f"are on the meta device{missing}, and the module has no reset_parameters(); "
                    f"{_SAY_HOW}, or create the module outside of torch.device('meta')"
                )

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if parameter.is_meta and id(parameter) not in self._names:
                    raise InvalidArgumentError(
                        f"parameter {position} of group {number} of the optimizer is on the meta "
                        "device and does not belong to the model; give it memory and values"
                    )

    def _initialiser(self, module: nn.Module) -> Callable[[], Any] | None:
        if self._param_init_fn is not None:
            initialise = self._param_init_fn
            return lambda: initialise(module)
        return next(iter(initialisers(module)), None)

    def _is_loaded(self, tensor: Tensor) -> bool:
        return id(tensor) in self._loaded

    # ---- one module

    @torch.inference_mode(False)
    @torch.no_grad()
    def _fill(self, name: str, module: nn.Module, tensors: list[Tensor]) -> None:
        """Gives tensors of a module memory and values."""
        unset = []
        for tensor in tensors:
            if tensor.is_meta:
                written = version(tensor)
                self._given.append((tensor, _give_memory(tensor, self._device)))
                if not self._is_loaded(tensor):
                    _unset(tensor)
                    unset.append(tensor)
                self._writes[id(tensor)] = written, version(tensor)
        if unset:
            initialise = self._initialiser(module)
            assert initialise is not None
            own = list(_own(module))
            try:
                with _OwnTensors(name):
                    initialise()
                self._put_back(module, own)
            except BaseException:
                for key, registered, tensor in own:
                    registered[key] = tensor
                raise
        for tensor in tensors:
            # Of a distributed tensor, every rank has the values of its part.
            if self._is_loaded(tensor) and (self._is_source or isinstance(tensor, DTensor)):
                self._loaded[id(tensor)].read(tensor)

    def _put_back(self, module: nn.Module, own: list[tuple[str, dict[str, Any], Tensor]]) -> None:
        """Copies the values of tensors that have replaced those of a module, which the optimizer
        and the job know."""
        for key, registered, tensor in own:
            now = registered.get(key)
            if now is tensor:
                continue
            if now is None or now.shape != tensor.shape or now.dtype != tensor.dtype:
                raise InvalidArgumentError(
                    f"the initialisation of {self._names[id(tensor)]!r} has removed it or changed "
                    "its shape or dtype"
                )
            if _has_no_memory(tensor):
                raise InvalidArgumentError(
                    f"the initialisation of another module has replaced "
                    f"{self._names[id(tensor)]!r}, with which its parameter {key!r} is tied"
                )
            tensor.copy_(now)
            registered[key] = tensor
            if id(tensor) in self._writes:
                written = self._writes[id(tensor)][0]
                self._writes[id(tensor)] = written, version(tensor) - version(now)

    def _check_set(self, tensors: list[Tensor]) -> None:
        for tensor in tensors if self._is_source else ():
            if _is_unset(tensor):
                raise InvalidArgumentError(
                    f"the initialisation of the model has not set all elements of "
                    f"{self._names[id(tensor)]!r}; {_SAY_HOW}"
                )

    def _split(self, tensors: list[Tensor], name: str) -> tuple[list[Tensor], list[Tensor]]:
        """Separates tensors that have their values from those that a module around this one still
        writes to.

        Raises :class:`~zeroshard.InvalidArgumentError` if the constructor has written to a tensor
        in another way than ``reset_parameters()``.
        """
        ready, held = [], []
        for tensor in tensors:
            expected, before = self._writes[id(tensor)]
            written = version(tensor) - before
            if self._param_init_fn is not None or self._is_loaded(tensor) or written == expected:
                ready.append(tensor)
            elif written < expected and self._is_inside(name):
                held.append(tensor)
            else:
                raise InvalidArgumentError(
                    f"{self._names[id(tensor)]!r} was not initialised by reset_parameters() alone "
                    f"when the model was created: it was written to {expected} times, and by "
                    f"reset_parameters() {written} times; {_SAY_HOW} (for the values of "
                    "reset_parameters(): lambda module: module.reset_parameters())"
                )
        return ready, held

    def _is_inside(self, name: str) -> bool:
        """Returns whether a module around this one is initialised after it."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._initialised:
                return True
        return False


_SAY_HOW = (
    "pass param_init_fn, a function that initialises the parameters and buffers of the module that "
    "it is called with"
)


def check_has_shapes(model: nn.Module, what: str) -> None:
    """Raises an error if the model has lazy modules that have not run yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise InvalidArgumentError(
                f"{name!r} belongs to a lazy module and has no shape before the first forward; run "
                f"the model once on an example before {what}, and create the optimizer after that"
            )


def check_has_values(model: nn.Module, what: str) -> None:
    """Raises an error if the model has tensors on the meta device."""
    check_has_shapes(model, what)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise InvalidArgumentError(
                f"{name!r} is on the meta device and has no values; {what} needs the whole model "
                "on this worker: create it outside of torch.device('meta'), or call "
                "model.to_empty(device=...) and initialise it, or use group_sharded_parallel"
            )


class _OwnTensors(DispatchMode):
    """Raises an error if an initialisation uses a tensor of the model that has no memory, because
    its turn comes later, or because its values were sent."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and _has_no_memory(value):
                raise InvalidArgumentError(
                    f"the initialisation of module {self._module!r} uses a tensor of shape "
                    f"{list(value.shape)} that has no memory at this time; it may use only the "
                    "parameters and buffers of the module itself (to_empty needs recurse=False)"
                )
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _EMPTY:
            _unset(result)
        return result


def _children_first(
    module: nn.Module, name: str, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules by name, each once, children before their parents."""
    if module in seen:
        return
    seen.add(module)
    for key, child in module.named_children():
        yield from _children_first(child, f"{name}.{key}" if name else key, seen)
    yield name, module


def _own(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], Tensor]]:
    """The parameters and buffers of a module itself: name, where it is registered, tensor."""
    for registered in (parameters_of(module), buffers_of(module)):
        for key, tensor in list(registered.items()):
            if tensor is not None:
                yield key, registered, tensor


def _give_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Gives a tensor on the meta device memory. It remains the same object, with its hooks. Returns
    a tensor that is what it was."""
    fresh = torch.empty_like(tensor, device=device, requires_grad=tensor.requires_grad)
    share_tensor_hooks(tensor, fresh)
    # torch.utils.swap_tensors also exchanges the attributes, and refuses the parameters of an LSTM,
    # to which weak references exist.
    swap(tensor, fresh)
    return fresh


@torch.inference_mode(False)
def _free(tensor: Tensor) -> None:
    """Frees the memory of a tensor, which keeps its strides and device. The memory may belong to
    another tensor as well."""
    like = torch.empty_like(tensor, device="meta")
    tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    empty = torch.empty_like(like, device=tensor.device)
    empty.untyped_storage().resize_(0)
    tensor.data = empty


def _has_no_memory(tensor: Tensor) -> bool:
    if tensor.is_meta:
        return True
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    return tensor.untyped_storage().nbytes() == 0


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


def _unset(tensor: Tensor) -> None:
    """Marks the memory of a tensor as not initialised: with a NaN that computations do not produce,
    or with an improbable integer."""
    _bytes(tensor).fill_(0xFF if tensor.is_floating_point() or tensor.is_complex() else 0xA5)


def _is_unset(tensor: Tensor) -> bool:
    """Returns whether a floating-point element of a tensor has not been set, or no integer has."""
    if tensor.numel() == 0:
        return False
    elements = tensor.contiguous().reshape(-1)
    if tensor.is_floating_point() or tensor.is_complex():
        words = elements.view(_INTEGERS[min(tensor.element_size(), 8)])
        return any(bool((piece == -1).any()) for piece in words.split(_PIECE))
    return all(bool((piece == 0xA5).all()) for piece in elements.view(torch.uint8).split(_PIECE))

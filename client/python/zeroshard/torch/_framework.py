"""The adapter for PyTorch: tensors, modules, backward passes and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .._core.entry import Entry
from .._core.framework import Framework
from .._core.gathering import ParameterMemory
from .._core.mean import OpenGradients
from .._core.optimizer_settings import Optimizer
from .._core.parameters import Hook
from .._core.shown import Outside
from .._core.tensors import Incoming
from .._native import Array, Box, Layout
from .._rendezvous import ProcessGroup, distributed, world_group
from ..errors import InvalidArgumentError
from . import _conversion
from ._aside import set_aside
from ._collectives import TorchCollectives
from ._compiled import around_forward
from ._copies import COPIES, Copies, host_copy, is_held
from ._dtensor import aligned_gradient, distributed_as, layout, local
from ._gradient import GradientTensor
from ._mean_gradient import MeanGradient
from ._outside import OutsideGradient
from ._memory import PooledMemory, guard, guard_tied, unwatched
from ._panes import adopt, pane_of
from ._private import (
    after_backward,
    backward_node,
    backward_pass,
    buffers_of,
    gradient_hooks,
    memory_id,
    spec_of,
    version,
    without_torch_function,
)
from ._transforms import is_transformed, is_transforming, outside_transforms

#: The dtypes of parameters and gradients that the servers support.
_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class _Torch(Framework[Tensor]):
    # ---- tensors

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape)

    def layout(self, tensor: Tensor) -> Layout | None:
        return layout(tensor)

    def local_shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(local(tensor).shape)

    def dtype(self, tensor: Tensor) -> str | None:
        return _DTYPES.get(tensor.dtype)

    def dtype_text(self, tensor: Tensor) -> str:
        return str(tensor.dtype)

    def element_size(self, tensor: Tensor) -> int:
        return tensor.element_size()

    def changes(self, tensor: Tensor) -> int:
        return version(tensor)

    def collectives(self, ranks: Sequence[int], timeout: float) -> TorchCollectives:
        return TorchCollectives(ranks, timeout)

    # ---- the memory of local tensors

    def host(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(tuple(shape), dtype=torch.float32, device="cpu")

    def array(
        self,
        host: Tensor,
        box: Box | None = None,
        *,
        wait: Callable[[], None] | None = None,
        pulled: Callable[[], None] | None = None,
    ) -> Array:
        dtype = self.dtype_of("a tensor", host)
        address, numel = host.data_ptr(), host.numel()
        pane = pane_of(host) if box is None else None
        return Array(address, numel, dtype, host, box, pane=pane, wait=wait, pulled=pulled)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor, memory_format=torch.contiguous_format)

    def outgoing(self, tensor: Tensor) -> Array:
        with without_torch_function():
            tensor = local(tensor).detach()
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        copies = COPIES.get(tensor.device.type)
        if copies is not None:
            copy = copies.to_host(tensor)
            return self.array(copy.host, wait=copy.wait)
        if not _is_plain(tensor):
            tensor = host_copy(tensor, pinned=False).copy_(tensor)
        return self.array(tensor)

    def incoming(self, tensor: Tensor) -> Incoming:
        tensor = local(tensor).detach()
        copies = COPIES.get(tensor.device.type)
        return _Received(tensor) if copies is None else _ReceivedByDevice(tensor, copies)

    def outgoing_words(self, tensor: Tensor) -> Array:
        source = local(tensor).detach().cpu().contiguous().reshape(-1)
        padded = torch.zeros(self.words(tensor), dtype=torch.float32, device="cpu")
        padded.view(torch.uint8)[: self.nbytes(source)] = source.view(torch.uint8)
        return self.array(padded)

    def incoming_words(self, tensor: Tensor) -> Incoming:
        return _ReceivedWords(tensor)

    # ---- gradients

    def trains(self, tensor: Tensor) -> bool:
        return tensor.requires_grad

    def is_stepped(self, parameter: Tensor) -> bool:
        # torch steps a parameter that has a gradient from before it was frozen.
        return parameter.requires_grad or parameter.grad is not None

    def gradient(self, parameter: Tensor) -> Tensor | None:
        gradient = parameter.grad
        if not isinstance(gradient, GradientTensor):
            return aligned_gradient(parameter)
        # The program may have given the gradient of one parameter to another one.
        own = gradient.source.is_of(parameter)
        return gradient.source.own if own else gradient.source.values().clone()

    def set_gradient(self, parameter: Tensor, gradient: Tensor | None) -> None:
        parameter.grad = gradient

    def order_writes(self, gradient: Tensor) -> None:
        copies = COPIES.get(gradient.device.type)
        # A sparse gradient has been copied to a dense tensor.
        if copies is not None and not gradient.is_sparse and is_held(gradient):
            copies.precede(gradient.device)

    def show_mean(
        self, gradients: OpenGradients[Tensor], entry: Entry[Tensor], freed: bool
    ) -> MeanGradient | None:
        gradient = aligned_gradient(entry.tensor)
        if gradient is None or gradient.requires_grad:
            return None  # the program differentiates it
        mean = MeanGradient(gradients, entry, gradient)
        entry.tensor.grad = GradientTensor(mean, entry.tensor)
        return mean

    def show_absent(
        self, gradients: OpenGradients[Tensor], entry: Entry[Tensor]
    ) -> MeanGradient | None:
        mean = MeanGradient(gradients, entry, None)
        entry.tensor.grad = GradientTensor(mean, entry.tensor)
        return mean

    def may_differentiate(self, parameter: Tensor) -> bool:
        gradient = parameter.grad
        return gradient is not None and gradient.requires_grad

    def shown_mean(self, parameter: Tensor) -> MeanGradient | None:
        shown = _shown(parameter)
        return shown if isinstance(shown, MeanGradient) else None

    def given_gradient(self, parameter: Tensor) -> object:
        return parameter.grad

    def set_aside(self, gradient: Tensor) -> Tensor:
        # What the program writes to a gradient that a hook has kept would be lost.
        return gradient if is_held(gradient) else set_aside(gradient)

    def stand_in(self, parameter: Tensor) -> Tensor:
        with without_torch_function():
            one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
            return one.expand(parameter.shape).requires_grad_()

    def show_outside(self, outside: Outside[Tensor], entry: Entry[Tensor]) -> None:
        gradient = entry.tensor.grad
        if isinstance(gradient, GradientTensor) or gradient is not None and gradient.requires_grad:
            return  # it is shown, or the program differentiates it
        source = OutsideGradient(outside, entry, gradient)
        entry.tensor.grad = GradientTensor(source, entry.tensor)

    def hide_outside(self, parameter: Tensor) -> None:
        shown = _shown(parameter)
        if isinstance(shown, OutsideGradient):
            parameter.grad = shown.own

    def outside_gradient(self, parameter: Tensor) -> Tensor | None:
        shown = _shown(parameter)
        if not isinstance(shown, OutsideGradient) or shown.own is None:
            return None
        return shown.own.clone()

    def receive_outside(self, parameter: Tensor, mean: Tensor | None) -> None:
        shown = _shown(parameter)
        if isinstance(shown, OutsideGradient):
            shown.receive(self.zeros_like(parameter) if mean is None else mean)

    def own_elements(self, tensor: Tensor) -> Tensor:
        if tensor.is_sparse or 0 in tensor.stride():
            return tensor.to_dense().contiguous()
        return tensor

    def clips(self, parameter: Tensor) -> bool:
        return getattr(parameter, "need_clip", True) is not False

    def after_gradient(self, parameter: Tensor, call: Callable[[Tensor], None]) -> Hook:
        return _Hook(parameter, call)

    # ---- a backward pass

    def is_recording(self) -> bool:
        return torch.is_grad_enabled() or self.in_backward()

    def in_backward(self) -> bool:
        return backward_pass() != -1

    def backward_pass(self) -> Hashable:
        return backward_pass()

    def backward_node(self) -> Any:
        return backward_node()

    def after_backward(self, call: Callable[[], None]) -> None:
        after_backward(call)

    def is_transforming(self) -> bool:
        return is_transforming()

    def outside_transforms(self) -> AbstractContextManager[None]:
        return outside_transforms()

    # ---- modules

    def stays(self, module: nn.Module) -> bool:
        return isinstance(module, torch.jit.ScriptModule)

    def parameters(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        return model.named_parameters()

    def buffers(self, model: nn.Module) -> Iterable[tuple[str, Tensor]]:
        return model.named_buffers()

    def record_buffers(self, model: nn.Module) -> Callable[[], None]:
        # A forward may write to a buffer, or assign another tensor.
        held = [(module, dict(buffers_of(module))) for module in model.modules()]
        copies = [
            (buffer, buffer.detach().clone())
            for _, buffers in held
            for buffer in buffers.values()
            # torch refuses to write to elements that share memory.
            if buffer is not None and 0 not in buffer.stride()
        ]

        @torch.no_grad()
        def restore() -> None:
            for module, buffers in held:
                if isinstance(module, torch.jit.ScriptModule):
                    # Its buffers are members of a C++ object, which always has all of them.
                    for name, buffer in buffers.items():
                        setattr(module, name, buffer)
                else:
                    registered = buffers_of(module)
                    registered.clear()
                    registered.update(buffers)
            for buffer, values in copies:
                buffer.copy_(values)

        return restore

    def modules(self, model: nn.Module) -> Iterable[nn.Module]:
        return model.modules()

    def own_parameters(self, module: nn.Module) -> Iterable[tuple[str, Tensor]]:
        return module.named_parameters(recurse=False)

    def around_forward(
        self, module: nn.Module, begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        around_forward(module, begin, end)

    # ---- gathered parameters

    def adopt(self, parameter: Tensor) -> None:
        adopt(parameter)

    def parameter_memory(self, *, shown: bool) -> ParameterMemory[Tensor]:
        return PooledMemory(shown)

    def guard(
        self,
        module: nn.Module,
        parameters: dict[str, Tensor],
        access: Callable[[], AbstractContextManager[Any]],
        expose: Callable[[], None],
        renew: Callable[[Tensor], Tensor],
        release: Callable[[], None],
    ) -> None:
        guard(module, parameters, access, expose, renew, release)

    def guard_tied(self, module: nn.Module, parameters: dict[str, Tensor]) -> None:
        guard_tied(module, parameters)

    def memory(self, tensor: Tensor) -> Hashable | None:
        if tensor.layout is not torch.strided or is_transformed(tensor):
            return None
        with without_torch_function():
            return memory_id(local(tensor).untyped_storage())

    def alias(self, tensor: Tensor) -> object:
        return local(tensor).detach()

    def view(self, saved: Tensor, parameter: Tensor) -> Callable[[], Tensor] | None:
        if saved.dtype != parameter.dtype:
            return None
        values = local(saved)
        shape, stride, offset = values.shape, values.stride(), values.storage_offset()
        # The returned function must not keep `saved` alive, so that its memory can be freed.
        spec = spec_of(saved)

        def view() -> Tensor:
            with without_torch_function():
                again = local(parameter).detach().as_strided(shape, stride, offset)
                return again if spec is None else distributed_as(again, spec)

        return view

    def saved_tensors(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> AbstractContextManager[Any]:
        return saved_tensors_hooks(pack, unwatched(unpack))


def _shown(parameter: Tensor) -> MeanGradient | OutsideGradient | None:
    """What the parameter shows the program instead of this rank's gradient."""
    gradient = parameter.grad
    if not isinstance(gradient, GradientTensor) or not gradient.source.is_of(parameter):
        return None
    return gradient.source


class _Hook:
    """A hook of a parameter."""

    def __init__(self, parameter: Tensor, call: Callable[[Tensor], None]) -> None:
        self._handle = parameter.register_post_accumulate_grad_hook(unwatched(call))
        self._all = gradient_hooks(parameter)

    def remove(self) -> None:
        self._handle.remove()

    @property
    def is_last(self) -> bool:
        last, ours = next(reversed(self._all)), self._handle.id
        return bool(last == ours)


TORCH = _Torch()


class TorchOptimizer(Optimizer[Tensor]):
    """The settings of a ``torch.optim.Optimizer``."""

    def __init__(
        self,
        parts: Sequence[torch.optim.Optimizer],
        is_on_ranks: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> None:
        """``parts``: the optimizers of a model. ``is_on_ranks``: returns whether ranks step a
        parameter group; None: servers step all."""
        self._parts = parts
        self._is_on_ranks = is_on_ranks

    def parameters(self) -> list[list[Tensor]]:
        return [group["params"] for part in self._parts for group in part.param_groups]

    def kinds(self) -> list[str]:
        """The servers' name of the optimizer of each parameter group."""
        return [kind for kind, _ in self.groups()]

    def groups(self) -> list[tuple[str, dict[str, float]]]:
        return [group for part in self._parts for group in self._groups_of(part)]

    def _groups_of(self, part: torch.optim.Optimizer) -> list[tuple[str, dict[str, float]]]:
        if self._is_on_ranks is not None and any(map(self._is_on_ranks, part.param_groups)):
            return [_conversion.keeping() for _ in part.param_groups]
        name = _conversion.optimizer_name(part)
        return [(name, _conversion.hyperparameters(name, group)) for group in part.param_groups]


class _Received:
    """Memory that receives the values of ``tensor``: its own, or a host buffer."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._host = tensor if _is_plain(tensor) else host_copy(tensor, pinned=False)
        self.array = TORCH.array(self._host)

    def finish(self) -> None:
        if self._host is not self._tensor:
            self._tensor.copy_(self._host)


class _ReceivedByDevice:
    """Host memory that receives the values of a tensor on a device. They are copied to it as soon
    as they have been pulled."""

    def __init__(self, tensor: Tensor, copies: Copies) -> None:
        copy = copies.to_device(tensor)
        self.finish = copy.finish
        self.array = TORCH.array(copy.host, pulled=copy.start)


class _ReceivedWords:
    """Memory that receives the raw memory of ``tensor``."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = local(tensor)
        self._words = torch.empty(TORCH.words(tensor), dtype=torch.float32, device="cpu")
        self.array = TORCH.array(self._words)

    def finish(self) -> None:
        size = TORCH.nbytes(self._tensor)
        values = (
            self._words.view(torch.uint8)[:size]
            .view(self._tensor.dtype)
            .reshape(self._tensor.shape)
        )
        with torch.no_grad():
            self._tensor.copy_(values)


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether transfers can read and write the tensor's own memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj()


def process_group(group: Any | None) -> ProcessGroup:
    """The ranks of a process group of torch; all ranks if it is None."""
    if group is None:
        return world_group()
    dist = distributed()
    if dist is None:
        raise InvalidArgumentError(
            "group is given, but torch.distributed is not initialised; initialise it or pass None"
        )
    return ProcessGroup(dist.get_rank(group), tuple(dist.get_process_group_ranks(group)))

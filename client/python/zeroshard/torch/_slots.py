"""Where the servers keep the state of a parameter whose optimizer runs on the ranks, and scratch
copies of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._core.job import ModelJob
from .._core.rank_optimizer import Due
from .._native import Array, Box
from ..errors import InvalidArgumentError
from ._framework import TORCH
from ._packed import as_bytes, from_bytes, pack, unpack
from ._trial import scratch


@dataclass
class Slots:
    """Where the servers keep the state of one parameter."""

    name: str
    parameter: Tensor
    #: The bytes of its text.
    capacity: int
    #: Tensors without values, by their path in the state.
    tensors: dict[str, Tensor]
    #: The paths of the tensors that stay in host memory, wherever the parameter is.
    on_cpu: frozenset[str]
    #: The text of the state in the trial.
    example: str

    def slot(self, path: str) -> str:
        """The name of the slot of a tensor."""
        return f"{self.name}/{path}"

    @property
    def names(self) -> list[str]:
        """The names of all slots."""
        return [self.name, *map(self.slot, self.tensors)]

    @property
    def device(self) -> torch.device:
        """The device of the scratch copies."""
        return torch.device("cpu") if self.parameter.is_meta else self.parameter.device

    def device_of(self, path: str) -> torch.device:
        """The device on which the optimizer expects a tensor of the state."""
        return torch.device("cpu") if path in self.on_cpu else self.device

    @property
    def nbytes(self) -> int:
        """The bytes of the scratch copies: value, gradient and state."""
        state = sum(each.numel() * each.element_size() for each in self.tensors.values())
        return 8 * self.parameter.numel() + state


class Held:
    """Memory for the state of one parameter."""

    def __init__(self, slots: Slots, device: torch.device) -> None:
        self._slots = slots
        self._text = torch.empty(slots.capacity, dtype=torch.uint8)
        self._tensors = {
            path: torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            for path, tensor in slots.tensors.items()
        }
        self._incoming: list[Any] = []

    def arrays(self, job: ModelJob[Tensor]) -> list[tuple[int, Array]]:
        """What is fetched."""
        slots = self._slots
        named = {slots.name: self._text}
        named |= {slots.slot(path): tensor for path, tensor in self._tensors.items()}
        arrays = []
        for name, tensor in named.items():
            index = job.index_of(name)
            is_raw = job.entries[index].raw
            incoming = TORCH.incoming_words(tensor) if is_raw else TORCH.incoming(tensor)
            self._incoming.append(incoming)
            arrays.append((index, incoming.array))
        return arrays

    def state(self, device_of: Callable[[str], torch.device]) -> Any:
        """The state that was fetched. Empty if the parameter has none."""
        for incoming in self._incoming:
            incoming.finish()
        text = from_bytes(self._text)
        return unpack(text, self._tensors, device_of, has_values=True) if text else {}

    def outgoing(self, job: ModelJob[Tensor], state: Any) -> list[tuple[int, Array]]:
        """What is sent to replace it by ``state``."""
        slots = self._slots
        text, tensors = pack(state, slots.name)
        for path, tensor in tensors.items():
            slot = slots.tensors.get(path)
            if slot is None or (slot.shape, slot.dtype) != (tensor.shape, tensor.dtype):
                had = "nothing" if slot is None else f"{slot.dtype} of shape {list(slot.shape)}"
                raise InvalidArgumentError(
                    f"{slots.name} has {tensor.dtype} of shape {list(tensor.shape)} at {path!r}, "
                    f"and had {had} when its model was sharded; create all state in the first two "
                    "steps, and keep its shape"
                )
        values = as_bytes(text, slots.capacity, slots.name)
        sent = [(job.index_of(slots.name), TORCH.outgoing_words(values))]
        for path, tensor in tensors.items():
            index = job.index_of(slots.slot(path))
            is_raw = job.entries[index].raw
            sent.append((index, (TORCH.outgoing_words if is_raw else TORCH.outgoing)(tensor)))
        return sent


class Stepped:
    """Scratch copies of one parameter."""

    def __init__(self, due: Due[Tensor], slots: Slots) -> None:
        self.due, self.slots = due, slots
        self.held = Held(slots, slots.device)
        shape = tuple(slots.parameter.shape)
        self._value = torch.empty(shape, dtype=torch.float32, device=slots.device)
        self._sum = TORCH.host(due.entry.shape)
        self._incoming: Any = None

    def arrays(self, job: ModelJob[Tensor]) -> list[tuple[int, Array]]:
        """What is fetched of the version from which the step begins."""
        arrays = self.held.arrays(job)
        if not self.due.is_written:
            self._incoming = TORCH.incoming(self._value)
            arrays.append((self.due.entry.index, self._incoming.array))
        return arrays

    def gradient(self) -> tuple[int, Array]:
        """What receives the sum of the gradients."""
        entry = self.due.entry
        return entry.index, TORCH.array(self._sum, Box.whole(entry.shape))

    @torch.no_grad()
    def scratch(self) -> torch.nn.Parameter:
        """The parameter that the optimizer changes."""
        if self._incoming is not None:
            self._incoming.finish()
        else:
            self._value.copy_(self.due.entry.tensor)
        gradient = self._sum.to(self.slots.device)
        if self.due.factor != 1.0:
            gradient.mul_(self.due.factor)
        return scratch(self.slots.parameter, self._value, gradient)

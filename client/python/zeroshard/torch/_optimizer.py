"""The optimizer that steps on the servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor

from .._core.job import State
from .._core.optimizer import SteppedByServers
from .._core.sharding import Sharding
from ..errors import InvalidArgumentError
from . import kinds
from ._dtensor import local, part


class ShardedOptimizer(SteppedByServers[Tensor], torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose state is on the shard servers, and whose steps happen
    there.

    Made by :func:`~zeroshard.torch.group_sharded_parallel`. ``param_groups`` are those of the
    optimizer that was given: what a scheduler changes there, on either of the two, is used at the
    next step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sharding: Sharding[Tensor]) -> None:
        self._sharding: Sharding[Tensor] | None = (
            None  # while the groups are added that are there already
        )
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self._sharding = sharding
        self._given = optimizer

    @property
    def sharding(self) -> Sharding[Tensor]:
        """What it shares with the model's wrapper."""
        assert self._sharding is not None
        return self._sharding

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step on the servers; the parameters that stay on this worker are received.

        Raises :class:`~zeroshard.StepAbortedError` if a rank was lost: run the step again, from the
        same data.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.sharding.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, also those that are on the servers already."""
        if self._sharding is not None:
            self._sharding.discard()
        super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Has the next step clip to this global norm; the norm of the mean gradient, over all ranks
        and parameters."""
        return torch.tensor(self._clip_to(max_norm))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Every rank must do the same; the servers hear of it before the next step."""
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's format: an optimizer of the given kind can load it."""
        numbers = {
            id(parameter): number
            for number, parameter in enumerate(
                p for group in self.param_groups for p in group["params"]
            )
        }
        kind = self.sharding.job.optimizer_kind
        self.sharding.follow_changes()
        state = {
            numbers[id(entry.tensor)]: kinds.to_torch(kind, applied, tensors)
            for entry, applied, tensors in self.sharding.job.states()
            if applied
        }
        groups, first = [], 0
        for group in self.param_groups:
            packed = {key: value for key, value in group.items() if key != "params"}
            packed["params"] = list(range(first, first + len(group["params"])))
            first += len(group["params"])
            groups.append(packed)
        return {
            "state": {number: state[number] for number in sorted(state) if state[number]},
            "param_groups": groups,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state in torch's format. Every rank must call it; rank 0's state counts."""
        saved = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group["params"]) for group in saved]
        if sizes != saved_sizes:
            raise InvalidArgumentError(
                f"the loaded state has parameter groups of {saved_sizes} parameters; they must be as the optimizer's, "
                f"{sizes}"
            )
        by_number = {
            number: parameter
            for group, had in zip(self.param_groups, saved, strict=True)
            for parameter, number in zip(group["params"], had["params"], strict=True)
        }
        for group, had in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in had.items() if key != "params"})
        state = {
            by_number[number]: value
            for number, value in state_dict["state"].items()
            if number in by_number
        }
        self.sharding.reopen(optimizer_states(kinds.kind(self._given), self, state))


def optimizer_states(
    kind: str, optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]
) -> dict[int, State[Tensor]]:
    """torch's state by the id of its parameter as the servers keep it; what was never stepped is
    left out."""
    states: dict[int, State[Tensor]] = {}
    for group in optimizer.param_groups:
        values = kinds.hyperparameters(kind, group)
        for parameter in group["params"]:
            if parameter in state and parameter.requires_grad:
                had = {
                    name: part(value, parameter) if isinstance(value, Tensor) else value
                    for name, value in state[parameter].items()
                }
                applied, tensors = kinds.from_torch(kind, values, had, local(parameter).shape)
                if applied:
                    states[id(parameter)] = (applied, tensors)
    return states

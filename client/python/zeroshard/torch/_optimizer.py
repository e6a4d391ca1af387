"""The torch optimizer whose steps run on the shard servers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor

from .._core.job import State
from .._core.optimizer import SteppedByServers
from .._core.sharding import Sharding
from ..errors import InvalidArgumentError
from . import _conversion
from ._dtensor import local, part
from ._gradient import GradientTensor
from ._optimizer_hooks import calling_load_hooks, calling_state_hooks, share_hooks


def _not_copied() -> InvalidArgumentError:
    return InvalidArgumentError(
        "a sharded optimizer cannot be copied or pickled, since its state is on the servers; use "
        "optimizer.state_dict(), which an optimizer of the original class can load"
    )


class ShardedOptimizer(SteppedByServers[Tensor], torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose state and steps are on the shard servers.

    It is created by :func:`~zeroshard.torch.group_sharded_parallel` and shares its ``param_groups``
    with the original optimizer: a change by a scheduler of either one takes effect at the next
    step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sharding: Sharding[Tensor]) -> None:
        self._sharding: Sharding[Tensor] | None = (
            None  # while the base class adds the existing groups
        )
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.param_groups = optimizer.param_groups
        self._sharding = sharding
        self.state = _StateOnServers(sharding)
        self._given = optimizer
        #: Whether a scaler makes the step, which may be skipped.
        self.is_scaled = False
        share_hooks(optimizer, self)

    @property
    def sharding(self) -> Sharding[Tensor]:
        """The state shared with the model's wrapper."""
        assert self._sharding is not None
        return self._sharding

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Makes a step on the servers, and receives the parameters that stay on this worker.

        Raises:
            StepAbortedError: a rank was lost. Run the step again with the same data.
            InvalidArgumentError: a gradient contains inf or NaN, and no scaler is used. torch would
                make the parameters NaN; here the step has changed nothing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self.sharding.step()
        # A scheduler of the original optimizer warns if its optimizer does not step.
        setattr(self._given, "_opt_called", True)
        if not self.is_scaled:
            self.sharding.check_applied()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, including those that were already sent to the servers."""
        if self._sharding is not None:
            self._sharding.discard(keep=not set_to_none)
        super().zero_grad(set_to_none)

    def unscale(self, loss_scale: float) -> None:
        """Divides the gradients of the open step by the factor of the loss."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None and not isinstance(gradient, GradientTensor):
                    gradient.div_(loss_scale)
        self.sharding.gradients.unscale(loss_scale)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the next step to this global norm. Returns the norm of the mean gradient over all
        ranks and parameters."""
        return torch.tensor(self._clip_to(max_norm))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Every rank must call it; the servers learn of the group before the next
        step."""
        super().add_param_group(param_group)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise _not_copied()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _not_copied()

    @calling_state_hooks
    def state_dict(self) -> dict[str, Any]:
        """The whole state in torch's format, for an optimizer of the original class."""
        numbers = {
            id(parameter): number
            for number, parameter in enumerate(
                p for group in self.param_groups for p in group["params"]
            )
        }
        name = self.sharding.job.optimizer_name
        if not self.sharding.needs_copies:
            self.sharding.follow_changes()
        state = self.sharding.read(
            lambda version: {
                numbers[id(entry.tensor)]: _conversion.to_torch(name, held)
                for entry, held in self.sharding.job.states(version)
            }
        )
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

    @calling_load_hooks
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state in torch's format. Every rank must call it; all ranks take the state of
        rank 0."""
        saved = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        saved_sizes = [len(group["params"]) for group in saved]
        if sizes != saved_sizes:
            raise InvalidArgumentError(
                f"the loaded state has parameter groups of {saved_sizes} parameters; "
                f"it must have the optimizer's, {sizes}"
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
        self.sharding.reopen(optimizer_states(_conversion.optimizer_name(self._given), self, state))


class _StateOnServers(defaultdict[Tensor, Any]):
    """The attribute ``state`` of an optimizer whose state is on the servers.

    It holds no elements, but is true if the servers hold state, and fetches that of a parameter.
    Otherwise ``torch.distributed.checkpoint.state_dict`` would make a step to create the state.
    """

    def __init__(self, sharding: Sharding[Tensor]) -> None:
        super().__init__()
        self._job = sharding.job

    def __bool__(self) -> bool:
        return any(applied for applied, _ in self._job.job.applied_steps(self._job.version))

    def __missing__(self, parameter: Tensor) -> dict[str, Any]:
        found = next(self._job.states(self._job.version, only=parameter), None)
        return {} if found is None else _conversion.to_torch(self._job.optimizer_name, found[1])


def optimizer_states(
    name: str, optimizer: torch.optim.Optimizer, state: Mapping[Any, Any]
) -> dict[int, State[Tensor]]:
    """torch's state in the servers' form, by the id of the parameter. Parameters that were never
    updated are omitted."""
    states: dict[int, State[Tensor]] = {}
    for group in optimizer.param_groups:
        values = _conversion.hyperparameters(name, group)
        for parameter in group["params"]:
            if parameter in state and parameter.requires_grad:
                had = {
                    key: part(_conversion.repeated(key, value, parameter.shape), parameter)
                    if isinstance(value, Tensor)
                    else value
                    for key, value in state[parameter].items()
                }
                found = _conversion.from_torch(name, values, had, local(parameter).shape)
                if found[0]:
                    states[id(parameter)] = found
    return states

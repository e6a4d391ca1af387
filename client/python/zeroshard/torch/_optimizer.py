"""The torch optimizer whose steps run on the shard servers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor

from .._core.interrupts import is_within_operation
from .._core.optimizer import SteppedByServers
from .._core.sharding import Sharding
from ..errors import InvalidArgumentError
from . import _conversion
from ._gradient import GradientTensor
from ._optimizer_hooks import calling_load_hooks, calling_state_hooks, share_hooks
from ._state import StateOnServers, as_loaded, optimizer_states


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
        # None while the base class adds the existing groups.
        self._sharding: Sharding[Tensor] | None = None
        self._given: Any = None
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._sharding = sharding
        self._given = optimizer
        self._state = StateOnServers(sharding.job, self)
        self._state.replace_local(optimizer.state)
        sharding.state_edits = self._state
        optimizer.register_step_pre_hook(_refusal(sharding))
        #: ``True`` if a scaler makes the step, which may be skipped.
        self.is_scaled = False
        share_hooks(optimizer, self)

    @property
    def sharding(self) -> Sharding[Tensor]:
        """The state shared with the model's wrapper."""
        assert self._sharding is not None
        return self._sharding

    @property
    def param_groups(self) -> Any:
        """The parameter groups, which are those of the original optimizer."""
        return self._own_groups if self._given is None else self._given.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        if self._given is None:
            self._own_groups = groups
        else:
            self._given.param_groups = groups

    @property
    def state(self) -> Any:
        """The state by parameter, as torch's. What the program writes to it takes effect at the
        next forward or step, if it is written between a step and the next backward pass."""
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        if self._sharding is not None and state is not self._state:
            given = dict(state)
            self._state.clear()
            self._state.update(given)

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
        state: dict[Any, Any] = {
            numbers[parameter]: held
            for parameter, held in self.sharding.read(self._states).items()
            if held and parameter in numbers
        }
        for key, local in self._state.local_state().items():
            if id(key) in numbers:
                state.setdefault(numbers[id(key)], {}).update(local)
            else:
                state[key] = local
        groups, first = [], 0
        for group in self.param_groups:
            packed = {key: value for key, value in group.items() if key != "params"}
            packed["params"] = list(range(first, first + len(group["params"])))
            first += len(group["params"])
            groups.append(packed)
        return {
            "state": {key: state[key] for key in sorted(state, key=_numbers_first)},
            "param_groups": groups,
        }

    def _states(self, version: int) -> dict[int, Any]:
        """The state of each parameter at a version, by the id of the parameter, with what the
        program has changed since."""
        job = self.sharding.job
        # The servers receive changes in the next forward or step, in which all ranks take part.
        is_settled = self.sharding.sees_writes and not is_within_operation()
        changed, removed = self._state.changes() if is_settled else ({}, set())
        states = {
            id(entry.tensor): _conversion.to_torch(job.optimizer_name, held)
            for entry, held in job.states(version)
            if id(entry.tensor) not in removed
        }
        return states | {id(parameter): _copied(own) for parameter, own in changed.items()}

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
            by_number[key] if key in by_number else key: value
            for key, value in state_dict["state"].items()
        }
        self._state.replace_local(as_loaded(state))
        self.sharding.reopen(optimizer_states(_conversion.optimizer_name(self._given), self, state))


def _numbers_first(key: Any) -> tuple[int, int]:
    """The order of the keys of a state: numbers of parameters, then other keys as they are."""
    return (0, key) if isinstance(key, int) else (1, 0)


def _copied(state: Any) -> Any:
    """A copy of the state of a parameter that the program has set."""
    if not isinstance(state, Mapping):
        return state
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else value
        for name, value in state.items()
    }


def _refusal(sharding: Sharding[Tensor]) -> Callable[..., None]:
    """A hook of the original optimizer, which must not step any more. The sharded optimizer has the
    same hooks."""
    alive = weakref.ref(sharding)

    def refuse(optimizer: Any, *_: Any) -> None:
        if alive() is not None and not isinstance(optimizer, ShardedOptimizer):
            raise InvalidArgumentError(
                "the optimizer that was passed to group_sharded_parallel steps, but its state is "
                "on the servers; call step() of the optimizer that group_sharded_parallel has "
                "returned: model, optimizer, scaler = group_sharded_parallel(model, optimizer, ...)"
            )

    return refuse

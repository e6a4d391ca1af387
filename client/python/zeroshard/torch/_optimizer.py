"""The torch optimizer whose steps run on the shard servers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, overload

import torch
from torch import Tensor

from .._core.optimizer_spec import State
from .._core.optimizer import SteppedByServers
from .._core.sharding import Sharding
from .._core.stored import stored_states
from ..errors import InvalidArgumentError
from . import _conversion
from ._gradient import GradientTensor
from ._asked_states import asked_states, copied, placed_states, settled_changes
from ._joined import Together
from ._optimizer_hooks import calling_load_hooks, calling_state_hooks
from ._placeholders import placed
from ._private import note_step, share_optimizer_hooks
from ._rank_optimizer import TorchRankOptimizer
from ._state import StateOnServers, as_loaded, optimizer_states, torch_state
from ._state_request import asked


def _not_copied() -> InvalidArgumentError:
    return InvalidArgumentError(
        "a sharded optimizer cannot be copied or pickled, since its state is on the servers; use "
        "optimizer.state_dict(), which an optimizer of the original class can load"
    )


# torch's class comes first, so that instances have its layout: an optimizer of torch becomes one.
class ShardedOptimizer(torch.optim.Optimizer, SteppedByServers[Tensor]):
    """A ``torch.optim.Optimizer`` whose state and steps are on the shard servers.

    It is created by :func:`~zeroshard.torch.group_sharded_parallel` and shares its ``param_groups``
    with the original optimizer: a change by a scheduler of either one takes effect at the next
    step. :func:`zeroshard.shard` makes the original optimizer itself one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sharding: Sharding[Tensor]) -> None:
        # None while the base class adds the existing groups.
        self._sharding: Sharding[Tensor] | None = None
        self._given: Any = None
        #: The turns of the optimizers of the model, if it has several.
        self._together: Together | None = None
        # Not `super()`: in place, the next class is that of the original optimizer.
        torch.optim.Optimizer.__init__(self, optimizer.param_groups, optimizer.defaults)
        self._sharding = sharding
        self._given = optimizer
        self._state = StateOnServers(sharding.job, self)
        self._state.replace_local(optimizer.state)
        sharding.changes.state_edits = self._state
        optimizer.register_step_pre_hook(_refusal(sharding))
        #: ``True`` if a scaler makes the step, which may be skipped.
        self.is_scaled = False
        share_optimizer_hooks(optimizer, self)

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
        # A scheduler of the original optimizer warns if its optimizer does not step.
        note_step(self._given)
        if self._together is not None and not self._together.arrives(self):
            return loss
        together = self._together
        with torch.no_grad(), nullcontext() if together is None else together.as_stepped():
            self.sharding.step()
        if together is not None:
            together.zero()
        if not self.is_scaled:
            self.sharding.check_applied()
        return loss

    def join(self, others: Sequence[ShardedOptimizer], together: Together) -> None:
        """Makes it one of several optimizers of a model, which are ``others``. ``together``: their
        turns."""
        self._together = together
        self._state.joined = [each._state for each in others]

    @property
    def is_waiting(self) -> bool:
        """Returns whether it has stepped, and another optimizer of its model has not: the servers
        make the step after that."""
        return self._together is not None and self._together.waits(self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients, including those that were already sent to the servers."""
        if self._together is not None and self._together.waits(self):
            self._together.zero_later(self, set_to_none)
            return
        # Those of the other optimizers of the model stay.
        if self._sharding is not None and self._together is None:
            self._sharding.recovery.discard(keep=not set_to_none)
        super().zero_grad(set_to_none)

    def unscale(self, loss_scale: float) -> None:
        """Divides the gradients of the open step by the factor of the loss."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None and not isinstance(gradient, GradientTensor):
                    gradient.div_(loss_scale)
        self.sharding.gradients.looks.unscale(loss_scale)

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
        """The whole state in torch's format, for an optimizer of the original class.

        The functions of ``torch.distributed.checkpoint.state_dict`` get what their options say: by
        default DTensors, of which each rank reads its part.
        """
        numbers = {
            id(parameter): number
            for number, parameter in enumerate(
                p for group in self.param_groups for p in group["params"]
            )
        }
        state: dict[Any, Any] = {
            numbers[parameter]: held
            for parameter, held in self._whole_or_asked_states().items()
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

    def _whole_or_asked_states(self) -> dict[int, Any]:
        placeholders, request = placed(self.sharding), asked()
        if placeholders is not None:
            return placed_states(self.sharding, self._state, placeholders)
        if request is None:
            return self.sharding.reads.read(self._states)
        return asked_states(self, self.sharding, self._state, request)

    def _states(self, version: int) -> dict[int, Any]:
        """The state of each parameter at a version, by the id of the parameter, with what the
        program has changed since."""
        job = self.sharding.job
        changed, removed = settled_changes(self.sharding, self._state)
        is_joined, own = self._together is not None, self._own()
        states = {
            id(entry.tensor): torch_state(job, version, entry, held)
            for entry, held in stored_states(job, version)
            if id(entry.tensor) not in removed and (not is_joined or id(entry.tensor) in own)
        }
        return states | {id(parameter): copied(own) for parameter, own in changed.items()}

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
        self._state.replace_local(as_loaded(self._state.not_held(state)))
        self.sharding.changes.reopen(self._loaded(state))

    def _loaded(self, state: dict[Any, Any]) -> dict[int, State[Tensor]]:
        """The whole state of the job, with a loaded one of this optimizer."""
        job, own = self.sharding.job, self._own()
        ranks = job.optimizer.on_ranks
        assert ranks is None or isinstance(ranks, TorchRankOptimizer)
        # What the loaded state does not have is dropped.
        of_ranks: dict[Any, Any] = {
            parameter: {}
            for group in self.param_groups
            if ranks is not None and ranks.has_group(group)
            for parameter in group["params"]
        }
        kind = _conversion.server_name(self._given) or _conversion.keeping()[0]
        kinds = [kind] * len(self.param_groups)
        states = optimizer_states(kinds, self, of_ranks | state, ranks, job.group.ranks[0])
        if self._together is not None:
            others = stored_states(job, job.version)
            states |= {id(of.tensor): held for of, held in others if id(of.tensor) not in own}
        return states

    def _own(self) -> set[int]:
        """The ids of its parameters."""
        return {id(parameter) for group in self.param_groups for parameter in group["params"]}


def _numbers_first(key: Any) -> tuple[int, int]:
    """The order of the keys of a state: numbers of parameters, then other keys as they are."""
    return (0, key) if isinstance(key, int) else (1, 0)


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

"""The optimizer that steps on the servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.optimizer.lr import LRScheduler

from .._core.job import State
from .._core.optimizer import SteppedByServers
from .._core.sharding import Sharding
from ..errors import InvalidArgumentError
from . import kinds
from ._dtensor import local, part


class ShardedOptimizer(SteppedByServers[Any], kinds.Optimizer):
    """A ``paddle.optimizer.Optimizer`` whose state is on the shard servers, and whose steps happen
    there.

    Made by :func:`~zeroshard.paddle.group_sharded_parallel`. It shares its settings with the
    optimizer that was given: a learning rate that is set on either of the two, or its scheduler's,
    is used at the next step.
    """

    # Not among the settings, which the given optimizer has too: it must not keep the job alive.
    __slots__ = ("_given", "_sharding")
    _given: Any
    _sharding: Sharding[Any]

    # Not `__init__`, which would begin the settings anew.
    @classmethod
    def sharing(cls, optimizer: Any, sharding: Sharding[Any]) -> ShardedOptimizer:
        """One with the settings of ``optimizer``."""
        shared = cls.__new__(cls)
        object.__setattr__(shared, "__dict__", optimizer.__dict__)
        shared._sharding = sharding
        shared._given = optimizer
        return shared

    @property
    def sharding(self) -> Sharding[Any]:
        """What it shares with the model's wrapper."""
        return self._sharding

    def step(self) -> None:
        """One step on the servers; the parameters that stay on this worker are received.

        Raises :class:`~zeroshard.StepAbortedError` if a rank was lost: run the step again, from the
        same data.
        """
        with paddle.no_grad():
            self.sharding.step()

    def minimize(
        self,
        loss: Any,
        startup_program: Any = None,
        parameters: Any = None,
        no_grad_set: Any = None,
    ) -> tuple[list[Any], list[Any]]:
        """As Paddle's on dynamic graphs: a step with the gradients that there are."""
        if parameters or no_grad_set:
            raise InvalidArgumentError(
                "parameters and no_grad_set must be None: a step is of all that the optimizer trains"
            )
        self.step()
        return [], []

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Forgets the gradients, also those that are on the servers already.

        They are given back, not zeroed, whatever ``set_to_zero`` says: a parameter that gets none
        is not stepped.
        """
        self.sharding.discard()
        for group in kinds.param_groups(self):
            for parameter in group["params"]:
                if not parameter.stop_gradient:
                    parameter.clear_gradient(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As :meth:`clear_grad`."""
        self.clear_grad()

    @property
    def clear_gradients(self) -> Callable[..., None]:
        """As :meth:`clear_grad`."""
        return self.clear_grad

    @clear_gradients.setter
    def clear_gradients(self, _: Any) -> None:
        pass  # Paddle's optimizers keep their own method there

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Has the next step clip to this global norm; the norm of the mean gradient, over all ranks
        and parameters."""
        return paddle.to_tensor(self._clip_to(max_norm), dtype="float32")

    def state_dict(self) -> dict[str, Any]:
        """The whole state in Paddle's format: an optimizer of the given kind can load it."""
        self.sharding.follow_changes()
        job = self.sharding.job
        values = job.groups()
        state: dict[str, Any] = {}
        for entry, applied, tensors in job.states():
            if applied:
                own = values[entry.group][1]
                state |= kinds.to_paddle(
                    job.optimizer_kind, entry.tensor.name, own, applied, tensors
                )
        if isinstance(self._learning_rate, LRScheduler):
            state["LR_Scheduler"] = self._learning_rate.state_dict()
        return state

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a state in Paddle's format. Every rank must call it; rank 0's state counts."""
        scheduler = state_dict.get("LR_Scheduler")
        if scheduler and isinstance(self._learning_rate, LRScheduler):
            self._learning_rate.set_state_dict(scheduler)
        self.sharding.reopen(states_of(self._given, from_state_dict(state_dict)))

    load_state_dict = set_state_dict


def states_of(optimizer: Any, find: Callable[[str, str], Any | None]) -> dict[int, State[Any]]:
    """Paddle's state by the id of its parameter as the servers keep it; what was never stepped is
    left out.

    ``find`` gives the accumulator of a name, for the name of a parameter.
    """
    kind = kinds.kind(optimizer)
    states: dict[int, State[Any]] = {}
    for parameters, values in kinds.groups(optimizer, kind):
        for parameter in parameters:
            if parameter.stop_gradient:
                continue

            def get(accumulator: str, name: str = parameter.name) -> Any | None:
                # With multi_precision it is the accumulator of the float32 master weights.
                found = find(accumulator, name)
                return found if found is not None else find(accumulator, f"{name}_fp32_master_0")

            here = local(parameter)
            applied, tensors = kinds.from_paddle(
                kind, values, here.shape, lambda name: _part(get(name), parameter)
            )
            if applied:
                states[id(parameter)] = (applied, tensors)
    return states


def _part(value: Any | None, parameter: Any) -> Any | None:
    """What this rank has of an accumulator; numbers are whole."""
    return part(value, parameter) if isinstance(value, paddle.Tensor) else value


def from_state_dict(state: dict[str, Any]) -> Callable[[str, str], Any | None]:
    """Finds accumulators in a state dict, whatever number their name ends in."""
    by_stem = {
        name.rpartition("_")[0]: value
        for name, value in state.items()
        if name.rpartition("_")[2].isdigit()
    }
    return lambda accumulator, parameter: by_stem.get(f"{parameter}_{accumulator}")


def own_state(optimizer: Any) -> Callable[[str, str], Any | None]:
    """Finds the accumulators that an optimizer of Paddle has: of its steps, or loaded before the
    first of them."""
    loaded = from_state_dict(optimizer._accumulators_holder)

    def find(accumulator: str, parameter: str) -> Any | None:
        stepped = optimizer._accumulators.get(accumulator, {}).get(parameter)
        return stepped if stepped is not None else loaded(accumulator, parameter)

    return find

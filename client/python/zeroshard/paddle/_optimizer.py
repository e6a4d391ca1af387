"""The Paddle optimizer whose steps run on the shard servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle
from paddle.optimizer.lr import LRScheduler

from .._core.optimizer_spec import State
from .._core.optimizer import SteppedByServers
from .._core.sharding import Sharding
from .._core.stored import stored_states
from ..errors import InvalidArgumentError
from . import _conversion
from ._clip import clipping
from ._dtensor import local, part
from ._private import (
    MASTER,
    accumulators,
    clear_accumulators,
    learning_rate,
    loaded_accumulators,
)


class ShardedOptimizer(SteppedByServers[Any], _conversion.Optimizer):
    """A ``paddle.optimizer.Optimizer`` whose state and steps are on the shard servers.

    It is created by :func:`~zeroshard.paddle.group_sharded_parallel` and shares its settings with
    the original optimizer: a learning rate that is set on either one, or by a scheduler, takes
    effect at the next step.
    """

    # Not in `__dict__`, which is shared with the original optimizer: that must not keep the job
    # alive.
    __slots__ = ("_accumulators_at_first", "_given", "_powers", "_sharding")
    #: The accumulators of the original optimizer, which stay empty.
    _accumulators_at_first: Any
    _given: Any
    #: The betas of which the state has powers, by the name of the parameter.
    _powers: dict[str, dict[str, float]]
    _sharding: Sharding[Any]

    # Not `__init__`, which would reset the settings.
    @classmethod
    def sharing(cls, optimizer: Any, sharding: Sharding[Any]) -> ShardedOptimizer:
        """Makes an optimizer that shares the settings of ``optimizer``, whose state is on the
        servers now."""
        shared = cls.__new__(cls)
        object.__setattr__(shared, "__dict__", optimizer.__dict__)
        shared._sharding = sharding
        shared._given = optimizer
        has_state = _has_values(optimizer)
        shared._powers = _conversion.powers(optimizer) if has_state else {}
        clear_accumulators(optimizer)
        shared._accumulators_at_first = accumulators(optimizer)
        return shared

    @property
    def sharding(self) -> Sharding[Any]:
        """The state shared with the model's wrapper."""
        return self._sharding

    def step(self) -> None:
        """Makes a step on the servers, and receives the parameters that stay on this worker.

        Raises:
            StepAbortedError: a rank was lost. Run the step again with the same data.
            InvalidArgumentError: a gradient contains inf or NaN, and no scaler is used. Paddle
                would make the parameters inf or NaN; here the step has changed nothing.
        """
        self.step_if_finite()
        self.sharding.check_applied()

    def step_if_finite(self) -> None:
        """As :meth:`step`, but a step with a gradient that contains inf or NaN is skipped without
        an error."""
        self._check_state()
        _conversion.use_learning_rate(self)
        self.sharding.clipping.set(*clipping(self))
        with paddle.no_grad():
            self.sharding.step()

    def _check_state(self) -> None:
        """Raises :class:`~zeroshard.InvalidArgumentError` if the script has changed what Paddle
        derives the state from, and the servers do not."""
        if _has_values(self) or accumulators(self) is not self._accumulators_at_first:
            raise InvalidArgumentError(
                "the script has assigned accumulators of the optimizer, whose state is on the "
                "servers; load the values with optimizer.set_state_dict"
            )
        # Paddle corrects the bias with the product of the betas of all steps, the servers with a
        # power of the last one.
        for name, betas in _conversion.powers(self._given).items():
            known = self._powers.setdefault(name, betas)
            if betas != known:
                raise InvalidArgumentError(
                    f"the script has changed {known} of parameter {name!r} to {betas} after its "
                    "first step, and the servers cannot correct the bias of its moments as Paddle "
                    "does; set the betas before the first step"
                )

    def minimize(
        self,
        loss: Any,
        startup_program: Any = None,
        parameters: Any = None,
        no_grad_set: Any = None,
    ) -> tuple[list[Any], list[Any]]:
        """As Paddle's in dynamic graphs: makes a step with the existing gradients."""
        if parameters or no_grad_set:
            raise InvalidArgumentError(
                "parameters and no_grad_set must be None, since a step updates all parameters of "
                "the optimizer"
            )
        self.step()
        return [], []

    def apply_gradients(self, params_grads: Any) -> list[Any]:
        """Raises an error: a step applies the gradients that the parameters have."""
        raise InvalidArgumentError(
            "the servers apply the gradients that backward has computed; set parameter.grad of the "
            "parameters whose gradient you have changed, and call optimizer.step()"
        )

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Drops the gradients, including those that were already sent to the servers.

        Gradients are freed, not set to zero, regardless of ``set_to_zero``: a parameter without a
        gradient is not updated.
        """
        self.sharding.recovery.discard()
        for group in _conversion.param_groups(self):
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
        pass  # Paddle's optimizers assign their own method to this attribute

    def clip_grad_norm_(self, max_norm: float) -> Any:
        """Clips the next step to this global norm. Returns the norm of the mean gradient over all
        ranks and parameters."""
        return paddle.to_tensor(self._clip_to(max_norm), dtype="float32")

    def state_dict(self) -> dict[str, Any]:
        """The whole state in Paddle's format, for an optimizer of the original class."""
        job = self.sharding.job
        values = job.optimizer.groups()

        def states(version: int) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for entry, held in stored_states(job, version):
                kind, own = values[entry.group]
                found |= _conversion.to_paddle(kind, entry.tensor.name, own, held)
            return found

        state: dict[str, Any] = self.sharding.reads.read(states)
        if isinstance(learning_rate(self), LRScheduler):
            state["LR_Scheduler"] = learning_rate(self).state_dict()
        return state

    def set_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state in Paddle's format. Every rank must call it; all ranks take the state of
        rank 0.

        Raises:
            InvalidArgumentError: the state belongs to other parameters than the optimizer's, or the
                job has checkpoints.
        """
        find = from_state_dict(self._given, state_dict)
        self.sharding.changes.reopen(states_of(self._given, find))
        self._powers = _conversion.powers(self._given)
        # After what may be refused.
        scheduler = state_dict.get("LR_Scheduler")
        if scheduler and isinstance(learning_rate(self), LRScheduler):
            learning_rate(self).set_state_dict(scheduler)

    load_state_dict = set_state_dict


def _has_values(optimizer: Any) -> bool:
    """Returns whether an optimizer has state on this worker, from steps or from a loaded state."""
    return bool(loaded_accumulators(optimizer)) or any(accumulators(optimizer).values())


def states_of(optimizer: Any, find: Callable[[str, str], Any | None]) -> dict[int, State[Any]]:
    """Paddle's state in the servers' form, by the id of the parameter. Parameters that were never
    updated are omitted.

    ``find`` returns the accumulator with a name for the name of a parameter.
    """
    name = _conversion.optimizer_name(optimizer)
    states: dict[int, State[Any]] = {}
    for parameters, values in _conversion.groups(optimizer, name):
        for parameter in parameters:

            def get(accumulator: str, owner: str = parameter.name) -> Any | None:
                # With multi_precision, accumulators belong to the float32 master weights.
                found = find(accumulator, owner)
                return found if found is not None else find(accumulator, f"{owner}{MASTER}")

            shape = local(parameter).shape
            found = _conversion.from_paddle(
                name, values, shape, lambda each: _part(get(each), parameter)
            )
            if found[0]:
                states[id(parameter)] = found
    return states


def _part(value: Any | None, parameter: Any) -> Any | None:
    """This rank's part of an accumulator. Numbers are returned as they are."""
    return part(value, parameter) if isinstance(value, paddle.Tensor) else value


def from_state_dict(optimizer: Any, state: dict[str, Any]) -> Callable[[str, str], Any | None]:
    """Finds accumulators in a state dict, regardless of the number at the end of their names.

    Raises :class:`~zeroshard.InvalidArgumentError` if the state belongs to other parameters than
    the optimizer's.
    """
    owners = [
        parameter.name
        for group in _conversion.param_groups(optimizer)
        for parameter in group["params"]
    ]
    saved = [name for name in state if name not in ("LR_Scheduler", "master_weights")]
    if saved and not any(name.startswith(f"{owner}_") for name in saved for owner in owners):
        raise InvalidArgumentError(
            f"the optimizer state has tensors such as {saved[0]!r}, and none of the optimizer's "
            f"parameters, whose names are such as {owners[0]!r}; Paddle finds the state of a "
            "parameter by its name, which is the same if a new process creates the same model, or "
            "under paddle.utils.unique_name.guard()"
        )
    by_stem = {
        name.rpartition("_")[0]: value
        for name, value in state.items()
        if name.rpartition("_")[2].isdigit()
    }
    return lambda accumulator, parameter: by_stem.get(f"{parameter}_{accumulator}")


def own_state(optimizer: Any) -> Callable[[str, str], Any | None]:
    """Finds the accumulators of a Paddle optimizer, from its steps or from a loaded state. For
    errors see :func:`from_state_dict`."""
    loaded = from_state_dict(optimizer, loaded_accumulators(optimizer))

    def find(accumulator: str, parameter: str) -> Any | None:
        stepped = accumulators(optimizer).get(accumulator, {}).get(parameter)
        return stepped if stepped is not None else loaded(accumulator, parameter)

    return find

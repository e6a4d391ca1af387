"""Loss scaling for sharded optimizers, whose gradients are checked and unscaled by the servers."""

from __future__ import annotations

from typing import Any

from paddle.amp.grad_scaler import OptimizerState

from ._optimizer import ShardedOptimizer
from ._private import EnabledScaler


class GradScaler(EnabledScaler):
    """A ``paddle.amp.GradScaler`` for sharded optimizers. An inf or NaN on any rank skips the step
    on all ranks.

    :func:`~zeroshard.paddle.group_sharded_parallel` makes it from the given scaler and shares its
    state. Paddle's own class disables itself on a CPU and for losses that are not float16; this
    class does not.
    """

    def __init__(
        self,
        enable: bool = True,
        init_loss_scaling: float = 2.0**16,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 2000,
        decr_every_n_nan_or_inf: int = 1,
        use_dynamic_loss_scaling: bool = True,
    ) -> None:
        super().__init__(False)
        if not enable:
            return
        self._zeroshard_enable(_States())
        self.load_state_dict(
            {
                "scale": [init_loss_scaling],
                "incr_ratio": incr_ratio,
                "decr_ratio": decr_ratio,
                "incr_every_n_steps": incr_every_n_steps,
                "decr_every_n_nan_or_inf": decr_every_n_nan_or_inf,
                "incr_count": 0,
                "decr_count": 0,
                "use_dynamic_loss_scaling": use_dynamic_loss_scaling,
            }
        )

    @classmethod
    def sharing(cls, scaler: Any) -> GradScaler:
        """Makes a scaler that shares the state of ``scaler``."""
        shared = cls.__new__(cls)
        shared.__dict__ = scaler.__dict__
        return shared

    def scale(self, var: Any) -> Any:
        """Returns the scaled loss."""
        return var * self._zeroshard_scale if self._zeroshard_enabled else var

    def unscale_(self, optimizer: Any) -> None:
        """For a sharded optimizer, only records the scale: the servers divide by it, also for
        ``clip_grad_norm_``."""
        if not isinstance(optimizer, ShardedOptimizer):
            super().unscale_(optimizer)
        elif self._zeroshard_enabled:
            state = self._zeroshard_state(optimizer)
            # A second call changes nothing, and a step that is run again makes it.
            if state["state"] is OptimizerState.STEPPED:
                raise RuntimeError("unscale_() is being called after step().")
            optimizer.loss_scale = self._number()
            state["state"] = OptimizerState.UNSCALED

    def step(self, optimizer: Any) -> None:
        """Steps, unless a gradient is inf or NaN; then :meth:`update` lowers the scale."""
        if not isinstance(optimizer, ShardedOptimizer) or not self._zeroshard_enabled:
            super().step(optimizer)
            return
        state = self._zeroshard_state(optimizer)
        if state["state"] is OptimizerState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        optimizer.loss_scale = self._number()
        try:
            optimizer.step_if_finite()
        finally:
            optimizer.loss_scale = 1.0
        state["state"] = OptimizerState.STEPPED
        report = optimizer.last_report
        # A step that was skipped because of a spike has finite gradients.
        overflowed = not report.applied and report.overflow is not None
        self._zeroshard_stepped(overflowed, _States())

    def _number(self) -> float:
        return float(self._zeroshard_scale.reshape([]))

    def minimize(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """:meth:`step`, then :meth:`update`."""
        if not isinstance(optimizer, ShardedOptimizer) or not self._zeroshard_enabled:
            return super().minimize(optimizer, *args, **kwargs)
        self.step(optimizer)
        self.update()
        return [], []


class _States(dict[int, dict[str, Any]]):
    """The state of each optimizer since the last update."""

    def __missing__(self, key: int) -> dict[str, Any]:
        self[key] = {"state": OptimizerState.INIT}
        return self[key]

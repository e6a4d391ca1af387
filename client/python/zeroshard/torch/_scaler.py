"""Loss scaling for sharded optimizers, whose gradients are checked and unscaled by the servers."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from ._optimizer import ShardedOptimizer
from ._private import check_scale, scaled_state, scaler_device


class GradScaler(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` for sharded optimizers. An inf or NaN on any rank skips the step
    on all ranks.

    :func:`~zeroshard.torch.group_sharded_parallel` creates it from the given scaler. The two share
    their state.
    """

    @classmethod
    def sharing(cls, scaler: torch.amp.GradScaler) -> GradScaler:
        """Makes a scaler that shares the state of ``scaler``."""
        shared = cls.__new__(cls)
        shared.__dict__ = scaler.__dict__
        return shared

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """For a sharded optimizer, only records the scale: the servers divide by it, also for
        ``clip_grad_norm_``."""
        if not isinstance(optimizer, ShardedOptimizer):
            super().unscale_(optimizer)
        elif self.is_enabled():
            optimizer.unscale(self.get_scale())
            scaled_state(self, optimizer)["stage"] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps, unless a gradient is inf or NaN; then :meth:`update` lowers the scale."""
        if not isinstance(optimizer, ShardedOptimizer) or not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        state = scaled_state(self, optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        check_scale(self, "step")
        optimizer.loss_scale, optimizer.is_scaled = self.get_scale(), True
        try:
            result: float | None = optimizer.step(*args, **kwargs)
        finally:
            optimizer.loss_scale, optimizer.is_scaled = 1.0, False
        device = scaler_device(self)
        # A step that was skipped because of a spike has finite gradients.
        report = None if optimizer.is_waiting else optimizer.last_report
        skipped = report is not None and not report.applied and report.overflow is not None
        state["found_inf_per_device"] = {device: torch.full((1,), float(skipped), device=device)}
        state["stage"] = OptState.STEPPED
        return result

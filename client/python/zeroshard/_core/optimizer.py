"""The common part of the sharded optimizers in all frameworks."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic

from ..errors import InvalidArgumentError
from .sharding import Sharding
from .tensors import T


class SteppedByServers(Generic[T]):
    """Mixin for a framework's optimizer class whose state is on the shard servers."""

    # Paddle's optimizers share their attributes with the original optimizer, so the mixin must not
    # add any.
    __slots__ = ()

    @property
    @abstractmethod
    def sharding(self) -> Sharding[T]:
        """The state shared with the model's wrapper."""

    @property
    def last_report(self) -> Any:
        """The result of the last step: ``version``, ``applied``, ``gradient_norm``,
        ``clip_coefficient``, ``overflow``."""
        return self.sharding.last_report

    @property
    def loss_scale(self) -> float:
        """The factor by which the loss was multiplied. The servers divide the gradients by it."""
        return self.sharding.gradients.looks.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.sharding.gradients.looks.loss_scale = scale

    def state_hash(self) -> str:
        """The hash of all parameters and optimizer state on the servers. Equal runs have equal
        hashes."""
        return self.sharding.job.state_hash()

    def _clip_to(self, max_norm: float) -> float:
        """Clips the next step to this global norm. Returns the norm of the mean gradient."""
        if not max_norm > 0:
            raise InvalidArgumentError(f"max_norm is {max_norm}; it must be greater than 0")
        return self.sharding.clip(float(max_norm))

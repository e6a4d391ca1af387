"""What every framework's sharded optimizer has in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic

from ..errors import InvalidArgumentError
from .framework import T
from .sharding import Sharding


class SteppedByServers(Generic[T]):
    """An optimizer whose state is on the shard servers: mixed into the framework's own class."""

    # Paddle's optimizers share their attributes with the one that was given: nothing is added to
    # them.
    __slots__ = ()

    @property
    @abstractmethod
    def sharding(self) -> Sharding[T]:
        """What it shares with the model's wrapper."""

    @property
    def last_report(self) -> Any:
        """What became of the last step: ``version``, ``applied``, ``gradient_norm``,
        ``clip_coefficient``, ``overflow``."""
        return self.sharding.last_report

    @property
    def loss_scale(self) -> float:
        """Gradients are those of the loss times this; the servers divide by it."""
        return self.sharding.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.sharding.loss_scale = scale

    def state_hash(self) -> str:
        """The hash of all parameters and state on the servers: equal runs have equal hashes."""
        return self.sharding.job.state_hash()

    def _clip_to(self, max_norm: float) -> float:
        """Has the next step clip to this global norm; the norm of the mean gradient."""
        if not max_norm > 0:
            raise InvalidArgumentError(f"max_norm is {max_norm}; it must be more than 0")
        return self.sharding.clip(float(max_norm))

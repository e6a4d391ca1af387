"""The layer that comes back from ``group_sharded_parallel``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import paddle

from .._core.sharding import Sharding
from ..errors import InvalidArgumentError
from ._dtensor import parts_of_state


class GroupSharded(paddle.nn.Layer):
    """A model whose optimizer state, and by level gradients and parameters, are on the shard
    servers.

    It behaves as the model given: attributes that it lacks are the model's, and ``state_dict`` has
    the model's keys.
    """

    def __init__(self, layer: Any, sharding: Sharding[Any]) -> None:
        super().__init__()
        self._layer = layer
        # Not a sublayer, not a parameter.
        self.__dict__["_sharding"] = sharding

    @property
    def level(self) -> str:
        """``os``, ``os_g`` or ``p_g_os``."""
        return self.sharding.level

    @property
    def sharding(self) -> Sharding[Any]:
        """What it shares with the optimizer."""
        sharding: Sharding[Any] = self.__dict__["_sharding"]
        return sharding

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            layers = self.__dict__.get("_sub_layers", {})
            if "_layer" not in layers:
                raise
            return getattr(layers["_layer"], name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""
        if paddle.is_grad_enabled():
            self.sharding.before_forward()
        try:
            return self._layer(*inputs, **kwargs)
        except BaseException:
            self.sharding.unwind()
            raise

    def no_sync(self) -> AbstractContextManager[None]:
        """The backward passes of forwards inside are not the last of their step: gradients
        accumulate here."""
        return self.sharding.holding()

    def summon_full_params(self) -> AbstractContextManager[None]:
        """All parameters are here inside. What rank 0 writes to them counts, if every rank enters
        and leaves."""
        return self.sharding.all_here()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, whole, with its own keys, on whichever ranks call it."""
        return self._layer.state_dict(*args, **kwargs)

    def set_state_dict(self, state_dict: Any, use_structured_name: bool = True) -> Any:
        """Loads the model's state; every rank must call it, rank 0's values count.

        Tensors may be whole where the model's are distributed.
        """
        result = self._layer.set_state_dict(
            parts_of_state(self._layer, state_dict, use_structured_name), use_structured_name
        )
        self.sharding.follow_changes()
        return result

    load_dict = set_state_dict

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As :meth:`set_state_dict`; with ``strict``, keys that are missing or not known are an
        error."""
        if assign:
            raise InvalidArgumentError(
                "assign is True; it must be False: the parameters belong to the job as they are"
            )
        result = self._layer.load_state_dict(parts_of_state(self._layer, state_dict), strict=strict)
        self.sharding.follow_changes()
        return result

    def to(
        self, device: Any = None, dtype: Any = None, blocking: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As a layer's, but not at ``p_g_os``, where parameters cannot be moved or cast."""
        self.sharding.check_movable()
        return super().to(device, dtype, blocking, *args, **kwargs)

"""The layer that comes back from ``group_sharded_parallel``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import paddle

from .._core.sharding import Sharding
from ..errors import InvalidArgument
from ._dtensor import parts_of_state


class GroupSharded(paddle.nn.Layer):
    """A model whose optimizer state, and by level gradients and parameters, are on the shard servers.

    It behaves as the model given: attributes that it lacks are the model's, and ``state_dict`` has the model's keys.
    """

    def __init__(self, layer: Any, sharding: Sharding[Any]) -> None:
        super().__init__()
        self._layer = layer
        # Not a sublayer, not a parameter.
        self.__dict__["_sharding"] = sharding
        self.__dict__["_holding"] = False

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
            self.sharding.before_forward(self.__dict__["_holding"])
        try:
            return self._layer(*inputs, **kwargs)
        except BaseException:
            self.sharding.unwind()
            raise

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """The backward passes of forwards inside are not the last of their step: gradients accumulate here."""
        before, self.__dict__["_holding"] = self.__dict__["_holding"], True
        try:
            yield
        finally:
            self.__dict__["_holding"] = before

    @contextlib.contextmanager
    def summon_full_params(self) -> Iterator[None]:
        """All parameters are here inside. What rank 0 writes to them counts, if every rank enters and leaves."""
        gatherer = self.sharding.gatherer
        if gatherer is not None:
            gatherer.gather_all()
        try:
            yield
        finally:
            self.sharding.follow_changes()
            if gatherer is not None:
                gatherer.settle()

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
        """As :meth:`set_state_dict`; with ``strict``, keys that are missing or not known are an error."""
        if assign:
            raise InvalidArgument("assign is True; it must be False: the parameters belong to the job as they are")
        result = self._layer.load_state_dict(parts_of_state(self._layer, state_dict), strict=strict)
        self.sharding.follow_changes()
        return result

    def to(self, device: Any = None, dtype: Any = None, blocking: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As a layer's, but not at ``p_g_os``, where parameters cannot be moved or cast."""
        gatherer = self.sharding.gatherer
        if gatherer is not None and gatherer.units:
            raise InvalidArgument(
                "a model at level p_g_os cannot be moved or cast; move or cast it before group_sharded_parallel"
            )
        return super().to(device, dtype, blocking, *args, **kwargs)

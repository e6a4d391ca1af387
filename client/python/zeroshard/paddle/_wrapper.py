"""The members of a model's wrapper that are those of the model.

A script reads and changes its model through the wrapper: attributes, parts and hooks of the state
dict are those of the layer.
"""

from __future__ import annotations

from typing import Any

import paddle

from .._core.wrapper import AttributesOfModel


class LayerWrapper(AttributesOfModel, paddle.nn.Layer):
    """A layer that runs another one, its only sublayer. Attributes that the wrapper does not have
    itself are read from the layer, written to it and deleted from it."""

    # As Paddle's own wrappers do.
    _zeroshard_names = ("_layer", "_layers")
    _zeroshard_kind = "layer"

    @property
    def _wrapped(self) -> Any | None:
        """The layer; None while the wrapper is created."""
        return next(iter(self.__dict__.get("_sub_layers", {}).values()), None)

    # ---- attributes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self._wrapped is None:
                raise
            return getattr(self._wrapped, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._wrapped)})

    # ---- parts

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        self._inner.register_buffer(*args, **kwargs)

    def add_parameter(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.add_parameter(*args, **kwargs)

    def add_sublayer(self, name: str, sublayer: Any) -> Any:
        if self._wrapped is None:
            return super().add_sublayer(name, sublayer)
        return self._wrapped.add_sublayer(name, sublayer)

    # ---- state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The whole state dict of the layer, whose keys have no prefix. Any rank may call it."""
        return self._inner.state_dict(*args, **kwargs)

    def to_static_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`state_dict`, with the buffers that are not persistable."""
        return self._inner.to_static_state_dict(*args, **kwargs)

    def register_state_dict_hook(self, hook: Any) -> Any:
        return self._inner.register_state_dict_hook(hook)

    @property
    def _inner(self) -> Any:
        assert self._wrapped is not None, "the wrapper was created"
        return self._wrapped

"""The members of a model's wrapper that are those of the model.

A script reads and changes its model through the wrapper: attributes, parts and hooks of the state
dict are those of the layer.
"""

from __future__ import annotations

from typing import Any

import paddle

from ..errors import InvalidArgumentError

#: Names under which a wrapper has its layer, as Paddle's wrappers do.
_NAMES = ("_layer", "_layers")


class LayerWrapper(paddle.nn.Layer):
    """A layer that runs another one, its only sublayer. Attributes that the wrapper does not have
    itself are read from the layer, written to it and deleted from it."""

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

    def __setattr__(self, name: str, value: Any) -> None:
        if self._wrapped is None or self._has(name):
            super().__setattr__(name, value)
        elif name in _NAMES:
            raise self._irreplaceable()
        else:
            setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        if self._wrapped is None or self._has(name):
            super().__delattr__(name)
        elif name in _NAMES:
            raise self._irreplaceable()
        else:
            delattr(self._wrapped, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._wrapped)})

    def _has(self, name: str) -> bool:
        """Whether the attribute is one of the wrapper itself."""
        return name in self.__dict__ or hasattr(type(self), name)

    def _irreplaceable(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"the layer of a {type(self).__name__} cannot be replaced or deleted; wrap the other "
            "layer instead, or change the parts of this one (model.head = ...)"
        )

    @property
    def training(self) -> bool:
        """The layer's mode."""
        return True if self._wrapped is None else bool(self._wrapped.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if self._wrapped is not None:
            self._wrapped.training = mode

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

"""The members of a model's wrapper that are those of the model.

A script reads and changes its model through the wrapper: each member of ``paddle.nn.Layer`` acts
on the layer, except for calls, their hooks, and what the wrapper itself is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


from .._core.wrapper import AttributesOfModel
from ._private import Forwarding, sublayers_of


class LayerWrapper(AttributesOfModel, Forwarding):
    """A layer that runs another one, its only sublayer. Attributes that the wrapper does not have
    itself are read from the layer, written to it and deleted from it."""

    # As Paddle's own wrappers do.
    _zeroshard_names = ("_layer", "_layers")
    _zeroshard_kind = "layer"

    @property
    def _wrapped(self) -> Any | None:
        """The layer; None while the wrapper is created."""
        return next(iter(sublayers_of(self).values()), None)

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

    def get_sublayer(self, target: str) -> Any:
        return self._inner.get_sublayer(target)

    def set_sublayer(self, *args: Any, **kwargs: Any) -> None:
        self._inner.set_sublayer(*args, **kwargs)

    # Paddle's other names of these methods.
    add_module = register_module = add_sublayer
    register_parameter = add_parameter
    get_submodule, set_submodule = get_sublayer, set_sublayer

    def named_children(self) -> Iterable[tuple[str, Any]]:
        children: Iterable[tuple[str, Any]] = self._inner.named_children()
        return children

    def named_sublayers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Those of the layer, which is the first one with ``include_self``: the wrapper is not
        among them."""
        yield from self._inner.named_sublayers(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """The parameters of the layer, with the keys of ``state_dict``."""
        yield from self._inner.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """The buffers of the layer, with the keys of ``state_dict``."""
        yield from self._inner.named_buffers(*args, **kwargs)

    # ---- all parts at once

    def apply(self, fn: Callable[[Any], None]) -> Any:
        self._inner.apply(fn)
        return self

    def astype(self, dtype: Any = None) -> Any:
        self._inner.astype(dtype)
        return self

    # ---- state

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the layer, whose keys have no prefix."""
        return self._inner.sharded_state_dict(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The whole state dict of the layer, whose keys have no prefix. Any rank may call it."""
        return self._inner.state_dict(*args, **kwargs)

    def to_static_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`state_dict`, with the buffers that are not persistable."""
        return self._inner.to_static_state_dict(*args, **kwargs)

    def register_state_dict_hook(self, hook: Any) -> Any:
        return self._inner.register_state_dict_hook(hook)

    def _zeroshard_inner(self) -> Any:
        return self._inner

    @property
    def _inner(self) -> Any:
        assert self._wrapped is not None, "the wrapper was created"
        return self._wrapped

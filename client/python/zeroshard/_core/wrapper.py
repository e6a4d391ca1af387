"""Attributes of a model's wrapper that are those of the model."""

from __future__ import annotations

from typing import Any, ClassVar

from ..errors import InvalidArgumentError


class AttributesOfModel:
    """A wrapper writes attributes that it does not have itself to its model, and deletes them from
    it. Precedes the framework's class of models among the base classes of a wrapper."""

    #: The names under which a wrapper has its model.
    _zeroshard_names: ClassVar[tuple[str, ...]] = ("module",)
    #: The framework's word for a model, for errors.
    _zeroshard_kind: ClassVar[str] = "module"

    @property
    def _wrapped(self) -> Any | None:
        """The model; None while the wrapper is created."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        if self._wrapped is None or self._has(name):
            super().__setattr__(name, value)
        elif name in self._zeroshard_names:
            raise self._irreplaceable()
        else:
            setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        if self._wrapped is None or self._has(name):
            super().__delattr__(name)
        elif name in self._zeroshard_names:
            raise self._irreplaceable()
        else:
            delattr(self._wrapped, name)

    def _has(self, name: str) -> bool:
        """Returns True for an attribute of the wrapper itself."""
        return name in self.__dict__ or hasattr(type(self), name)

    def _irreplaceable(self) -> InvalidArgumentError:
        kind = self._zeroshard_kind
        return InvalidArgumentError(
            f"the {kind} of a {type(self).__name__} cannot be replaced or deleted; wrap the other "
            f"{kind} instead, or change the parts of this one (model.head = ...)"
        )

    @property
    def training(self) -> bool:
        """The model's mode."""
        return True if self._wrapped is None else bool(self._wrapped.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if self._wrapped is not None:
            self._wrapped.training = mode

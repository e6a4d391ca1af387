"""The members of a model's wrapper that are those of the model.

A script reads and changes its model through the wrapper: each member of ``nn.Module`` acts on the
module, except for calls, their hooks, and what the wrapper itself is for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from .._core.wrapper import AttributesOfModel
from ._foreign import check_hook, wrapped_later
from ._leftovers import missing
from ._private import (
    READ_BY_DDP,
    Forwarding,
    RefusesDDP,
    is_registering_for_trace,
    registered_module,
)

W = TypeVar("W", bound="ModuleWrapper")

#: What Python looks up in a class: of containers such as ``nn.Sequential``.
_OPERATORS = (
    "__len__",
    "__iter__",
    "__reversed__",
    "__contains__",
    "__getitem__",
    "__setitem__",
    "__delitem__",
    # A scripted module has all of them, and is true.
    "__bool__",
)


class ModuleWrapper(AttributesOfModel, RefusesDDP, Forwarding):
    """A module that runs another one. Attributes that the wrapper does not have itself are read
    from the module, written to it and deleted from it."""

    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        kind: type = type(self)
        found = [
            name for name in _OPERATORS if hasattr(type(module), name) and not hasattr(kind, name)
        ]
        if found:
            object.__setattr__(self, "__class__", _with_operators(kind, *found))
        self.module = module
        # Not methods of the class: torch.distributed.checkpoint expects the state of a class that
        # has them.
        self._keep(get_extra_state=module.get_extra_state, set_extra_state=module.set_extra_state)

    def _keep(self, **attributes: Any) -> None:
        """Sets attributes of the wrapper itself, without torch's registration of modules."""
        self.__dict__.update(attributes)

    @property
    def _wrapped(self) -> nn.Module | None:
        """The module; None while the wrapper is created."""
        return registered_module(self, "module")

    # ---- attributes

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self._wrapped is None:
                raise
        try:
            return getattr(self._wrapped, name)
        except AttributeError as error:
            raise missing(type(self).__name__, name, error) from None

    def __dir__(self) -> list[str]:
        own: list[str] = super().__dir__()  # type: ignore[no-untyped-call]
        # torch.jit.trace reads everything that is listed.
        return sorted({*own, *dir(self.module)} - {READ_BY_DDP})

    def _zeroshard_wrapped_later(self, other: str) -> Exception:
        return wrapped_later(other)

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        check_hook(hook)
        return super().register_forward_pre_hook(hook, **options)

    # ---- parts

    def register_buffer(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.module.register_buffer(name, *args, **kwargs)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self.module.register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self.module.add_module(name, module)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        if is_registering_for_trace():
            return iter([("module", self.module)])  # torch finds each module by its attributes
        return self.module.named_children()

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """As those of the module, which is the first one: the wrapper is not among them."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the module, with the keys of ``state_dict``."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers of the module, with the keys of ``state_dict``."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    # ---- all parts at once

    def apply(self: W, fn: Callable[[nn.Module], None]) -> W:
        self.module.apply(fn)
        return self

    def train(self: W, mode: bool = True) -> W:
        self.module.train(mode)
        return self

    def eval(self: W) -> W:
        self.module.eval()
        return self

    def requires_grad_(self: W, requires_grad: bool = True) -> W:
        self.module.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.module.zero_grad(set_to_none)

    # ---- state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the module, whose keys have no prefix."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a state dict of this wrapper or of the module."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def register_state_dict_pre_hook(self, hook: Any) -> Any:
        return self.module.register_state_dict_pre_hook(hook)

    def register_state_dict_post_hook(self, hook: Any) -> Any:
        return self.module.register_state_dict_post_hook(hook)

    def register_load_state_dict_pre_hook(self, hook: Any) -> Any:
        return self.module.register_load_state_dict_pre_hook(hook)

    def register_load_state_dict_post_hook(self, hook: Any) -> Any:
        return self.module.register_load_state_dict_post_hook(hook)


@functools.cache
def _with_operators(kind: type, *names: str) -> type:
    """The class of a wrapper whose module has these operators: only then may the wrapper have
    them."""
    members = {"__module__": kind.__module__, **_operators(names)}
    return type(kind.__name__, (kind,), members)


def _operators(names: Iterable[str]) -> dict[str, Callable[..., Any]]:
    def of_module(name: str) -> Callable[..., Any]:
        def operator(wrapper: ModuleWrapper, *args: Any) -> Any:
            return getattr(wrapper.module, name)(*args)

        return operator

    return {name: of_module(name) for name in names}

"""The module that comes back from ``group_sharded_parallel``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from .._core.sharding import Sharding
from ..errors import InvalidArgumentError
from ._dtensor import parts_of_state

P = ParamSpec("P")
R = TypeVar("R")


class GroupSharded(nn.Module):
    """A model whose optimizer state, and by level gradients and parameters, are on the shard
    servers.

    It behaves as the model given: attributes that it lacks are the model's, and ``state_dict`` has
    the model's keys.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, sharding: Sharding[Tensor]) -> None:
        super().__init__()
        self.module = module
        # Not a submodule, not a parameter: kept out of torch's books.
        self.__dict__["sharding"] = sharding

    @property
    def level(self) -> str:
        """``os``, ``os_g`` or ``p_g_os``."""
        return self._sharding().level

    def _sharding(self) -> Sharding[Tensor]:
        sharding: Sharding[Tensor] = self.__dict__["sharding"]
        return sharding

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _before_forward(self._sharding())
        if self._sharding().gatherer is None:
            return self.module(*args, **kwargs)
        if torch.compiler.is_compiling():
            _say_not_compiled()
        try:
            return _call_eagerly(self.module, args, kwargs)
        except BaseException:
            self._sharding().unwind()
            raise

    def no_sync(self) -> AbstractContextManager[None]:
        """The backward passes of forwards inside are not the last of their step: gradients
        accumulate here."""
        return self._sharding().holding()

    def summon_full_params(self) -> AbstractContextManager[None]:
        """All parameters are here inside. What rank 0 writes to them counts, if every rank enters
        and leaves."""
        return self._sharding().all_here()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, whole, with its own keys, on whichever ranks call it."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads the model's state; every rank must call it, rank 0's values count.

        Tensors may be whole where the model's are distributed.
        """
        if assign:
            raise InvalidArgumentError(
                "assign is True; it must be False: the parameters belong to the job as they are"
            )
        result = self.module.load_state_dict(parts_of_state(self.module, state_dict), strict=strict)
        self._sharding().follow_changes()
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._sharding().check_movable()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def _outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps ``torch.compile`` out of a function and what it calls."""
    kept_out: Callable[P, R] = torch.compiler.disable(function)
    return kept_out


@_outside_graphs
def _before_forward(sharding: Sharding[Tensor]) -> None:
    sharding.before_forward()


@_outside_graphs
def _call_eagerly(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return module(*args, **kwargs)


@_outside_graphs
def _say_not_compiled() -> None:
    warnings.warn(
        "at level p_g_os a model runs as it is: torch.compile cannot follow parameters that come and go. To have it "
        "compiled, use level os_g",
        stacklevel=2,
    )

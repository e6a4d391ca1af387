"""Compiled modules of a model whose parameters are on the servers.

``torch.compile`` traces a module with plain parameters, so a compiled module is used as a whole: the
parameters of all modules in it are gathered before it runs, are plain while it runs, and are freed
afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from .._core.gather import Gatherer
from ._memory import plain_parameters

P = ParamSpec("P")
R = TypeVar("R")


class _Running:
    """Whether a compiled module is running. ``torch.compile`` guards on this attribute."""

    compiled = False


def is_compiled_running() -> bool:
    """Whether a compiled module is running, which holds the parameters of all modules in it."""
    return _Running.compiled


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Excludes a function and everything that it calls from ``torch.compile``."""
    kept_out: Callable[P, R] = torch.compiler.disable(function)
    return kept_out


@outside_graphs
def warn_not_compiled() -> None:
    """Warns that a part of a compiled program is not compiled."""
    warnings.warn(
        "at level p_g_os torch.compile compiles modules of the model, not functions that call them "
        "or the model that group_sharded_parallel has returned; this part of the program runs "
        "without compilation: use module.compile() for each block of the model instead",
        stacklevel=2,
    )


def gather_compiled(model: nn.Module, gatherer: Gatherer[Tensor]) -> None:
    """Makes the compiled modules in a model gather their parameters. Called before each forward,
    since a program may compile modules at any time."""
    for module in _modules(model):
        call = module._compiled_call_impl
        if isinstance(call, _CompiledCall) and call.gatherer is gatherer:
            continue
        if call is not None:
            module._compiled_call_impl = _CompiledCall(call, module, gatherer)
        elif isinstance(module, torch._dynamo.OptimizedModule):
            module._compiled_call_impl = _CompiledCall(module._call_impl, module, gatherer)


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """As ``model.modules()``, which is ten times slower."""
    modules = [model]
    while modules:
        module = modules.pop()
        yield module
        modules.extend(child for child in module._modules.values() if child is not None)


class _CompiledCall:
    """Gathers the parameters of a compiled module, calls it, and frees them."""

    def __init__(
        self, call: Callable[..., Any], module: nn.Module, gatherer: Gatherer[Tensor]
    ) -> None:
        self.gatherer = gatherer
        self._call = call
        self._parameters = list(module.parameters())
        self._begin, self._end = gatherer.forward_with(self._parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiled_running():  # inside another compiled module
            return self._call(*args, **kwargs)
        if torch.compiler.is_compiling():
            warn_not_compiled()
        return self._call_gathered(args, kwargs)

    @outside_graphs
    def _call_gathered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._begin()
        _Running.compiled = True
        try:
            with plain_parameters(self._parameters):
                return self._call(*args, **kwargs)
        finally:
            _Running.compiled = False
            self._end()

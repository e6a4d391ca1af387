"""Compiled modules of a model whose parameters are on the servers.

``torch.compile`` traces a module with plain parameters, so a compiled module is used as a whole:
the parameters of all modules in it are gathered before it runs, are plain while it runs, and are
freed afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._core.gather import Gatherer
from ._memory import plain_parameters, unwatched
from ._private import (
    compiled_call,
    forward_hooks,
    is_optimized,
    modules_in,
    outside_graphs,
    plain_call,
    set_compiled_call,
)
from ._transforms import check_not_recorded


class _Running:
    """Returns whether a compiled module is running. ``torch.compile`` guards on this attribute."""

    compiled = False


@outside_graphs
def warn_not_compiled() -> None:
    """Warns that a part of a compiled program is not compiled."""
    warnings.warn(
        "at level p_g_os torch.compile compiles modules of the model, not functions that call them "
        "or the sharded model; this part of the program runs "
        "without compilation: use module.compile() for each block of the model instead",
        stacklevel=2,
    )


def gather_compiled(model: nn.Module, gatherer: Gatherer[Tensor]) -> None:
    """Makes the compiled modules in a model gather their parameters. Called before each forward,
    since a program may compile modules at any time."""
    for module in _modules(model):
        compiled = compiled_call(module)
        if isinstance(compiled, _CompiledCall):
            continue
        if compiled is not None or is_optimized(module):
            set_compiled_call(module, _CompiledCall(module, gatherer))
            for inner in module.modules():
                # Every hook has a number of its own, for which torch.compile would make a graph.
                _remove_hooks(inner)


def stop_gathering(module: nn.Module) -> None:
    """Makes a module's forward what it was before it was sharded."""
    _remove_hooks(module)
    compiled = compiled_call(module)
    if isinstance(compiled, _CompiledCall):
        set_compiled_call(module, compiled.replaced)


def _remove_hooks(module: nn.Module) -> None:
    for hook in forward_hooks(module):
        if isinstance(hook, _ForwardHook) and hook.handle is not None:
            hook.handle.remove()


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """As ``model.modules()``, which is ten times slower."""
    modules = [model]
    while modules:
        module = modules.pop()
        yield module
        modules.extend(child for child in modules_in(module).values() if child is not None)


def around_forward(module: nn.Module, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Calls ``begin`` before and ``end`` after each forward of the module, also if it raises an
    error."""
    # The optimizer of the model has imported the compiler.
    before, after = (_ForwardHook(torch.compiler.disable(unwatched(call))) for call in (begin, end))
    before.handle = module.register_forward_pre_hook(before, prepend=True)
    after.handle = module.register_forward_hook(after, always_call=True)


class _ForwardHook:
    """A hook of a module. In a copy of the module, which is not sharded, it has no effect."""

    def __init__(self, call: Callable[[], None] | None = None) -> None:
        self._call = call
        self.handle: RemovableHandle | None = None

    def __call__(self, *_: Any) -> None:
        if self._call is None:
            return
        check_not_recorded()
        if torch.compiler.is_compiling():
            warn_not_compiled()
        self._call()

    def __deepcopy__(self, memo: Any) -> _ForwardHook:
        return _ForwardHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _ForwardHook, ()


class _CompiledCall:
    """Gathers the parameters of a compiled module, calls it, and frees them."""

    def __init__(self, module: nn.Module, gatherer: Gatherer[Tensor]) -> None:
        #: None for the result of ``torch.compile(module)``.
        self.replaced: Callable[..., Any] | None = compiled_call(module)
        self._call = self.replaced or plain_call(module)
        self._parameters = list(module.parameters())
        self._begin, self._end = gatherer.forward_with(self._parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _Running.compiled:  # inside another compiled module
            return self._call(*args, **kwargs)
        if torch.compiler.is_compiling():
            warn_not_compiled()
        return self._call_gathered(args, kwargs)

    @outside_graphs
    def _call_gathered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            self._begin()
            _Running.compiled = True
            with plain_parameters(self._parameters):
                return self._call(*args, **kwargs)
        finally:
            _Running.compiled = False
            self._end()

"""Records the collectives of a call of a model: which ones, how many bytes, and at which module."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.tensor import DTensor

from .._program import Collective
from ._private import DispatchMode, collective_namespaces, process_group, tree_leaves

_NAMES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
}

#: When a collective runs, and at which module ("" for none).
Moment = tuple[str, str]


class Recorder(DispatchMode):
    """Records collectives by the moment at which they run: see :class:`zeroshard._program.Module`
    and ``Description`` for the moments."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.found: dict[Moment, list[Collective]] = {}
        self._modules = modules
        self._moment: Moment = ("before_forward", next(iter(modules), ""))
        self._hooks: list[Any] = []

    def now(self, when: str) -> None:
        """Sets the moment of the following collectives: ``before_loss``, ``after_loss`` or
        ``after_backward``."""
        self._moment = (when, "")

    def __enter__(self) -> Recorder:
        for name, module in self._modules.items():
            # These hooks run outside of those of parallel styles: before the styles' input hooks,
            # and both before and after their output hooks.
            self._hooks.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            self._hooks.append(module.register_forward_hook(self._computed(name), prepend=True))
            self._hooks.append(module.register_forward_hook(self._leave(name)))
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _enter(self, name: str) -> Any:
        def enter(module: nn.Module, inputs: Any) -> None:
            self._moment = ("before_forward", name)

        return enter

    def _computed(self, name: str) -> Any:
        def computed(module: nn.Module, inputs: Any, output: Any) -> None:
            self._moment = ("after_forward", name)
            self._in_backward(output, ("after_backward", name))

        return computed

    def _leave(self, name: str) -> Any:
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self._in_backward(output, ("before_backward", name))

        return leave

    def _in_backward(self, output: Any, moment: Moment) -> None:
        """Sets the moment when the gradient of an output is computed."""

        def arrived(gradient: Tensor) -> None:
            self._moment = moment

        for tensor in tree_leaves(output):
            # If a module's output is returned unchanged by its parent, the hooks of both are on one
            # tensor; only the first sets the moment.
            if (
                isinstance(tensor, Tensor)
                and tensor.requires_grad
                and not getattr(tensor, "_zeroshard_watched", False)
            ):
                tensor._zeroshard_watched = True  # type: ignore[attr-defined]
                self._hooks.append(tensor.register_hook(arrived))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # called again with the local tensors
        packet = getattr(func, "overloadpacket", None)
        name = _NAMES.get(getattr(packet, "__name__", "").rstrip("_"))
        if name is not None and getattr(func, "namespace", "") in collective_namespaces():
            nbytes = args[0].numel() * args[0].element_size()
            group = tuple(get_process_group_ranks(_group(args[-1])))
            self.found.setdefault(self._moment, []).append(Collective(name, group, nbytes))
        return func(*args, **(kwargs or {}))


def _group(named: Any) -> ProcessGroup:
    """The process group of a collective, which may be given by name."""
    if isinstance(named, ProcessGroup):
        return named
    return process_group(named)

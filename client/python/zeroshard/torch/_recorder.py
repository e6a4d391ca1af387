"""What a model's ranks do together, seen in one call of it: which collectives, of which bytes,
around which modules."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup, distributed_c10d, get_process_group_ranks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .._program import Collective

_NAMESPACES = ("_c10d_functional", "_dtensor")
_NAMES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
}

#: When, and around which module ("": none).
Moment = tuple[str, str]


class Recorder(TorchDispatchMode):
    """Inside, collectives are noted by when they happen: see :class:`zeroshard._program.Module` and
    ``Description``."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[Moment, list[Collective]] = {}
        self._modules = modules
        self._moment: Moment = ("before_forward", next(iter(modules), ""))
        self._hooks: list[Any] = []

    def now(self, when: str) -> None:
        """What follows belongs to ``before_loss``, ``after_loss`` or ``after_backward``."""
        self._moment = (when, "")

    def __enter__(self) -> Recorder:
        for name, module in self._modules.items():
            # Around what styles do with inputs, and with outputs: before theirs, and after them.
            self._hooks.append(module.register_forward_pre_hook(self._enter(name), prepend=True))
            self._hooks.append(module.register_forward_hook(self._computed(name), prepend=True))
            self._hooks.append(module.register_forward_hook(self._leave(name)))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
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
        """Once the gradients of an output are there, it is another moment."""

        def arrived(gradient: Tensor) -> None:
            self._moment = moment

        for tensor in tree_leaves(output):
            # Where nothing is done with an output, its hooks are on one tensor, and the first says
            # it.
            if (
                isinstance(tensor, Tensor)
                and tensor.requires_grad
                and not getattr(tensor, "_zeroshard_watched", False)
            ):
                tensor._zeroshard_watched = True  # type: ignore[attr-defined]
                self._hooks.append(tensor.register_hook(arrived))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it comes again as what it is made of
        packet = getattr(func, "_overloadpacket", None)
        name = _NAMES.get(getattr(packet, "__name__", "").rstrip("_"))
        if name is not None and getattr(func, "namespace", "") in _NAMESPACES:
            nbytes = args[0].numel() * args[0].element_size()
            group = tuple(get_process_group_ranks(_group(args[-1])))
            self.found.setdefault(self._moment, []).append(Collective(name, group, nbytes))
        return func(*args, **(kwargs or {}))


def _group(named: Any) -> ProcessGroup:
    """Collectives have their group, or its name."""
    if isinstance(named, ProcessGroup):
        return named
    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    group: ProcessGroup = resolve(named)
    return group

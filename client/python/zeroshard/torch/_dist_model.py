"""``to_static`` and ``DistModel``: a model with train, eval and predict modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    distribute_tensor,
)

from .._dist_arguments import Classes
from .._dist_model import DistModelBase
from .._dist_state import check_state, named_optimizer_state, numbered_optimizer_state
from .._program import Collective, Description
from .._rendezvous import distributed
from .._strategy import Strategy
from ._describe import describe, working_modules
from ._dist_tensors import TorchDistTensors
from ._layer import replace_in_optimizer, replicate_rest
from ._mesh import mesh_ranks, root_mesh
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer
from ._private import is_distributed, tree_leaves
from ._recorder import Moment, Recorder
from ._shard_optimizer import mesh_group
from ._sharded import group_sharded_parallel


class DistModel(DistModelBase[Tensor]):
    """A module with modes, created by :func:`to_static`.

    The initial mode is ``"train"`` with a loss and an optimizer, ``"eval"`` with a loss only, and
    ``"predict"`` with neither. The module's parameters may be plain tensors (data parallelism:
    every rank has its own batches), DTensors (``shard_tensor``, ``shard_layer``; the remaining
    parameters are replicated), or parallelised by styles. Every rank must make every call. A call
    returns the loss of all ranks, or whole outputs.

    Args:
        layer: the module.
        loader: the data loader; stored as ``loader``, may be None.
        loss: ``loss(*outputs, *labels)``, a scalar that is a mean over the batch.
        optimizer: a torch optimizer, whose state moves to the shard servers at the strategy's
            level, or the result of :func:`~zeroshard.torch.shard_optimizer`.
        strategy: its ``sharding`` selects the tensors that the servers hold; by default the
            optimizer state.
    """

    _classes = Classes(
        nn.Module, "torch.nn.Module", GroupSharded, torch.optim.Optimizer, "torch.optim.Optimizer"
    )
    _tensors = TorchDistTensors()
    _optimizer: ShardedOptimizer | None

    def __init__(
        self,
        layer: nn.Module,
        loader: Any = None,
        loss: Callable[..., Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        super().__init__(layer, loader, loss, optimizer, strategy)
        self._by_styles = any(
            "_zeroshard_parallel" in vars(module) or is_distributed(module)
            for module in layer.modules()
        )
        if self._computes_on_mesh():
            made = replicate_rest(layer, self._mesh)
            if optimizer is not None:
                replace_in_optimizer(optimizer, made)
        #: The collectives recorded in the first call of each mode.
        self._seen: dict[str, dict[Moment, list[Collective]]] = {}
        self._recorder: Recorder | None = None
        if isinstance(optimizer, ShardedOptimizer):
            self._optimizer = optimizer
            self._model = GroupSharded(layer, optimizer.sharding)
        elif optimizer is not None:
            level = (strategy or Strategy()).level
            self._model, self._optimizer, _ = group_sharded_parallel(
                layer, optimizer, level, group=self._group()
            )

    # ---- attributes of the module, which are read and written through this object

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._has(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._layer, name, value)

    def __delattr__(self, name: str) -> None:
        if self._has(name):
            object.__delattr__(self, name)
        else:
            delattr(self._layer, name)

    def _has(self, name: str) -> bool:
        """Returns whether the attribute is one of this object itself."""
        # `loader` is the first attribute of a new object.
        return name.startswith("_") or name == "loader" or hasattr(type(self), name)

    @property
    def layer(self) -> nn.Module:
        """The original module."""
        layer: nn.Module = self._layer
        return layer

    @property
    def optimizer(self) -> ShardedOptimizer | None:
        """The optimizer that steps on the servers."""
        return self._optimizer

    # ---- computation

    def _computes_on_mesh(self) -> bool:
        return self._mesh is not None and not self._by_styles

    def _no_grad(self) -> contextlib.AbstractContextManager[object]:
        return torch.no_grad()

    def _flat(self, outputs: Any) -> list[Tensor]:
        return tree_leaves(outputs)

    @contextlib.contextmanager
    def _recorded(self, mode: str) -> Iterator[None]:
        """Records the collectives of the first call of a mode, for programs."""
        if mode in self._seen or self._mesh is None:
            yield
            return
        with Recorder(working_modules(self._layer)) as self._recorder:
            try:
                yield
            finally:
                recorder, self._recorder = self._recorder, None
        self._seen[mode] = recorder.found

    def _record(self, moment: str) -> None:
        if self._recorder is not None:
            self._recorder.now(moment)

    def _losses_differ(self) -> bool:
        together = self._computes_on_mesh() and self._mesh.size() == len(self._ranks())
        return len(self._ranks()) > 1 and not together

    def _mean(self, loss: Tensor) -> Tensor:
        loss = loss.clone()
        dist.all_reduce(loss, group=self._group())
        return loss / len(self._ranks())

    def _group(self) -> Any | None:
        """The process group that trains together: the ranks of the mesh, or of the mesh that it is
        a slice of. None: all ranks."""
        return None if self._mesh is None else mesh_group(root_mesh(self._mesh))

    def _ranks(self) -> list[int]:
        """The ranks of :meth:`_group`."""
        if self._mesh is not None:
            return sorted(mesh_ranks(root_mesh(self._mesh)))
        group = distributed()
        return list(range(group.get_world_size())) if group is not None else [0]

    # ---- programs

    def _describe(self, mode: str) -> Description:
        sharding = None if self._optimizer is None else self._optimizer.sharding
        return describe(
            self._layer,
            sharding,
            self._mesh,
            self._ranks(),
            mean_of_losses=self._losses_differ(),
            seen=self._seen.get(mode),
        )

    # ---- state

    def _model_state(self) -> Mapping[str, Tensor]:
        state: dict[str, Tensor] = self._model.state_dict()
        return {name: self._tensors.whole(value) for name, value in state.items()}

    def _set_model_state(self, state: Mapping[str, Tensor]) -> None:
        own: dict[str, Tensor] = self._model.state_dict()
        check_state(state, own)
        placed: dict[str, Tensor] = {}
        for name, value in state.items():
            has = own[name]
            if isinstance(has, DTensor) and not isinstance(value, DTensor):
                value = distribute_tensor(value.to(has.dtype), has.device_mesh, has.placements)
            placed[name] = value
        self._model.load_state_dict(placed)

    def _optimizer_state(self) -> Mapping[str, Any]:
        assert self._optimizer is not None  # asked for only where there is one
        return named_optimizer_state(self._optimizer.state_dict()["state"], self._parameter_names())

    def _set_optimizer_state(self, state: Mapping[str, Any]) -> None:
        assert self._optimizer is not None  # asked for only where there is one
        now = self._optimizer.state_dict()
        given = numbered_optimizer_state(state, self._parameter_names())
        self._optimizer.load_state_dict(
            {"state": {**now["state"], **given}, "param_groups": now["param_groups"]}
        )

    def _parameter_names(self) -> dict[int, str]:
        """The names of the optimizer's parameters, by their number."""
        assert self._optimizer is not None  # asked for only where there is one
        by_id = {id(entry.tensor): entry.name for entry in self._optimizer.sharding.job.entries}
        by_id |= {id(parameter): name for name, parameter in self._layer.named_parameters()}
        parameters = [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]
        return {number: by_id[id(parameter)] for number, parameter in enumerate(parameters)}


def to_static(
    layer: nn.Module,
    loader: Any = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: Strategy | None = None,
) -> DistModel:
    """Creates a :class:`DistModel` from a module. The arguments are those of the class."""
    return DistModel(layer, loader, loss, optimizer, strategy)

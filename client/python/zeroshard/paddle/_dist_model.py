"""``to_static`` and ``DistModel``: a model with train, eval and predict modes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import paddle
import paddle.distributed as dist

from .._dist_arguments import Classes
from .._dist_model import DistModelBase
from .._dist_state import check_state
from .._program import Description
from .._rendezvous import world_group
from . import _conversion
from ._describe import describe
from ._dist_tensors import PaddleDistTensors
from ._dtensor import parts_of_state, whole
from ._layer import replicate_rest
from ._mesh import covers_world
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer
from ._save import whole_state
from ._sharded import group_sharded_parallel
from ._strategy import Strategy


class DistModel(DistModelBase[Any]):
    """A layer with modes, created by :func:`to_static`.

    The initial mode is ``"train"`` with a loss and an optimizer, ``"eval"`` with a loss only, and
    ``"predict"`` with neither. The layer's parameters may be plain tensors (data parallelism: every
    rank has its own batches) or distributed (``shard_tensor``, ``shard_layer``; the remaining
    parameters are replicated). Every rank must make every call. A call returns the loss of all
    ranks, or whole outputs.

    Args:
        layer: the layer.
        loader: the data loader; stored as ``loader``, may be None.
        loss: ``loss(*outputs, *labels)``, a scalar that is a mean over the batch.
        optimizer: a Paddle optimizer, whose state moves to the shard servers at the strategy's
            level, or the result of :func:`~zeroshard.paddle.shard_optimizer`.
        strategy: its ``sharding`` selects the tensors that the servers hold; by default the
            optimizer state.
        metrics: has no effect, as in Paddle: a call returns the loss.
        input_spec: has no effect, since the layer is not traced.
    """

    _classes = Classes(
        paddle.nn.Layer,
        "paddle.nn.Layer",
        GroupSharded,
        _conversion.Optimizer,
        "paddle.optimizer.Optimizer",
    )
    _tensors = PaddleDistTensors()
    _optimizer: ShardedOptimizer | None

    def __init__(
        self,
        layer: Any,
        loader: Any = None,
        loss: Callable[..., Any] | None = None,
        optimizer: Any | None = None,
        strategy: Strategy | None = None,
        metrics: Any = None,
        input_spec: Any = None,
    ) -> None:
        super().__init__(layer, loader, loss, optimizer, strategy)
        if isinstance(strategy, Strategy):
            strategy.check()
        if self._mesh is not None:
            replicate_rest(layer, self._mesh)
        if isinstance(optimizer, ShardedOptimizer):
            self._optimizer = optimizer
            self._model = GroupSharded(layer, optimizer.sharding)
        elif optimizer is not None:
            level = (strategy or Strategy()).level
            self._model, self._optimizer, _ = group_sharded_parallel(layer, optimizer, level)

    @property
    def layer(self) -> Any:
        """The original layer."""
        return self._layer

    @property
    def optimizer(self) -> ShardedOptimizer | None:
        """The optimizer that steps on the servers."""
        return self._optimizer

    # ---- computation

    def _no_grad(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = paddle.no_grad()
        return context

    def _flat(self, outputs: Any) -> list[Any]:
        return list(paddle.utils.flatten(outputs))

    def _losses_differ(self) -> bool:
        return world_group().size > 1 and (self._mesh is None or not covers_world(self._mesh))

    def _mean(self, loss: Any) -> Any:
        loss = loss.clone()
        dist.all_reduce(loss)
        return loss / world_group().size

    # ---- programs

    def _describe(self, mode: str) -> Description:
        sharding = None if self._optimizer is None else self._optimizer.sharding
        return describe(
            self._layer, sharding, world_group().ranks, mean_of_losses=self._losses_differ()
        )

    # ---- state

    def state_dict(self, mode: str = "all", split_fusion: bool = True) -> dict[str, Any]:
        """Whole tensors by name: the model's (``"param"``), the optimizer's (``"opt"``), or both
        (``"all"``).

        The names of the optimizer's tensors are ``optimizer.<parameter>.<tensor>``.
        ``split_fusion`` has no effect: no parameters are fused.
        """
        return super().state_dict(mode)

    def _model_state(self) -> Mapping[str, Any]:
        if self._optimizer is not None:
            return whole_state(self._model)
        return {name: whole(value) for name, value in self._layer.state_dict().items()}

    def _set_model_state(self, state: Mapping[str, Any]) -> None:
        check_state(state, self._model.state_dict())
        self._model.set_state_dict(parts_of_state(self._model, state))

    def _optimizer_state(self) -> Mapping[str, Any]:
        assert self._optimizer is not None  # asked for only where there is one
        return self._optimizer.state_dict()

    def _set_optimizer_state(self, state: Mapping[str, Any]) -> None:
        assert self._optimizer is not None  # asked for only where there is one
        self._optimizer.set_state_dict(dict(state))


def to_static(
    layer: Any,
    loader: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Any | None = None,
    strategy: Strategy | None = None,
    input_spec: Any = None,
) -> DistModel:
    """Creates a :class:`DistModel` from a layer. The arguments are those of the class."""
    return DistModel(layer, loader, loss, optimizer, strategy, input_spec=input_spec)

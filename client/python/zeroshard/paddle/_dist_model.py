"""``to_static`` and ``DistModel``: a model that trains, is evaluated or predicts, by mode, through the shard servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import paddle
import paddle.distributed as dist

from .._dist_model import DistModelBase, Strategy
from .._program import Description
from .._rendezvous import place
from ..errors import InvalidArgument
from . import kinds
from ._describe import describe
from ._dtensor import assembled, local, parts_of_state, redistributed, whole
from ._layer import replicate_rest
from ._mesh import has_everybody, mesh_text
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer
from ._save import whole_state
from ._sharded import group_sharded_parallel


class DistModel(DistModelBase[Any]):
    """A layer with modes, made by :func:`to_static`.

    With a loss and an optimizer the first mode is ``"train"``, with a loss alone ``"eval"``, with neither ``"predict"``.
    The layer's parameters are plain tensors (every rank has its own batches: data parallelism), or distributed
    (``shard_tensor``, ``shard_layer``): then those that are left are replicated. Every rank makes every call; the loss of a
    call is that of all ranks, and outputs are whole.

    Args:
        layer: the layer.
        loader: what gives batches; kept as ``loader``. None is allowed.
        loss: ``loss(*outputs, *labels)``, a scalar that is a mean over the batch.
        optimizer: an optimizer of Paddle, which moves to the shard servers at the strategy's level, or one of
            :func:`~zeroshard.paddle.shard_optimizer`.
        strategy: its ``sharding`` says what the servers hold; the optimizer's state by default.
    """

    _tensor_name = "paddle.Tensor"

    def __init__(
        self,
        layer: Any,
        loader: Any = None,
        loss: Callable[..., Any] | None = None,
        optimizer: Any | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        _check(layer, loss, optimizer, strategy)
        super().__init__(loss=loss, optimizer=optimizer)
        self.loader = loader
        self._layer = layer
        self._mesh = _mesh_of(layer)
        if self._mesh is not None:
            replicate_rest(layer, self._mesh)
        self._model: Any = layer
        self._optimizer: ShardedOptimizer | None = None
        if isinstance(optimizer, ShardedOptimizer):
            self._optimizer = optimizer
            self._model = GroupSharded(layer, optimizer.sharding)
        elif optimizer is not None:
            level = (strategy or Strategy()).level
            self._model, self._optimizer, _ = group_sharded_parallel(layer, optimizer, level)

    @property
    def layer(self) -> Any:
        """The layer that was given."""
        return self._layer

    @property
    def optimizer(self) -> ShardedOptimizer | None:
        """The optimizer that steps on the servers."""
        return self._optimizer

    # ---- calls

    def _train_step(self, inputs: list[Any], labels: list[Any]) -> Any:
        optimizer = self._optimizer
        assert optimizer is not None  # the mode is checked
        self._model.train()
        optimizer.clear_grad()
        loss = self._loss_of(inputs, labels)
        mean = self._everybodys(loss.detach())
        loss.backward()
        optimizer.step()
        return mean

    def _evaluate(self, inputs: list[Any], labels: list[Any]) -> Any:
        self._model.eval()
        with paddle.no_grad():
            return self._everybodys(self._loss_of(inputs, labels))

    def _predict(self, inputs: list[Any]) -> list[Any]:
        self._model.eval()
        with paddle.no_grad():
            return [_whole_output(output, inputs) for output in self._outputs(inputs)]

    def _loss_of(self, inputs: list[Any], labels: list[Any]) -> Any:
        outputs = self._outputs(inputs)
        distributed = any(_is_distributed(output) for output in outputs)
        loss = self._compute_loss(outputs, [self._placed(label, distributed) for label in labels])
        if not isinstance(loss, paddle.Tensor) or loss.size != 1:
            said = f"of shape {list(loss.shape)}" if isinstance(loss, paddle.Tensor) else f"a {type(loss).__name__}"
            raise InvalidArgument(f"the loss is {said}; it must be a tensor of one element")
        return loss

    def _outputs(self, inputs: list[Any]) -> list[Any]:
        if "_zeroshard_input_fn" not in vars(self._layer):
            inputs = [self._placed(value, self._mesh is not None) for value in inputs]
        return list(paddle.utils.flatten(self._model(*inputs)))

    def _placed(self, value: Any, distributed: bool) -> Any:
        """A tensor as the model takes it: on its mesh, or this rank's part."""
        if not distributed:
            return _part(value) if value.is_dist() else value
        assert self._mesh is not None  # what is distributed comes from parameters on a mesh, or is for them
        everywhere = [dist.Replicate()] * self._mesh.ndim
        if not value.is_dist():
            return assembled(value, value.shape, self._mesh, everywhere)
        return value if value.process_mesh == self._mesh else dist.reshard(value, self._mesh, everywhere)

    def _everybodys(self, loss: Any) -> Any:
        """The mean over the ranks, where each has a loss of its own."""
        loss = whole(loss)
        if self._losses_differ():
            loss = loss.clone()
            dist.all_reduce(loss)
            loss = loss / place().world
        return loss

    def _losses_differ(self) -> bool:
        """Whether ranks have losses of their own: unless they compute one together, on a mesh of all of them."""
        return place().world > 1 and (self._mesh is None or not has_everybody(self._mesh))

    # ---- programs

    def _describe(self, mode: str) -> Description:
        sharding = None if self._optimizer is None else self._optimizer.sharding
        return describe(self._layer, sharding, range(place().world), mean_of_losses=self._losses_differ())

    # ---- state

    def _model_state(self) -> Mapping[str, Any]:
        if self._optimizer is not None:
            return whole_state(self._model)
        return {name: whole(value) for name, value in self._layer.state_dict().items()}

    def _set_model_state(self, state: Mapping[str, Any]) -> None:
        own = self._model.state_dict()
        unknown, missing = [n for n in state if n not in own], [n for n in own if n not in state]
        if unknown or missing:
            raise InvalidArgument(
                f"the state has {unknown or 'nothing'} that the model has not, and lacks {missing or 'nothing'}; it must have "
                "the model's names"
            )
        for name, value in state.items():
            if list(value.shape) != list(own[name].shape):
                raise InvalidArgument(
                    f"{name!r} of the state has shape {list(value.shape)}; it must have the model's, {list(own[name].shape)}"
                )
        self._model.set_state_dict(parts_of_state(self._model, state))

    def _optimizer_state(self) -> Mapping[str, Any]:
        assert self._optimizer is not None  # asked for only where there is one
        return self._optimizer.state_dict()

    def _set_optimizer_state(self, state: Mapping[str, Any]) -> None:
        assert self._optimizer is not None  # asked for only where there is one
        self._optimizer.set_state_dict(dict(state))

    # ---- what the base asks

    def _is_tensor(self, value: object) -> bool:
        return isinstance(value, paddle.Tensor)

    def _forward(self) -> Callable[..., Any]:
        forward: Callable[..., Any] = self._layer.forward
        return forward


def to_static(
    layer: Any,
    loader: Any = None,
    loss: Callable[..., Any] | None = None,
    optimizer: Any | None = None,
    strategy: Strategy | None = None,
) -> DistModel:
    """A :class:`DistModel` of a layer; the arguments are its."""
    return DistModel(layer, loader, loss, optimizer, strategy)


def _check(layer: object, loss: object, optimizer: object, strategy: object) -> None:
    if not isinstance(layer, paddle.nn.Layer) or isinstance(layer, GroupSharded):
        raise InvalidArgument(f"layer is a {type(layer).__name__}; it must be a paddle.nn.Layer that is not wrapped already")
    if loss is not None and not callable(loss):
        raise InvalidArgument(f"loss is {loss!r}; it must be a function of outputs and labels, a layer, or None")
    if optimizer is not None and not isinstance(optimizer, kinds.Optimizer):
        raise InvalidArgument(f"optimizer is a {type(optimizer).__name__}; it must be a paddle.optimizer.Optimizer, or None")
    if strategy is not None and not isinstance(strategy, Strategy):
        raise InvalidArgument(f"strategy is a {type(strategy).__name__}; it must be a zeroshard.paddle.Strategy, or None")
    if isinstance(optimizer, ShardedOptimizer) and strategy is not None and strategy.sharding.enable:
        if strategy.level != optimizer.sharding.level:
            raise InvalidArgument(
                f"the strategy's level is {strategy.level!r} and the sharded optimizer's {optimizer.sharding.level!r}; one "
                "of them must say it"
            )


def _mesh_of(layer: Any) -> Any | None:
    """The mesh that a layer's distributed parameters are on; None if it has none."""
    found: Any | None = None
    for name, parameter in layer.named_parameters():
        if parameter.is_dist():
            if found is not None and parameter.process_mesh != found:
                raise InvalidArgument(
                    f"parameter {name!r} is on the mesh {mesh_text(parameter.process_mesh)}, and others on "
                    f"{mesh_text(found)}; all must be on one"
                )
            found = parameter.process_mesh
    return found


def _is_distributed(value: Any) -> bool:
    return isinstance(value, paddle.Tensor) and bool(value.is_dist())


def _part(value: Any) -> Any:
    """What this rank computes with where the model is not distributed: its part of the batch, or all of it."""
    for parts, placement in zip(value.process_mesh.shape, value.placements, strict=True):
        if placement.is_shard() and value.shape[placement.get_dim()] % parts:
            raise InvalidArgument(
                f"a batch has {value.shape[placement.get_dim()]} samples; it must divide by the {parts} ranks, whose losses "
                "are averaged"
            )
    return local(redistributed(value, [dist.Replicate() if p.is_partial() else p for p in value.placements]))


def _whole_output(output: Any, inputs: list[Any]) -> Any:
    """An output on every rank: of all parts of the batch, where the inputs were parts."""
    if not isinstance(output, paddle.Tensor) or output.is_dist():
        return whole(output) if isinstance(output, paddle.Tensor) else output
    cut = next((v for v in inputs if v.is_dist() and any(p.is_shard() and p.get_dim() == 0 for p in v.placements)), None)
    if cut is None or output.ndim == 0 or output.shape[0] != cut._local_shape[0]:
        return output
    return whole(assembled(output, [cut.shape[0], *output.shape[1:]], cut.process_mesh, cut.placements))

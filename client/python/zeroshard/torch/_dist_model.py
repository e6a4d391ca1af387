"""``to_static`` and ``DistModel``: a model that trains, is evaluated or predicts, by mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves

from .._dist_model import DistModelBase, Strategy, named_optimizer_state, numbered_optimizer_state
from .._program import Collective, Description
from .._rendezvous import distributed
from ..errors import InvalidArgument
from ._describe import describe, working_modules
from ._layer import replace_in_optimizer, replicate_rest
from ._mesh import mesh_ranks, mesh_text, root_mesh
from ._model import GroupSharded
from ._optimizer import ShardedOptimizer
from ._placement import reshard
from ._recorder import Moment, Recorder
from ._shard_optimizer import mesh_group
from ._sharded import group_sharded_parallel


class DistModel(DistModelBase[Tensor]):
    """A module with modes, made by :func:`to_static`.

    With a loss and an optimizer the first mode is ``"train"``, with a loss alone ``"eval"``, with neither
    ``"predict"``. The module's parameters are plain tensors (every rank has its own batches: data parallelism),
    DTensors (``shard_tensor``, ``shard_layer``: parameters that are left are replicated), or parallelised by styles.
    Every rank makes every call; the loss of a call is that of all ranks, and outputs are whole.

    Args:
        layer: the module.
        loader: what gives batches; kept as ``loader``. None is allowed.
        loss: ``loss(*outputs, *labels)``, a scalar that is a mean over the batch.
        optimizer: a torch optimizer, which moves to the shard servers at the strategy's level, or one of
            :func:`~zeroshard.torch.shard_optimizer`.
        strategy: its ``sharding`` says what the servers hold; the optimizer's state by default.
    """

    _tensor_name = "torch.Tensor"

    def __init__(
        self,
        layer: nn.Module,
        loader: Any = None,
        loss: Callable[..., Tensor] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        _check(layer, loss, optimizer, strategy)
        super().__init__(loss=loss, optimizer=optimizer)
        self.loader = loader
        self._layer = layer
        self._mesh = _mesh_of(layer)
        self._by_styles = any(
            "_zeroshard_parallel" in vars(module) or getattr(module, "_distribute_module_applied", False)
            for module in layer.modules()
        )
        if self._mesh is not None and not self._by_styles:
            made = replicate_rest(layer, self._mesh)
            if optimizer is not None:
                replace_in_optimizer(optimizer, made)
        #: By mode, what its first call has shown.
        self._seen: dict[str, dict[Moment, list[Collective]]] = {}
        self._model: nn.Module = layer
        self._optimizer: ShardedOptimizer | None = None
        if isinstance(optimizer, ShardedOptimizer):
            self._optimizer = optimizer
            self._model = GroupSharded(layer, optimizer.sharding)
        elif optimizer is not None:
            level = (strategy or Strategy()).level
            self._model, self._optimizer, _ = group_sharded_parallel(layer, optimizer, level, group=self._group())

    @property
    def layer(self) -> nn.Module:
        """The module that was given."""
        return self._layer

    @property
    def optimizer(self) -> ShardedOptimizer | None:
        """The optimizer that steps on the servers."""
        return self._optimizer

    # ---- calls

    def _train_step(self, inputs: list[Tensor], labels: list[Tensor]) -> Tensor:
        optimizer = self._optimizer
        assert optimizer is not None  # the mode is checked
        self._model.train()
        optimizer.zero_grad()
        with self._seen_once("train") as recorder:
            loss = self._loss_of(inputs, labels, recorder)
            mean = self._everybodys(loss.detach())
            loss.backward()
            _now(recorder, "after_backward")
            optimizer.step()
        return mean

    def _evaluate(self, inputs: list[Tensor], labels: list[Tensor]) -> Tensor:
        self._model.eval()
        with torch.no_grad(), self._seen_once("eval") as recorder:
            return self._everybodys(self._loss_of(inputs, labels, recorder))

    def _predict(self, inputs: list[Tensor]) -> list[Tensor]:
        self._model.eval()
        with torch.no_grad():
            with self._seen_once("predict"):
                outputs = self._outputs(inputs)
            return [_whole(output, inputs) for output in outputs]

    def _loss_of(self, inputs: list[Tensor], labels: list[Tensor], recorder: Recorder | None) -> Tensor:
        outputs = self._outputs(inputs)
        distributed_outputs = any(isinstance(output, DTensor) for output in outputs)
        _now(recorder, "before_loss")
        loss = self._compute_loss(outputs, [self._placed(label, distributed_outputs) for label in labels])
        _now(recorder, "after_loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise InvalidArgument(f"the loss is {_kind(loss)}; it must be a tensor of one element")
        return loss

    @contextlib.contextmanager
    def _seen_once(self, mode: str) -> Iterator[Recorder | None]:
        """The first call of a mode shows which collectives it has, for programs."""
        if mode in self._seen or self._mesh is None:
            yield None
            return
        with Recorder(working_modules(self._layer)) as recorder:
            yield recorder
        self._seen[mode] = recorder.found

    def _outputs(self, inputs: list[Tensor]) -> list[Tensor]:
        as_dtensors = self._mesh is not None and not self._by_styles
        if "_zeroshard_input_fn" not in vars(self._layer):
            inputs = [self._placed(value, as_dtensors) for value in inputs]
        return tree_leaves(self._model(*inputs))

    def _placed(self, value: Tensor, as_dtensor: bool) -> Tensor:
        """A tensor as the model takes it: on its mesh, or this rank's part."""
        if not as_dtensor:
            return _part(value) if isinstance(value, DTensor) else value
        assert self._mesh is not None  # DTensors come from parameters on a mesh, or from those of a loader
        if not isinstance(value, DTensor):
            return DTensor.from_local(value, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)
        if value.device_mesh == self._mesh:
            return value
        return reshard(value, self._mesh, [Replicate()] * self._mesh.ndim)

    def _everybodys(self, loss: Tensor) -> Tensor:
        """The mean over the ranks, where each has a loss of its own."""
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        dist = distributed()
        if dist is not None and self._losses_differ():
            loss = loss.clone()
            dist.all_reduce(loss, group=self._group())
            loss /= len(self._ranks())
        return loss

    def _losses_differ(self) -> bool:
        """Whether ranks have losses of their own: unless they compute one together, on a mesh of all of them."""
        together = self._mesh is not None and not self._by_styles and self._mesh.size() == len(self._ranks())
        return len(self._ranks()) > 1 and not together

    def _group(self) -> Any | None:
        """Who trains, or evaluates, together: the ranks of the mesh, or of the one that it is a slice of; None: all."""
        return None if self._mesh is None else mesh_group(root_mesh(self._mesh))

    def _ranks(self) -> list[int]:
        """Their ranks."""
        if self._mesh is not None:
            return sorted(mesh_ranks(root_mesh(self._mesh)))
        dist = distributed()
        return list(range(dist.get_world_size())) if dist is not None else [0]

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
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}

    def _set_model_state(self, state: Mapping[str, Tensor]) -> None:
        own: dict[str, Tensor] = self._model.state_dict()
        unknown, missing = [n for n in state if n not in own], [n for n in own if n not in state]
        if unknown or missing:
            raise InvalidArgument(
                f"the state has {unknown or 'nothing'} that the model has not, and lacks {missing or 'nothing'}; it "
                "must have the model's names"
            )
        placed: dict[str, Tensor] = {}
        for name, value in state.items():
            has = own[name]
            if value.shape != has.shape:
                raise InvalidArgument(
                    f"{name!r} of the state has shape {list(value.shape)}; it must have the model's, {list(has.shape)}"
                )
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
        self._optimizer.load_state_dict({"state": {**now["state"], **given}, "param_groups": now["param_groups"]})

    def _parameter_names(self) -> dict[int, str]:
        """The names of what the optimizer has, by its numbers."""
        assert self._optimizer is not None  # asked for only where there is one
        by_id = {id(entry.tensor): entry.name for entry in self._optimizer.sharding.job.entries}
        by_id |= {id(parameter): name for name, parameter in self._layer.named_parameters()}
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return {number: by_id[id(parameter)] for number, parameter in enumerate(parameters)}

    # ---- what the base asks

    def _is_tensor(self, value: object) -> bool:
        return isinstance(value, Tensor)

    def _forward(self) -> Callable[..., Any]:
        forward: Callable[..., Any] = self._layer.forward
        return forward


def to_static(
    layer: nn.Module,
    loader: Any = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    strategy: Strategy | None = None,
) -> DistModel:
    """A :class:`DistModel` of a module; the arguments are its."""
    return DistModel(layer, loader, loss, optimizer, strategy)


def _check(layer: object, loss: object, optimizer: object, strategy: object) -> None:
    if not isinstance(layer, nn.Module) or isinstance(layer, GroupSharded):
        raise InvalidArgument(f"layer is a {type(layer).__name__}; it must be a torch.nn.Module that is not wrapped")
    if loss is not None and not callable(loss):
        raise InvalidArgument(f"loss is {loss!r}; it must be a function of outputs and labels, a module, or None")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer, or None")
    if strategy is not None and not isinstance(strategy, Strategy):
        raise InvalidArgument(f"strategy is a {type(strategy).__name__}; it must be a Strategy of ours, or None")
    if isinstance(optimizer, ShardedOptimizer) and strategy is not None and strategy.sharding.enable:
        if strategy.level != optimizer.sharding.level:
            raise InvalidArgument(
                f"the strategy's level is {strategy.level!r} and the sharded optimizer's {optimizer.sharding.level!r}; "
                "one of them must say it"
            )


def _mesh_of(layer: nn.Module) -> DeviceMesh | None:
    """The mesh that a module's DTensors are on; None if it has none."""
    found: DeviceMesh | None = None
    for name, parameter in layer.named_parameters():
        if isinstance(parameter, DTensor):
            if found is not None and parameter.device_mesh != found:
                raise InvalidArgument(
                    f"parameter {name!r} is on the mesh {mesh_text(parameter.device_mesh)}, and others on "
                    f"{mesh_text(found)}; all must be on one"
                )
            found = parameter.device_mesh
    return found


def _part(value: DTensor) -> Tensor:
    """What this rank computes with where the model is not distributed: its part of the batch, or all of it."""
    for parts, placement in zip(value.device_mesh.shape, value.placements, strict=True):
        if isinstance(placement, Shard) and value.shape[placement.dim] % parts:
            raise InvalidArgument(
                f"a batch has {value.shape[placement.dim]} samples; it must divide by the {parts} ranks, whose losses "
                "are averaged"
            )
    complete: list[Placement] = [Replicate() if isinstance(p, Partial) else p for p in value.placements]
    return value.redistribute(placements=complete).to_local()


def _whole(output: Any, inputs: list[Tensor]) -> Any:
    """An output on every rank: of all parts of the batch, where the inputs were parts."""
    if isinstance(output, DTensor):
        return output.full_tensor()
    cut = next((value for value in inputs if isinstance(value, DTensor) and Shard(0) in value.placements), None)
    if cut is None or not isinstance(output, Tensor) or output.dim() == 0 or len(output) != len(cut.to_local()):
        return output
    return DTensor.from_local(output, cut.device_mesh, cut.placements, run_check=False).full_tensor()


def _now(recorder: Recorder | None, when: str) -> None:
    if recorder is not None:
        recorder.now(when)


def _kind(value: object) -> str:
    return f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"

"""Integration with Hugging Face Accelerate.

:class:`Accelerator` takes the place of ``accelerate.Accelerator``. Its ``prepare`` shards a model
and its optimizer where Accelerate would wrap the model in DistributedDataParallel. Everything else
(data loaders, autocast, accumulation, ``gather``, checkpoints) is Accelerate's own.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from .._versions import check_versions
from ..errors import InvalidArgumentError
from ..torch import GradScaler, GroupSharded, ShardedOptimizer, group_sharded_parallel, join
from ..torch._sharded_module import ShardedModule
from ._missing import missing
from ._private import note_skipped, prepared_loaders, prepared_models, prepared_optimizers

try:
    import accelerate
    from accelerate.data_loader import DataLoaderDispatcher
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DistributedType
except ImportError as error:
    raise missing("accelerate", error) from error

__all__ = ["Accelerator"]

#: The ways of distributing a model that ZeroShard replaces.
_REPLACED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


class Accelerator(accelerate.Accelerator):
    """An ``accelerate.Accelerator`` whose models are trained by shard servers."""

    #: The gradient scaler of fp16 training.
    scaler: Any

    def __init__(
        self,
        *args: Any,
        level: str,
        sharding_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            level: ``"os"``, ``"os_g"`` or ``"p_g_os"``, as for
                :func:`~zeroshard.torch.group_sharded_parallel`.
            sharding_options: further arguments of that function, such as ``segment_size``.

        The other arguments are those of ``accelerate.Accelerator``.
        """
        super().__init__(*args, **kwargs)
        self._shard_with(level, sharding_options)

    @classmethod
    def sharing(
        cls, accelerator: Any, level: str, sharding_options: Mapping[str, Any] | None
    ) -> Accelerator:
        """An accelerator that shares the state of an ``accelerate.Accelerator``."""
        shared = cls.__new__(cls)
        shared.__dict__ = accelerator.__dict__
        shared._shard_with(level, sharding_options)
        return shared

    def _shard_with(self, level: str, sharding_options: Mapping[str, Any] | None) -> None:
        check_versions(("accelerate",))
        if self.distributed_type not in _REPLACED:
            raise InvalidArgumentError(
                f"Accelerate is configured for {self.distributed_type}, which shards the model "
                "itself; remove its plugin, or use accelerate.Accelerator"
            )
        if self.parallelism_config is not None:
            raise InvalidArgumentError(
                "parallelism_config is given; it must be None, since all ranks of an Accelerator "
                "of ZeroShard train replicas"
            )
        if self.fp8_enabled:
            raise InvalidArgumentError("mixed_precision is 'fp8', which ZeroShard does not support")
        ddp = self.ddp_handler
        if ddp is not None and ddp.comm_hook.value != "no":
            raise InvalidArgumentError(
                f"comm_hook is {ddp.comm_hook.value!r}; it must not be set, since the servers "
                "average the gradients"
            )
        self._level = level
        # DistributedDataParallel broadcasts the buffers of rank 0, unless told otherwise.
        sync_buffers = ddp is None or bool(ddp.broadcast_buffers)
        self._options = {"sync_buffers": sync_buffers, **(sharding_options or {})}
        if self.scaler is not None:
            self.scaler = GradScaler.sharing(self.scaler)

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """As Accelerate's. A model that is trained must be passed together with its optimizer."""
        places = device_placement if device_placement is not None else [None] * len(args)
        if len(places) != len(args):
            raise InvalidArgumentError(
                f"device_placement has {len(places)} elements; it must have {len(args)}, one for "
                "each object"
            )
        objects = list(args)
        for index, optimizer in enumerate(args):
            if isinstance(optimizer, torch.optim.Optimizer) and not _is_prepared(optimizer):
                number = _index_of_model(objects, optimizer)
                given = objects[number]
                model = self.prepare_model(given, places[number], evaluation_mode=True)
                objects[number], objects[index], _ = group_sharded_parallel(
                    model, optimizer, self._level, **self._options
                )
                # A rank with fewer batches takes the loss scale of the others (`join`).
                objects[number]._zeroshard.scaler = self.scaler
                models = prepared_models(self)
                models[models.index(given)] = objects[number]
        return super().prepare(*objects, device_placement=device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        """As Accelerate's, for models that are not trained. Models that are trained must be passed
        to :meth:`prepare`."""
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if trains and not evaluation_mode and not isinstance(model, ShardedModule):
            raise InvalidArgumentError(
                f"a {type(model).__name__} with trainable parameters is prepared without its "
                "optimizer; pass both to the same call of prepare(), or call "
                "prepare_model(model, evaluation_mode=True) if the model is not trained"
            )
        return super().prepare_model(model, device_placement, evaluation_mode=True)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As Accelerate's, for optimizers that are not sharded yet or whose model is sharded."""
        if not isinstance(optimizer, ShardedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        prepared = _PreparedOptimizer(optimizer, device_placement=False, scaler=self.scaler)
        prepared_optimizers(self).append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """As Accelerate's. A scheduler of an optimizer that was sharded follows the sharded one."""
        prepared = super().prepare_scheduler(scheduler)
        original = getattr(scheduler, "optimizer", None)
        for optimizer in prepared_optimizers(self):
            if isinstance(optimizer, _PreparedOptimizer) and optimizer.stands_for(original):
                prepared.optimizers = [optimizer]
        return prepared

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """As Accelerate's, also in a single process."""
        with model.no_sync() if isinstance(model, ShardedModule) else super().no_sync(model):
            yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: Any) -> Iterator[None]:
        """As Accelerate's."""
        if isinstance(model, ShardedModule):
            model._zeroshard.sharding.backward.hold = False
            yield
            return
        with accelerate.Accelerator.trigger_sync_in_backward(model):
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> Iterator[None]:
        """As Accelerate's with ranks on GPUs: if batches are not even, ranks may have different
        numbers of them. Schedulers are called once for each batch of a rank, so they must be
        brought to the same learning rate after the loop."""
        even = self.even_batches if even_batches is None else even_batches
        if self.num_processes == 1:
            yield
            return
        batches = contextlib.nullcontext() if even_batches is None else self._batches(even_batches)
        with batches, join(list(joinables), enable=not even):
            yield

    @contextlib.contextmanager
    def _batches(self, even: bool) -> Iterator[None]:
        """A context in which data loaders give all ranks the same number of batches, or not."""
        prepared = prepared_loaders(self)
        loaders = [one for one in prepared if not isinstance(one, DataLoaderDispatcher)]
        if len(loaders) < len(prepared):
            warnings.warn(
                "even_batches has no effect on data loaders with dispatch_batches=True",
                stacklevel=5,
            )
        before = [loader.batch_sampler.even_batches for loader in loaders]
        for loader in loaders:
            loader.batch_sampler.even_batches = even
        try:
            yield
        finally:
            for loader, value in zip(loaders, before, strict=True):
                loader.batch_sampler.even_batches = value

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's: the model that was passed to :meth:`prepare`."""
        model = model.module if isinstance(model, GroupSharded) else model
        return super().unwrap_model(model, *args, **kwargs)


class _PreparedOptimizer(AcceleratedOptimizer):
    """Accelerate's wrapper of a sharded optimizer."""

    def stands_for(self, optimizer: Any) -> bool:
        """Returns whether the sharded optimizer was made of this one."""
        return self.optimizer._given is optimizer

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.scaler is not None and self.gradient_state.sync_gradients:
            # The servers skip the step. Accelerate looks at whether `step` was called.
            note_skipped(self, not self.optimizer.last_report.applied)


def _is_prepared(optimizer: Any) -> bool:
    return isinstance(optimizer, AcceleratedOptimizer | ShardedOptimizer)


def _index_of_model(objects: list[Any], optimizer: torch.optim.Optimizer) -> int:
    """The position of the model whose parameters the optimizer trains."""
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = [
        index
        for index, model in enumerate(objects)
        if isinstance(model, nn.Module) and not stepped.isdisjoint(map(id, model.parameters()))
    ]
    if len(found) != 1:
        raise InvalidArgumentError(
            f"prepare() is called with an optimizer of parameters of {len(found)} of the models; "
            "pass it together with one model that contains all of its parameters"
        )
    if isinstance(objects[found[0]], ShardedModule):
        raise InvalidArgumentError(
            "prepare() is called with a model that is sharded already and with another optimizer; "
            "a model has one optimizer"
        )
    return found[0]

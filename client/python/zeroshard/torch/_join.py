"""``join``: training with a different number of batches on each rank."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from .._core.reducer import Reducer
from .._core.uneven_loops import UnevenLoops
from ..errors import InvalidArgumentError, InvalidTypeError
from ._data_parallel import DataParallel
from ._sharded_module import ShardedModule


@contextlib.contextmanager
def join(
    models: nn.Module | Sequence[nn.Module],
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """A context for a training loop with a different number of batches on each rank, as torch's
    ``Join`` and ``DistributedDataParallel.join``.

        with zeroshard.torch.join(model):
            for inputs, labels in loader:
                optimizer.zero_grad()
                loss_function(model(inputs), labels).backward()
                optimizer.step()

    A rank whose loop ends waits at the end of the context, while the other ranks continue. Its
    gradients count as zeros. When the loops of all ranks have ended, all ranks have the parameters
    of the last one (and its buffers, with ``sync_buffers``), and train together again. If a rank
    raises an error, leaves or is lost, the waiting ranks get an error at once that names it.

    Every rank must enter the context, and its loop must not end between a backward pass and the
    step. While some ranks wait, the others must not change what the servers train (unfreeze
    parameters, add parameter groups, load a state). While rank 0 waits, the program must not write
    to parameters by itself. A schedule that moves with each batch must be brought to the same
    learning rate on all ranks after the loop. A rank that waits gets a
    :class:`~zeroshard.TimeoutError` if the others make no step for the ``timeout`` of
    :func:`zeroshard.init`.

    Args:
        models: the models that are trained in the loop: of :func:`zeroshard.shard`, results of
            :func:`~zeroshard.torch.group_sharded_parallel`, or :class:`DataParallel`.
        divide_by_initial_world_size: whether mean gradients are divided by the number of all ranks.
            If False, they are divided by the number of ranks that still have batches.
        enable: whether loops may differ. If False, the context does nothing.
        throw_on_early_termination: whether every rank gets a
            :class:`~zeroshard.DisagreementError` as soon as one rank has no more batches and
            another makes a step. It must be False if there are several models.
    """
    joined = list(dict.fromkeys([models] if isinstance(models, nn.Module) else models))
    if not joined:
        raise InvalidArgumentError("models is empty; pass at least one model")
    if throw_on_early_termination and len(joined) > 1:
        raise InvalidArgumentError(
            f"throw_on_early_termination is True with {len(joined)} models; it must be False, or "
            "pass one of the models"
        )
    trainers = [_trainer(model) for model in joined]
    if not enable:
        yield
        return
    try:
        for trainer in trainers:
            trainer.begin_join(excluding=not divide_by_initial_world_size)
        yield
        for trainer in trainers:
            trainer.check_complete()
        if throw_on_early_termination:
            trainers[0].end_evenly()
        # All models rest before the first wait: the other ranks may train them in turns.
        for trainer in trainers:
            trainer.rest()
        for model, trainer in zip(joined, trainers, strict=True):
            last = trainer.end_join()
            if isinstance(model, ShardedModule):
                _share_scaler(model, last)
    finally:
        for trainer in trainers:
            trainer.leave_join()


def _trainer(model: Any) -> UnevenLoops[Tensor] | Reducer[Tensor]:
    if isinstance(model, ShardedModule):
        return model._zeroshard.sharding.uneven_loops
    if isinstance(model, DataParallel):
        return model._reducer
    raise InvalidTypeError(
        f"models contains a {type(model).__name__} that is not sharded; pass a model of "
        "zeroshard.shard, the one that group_sharded_parallel has returned, or a DataParallel of "
        "zeroshard.torch"
    )


def _share_scaler(model: ShardedModule, last: int) -> None:
    """All ranks take the loss scale of rank ``last``: the others have made fewer steps."""
    scaler = model._zeroshard.scaler
    if scaler is not None and scaler.is_enabled():
        states = model._zeroshard.sharding.uneven_loops.exchange(
            "scaler", json.dumps(scaler.state_dict())
        )
        scaler.load_state_dict(json.loads(states[last]))

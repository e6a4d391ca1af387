"""``averaged``: evaluates a sharded model with a running average of its parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from .._core.sharded_models import averaged_of


def averaged(model: nn.Module, name: str) -> AbstractContextManager[None]:
    """A context in which a sharded model has the values of one of its running averages::

        with zeroshard.torch.averaged(model, "slow"), torch.no_grad():
            evaluate(model)

    Use it between two steps. It ends with the parameters of the last step. Each rank may use it
    alone. Parameters that do not train, and buffers, keep their values: compute statistics of batch
    norm anew with ``torch.optim.swa_utils.update_bn``. ``state_dict()`` and
    ``save_group_sharded_model`` write the averages here.

    Args:
        model: a model of :func:`shard` or :func:`group_sharded_parallel` with ``ema``.
        name: the name of the average.

    Raises:
        InvalidArgumentError: the model is not sharded or has no such average; a step is being made;
            or the program has written to parameters that it has not sent yet. In the context, a
            forward that records gradients, ``optimizer.step()`` and ``load_state_dict()``.
    """
    return averaged_of(model.parameters(), name)

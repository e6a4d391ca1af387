"""``loss_parallel``: cross-entropy of logits that are sharded by class."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributed.tensor.parallel import loss_parallel as torch_loss_parallel


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """Inside, ``F.cross_entropy`` and its backward accept logits (a DTensor) that are sharded on
    the class dimension.

    The classes are not gathered: three small all-reduces combine the results of the ranks. Targets
    are class indices, as a plain tensor that is equal on every rank or as a replicated DTensor.
    Unlike torch's, the context also ends if the block raises an error.
    """
    inner = torch_loss_parallel()
    inner.__enter__()
    try:
        yield
    finally:
        # The exception is not passed to torch's context, which would not end after one.
        inner.__exit__(None, None, None)

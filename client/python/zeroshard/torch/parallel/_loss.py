"""``loss_parallel``: cross-entropy of logits that are sharded on the classes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributed.tensor.parallel import loss_parallel as torch_loss_parallel


@contextlib.contextmanager
def loss_parallel() -> Iterator[None]:
    """``F.cross_entropy`` and its backward inside take logits, a DTensor, that are sharded on the
    class dimension.

    The classes are not gathered: each rank computes with its own, and three small all-reduces join
    them. Targets are class indices, a plain tensor that is the same on every rank or a replicated
    DTensor. It ends with the block, also where an error ends the block.
    """
    inner = torch_loss_parallel()
    inner.__enter__()
    try:
        yield
    finally:
        # As if nothing had happened: torch's own goes on after an error.
        inner.__exit__(None, None, None)

"""Integration with Lightning.

:class:`ZeroShardStrategy` takes the place of ``DDPStrategy``. It creates the processes, the process
group and the samplers as ``DDPStrategy`` does, and shards the model and its optimizer where
``DDPStrategy`` would wrap the model in DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import InvalidArgumentError
from ..torch import GradScaler, GroupSharded, group_sharded_parallel
from ..torch._unshard import unshard
from ._missing import missing

try:
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise missing("lightning", error) from error

__all__ = ["ZeroShardStrategy"]

#: The attribute of a LightningModule that holds its sharded wrapper. Its parameters may be on the
#: servers as long as the wrapper exists.
_WRAPPER = "_zeroshard_wrapper"
#: Arguments of DistributedDataParallel that have no meaning for the servers.
_IGNORED = {"bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"}


class ZeroShardStrategy(DDPStrategy):
    """A strategy for ``lightning.pytorch.Trainer`` in which shard servers train the model."""

    #: The LightningModule, or its wrapper once it is sharded.
    model: Any
    optimizers: Any

    def __init__(
        self,
        level: str,
        sharding_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            level: ``"os"``, ``"os_g"`` or ``"p_g_os"``, as for
                :func:`~zeroshard.torch.group_sharded_parallel`.
            sharding_options: further arguments of that function, such as ``segment_size``.

        The other arguments are those of ``DDPStrategy``.
        """
        super().__init__(**kwargs)
        if self._ddp_comm_hook is not None or self._ddp_comm_state is not None:
            raise InvalidArgumentError(
                "ddp_comm_hook or ddp_comm_state is given; they must be None, since the servers "
                "average the gradients"
            )
        sync_buffers = bool(self._ddp_kwargs.pop("broadcast_buffers", True))
        unknown = sorted(self._ddp_kwargs.keys() - _IGNORED)
        if unknown:
            raise InvalidArgumentError(
                f"{unknown[0]} is given, which ZeroShardStrategy does not support"
            )
        self._level = level
        self._options = {"sync_buffers": sync_buffers, **(sharding_options or {})}

    def setup(self, trainer: Any) -> None:
        """Shards the model if it will be trained."""
        wrapper = self.lightning_module.__dict__.pop(_WRAPPER, None)
        if isinstance(wrapper, GroupSharded):
            # Another run of a trainer, perhaps of another one, has sharded it.
            self.model = unshard(wrapper)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """The model is wrapped by :meth:`setup_optimizers`."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Shards the model and the optimizer that it configures."""
        super().setup_optimizers(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if len(self.optimizers) != 1:
            raise InvalidArgumentError(
                f"configure_optimizers returns {len(self.optimizers)} optimizers; it must return "
                "one, with several parameter groups if their settings differ"
            )
        model, optimizer, _ = group_sharded_parallel(
            self.model, self.optimizers[0], self._level, **self._options
        )
        self.lightning_module.__dict__[_WRAPPER] = model
        self.model, self.optimizers = model, [optimizer]
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            self.precision_plugin.scaler = GradScaler.sharing(scaler)

    def teardown(self) -> None:
        """Moves the model to the CPU, without its gradients: those on the servers are gone."""
        if isinstance(self.model, GroupSharded):
            self.model.zero_grad()
        super().teardown()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """The backward passes in this context are not the last of their step."""
        if isinstance(self.model, GroupSharded):
            with self.model.no_sync():
                yield
        else:
            yield

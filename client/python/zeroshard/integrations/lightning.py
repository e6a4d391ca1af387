"""Integration with Lightning.

:class:`ZeroShardStrategy` takes the place of ``DDPStrategy``. It creates the processes, the process
group and the samplers as ``DDPStrategy`` does, and shards the model and its optimizer where
``DDPStrategy`` would wrap the model in DistributedDataParallel. If there are several optimizers, as
of a GAN, it shards the modules of each, so that each makes steps of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._core.options import stage_of
from .._versions import check_versions
from ..errors import InvalidArgumentError
from ..torch import GradScaler, GroupSharded, group_sharded_parallel, shard
from ..torch._sharded_module import ShardedModule
from ..torch._unshard import unshard
from ._missing import missing
from ._private import ddp_options, has_comm_hook

try:
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise missing("lightning", error) from error

__all__ = ["ZeroShardStrategy"]

#: The attribute of a LightningModule that holds its sharded wrapper, or its sharded modules. Its
#: parameters may be on the servers as long as these exist.
_SHARDED = "_zeroshard_sharded"
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
        check_versions(("lightning",))
        super().__init__(**kwargs)
        if has_comm_hook(self):
            raise InvalidArgumentError(
                "ddp_comm_hook or ddp_comm_state is given; they must be None, since the servers "
                "average the gradients"
            )
        given = ddp_options(self)
        sync_buffers = bool(given.pop("broadcast_buffers", True))
        unknown = sorted(given.keys() - _IGNORED)
        if unknown:
            raise InvalidArgumentError(
                f"{unknown[0]} is given, which ZeroShardStrategy does not support"
            )
        self._level = level
        #: Buffers of modules that are not sharded, which ranks share.
        self._shared: list[Tensor] = []
        self._options: dict[str, Any] = {"sync_buffers": sync_buffers, **(sharding_options or {})}

    def setup(self, trainer: Any) -> None:
        """Shards the model if it will be trained."""
        for sharded in self.lightning_module.__dict__.pop(_SHARDED, ()):
            # Another run of a trainer, perhaps of another one, has sharded them. Those of a copy of
            # the LightningModule are plain.
            if isinstance(sharded, ShardedModule):
                unshard(sharded)
                self.model = self.lightning_module
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """The model is wrapped by :meth:`setup_optimizers`."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Shards the model and the optimizer that it configures."""
        super().setup_optimizers(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if len(self.optimizers) == 1:
            self._shard_whole()
        else:
            self._shard_parts()
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            self.precision_plugin.scaler = GradScaler.sharing(scaler)

    def _shard_whole(self) -> None:
        """Shards the model with its optimizer."""
        model, optimizer, _ = group_sharded_parallel(
            self.model, self.optimizers[0], self._level, **self._options
        )
        self.lightning_module.__dict__[_SHARDED] = [model]
        self.model, self.optimizers = model, [optimizer]

    def _shard_parts(self) -> None:
        """Shards the modules of each optimizer. All ranks take the other values of rank 0."""
        module = self.lightning_module
        parts = [
            _modules_of(module, optimizer, number)
            for number, optimizer in enumerate(self.optimizers)
        ]
        shard(parts, self.optimizers, stage_of(self._level), **self._options)
        module.__dict__[_SHARDED] = parts
        of_parts = {id(tensor) for part in parts for tensor in _tensors(part)}
        others = [tensor for tensor in _tensors(module) if id(tensor) not in of_parts]
        self._share(others)
        if self._options["sync_buffers"]:
            buffers = set(map(id, module.buffers()))
            self._shared = [tensor for tensor in others if id(tensor) in buffers]

    def _share(self, tensors: list[Tensor]) -> None:
        """All ranks take the values of rank 0."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As that of ``DDPStrategy``, where a forward begins with the buffers of rank 0."""
        self._share(self._shared)
        return super().training_step(*args, **kwargs)

    def teardown(self) -> None:
        """Moves the model to the CPU, without its gradients: those on the servers are gone."""
        for sharded in self.lightning_module.__dict__.get(_SHARDED, ()):
            sharded.zero_grad()
        self._shared = []
        super().teardown()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """The backward passes in this context are not the last of their step."""
        if isinstance(self.model, GroupSharded):
            with self.model.no_sync():
                yield
        else:
            yield


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _modules_of(module: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> nn.Module:
    """The part of a model that an optimizer trains: the largest modules of which it has all
    parameters that are not frozen."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found: list[nn.Module] = []

    def find(one: nn.Module, prefix: str) -> None:
        of_one = {id(parameter): parameter.requires_grad for parameter in one.parameters()}
        if own.isdisjoint(of_one):
            return
        if own.issuperset(key for key, is_trained in of_one.items() if is_trained):
            found.append(one)
            return
        for name, parameter in one.named_parameters(recurse=False):
            if id(parameter) in own:
                raise InvalidArgumentError(
                    f"optimizer {number} of configure_optimizers trains parameter "
                    f"{prefix + name!r}, and not all parameters of its module; with several "
                    "optimizers each must train whole modules, or return one optimizer with a "
                    "parameter group for each setting"
                )
        for name, child in one.named_children():
            find(child, f"{prefix}{name}.")

    find(module, "")
    return found[0] if len(found) == 1 else nn.ModuleList(found)

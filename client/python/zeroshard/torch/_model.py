"""The module that ``group_sharded_parallel`` returns."""

from __future__ import annotations

import copy
import functools
from typing import Any

from torch import Tensor, nn

from .._core.sharding import Sharding
from ._pretrained import METHOD, save_streaming
from ._scaler import GradScaler
from ._sharded_module import Shared, ShardedModule, prepare
from ._wrapper import ModuleWrapper


class GroupSharded(ShardedModule, ModuleWrapper):
    """A model whose optimizer state, and depending on the level its gradients and parameters, are
    on the shard servers.

    Attributes that this class does not have are those of the model, and ``state_dict`` has the keys
    of the model.
    """

    def __init__(
        self, module: nn.Module, sharding: Sharding[Tensor], scaler: GradScaler | None = None
    ) -> None:
        ModuleWrapper.__init__(self, module)
        self._keep(_zeroshard=Shared(sharding, scaler), forward=_Forward(self))
        if callable(getattr(module, METHOD, None)):
            self._keep(**{METHOD: self._save_pretrained})
        prepare(module, sharding)

    def _save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """As that of transformers. The weights are written tensor by tensor."""
        save: Any = getattr(self.module, METHOD)
        return save_streaming(self.module, self.sharding, save, args, kwargs)

    @property
    def sharding(self) -> Sharding[Tensor]:
        """The state shared with the optimizer."""
        return self._zeroshard.sharding

    @property
    def level(self) -> str:
        """``os``, ``os_g`` or ``p_g_os``."""
        return self.sharding.level

    def _fqn_modifiers(self) -> dict[str, str]:
        """Read by ``torch.distributed.checkpoint.state_dict``: the name of the child that is not in
        the keys of ``state_dict``."""
        return {"": "module"}

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A plain copy of the whole model, which is not sharded."""
        copied: nn.Module = copy.deepcopy(self.module, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickled model is whole, and not sharded."""
        return _itself, (self.module,)


class _Forward:
    """The forward of a sharded model. It has the signature of the model's own, which libraries
    look up."""

    def __init__(self, model: GroupSharded) -> None:
        self._model = model
        functools.update_wrapper(self, model.module.forward)
        # Read by torch.export.
        self.__code__ = getattr(model.module.forward, "__code__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model._call_sharded(self._model.module, self._model.module, args, kwargs)


def _itself(module: nn.Module) -> nn.Module:
    return module

"""The layer that ``group_sharded_parallel`` returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import paddle

from .._core.sharding import Sharding
from ..errors import InvalidArgumentError
from ._dtensor import parts_of_state
from ._private import Movable, dtype_name, is_other_place
from ._wrapper import LayerWrapper


def _cast(name: str, dtype: str | None = None) -> Callable[..., Any]:
    """A method of a layer that casts it to ``dtype``, or to its argument. For ``p_g_os`` see
    :meth:`GroupSharded._zeroshard_moves`."""

    def cast(model: GroupSharded, *args: Any, **kwargs: Any) -> Any:
        if not model.sharding.has_units:
            return getattr(super(GroupSharded, model), name)(*args, **kwargs)
        return model._checked(dtype or next(iter((*args, *kwargs.values())), None))

    return cast


class GroupSharded(Movable, LayerWrapper):
    """A model whose optimizer state, and depending on the level its gradients and parameters, are
    on the shard servers.

    Attributes that this class does not have are those of the model, and ``state_dict`` has the keys
    of the model.
    """

    def __init__(self, layer: Any, sharding: Sharding[Any]) -> None:
        super().__init__()
        # Bypasses Paddle's registration of sublayers and parameters.
        self.__dict__["_sharding"] = sharding
        self._layer = layer

    @property
    def level(self) -> str:
        """``os``, ``os_g`` or ``p_g_os``."""
        return self.sharding.level

    @property
    def sharding(self) -> Sharding[Any]:
        """The state shared with the optimizer."""
        sharding: Sharding[Any] = self.__dict__["_sharding"]
        return sharding

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward pass."""
        records = paddle.is_grad_enabled()
        if records:
            self.sharding.before_forward()
        self.sharding.share_buffers(records and self.training)
        try:
            return self._layer(*inputs, **kwargs)
        except BaseException:
            self.sharding.unwind()
            raise

    def no_sync(self) -> AbstractContextManager[None]:
        """A context whose forwards have backward passes that are not the last of their step: the
        gradients are accumulated on this rank."""
        return self.sharding.no_sync()

    def summon_full_params(self) -> AbstractContextManager[None]:
        """A context in which all parameters are on this worker. Values that the program writes to
        them, which must be the same on all ranks, become part of the next step."""
        return self.sharding.gathered()

    def get_all_parameters(
        self, convert2cpu: bool = False, with_freeze_param: bool = False
    ) -> None:
        """Fetches all parameters. They stay on this worker until the next forward or step, or
        permanently if the model is deleted before.

        Any rank may call it. The arguments are accepted for compatibility: parameters stay on their
        device, and frozen ones are included.
        """
        self.sharding.gather_all()

    def set_state_dict(self, state_dict: Any, use_structured_name: bool = True) -> Any:
        """Loads the state of the model. Every rank must call it; all ranks take the values of rank
        0.

        Tensors may be whole if the model's are distributed.
        """
        result = self._layer.set_state_dict(
            parts_of_state(self._layer, state_dict, use_structured_name), use_structured_name
        )
        self.sharding.changes.take_values()
        return result

    set_dict = load_dict = set_state_dict

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As :meth:`set_state_dict`. With ``strict``, missing and unexpected keys are an error."""
        if assign:
            raise InvalidArgumentError(
                "assign is True; it must be False, since the job holds the existing parameters"
            )
        result = self._layer.load_state_dict(parts_of_state(self._layer, state_dict), strict=strict)
        self.sharding.changes.take_values()
        return result

    # ---- casts and moves

    def _zeroshard_moves(self, device: Any, dtype: Any) -> bool:
        # At p_g_os parameters cannot be moved or cast: only the device and the dtype that they have
        # are accepted.
        if not self.sharding.has_units:
            return True
        if is_other_place(device):
            self.sharding.check_movable("moved")
        self._checked(dtype)
        return False

    def _checked(self, dtype: Any) -> Any:
        """This model at ``p_g_os``, if it has the dtype. None stands for the present one."""
        tensors = [*self._layer.parameters(), *self._layer.buffers()]
        found = {tensor.dtype for tensor in tensors if paddle.is_floating_point(tensor)}
        if dtype is not None and found != {_dtype(dtype)}:
            self.sharding.check_movable("cast")
        return self

    astype, type = _cast("astype"), _cast("type")
    float, float16 = _cast("float", "float32"), _cast("float16", "float16")
    bfloat16 = _cast("bfloat16", "bfloat16")


def _dtype(name: Any) -> Any:
    """Paddle's dtype of a name or of NumPy's dtype."""
    return name if isinstance(name, paddle.dtype) else getattr(paddle, dtype_name(name))

"""The private names of Paddle that the package uses: what needs each one, and what happens in a
version that does not have it. Modules below ``paddle.base`` count as private. No other file uses
such a name.

A name is looked up when it is used. Where a version does not have it, the use raises
:class:`~zeroshard.MissingNameError`, or the function here falls back as its ``without`` says.
:func:`zeroshard.check` lists the names that the installed version does not have.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import paddle
from paddle import Tensor

from .._private_names import PrivateName as _name

# ---- the features that need private names

TRAINING = ("training",)
GATHERED = ("level p_g_os (stage 3)",)
GRADIENTS = ("the mean gradient in parameter.grad",)
MESHES = ("distributed tensors and meshes",)
RANKS = ("several ranks",)
OPTIMIZERS = ("optimizers on the servers",)
OPTIMIZER_STATE = ("state dicts of optimizers",)
ADAMW = ("AdamW on the servers",)
SCALER = ("loss scaling",)
CASTS = ("moves and casts of a sharded model",)
WRAPPERS = ("wrapped models inside other layers",)
SAVING = ("errors of paddle.jit.save for sharded models",)

_RAISES = "The use of the feature raises an error."


def _one() -> Any:
    return paddle.zeros([1])


# ---- tensors

_IS_INITIALISED = _name(
    "paddle.Tensor._is_initialized", TRAINING, _RAISES, on=_one, behaves=lambda found: found()
)
_OFFSET = _name(
    "paddle.Tensor._offset", TRAINING, _RAISES, on=_one, behaves=lambda found: found() == 0
)
_LOCAL = _name("paddle.Tensor._local_value", MESHES, _RAISES)
_LOCAL_SHAPE = _name("paddle.Tensor._local_shape", MESHES, _RAISES)
_SHARE = _name("paddle.Tensor._share_underline_tensor_to", (*GATHERED, *MESHES), _RAISES)
_ON_GRADIENT = _name("paddle.Tensor._register_backward_hook", TRAINING, _RAISES)
_GRADIENT = _name(
    "paddle.Tensor._grad_ivar", GRADIENTS, "What Paddle reads through it is this rank's gradient."
)
_CLEAR = _name(
    "paddle.base.core.DenseTensor._clear",
    GATHERED,
    _RAISES,
    on=lambda: _one().get_tensor(),
)
_PARAMETER = _name("paddle.base.framework.EagerParamBase", TRAINING, _RAISES)


def is_initialised(tensor: Any) -> bool:
    """Returns whether a tensor has memory."""
    return bool(_IS_INITIALISED.of(tensor)())


def offset(tensor: Any) -> int:
    """The position of a tensor in its memory, in bytes."""
    found: int = _OFFSET.of(tensor)()
    return found


def local_value(tensor: Any) -> Any:
    """The local tensor of a distributed one, without a copy and without gathering a parameter."""
    return _LOCAL.of(Tensor)(tensor)


def local_shape(tensor: Any) -> list[int]:
    """The shape of a tensor's part on this rank."""
    found = _LOCAL_SHAPE.of(tensor) if tensor.is_dist() else tensor.shape
    return list(found)


def share_memory(source: Any, target: Any) -> None:
    """Gives a tensor the memory of another one."""
    _SHARE.of(source)(target)


def free(tensor: Any) -> None:
    """Frees the memory of a tensor, which is not gathered for it."""
    _CLEAR.of(Tensor.get_tensor(tensor))()


def on_gradient(parameter: Any, hook: Callable[..., Any]) -> None:
    """Registers a hook that is called before a gradient is added to that of the parameter."""
    _ON_GRADIENT.of(parameter)(hook)


def parameter_class() -> Any:
    """The class of parameters."""
    return _PARAMETER.get()


class ShowsGradient:
    """A parameter that shows another gradient than its own: precedes its class."""

    def _grad_ivar(self) -> Any | None:
        return self._zeroshard_grad_ivar(super()._grad_ivar)  # type: ignore[misc]

    def _zeroshard_grad_ivar(self, own: Callable[[], Any | None]) -> Any | None:
        """The gradient that is shown. ``own``: returns its own one."""
        raise NotImplementedError


# ---- backward passes

_NOT_WATCHED = "Errors in hooks of a backward pass, and its end, are not noticed."
_BACKWARD = _name("paddle.base.core.eager.run_backward", TRAINING, _NOT_WATCHED)
_PARTIAL = _name(
    "paddle.base.core.eager.run_partial_grad", ("paddle.grad with sharded models",), _NOT_WATCHED
)
_REGISTER = _name("paddle.base.core.eager.register_saved_tensors_hooks", GATHERED, _RAISES)
_RESET = _name("paddle.base.core.eager.reset_saved_tensors_hooks", GATHERED, _RAISES)


def wrap_backward(wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps the functions that run a backward pass."""
    _BACKWARD.replace(wrapped)
    if _PARTIAL.find() is not None:
        _PARTIAL.replace(wrapped)


def is_backward_wrapped() -> bool:
    """Returns whether :func:`wrap_backward` was called in this process."""
    return hasattr(_BACKWARD.get(), "__wrapped__")


def replace_saved_tensors_hooks(
    replaced: Callable[[Any, Any], tuple[Callable[..., Any], Callable[..., Any]]],
) -> None:
    """Replaces the functions that register and remove the pair of hooks for saved tensors.
    ``replaced``: returns the new ones of the old ones."""
    if _REGISTER.find() is None or _RESET.find() is None:
        return
    register, reset = replaced(_REGISTER.get(), _RESET.get())
    _REGISTER.replace(lambda _: register)
    _RESET.replace(lambda _: reset)


# ---- layers

_PARAMETERS = _name("paddle.nn.Layer._parameters", TRAINING, _RAISES, on=paddle.nn.Layer)
_SUBLAYERS = _name("paddle.nn.Layer._sub_layers", TRAINING, _RAISES, on=paddle.nn.Layer)
_STATE_HOOKS = _name("paddle.nn.Layer._state_dict_hooks", GATHERED, _RAISES, on=paddle.nn.Layer)
_HOOK_ID = _name(
    "paddle.nn.layer.layers.HookRemoveHelper._hook_id",
    GATHERED,
    _RAISES,
    on=lambda: paddle.nn.Layer().register_state_dict_hook(lambda state: None),
)
_OVERRIDDEN = "Calls of it by Paddle do not reach the layer."
_TO = _name("paddle.nn.Layer._to_impl", CASTS, _OVERRIDDEN)
_APPLY = _name("paddle.nn.Layer._apply", CASTS, _OVERRIDDEN)
_STATE = _name("paddle.nn.Layer._state_dict_impl", WRAPPERS, _OVERRIDDEN)
_NO_STATISTICS = "Running statistics of batch norms are taken for parameters of the model."
_MEAN = _name(
    "paddle.nn.BatchNorm1D._mean", TRAINING, _NO_STATISTICS, on=lambda: paddle.nn.BatchNorm1D(1)
)
_VARIANCE = _name(
    "paddle.nn.BatchNorm1D._variance", TRAINING, _NO_STATISTICS, on=lambda: paddle.nn.BatchNorm1D(1)
)
_PLACE = _name("paddle.base.framework._current_expected_place", CASTS, _RAISES)
_TO_PLACE = _name("paddle.device._convert_to_place", CASTS, _RAISES)
_CONVERT_DTYPE = _name(
    "paddle.base.data_feeder.convert_dtype",
    CASTS,
    _RAISES,
    behaves=lambda found: found("float32") == "float32",
)
_BEFORE_SAVE = _name(
    "paddle.jit.api._register_save_pre_hook",
    SAVING,
    "paddle.jit.save of a layer at level p_g_os raises an error of Paddle's.",
)


def parameters_of(layer: Any) -> OrderedDict[str, Any]:
    """The parameters that are registered in a layer, by name; what it changes takes effect."""
    found: OrderedDict[str, Any] = _PARAMETERS.of(layer)
    return found


def set_parameters(layer: Any, parameters: OrderedDict[str, Any]) -> None:
    """Replaces the dict of a layer's parameters, from which attributes of the layer are read."""
    vars(layer)[_PARAMETERS.attribute] = parameters


def sublayers_of(layer: Any) -> dict[str, Any]:
    """The layers that are registered in a layer, by name. Empty also while it is created."""
    found: dict[str, Any] = vars(layer).get(_SUBLAYERS.attribute, {})
    return found


def call_first(layer: Any, hook: Any) -> None:
    """Moves a state dict hook of a layer before the others. ``hook``: what its registration has
    returned."""
    _STATE_HOOKS.of(layer).move_to_end(_HOOK_ID.of(hook), last=False)


def statistics_of(layer: Any) -> list[Any]:
    """The running statistics of a batch norm, which are not gathered for it. None of another
    layer."""
    parameters, names = parameters_of(layer), (_MEAN.attribute, _VARIANCE.attribute)
    if not set(names) <= set(parameters):
        return []
    return [OrderedDict.__getitem__(parameters, name) for name in names]


def is_other_place(device: Any) -> bool:
    """Returns whether a device, or the name of one, is not the current device."""
    place = _TO_PLACE.get()(device) if isinstance(device, str) else device
    return place is not None and place != _PLACE.get()()


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of NumPy, or of a name of one."""
    found: str = _CONVERT_DTYPE.get()(dtype)
    return found


def before_jit_save(hook: Callable[..., None]) -> None:
    """Calls a function with each layer that ``paddle.jit.save`` is about to save."""
    register = _BEFORE_SAVE.find()
    if register is not None:
        register(hook)


class Forwarding(paddle.nn.Layer):
    """A wrapper of a layer, whose private methods are those of the layer."""

    def _to_impl(self, *args: Any, **kwargs: Any) -> Any:
        _TO.of(self._zeroshard_inner())(*args, **kwargs)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> None:
        _APPLY.of(self._zeroshard_inner())(*args, **kwargs)

    def _state_dict_impl(self, *args: Any, **kwargs: Any) -> Any:
        # Called for a wrapper in another layer.
        return _STATE.of(self._zeroshard_inner())(*args, **kwargs)

    def _zeroshard_inner(self) -> Any:
        """The layer."""
        raise NotImplementedError


class Movable(paddle.nn.Layer):
    """A layer that learns of what moves or casts it. Precedes the class of the layer."""

    def _to_impl(self, device: Any = None, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not self._zeroshard_moves(device, dtype):
            return self
        return super()._to_impl(device, dtype, *args, **kwargs)

    def _zeroshard_moves(self, device: Any, dtype: Any) -> bool:
        """Returns False if the layer stays where it is. Raises an error if it cannot be moved or
        cast."""
        raise NotImplementedError


# ---- optimizers


def _sgd() -> Any:
    weight = paddle.create_parameter([1], dtype="float32")
    return paddle.optimizer.Momentum(parameters=[weight])


def _adamw() -> Any:
    weight = paddle.create_parameter([1], dtype="float32")
    return paddle.optimizer.AdamW(parameters=[weight])


_ACCUMULATORS = _name("paddle.optimizer.Optimizer._accumulators", OPTIMIZERS, _RAISES, on=_sgd)
_LOADED = _name("paddle.optimizer.Optimizer._accumulators_holder", OPTIMIZERS, _RAISES, on=_sgd)
_GROUPS = _name("paddle.optimizer.Optimizer._param_groups", OPTIMIZERS, _RAISES, on=_sgd)
_RATE = _name("paddle.optimizer.Optimizer._learning_rate", OPTIMIZERS, _RAISES, on=_sgd)
_RATE_IN_USE = _name("paddle.optimizer.Optimizer._global_learning_rate", OPTIMIZERS, _RAISES)
_RATES = _name("paddle.optimizer.Optimizer._learning_rate_map", OPTIMIZERS, _RAISES, on=_sgd)
_PROGRAM = _name("paddle.base.framework.default_main_program", OPTIMIZERS, _RAISES)
_DEFAULTS = _name("paddle.optimizer.Optimizer._default_dict", OPTIMIZERS, _RAISES, on=_sgd)
_CLIP = _name("paddle.optimizer.Optimizer._grad_clip", OPTIMIZERS, _RAISES, on=_sgd)
_MOMENTUM = _name("paddle.optimizer.Momentum._momentum", OPTIMIZERS, _RAISES, on=_sgd)
_RATIO = _name("paddle.optimizer.AdamW._lr_ratio", ADAMW, _RAISES, on=_adamw)
_DECAYS = _name("paddle.optimizer.AdamW._apply_decay_param_fun", ADAMW, _RAISES, on=_adamw)
_AMSGRAD = _name("paddle.optimizer.AdamW._amsgrad", ADAMW, _RAISES, on=_adamw)
_APPEND = _name("paddle.optimizer.Optimizer._append_optimize_op", OPTIMIZERS, _RAISES)
_STEP = _name("paddle.optimizer.Optimizer._apply_optimize", OPTIMIZERS, _RAISES)
_COEFFICIENT = _name(
    "paddle.regularizer.L2Decay._coeff",
    OPTIMIZERS,
    _RAISES,
    on=lambda: paddle.regularizer.L2Decay(0.5),
    behaves=lambda found: float(found) == 0.5,
)

#: Paddle's names of the state of Adadelta.
ADADELTA = ("_avg_squared_grad", "_avg_squared_update")
#: What Paddle appends to the name of a parameter that has float32 master weights.
MASTER = "_fp32_master_0"


def accumulators(optimizer: Any) -> dict[str, dict[str, Any]]:
    """The state of an optimizer from its steps, by its name and that of the parameter."""
    found: dict[str, dict[str, Any]] = _ACCUMULATORS.of(optimizer)
    return found


def loaded_accumulators(optimizer: Any) -> dict[str, Any]:
    """The state that an optimizer has loaded and not used yet."""
    found: dict[str, Any] = _LOADED.of(optimizer)
    return found


def clear_accumulators(optimizer: Any) -> None:
    """Removes the state of an optimizer."""
    accumulators(optimizer).clear()
    _LOADED.set(optimizer, {})


def given_parameters(optimizer: Any) -> Any:
    """The parameters of an optimizer, or its parameter groups, as it was created."""
    return _GROUPS.of(optimizer)


def learning_rate(optimizer: Any) -> Any:
    """The learning rate with which an optimizer was created: a number or a scheduler."""
    return _RATE.of(optimizer)


def learning_rate_in_use(optimizer: Any) -> Any | None:
    """The tensor from which steps read the learning rate. None before the first step."""
    return _RATE_IN_USE.of(optimizer)()


def use_learning_rate(optimizer: Any, rate: Any) -> None:
    """Sets the tensor from which steps read the learning rate."""
    _RATES.of(optimizer)[_PROGRAM.get()()] = rate


def setting(optimizer: Any, name: str) -> Any | None:
    """The attribute with which an optimizer keeps an argument. None if it has none."""
    return getattr(optimizer, f"_{name}", None)


def default_settings(optimizer: Any) -> Mapping[str, Any]:
    """The settings of parameter groups that do not have their own."""
    found: Mapping[str, Any] = _DEFAULTS.of(optimizer)
    return found


def clip_of(optimizer: Any) -> Any | None:
    """How an optimizer clips gradients."""
    return _CLIP.of(optimizer)


def learning_rate_ratio(optimizer: Any) -> Any | None:
    """The ``lr_ratio`` of an AdamW."""
    return _RATIO.of(optimizer)


def decay_filter(optimizer: Any) -> Callable[[str], bool] | None:
    """The ``apply_decay_param_fun`` of an AdamW."""
    found: Callable[[str], bool] | None = _DECAYS.of(optimizer)
    return found


def uses_amsgrad(optimizer: Any) -> bool:
    """Returns whether an Adam uses the largest second moment so far."""
    return bool(getattr(optimizer, _AMSGRAD.attribute, False))


def coefficient(decay: Any) -> float:
    """The factor of an ``L2Decay``."""
    return float(_COEFFICIENT.of(decay))


def steps_alike(kind: type, base: type) -> bool:
    """Returns whether a class of optimizers makes the steps of another one."""
    methods = ("step", _APPEND.attribute, _STEP.attribute)
    return all(
        inspect.unwrap(getattr(kind, name)) is inspect.unwrap(getattr(base, name))
        for name in methods
    )


# ---- scalers


def _scaler() -> Any:
    return paddle.amp.GradScaler(enable=False)


_ENABLED = _name("paddle.amp.GradScaler._enable", SCALER, _RAISES, on=_scaler)
_SCALE = _name("paddle.amp.GradScaler._scale", SCALER, _RAISES, on=_scaler)
_DYNAMIC = _name("paddle.amp.GradScaler._use_dynamic_loss_scaling", SCALER, _RAISES, on=_scaler)
_UPDATE = _name("paddle.amp.GradScaler._update", SCALER, _RAISES)
#: The dtypes of gradients for which Paddle has separate flags.
_FLAGGED = ("fp16", "bf16", "fp32")


class EnabledScaler(paddle.amp.GradScaler):
    """A scaler with the attributes of an enabled one, which Paddle disables on a CPU."""

    # Paddle's own attributes.
    _enable: bool
    _scale: Any
    _optimizer_states: Any
    _cache_found_inf: bool | None
    _incr_count: int
    _decr_count: int
    _decr_every_n_nan_or_inf: int
    _incr_every_n_steps: int
    _decr_ratio: float
    _incr_ratio: float
    _use_dynamic_loss_scaling: bool

    def _zeroshard_enable(self, states: Any) -> None:
        """Gives a scaler that was created disabled the attributes of an enabled one. ``states``:
        what it knows of each optimizer."""
        for name in (_ENABLED, _SCALE, _DYNAMIC, _UPDATE):
            name.of(self)
        self._enable = True
        self._optimizer_states = states
        self._cache_found_inf = None
        for flag in (
            "_found_inf",
            "_temp_found_inf_value_false",
            *(f"_temp_found_inf_{dtype}" for dtype in _FLAGGED),
        ):
            setattr(self, flag, paddle.to_tensor([False]))

    @property
    def _zeroshard_enabled(self) -> bool:
        """Returns whether the scaler scales."""
        return bool(_ENABLED.of(self))

    @property
    def _zeroshard_scale(self) -> Any:
        """The scale, a tensor of one element."""
        return _SCALE.of(self)

    def _zeroshard_state(self, optimizer: Any) -> Any:
        """What the scaler knows of an optimizer since its last update."""
        return self._optimizer_states[id(optimizer)]

    def _zeroshard_stepped(self, skipped: bool, states: Any) -> None:
        """Notes whether a step was skipped. ``states``: those for the next step, if the scale does
        not change."""
        self._cache_found_inf = skipped
        if not _DYNAMIC.of(self):
            self._optimizer_states = states

    # Paddle's own method fails with NumPy 2, which does not convert an array of one element to a
    # number.
    def _update(self) -> None:
        if self._cache_found_inf:
            self._incr_count = 0
            self._decr_count += 1
            if self._decr_count == self._decr_every_n_nan_or_inf:
                self._scale, self._decr_count = self._scale * self._decr_ratio, 0
        else:
            self._decr_count = 0
            self._incr_count += 1
            if self._incr_count == self._incr_every_n_steps:
                self._scale, self._incr_count = self._scale * self._incr_ratio, 0


# ---- ranks and meshes

_MESH = _name("paddle.base.core.ProcessMesh", MESHES, _RAISES)
_GLOO = _name("paddle.base.core.ProcessGroupGloo", RANKS, _RAISES)
_STORE = _name("paddle.base.core.TCPStore", RANKS, _RAISES)
_OWN_STORE = _name("paddle.base.core.create_or_get_global_tcp_store", RANKS, _RAISES)


def mesh_class() -> Any:
    """The class of meshes, of which Paddle's ``ProcessMesh`` is derived."""
    return _MESH.get()


def gloo_group(*arguments: Any) -> Any:
    """A process group on CPUs."""
    return _GLOO.get().create(*arguments)


def tcp_store(*arguments: Any) -> Any:
    """A store that all ranks share."""
    return _STORE.get()(*arguments)


def default_store() -> Any:
    """The store of the process, which ``init_parallel_env`` uses as well."""
    return _OWN_STORE.get()()

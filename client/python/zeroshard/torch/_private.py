"""The private names of torch that the package uses: what needs each one, and what happens in a
version that does not have it. No other file uses a private name of torch.

A name is looked up when it is used. Where a version does not have it, the use raises
:class:`~zeroshard.MissingNameError`, or the function here falls back as its ``without`` says.
:func:`zeroshard.check` lists the names that the installed version does not have.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._private_names import MentionedName as _mentioned
from .._private_names import PrivateName as _name

# ---- the features that need private names

TRAINING = ("training",)
GATHERED = ("level p_g_os (stage 3)",)
COMPILE = ("torch.compile at level p_g_os",)
META = ("models on the meta device",)
WEIGHTS = ("load_weights",)
STATE = ("state dicts of sharded models",)
MESHES = ("tensor parallelism and DTensors",)
PROGRAMS = ("programs of to_static",)
SCALER = ("loss scaling",)
TRANSFORMS = ("torch.func transformations of sharded models",)
TRACE = ("torch.jit.trace of wrapped models",)
HOOKS = ("hooks of a sharded optimizer",)
SCHEDULERS = ("schedulers that were made before the optimizer was sharded",)
OTHERS = ("errors for models that another library has wrapped",)

_RAISES = "The use of the feature raises an error."


# ---- tensors

_VERSION = _name(
    "torch.Tensor._version",
    TRAINING,
    _RAISES,
    on=lambda: torch.empty(1, device="cpu"),
    behaves=lambda found: found == 0,
)
_CDATA = _name(
    "torch.UntypedStorage._cdata",
    TRAINING,
    _RAISES,
    on=lambda: torch.empty(1, device="cpu").untyped_storage(),
    behaves=lambda found: isinstance(found, int),
)
_USERS = _name(
    "torch._C._storage_Use_Count",
    GATHERED,
    _RAISES,
    behaves=lambda found: _counts_users(found),
)
_NO_TORCH_FUNCTION = _name("torch._C.DisableTorchFunctionSubclass", TRAINING, _RAISES)
_WRAPPER_SUBCLASS = _name("torch.Tensor._make_wrapper_subclass", TRAINING, _RAISES)
_IS_VIEW = _name(
    "torch.Tensor._is_view", GATHERED, "Reading it gathers the parameter.", optional=True
)
_SHALLOW_COPY = _name(
    "torch._has_compatible_shallow_copy_type",
    GATHERED,
    "Moving a model to the device that it is on gathers its parameters.",
    optional=True,
)
_BACKWARD_HOOKS = _name(
    "torch.Tensor._backward_hooks", META, _RAISES, on=lambda: torch.empty(1, device="cpu")
)
_GRADIENT_HOOKS = _name(
    "torch.Tensor._post_accumulate_grad_hooks",
    TRAINING,
    _RAISES,
    on=lambda: torch.empty(1, device="cpu"),
)
_SWAP = _name(
    "torch._C._swap_tensor_impl", META, _RAISES, behaves=lambda found: _swaps_values(found)
)
_ONLY_FOREACH = "Norms and factors of gradients take the values from the servers first."
_FOREACH_NORM = _name("torch._foreach_norm", TRAINING, _ONLY_FOREACH, optional=True)
_FOREACH_MUL = _name("torch._foreach_mul_", TRAINING, _ONLY_FOREACH, optional=True)
_FOREACH_ZERO = _name("torch._foreach_zero_", TRAINING, _ONLY_FOREACH, optional=True)
_UNSCALE = _name(
    "torch._amp_foreach_non_finite_check_and_unscale_", SCALER, _ONLY_FOREACH, optional=True
)
_LEAVES = _name("torch.utils._pytree.tree_leaves", TRAINING, _RAISES)
_MAP_ONLY = _name("torch.utils._pytree.tree_map_only", TRAINING, _RAISES)
_DISPATCH_MODE = _name(
    "torch.utils._python_dispatch.TorchDispatchMode", (*META, *PROGRAMS), _RAISES
)


def version(tensor: Tensor) -> int:
    """A counter that each write to the tensor raises."""
    found: int = _VERSION.of(tensor)
    return found


def memory_id(storage: torch.UntypedStorage) -> int:
    """An identifier of the memory of a storage object, also of empty memory."""
    found: int = _CDATA.of(storage)
    return found


def memory_users(storage: torch.UntypedStorage) -> int:
    """The number of tensors and storage objects that refer to the memory of a storage object."""
    found: int = _USERS.get()(memory_id(storage))
    return found


def _counts_users(found: Any) -> bool:
    tensor = torch.empty(1, device="cpu")
    # Not through the other name: each probe is for one.
    memory = tensor.untyped_storage()._cdata
    before = found(memory)
    view = tensor.view(1)
    return view is not tensor and bool(found(memory) == before + 1)


def can_count_users() -> bool:
    """Returns whether :func:`memory_users` works."""
    return _USERS.find() is not None


def without_torch_function() -> AbstractContextManager[None]:
    """A context in which operations do not call ``__torch_function__`` of the package's tensors."""
    context: AbstractContextManager[None] = _NO_TORCH_FUNCTION.get()()
    return context


def wrapper_subclass(kind: type, shape: Sequence[int], **options: Any) -> Any:
    """A tensor of a class, with a shape and without memory."""
    return _WRAPPER_SUBCLASS.get()(kind, shape, **options)


def metadata_functions() -> set[Any]:
    """The private functions of torch that do not read the elements of a tensor."""
    return {found for name in (_IS_VIEW, _SHALLOW_COPY) if (found := name.find()) is not None}


def gradient_hooks(parameter: Tensor) -> dict[int, Any]:
    """The hooks that ``register_post_accumulate_grad_hook`` has registered, by their id."""
    found: dict[int, Any] = _GRADIENT_HOOKS.of(parameter)
    return found


def share_tensor_hooks(source: Tensor, target: Tensor) -> None:
    """Gives a tensor the hooks of another one, also those that are registered later."""
    _BACKWARD_HOOKS.set(target, _BACKWARD_HOOKS.of(source))
    if source.is_leaf and source.requires_grad:
        _GRADIENT_HOOKS.set(target, _GRADIENT_HOOKS.of(source))


def swap(tensor: Tensor, other: Tensor) -> None:
    """Exchanges what two tensor objects are: memory, dtype and device, but not attributes."""
    _SWAP.get()(tensor, other)


def _swaps_values(found: Any) -> bool:
    first, second = (torch.full((1,), value, device="cpu") for value in (1.0, 2.0))
    found(first, second)
    return float(first) == 2.0 and float(second) == 1.0


def foreach_functions(norm: Any, multiply: Any, zero: Any, unscale: Any) -> dict[Any, Any]:
    """By torch's functions for lists of tensors: what replaces them."""
    replaced = {_FOREACH_NORM: norm, _FOREACH_MUL: multiply, _FOREACH_ZERO: zero, _UNSCALE: unscale}
    found = {name.find(): function for name, function in replaced.items()}
    return {function: instead for function, instead in found.items() if function is not None}


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of nested tuples, lists and dicts."""
    found: list[Any] = _LEAVES.get()(tree)
    return found


def tree_map_only(kind: type, function: Callable[[Any], Any], tree: Any) -> Any:
    """Nested tuples, lists and dicts, with a function applied to the leaves of a class."""
    return _MAP_ONLY.get()(kind, function, tree)


_DispatchMode: Any = _DISPATCH_MODE.find() or object


class DispatchMode(_DispatchMode):  # type: ignore[misc]
    """A context that is called for each operation: its ``__torch_dispatch__``."""

    def __init__(self) -> None:
        _DISPATCH_MODE.get()
        super().__init__()


# ---- backward passes

_TASK = _name(
    "torch._C._current_graph_task_id", TRAINING, _RAISES, behaves=lambda found: found() == -1
)
_NODE = _name("torch._C._current_autograd_node", GATHERED, _RAISES)
_ENGINE = _name(
    "torch.autograd.Variable._execution_engine",
    TRAINING,
    _RAISES,
    behaves=lambda found: callable(found.queue_callback),
)


def backward_pass() -> int:
    """The number of the running backward pass. -1 if none is running."""
    found: int = _TASK.get()()
    return found


def backward_node() -> Any:
    """The node of the graph that the running backward pass is at."""
    return _NODE.get()()


def after_backward(call: Callable[[], None]) -> None:
    """Calls a function when the running backward pass ends."""
    _ENGINE.get().queue_callback(call)


# ---- transformations, traces and the compiler

_NO_TRANSFORMS = "Models are trained as if no transformation ran."
_PEEK = _name(
    "torch._C._functorch.peek_interpreter_stack",
    TRANSFORMS,
    _NO_TRANSFORMS,
    behaves=lambda found: found() is None,
)
_WRAPPED = _name(
    "torch._C._functorch.is_functorch_wrapped_tensor",
    TRANSFORMS,
    _NO_TRANSFORMS,
    behaves=lambda found: not found(torch.empty(1, device="cpu")),
)
_CLEAR = _name(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", TRANSFORMS, _RAISES
)
_TRACED = _name("torch.jit._trace._trace_module_map", TRACE, "The wrapper is traced as a module.")
_DISABLE = _name(
    "torch._compile._disable_dynamo",
    COMPILE,
    "torch.compiler.disable takes its place, which imports the compiler with zeroshard.torch.",
    optional=True,
)
_COMPILED = _name("torch.nn.Module._compiled_call_impl", COMPILE, "Modules are not compiled.")
_PLAIN_CALL = _name("torch.nn.Module._call_impl", COMPILE, "Modules are not compiled.")
_TRACING = _name(
    "torch._guards.TracingContext",
    COMPILE,
    "torch.compiler.is_compiling takes its place, which is also True then in new versions.",
    behaves=lambda found: found.try_get() is None,
    optional=True,
)
_ORIGINAL = _mentioned(
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
    COMPILE,
    "The result of torch.compile is sharded like a module of its own.",
    source="_dynamo/eval_frame.py",
)


def is_transforming() -> bool:
    """Returns whether a transformation such as ``jvp`` or ``vmap`` runs."""
    peek = _PEEK.find()
    return peek is not None and peek() is not None


def is_transformed(tensor: Tensor) -> bool:
    """Returns whether a tensor belongs to a transformation."""
    is_wrapped = _WRAPPED.find()
    return is_wrapped is not None and bool(is_wrapped(tensor))


def outside_transforms() -> AbstractContextManager[None]:
    """A context that suspends the running transformations."""
    context: AbstractContextManager[None] = _CLEAR.get()()
    return context


def is_registering_for_trace() -> bool:
    """Returns whether ``torch.jit.trace`` is about to run, or runs, a module whose parts it
    names."""
    return _TRACED.find() is not None


def outside_graphs(function: Any) -> Any:
    """Excludes a function and everything that it calls from ``torch.compile``."""
    disable = _DISABLE.find()
    return torch.compiler.disable(function) if disable is None else disable(function)


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What ``module.compile()`` calls. None for a module that is not compiled by it."""
    call: Callable[..., Any] | None = getattr(module, _COMPILED.attribute, None)
    return call


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Sets what calls of a module call, with all hooks. None: the module as it is."""
    _COMPILED.set(module, call)


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """What calls of a module call if it is not compiled, with all hooks."""
    call: Callable[..., Any] = _PLAIN_CALL.of(module)
    return call


def is_optimized(module: nn.Module) -> bool:
    """Returns whether a module is the result of ``torch.compile(module)``."""
    # Importing the compiler takes as long as importing torch. Without it there is no such module.
    compiler = sys.modules.get("torch._dynamo")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def is_describing() -> bool:
    """Returns whether ``torch.compile`` traces a program, or describes the tensors that it uses."""
    context = _TRACING.find()
    return torch.compiler.is_compiling() or context is not None and context.try_get() is not None


def has_original(module: nn.Module) -> bool:
    """As :func:`is_optimized`, also for classes that look like the result."""
    return hasattr(module, _ORIGINAL.attribute)


# ---- modules

_PARAMETERS = _name("torch.nn.Module._parameters", META, _RAISES, on=nn.Module)
_BUFFERS = _name("torch.nn.Module._buffers", TRAINING, _RAISES, on=nn.Module)
_MODULES = _name("torch.nn.Module._modules", TRAINING, _RAISES, on=nn.Module)
_NOT_SAVED = _name("torch.nn.Module._non_persistent_buffers_set", WEIGHTS, _RAISES, on=nn.Module)
_FORWARD_HOOKS = _name("torch.nn.Module._forward_hooks", GATHERED, _RAISES, on=nn.Module)
_FORWARD_PRE_HOOKS = _name("torch.nn.Module._forward_pre_hooks", GATHERED, _RAISES, on=nn.Module)
_STATE_HOOKS = _name("torch.nn.Module._state_dict_hooks", STATE, _RAISES, on=nn.Module)
_STATE_PRE_HOOKS = _name("torch.nn.Module._state_dict_pre_hooks", STATE, _RAISES, on=nn.Module)
_LOAD_PRE_HOOKS = _name(
    "torch.nn.Module._load_state_dict_pre_hooks", (*TRAINING, *WEIGHTS), _RAISES, on=nn.Module
)
_LOAD_POST_HOOKS = _name(
    "torch.nn.Module._load_state_dict_post_hooks", WEIGHTS, _RAISES, on=nn.Module
)
_OVERRIDDEN = "Calls of it by torch do not reach the module."
_APPLY = _name("torch.nn.Module._apply", TRAINING, _OVERRIDDEN)
_ADD_STATE_HOOK = _name("torch.nn.Module._register_state_dict_hook", STATE, _OVERRIDDEN)
_ADD_LOAD_HOOK = _name("torch.nn.Module._register_load_state_dict_pre_hook", TRAINING, _RAISES)
_LOAD = _name("torch.nn.Module._load_from_state_dict", (*WEIGHTS, *STATE), _RAISES)
_RESET = _name(
    "torch.nn.MultiheadAttention._reset_parameters",
    META,
    "A model on the meta device with a MultiheadAttention needs param_init_fn.",
)
_READ_BY_DDP = _mentioned(
    "torch.nn.parallel.DistributedDataParallel._ddp_params_and_buffers_to_ignore",
    OTHERS,
    "DistributedDataParallel wraps a wrapped model without an error.",
    source="nn/parallel/distributed.py",
)
_BY_FSDP = _mentioned(
    "torch.distributed.fsdp.FSDPModule._is_fsdp_managed_module",
    OTHERS,
    "FSDP wraps a wrapped model without an error.",
    source="distributed/fsdp",
)
_DISTRIBUTED = _mentioned(
    "torch.distributed.tensor.distribute_module._distribute_module_applied",
    MESHES,
    "A module that torch has distributed can be given a parallel style again.",
    source="distributed/tensor",
)

#: The attribute that DistributedDataParallel reads of a module that it wraps.
READ_BY_DDP = _READ_BY_DDP.attribute


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """The parameters that are registered in a module, by name; what it changes takes effect."""
    found: dict[str, Any] = _PARAMETERS.of(module)
    return found


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The buffers that are registered in a module, by name; what it changes takes effect."""
    found: dict[str, Any] = _BUFFERS.of(module)
    return found


def modules_in(module: nn.Module) -> dict[str, nn.Module | None]:
    """The modules that are registered in a module, by name; also in one that names others as its
    children."""
    found: dict[str, nn.Module | None] = _MODULES.of(module)
    return found


def registered_module(module: nn.Module, name: str) -> nn.Module | None:
    """A module that is registered in another one. None also while the latter is created."""
    modules: dict[str, nn.Module | None] = vars(module).get(_MODULES.attribute, {})
    return modules.get(name)


def unsaved_buffers(module: nn.Module) -> set[str]:
    """The names of the buffers of a module that its state dict does not have."""
    found: set[str] = _NOT_SAVED.of(module)
    return found


def forward_hooks(module: nn.Module) -> list[Any]:
    """The hooks of a module's forward, those before it first."""
    return [*_FORWARD_PRE_HOOKS.of(module).values(), *_FORWARD_HOOKS.of(module).values()]


def state_dict_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks of a module before and after it makes a state dict, by their id; what they change
    takes effect."""
    return _STATE_PRE_HOOKS.of(module), _STATE_HOOKS.of(module)


def load_hooks(module: nn.Module) -> dict[int, Any]:
    """The hooks of a module before it loads a state dict, by their id; what it changes takes
    effect."""
    found: dict[int, Any] = _LOAD_PRE_HOOKS.of(module)
    return found


def hooks_after_load(module: nn.Module) -> dict[int, Any]:
    """The hooks of a module after it has loaded a state dict, by their id."""
    found: dict[int, Any] = _LOAD_POST_HOOKS.of(module)
    return found


def add_load_hook(module: nn.Module, hook: Any) -> None:
    """Registers a hook that is called without the module. A copy of the module has the hook."""
    _ADD_LOAD_HOOK.of(module)(hook)


def load_method(kind: type[nn.Module]) -> Any:
    """The method with which modules of a class load their own parameters and buffers."""
    return _LOAD.of(kind)


def initialisers(module: nn.Module) -> list[Callable[[], Any]]:
    """The methods with which a module of torch initialises itself, if it has any."""
    # torch's MultiheadAttention has only the second one.
    found = (getattr(module, name, None) for name in ("reset_parameters", _RESET.attribute))
    return [method for method in found if callable(method)]


def is_managed_by_fsdp(module: nn.Module) -> bool:
    """Returns whether FSDP has taken over a module."""
    return bool(vars(module).get(_BY_FSDP.attribute, False))


def is_distributed(module: nn.Module) -> bool:
    """Returns whether ``distribute_module`` of torch has distributed a module."""
    return bool(getattr(module, _DISTRIBUTED.attribute, False))


class RefusesDDP:
    """A model that DistributedDataParallel cannot wrap."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        raise self._zeroshard_wrapped_later("DistributedDataParallel")

    def _zeroshard_wrapped_later(self, other: str) -> Exception:
        """The error for a model that another library has wrapped."""
        raise NotImplementedError


class Applied(nn.Module):
    """A model that learns of what moves or casts it."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if not self._zeroshard_moves(fn):
            return self
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _zeroshard_moves(self, fn: Callable[[Tensor], Tensor]) -> bool:
        """Returns False if a function, which is to be applied to all tensors, changes nothing.
        Raises an error if it must not be applied."""
        raise NotImplementedError


class Forwarding(nn.Module):
    """A wrapper of a module, whose private methods are those of the module."""

    module: nn.Module

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        _APPLY.of(self.module)(fn, recurse)
        return self

    def _register_state_dict_hook(self, hook: Any) -> Any:
        return _ADD_STATE_HOOK.of(self.module)(hook)

    def _register_load_state_dict_pre_hook(self, hook: Any, with_module: bool = False) -> Any:
        return _ADD_LOAD_HOOK.of(self.module)(hook, with_module)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # The state dict of a module that contains this wrapper has no prefix for the wrapped
        # module.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)


# ---- optimizers, schedulers and scalers


def _sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1, device="cpu"))], lr=0.1)


def _scheduled() -> torch.optim.Optimizer:
    """An optimizer that has stepped, and its scheduler, too."""
    optimizer = _sgd()
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    optimizer.step()
    return optimizer


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu")


_NO_HOOKS = "Hooks of this kind are not called."
_OPTIMIZER_HOOKS = {
    "step_pre": _name("torch.optim.Optimizer._optimizer_step_pre_hooks", HOOKS, _NO_HOOKS, on=_sgd),
    "step_post": _name(
        "torch.optim.Optimizer._optimizer_step_post_hooks", HOOKS, _NO_HOOKS, on=_sgd
    ),
    "state_dict_pre": _name(
        "torch.optim.Optimizer._optimizer_state_dict_pre_hooks", HOOKS, _NO_HOOKS, on=_sgd
    ),
    "state_dict_post": _name(
        "torch.optim.Optimizer._optimizer_state_dict_post_hooks", HOOKS, _NO_HOOKS, on=_sgd
    ),
    "load_state_dict_pre": _name(
        "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks", HOOKS, _NO_HOOKS, on=_sgd
    ),
    "load_state_dict_post": _name(
        "torch.optim.Optimizer._optimizer_load_state_dict_post_hooks", HOOKS, _NO_HOOKS, on=_sgd
    ),
}
_CALLED = _name(
    "torch.optim.Optimizer._opt_called",
    SCHEDULERS,
    "A scheduler warns that it was called before the optimizer.",
    on=_scheduled,
)
_COUNTED = _name(
    "torch.optim.Optimizer.step._wrapped_by_lr_sched",
    SCHEDULERS,
    "An optimizer that has a scheduler cannot be sharded in place: its step is not its own.",
    on=lambda: _scheduled().step,
)
_SCALED = _name("torch.amp.GradScaler._per_optimizer_states", SCALER, _RAISES, on=_scaler)
_TRACKER = _name("torch.amp.GradScaler._check_scale_growth_tracker", SCALER, _RAISES)
_DEVICE = _name("torch.amp.GradScaler._device", SCALER, _RAISES, on=_scaler)


def share_optimizer_hooks(original: torch.optim.Optimizer, sharded: torch.optim.Optimizer) -> None:
    """Gives both optimizers the same hooks, also those that are registered later."""
    for name in _OPTIMIZER_HOOKS.values():
        if hasattr(original, name.attribute):
            setattr(sharded, name.attribute, getattr(original, name.attribute))


def hook_attributes() -> list[str]:
    """The attributes of an optimizer that have its hooks."""
    return [name.attribute for name in _OPTIMIZER_HOOKS.values()]


#: Attributes of an optimizer that torch itself sets in a step begin with one of these.
SET_IN_STEPS = ("_opt_called", "_step_count", "_warned", "_zero_grad", "_optimizer_", "_cuda_graph")


def optimizer_hooks(optimizer: torch.optim.Optimizer, kind: str) -> list[Any]:
    """The hooks of an optimizer of one kind, such as ``"state_dict_pre"``."""
    return list(getattr(optimizer, _OPTIMIZER_HOOKS[kind].attribute, {}).values())


def note_step(optimizer: Any) -> None:
    """Records for its scheduler that an optimizer has stepped."""
    setattr(optimizer, _CALLED.attribute, True)


def counts_steps(step: Any) -> bool:
    """Returns whether a ``step`` method is the one that a scheduler has given its optimizer."""
    return hasattr(step, _COUNTED.attribute)


def mark_counting(step: Any) -> None:
    """Tells later schedulers that a ``step`` method records that it was called."""
    setattr(step, _COUNTED.attribute, True)


def scaled_state(scaler: torch.amp.GradScaler, optimizer: Any) -> dict[str, Any]:
    """What a scaler knows of an optimizer since its last update."""
    found: dict[str, Any] = _SCALED.of(scaler)[id(optimizer)]
    return found


def check_scale(scaler: torch.amp.GradScaler, function: str) -> None:
    """Raises torch's error if a scaler has no scale yet. ``function``: the caller."""
    _TRACKER.of(scaler)(function)


def scaler_device(scaler: torch.amp.GradScaler) -> torch.device:
    """The device of a scaler."""
    return torch.device(_DEVICE.of(scaler))


# ---- meshes, DTensors and collectives

_LOCAL = _name("torch.distributed.tensor.DTensor._local_tensor", MESHES, _RAISES)
_SPEC = _name("torch.distributed.tensor.DTensor._spec", MESHES, _RAISES)
_ASYNC = _name("torch.distributed._functional_collectives.AsyncCollectiveTensor", MESHES, _RAISES)
_CURRENT_MESH = _name(
    "torch.distributed.device_mesh._mesh_resources",
    MESHES,
    "`with mesh:` has no effect on functions of ZeroShard; pass the mesh.",
    behaves=lambda found: callable(found.get_current_mesh),
)
_ROOT_MESH = _name(
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
    MESHES,
    "_mesh_resources.get_root_mesh takes its place, which older versions have.",
    optional=True,
)
_FUNCTIONAL = _name(
    "torch.ops._c10d_functional",
    PROGRAMS,
    "Programs do not show collectives of this kind.",
    behaves=lambda found: hasattr(found, "all_reduce"),
)
_OF_DTENSORS = _name(
    "torch.ops._dtensor",
    PROGRAMS,
    "Programs do not show collectives of this kind.",
    behaves=lambda found: hasattr(found, "shard_dim_alltoall"),
)
_RESOLVE = _name("torch.distributed.distributed_c10d._resolve_process_group", PROGRAMS, _RAISES)
_STORE = _name(
    "torch.distributed.distributed_c10d._get_default_store",
    ("several ranks with torch.distributed",),
    _RAISES,
)


def local_tensor(tensor: DTensor) -> Tensor:
    """The local tensor of a DTensor, without a copy. Waits until it has its values."""
    found: Tensor = _LOCAL.of(tensor)
    return found.wait() if isinstance(found, _ASYNC.get()) else found


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Gives a DTensor another local tensor."""
    _LOCAL.set(tensor, local)


def spec_of(tensor: Tensor) -> Any | None:
    """Mesh, placements and shape of a DTensor, from which another one can be made. None of a plain
    tensor."""
    return _SPEC.of(tensor) if isinstance(tensor, DTensor) else None


def current_mesh() -> Any | None:
    """The mesh of the surrounding ``with mesh:``. None if there is none."""
    with contextlib.suppress(RuntimeError):
        return _CURRENT_MESH.get().get_current_mesh()
    return None


def root_mesh(mesh: Any) -> Any:
    """The mesh that this one is a slice of, or itself."""
    find = _ROOT_MESH.find()
    return _CURRENT_MESH.get().get_root_mesh(mesh) if find is None else find(mesh)


def collective_namespaces() -> tuple[str, str]:
    """The namespaces of the operators that are collectives."""
    return _FUNCTIONAL.attribute, _OF_DTENSORS.attribute


def process_group(name: Any) -> torch.distributed.ProcessGroup:
    """The process group that an operator names."""
    group: torch.distributed.ProcessGroup = _RESOLVE.get()(name)
    return group


def default_store() -> Any:
    """The store of the default process group."""
    return _STORE.get()()

"""``shard``: shards models and optimizers in place."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import TypedDict, Unpack

from .._averages import Average
from .._spikes import SpikePolicy
from .._checkpoints import Checkpoints
from .._core.collectives import GroupSize
from .._core.options import LEVELS
from ..errors import InvalidArgumentError, InvalidTypeError
from . import _in_place
from ._joined import Joined
from ._mesh import check_mesh
from ._training_mesh import set_training_mesh
from ._sharded import check_scaler, check_trainable, group_sharded_parallel, open_sharding

Models = TypeVar("Models", bound=nn.Module | Sequence[nn.Module])
Optimizers = TypeVar("Optimizers", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])
Scaler = TypeVar("Scaler", bound=torch.amp.GradScaler)


class ShardOptions(TypedDict, total=False):
    """The options of :func:`shard`, which are those of
    :func:`~zeroshard.torch.group_sharded_parallel`."""

    group: Any | None
    offload: bool
    sync_buffers: bool
    buffer_max_size: int
    segment_size: int
    sync_comm: bool
    exclude_layer: Collection[str | int] | None
    accumulation_steps: int | None
    group_size: GroupSize
    state_dtype: str
    ema: Mapping[str, float | Average] | None
    spikes: SpikePolicy | None
    grad_clip: Any | None
    param_init_fn: Callable[[nn.Module], Any] | None
    checkpoint: str | os.PathLike[str] | None
    device: torch.device | str | None
    checkpoints: Checkpoints | None
    separable: bool | None


@overload
def shard(
    model: Models,
    optimizer: Optimizers,
    stage: int = 3,
    mesh: DeviceMesh | None = None,
    scaler: None = None,
    **options: Unpack[ShardOptions],
) -> tuple[Models, Optimizers]: ...
@overload
def shard(
    model: Models,
    optimizer: Optimizers,
    stage: int = 3,
    mesh: DeviceMesh | None = None,
    *,
    scaler: Scaler,
    **options: Unpack[ShardOptions],
) -> tuple[Models, Optimizers, Scaler]: ...
def shard(
    model: Any,
    optimizer: Any,
    stage: int = 3,
    mesh: DeviceMesh | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Moves the training state of models to the shard servers. Changes the objects in place.

        zeroshard.shard(model, optimizer)

    The rest of the script stays as it is: the model keeps its methods, attributes and the keys of
    its ``state_dict``, and schedulers may be created before or after. The model gets the methods
    ``no_sync()`` and ``summon_full_params()``. A deep copy or a pickle of the model is plain, and
    not sharded; the optimizer cannot be copied. Losses, norms and parameters are bitwise those of
    :func:`~zeroshard.torch.group_sharded_parallel`.

    Args:
        model: a module, or a sequence of modules. All ranks take the parameters and buffers of rank
            0.
        optimizer: any optimizer, or a sequence: for each model those that have its parameters, in
            any order. The optimizers of one model make one step, when the last of them steps.
            Optimizers that the servers have step on the servers. Any other one (``Muon``, SOAP, a
            class of your own) runs on the ranks, unchanged, and the servers keep its state: see
            ``separable`` of ``group_sharded_parallel``. It gets f32 master weights and mean
            gradients, also for bf16 parameters, and the result is published in their dtype.
        stage: the stage of ZeRO. At 1 the servers hold the optimizer state (level ``"os"`` of
            ``group_sharded_parallel``), at 2 also gradients (``"os_g"``), and at 3 also parameters
            (``"p_g_os"``).
        mesh: a mesh with one dimension, of the ranks that train together; None: all ranks, also if
            the model is distributed over a mesh.
        scaler: a gradient scaler, which then supports the optimizers.
        options: the other keyword options of ``group_sharded_parallel``, with the same names and
            meaning.

    Returns:
        The objects that were passed: the model or the sequence of models, the optimizer or the
            sequence of optimizers, and the scaler if one was passed.

    Raises:
        InvalidArgumentError: an argument is invalid, or a model and an optimizer do not belong
            together. Nothing has been changed.
        InvalidTypeError: the class of a model or of the scaler cannot be extended.
        DisagreementError: the ranks pass different models or options. If there are several models,
            those before it are sharded.
    """
    level = _level(stage)
    for name in options.keys() - ShardOptions.__annotations__.keys():
        known = ", ".join(ShardOptions.__annotations__)
        raise InvalidTypeError(f"shard has no option {name!r}; the options are {known}")
    models, optimizers = _several(model, "model"), _several(optimizer, "optimizer")
    pairs = _pairs(models, optimizers)
    for one, its in pairs:
        for part in its:
            check_trainable(one, part, "zeroshard.shard")
            _in_place.check_optimizer(part)
        _in_place.check_model(one)
    if scaler is not None:
        _in_place.check_scaler(check_scaler(scaler))
    if mesh is not None:
        options["group"] = _group(mesh, options)
    for one, its in pairs:
        plain = [_in_place.plain_optimizer(part) for part in its]
        joined = plain[0] if len(plain) == 1 else Joined(plain)
        sharding = open_sharding(
            one, joined, level, caller="zeroshard.shard", **{**_defaults(), **options}
        )
        set_training_mesh(sharding, mesh)
        if scaler is not None:
            _in_place.shard_scaler(scaler)
        _in_place.shard_optimizers(its, plain, sharding)
        _in_place.shard_model(one, sharding, scaler)
    return (model, optimizer) if scaler is None else (model, optimizer, scaler)


def _defaults() -> dict[str, Any]:
    """The options of ``group_sharded_parallel`` with their defaults."""
    parameters = inspect.signature(group_sharded_parallel).parameters.values()
    options = {one.name: one.default for one in parameters if one.default is not one.empty}
    del options["scaler"]  # an argument of its own
    return options


def _level(stage: Any) -> str:
    if type(stage) is not int or not 1 <= stage <= len(LEVELS):
        raise InvalidArgumentError(f"stage is {stage!r}; it must be 1, 2 or 3")
    return LEVELS[stage - 1]


def _several(given: Any, what: str) -> list[Any]:
    """The objects in an argument, which is one of them or a sequence."""
    found = list(given) if isinstance(given, list | tuple) else [given]
    for number, one in enumerate(found):
        if any(kind.__module__.partition(".")[0] == "paddle" for kind in type(one).__mro__):
            raise InvalidTypeError(
                f"{what} is a {type(one).__name__} of Paddle; use "
                "zeroshard.paddle.group_sharded_parallel"
            )
        if any(one is other for other in found[:number]):
            raise InvalidArgumentError(f"{what} {number} is passed twice; pass each once")
    return found


def _pairs(models: list[Any], optimizers: list[Any]) -> list[tuple[Any, list[Any]]]:
    """Each model with the optimizers that have its parameters."""
    if len(models) > len(optimizers) or not models:
        raise InvalidArgumentError(
            f"{len(models)} models and {len(optimizers)} optimizers are passed; pass at least one "
            "optimizer for each model, or put models that share an optimizer into one "
            "torch.nn.Module"
        )
    if len(models) == 1:
        return [(models[0], optimizers)]
    owners: dict[int, int] = {}
    for number, model in enumerate(models):
        for parameter in model.parameters() if isinstance(model, nn.Module) else ():
            if owners.setdefault(id(parameter), number) != number:
                raise InvalidArgumentError(
                    f"model {owners[id(parameter)]} and model {number} share a parameter; put them "
                    "into one torch.nn.Module with one optimizer"
                )
    by_model: dict[int, list[Any]] = {}
    for number, optimizer in enumerate(optimizers):
        trained = sorted({owners[key] for key in _stepped(optimizer) if key in owners})
        if len(trained) != 1:
            raise InvalidArgumentError(
                f"optimizer {number} has parameters of models {trained}; create one optimizer for "
                "each model, from its parameters()"
            )
        by_model.setdefault(trained[0], []).append(optimizer)
    for number in range(len(models)):
        if number not in by_model:
            raise InvalidArgumentError(
                f"no optimizer has parameters of model {number}; create one from its parameters()"
            )
    return [(model, by_model[number]) for number, model in enumerate(models)]


def _stepped(optimizer: Any) -> set[int]:
    """The ids of the parameters of an optimizer."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ()
    return {id(parameter) for group in groups for parameter in group["params"]}


def _group(mesh: Any, options: Mapping[str, Any]) -> Any:
    """The process group of a mesh."""
    if options.get("group") is not None:
        raise InvalidArgumentError("mesh and group are both given; pass one of them")
    given = check_mesh(mesh, "mesh")
    if given.ndim != 1:
        named = f" ({', '.join(given.mesh_dim_names)})" if given.mesh_dim_names else ""
        raise InvalidArgumentError(
            f"mesh has {given.ndim} dimensions{named}, and shard trains on the ranks of one; pass "
            "one dimension, such as mesh['dp'], or None for all ranks, also if the model is "
            "distributed over a mesh"
        )
    return given.get_group()

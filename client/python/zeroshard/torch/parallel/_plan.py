"""``parallelize_module``: a plan of styles, applied to a module."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle as TorchStyle

from ..._agreement import agree
from ...errors import AlreadyParallelError, InvalidArgumentError
from .._mesh import check_1d, check_mesh, mesh_ranks, mesh_text, sub_mesh
from .._ties import keeping_ties
from ._prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from ._style import ParallelStyle

#: A style for the whole module, or styles by the names of modules in it.
Plan = TorchStyle | Mapping[str, TorchStyle]

_PREPARES = (PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput)


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh,
    parallelize_plan: Plan,
    tp_mesh_dim: int | str | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Applies tensor parallelism to a module, in place.

    Args:
        module: what is parallelised.
        device_mesh: a mesh of one dimension; of more if ``tp_mesh_dim`` says which.
        parallelize_plan: one style, or a dict of them by module name. Names are matched part by
            part, as file names are (``"layers.*.fc1"``); ``""`` is the module itself.
        tp_mesh_dim: the dimension of the mesh that is used, by number or name.
        src_data_rank: the rank of the mesh whose parameters count; None: every rank's parameters
            are right as they are.

    Returns:
        The module.

    Raises:
        InvalidArgumentError: the mesh has several dimensions, or the plan has a name that matches
            nothing.
        UnsupportedModuleError: a style cannot be applied to a module of that type (a
            NotImplementedError).
        AlreadyParallelError: a module has been parallelised before, or stands in the plan twice (a
            RuntimeError).
        DisagreementError: another rank has another mesh, plan or module.

    In all of these cases nothing has been changed.
    """
    mesh = check_mesh(device_mesh, "device_mesh")
    mesh = check_1d(mesh, "device_mesh") if tp_mesh_dim is None else sub_mesh(mesh, tp_mesh_dim)
    steps = _resolve(module, parallelize_plan)
    _check(steps)
    agree("parallelize_module", _said(module, mesh, steps), mesh_ranks(mesh))
    with keeping_ties(module):
        for _, target, style in steps:
            style.src_data_rank = src_data_rank
            style._apply(target, mesh)
    return module


#: What a plan comes to: names, modules and their styles, in order.
_Steps = list[tuple[str, nn.Module, TorchStyle]]


def _resolve(module: nn.Module, plan: object) -> _Steps:
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError(
            f"module is a {type(module).__name__}; it must be a torch.nn.Module"
        )
    if isinstance(plan, TorchStyle):
        return [("", module, plan)]
    if not isinstance(plan, Mapping):
        raise InvalidArgumentError(
            f"parallelize_plan is a {type(plan).__name__}; it must be a ParallelStyle, or a dict of them by module name"
        )
    steps: _Steps = []
    for key, style in plan.items():
        if not isinstance(key, str) or not isinstance(style, TorchStyle):
            raise InvalidArgumentError(
                f"parallelize_plan has {key!r}: {style!r}; it must have a ParallelStyle for the name of a module"
            )
        steps += [(name, target, style) for name, target in _matches(module, key)]
    return steps


def _matches(module: nn.Module, key: str) -> list[tuple[str, nn.Module]]:
    """The modules that a key of a plan names; at least one."""
    found = [("", module)]
    for token in key.split(".") if key else ():
        children = [
            (f"{name}.{own}" if name else own, own, child)
            for name, parent in found
            for own, child in parent.named_children()
        ]
        matching = [(name, child) for name, own, child in children if fnmatchcase(own, token)]
        if not matching:
            there = ", ".join(repr(name) for name, _, _ in children) or "none"
            raise InvalidArgumentError(
                f"parallelize_plan has {key!r}, and no module matches {token!r}; there are {there}"
            )
        found = matching
    return found


def _check(steps: _Steps) -> None:
    seen: dict[int, str] = {}
    for name, target, style in steps:
        if isinstance(style, ParallelStyle):
            style._check(target, name)
        if isinstance(style, _PREPARES):
            continue
        if id(target) in seen:
            raise AlreadyParallelError(
                f"parallelize_plan has two styles for module {name!r}; it must have one"
            )
        seen[id(target)] = name


def _said(module: nn.Module, mesh: DeviceMesh, steps: _Steps) -> dict[str, str]:
    plan = ", ".join(f"{name!r}: {style!r}" for name, _, style in steps)
    parameters = ", ".join(
        f"{name} {list(p.shape)} {p.dtype}" for name, p in module.named_parameters()
    )
    return {
        "the mesh": mesh_text(mesh),
        "the plan": f"{{{plan}}}",
        "the module's parameters": parameters,
    }

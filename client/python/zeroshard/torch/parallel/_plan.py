"""``parallelize_module``: applies parallel styles to a module."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle as TorchStyle

from ..._agreement import agree
from ..._core.arguments import check_class
from ...errors import AlreadyParallelError, InvalidArgumentError, InvalidTypeError
from .._mesh import check_1d, check_mesh, current_mesh, mesh_ranks, mesh_text, sub_mesh
from .._ties import keeping_ties
from ._prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from ._style import ParallelStyle

#: A style for the whole module, or styles by the names of modules in it.
Plan = TorchStyle | Mapping[str, TorchStyle]

_PREPARES = (PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput)


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    tp_mesh_dim: int | str | None = None,
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """Applies tensor parallelism to a module, in place.

    Args:
        module: the module.
        device_mesh: a mesh of one dimension, or of several if ``tp_mesh_dim`` is given; None: the
            mesh of the surrounding ``with mesh:``.
        parallelize_plan: one style, or a dict of styles by module name. The parts of a name are
            patterns as for file names (``"layers.*.fc1"``); ``""`` is the module itself. As in
            torch, a name that matches no module is skipped with a warning, and None leaves the
            module as it is, with a warning.
        tp_mesh_dim: the dimension of the mesh to use, by index or name.
        src_data_rank: the rank of the mesh whose parameters are used; None: each rank's parameters
            are already equal.

    Returns:
        The module.

    Raises:
        InvalidArgumentError: the mesh has several dimensions, or there is none.
        InvalidTypeError: the plan is neither a style nor a dict (a TypeError).
        UnsupportedModuleError: a style does not support the type of a module (a
            NotImplementedError).
        AlreadyParallelError: a module is already parallelised, or the plan has two styles for it (a
            RuntimeError).
        DisagreementError: another rank has a different mesh, plan or module.

    After any of these errors the module is unchanged.
    """
    mesh = current_mesh() if device_mesh is None else check_mesh(device_mesh, "device_mesh")
    mesh = check_1d(mesh, "device_mesh") if tp_mesh_dim is None else sub_mesh(mesh, tp_mesh_dim)
    if parallelize_plan is None:
        warnings.warn("parallelize_plan is None: the module stays as it is", stacklevel=2)
        return module
    steps = _resolve(module, parallelize_plan)
    _check(steps)
    agree("parallelize_module", _arguments(module, mesh, steps), mesh_ranks(mesh))
    with keeping_ties(module):
        for _, target, style in steps:
            style.src_data_rank = src_data_rank
            style._apply(target, mesh)
    return module


#: The names, modules and styles of a plan, in order.
_Steps = list[tuple[str, nn.Module, TorchStyle]]


def _resolve(module: nn.Module, plan: object) -> _Steps:
    check_class("module", module, nn.Module, "torch.nn.Module")
    if isinstance(plan, TorchStyle):
        return [("", module, plan)]
    if not isinstance(plan, Mapping):
        raise InvalidTypeError(
            f"parallelize_plan is a {type(plan).__name__}; "
            "it must be a ParallelStyle, or a dict of them by module name"
        )
    steps: _Steps = []
    for key, style in plan.items():
        if not isinstance(key, str) or not isinstance(style, TorchStyle):
            raise InvalidArgumentError(
                f"parallelize_plan contains {key!r}: {style!r}; "
                "it must map names of modules to ParallelStyles"
            )
        steps += [(name, target, style) for name, target in _matches(module, key)]
    return steps


def _matches(module: nn.Module, key: str) -> list[tuple[str, nn.Module]]:
    """The modules that match a key of a plan. Warns if there are none."""
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
            warnings.warn(
                f"no module matches {token!r} in the key {key!r} of parallelize_plan; "
                f"the modules are {there}; the key is skipped",
                stacklevel=4,  # the caller of parallelize_module
            )
            return []
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
                f"parallelize_plan has two styles for module {name!r}; give it one"
            )
        seen[id(target)] = name


def _arguments(module: nn.Module, mesh: DeviceMesh, steps: _Steps) -> dict[str, str]:
    plan = ", ".join(f"{name!r}: {style!r}" for name, _, style in steps)
    parameters = ", ".join(
        f"{name} {list(p.shape)} {p.dtype}" for name, p in module.named_parameters()
    )
    return {
        "the mesh": mesh_text(mesh),
        "the plan": f"{{{plan}}}",
        "the module's parameters": parameters,
    }

"""The base class of parallel styles, and their common functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle as TorchStyle

from ..._program import Collective
from ...errors import (
    AlreadyParallelError,
    InvalidArgumentError,
    NotATensorError,
    UnsupportedModuleError,
)
from .._mesh import check_placement, mesh_ranks
from .._private import is_distributed
from ._functions import redistributed, same_mesh

#: Converts an input or output, given the mesh.
Prepare = Callable[[Any, DeviceMesh], Any]


class ParallelStyle(TorchStyle):
    """A way to parallelise a module: its input, its parameters and its output.

    A custom style either passes ``_prepare_input(input, mesh)`` and ``_prepare_output(output,
    mesh)``, in which case the parameters are replicated, or overrides ``_apply(module, mesh)``.
    None leaves the input or output unchanged. Only the first positional input is prepared.
    """

    _prepare_input: Prepare | None = None
    _prepare_output: Prepare | None = None
    #: A description of the supported modules, for errors.
    _supported: ClassVar[str] = "any module"

    def __init__(
        self, _prepare_input: Prepare | None = None, _prepare_output: Prepare | None = None
    ) -> None:
        for name, prepare in (
            ("_prepare_input", _prepare_input),
            ("_prepare_output", _prepare_output),
        ):
            if prepare is not None and not callable(prepare):
                raise InvalidArgumentError(
                    f"{name} is {prepare!r}; it must be a function of a tensor and a mesh, or None"
                )
        self._prepare_input = _prepare_input
        self._prepare_output = _prepare_output

    def _check(self, module: nn.Module, name: str) -> None:
        """Raises an error if the style does not support the module. Changes nothing."""
        check_fresh(module, name)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Applies the style to a module, in place."""
        self._check(module, "")
        partition(module, device_mesh, {}, self.src_data_rank)
        hook(module, device_mesh, self._prepare_input, self._prepare_output)
        return module

    def __repr__(self) -> str:
        functions = [self._prepare_input, self._prepare_output]
        arguments = [
            f"{name}={text(each)}"
            for name, each in zip(("_prepare_input", "_prepare_output"), functions)
            if each
        ]
        return f"{type(self).__name__}({', '.join(arguments)})"


def text(function: Prepare) -> str:
    """The qualified name of a function, which is compared between ranks."""
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{getattr(function, '__module__', '')}.{name}"


def unsupported(style: ParallelStyle, module: nn.Module, name: str) -> UnsupportedModuleError:
    """The error for a module that the style does not support."""
    return UnsupportedModuleError(
        f"module {name!r} is a {type(module).__name__}; "
        f"{type(style).__name__} supports {style._supported}"
    )


# ---- parameters


def check_fresh(module: nn.Module, name: str) -> None:
    """Raises an error if the module is already parallelised."""
    for inner, child in module.named_modules(prefix=name):
        if getattr(child, "_zeroshard_parallel", False) or is_distributed(child):
            raise AlreadyParallelError(
                f"module {inner!r} is already parallelised; give each module one style"
            )


def partition(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement], source: int | None = 0
) -> None:
    """Replaces the parameters and buffers of a module and its children with DTensors on a
    one-dimensional mesh.

    ``placements`` are by name; other parameters are replicated. The values are those of the mesh's
    rank ``source``.
    """
    for prefix, child in module.named_modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            full = f"{prefix}.{name}" if prefix else name
            if not isinstance(parameter, DTensor):
                placement = check_placement(
                    placements.get(full, Replicate()), parameter.dim(), f"parameter {full!r}"
                )
                child.register_parameter(
                    name, distributed_parameter(parameter, mesh, (placement,), source)
                )
        for name, buffer in list(child.named_buffers(recurse=False)):
            if not isinstance(buffer, DTensor):
                distributed = distribute_tensor(buffer, mesh, (Replicate(),), src_data_rank=source)
                setattr(child, name, distributed)
    module.__dict__["_zeroshard_parallel"] = True


def distributed_parameter(
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    source: int | None = 0,
) -> nn.Parameter:
    """The parameter, distributed over a mesh."""
    made = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=source)
    fresh = nn.Parameter(made, requires_grad=parameter.requires_grad)
    if getattr(parameter, "need_clip", True) is False:
        fresh.need_clip = False  # type: ignore[attr-defined]
    return fresh


# ---- inputs and outputs


def hook(
    module: nn.Module,
    mesh: DeviceMesh,
    prepare_input: Prepare | None,
    prepare_output: Prepare | None,
) -> None:
    """Registers hooks for the first input and the output of a module."""
    if prepare_input is not None:
        before = prepare_input
        module.register_forward_pre_hook(
            lambda _, inputs: (before(inputs[0], mesh), *inputs[1:]) if inputs else None
        )
    if prepare_output is not None:
        after = prepare_output
        module.register_forward_hook(lambda _, inputs, output: after(output, mesh))


def laid_out(
    value: object, mesh: DeviceMesh, declared: Placement, desired: Placement, what: str
) -> DTensor:
    """A DTensor with the desired placement. A plain tensor is a local tensor with the ``declared``
    one."""
    if not isinstance(value, Tensor):
        raise NotATensorError(
            f"{what} is a {type(value).__name__}; it must be a torch.Tensor or a DTensor"
        )
    desired = check_placement(desired, value.dim(), what)
    if isinstance(value, DTensor):
        same_mesh(value, mesh, what)
        return redistributed(value, desired)
    declared = check_placement(declared, value.dim(), what)
    return redistributed(DTensor.from_local(value, mesh, (declared,), run_check=False), desired)


# ---- collectives, for programs


def transition(declared: Placement, desired: Placement) -> str | None:
    """The collective that changes one placement to another. None if no data is moved."""
    if declared == desired or declared.is_replicate():
        return None
    if declared.is_partial():
        return "all_reduce" if desired.is_replicate() else "reduce_scatter"
    return "all_gather" if desired.is_replicate() else "all_to_all"


def note_collectives(module: nn.Module, mesh: DeviceMesh, **when: str | None) -> None:
    """Records the collectives of a module ``before_forward``, ``after_forward`` and so on, for
    programs."""
    group = tuple(mesh_ranks(mesh))
    noted: dict[str, list[Collective]] = module.__dict__.setdefault("_zeroshard_collectives", {})
    for moment, name in when.items():
        if name is not None:
            noted.setdefault(moment, []).append(Collective(name, group))

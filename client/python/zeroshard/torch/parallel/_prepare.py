"""``PrepareModuleInput``, ``PrepareModuleOutput`` and both in one: layouts of a module's inputs and
outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from ...errors import InvalidArgumentError, LayoutsError
from ._functions import local
from ._style import ParallelStyle, laid_out, note_collectives, transition

#: One layout, or one for each tensor. None: the value is passed on unchanged.
Layouts = Placement | tuple[Placement | None, ...]


class PrepareModuleInput(ParallelStyle):
    """Turns the inputs of a module into DTensors.

    Args:
        input_layouts: the layouts of plain inputs, one for each positional input.
        desired_input_layouts: the layouts that the module needs, as many.
        input_kwarg_layouts, desired_input_kwarg_layouts: the same for keyword inputs.
        use_local_output: whether the module receives plain tensors, False by default.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        use_local_output: bool = False,
    ) -> None:
        super().__init__()
        self.input_layouts = _layouts(input_layouts, "input_layouts")
        self.desired_input_layouts = _layouts(desired_input_layouts, "desired_input_layouts")
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        _check_lengths(self.input_layouts, self.desired_input_layouts, "input_layouts")
        if self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise LayoutsError(
                f"input_kwarg_layouts has the keys {sorted(self.input_kwarg_layouts)} and "
                "desired_input_kwarg_layouts the keys "
                f"{sorted(self.desired_input_kwarg_layouts)}; they must be the same"
            )

    def _check(self, module: nn.Module, name: str) -> None:
        """Supports every module, parallelised or not."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Registers a hook for the inputs."""

        def prepare(
            _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[Any, ...]:
            return self._prepared(inputs, device_mesh), self._prepared_named(named, device_mesh)

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        pairs = list(zip(self.input_layouts or (), self.desired_input_layouts or (), strict=True))
        pairs += [
            (layout, self.desired_input_kwarg_layouts[name])
            for name, layout in self.input_kwarg_layouts.items()
        ]
        _note(module, device_mesh, pairs, "before_forward", "after_backward")
        return module

    def _prepared(self, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        if self.input_layouts is None or self.desired_input_layouts is None:
            return inputs
        if len(inputs) != len(self.input_layouts):
            raise InvalidArgumentError(
                f"the module was called with {len(inputs)} inputs, and input_layouts has "
                f"{len(self.input_layouts)} elements; it must have one per input, None for inputs "
                "that are passed on unchanged"
            )
        layouts = zip(inputs, self.input_layouts, self.desired_input_layouts, strict=True)
        return tuple(
            _prepare(value, mesh, declared, desired, f"input {number}", self.use_local_output)
            for number, (value, declared, desired) in enumerate(layouts)
        )

    def _prepared_named(self, named: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
        declared, desired = self.input_kwarg_layouts, self.desired_input_kwarg_layouts
        return {
            name: _prepare(
                value,
                mesh,
                declared.get(name),
                desired.get(name),
                f"input {name!r}",
                self.use_local_output,
            )
            for name, value in named.items()
        }

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"desired_input_layouts={self.desired_input_layouts}, "
            f"input_kwarg_layouts={self.input_kwarg_layouts}, "
            f"desired_input_kwarg_layouts={self.desired_input_kwarg_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleOutput(ParallelStyle):
    """Redistributes the outputs of a module.

    Args:
        output_layouts: the layouts of plain outputs, one for each output.
        desired_output_layouts: the layouts of the result, as many.
        use_local_output: whether the result is plain tensors, True by default.
    """

    def __init__(
        self,
        *,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.output_layouts = _layouts(output_layouts, "output_layouts") or ()
        self.desired_output_layouts = (
            _layouts(desired_output_layouts, "desired_output_layouts") or ()
        )
        self.use_local_output = use_local_output
        _check_lengths(self.output_layouts, self.desired_output_layouts, "output_layouts")

    def _check(self, module: nn.Module, name: str) -> None:
        """Supports every module, parallelised or not."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Registers a hook for the outputs."""
        module.register_forward_hook(
            lambda _, inputs, outputs: self._prepared(outputs, device_mesh)
        )
        pairs = list(zip(self.output_layouts, self.desired_output_layouts, strict=True))
        _note(module, device_mesh, pairs, "after_forward", "before_backward")
        return module

    def _prepared(self, outputs: Any, mesh: DeviceMesh) -> Any:
        values = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
        if len(values) != len(self.output_layouts):
            raise InvalidArgumentError(
                f"the module has returned {len(values)} outputs, and output_layouts has "
                f"{len(self.output_layouts)} elements; it must have one per output, None for "
                "outputs that are passed on unchanged"
            )
        layouts = zip(values, self.output_layouts, self.desired_output_layouts, strict=True)
        prepared = tuple(
            _prepare(value, mesh, declared, desired, f"output {number}", self.use_local_output)
            for number, (value, declared, desired) in enumerate(layouts)
        )
        # As in torch, a tuple of one output becomes the output itself.
        return prepared[0] if len(prepared) == 1 else prepared

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(output_layouts={self.output_layouts}, "
            f"desired_output_layouts={self.desired_output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )


class PrepareModuleInputOutput(ParallelStyle):
    """:class:`PrepareModuleInput` and :class:`PrepareModuleOutput` in one, with their arguments.

    ``use_local_input`` is the ``use_local_output`` of the former.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts | None = None,
        desired_input_layouts: Layouts | None = None,
        input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def _check(self, module: nn.Module, name: str) -> None:
        """Supports every module, parallelised or not."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Registers hooks for inputs and outputs."""
        self.prepare_module_input._apply(module, device_mesh)
        return self.prepare_module_output._apply(module, device_mesh)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.prepare_module_input!r}, {self.prepare_module_output!r})"
        )


def _layouts(layouts: Layouts | None, name: str) -> tuple[Placement | None, ...] | None:
    if layouts is None or isinstance(layouts, Placement):
        return None if layouts is None else (layouts,)
    right = isinstance(layouts, (tuple, list)) and all(
        isinstance(each, Placement | None) for each in layouts
    )
    if not right:
        raise InvalidArgumentError(
            f"{name} is {layouts!r}; it must be a placement, or a tuple of placements and None"
        )
    return tuple(layouts)


def _check_lengths(
    declared: tuple[Placement | None, ...] | None,
    desired: tuple[Placement | None, ...] | None,
    name: str,
) -> None:
    lengths = [None if layouts is None else len(layouts) for layouts in (declared, desired)]
    if lengths[0] != lengths[1]:
        raise LayoutsError(
            f"{name} has {lengths[0] or 0} elements and desired_{name} {lengths[1] or 0}; "
            "they must have the same number"
        )


def _prepare(
    value: Any,
    mesh: DeviceMesh,
    declared: Placement | None,
    desired: Placement | None,
    what: str,
    to_local: bool,
) -> Any:
    if declared is None:
        return value
    prepared = laid_out(value, mesh, declared, declared if desired is None else desired, what)
    return local(prepared) if to_local else prepared


def _note(
    module: nn.Module,
    mesh: DeviceMesh,
    pairs: list[tuple[Placement | None, Placement | None]],
    forward: str,
    backward: str,
) -> None:
    for declared, desired in pairs:
        if declared is not None and desired is not None:
            note_collectives(module, mesh, **{forward: transition(declared, desired)})
            note_collectives(module, mesh, **{backward: transition(desired, declared)})

"""``ColwiseParallel`` and ``RowwiseParallel``: shard a Linear or an Embedding by columns or by
rows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..._rendezvous import world_group
from ...errors import InvalidArgumentError
from .._mesh import layout_on
from ._functions import even, local, redistributed
from ._style import (
    ParallelStyle,
    Prepare,
    check_fresh,
    hook,
    laid_out,
    note_collectives,
    partition,
    text,
    transition,
    unsupported,
)


class _LinearStyle(ParallelStyle):
    """The common base class. It has layouts of input and output, or functions as in the earlier
    styles."""

    _supported = "nn.Linear and nn.Embedding"

    def __init__(
        self,
        _prepare_input: Prepare | None = None,
        _prepare_output: Prepare | None = None,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool | None = None,
    ) -> None:
        super().__init__(_prepare_input, _prepare_output)
        for name, layout in (("input_layouts", input_layouts), ("output_layouts", output_layouts)):
            if layout is not None and not isinstance(layout, Placement):
                raise InvalidArgumentError(
                    f"{name} is {layout!r}; it must be Shard(dim), Replicate() or Partial()"
                )
        if _prepare_input is not None and input_layouts is not None:
            raise InvalidArgumentError(
                "_prepare_input and input_layouts are both given; pass one of them"
            )
        if _prepare_output is not None and (
            output_layouts is not None or use_local_output is not None
        ):
            raise InvalidArgumentError(
                "_prepare_output is given together with output_layouts or use_local_output; "
                "pass one or the other"
            )
        self.input_layouts = (input_layouts or self._defaults[0],)
        self.output_layouts = (output_layouts or self._defaults[1],)
        self.use_local_output = use_local_output is not False

    #: The default layouts of input and output.
    _defaults: tuple[Placement, Placement]

    def _placements(self, module: nn.Module) -> dict[str, Placement]:
        """The placements of the module's parameters."""
        raise NotImplementedError

    def _desired(self, module: nn.Module) -> Placement:
        """The placement of the input that the module needs."""
        raise NotImplementedError

    def _computed(self, module: nn.Module) -> Placement:
        """The placement of the module's output, before the output layout is applied."""
        raise NotImplementedError

    def _check(self, module: nn.Module, name: str) -> None:
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise unsupported(self, module, name)
        check_fresh(module, name)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shards the parameters, and registers hooks for inputs and outputs."""
        self._check(module, "")
        partition(module, device_mesh, self._placements(module), self.src_data_rank)
        before = self._prepare_input or partial(self._lay_input, module)
        after = self._prepare_output or partial(self._lay_output, module)
        hook(module, device_mesh, partial(self._checked_input, module, before), after)
        (declared,), (wanted,) = self.input_layouts, self.output_layouts
        desired, computed = self._desired(module), self._computed(module)
        # The input gradient of a column-wise Linear is a partial sum.
        gradient: Placement = (
            Partial() if desired.is_replicate() and isinstance(module, nn.Linear) else desired
        )
        note_collectives(
            module,
            device_mesh,
            before_forward=transition(declared, desired),
            after_forward=transition(computed, wanted),
            before_backward=transition(wanted, computed)
            if not computed.is_partial()
            else transition(wanted, Replicate()),
            after_backward=transition(gradient, declared),
        )
        return module

    def _lay_input(self, module: nn.Module, value: object, mesh: DeviceMesh) -> DTensor:
        (declared,) = self.input_layouts
        what = f"the input of a {type(module).__name__}"
        if (
            isinstance(module, nn.Linear)
            and isinstance(value, Tensor)
            and not isinstance(value, DTensor)
        ):
            if isinstance(declared, Shard) and declared.dim % value.dim() == value.dim() - 1:
                value = _features_of(value, mesh, module.in_features, what)
        return laid_out(value, mesh, declared, self._desired(module), what)

    def _checked_input(
        self, module: nn.Module, prepare: Prepare, value: object, mesh: DeviceMesh
    ) -> object:
        """Calls ``prepare``, and raises an error if the module cannot use the result."""
        prepared = prepare(value, mesh)
        if (
            isinstance(module, nn.Linear)
            and isinstance(prepared, DTensor)
            and prepared.shape[-1] != module.in_features
        ):
            raise InvalidArgumentError(
                f"the input of a Linear has {prepared.shape[-1]} features on all {mesh.size()} "
                f"ranks together; it must have {module.in_features}; plain shards must have the "
                "same size on every rank"
            )
        return prepared

    def _lay_output(self, module: nn.Module, value: DTensor, mesh: DeviceMesh) -> Tensor:
        (wanted,) = self.output_layouts
        if isinstance(wanted, Shard):
            wanted = Shard(wanted.dim % value.dim())
        value = redistributed(value, wanted)
        if not self.use_local_output:
            return value
        # The next module knows the number of features, but not the size of any other dimension.
        last = isinstance(wanted, Shard) and wanted.dim == value.dim() - 1
        return local(value if last else even(value, f"the output of a {type(module).__name__}"))

    def __repr__(self) -> str:
        before, after = self._prepare_input, self._prepare_output
        arguments = (
            f"_prepare_input={text(before)}" if before else f"input_layouts={self.input_layouts[0]}"
        )
        if after:
            arguments += f", _prepare_output={text(after)}"
        else:
            arguments += f", output_layouts={self.output_layouts[0]}"
            arguments += f", use_local_output={self.use_local_output}"
        return f"{type(self).__name__}({arguments})"


class ColwiseParallel(_LinearStyle):
    """Shards a Linear by its outputs, or an Embedding by its features.

    Linear: weight and bias ``Shard(0)``; Embedding: weight ``Shard(1)``. By default the input is
    equal on every rank, and the output is each rank's part of the last dimension, as a plain
    tensor.

    Args:
        _prepare_input, _prepare_output: functions of a tensor and the mesh, as in the earlier
            styles, instead of layouts.
        input_layouts: the layout of a plain input, ``Replicate()`` by default.
        output_layouts: the layout of the output, ``Shard(-1)`` by default.
        use_local_output: whether the output is a plain tensor, True by default.
    """

    _defaults = (Replicate(), Shard(-1))

    def _placements(self, module: nn.Module) -> dict[str, Placement]:
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(1)}
        return {"weight": Shard(0), "bias": Shard(0)}

    def _desired(self, module: nn.Module) -> Placement:
        return Replicate()

    def _computed(self, module: nn.Module) -> Placement:
        return Shard(-1)


class RowwiseParallel(_LinearStyle):
    """Shards a Linear by its inputs, or an Embedding by its rows, and sums the ranks' results.

    Linear: weight ``Shard(1)``, bias ``Replicate()`` and added once; Embedding: weight
    ``Shard(0)``. By default the input is each rank's part of the last dimension, and the output is
    whole on every rank, as a plain tensor. The features of a Linear need not be divisible by the
    number of ranks: a plain input has the size that ``torch.chunk`` gives.

    Args:
        _prepare_input, _prepare_output: functions of a tensor and the mesh, as in the earlier
            styles, instead of layouts.
        input_layouts: the layout of a plain input, ``Shard(-1)`` by default. Use ``Replicate()``
            for the indices of an Embedding.
        output_layouts: the layout of the output, ``Replicate()`` by default.
        use_local_output: whether the output is a plain tensor, True by default.
    """

    _defaults = (Shard(-1), Replicate())

    def _placements(self, module: nn.Module) -> dict[str, Placement]:
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(0)}
        return {"weight": Shard(1), "bias": Replicate()}

    def _desired(self, module: nn.Module) -> Placement:
        return Replicate() if isinstance(module, nn.Embedding) else Shard(-1)

    def _computed(self, module: nn.Module) -> Placement:
        return Partial()


def _features_of(value: Tensor, mesh: DeviceMesh, features: int, what: str) -> DTensor:
    """A DTensor of a plain shard of the last dimension, whose global size is known."""
    box = layout_on(mesh, [Shard(0)]).local_box([features], world_group().rank)
    wanted = 0 if box is None else box.numel
    if value.shape[-1] != wanted:
        raise InvalidArgumentError(
            f"{what} has {value.shape[-1]} features on this rank; it must have {wanted}, which is "
            f"part {mesh.get_local_rank()} of {features} features on {mesh.size()} ranks"
        )
    value = value.contiguous()
    shape = torch.Size((*value.shape[:-1], features))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value, mesh, (Shard(value.dim() - 1),), run_check=False, shape=shape, stride=stride
    )

"""``ColwiseParallel`` and ``RowwiseParallel``: a Linear or an Embedding, cut along its columns or
its rows."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..._rendezvous import place
from ...errors import InvalidArgumentError
from .._mesh import local_box
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
    """What the two have in common: layouts, or functions as the first styles had them."""

    _knows = "nn.Linear and nn.Embedding"

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
                "_prepare_input and input_layouts are given; it must be one of them"
            )
        if _prepare_output is not None and (
            output_layouts is not None or use_local_output is not None
        ):
            raise InvalidArgumentError(
                "_prepare_output is given with output_layouts or use_local_output; it must be one or the other"
            )
        self.input_layouts = (input_layouts or self._usual[0],)
        self.output_layouts = (output_layouts or self._usual[1],)
        self.use_local_output = use_local_output is not False

    #: Layouts of input and output unless others are given.
    _usual: tuple[Placement, Placement]

    def _placements(self, module: nn.Module) -> dict[str, Placement]:
        """Of the module's parameters."""
        raise NotImplementedError

    def _desired(self, module: nn.Module) -> Placement:
        """The placement of the input with which the module computes."""
        raise NotImplementedError

    def _made(self, module: nn.Module) -> Placement:
        """The placement of what the module computes."""
        raise NotImplementedError

    def _check(self, module: nn.Module, name: str) -> None:
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise unsupported(self, module, name)
        check_fresh(module, name)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Cuts the parameters, and has inputs and outputs prepared."""
        self._check(module, "")
        partition(module, device_mesh, self._placements(module), self.src_data_rank)
        before = self._prepare_input or partial(self._lay_input, module)
        after = self._prepare_output or partial(self._lay_output, module)
        hook(module, device_mesh, partial(self._checked_input, module, before), after)
        (declared,), (wanted,) = self.input_layouts, self.output_layouts
        desired, made = self._desired(module), self._made(module)
        # A column-wise module's input gradient is a sum over the ranks.
        gradient: Placement = (
            Partial() if desired.is_replicate() and isinstance(module, nn.Linear) else desired
        )
        note_collectives(
            module,
            device_mesh,
            before_forward=transition(declared, desired),
            after_forward=transition(made, wanted),
            before_backward=transition(wanted, made)
            if not made.is_partial()
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
        """What ``prepare`` makes, if the module can compute with it."""
        prepared = prepare(value, mesh)
        if (
            isinstance(module, nn.Linear)
            and isinstance(prepared, DTensor)
            and prepared.shape[-1] != module.in_features
        ):
            raise InvalidArgumentError(
                f"the input of a Linear has {prepared.shape[-1]} features on {mesh.size()} ranks together; it must "
                f"have {module.in_features}: a plain tensor that is a shard must be of the same size on every rank"
            )
        return prepared

    def _lay_output(self, module: nn.Module, value: DTensor, mesh: DeviceMesh) -> Tensor:
        (wanted,) = self.output_layouts
        if isinstance(wanted, Shard):
            wanted = Shard(wanted.dim % value.dim())
        value = redistributed(value, wanted)
        if not self.use_local_output:
            return value
        # Whoever takes a shard of the features knows how many there are; of other dimensions nobody
        # does.
        last = isinstance(wanted, Shard) and wanted.dim == value.dim() - 1
        return local(value if last else even(value, f"the output of a {type(module).__name__}"))

    def __repr__(self) -> str:
        before, after = self._prepare_input, self._prepare_output
        said = (
            f"_prepare_input={text(before)}" if before else f"input_layouts={self.input_layouts[0]}"
        )
        if after:
            said += f", _prepare_output={text(after)}"
        else:
            said += f", output_layouts={self.output_layouts[0]}, use_local_output={self.use_local_output}"
        return f"{type(self).__name__}({said})"


class ColwiseParallel(_LinearStyle):
    """Cuts a Linear along its outputs, an Embedding along its features.

    Linear: weight and bias ``Shard(0)``; Embedding: weight ``Shard(1)``. Without arguments the
    input is the same on every rank, and the output each rank's part of the last dimension, as a
    plain tensor.

    Args:
        _prepare_input, _prepare_output: functions of a tensor and the mesh, as the first styles had
            them; they stand in the place of the layouts.
        input_layouts: what a plain input is; ``Replicate()`` by default.
        output_layouts: what the output shall be; ``Shard(-1)`` by default.
        use_local_output: whether the output becomes a plain tensor, by default True.
    """

    _usual = (Replicate(), Shard(-1))

    def _placements(self, module: nn.Module) -> dict[str, Placement]:
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(1)}
        return {"weight": Shard(0), "bias": Shard(0)}

    def _desired(self, module: nn.Module) -> Placement:
        return Replicate()

    def _made(self, module: nn.Module) -> Placement:
        return Shard(-1)


class RowwiseParallel(_LinearStyle):
    """Cuts a Linear along its inputs, an Embedding along its rows; what the ranks compute is
    summed.

    Linear: weight ``Shard(1)``, bias ``Replicate()`` and added once; Embedding: weight
    ``Shard(0)``. Without arguments the input is each rank's part of the last dimension, and the
    output whole on every rank, as a plain tensor. A Linear's features need not divide by the ranks:
    its plain input has as many as ``torch.chunk`` would give.

    Args:
        _prepare_input, _prepare_output: functions of a tensor and the mesh, as the first styles had
            them; they stand in the place of the layouts.
        input_layouts: what a plain input is; ``Shard(-1)`` by default. (``Replicate()`` for an
            Embedding's indices.)
        output_layouts: what the output shall be; ``Replicate()`` by default.
        use_local_output: whether the output becomes a plain tensor, by default True.
    """

    _usual = (Shard(-1), Replicate())

    def _placements(self, module: nn.Module) -> dict[str, Placement]:
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(0)}
        return {"weight": Shard(1), "bias": Replicate()}

    def _desired(self, module: nn.Module) -> Placement:
        return Replicate() if isinstance(module, nn.Embedding) else Shard(-1)

    def _made(self, module: nn.Module) -> Placement:
        return Partial()


def _features_of(value: Tensor, mesh: DeviceMesh, features: int, what: str) -> DTensor:
    """A plain shard of the last dimension, of which it is known how many elements it has in all."""
    box = local_box((features,), mesh, [Shard(0)], place().rank)
    wanted = 0 if box is None else box[1][0]
    if value.shape[-1] != wanted:
        raise InvalidArgumentError(
            f"{what} has {value.shape[-1]} features on this rank; it must have {wanted}: part {mesh.get_local_rank()} "
            f"of {features} on {mesh.size()} ranks"
        )
    value = value.contiguous()
    shape = torch.Size((*value.shape[:-1], features))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value, mesh, (Shard(value.dim() - 1),), run_check=False, shape=shape, stride=stride
    )

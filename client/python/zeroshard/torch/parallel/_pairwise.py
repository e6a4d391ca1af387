"""``PairwiseParallel`` and ``SequenceParallel``: pairs of Linears, the first sharded by columns,
the second by rows."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...errors import InvalidArgumentError
from ._functions import (
    even,
    local,
    make_input_replicate_1d,
    make_input_shard_1d,
    make_output_shard_1d,
    make_output_tensor,
)
from ._style import (
    ParallelStyle,
    Prepare,
    check_fresh,
    hook,
    laid_out,
    note_collectives,
    partition,
    unsupported,
)


class PairwiseParallel(ParallelStyle):
    """Shards the Linears of a module in pairs, as Megatron-LM does
    (https://arxiv.org/abs/1909.08053).

    Of the Linears among the module's children, the first, third, ... are sharded by columns, and
    the second, fourth, ... by rows. If their number is odd, the last one is not sharded. The input
    of the first and the output of the last row-wise Linear are prepared; the modules in between run
    on DTensors. If a module has fewer than two Linears, its children are searched.

    Args:
        _prepare_input: :func:`make_input_replicate_1d` by default: the input is equal on every
            rank.
        _prepare_output: :func:`make_output_tensor` by default: the output is whole on every rank.
    """

    _supported = "modules that contain a module with two or more nn.Linear children"

    def __init__(
        self, _prepare_input: Prepare | None = None, _prepare_output: Prepare | None = None
    ) -> None:
        super().__init__(
            _prepare_input or make_input_replicate_1d, _prepare_output or make_output_tensor
        )

    def _check(self, module: nn.Module, name: str) -> None:
        found = linear_chains(module, name)
        if not found:
            raise unsupported(self, module, name)
        for chain in found:
            for inner, linear in chain:
                check_fresh(linear, inner)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shards the pairs, and registers hooks for the input and output of each chain."""
        self._check(module, "")
        for chain in linear_chains(module, ""):
            for number, (_, linear) in enumerate(chain):
                first, last = number == 0, number == len(chain) - 1
                by_rows = number % 2 == 1
                rows, columns = (
                    {"weight": Shard(1), "bias": Replicate()},
                    {"weight": Shard(0), "bias": Shard(0)},
                )
                partition(linear, device_mesh, rows if by_rows else columns, self.src_data_rank)
                hook(
                    linear,
                    device_mesh,
                    self._prepare_input if first else None,
                    self._prepare_output if last else None,
                )
                self._note(linear, device_mesh, by_rows, first, last)
        return module

    def _note(
        self, linear: nn.Linear, mesh: DeviceMesh, by_rows: bool, first: bool, last: bool
    ) -> None:
        gathered, scattered = self._resharded(first), self._resharded(last)
        if by_rows:
            note_collectives(
                linear,
                mesh,
                after_forward="reduce_scatter" if scattered else "all_reduce",
                before_backward="all_gather" if scattered else None,
            )
        else:
            note_collectives(
                linear,
                mesh,
                before_forward="all_gather" if gathered else None,
                after_backward="reduce_scatter" if gathered else "all_reduce",
            )

    def _resharded(self, at_the_end: bool) -> bool:
        """Returns whether the input and output of a chain are shards."""
        return False


class SequenceParallel(PairwiseParallel):
    """Activations that are sharded on the sequence dimension (https://arxiv.org/abs/2205.05198).

    For a module with pairs of Linears it is a :class:`PairwiseParallel` whose plain input is this
    rank's shard, which is gathered, and whose output is reduced and scattered to this rank's shard.
    The dimension is 0 by default, and the output is a plain tensor unless
    ``use_local_output=False``.

    For a module without Linears (LayerNorm, RMSNorm, Dropout, or a custom one) it replicates the
    parameters and computes on the shards. Input and output are sharded on dimension 1 by default,
    and the output is a DTensor unless ``use_local_output=True``. A plain input is this rank's shard
    and must have the same size on every rank.
    """

    _supported = (
        "modules without nn.Linear, such as nn.LayerNorm, nn.RMSNorm and nn.Dropout, and "
        f"{PairwiseParallel._supported}"
    )

    def __init__(
        self, *, sequence_dim: int | None = None, use_local_output: bool | None = None
    ) -> None:
        if sequence_dim is not None and (
            not isinstance(sequence_dim, int) or isinstance(sequence_dim, bool)
        ):
            raise InvalidArgumentError(
                f"sequence_dim is {sequence_dim!r}; it must be the index of a dimension"
            )
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output
        super().__init__(self._gather_input, self._scatter_output)

    def _check(self, module: nn.Module, name: str) -> None:
        if has_linear(module):
            super()._check(module, name)
        else:
            check_fresh(module, name)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shards pairs of Linears if the module has Linears. Otherwise computes on shards."""
        if has_linear(module):
            return super()._apply(module, device_mesh)
        self._check(module, "")
        partition(module, device_mesh, {}, self.src_data_rank)
        hook(module, device_mesh, partial(self._shard_input, module), self._shard_output)
        return module

    def _resharded(self, at_the_end: bool) -> bool:
        return at_the_end

    # ---- with Linears

    def _gather_input(self, value: Tensor, mesh: DeviceMesh) -> DTensor:
        return make_input_replicate_1d(
            make_input_shard_1d(value, mesh, self.sequence_dim or 0), mesh
        )

    def _scatter_output(self, value: Tensor, mesh: DeviceMesh) -> Tensor:
        output = make_output_shard_1d(value, mesh, self.sequence_dim or 0)
        return output if self.use_local_output is False else local(even(output, "the output"))

    # ---- without

    def _shard_input(self, module: nn.Module, value: object, mesh: DeviceMesh) -> DTensor:
        sharding = Shard(1 if self.sequence_dim is None else self.sequence_dim)
        return laid_out(value, mesh, sharding, sharding, f"the input of a {type(module).__name__}")

    def _shard_output(self, value: DTensor, mesh: DeviceMesh) -> Tensor:
        return local(even(value, "the output")) if self.use_local_output else value

    def __repr__(self) -> str:
        return (
            f"SequenceParallel(sequence_dim={self.sequence_dim}, "
            f"use_local_output={self.use_local_output})"
        )


def has_linear(module: nn.Module) -> bool:
    """Returns whether the module is a Linear or contains one."""
    return any(isinstance(inner, nn.Linear) for inner in module.modules())


def linear_chains(module: nn.Module, name: str) -> list[list[tuple[str, nn.Linear]]]:
    """The Linears that are sharded in pairs, by name: an even number of them in each module that
    has two or more."""
    children = [(f"{name}.{own}" if name else own, child) for own, child in module.named_children()]
    linears = [(own, child) for own, child in children if isinstance(child, nn.Linear)]
    if len(linears) >= 2:
        return [linears[: len(linears) // 2 * 2]]
    return [chain for own, child in children for chain in linear_chains(child, own)]

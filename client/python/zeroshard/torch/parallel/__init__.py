"""Tensor parallel styles: those of ``torch.distributed.tensor.parallel``, and the earlier styles
that torch has removed.

    from zeroshard.torch import ProcessMesh
    from zeroshard.torch.parallel import PairwiseParallel, parallelize_module

    mesh = ProcessMesh([0, 1], ["tp"])
    model = parallelize_module(model, mesh, {"mlp": PairwiseParallel()})
"""

from __future__ import annotations

from ._functions import (
    make_input_replicate_1d,
    make_input_reshard_replicate,
    make_input_shard_1d,
    make_input_shard_1d_last_dim,
    make_output_replicate_1d,
    make_output_reshard_tensor,
    make_output_shard_1d,
    make_output_tensor,
    make_sharded_output_tensor,
)
from ._linear import ColwiseParallel, RowwiseParallel
from ._loss import loss_parallel
from ._pairwise import PairwiseParallel, SequenceParallel
from ._plan import parallelize_module
from ._prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from ._style import ParallelStyle

__all__ = [
    "ColwiseParallel",
    "PairwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "make_input_replicate_1d",
    "make_input_reshard_replicate",
    "make_input_shard_1d",
    "make_input_shard_1d_last_dim",
    "make_output_replicate_1d",
    "make_output_reshard_tensor",
    "make_output_shard_1d",
    "make_output_tensor",
    "make_sharded_output_tensor",
    "parallelize_module",
]

# promise: same-bits
"""ZeRO with tensor parallelism: a transformer on a mesh of ranks, compared with a single dense
process.

Rank ``(d, t)`` of a mesh ``dp x tp`` has the d-th part of each batch and the t-th part of each
matrix.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import models
import ranks
from environment import IS_LONG
from servers import servers
from training import LEVELS, worst

TOLERANCE = 1e-4
#: Of a batch of 8 sequences, in two backward passes a step.
BATCH, MICRO = 8, 2
MAX_NORM = 0.5
WIDTH, HEADS, HIDDEN = 24, 6, 50
#: The number of steps on each mesh.
MESHES = (
    {(1, 2): 30, (2, 1): 30, (2, 2): 100, (1, 3): 30}
    if IS_LONG
    else dict.fromkeys(((1, 2), (2, 1), (2, 2), (1, 3)), 20)
)


class Attention(nn.Module):
    """Has as many heads as its local matrices have rows for."""

    def __init__(self) -> None:
        super().__init__()
        # Head by head its query, key and value: a part of the rows is some whole heads.
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        return self.out(
            F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        )


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    """One block. The weight of the head is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(models.VOCABULARY, WIDTH)
        self.positions = nn.Embedding(models.CONTEXT, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.attention, self.mlp = Attention(), MLP()
        self.head = nn.Linear(WIDTH, models.VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions(torch.arange(models.CONTEXT).unsqueeze(0))
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return F.cross_entropy(self.head(self.norms[2](x)).flatten(0, 1), targets.flatten())


def plan(sequence: bool) -> dict[str, Any]:
    """Megatron's plan: columns, then rows. With ``sequence``, activations in between are sharded on
    the sequence."""
    from zeroshard.torch.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    between = Shard(1) if sequence else Replicate()
    columns = {name: ColwiseParallel(input_layouts=between) for name in ("attention.qkv", "mlp.up")}
    rows = {name: RowwiseParallel(output_layouts=between) for name in ("attention.out", "mlp.down")}
    norms = (
        {f"norms.{n}": SequenceParallel(use_local_output=True) for n in range(3)}
        if sequence
        else {}
    )
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "positions": ColwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
        **columns,
        **rows,
        **norms,
    }


def build() -> GPT:
    torch.manual_seed(7)
    return GPT()


def losses_of(model: nn.Module, optimizer: Any, steps: int, part: int, parts: int) -> list[float]:
    """Trains on a part of each batch. Returns the losses."""
    losses = []
    for step in range(steps):
        data = models.share(models.batch("gpt", step, BATCH), part, parts)
        total = 0.0
        optimizer.zero_grad()
        for micro in range(MICRO):
            loss = model(*models.share(data, micro, MICRO)) / MICRO
            loss.backward()
            total += float(loss.detach())
        if hasattr(optimizer, "clip_grad_norm_") and step % 2:
            optimizer.clip_grad_norm_(MAX_NORM)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(total)
    return losses


@functools.cache
def dense() -> list[float]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return losses_of(model, optimizer, max(MESHES.values()), 0, 1)


def parallel(shape: tuple[int, int], sequence: bool) -> tuple[GPT, Any]:
    """The model on a mesh, and the mesh."""
    from zeroshard.torch.parallel import parallelize_module

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = build()
    parallelize_module(model, mesh["tp"], plan(sequence))
    assert model.head.weight is model.tokens.weight
    return model, mesh


def sharded(
    rank: int, shape: tuple[int, int], levels: tuple[str, ...], steps: int, sequence: bool
) -> list[tuple[list[float], str]]:
    """For each level, the mean losses over the replicas and the hash of the state."""
    from zeroshard.torch import group_sharded_parallel

    outcomes = []
    for level in levels:
        model, mesh = parallel(shape, sequence)
        assert isinstance(model.mlp.up.weight, DTensor)
        wrapped, optimizer, _ = group_sharded_parallel(
            model,
            torch.optim.AdamW(model.parameters(), lr=2e-3),
            level,
            segment_size=64,
            accumulation_steps=MICRO,
        )
        part = mesh.get_local_rank("dp")
        if level == "p_g_os":
            held = model.mlp.up.weight._local_tensor.untyped_storage().nbytes()
            assert held == 4, "a parameter that nobody uses is one element"
        mean = torch.tensor(
            losses_of(wrapped, optimizer, steps, part, shape[0]), dtype=torch.float64
        )
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        outcomes.append(((mean / shape[0]).tolist(), optimizer.state_hash()))
    return outcomes


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
def test_losses_are_those_of_one_dense_process_at_every_level(
    processes: dict[str, str], shape: tuple[int, int]
) -> None:
    steps = MESHES[shape]
    outcomes = ranks.run(shape[0] * shape[1], sharded, shape, LEVELS, steps, False, env=processes)
    reference = dense()[:steps]
    for outcome in outcomes:
        assert worst(outcome[0][0], reference) <= TOLERANCE
        assert outcome == outcomes[0]
    assert len({(tuple(losses), hash) for losses, hash in outcomes[0]}) == 1, "levels differ"


def test_a_sharded_sequence_gives_the_same_losses(
    pair: ranks.Team, processes: dict[str, str]
) -> None:
    outcomes = pair.run(sharded, (1, 2), ("os_g", "p_g_os"), 20, True, env=processes)
    assert worst(outcomes[0][0][0], dense()[:20]) <= TOLERANCE
    assert outcomes[0][0] == outcomes[0][1] == outcomes[1][0]


def test_the_bits_are_the_same_on_any_number_of_servers(pair: ranks.Team) -> None:
    hashes = set()
    for count in (1, 3):
        with servers(count) as address:
            (first, *_) = pair.run(
                sharded, (1, 2), ("os_g",), 10, False, env={"ZEROSHARD_ADDRESS": address}
            )
            hashes.add((tuple(first[0][0]), first[0][1]))
    assert len(hashes) == 1


def saved_and_loaded(rank: int, folder: str) -> None:
    """Compares two steps under one mesh and two under another with four steps under one."""
    from zeroshard.torch import (
        group_sharded_parallel,
        load_group_sharded_model,
        save_group_sharded_model,
    )

    def wrapped(shape: tuple[int, int]) -> tuple[Any, Any, Any]:
        model, mesh = parallel(shape, False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model, optimizer, _ = group_sharded_parallel(model, optimizer, "p_g_os", segment_size=64)
        return model, optimizer, mesh

    model, optimizer, mesh = wrapped((1, 2))
    losses_of(model, optimizer, 2, 0, 1)
    save_group_sharded_model(model, folder, optimizer)
    dist.barrier()
    expected = losses_of(model, optimizer, 2, 0, 1)

    other, optimizer, mesh = wrapped((2, 1))
    load_group_sharded_model(other, folder, optimizer)
    losses = losses_of(other, optimizer, 2, mesh.get_local_rank("dp"), 2)
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    assert worst((mean / 2).tolist(), expected) <= TOLERANCE

    if rank == 0:
        plain = GPT()
        plain.load_state_dict(torch.load(f"{folder}/model.pt"))
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=2e-3)
        plain_optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt"))
        assert worst(losses_of(plain, plain_optimizer, 2, 0, 1), expected) <= TOLERANCE


def test_training_continues_from_a_saved_state_under_another_mesh_and_in_plain_torch(
    pair: ranks.Team, tmp_path: Any
) -> None:
    pair.run(saved_and_loaded, str(tmp_path))

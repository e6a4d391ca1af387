"""Tensor parallel styles: a feed-forward network on two ranks, each with half of every matrix.

torchrun --nproc-per-node 2 tensor_parallel.py [--steps N]
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zeroshard.torch.parallel import (
    ColwiseParallel,
    PairwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    make_input_replicate_1d,
    make_output_tensor,
    parallelize_module,
)

WIDTH, HIDDEN, BATCH = 32, 128, 64


def network() -> nn.Sequential:
    """A network with the same initial parameters on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def train(model: nn.Module, steps: int, part: slice) -> list[float]:
    """Trains the network to reverse its inputs, and returns the losses. ``part``: the rows of a
    batch that this rank uses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        error: Tensor = model(inputs[part]) - inputs[part].flip(1)
        # The sum, so that the gradients of the parts of a batch add up to those of the batch.
        loss = error.square().sum() / (BATCH * WIDTH)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Trains with each style. Rank 0 prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(world)))
    whole, mine = slice(None), slice(rank * BATCH // world, (rank + 1) * BATCH // world)

    def say(name: str, losses: list[float]) -> None:
        if rank == 0:
            print(f"{name:<32} loss {losses[0]:.5f} -> {losses[-1]:.5f}", flush=True)

    dense = network()
    say("dense", train(copy.deepcopy(dense), steps, whole))

    # The first Linear is sharded by columns, the second by rows. Input and output are whole on
    # every rank.
    pairs = parallelize_module(copy.deepcopy(dense), mesh, PairwiseParallel())
    say("PairwiseParallel", train(pairs, steps, whole))

    # The same, with a style for each Linear.
    by_hand = parallelize_module(
        copy.deepcopy(dense),
        mesh,
        {
            "0": ColwiseParallel(_prepare_input=make_input_replicate_1d),
            "2": RowwiseParallel(_prepare_output=make_output_tensor),
        },
    )
    say("ColwiseParallel, RowwiseParallel", train(by_hand, steps, whole))

    # Each rank has its own part of the batch in the inputs and outputs, and does not keep the rest.
    sequence = parallelize_module(copy.deepcopy(dense), mesh, SequenceParallel())
    losses = torch.tensor(train(sequence, steps, mine))
    dist.all_reduce(losses)
    say("SequenceParallel", losses.tolist())

    kept = sum(
        parameter.to_local().numel()
        for parameter in pairs.parameters()
        if isinstance(parameter, DTensor)
    )
    if rank == 0:
        print(
            f"parameters {sum(parameter.numel() for parameter in dense.parameters())}, "
            f"on this rank {kept}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

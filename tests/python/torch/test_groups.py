# promise: same-bits
"""Ranks that add their gradients before they push them (``group_size``)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import models
import ranks
import servers
import zeroshard as zs
from test_steps import STEPS, build
from training import LEVELS, SEGMENT, Outcome, Training, train, worst
from zeroshard.torch import group_sharded_parallel

#: Buckets of several parameters, one bucket for all, and one for each parameter.
TRAININGS = {
    "mlp": Training(steps=6, max_norm=0.5, options={"buffer_max_size": 700}),
    "gpt": Training("gpt", steps=4),
    "unused parameters": Training("unused", steps=6, options={"buffer_max_size": 0}),
    "another order of layers every step": Training("branches", steps=6),
    "accumulated, scaled": Training(micro=2, max_norm=0.05, scaled=True, steps=6),
}


def in_groups(training: Training, size: int) -> Training:
    return dataclasses.replace(training, options={**training.options, "group_size": size})


def train_in_groups(
    rank: int, world: int, shards: int, sizes: list[int], names: list[str]
) -> dict[tuple[str, int], list[Outcome]]:
    """The outcomes at all levels, for each training and group size."""
    with zs.init(shards=shards):
        return {
            (name, size): [
                train(in_groups(TRAININGS[name], size), level, rank, world) for level in LEVELS
            ]
            for name in names
            for size in sizes
        }


def the_same(outcomes: list[Outcome]) -> tuple[list[float], list[float], str]:
    """Losses, norms and hash, which are the same in all of the outcomes."""
    found = [(outcome.losses, outcome.norms, outcome.hash) for outcome in outcomes]
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize("shards", [1, 3, 7])
def test_one_group_has_the_bits_of_ranks_that_push_alone(shards: int, pair: ranks.Team) -> None:
    names = list(TRAININGS) if shards == 3 else ["mlp"]
    results = pair.run(train_in_groups, 2, shards, [1, 2], names)
    for name in names:
        alone = the_same([one for result in results for one in result[name, 1]])
        assert the_same([one for result in results for one in result[name, 2]]) == alone


def test_four_ranks_have_the_same_bits_in_groups_on_any_number_of_servers() -> None:
    found = {
        shards: ranks.run(4, train_in_groups, 4, shards, [1, 2, 4] if shards == 3 else [2], ["mlp"])
        for shards in (1, 3, 7)
    }
    alone, pairs, whole = (
        the_same([one for result in found[3] for one in result["mlp", size]]) for size in (1, 2, 4)
    )
    assert whole == alone
    # Two groups add in another order than four ranks.
    assert worst(pairs[0], alone[0]) <= 1e-6 and worst(pairs[1], alone[1]) <= 1e-6
    assert pairs[2] != alone[2]
    for shards in (1, 7):
        assert the_same([one for result in found[shards] for one in result["mlp", 2]]) == pairs


# ---- tensor parallelism


class Rows(torch.nn.Module):
    """Two layers of a size that two ranks do not divide evenly, and parameters that every rank
    has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(30)
        self.up = torch.nn.Linear(30, 37)
        self.down = torch.nn.Linear(37, 30, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def tensor_parallel(
    rank: int, shape: tuple[int, int], shards: int, sizes: list[int]
) -> dict[int, list[tuple[list[float], str]]]:
    """The losses of this rank and the hashes at all levels, for each group size."""
    from zeroshard.torch.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    found: dict[int, list[tuple[list[float], str]]] = {}
    with zs.init(shards=shards):
        for size in sizes:
            for level in LEVELS:
                torch.manual_seed(5)
                layers = [Rows() for _ in range(2)]
                for layer in layers:
                    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                    parallelize_module(layer, mesh["tp"], plan)
                module = torch.nn.Sequential(*layers)
                model, optimizer, _ = group_sharded_parallel(
                    module,
                    torch.optim.AdamW(module.parameters(), lr=1e-2),
                    level,
                    group_size=size,
                    segment_size=100,
                    buffer_max_size=1500,
                )
                losses = []
                for step in range(4):
                    torch.manual_seed(100 * step + mesh.get_local_rank("dp"))
                    loss = model(torch.randn(8, 30)).square().mean()
                    loss.backward()
                    optimizer.clip_grad_norm_(0.1)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(float(loss.detach()))
                    with torch.no_grad():
                        model(torch.ones(1, 30))
                found.setdefault(size, []).append((losses, optimizer.state_hash()))
    return found


def test_tensor_parallel_ranks_in_one_group_have_the_bits_of_ranks_that_push_alone() -> None:
    for shape, shards in (((1, 2), 1), ((2, 2), 3)):
        world = shape[0] * shape[1]
        sizes = [1, world] if world == 2 else [1, 2, world]
        results = ranks.run(world, tensor_parallel, shape, shards, sizes)
        for result in results:
            alone = result[1]
            assert all(outcome == alone[0] for outcome in alone), "levels differ"
            assert result[world] == alone
            # A group of a replica adds nothing but replicated parameters.
            assert all(outcome == result[sizes[1]][0] for outcome in result[sizes[1]])
            assert worst(result[sizes[1]][0][0], alone[0][0]) <= 1e-6


# ---- the traffic of the servers


@contextlib.contextmanager
def counted(shards: int) -> Iterator[tuple[str, list[str]]]:
    """Runs servers. Returns the coordinator's address, and the addresses of their metrics."""
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(servers.server("coordinator"))
        shard = "shard", "--coordinator", coordinator
        yield coordinator, [stack.enter_context(servers.observed(*shard)) for _ in range(shards)]


def traffic(metrics: list[str]) -> tuple[int, int]:
    """The bytes of gradients that the servers have received, and of parameters that they have
    sent."""
    totals = []
    for labels in ('direction="received",operation="push"', 'direction="sent",operation="pull"'):
        total = 0
        for address in metrics:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
                text = response.read().decode()
            found = re.search(rf"zeroshard_payload_bytes_total\{{{labels}\}} (\d+)", text)
            assert found is not None
            total += int(found[1])
        totals.append(total)
    return totals[0], totals[1]


def count(rank: int, metrics: list[str]) -> dict[tuple[str, int], tuple[int, int]]:
    """The traffic of three steps, by level and group size."""
    found = {}
    for level in LEVELS:
        for size in (1, 2, 4):
            model = models.build("gpt")
            optimizer = torch.optim.AdamW(model.parameters())
            model, optimizer, _ = group_sharded_parallel(
                model,
                optimizer,
                level,
                group_size=size,
                segment_size=SEGMENT,
            )
            before = (0, 0)
            for step in range(4):
                model(*models.share(models.batch("gpt", step, 8), rank, 4)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    dist.barrier()
                    before = traffic(metrics)
                    dist.barrier()
            dist.barrier()
            after = traffic(metrics)
            found[level, size] = (after[0] - before[0], after[1] - before[1])
            dist.barrier()
    return found


def test_the_traffic_of_the_servers_falls_by_the_size_of_the_group() -> None:
    with counted(2) as (address, metrics):
        [found, *_] = ranks.run(4, count, metrics, env={"ZEROSHARD_ADDRESS": address})
    for level in LEVELS:
        for size in (2, 4):
            for alone, grouped in zip(found[level, 1], found[level, size], strict=True):
                assert abs(size * grouped / alone - 1) <= 0.02, (level, size, alone, grouped)


# ---- steps that are begun again


def interrupt(rank: int, size: int) -> list[str]:
    """Computes the gradients of two steps again before the ranks apply them, once with the batch of
    another step. Returns the hashes of all levels."""
    hashes = []
    for level in LEVELS:
        model, optimizer, _ = build(level, group_size=size, accumulation_steps=1)
        for step in range(STEPS):
            for batch in (step + 1, step) if step in (2, 3) else (step,):
                optimizer.zero_grad()
                torch.manual_seed(step)
                model(*models.share(models.batch("mlp", batch, 8), rank, 2)).backward()
            optimizer.step()
        hashes.append(optimizer.state_hash())
    return hashes


def test_gradients_that_the_ranks_have_zeroed_are_not_added(
    pair: ranks.Team, processes: Any
) -> None:
    [alone, same] = pair.run(interrupt, 1, env=processes)
    assert pair.run(interrupt, 2, env=processes) == [alone, same] and same == alone


# ---- what programs do on one rank only


def together(module: torch.nn.Module, *_: Any) -> None:
    """What a synchronised batch norm does: the ranks wait for each other in a forward."""
    if module.training:
        dist.barrier()


def evaluate(rank: int, size: int) -> tuple[str, float]:
    """Rank 0 evaluates and saves the model between steps, and at the end."""
    model, optimizer, _ = build("p_g_os", group_size=size)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(together)
    total = 0.0
    for step in range(STEPS):
        torch.manual_seed(step)
        model(*models.batch("mlp", step, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with torch.no_grad():
                total += sum(tensor.double().sum().item() for tensor in model.parameters())
                model.eval()
                total += model(*models.batch("mlp", step, 8)).item()
                model.train()
            total += sum(tensor.double().sum().item() for tensor in model.state_dict().values())
        dist.barrier()
    return optimizer.state_hash(), total


def test_rank_0_may_evaluate_and_save_a_model_while_its_group_waits(
    pair: ranks.Team, processes: Any
) -> None:
    alone = pair.run(evaluate, 1, env=processes)
    assert pair.run(evaluate, 2, env=processes) == alone


# ---- refusals


def refuse(rank: int) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    for size, message in (
        (0, "1 or more"),
        (True, "1 or more"),
        ("node", "'host'"),
        (3, "does not divide the number of ranks, 2"),
        ("host", "no launcher has set LOCAL_WORLD_SIZE"),
    ):
        with pytest.raises(zs.InvalidArgumentError, match=message):
            group_sharded_parallel(model, optimizer, "os", group_size=size)  # type: ignore[arg-type]
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    model, optimizer, _ = group_sharded_parallel(model, optimizer, "os", group_size="host")
    assert model.sharding.traffic.group_size == 2
    with pytest.raises(zs.InvalidArgumentError, match="without group_size"):
        with zs.torch.join(model):
            pass


def test_sizes_and_programs_that_do_not_fit_are_refused(processes: Any) -> None:
    ranks.run(2, refuse, env=processes)


def refuse_without_process_group(rank: int) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(zs.InvalidArgumentError, match="init_process_group"):
        group_sharded_parallel(model, optimizer, "os", group_size=2)
    dist.init_process_group("gloo")
    group_sharded_parallel(model, optimizer, "os", group_size=2)


def test_groups_need_a_process_group(processes: Any) -> None:
    ranks.run(2, refuse_without_process_group, env=processes, init="env")

"""Boxes of tensors on random meshes, beside torch's DTensor: what is written under one layout is
read under any other."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import ranks

WORLD = 4
MESHES = [(4,), (2, 2), (4, 1), (1, 4), (2, 1, 2)]
NAMES = ("a", "b", "c")
CASES = 80


@dataclass
class Case:
    """A tensor, where it is written, and where it is read."""

    whole: Tensor
    written: tuple[int, list[Placement]]
    read: tuple[int, list[Placement]]


def cases() -> list[Case]:
    """The same on every rank."""
    choose = random.Random(11)
    torch.manual_seed(11)

    def layout(dims: int) -> tuple[int, list[Placement]]:
        mesh = choose.randrange(len(MESHES))
        shards: list[Placement] = [Shard(dim) for dim in range(dims)]
        return mesh, [choose.choice([*shards, *shards, Replicate()]) for _ in MESHES[mesh]]

    made = []
    for _ in range(CASES):
        shape = [choose.choice([1, 2, 3, 5, 7, 8, 9]) for _ in range(choose.randrange(4))]
        made.append(Case(torch.randn(shape), layout(len(shape)), layout(len(shape))))
    # Cut by slices of the servers, too.
    made.append(Case(torch.randn(2100, 4001), (1, [Shard(1), Shard(0)]), (0, [Shard(1)])))
    made.append(Case(torch.randn(5, 1300, 1301), (0, [Shard(1)]), (1, [Shard(2), Shard(0)])))
    return made


def names_of(placements: list[Placement]) -> list[str]:
    return [f"shard:{p.dim}" if isinstance(p, Shard) else "replicate" for p in placements]


def array(tensor: Tensor, area: Any = None) -> Any:
    from zeroshard._native import Array

    return Array(tensor.data_ptr(), tensor.numel(), "f32", tensor, area)


def meshes() -> list[Any]:
    from zeroshard._native import Mesh

    return [Mesh(shape, range(WORLD), NAMES[: len(shape)]) for shape in MESHES]


def job_of(specs: list[Any], rank: int, lr: float) -> Any:
    from zeroshard._session import current

    session, everyone = current(), tuple(range(WORLD))
    name = session.name("layouts", everyone)
    groups = [("sgd", {"lr": lr})]
    return session.open(name, specs, groups, (rank, WORLD), 1 << 20, meshes=meshes())


def write_and_read(rank: int) -> None:
    from zeroshard._native import TensorSpec

    devices = [
        init_device_mesh("cpu", shape, mesh_dim_names=NAMES[: len(shape)]) for shape in MESHES
    ]
    native, all_cases = meshes(), cases()
    specs = [
        TensorSpec(
            f"t{n}",
            case.whole.shape,
            frozen=True,
            layout=(case.written[0], names_of(case.written[1])),
        )
        for n, case in enumerate(all_cases)
    ]
    job = job_of(specs, rank, 1.0)
    written = [
        distribute_tensor(case.whole, devices[case.written[0]], case.written[1])
        for case in all_cases
    ]
    local = [tensor.to_local().contiguous() for tensor in written]
    job.initialise([(n, array(tensor)) for n, tensor in enumerate(local)])

    own = [torch.full_like(tensor, math.nan) for tensor in local]
    job.fetch(0, [(n, array(tensor)) for n, tensor in enumerate(own)])
    for n, (ours, theirs) in enumerate(zip(own, local, strict=True)):
        assert torch.equal(ours, theirs), f"what rank {rank} wrote of t{n}"

    read, expected = [], []
    for n, case in enumerate(all_cases):
        mesh, placements = case.read
        if mesh == case.written[0]:
            other = written[n].redistribute(devices[mesh], placements)
        else:
            other = distribute_tensor(written[n].full_tensor(), devices[mesh], placements)
        expected.append(other.to_local())
        area = native[mesh].local_box(list(case.whole.shape), names_of(placements), rank)
        assert area is not None and tuple(area[1]) == tuple(expected[-1].shape)
        host = torch.full(tuple(area[1]), math.nan)
        read.append((n, host, array(host, area)))
    job.fetch(0, [(n, target) for n, _, target in read])
    for (n, host, _), other in zip(read, expected, strict=True):
        assert torch.equal(host, other), f"t{n}: {all_cases[n].written} as {all_cases[n].read}"

    # Several boxes of one tensor at once, and all of it.
    n = next(n for n, case in enumerate(all_cases) if case.whole.dim() == 2)
    whole = all_cases[n].whole
    halves = [torch.empty(whole.shape[0], 1), torch.empty_like(whole)]
    areas = [([0, 0], halves[0].shape), ([0, 0], whole.shape)]
    job.fetch(0, [(n, array(half, area)) for half, area in zip(halves, areas, strict=True)])
    assert torch.equal(halves[0], whole[:, :1]) and torch.equal(halves[1], whole)


def test_what_is_written_under_one_layout_is_read_under_any_other() -> None:
    ranks.run(WORLD, write_and_read)


def contribute(rank: int) -> None:
    """One step of SGD with a learning rate of 1: the parameters less their gradients."""
    from zeroshard._native import TensorSpec

    choose, native = random.Random(5), meshes()
    layouts = []
    for _ in range(40):
        mesh = choose.randrange(len(MESHES))
        kinds = ["sum", "avg", "replicate", "shard:0", "shard:1"]
        layouts.append((mesh, [choose.choice(kinds) for _ in MESHES[mesh]]))
    shapes = [[choose.choice([1, 3, 6, 7]), choose.choice([1, 2, 5])] for _ in layouts]
    job = job_of(
        [TensorSpec(f"w{n}", shapes[n], layout=layout) for n, layout in enumerate(layouts)],
        rank,
        1.0,
    )

    def box(n: int, of: int) -> tuple[slice, ...]:
        area = native[layouts[n][0]].local_box(shapes[n], layouts[n][1], of)
        return tuple(slice(first, first + count) for first, count in zip(*area, strict=True))

    def gradient(n: int, of: int) -> Tensor:
        """What a rank has; where it does not contribute, nobody must look at it."""
        torch.manual_seed(100 * n + of)
        return torch.randn(shapes[n])[box(n, of)].contiguous()

    job.initialise(
        [(n, array(torch.zeros(shapes[n])[box(n, rank)].contiguous())) for n in range(len(layouts))]
    )
    for n in range(len(layouts)):
        job.gradient(0, n, array(gradient(n, rank)))
    report = job.commit(0, [("sgd", {"lr": 1.0})])
    assert report.applied

    norm = 0.0
    for n, (mesh, placements) in enumerate(layouts):
        expected = torch.zeros(shapes[n], dtype=torch.float64)
        for other in range(WORLD):
            coordinate = native[mesh].coordinate(other)
            contributes = all(
                p != "replicate" or place == 0
                for p, place in zip(placements, coordinate, strict=True)
            )
            if contributes:
                expected[box(n, other)] += gradient(n, other).double()
        expected /= math.prod(
            size for p, size in zip(placements, MESHES[mesh], strict=True) if p == "avg"
        )
        norm += float(expected.square().sum())
        whole = torch.empty(shapes[n])
        job.fetch(1, [(n, array(whole, ([0, 0], shapes[n])))])
        torch.testing.assert_close(
            whole.double(),
            -expected,
            rtol=1e-6,
            atol=1e-6,
            msg=lambda text: f"{layouts[n]}: {text}",
        )
    assert abs(report.gradient_norm - math.sqrt(norm)) < 1e-5 * math.sqrt(norm)


def test_gradients_are_summed_averaged_and_put_together_as_their_layouts_say() -> None:
    ranks.run(WORLD, contribute)

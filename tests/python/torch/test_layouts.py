# promise: consistent-reads
"""Boxes of tensors on random meshes, compared with torch's DTensor."""

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
    """A tensor, the layout in which it is written, and the layout in which it is read."""

    whole: Tensor
    written: tuple[int, list[Placement]]
    read: tuple[int, list[Placement]]


def cases() -> list[Case]:
    """The same cases on every rank."""
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


def array(tensor: Tensor, box: Any = None) -> Any:
    from zeroshard._native import Array

    return Array(tensor.data_ptr(), tensor.numel(), "f32", tensor, box)


def meshes() -> list[Any]:
    from zeroshard._native import Mesh

    return [Mesh(shape, range(WORLD), NAMES[: len(shape)]) for shape in MESHES]


def job_of(specs: list[Any], rank: int, lr: float) -> Any:
    from zeroshard._session import connection

    opened, groups = connection(), [("sgd", {"lr": lr})]
    name = opened.job_name("layouts", tuple(range(WORLD)))
    return opened.open(name, specs, groups, opened.world, 1 << 20, meshes=meshes())


def write_and_read(rank: int) -> None:
    from zeroshard._native import Box, Layout, TensorSpec

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
        box = Layout(native[mesh], names_of(placements)).local_box(case.whole.shape, rank)
        assert box is not None and tuple(box.size) == tuple(expected[-1].shape)
        host = torch.full(tuple(box.size), math.nan)
        read.append((n, host, array(host, box)))
    job.fetch(0, [(n, target) for n, _, target in read])
    for (n, host, _), other in zip(read, expected, strict=True):
        assert torch.equal(host, other), f"t{n}: {all_cases[n].written} as {all_cases[n].read}"

    # Several boxes of one tensor at once, and all of it.
    n = next(n for n, case in enumerate(all_cases) if case.whole.dim() == 2)
    whole = all_cases[n].whole
    halves = [torch.empty(whole.shape[0], 1), torch.empty_like(whole)]
    job.fetch(0, [(n, array(half, Box.whole(half.shape))) for half in halves])
    assert torch.equal(halves[0], whole[:, :1]) and torch.equal(halves[1], whole)


def test_a_tensor_written_in_one_layout_can_be_read_in_any_other() -> None:
    ranks.run(WORLD, write_and_read)


def contribute(rank: int) -> None:
    """One step of SGD with a learning rate of 1 on zeros: the parameters become the negative
    gradients."""
    from zeroshard._native import Box, Layout, TensorSpec

    choose, native = random.Random(5), meshes()
    layouts = []
    for _ in range(40):
        mesh = choose.randrange(len(MESHES))
        names = ["sum", "avg", "replicate", "shard:0", "shard:1"]
        layouts.append((mesh, [choose.choice(names) for _ in MESHES[mesh]]))
    shapes = [[choose.choice([1, 3, 6, 7]), choose.choice([1, 2, 5])] for _ in layouts]
    job = job_of(
        [TensorSpec(f"w{n}", shapes[n], layout=layout) for n, layout in enumerate(layouts)],
        rank,
        1.0,
    )

    def part(n: int, of: int) -> tuple[slice, ...]:
        mesh, placements = layouts[n]
        box = Layout(native[mesh], placements).local_box(shapes[n], of)
        assert box is not None
        pairs = zip(box.offset, box.size, strict=True)
        return tuple(slice(first, first + count) for first, count in pairs)

    def gradient(n: int, of: int) -> Tensor:
        """The local gradient of a rank. Ranks that do not contribute have different values, which
        must be ignored."""
        torch.manual_seed(100 * n + of)
        return torch.randn(shapes[n])[part(n, of)].contiguous()

    job.initialise(
        [
            (n, array(torch.zeros(shapes[n])[part(n, rank)].contiguous()))
            for n in range(len(layouts))
        ]
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
                expected[part(n, other)] += gradient(n, other).double()
        expected /= math.prod(
            size for p, size in zip(placements, MESHES[mesh], strict=True) if p == "avg"
        )
        norm += float(expected.square().sum())
        whole = torch.empty(shapes[n])
        job.fetch(1, [(n, array(whole, Box.whole(shapes[n])))])
        torch.testing.assert_close(
            whole.double(),
            -expected,
            rtol=1e-6,
            atol=1e-6,
            msg=lambda text: f"{layouts[n]}: {text}",
        )
    assert abs(report.gradient_norm - math.sqrt(norm)) < 1e-5 * math.sqrt(norm)


def test_gradients_are_reduced_and_assembled_according_to_their_layouts() -> None:
    ranks.run(WORLD, contribute)

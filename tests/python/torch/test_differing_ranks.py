# promise: no-silent-difference
"""Ranks that pass different models or optimizers: every rank gets an error at once, which names the
difference."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ranks
import zeroshard as zs
from zeroshard.torch import DataParallel, group_sharded_parallel


def mismatched(rank: int, what: str) -> None:
    """Shards a model which differs on the ranks."""
    model = nn.Sequential(nn.Linear(4, 4 + rank if what == "shape" else 4), nn.Linear(4, 2))
    if what == "dtype" and rank:
        model[1].bfloat16()
    if what == "frozen":
        model[1].weight.requires_grad_(rank == 0)
    if what == "data parallel":
        DataParallel(nn.Linear(4, 2 + rank))
        return
    make: Any = torch.optim.AdamW if what == "optimizer" and rank else torch.optim.SGD
    parameters: Any = list(model.parameters())
    if what == "groups" and rank:
        parameters = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = make(parameters, lr=0.1 + (rank if what == "lr" else 0))
    group_sharded_parallel(model, optimizer, "os", offload=what == "offload" and rank == 1)


#: What differs, and what the error says of the first rank and of the second one.
DIFFERENCES = {
    "shape": ("tensor '0.weight'", "[4, 4]", "[5, 4]"),
    "dtype": ("tensor '1.weight'", "float32", "bfloat16"),
    "frozen": ("tensor '1.weight'", "trained", "frozen"),
    "optimizer": ("the optimizer", "sgd", "adamw"),
    "groups": ("tensor '0.bias'", "group 0", "group 1"),
    "lr": ("lr of parameter group 0", "0.1", "1.1"),
    "offload": ("offload", "False", "True"),
    "data parallel": ("tensor 'weight'", "[2, 4]", "[3, 4]"),
}


def texts(rank: int) -> dict[str, str]:
    zs.init()  # with a timeout of ten minutes
    found = {}
    for what in DIFFERENCES:
        try:
            mismatched(rank, what)
        except zs.DisagreementError as error:
            found[what] = str(error)
    return found


def test_ranks_with_different_models_or_optimizers_both_learn_of_the_difference() -> None:
    for found in ranks.run(2, texts):
        assert list(found) == list(DIFFERENCES)
        for what, text in found.items():
            name, first, second = DIFFERENCES[what]
            before, _, after = text.lower().partition("rank 1 has")
            assert f"disagree about {name}:" in text, text
            assert first.lower() in before and second.lower() in after, text


def stored(rank: int) -> tuple[list[int], int]:
    """The numbers of keys in the store after each of some jobs, and the bytes of the values that
    this rank has set for a model of many tensors."""
    sizes: list[int] = []
    store = dist.distributed_c10d._get_default_store()

    class Counting:
        def set(self, key: str, value: str) -> None:
            sizes.append(len(value))
            store.set(key, value)

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

    dist.distributed_c10d._world.pg_map[dist.group.WORLD] = ("gloo", Counting())  # type: ignore
    zs.init()
    model: Any = nn.Sequential(*[nn.Linear(2, 2) for _ in range(100)])
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    DataParallel(model)
    model, optimizer, _ = group_sharded_parallel(model, optimizer, "os")
    keys = []
    for _ in range(6):
        optimizer.load_state_dict(optimizer.state_dict())
        dist.barrier()
        keys.append(store.num_keys())
        dist.barrier()
    return keys, sum(sizes)


def test_ranks_that_agree_leave_little_in_the_store() -> None:
    for keys, size in ranks.run(2, stored):
        assert len(set(keys[2:])) == 1
        assert 500 < size < 8000  # 200 tensors for each of 8 jobs

"""Ranks that pass different models or optimizers: every rank gets an error at once, which names the
difference."""

from __future__ import annotations

from typing import Any

import torch
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

"""The trainer of `zs-bench follow`: trains two equal models, of which readers follow one.

It takes orders on standard input, and answers each with one JSON object on standard output. The
models are byte-level GPTs which have learnt from the sources of Python's library, so that gradients
are those of a real text. Beside the readers it measures what trainers do without ZeroShard: they
keep a second copy of the model, compare it with the new values, and send indices and values.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT = 128
#: The learning rate before the measurement, and the number of steps in which it rises.
LEARNING_RATE = 3e-4
RISE = 10
WEIGHT_DECAY = 0.01
#: The number of values of two bytes.
VALUES = 1 << 16


class Block(nn.Module):
    """Attention and an MLP, each with a layer norm and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        x = x + self.mlp(self.norm2(x))
        return x


class Model(nn.Module):
    """A language model of bytes."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def batches(batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random parts of a text, and the same parts shifted by one byte."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(1)
    while True:
        begins = torch.randint(len(tokens) - CONTEXT, (batch, 1), generator=generator)
        pieces = tokens[begins + torch.arange(CONTEXT + 1)]
        yield pieces[:, :-1], pieces[:, 1:]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of the models."""
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
    )


def learn(model: Any, optimizer: Any, batch: tuple[Tensor, Tensor]) -> float:
    """Makes a training step. Returns the loss."""
    inputs, targets = batch
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def pretrain(
    model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], steps: int
) -> dict[str, Any]:
    """Trains with torch alone, so that values, gradients and moments are those of a model in use.
    Returns the state of the optimizer."""
    optimizer = adamw(model)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / RISE)
        learn(model, optimizer, next(batches))
    return optimizer.state_dict()


@dataclass
class Trained:
    """A model whose optimizer is on the servers."""

    model: Any
    optimizer: Any
    batches: Iterator[tuple[Tensor, Tensor]]

    def step(self) -> dict[str, float]:
        """Makes a step, and says when it was committed: before the new parameters were pulled."""
        zs: Any = import_module("zeroshard")
        pulled = zs.report(self.model).waited["pull"]
        began = time.monotonic()
        loss = learn(self.model, self.optimizer, next(self.batches))
        ended = time.monotonic()
        pulled = zs.report(self.model).waited["pull"] - pulled
        return {"seconds": ended - began, "committed": ended - pulled, "loss": loss}


class Snapshots:
    """The method without ZeroShard: a second copy of the model, in bf16."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = [parameter.detach().bfloat16() for parameter in model.parameters()]

    def compare(self) -> dict[str, float]:
        """Finds what has changed since the last comparison. The answer has the seconds and the
        bytes of this method, and the entropy of the changes in bits."""
        parameters = [parameter.detach() for parameter in self._model.parameters()]
        began = time.monotonic()
        after = [parameter.bfloat16() for parameter in parameters]
        sent = 0
        for old, new in zip(self._before, after, strict=True):
            bits = new.flatten().view(torch.int16)
            changed = (bits != old.flatten().view(torch.int16)).nonzero().flatten().int()
            values = bits[changed]
            sent += changed.nbytes + values.nbytes
        seconds = time.monotonic() - began
        counts = torch.zeros(2 * VALUES)
        for old, new in zip(self._before, after, strict=True):
            moved = (ordered(new) - ordered(old)).flatten() + VALUES
            counts += torch.bincount(moved, minlength=2 * VALUES)
        self._before = after
        return {
            "snapshot_seconds": seconds,
            "snapshot_bytes": sent,
            "copy_bytes": sum(of.nbytes for of in after),
            "changed": counts.sum().item() - counts[VALUES].item(),
            "entropy_bits": entropy(counts.double()),
        }


def ordered(values: Tensor) -> Tensor:
    """Integers in the order of the values, so that neighbours differ by 1."""
    bits = values.view(torch.int16).int() & 0xFFFF
    return torch.where(bits >= VALUES // 2, VALUES - 1 - bits, bits + VALUES // 2)


def entropy(counts: Tensor) -> float:
    """The bits for all elements, if each is coded by its frequency."""
    total = counts.sum()
    counts = counts[counts > 0]
    return float((counts * (total / counts).log2()).sum())


def main() -> None:
    """Trains as it is told."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    for number in ("layers", "width", "batch", "pretrain"):
        parser.add_argument(f"--{number}", type=int, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model(options.layers, options.width)
    state = pretrain(model, batches(options.batch), options.pretrain)
    import_module("zeroshard").init(options.address, name="bench")
    shard: Any = import_module("zeroshard.torch").group_sharded_parallel
    trained = {}
    for name in ("followed", "alone"):
        own = copy.deepcopy(model)
        own_optimizer = adamw(own)
        own_optimizer.load_state_dict(copy.deepcopy(state))
        wrapped, optimizer, _ = shard(own, own_optimizer, "os_g")
        trained[name] = Trained(wrapped, optimizer, batches(options.batch))
        trained[name].step()
    del model, state
    snapshots = Snapshots(trained["followed"].model)
    params = sum(parameter.numel() for parameter in trained["followed"].model.parameters())
    print(json.dumps({"params": params}), flush=True)
    while order := input().split():
        answer: dict[str, float] = {}
        match order:
            case ["rate", rate]:
                for of in trained.values():
                    of.optimizer.param_groups[0]["lr"] = float(rate)
            case ["step", name]:
                answer = trained[name].step()
            case ["compare"]:
                answer = snapshots.compare()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

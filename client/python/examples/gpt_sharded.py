"""A small GPT learns to write text: by default the files of this repository.

python gpt.py [--data FOLDER] [--steps N]
torchrun --nproc-per-node 2 gpt.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.torch import group_sharded_parallel

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 128, 4, 4, 16


class Block(nn.Module):
    """Attention and an MLP, each with a layer norm and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, WIDTH))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """A byte-level language model. The weight of the head is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def read(folder: Path) -> Tensor:
    """About a million bytes of the texts in the folder."""
    kinds = {".md", ".py", ".rs", ".toml", ".txt"}
    files = sorted(
        path for path in folder.rglob("*") if path.suffix in kinds and "target" not in path.parts
    )
    text = b"\n".join(path.read_bytes() for path in files)[: 2**20]
    if len(text) < 20 * CONTEXT:
        raise SystemExit(f"{folder}: not enough text ({', '.join(sorted(kinds))})")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def sample(text: Tensor, generator: torch.Generator, count: int = BATCH) -> tuple[Tensor, Tensor]:
    """Random parts of the text, and the same parts shifted by one byte."""
    begins = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    pieces = text[begins + torch.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def main() -> None:
    """Trains. Rank 0 prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).resolve().parents[3], help="a folder of texts"
    )
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    text = read(arguments.data)
    train, test = text[: -len(text) // 10], text[-len(text) // 10 :]

    torch.manual_seed(0)
    model: nn.Module = GPT()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zs.init()
    model, optimizer, _ = group_sharded_parallel(model, optimizer, "p_g_os", segment_size=2**12)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=arguments.steps
    )

    generator = torch.Generator().manual_seed(RANK)
    for step in range(arguments.steps):
        inputs, targets = sample(train, generator, BATCH // WORLD)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if RANK == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:4}   loss {loss.item():.3f}", flush=True)

    model.eval()
    with torch.no_grad():
        inputs, targets = sample(test, torch.Generator().manual_seed(0), 64)
        logits = model(inputs)
    loss, accuracy = (
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        (logits.argmax(2) == targets).float().mean(),
    )
    if RANK == 0:
        print(f"on text it has not seen: loss {loss.item():.3f}, accuracy {accuracy.item():.3f}")


if __name__ == "__main__":
    main()

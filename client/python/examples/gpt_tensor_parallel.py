"""A small GPT on a mesh of ranks, with ZeRO and tensor parallelism. After saving, plain torch loads
the model and writes the same text.

    torchrun --nproc-per-node 2 gpt_tensor_parallel.py [--tensor-parallel 2] [--level p_g_os]
        [--data FOLDER] [--steps N]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import BATCH, CONTEXT, HEADS, LAYERS, WIDTH, read, sample
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

from zeroshard.torch import group_sharded_parallel, save_group_sharded_model
from zeroshard.torch.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

#: Pairs of matrices without communication in between: the first is sharded by columns, the second
#: by rows.
PLAN = {
    "tokens": RowwiseParallel(input_layouts=Replicate()),
    "blocks.*.[qkv]": ColwiseParallel(),
    "blocks.*.out": RowwiseParallel(),
    "blocks.*.mlp.0": ColwiseParallel(),
    "blocks.*.mlp.2": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


class Block(nn.Module):
    """Attention with this rank's heads and an MLP, each with a layer norm and a residual
    connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.norm1(x)
        q, k, v = (
            part(inputs).unflatten(2, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
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


@torch.no_grad()
def write(model: nn.Module, beginning: str, count: int = 100) -> str:
    """Continues a text with the most likely byte, repeatedly."""
    tokens = torch.tensor([list(beginning.encode())])
    for _ in range(count):
        following = model(tokens[:, -CONTEXT:])[:, -1].argmax(1, keepdim=True)
        tokens = torch.cat([tokens, following], 1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main() -> None:
    """Trains, saves and loads. Rank 0 prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=2, help="ranks that share each matrix"
    )
    parser.add_argument("--level", choices=["os", "os_g", "p_g_os"], default="p_g_os")
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).resolve().parents[3], help="a folder of texts"
    )
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    replicas = dist.get_world_size() // arguments.tensor_parallel
    mesh = init_device_mesh(
        "cpu", (replicas, arguments.tensor_parallel), mesh_dim_names=("dp", "tp")
    )
    text = read(arguments.data)

    torch.manual_seed(0)
    model: nn.Module = parallelize_module(GPT(), mesh["tp"], PLAN)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, _ = group_sharded_parallel(
        model, optimizer, arguments.level, segment_size=2**12
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=3e-3, total_steps=arguments.steps
    )

    # The ranks of one replica use the same data.
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    for step in range(arguments.steps):
        inputs, targets = sample(text, generator, BATCH // replicas)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if dist.get_rank() == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:4}   loss {loss.item():.3f}", flush=True)

    written = write(model.eval(), "The ")
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            save_group_sharded_model(model, folder, optimizer)
            plain = GPT()
            plain.load_state_dict(torch.load(Path(folder) / "model.pt"))
        print(f"on {dist.get_world_size()} ranks it writes: {written!r}")
        print(
            "loaded into plain torch it writes",
            "the same" if write(plain.eval(), "The ") == written else "something else",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

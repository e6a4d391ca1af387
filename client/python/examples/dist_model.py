"""A network with matrices that are sharded over two ranks: train, eval and predict modes, with the
state on shard servers.

    torchrun --nproc-per-node 2 dist_model.py [--steps N] [--programs]
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, TensorDataset

import zeroshard as zs
from zeroshard.torch import (
    ProcessMesh,
    Shard,
    Strategy,
    shard_dataloader,
    shard_layer,
    shard_tensor,
    to_static,
)

FEATURES, HIDDEN, CLASSES, BATCH = 16, 64, 8, 32


def network() -> nn.Sequential:
    """A network that returns logits of classes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def cut(name: str, layer: nn.Module, mesh: DeviceMesh) -> None:
    """Shards the first Linear by its outputs and the second by its inputs. The biases are
    replicated."""
    dims = {"0": 0, "2": 1}
    if isinstance(layer, nn.Linear):
        layer.weight = shard_tensor(layer.weight, mesh, [Shard(dims[name])])


def batches(count: int) -> DataLoader[tuple[Tensor, ...]]:
    """Random points, labelled with the index of the largest of their first features."""
    points = torch.randn(count * BATCH, FEATURES, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(points, points[:, :CLASSES].argmax(1)), batch_size=BATCH)


def main() -> None:
    """Trains, evaluates and predicts. Rank 0 prints the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument(
        "--programs", action="store_true", help="print what this worker does in each mode"
    )
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    zs.init()

    mesh = ProcessMesh(list(range(world)), dim_names=["tp"])
    layer = shard_layer(network(), mesh, cut)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    loader = shard_dataloader(batches(arguments.steps), meshes=[mesh])
    strategy = Strategy({"sharding": {"enable": True, "stage": 2}})
    model = to_static(layer, loader, nn.CrossEntropyLoss(), optimizer, strategy)

    losses = [model(*batch).item() for batch in loader()]
    points, classes = next(iter(batches(1)))
    model.eval()
    held = model(points, classes).item()
    model.predict()
    logits = model(points)["out0"]

    # The state is whole, so plain torch can load it.
    plain = network()
    plain.load_state_dict(model.state_dict("param"))
    torch.testing.assert_close(plain(points), logits)
    if rank == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, evaluated {held:.3f}")
        print(f"accuracy {(logits.argmax(1) == classes).float().mean().item():.3f}")
    if rank == 0 and arguments.programs:
        for mode in ("train", "eval", "predict"):
            print(model.dist_main_program(mode))
    dist.barrier()
    zs.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

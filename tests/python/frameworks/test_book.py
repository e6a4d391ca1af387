"""The blocks of the documentation that use a library on top of torch run."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import zeroshard as zs
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tiny
from pages import Block, of_kinds
from zeroshard.integrations.transformers import ShardedTraining


class Module(pl.LightningModule):
    """A network with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def names(block: Block, folder: Path) -> dict[str, Any]:
    """The names of a script at the block, with a model of its library."""
    torch.manual_seed(0)
    if block.page.endswith("lightning.md"):
        return {"module": Module(), "loader": DataLoader(torch.randn(8, 8))}
    model = tiny.gpt2()
    texts = torch.randint(tiny.VOCABULARY, (8, tiny.LENGTH))
    script = {
        "examples": [{"input_ids": text, "labels": text} for text in texts],
        "loader": DataLoader(texts, 2),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "output": str(folder),
        "pictures": DataLoader(TensorDataset(torch.randn(4, 3, 32, 32), torch.arange(4)), 2),
        "rank": 0,
        "tokenizer": tiny.tokenizer(),
        "torch": torch,
    }
    return script | data_of_trl() if block.page.endswith("trl.md") else script


def data_of_trl() -> dict[str, Any]:
    """The names of a script that fine-tunes with TRL."""
    import trl
    from datasets import Dataset

    numbers = [" ".join(map(str, range(number, number + 4))) for number in range(2, 34)]

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 7) for ids in completion_ids]

    return {
        "ShardedTraining": ShardedTraining,
        "preferences": Dataset.from_dict(
            {"prompt": numbers[:8], "chosen": numbers[8:16], "rejected": numbers[16:24]}
        ),
        "prompts": Dataset.from_dict({"prompt": numbers}),
        "reference": tiny.gpt2(),
        "reward": reward,
        "texts": Dataset.from_dict({"text": numbers}),
        "trl": trl,
    }


def check_trains(block: Block, folder: Path) -> None:
    """Runs a block, and checks that the servers have made steps for its model."""
    script = names(block, folder)
    with contextlib.closing(zs.init()):
        block.run(script)
        if "MyTrainer" in script:
            assert script["MyTrainer"].__mro__[1].__name__ == "ShardedTraining"
            return
        assert zs.report(script.get("module", script.get("model"))).steps > 0
        if "versions" in script:
            assert script["versions"] == [0, 1, 2, 3]


@pytest.mark.parametrize("block", of_kinds("frameworks"), ids=str)
def test_parts_of_a_script_train(block: Block, tmp_path: Path) -> None:
    check_trains(block, tmp_path)


@pytest.mark.parametrize("block", of_kinds("recipes"), ids=str)
def test_recipes_train(block: Block, tmp_path: Path) -> None:
    library = "trl" if block.page.endswith("trl.md") else "wandb"
    if importlib.util.find_spec(library) is None:
        pytest.skip(
            f"{library} is not installed: tests/run long does it (requirements-recipes.txt)"
        )
    check_trains(block, tmp_path)

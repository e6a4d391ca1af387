# promise: no-silent-difference
"""Lightning does with ZeroShard what it does without it, on two ranks."""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import models
import ranks
from environment import LONG
from training import LEVELS, SEGMENT, assert_close, assert_same
from zeroshard import InvalidArgumentError
from zeroshard.integrations.lightning import ZeroShardStrategy
from zeroshard.torch import GroupSharded

SYSTEMS = ("ddp", *LEVELS)
BATCHES = 4


class Network(pl.LightningModule):
    """A model whose losses, gradient norms and learning rates are recorded in ``seen``."""

    def __init__(self, model: str = "mlp") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.network = models.build(model)
        self.seen: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network.logits(inputs)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.network(*batch)
        self.seen.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation", self.network(*batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.seen.append(self.trainer.callback_metrics["validation"].item())

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.network(*batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(nn.utils.get_total_norm([p.grad for p in self.parameters()]).item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class Manual(Network):
    """Two backward passes in a step, and clipping by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for half in range(2):
            loss = self.network(*models.share(batch, half, 2)) / 2
            self.seen.append(loss.item())
            self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()


class Adversarial(pl.LightningModule):
    """A generator, and a critic in two modules, which train in turns. The critic sees what a module
    without an optimizer has normalized."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(4, 24, bias=False),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.Linear(24, 6, bias=False),
        )
        self.normalize = nn.BatchNorm1d(6).requires_grad_(False)
        self.features, self.score = nn.Linear(6, 24), nn.Linear(24, 1)
        self.seen: list[float] = []

    def judged(self, values: Tensor) -> Tensor:
        return self.score(self.features(self.normalize(values)).relu()).sigmoid()

    def training_step(self, batch: Any, index: int) -> None:
        of_generator, of_critic = self.optimizers()
        noise, real = batch
        self.toggle_optimizer(of_generator)
        loss = 1 - self.judged(self.generator(noise)).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.seen.append(loss.item())
        self.toggle_optimizer(of_critic)
        loss = self.judged(self.generator(noise).detach()).mean() - self.judged(real).mean()
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        self.seen.append(loss.item())

    def configure_optimizers(self) -> Any:
        critic = [*self.features.parameters(), *self.score.parameters()]
        return torch.optim.Adam(self.generator.parameters(), 0.01), torch.optim.Adam(critic, 0.02)


class Halves(Adversarial):
    """Two optimizers that train parameters of one module."""

    def configure_optimizers(self) -> Any:
        score = self.score
        return torch.optim.Adam([score.weight], 0.01), torch.optim.Adam([score.bias], 0.01)


PROGRAMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "clip by norm": (Network, {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}),
    "clip by value": (
        Network,
        {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"},
    ),
    "batch norm": (lambda: Network("cnn"), {}),
    "manual": (Manual, {}),
    "bf16": (Network, {"precision": "bf16-mixed"}),
}


def loader(model: str, batches: int) -> Any:
    return DataLoader(TensorDataset(*models.batch(model, 0, 16 * batches)), 8)


def trainer_of(system: str, folder: Path, epochs: int = 2, **settings: Any) -> pl.Trainer:
    """``"ddp"``: Lightning alone."""
    strategy = (
        DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
        if system == "ddp"
        else ZeroShardStrategy(
            system,
            sharding_options={"segment_size": SEGMENT},
            process_group_backend="gloo",
            find_unused_parameters=True,
        )
    )
    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        **settings,
    )


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(name: str, system: str, folder: Path) -> dict[str, Any]:
    make, settings = PROGRAMS[name]
    kind = "cnn" if name == "batch norm" else "mlp"
    module, trainer = make(), trainer_of(system, folder, **settings)
    trainer.fit(module, loader(kind, BATCHES), loader(kind, 2))
    found: dict[str, Any] = {"seen": list(module.seen), "state": values(module)}
    found["wrapped"] = isinstance(trainer.strategy.model, GroupSharded)
    found["rate"] = trainer.optimizers[0].param_groups[0]["lr"]
    found["saved"] = torch.load(folder / "epoch=1.ckpt", weights_only=True)
    if name == "clip by norm":
        found["predicted"] = torch.cat(trainer.predict(module, loader(kind, 1)))
        other = trainer_of(system, folder / "other")
        found["tested"] = other.test(module, loader(kind, 1), verbose=False)[0]["test"]
        found["again"] = values(module)
        resumed = make()
        trainer_of(system, folder / "resumed", **settings).fit(
            resumed, loader(kind, BATCHES), loader(kind, 2), ckpt_path=folder / "epoch=0.ckpt"
        )
        found["resumed"] = resumed.seen
        # The same module is trained by another trainer.
        module.seen.clear()
        trainer_of(system, folder / "third", 1).fit(module, loader(kind, 2))
        found["third"] = list(module.seen)
    return found


def compete(system: str, folder: Path) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(*(torch.randn(64, size, generator=generator) for size in (4, 6)))
    module = Adversarial()
    trainer_of(system, folder).fit(module, DataLoader(data, 8))
    found: dict[str, Any] = {"seen": list(module.seen), "state": values(module)}
    found["saved"] = torch.load(folder / "epoch=1.ckpt", weights_only=True)["state_dict"]
    resumed = Adversarial()
    trainer_of(system, folder / "resumed").fit(
        resumed, DataLoader(data, 8), ckpt_path=folder / "epoch=0.ckpt"
    )
    found["resumed"] = resumed.seen
    # Lightning alone trains a copy, and the same system the module.
    for key, other, of in (("copied", "ddp", copy.deepcopy(module)), ("third", system, module)):
        of.seen.clear()
        trainer_of(other, folder / key, 1).fit(of, DataLoader(data, 8))
        found[key] = list(of.seen)
    if system != "ddp":
        with pytest.raises(InvalidArgumentError, match="'score.weight', and not all parameters"):
            trainer_of(system, folder / "halves").fit(Halves(), DataLoader(data, 8))
    return found


def work(rank: int, folder: Path) -> dict[str, Any]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    found = {
        name: {system: train(name, system, folder / name / system) for system in SYSTEMS}
        for name in PROGRAMS
    }
    return found | {
        "in turns": {system: compete(system, folder / "in turns" / system) for system in SYSTEMS}
    }


@pytest.fixture(scope="module")
def trained(processes: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ranks.run(
        2, work, tmp_path_factory.mktemp("runs"), env=processes, init="env", timeout=LONG
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_module_sees_what_it_sees_with_data_parallel_ranks(name: str, trained: Any) -> None:
    tolerance = 1e-3 if name == "bf16" else 1e-5
    for rank, found in enumerate(trained):
        expected = found[name]["ddp"]
        for level in LEVELS:
            ours = found[name][level]
            assert ours["wrapped"] and ours["rate"] == expected["rate"]
            assert ours["seen"] == pytest.approx(expected["seen"], rel=tolerance), level
            if name != "batch norm" or rank == 0:
                # DistributedDataParallel does not synchronise buffers after the last step.
                assert_close(ours["state"], expected["state"], rtol=10 * tolerance, atol=tolerance)
            assert_same(ours["saved"]["state_dict"], trained[0][name][level]["state"])
            assert ours["saved"].keys() == expected["saved"].keys()


@pytest.mark.parametrize("level", LEVELS)
def test_two_optimizers_that_take_turns_train_as_with_data_parallel_ranks(
    level: str, trained: list[Any]
) -> None:
    for rank, found in enumerate(trained):
        expected, ours = (found["in turns"][system] for system in ("ddp", level))
        assert ours["seen"] == pytest.approx(expected["seen"], rel=1e-5, abs=1e-6)
        if rank == 0:
            assert_close(ours["state"], expected["state"], rtol=1e-4, atol=1e-5)
        assert_same(ours["saved"], trained[0]["in turns"][level]["state"])
        assert ours["resumed"] == ours["seen"][-len(ours["resumed"]) :]
        assert len(ours["resumed"]) == len(ours["seen"]) // 2
        for key in ("copied", "third"):
            assert ours[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize("level", LEVELS)
def test_a_run_continues_from_a_checkpoint(level: str, trained: list[Any]) -> None:
    for found in trained:
        ours = found["clip by norm"][level]
        assert ours["resumed"] == ours["seen"][-len(ours["resumed"]) :]
        assert len(ours["resumed"]) == len(ours["seen"]) // 2


@pytest.mark.parametrize("level", LEVELS)
def test_after_the_training_the_module_is_used_and_trained_again(
    level: str, trained: list[Any]
) -> None:
    for found in trained:
        expected, ours = (found["clip by norm"][system] for system in ("ddp", level))
        torch.testing.assert_close(ours["predicted"], expected["predicted"], rtol=1e-4, atol=1e-5)
        assert ours["tested"] == pytest.approx(expected["tested"], rel=1e-5)
        assert_same(ours["again"], ours["state"])
        assert ours["third"] == pytest.approx(expected["third"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"ddp_comm_hook": print}, "ddp_comm_hook"), ({"device_mesh": 1}, "device_mesh is given")],
)
def test_arguments_that_contradict_sharding_are_errors(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ZeroShardStrategy("os", **arguments)

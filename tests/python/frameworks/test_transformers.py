# promise: no-silent-difference
"""The Trainer of Transformers does with ZeroShard what it does without it, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import ranks
import tiny
import zeroshard as zs
from environment import LONG
from training import LEVELS, assert_close, assert_same
from zeroshard.integrations.transformers import Trainer
from zeroshard.torch import GroupSharded, group_sharded_parallel

STEPS = 4
HALF = STEPS // 2
SYSTEMS = ("ddp", *LEVELS)
#: Small enough that the matrices are on the servers at p_g_os.
OPTIONS = {"segment_size": 64}
#: The numbers in the log that do not depend on time.
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss", "total_flos")

PROGRAMS: dict[str, dict[str, Any]] = {
    # max_grad_norm is 1.0.
    "defaults": {"load_best_model_at_end": True},
    "accumulation": {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.1,
        "activation_checkpointing": True,
    },
    "bf16 without clip": {"bf16": True, "max_grad_norm": 0.0, "optim": "sgd"},
}


#: Names and values, in order.
Log = list[tuple[str, float]]


def trainer_of(system: str, folder: Path, *, steps: int = STEPS, **settings: Any) -> Any:
    """``"ddp"``: Transformers alone."""
    hf.logging.disable_progress_bar()
    settings = {"learning_rate": 0.01, "weight_decay": 0.01, **settings}
    arguments = hf.TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        max_steps=steps,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=HALF,
        save_steps=HALF,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    kind, options = (
        (hf.Trainer, {})
        if system == "ddp"
        else (Trainer, {"level": system, "sharding_options": OPTIONS})
    )
    return kind(
        model=tiny.build("gpt2"),
        args=arguments,
        train_dataset=tiny.examples("gpt2", 40),
        eval_dataset=tiny.examples("gpt2", 8),
        **options,
    )


def log_of(trainer: Any) -> Log:
    return [
        (name, entry[name])
        for entry in trainer.state.log_history
        for name in LOGGED
        if name in entry
    ]


def train(name: str, system: str, folder: Path) -> dict[str, Any]:
    trainer = trainer_of(system, folder, **PROGRAMS[name])
    trainer.train()
    return {
        "wrapped": isinstance(trainer.model_wrapped, GroupSharded),
        "log": log_of(trainer),
        "predicted": trainer.predict(tiny.examples("gpt2", 6)).predictions,
        "state": {key: value.clone() for key, value in trainer.model.state_dict().items()},
        "optimizer": trainer.optimizer.state_dict(),
    }


def reload(level: str, folder: Path) -> tuple[dict[str, Tensor], Log, Log]:
    """The weights of a saved model, and the logs of a sharded and of a plain trainer that continue
    from a checkpoint."""
    saved = hf.AutoModelForCausalLM.from_pretrained(folder / f"checkpoint-{STEPS}").state_dict()
    logs = []
    for system in (level, "ddp"):
        trainer = trainer_of(system, folder, **PROGRAMS["accumulation"])
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{HALF}"))
        logs.append(log_of(trainer))
    return saved, *logs


def work(rank: int, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    found = {
        name: {system: train(name, system, folder / name / system) for system in SYSTEMS}
        for name in PROGRAMS
    }
    return found, {level: reload(level, folder / "accumulation" / level) for level in LEVELS}


@pytest.fixture(scope="module")
def trained(processes: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ranks.run(
        2, work, tmp_path_factory.mktemp("runs"), env=processes, init="env", timeout=LONG
    )


def close(ours: Log, expected: Log, rel: float) -> None:
    """Asserts that two logs have the same names and nearly the same values."""
    assert [name for name, _ in ours] == [name for name, _ in expected]
    assert [value for _, value in ours] == pytest.approx([value for _, value in expected], rel=rel)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trainer_logs_and_predicts_what_it_does_with_data_parallel_ranks(
    name: str, trained: list[Any]
) -> None:
    tolerance = 1e-3 if "bf16" in name else 1e-5
    for found, _ in trained:
        expected = found[name]["ddp"]
        for level in LEVELS:
            ours = found[name][level]
            assert ours["wrapped"]
            close(ours["log"], expected["log"], tolerance)
            np.testing.assert_allclose(
                ours["predicted"], expected["predicted"], rtol=tolerance, atol=tolerance
            )
            assert_close(ours["state"], expected["state"], rtol=tolerance * 10, atol=tolerance)
            for part in ("state", "param_groups"):
                assert len(ours["optimizer"][part]) == len(expected["optimizer"][part])


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_is_the_whole_model_and_the_run_continues_from_it(
    level: str, trained: list[Any]
) -> None:
    for found, reloaded in trained:
        saved, log, alone = reloaded[level]
        assert_same(saved, found["accumulation"][level]["state"])
        before = found["accumulation"][level]["log"]
        # The last entry is of the run: its mean loss, and the number of operations of both runs.
        assert log[:-2] == before[:-2] and log[-1] == before[-1]
        close(alone, log, 1e-5)


def test_settings_that_contradict_sharding_are_errors(tmp_path: Path) -> None:
    with pytest.raises(zs.InvalidArgumentError, match="set per_device_train_batch_size"):
        trainer_of("os", tmp_path, auto_find_batch_size=True)


def test_the_adafactor_of_transformers_runs_on_the_ranks(cluster: zs.Session) -> None:
    """The servers have ``torch.optim.Adafactor``, which is another algorithm."""

    def losses(is_sharded: bool) -> list[float]:
        torch.manual_seed(0)
        model: Any = nn.Linear(4, 4)
        optimizer: Any = hf.Adafactor(model.parameters())
        if is_sharded:
            model, optimizer, _ = group_sharded_parallel(model, optimizer, "os")
        found = []
        for _ in range(4):
            loss = (model(torch.eye(4)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(True) == losses(False)

# promise: consistent-reads
"""Another process generates with followed weights while a Trainer trains."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import zeroshard as zs

import tiny
from processes import TIMEOUT
from zeroshard.integrations.transformers import GenerationCallback, GenerationProcess, Trainer

STEPS = 6
#: Of different lengths, so that one of them is padded.
PROMPTS = ["7 8 9", "11 12"]


def trainer_of(folder: Path, *callbacks: Any, **settings: Any) -> Any:
    """A trainer that changes the model enough to change its texts."""
    hf.logging.disable_progress_bar()
    arguments = hf.TrainingArguments(
        str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=STEPS,
        learning_rate=0.005,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return Trainer(
        level="p_g_os",
        sharding_options={"segment_size": 64},
        model=tiny.build("gpt2"),
        args=arguments,
        train_dataset=tiny.examples("gpt2", 2 * STEPS),
        callbacks=list(callbacks),
        **settings,
    )


class Interference(hf.TrainerCallback):
    """Kills the process of one callback after the first step, and waits for the first texts of the
    other."""

    def __init__(self, killed: GenerationCallback, waited: GenerationCallback) -> None:
        self._killed, self._waited = killed, waited

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._waited.process is not None
        if state.global_step == 1:
            assert self._killed.process is not None
            os.kill(self._killed.process.pid, signal.SIGKILL)
        if state.global_step == 2:
            assert self._waited.process.is_ready(TIMEOUT)


def texts_of(model: Any, tokenizer: Any) -> list[str]:
    """The texts of a model, rounded to bfloat16, in this process."""
    rounded = tiny.build("gpt2").eval()
    rounded.load_state_dict(model.state_dict())
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = rounded.bfloat16().generate(ids, max_new_tokens=4, do_sample=False)
        found.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def test_texts_are_those_of_the_model_and_a_killed_process_does_not_stop_the_training(
    cluster: zs.Session, tmp_path: Path
) -> None:
    tokenizer = tiny.tokenizer()
    found: list[tuple[int, list[str]]] = []
    options = {"max_new_tokens": 4, "do_sample": False}
    lives = GenerationCallback(PROMPTS, lambda *text: found.append(text), every=2, **options)
    dies = GenerationCallback(PROMPTS, pytest.fail)
    trainer = trainer_of(
        tmp_path, lives, dies, Interference(dies, lives), processing_class=tokenizer
    )
    before = texts_of(trainer.model, tokenizer)
    with pytest.warns(UserWarning, match="ended with the exit code -9"):
        trainer.train()
    assert trainer.state.global_step == STEPS
    versions = [version for version, _ in found]
    assert versions[0] == 2 and versions == sorted(set(versions)) and versions[-1] == STEPS
    assert found[-1][1] == texts_of(trainer.model, tokenizer) != before


def test_what_a_process_needs_is_checked_before_it_starts(
    cluster: zs.Session, tmp_path: Path
) -> None:
    tokenizer = tiny.tokenizer()
    with pytest.raises(zs.InvalidArgumentError, match="processing_class"):
        trainer_of(tmp_path, GenerationCallback(PROMPTS)).train()
    with pytest.raises(zs.InvalidArgumentError, match="pass make_model"):
        GenerationProcess(torch.nn.Linear(2, 2), tokenizer)
    with pytest.raises(zs.InvalidArgumentError, match="every is 0"):
        GenerationCallback(PROMPTS, every=0)
    with pytest.raises(zs.InvalidArgumentError, match="float64"):
        GenerationProcess(tiny.gpt2(), tokenizer, dtype=torch.float64)

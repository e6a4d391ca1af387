# promise: consistent-reads
"""Another process generates with followed weights while a Trainer trains."""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
import zeroshard as zs

import tiny
from processes import TIMEOUT
from zeroshard.integrations import _generating
from zeroshard.integrations._generating import Job, Request, Setting
from zeroshard.integrations.transformers import GenerationCallback, GenerationProcess, Trainer
from zeroshard.torch import group_sharded_parallel

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
    adapted = peft.get_peft_model(tiny.gpt2(), peft.LoraConfig(target_modules=["c_attn"]))
    for model in (torch.nn.Linear(2, 2), adapted):
        with pytest.raises(zs.InvalidArgumentError, match="pass make_model"):
            GenerationProcess(model, tokenizer)
    with pytest.raises(zs.InvalidArgumentError, match="every is 0"):
        GenerationCallback(PROMPTS, every=0)
    with pytest.raises(zs.InvalidArgumentError, match="float64"):
        GenerationProcess(tiny.gpt2(), tokenizer, dtype=torch.float64)


def setting(make_model: Any) -> Setting:
    return Setting(make_model, tiny.tokenizer(), torch.bfloat16, "cpu", seconds=0.5)


def test_a_process_waits_only_for_a_version_that_it_lacks(cluster: zs.Session) -> None:
    plain: Any = tiny.build("gpt2")
    optimizer: Any = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer, sharding = group_sharded_parallel(plain, optimizer, "os_g")
    session = zs.init()  # another test may have closed the one of the fixture
    job = Job(zs.report(plain).job, session.address, session._connection.token)
    copy = _generating._Copy(setting(tiny.gpt2))
    assert copy.follow(job, 0) == copy.follow(job, 0) == 0
    ids = torch.arange(2, 6).unsqueeze(0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert copy.follow(job, 0) == 0
    assert copy.follow(job, 1) == 1
    with pytest.raises(zs.TimeoutError):
        copy.follow(job, 2)


def generated(name: str, prompts: list[Any], **options: Any) -> tuple[Any, _generating.Generation]:
    """A model, and what the process would generate with it."""
    model: Any = tiny.build(name).eval()
    job = Job("", "", None)
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side = "left"
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    request = Request(job, 0, prompts, {"max_new_tokens": 4, **options})
    return model, _generating._generate(model, tokenizer, request, 0)


def test_prompts_are_texts_or_conversations_and_may_have_several_answers() -> None:
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    _, texts = generated("gpt2", PROMPTS, do_sample=False)
    _, answers = generated("gpt2", chats, do_sample=False)
    assert answers == texts
    assert texts.prompt_ids == [[7, 8, 9], [11, 12]]
    _, both = generated("gpt2", PROMPTS, do_sample=False, num_beams=2, num_return_sequences=2)
    assert both.prompt_ids == [[7, 8, 9], [7, 8, 9], [11, 12], [11, 12]]
    assert len(both.texts) == len(both.completion_ids) == 4


def test_a_completion_ends_with_its_first_end() -> None:
    _, whole = generated("gpt2", PROMPTS, do_sample=False)
    end = whole.completion_ids[0][1]
    _, ended = generated("gpt2", PROMPTS, do_sample=False, eos_token_id=end)
    for ids, expected in zip(ended.completion_ids, whole.completion_ids, strict=True):
        length = expected.index(end) + 1 if end in expected else len(expected)
        assert ids == expected[:length]


def test_an_encoder_and_decoder_returns_what_it_decodes() -> None:
    model, found = generated("t5", ["7 8 9"], do_sample=False)
    made = model.generate(torch.tensor([[7, 8, 9]]), max_new_tokens=4, do_sample=False)
    assert found.completion_ids == made[:, 1:].tolist()


def test_the_error_of_a_process_is_sent_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    ours, theirs = multiprocessing.Pipe()
    with pytest.raises(ValueError, match="none"):
        _generating.run(theirs, pickle.dumps(setting(functools.partial(int, "none"))))
    failure = pickle.loads(ours.recv_bytes())
    assert isinstance(failure, _generating.Failure) and "ValueError" in failure.text

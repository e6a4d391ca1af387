# promise: no-silent-difference
"""Models of Transformers learn at every level what they learn in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import tiny
import zeroshard as zs
from training import LEVELS, assert_close
from zeroshard.torch import group_sharded_parallel

STEPS = 3
SEGMENT = 100

#: What a training does besides forward, backward and step.
TRAININGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"checkpointing": True},
    "autocast": {"autocast": True},
    "clip": {"max_norm": 0.5},
    "accumulation": {"micro": 2},
}


def train(
    name: str,
    level: str | None,
    checkpointing: bool = False,
    autocast: bool = False,
    max_norm: float | None = None,
    micro: int = 1,
) -> tuple[list[float], dict[str, Any], str]:
    """The losses and norms, the state, and its hash on the servers. Level None: plain torch."""
    model: Any = tiny.build(name)
    if checkpointing:
        model.activation_checkpointing_enable()
    model.train()
    # The bias of the keys has no effect on the loss: with a small eps its updates are noise.
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    if level is not None:
        model, optimizer, _ = group_sharded_parallel(model, optimizer, level, segment_size=SEGMENT)
    examples = tiny.examples(name, 4 * STEPS * micro)
    seen = []
    for step in range(STEPS * micro):
        batch = default_collate(examples[4 * step : 4 * step + 4])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss / micro
        loss.backward()
        seen.append(loss.item())
        if (step + 1) % micro == 0:
            if max_norm is not None:
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            optimizer.zero_grad()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return seen, state, optimizer.state_hash() if level is not None else ""


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("name", tiny.MODELS)
def test_a_model_learns_what_it_learns_in_plain_torch(
    name: str, training: str, cluster: zs.Session
) -> None:
    settings = TRAININGS[training]
    tolerance = 1e-3 if training == "autocast" else 1e-5
    expected, state, _ = train(name, None, **settings)
    found = {level: train(name, level, **settings) for level in LEVELS}
    for seen, our_state, _ in found.values():
        assert seen == pytest.approx(expected, rel=tolerance)
        assert_close(our_state, state, rtol=100 * tolerance, atol=tolerance)
    assert len({state_hash for _, _, state_hash in found.values()}) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_a_sharded_model_generates_and_is_saved_as_the_plain_one(
    level: str, cluster: zs.Session, tmp_path: Any
) -> None:
    plain: Any = tiny.build("llama")
    tokens = tiny.examples("llama", 1)[0]["input_ids"][None, :3]
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    expected = plain.generate(tokens, **options)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    model, _, _ = group_sharded_parallel(plain, optimizer, level, segment_size=SEGMENT)
    assert torch.equal(model.generate(tokens, **options), expected)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(plain).from_pretrained(tmp_path).generate(tokens, **options), expected)

# promise: consistent-reads
"""The workers of vLLM follow a job. `tests/run vllm` installs vLLM for CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import zeroshard as zs

import tiny
from zeroshard.torch import group_sharded_parallel

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: tests/run vllm does it")

PROMPTS = ["7 8 9", "11 12"]
TOKENS = 4


def saved(folder: Path) -> Path:
    """A model whose heads are large enough for vLLM, and its tokenizer, as files."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=tiny.VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    hf.LlamaForCausalLM(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def texts_of(model: Any, tokenizer: Any) -> list[str]:
    """The texts of Transformers with the values of a model, rounded to bfloat16."""
    rounded = hf.LlamaForCausalLM(model.module.config)
    rounded.load_state_dict(model.state_dict())
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = rounded.bfloat16().generate(ids, max_new_tokens=TOKENS, do_sample=False)
        found.append(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    return found


def step(model: Any, optimizer: Any) -> None:
    ids = torch.randint(2, tiny.VOCABULARY, (4, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_have_the_values_of_each_version(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The workers share the processors of this machine.
    environment = {"ZEROSHARD_TOKEN": "secret", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in {**environment, "VLLM_CPU_KVCACHE_SPACE": "1"}.items():
        monkeypatch.setenv(name, value)
    folder = str(saved(tmp_path))
    tokenizer = tiny.tokenizer()
    llm = vllm.LLM(
        folder,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=16,
        tensor_parallel_size=workers,
        worker_extension_cls="zeroshard.integrations.vllm.Follower",
    )
    sampling = vllm.SamplingParams(temperature=0, max_tokens=TOKENS)
    seen = []
    with zs.init(name="vllm") as session:
        model: Any = hf.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
        model, optimizer, _ = group_sharded_parallel(model, optimizer, "p_g_os")
        llm.collective_rpc("follow_job", args=("vllm", session.address))
        for version in range(3):
            assert llm.collective_rpc("take_version") == [version] * workers
            llm.reset_prefix_cache()
            made = llm.generate(PROMPTS, sampling, use_tqdm=False)
            seen.append([answer.outputs[0].text.strip() for answer in made])
            assert seen[-1] == texts_of(model, tokenizer)
            step(model, optimizer)
    assert seen[0] != seen[1] != seen[2]

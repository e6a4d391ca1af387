"""``save_pretrained`` of a sharded model writes the files of transformers, tensor by tensor."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import zeroshard as zs
from zeroshard.torch import _placeholders, group_sharded_parallel, shard

import ranks
import tiny
import transformers as hf
from environment import IS_LONG, LONG
from test_large_state_dicts import MIB, SLACK, peak

SEGMENT = 64
#: The embeddings, which are the largest tensor, and the layers: 63 or 355 million parameters.
WIDTH, LAYERS, VOCABULARY = (1024, 24, 50257) if IS_LONG else (768, 8, 8000)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def pair(name: str, in_place: bool, steps: int = 0) -> tuple[Any, Any]:
    """A model, and the same one sharded at stage 3."""
    torch.manual_seed(0)
    plain: Any = getattr(tiny, name)()
    torch.manual_seed(0)
    model: Any = getattr(tiny, name)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if in_place:
        shard(model, optimizer, 3, segment_size=SEGMENT)
    else:
        model, _, _ = group_sharded_parallel(model, optimizer, "p_g_os", segment_size=SEGMENT)
    return plain, model


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_the_files_are_those_of_the_plain_model(
    name: str, in_place: bool, tmp_path: Path, cluster: zs.Session
) -> None:
    plain, model = pair(name, in_place)
    for size in ("50GB", "20KB"):
        for number, one in enumerate((plain, model)):
            one.save_pretrained(tmp_path / f"{size}{number}", max_shard_size=size)
        assert digests(tmp_path / f"{size}1") == digests(tmp_path / f"{size}0")


def test_one_tensor_is_read_at_a_time(
    tmp_path: Path, cluster: zs.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = _placeholders.read_parameters

    def recorded(*args: Any) -> Any:
        found = original(*args)
        read.extend(tensor.nbytes for tensor in found.values())
        assert len(found) == 1
        return found

    monkeypatch.setattr(_placeholders, "read_parameters", recorded)
    _, model = pair("gpt2", True)
    model.save_pretrained(tmp_path)
    on_servers = [p for p in model.parameters() if p.numel() > SEGMENT]
    assert sorted(read) == sorted(p.numel() * 4 for p in on_servers)
    assert model._zeroshard.sharding.gatherer.holdings.nbytes == 0


def test_a_saved_model_is_loaded_by_from_pretrained(tmp_path: Path, cluster: zs.Session) -> None:
    plain, model = pair("gpt2", True)
    model.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    assert type(loaded) is type(plain)
    for name, value in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_without_placeholders_the_files_are_the_same(
    tmp_path: Path, cluster: zs.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zeroshard.torch import _pretrained

    plain, model = pair("gpt2", True)
    plain.save_pretrained(tmp_path / "plain")
    monkeypatch.setattr(_pretrained, "_HARMLESS", set())
    model.save_pretrained(tmp_path / "sharded")
    assert digests(tmp_path / "sharded") == digests(tmp_path / "plain")


def growth(rank: int, folder: str) -> int:
    """The growth of a rank that saves a model at stage 3."""
    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=WIDTH // 64,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model, optimizer, 3, param_init_fn=model._init_weights)
    with peak() as grown:
        model.save_pretrained(folder)
    return grown[0]


def test_a_rank_needs_memory_for_the_largest_tensor(
    tmp_path: Path, processes: dict[str, str]
) -> None:
    [grown] = ranks.run(1, growth, str(tmp_path), env=processes, init=None, timeout=LONG)
    whole = (tmp_path / "model.safetensors").stat().st_size
    print(f"save_pretrained of {whole // MIB} MiB: {grown // MIB} MiB")
    assert grown <= 4 * VOCABULARY * WIDTH + SLACK < whole

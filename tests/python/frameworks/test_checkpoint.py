"""Models take their values from files that Transformers has written, also on the meta device."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zeroshard as zs
from safetensors.torch import load_file, save_file
from torch import nn

import ranks
import tiny
from training import LEVELS, worst
from zeroshard.torch import _checkpoint, group_sharded_parallel, load_weights

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def saved(model: Any, folder: Path, size: str = "10KB") -> Any:
    """Writes the model in files of this size, or of one tensor. Returns it."""
    model.save_pretrained(folder, max_shard_size=size)
    return model


def wrap(make: Callable[[], nn.Module], folder: Path, level: str = "p_g_os", **options: Any) -> Any:
    """A model on the meta device with the values of a checkpoint, before it is trained."""
    with torch.device("meta"):
        model: Any = make()
    if hasattr(model, "_init_weights"):
        options.setdefault("param_init_fn", model._init_weights)
    options = {"segment_size": 64, "checkpoint": folder, **options}
    optimizer = torch.optim.SGD(model.parameters())
    return group_sharded_parallel(model, optimizer, level, **options)[0]


def assert_values(model: Any, expected: Any) -> None:
    found = model.state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_values_are_those_of_the_files(cluster: zs.Session, tmp_path: Path, name: str) -> None:
    make = getattr(tiny, name)
    expected = saved(make(), tmp_path).eval()
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    # GPT-2's head is tied to its embedding, and is not in the files.
    assert ("lm_head.weight" in index) == (name == "llama") and len(set(index.values())) > 2
    x = torch.arange(8).view(1, 8)
    for level in LEVELS:
        model = wrap(make, tmp_path, level).eval()
        assert_values(model, expected)
        tied = model.module.lm_head.weight is model.module.get_input_embeddings().weight
        assert tied == (name == "gpt2")
        assert torch.equal(model(x).logits, expected(x).logits)


def test_a_single_file_and_buffers_and_other_dtypes(cluster: zs.Session, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(80), nn.Linear(80, 2))

    expected = make()
    expected(torch.rand(4, 80))
    state = expected.state_dict()
    state["1.weight"] = state["1.weight"].bfloat16()
    save_file(state, tmp_path / FILE)
    expected.load_state_dict(state)
    assert_values(wrap(make, tmp_path), expected)
    # A model with other values gets those of the files as well.
    model = make()
    optimizer = torch.optim.SGD(model.parameters())
    assert_values(
        group_sharded_parallel(
            model, optimizer, "p_g_os", segment_size=64, checkpoint=str(tmp_path)
        )[0],
        expected,
    )


def test_one_module_at_a_time_is_read(
    cluster: zs.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: list[nn.Module] = []

    def make() -> nn.Module:
        modules.append(nn.Sequential(*(nn.Linear(32, 32) for _ in range(20))))
        return modules[-1]

    def read(checkpoint: Any, tensor: Any) -> None:
        held = [p for p in modules[-1].parameters() if p.untyped_storage().nbytes() and p.dim() > 1]
        most.append(len([p for p in held if not p.is_meta]))
        original(checkpoint, tensor)

    most: list[int] = []
    original = _checkpoint.Checkpoint.read
    monkeypatch.setattr(_checkpoint.Checkpoint, "read", read)
    expected = make()
    save_file(expected.state_dict(), tmp_path / FILE)
    assert_values(wrap(make, tmp_path), expected)
    assert most == [1] * 40


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_load_weights_reads_files_of_transformers_before_and_after_sharding(
    cluster: zs.Session, tmp_path: Path, name: str
) -> None:
    make = getattr(tiny, name)
    several, one = tmp_path / "several", tmp_path / "one"
    expected = saved(saved(make(), several), one, "1GB").eval()
    x = torch.arange(8).view(1, 8)
    for path in (several, one, one / FILE):
        for level in LEVELS:
            for meta, early in ((False, False), (True, True), (True, False)):
                with torch.device("meta" if meta else "cpu"):
                    model: Any = make()
                if early:
                    assert load_weights(model, path) == ([], [])
                model, _, _ = group_sharded_parallel(
                    model,
                    torch.optim.AdamW(model.parameters()),
                    level,
                    segment_size=64,
                    param_init_fn=model._init_weights,
                )
                if not early:
                    assert load_weights(model, path) == ([], [])
                assert_values(model, expected)
                assert torch.equal(model.eval()(x).logits, expected(x).logits)


@pytest.mark.parametrize("level", LEVELS)
def test_training_from_files_of_transformers_has_the_losses_of_torch(
    cluster: zs.Session, tmp_path: Path, level: str
) -> None:
    def losses(model: Any, optimizer: Any) -> list[float]:
        found = []
        for example in tiny.examples("gpt2", 4):
            optimizer.zero_grad()
            loss = model(**{key: value[None] for key, value in example.items()}).loss
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    plain = saved(tiny.gpt2(), tmp_path)
    expected = losses(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    model: Any = tiny.gpt2()
    model, optimizer, _ = group_sharded_parallel(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), level, segment_size=64
    )
    load_weights(model, tmp_path)
    assert worst(losses(model, optimizer), expected) <= 1e-4


def rewrite(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def write(folder: Path) -> None:
        state = load_file(folder / FILE)
        change(state)
        save_file(state, folder / FILE)

    return write


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (rewrite(lambda s: s.pop("0.bias")), r'Missing key\(s\) in state_dict: "0.bias".$'),
    "unexpected": (
        rewrite(lambda s: s.update(new=s["0.bias"] * 1)),
        r'Unexpected key\(s\) in state_dict: "new".$'
    ),
    "another shape": (
        rewrite(lambda s: s.update({"0.bias": torch.ones(7)})),
        r"size mismatch for 0.bias: .* shape torch.Size\(\[7\]\) from checkpoint.*Size\(\[9\]\).$",
    ),
    "many": (rewrite(lambda s: s.clear()), r'Missing key\(s\).*"0.weight", .*"2.bias".$'),
    "no file": (lambda f: (f / FILE).unlink(), "has neither model.safetensors nor"),
    "not the format": (lambda f: (f / FILE).write_bytes(b"x" * 20), f"cannot open.*{FILE}"),
    "no index": (
        lambda f: ((f / FILE).unlink(), (f / INDEX).write_text("[]")), "index.json' is not an index"
    ),
    "a file is missing": (
        lambda f: ((f / FILE).unlink(), (f / INDEX).write_text('{"weight_map": {"0.bias": "b"}}')),
        "cannot open the checkpoint.*b'",
    ),
    "another file": (
        lambda f: ((f / FILE).rename(f / "b"),
                   (f / INDEX).write_text('{"weight_map": {"new": "b"}}')),
        "does not contain 'new', contrary to",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_checkpoint_of_another_model_is_an_error(
    cluster: zs.Session, tmp_path: Path, case: str
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(9, 9) for _ in range(3)))

    change, message = BROKEN[case]
    save_file(make().state_dict(), tmp_path / FILE)
    change(tmp_path)
    with pytest.raises(zs.InvalidArgumentError, match=message):
        wrap(make, tmp_path)


def test_a_buffer_that_no_file_has_is_an_error(cluster: zs.Session, tmp_path: Path) -> None:
    saved(tiny.llama(), tmp_path)
    with pytest.raises(zs.InvalidArgumentError, match="inv_freq.*are not in the checkpoint"):
        wrap(tiny.llama, tmp_path, param_init_fn=None)


def read_together(rank: int, folder: Path) -> int:
    """Returns the number of tensors that this rank has read."""
    reads = []
    original = _checkpoint.Checkpoint.read

    def read(checkpoint: Any, tensor: Any) -> None:
        reads.append(tensor)
        original(checkpoint, tensor)

    setattr(_checkpoint.Checkpoint, "read", read)
    torch.manual_seed(0)
    expected = tiny.gpt2()
    if rank == 0:
        saved(expected, folder)
    torch.distributed.barrier()
    zs.init()
    for level in LEVELS:
        assert_values(wrap(tiny.gpt2, folder, level), expected)
    return len(reads)


def test_rank_0_reads_the_values_for_all(tmp_path: Path) -> None:
    reads = ranks.run(2, read_together, tmp_path)
    assert reads[0] > 0 and reads[1] == 0

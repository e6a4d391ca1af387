# promise: no-silent-difference
"""Gradients that wait in a file, because nobody knows yet how many backward passes make a step."""

from __future__ import annotations

import errno
import gc
import os
import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard as zs
from zeroshard.torch import _aside, group_sharded_parallel

#: A gradient of a layer has 1 MiB, the least that is set aside.
WIDTH = 512


def train(level: str, passes: tuple[int, ...], how: str) -> list[Tensor]:
    """Trains with these numbers of backward passes in each step. Returns what was seen of
    gradients, and the parameters."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parameters, seen = list(model.parameters()), []
    kept: dict[Tensor, Tensor] = {}

    def keep(parameter: Tensor) -> None:
        kept[parameter] = parameter.grad

    if how == "keeps":
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(keep)
    if level != "plain":
        model, optimizer, _ = group_sharded_parallel(model, optimizer, level)
    for step, number in enumerate(passes):
        for part in range(number):
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(9 * step + part))
            model(inputs).square().mean().backward()
        if how == "looks":
            seen += [parameter.grad.clone() for parameter in parameters]
        elif how == "scales":
            for parameter in parameters:
                parameter.grad.mul_(0.5)
        elif how == "clips":
            nn.utils.clip_grad_norm_(parameters, 0.01)
        if step == 0:  # later ones are sent before
            for gradient in kept.values():
                gradient.mul_(0.5)
        kept.clear()
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(value.clone() for value in model.state_dict().values())]


def files() -> int:
    """The number of files without a name that this process maps."""
    gc.collect()
    with open("/proc/self/maps") as file:
        names = {line.split(maxsplit=5)[-1] for line in file if "(deleted)" in line}
    return sum(name.startswith(tempfile.gettempdir()) for name in names)


@pytest.mark.parametrize("how", ["steps", "looks", "scales", "clips", "keeps"])
@pytest.mark.parametrize("passes", [(1, 1), (2, 2), (3, 1)])
def test_gradients_that_waited_have_the_same_bits(
    how: str, passes: tuple[int, ...], cluster: zs.Session
) -> None:
    plain, *others = (train(level, passes, how) for level in ("plain", "os", "os_g", "p_g_os"))
    for other in others:
        assert all(map(torch.equal, others[0], other))
        for value, expected in zip(other, plain, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


def test_what_waits_takes_no_memory_and_can_be_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_aside._File, "last", None)
    gradient = torch.arange(1 << 20, dtype=torch.float32)
    before = files()  # of models of other tests
    aside = _aside.set_aside(gradient)
    assert aside.data_ptr() != gradient.data_ptr() and torch.equal(aside, gradient)
    assert files() == before + 1
    assert _aside.set_aside(aside.add_(gradient)) is aside
    assert resident(aside) == 0
    assert torch.equal(aside, 2 * gradient)
    assert resident(aside) == aside.nbytes
    del aside
    assert files() == before


def resident(tensor: Tensor) -> int:
    """The bytes of the pages of a tensor that this process maps now."""
    page = os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(tensor.data_ptr() // page * 8)
        entries = file.read(tensor.nbytes // page * 8)
    return sum(entry[7] >> 7 for entry in zip(*[iter(entries)] * 8, strict=True)) * page


def test_without_room_gradients_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    gradient = torch.ones(1 << 20)
    assert _aside.set_aside(gradient) is gradient


def test_small_and_strided_gradients_stay_in_memory() -> None:
    for gradient in (torch.ones(1000), torch.ones(1024, 1024).t(), torch.ones(1).expand(1 << 20)):
        assert _aside.set_aside(gradient) is gradient

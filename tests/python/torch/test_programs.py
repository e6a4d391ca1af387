# promise: no-silent-difference
"""Programs that are made from a description, without running a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import zeroshard as zs
from zeroshard._native import Box
from zeroshard._program import Collective, Description, Module, Program, Variable, make_program


def variable(name: str, shape: tuple[int, ...], box: Box | None = None, **other: Any) -> Variable:
    """A trained f32 tensor."""
    return Variable(name, shape, "float32", 4, box or Box.whole(shape), True, **other)


SUM = Collective("all_reduce", (0, 1))
#: The second of two tensor parallel workers.
DESCRIPTION = Description(
    "p_g_os",
    1,
    2,
    (
        Module("first", "Linear", ("first.weight", "first.bias"), after_backward=(SUM,)),
        Module("second", "Linear", ("second.weight", "second.bias"), after_forward=(SUM,)),
    ),
    (
        variable("first.weight", (8, 4), Box((4, 0), (4, 4)), resident=False),
        variable("first.bias", (8,), Box((4,), (4,))),
        variable("second.weight", (4, 8), Box((0, 4), (4, 4)), resident=False),
        variable("second.bias", (4,), contributes=False, uploads=False),
    ),
)


def words(program: Program) -> list[str]:
    """The verbs and subjects of a program."""
    return [f"{operation.verb} {operation.subject}".strip() for operation in program]


def test_training_fetches_computes_pushes_and_commits_in_order() -> None:
    assert words(make_program(DESCRIPTION, "train", "dist", "main")) == [
        "pull first.weight", "forward first",
        "pull second.weight", "forward second",
        "collective all_reduce",
        "loss",
        "pull second.weight", "backward second", "push second.weight",
        "pull first.weight", "backward first", "collective all_reduce",
        "push first.weight", "push first.bias",
        "commit", "pull first.bias", "pull second.bias",
    ]  # fmt: skip


def test_at_os_gradients_are_pushed_after_backward() -> None:
    resident = tuple(replace(each, resident=True) for each in DESCRIPTION.variables)
    said = words(
        make_program(replace(DESCRIPTION, level="os", variables=resident), "train", "dist", "main")
    )
    assert [word for word in said if "pull" in word] == [f"pull {each.name}" for each in resident]
    backward = max(number for number, word in enumerate(said) if word.startswith("backward"))
    assert all(number > backward for number, word in enumerate(said) if word.startswith("push"))


def test_evaluation_and_prediction_only_fetch_and_compute() -> None:
    evaluate, predict = (
        make_program(DESCRIPTION, mode, "dist", "main") for mode in ("eval", "predict")
    )
    assert words(predict) == [
        "pull first.weight", "forward first", "pull second.weight", "forward second",
        "collective all_reduce",
    ]  # fmt: skip
    assert words(evaluate) == [*words(predict), "loss"]
    assert all(
        len(make_program(DESCRIPTION, mode, "dist", "startup")) == 0 for mode in ("eval", "predict")
    )


def test_startup_pushes_this_workers_tensors_and_pulls_the_others() -> None:
    assert words(make_program(DESCRIPTION, "train", "dist", "startup")) == [
        "join", "push first.weight", "push first.bias", "push second.weight", "pull second.bias",
    ]  # fmt: skip


def test_a_serial_program_is_of_a_single_worker_with_the_whole_model() -> None:
    serial, dist = (
        make_program(DESCRIPTION, "train", scope, "main") for scope in ("serial", "dist")
    )
    assert serial.world == 1 and not serial.find("collective")
    assert serial.bytes("push") == 4 * (32 + 8 + 32 + 4) and dist.bytes("push") == 4 * (16 + 4 + 16)
    assert [operation.subject for operation in serial.find("push")].count("second.bias") == 1


def test_a_tied_tensor_is_pushed_once_when_its_gradient_is_complete() -> None:
    tied = Description(
        "os_g",
        0,
        1,
        (Module("embed", "Embedding", ("w",)), Module("head", "Linear", ("w",))),
        (variable("w", (4, 4)),),
    )
    assert words(make_program(tied, "train", "dist", "main"))[2:] == [
        "loss", "backward head", "backward embed", "push w", "commit", "pull w",
    ]  # fmt: skip


def test_the_listing_contains_boxes_bytes_and_ranks() -> None:
    text = str(make_program(DESCRIPTION, "train", "dist", "main"))
    assert "dist main program of train, level p_g_os, rank 1 of 2" in text
    assert "second.weight  [0:4, 4:8]  64 bytes" in text and "all_reduce  ranks 0, 1" in text


@pytest.mark.parametrize(
    "wrong", [("test", "dist", "main"), ("train", "local", "main"), ("train", "dist", "init")]
)
def test_an_unknown_program_is_refused(wrong: tuple[str, str, str]) -> None:
    with pytest.raises(zs.InvalidArgumentError, match="must be one of"):
        make_program(DESCRIPTION, *wrong)

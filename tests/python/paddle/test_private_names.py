"""The private names of Paddle are in one file, and a version of Paddle that does not have one of
them loses the features that need it and nothing else. Importing the package changes nothing in
Paddle."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
import zeroshard as zs
import zeroshard.paddle

from private_names import PACKAGE, Package
from removed_names import check_is_named, named, names, removed

NAMES = names("paddle")


def private_members() -> set[str]:
    """The private members of the classes of Paddle that the package uses."""
    weight = paddle.create_parameter([1], dtype="float32")
    optimizer = paddle.optimizer.AdamW(parameters=[weight])
    scaler = paddle.amp.GradScaler(enable=False)
    members = {
        name
        for each in (weight, paddle.nn.Linear(1, 1), optimizer, scaler)
        for name in (*dir(each), *vars(each))
    }
    return {name for name in members if name.startswith("_") and not name.startswith("__")}


def test_no_other_file_of_the_package_uses_a_private_name() -> None:
    outside = Package(PACKAGE, private_members() - {"_layers"}).outside()
    found = [use for use in outside if not use.file.startswith(("torch/", "integrations/"))]
    assert [f"{use.file}:{use.line}: {use.text}" for use in found] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from paddle.base import core", "paddle.base.core"),
        ("from paddle.jit.api import _register_save_pre_hook", "_register_save_pre_hook"),
        ("def f(x): return x._is_initialized()", "_is_initialized"),
        ("def f(x): return getattr(x, '_accumulators')", "_accumulators"),
        ("class A(paddle.nn.Layer):\n    def _to_impl(self): ...", "_to_impl"),
        ("class A(paddle.nn.Layer):\n    def f(self): return self._sub_layers", "_sub_layers"),
    ],
)
def test_the_check_finds_a_private_name(code: str, found: str, tmp_path: Path) -> None:
    package = tmp_path / "zeroshard"
    (package / "paddle").mkdir(parents=True)
    (package / "paddle/_new.py").write_text(f"import paddle\n\n\n{code}\n")
    uses = Package(package).outside()
    assert [use.file for use in uses] == ["paddle/_new.py"]
    assert found in uses[0].text


def test_every_name_is_in_the_installed_version() -> None:
    found = zs.check()
    assert all(not name.features for name in found.missing), str(found)
    assert found.looked_for >= len(NAMES) > 40
    assert found.lost == ()


@pytest.mark.parametrize("path", NAMES)
def test_a_missing_name_is_reported_with_what_is_lost(path: str) -> None:
    check_is_named(path)


def trained(level: str) -> list[float]:
    """The first weights of a small model after two steps."""
    paddle.seed(0)
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 2))
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    model, optimizer, _ = zeroshard.paddle.group_sharded_parallel(
        model, optimizer, level, segment_size=0
    )
    for _ in range(2):
        model(paddle.ones([3, 4])).square().sum().backward()
        optimizer.step()
        optimizer.clear_grad()
    weights: list[float] = next(iter(model.state_dict().values())).flatten().tolist()
    return weights


#: Names without which training goes on at every level.
UNRELATED = [
    "paddle.Tensor._local_value",
    "paddle.base.core.ProcessMesh",
    "paddle.base.core.ProcessGroupGloo",
    "paddle.base.framework._current_expected_place",
    "paddle.jit.api._register_save_pre_hook",
    "paddle.amp.GradScaler._scale",
    "paddle.nn.Layer._state_dict_impl",
]


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_training_works_without_names_that_it_does_not_need(
    cluster: zs.Session, level: str
) -> None:
    expected = trained(level)
    for path in UNRELATED:
        with removed(path):
            assert trained(level) == expected, path
    with removed(*UNRELATED):
        assert trained(level) == expected


def test_the_other_levels_work_without_names_of_p_g_os(cluster: zs.Session) -> None:
    gathered = [path for path in NAMES if named(path).features == ("level p_g_os (stage 3)",)]
    assert len(gathered) > 4
    expected = trained("os_g")
    with removed(*gathered):
        assert trained("os_g") == expected
        with pytest.raises(zs.MissingNameError, match="p_g_os"):
            trained("p_g_os")


#: A name, and a use of the feature that needs it.
USES: list[tuple[str, Callable[[], Any]]] = [
    ("paddle.optimizer.Optimizer._accumulators", lambda: trained("os")),
    ("paddle.optimizer.AdamW._lr_ratio", lambda: trained("os")),
    ("paddle.nn.Layer._parameters", lambda: trained("p_g_os")),
    ("paddle.Tensor._register_backward_hook", lambda: trained("os")),
    ("paddle.amp.GradScaler._enable", lambda: zeroshard.paddle.GradScaler()),
]


@pytest.mark.parametrize(("path", "use"), USES, ids=[path for path, _ in USES])
def test_the_feature_of_a_missing_name_raises_an_error(
    cluster: zs.Session, path: str, use: Callable[[], Any]
) -> None:
    use()
    with removed(path), pytest.raises(zs.MissingNameError) as raised:
        use()
    assert path in str(raised.value)
    assert raised.value.remedy.startswith("install paddlepaddle>=")


#: Imports Paddle and then the package, and prints what has changed in Paddle; then it trains.
SCRIPT = """
import paddle
from paddle.base import core

NAMES = [
    "run_backward", "run_partial_grad", "register_saved_tensors_hooks", "reset_saved_tensors_hooks",
]
def state():
    found = {f"core.eager.{name}": getattr(core.eager, name) for name in NAMES}
    for kind in (paddle.Tensor, paddle.nn.Layer, paddle.optimizer.Optimizer, paddle.DataParallel):
        found |= {f"{kind.__name__}.{name}": value for name, value in vars(kind).items()}
    return found

before = state()
import zeroshard, zeroshard.paddle, zeroshard.paddle.fleet
print("imported", *[name for name, value in state().items() if value is not before[name]])
model = paddle.nn.Linear(2, 2)
optimizer = paddle.optimizer.SGD(parameters=model.parameters())
model, optimizer, _ = zeroshard.paddle.group_sharded_parallel(model, optimizer, "os")
print("wrapped", *[name for name, value in state().items() if value is not before[name]])
"""


def test_importing_the_package_changes_nothing_in_paddle() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["imported"] in lines
    [wrapped] = [line for line in lines if line[0] == "wrapped"]
    assert set(wrapped[1:]) == {
        "core.eager.run_backward",
        "core.eager.run_partial_grad",
        "core.eager.register_saved_tensors_hooks",
        "core.eager.reset_saved_tensors_hooks",
    }

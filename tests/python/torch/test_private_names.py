"""The private names of torch are in one file, and a version of torch that does not have one of them
loses the features that need it and nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import zeroshard as zs
import zeroshard.torch
from private_names import PACKAGE, Package
from removed_names import check_is_named, named, names, removed
from zeroshard._versions import BOUNDS
from zeroshard.torch import _private
from zeroshard.torch._framework import TORCH

NAMES = names("torch")


def private_members() -> set[str]:
    """The private members of the classes of torch that the package uses."""
    weight = nn.Parameter(torch.zeros(1))
    instances = (nn.Linear(1, 1), torch.optim.AdamW([weight]), torch.amp.GradScaler("cpu"))
    classes = (torch.Tensor, torch.UntypedStorage, DTensor, DeviceMesh, nn.Module)
    found = {name for each in (*classes, *instances) for name in dir(each)}
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_no_other_file_of_the_package_uses_a_private_name() -> None:
    # A member of sparse tensors, and an attribute of the package's own objects.
    outside = Package(PACKAGE, private_members() - {"_values"}).outside()
    assert [f"{use.file}:{use.line}: {use.text}" for use in outside] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from torch._C import _fft_c2c", "torch._C._fft_c2c"),
        ("import torch.utils._pytree", "torch.utils._pytree"),
        ("def f(x): return x._version", "_version"),
        ("def f(x): return getattr(x, '_backward_hooks')", "_backward_hooks"),
        ("class A(nn.Module):\n    def _apply(self, fn): ...", "_apply"),
        ("class A(nn.Module):\n    def f(self): return self._is_full_backward_hook", "_is_full"),
        ("def f(module): return module._parameters", "_parameters"),
    ],
)
def test_the_check_finds_a_private_name(code: str, found: str, tmp_path: Path) -> None:
    package = tmp_path / "zeroshard"
    (package / "torch").mkdir(parents=True)
    (package / "torch/_new.py").write_text(f"from torch import nn\n\n\n{code}\n")
    uses = Package(package).outside()
    assert [use.file for use in uses] == ["torch/_new.py"]
    assert found in uses[0].text


def test_every_name_is_in_the_installed_version() -> None:
    found = zs.check()
    # Older versions do not have some that the package does without.
    assert all(not name.features for name in found.missing), str(found)
    assert found.looked_for >= len(NAMES) > 50
    assert found.lost == ()


@pytest.mark.parametrize("path", NAMES)
def test_a_missing_name_is_reported_with_what_is_lost(path: str) -> None:
    check_is_named(path)


@pytest.mark.parametrize("path", [path for path in NAMES if named(path).features])
def test_the_error_for_a_missing_name_says_what_and_what_to_do(path: str) -> None:
    error = named(path).missing()
    assert isinstance(error, zs.MissingNameError) and isinstance(error, NotImplementedError)
    assert str(error).startswith(" and ".join(named(path).features))
    assert path in str(error) and torch.__version__.partition("+")[0] in str(error)
    assert error.remedy == f"install torch{BOUNDS['torch']}"


def trained(level: str, steps: int = 2) -> list[float]:
    """The first weights of a small model after some steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer, _ = zeroshard.torch.group_sharded_parallel(
        model, optimizer, level, segment_size=0
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
    return next(iter(model.state_dict().values())).flatten().tolist()


#: Names without which training goes on at every level, one of each way to do without.
UNRELATED = [
    "torch._C._swap_tensor_impl",
    "torch.nn.Module._non_persistent_buffers_set",
    "torch.amp.GradScaler._per_optimizer_states",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._foreach_norm",
    "torch.distributed.device_mesh._mesh_resources",
    "torch.distributed.tensor.DTensor._local_tensor",
    "torch.ops._c10d_functional",
    "torch.optim.Optimizer._optimizer_step_pre_hooks",
    "torch.jit._trace._trace_module_map",
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
    gathered = [path for path in NAMES if named(path).features == _private.GATHERED]
    assert len(gathered) > 3
    expected = trained("os_g")
    with removed(*gathered):
        assert trained("os_g") == expected
        with pytest.raises(zs.MissingNameError, match="p_g_os"):
            part_of_a_larger_tensor()


def part_of_a_larger_tensor() -> None:
    larger, model = torch.zeros(100), nn.Linear(4, 2)
    model.weight.data = larger[:8].view(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(zs.InvalidArgumentError, match="larger tensor"):
        zeroshard.torch.group_sharded_parallel(model, optimizer, "p_g_os", segment_size=0)


def on_meta() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zeroshard.torch.group_sharded_parallel(model, optimizer, "os")


def scaled() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    wrapped, sharded, scaler = zeroshard.torch.group_sharded_parallel(
        model, optimizer, "os", scaler=scaler
    )
    scaler.scale(wrapped(torch.ones(1, 4)).sum()).backward()
    scaler.step(sharded)


#: A name, and a use of the feature that needs it.
USES: list[tuple[str, Callable[[], Any]]] = [
    ("torch._C._swap_tensor_impl", on_meta),
    ("torch.utils._python_dispatch.TorchDispatchMode", on_meta),
    ("torch.nn.Module._parameters", on_meta),
    ("torch.amp.GradScaler._per_optimizer_states", scaled),
    ("torch.amp.GradScaler._check_scale_growth_tracker", scaled),
    ("torch.Tensor._version", lambda: trained("os")),
    ("torch.UntypedStorage._cdata", lambda: trained("os_g")),
    ("torch._C._current_graph_task_id", TORCH.backward_pass),
    ("torch._C._current_autograd_node", TORCH.backward_node),
    ("torch._C._storage_Use_Count", part_of_a_larger_tensor),
]


@pytest.mark.parametrize(("path", "use"), USES, ids=[path for path, _ in USES])
def test_the_feature_of_a_missing_name_raises_an_error(
    cluster: zs.Session, path: str, use: Callable[[], Any]
) -> None:
    use()
    with removed(path), pytest.raises(zs.MissingNameError) as raised:
        use()
    assert path in str(raised.value)


def test_a_name_that_torch_really_does_not_have_is_missing(cluster: zs.Session) -> None:
    trained("p_g_os")
    for owner, path in (
        (torch._C, "torch._C._current_autograd_node"),
        (torch._C._functorch, "torch._C._functorch.peek_interpreter_stack"),
        (torch.distributed.device_mesh, "torch.distributed.device_mesh._mesh_resources"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(owner, path.rpartition(".")[2])
            assert path in [name.name for name in zs.check().missing]


#: What used to be imported with zeroshard.torch, and what torch can be imported without.
IMPORTED = [
    "torch._compile._disable_dynamo",
    "torch.distributed.device_mesh._mesh_resources",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.distributed.distributed_c10d._resolve_process_group",
    "torch._foreach_norm",
    "torch._has_compatible_shallow_copy_type",
]

SCRIPT = """
import importlib, sys, torch, torch._dynamo, torch.distributed.tensor.parallel
for path in sys.argv[1:]:
    module, _, name = path.rpartition(".")
    delattr(importlib.import_module(module), name)
import zeroshard as zs, zeroshard.torch
print(*[name.name for name in zs.check().missing], sep="\\n")
"""


def test_the_package_can_be_imported_without_any_of_them() -> None:
    command = [sys.executable, "-c", SCRIPT, *IMPORTED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(IMPORTED) <= set(done.stdout.split())


def test_check_is_a_command() -> None:
    command = [sys.executable, "-m", "zeroshard", "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[0].startswith(f"zeroshard {zs.__version__}, Python 3.")
    assert done.stdout.strip().splitlines()[-1] == "lost features: none"
    assert done.returncode == 0, done.stdout

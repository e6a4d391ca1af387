"""The libraries of the integrations are optional."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

LIBRARIES = ("accelerate", "transformers", "lightning")


@pytest.mark.parametrize("name", LIBRARIES)
def test_without_the_library_the_error_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Private names are registered once in a process.
    for module in sys.modules.keys() - {"zeroshard.integrations._private"}:
        if module == name or module.startswith((f"{name}.", "zeroshard.integrations")):
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"install it with: pip install {name}"):
        importlib.import_module(f"zeroshard.integrations.{name}")


def test_importing_zeroshard_imports_none_of_them() -> None:
    script = "import sys, zeroshard, zeroshard.integrations; print(*sys.modules)"
    command = [sys.executable, "-c", script]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "zeroshard.integrations" in printed.split()
    assert not {"torch", *LIBRARIES} & set(printed.split())

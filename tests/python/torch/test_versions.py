"""The versions of the libraries: one place defines the bounds, and a version outside of them is an
error when the library is used, not when the package is imported."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

import zeroshard as zs
from private_names import PACKAGE
from zeroshard import _versions
from zeroshard._versions import ALLOW_UNTESTED, BOUNDS, EXTRAS, Bounds, check_versions


def test_the_extras_of_the_package_have_the_bounds_of_the_code() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    assert declared == {
        extra: [f"{name}{bounds}" for name, bounds in of.items()] for extra, of in EXTRAS.items()
    }


def test_the_page_of_versions_has_the_bounds_of_the_code() -> None:
    page = (PACKAGE.parents[2] / "docs/reference/versions.md").read_text()
    for extra, of in EXTRAS.items():
        [(name, bounds)] = of.items()
        assert f"| `{extra}` | `{name}{bounds}` |" in page


def test_the_newest_version_of_each_library_is_one_that_the_tests_install() -> None:
    required = (PACKAGE.parents[2] / "tests/python").glob("requirements*.txt")
    pinned = dict(
        re.findall(r"^([\w-]+)==([\w.]+)$", "\n".join(f.read_text() for f in required), re.M)
    )
    for name, bounds in BOUNDS.items():
        assert bounds.include(pinned[name]), name
        # Below the next one after the newest that is tested.
        newest = [int(part) for part in pinned[name].split(".")]
        below = [int(part) for part in bounds.below.split(".")]
        assert below in ([newest[0] + 1], [newest[0], newest[1] + 1])


@pytest.mark.parametrize(
    ("version", "is_inside"),
    [
        ("2.8", True), ("2.8.0", True), ("2.15.0+cpu", True), ("2.15.9rc1", True),
        ("2.7.1", False), ("2.16", False), ("2.16.0.dev20261101", False), ("3.0", False),
    ],
)  # fmt: skip
def test_bounds_compare_numbers(version: str, is_inside: bool) -> None:
    assert Bounds("2.8", "2.16").include(version) is is_inside


def in_version(patch: pytest.MonkeyPatch, version: str) -> None:
    """Lets torch have a version."""
    found = metadata.version

    def other(package: str) -> str:
        return version if package == "torch" else found(package)

    patch.setattr(_versions.metadata, "version", other)


@pytest.mark.parametrize("version", ["1.13.1", "2.99.0"])
def test_init_refuses_a_version_that_is_not_tested(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    zs.shutdown()
    in_version(monkeypatch, version)
    with pytest.raises(zs.UnsupportedVersionError) as raised:
        zs.init()
    assert isinstance(raised.value, ImportError)
    assert f"torch {version} is installed" in str(raised.value)
    assert raised.value.remedy.startswith(f"install torch{BOUNDS['torch']}")
    found = zs.check()
    assert not found.ok and found.lost == ()
    assert f"torch {version}: NOT TESTED" in str(found)


def test_another_version_can_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    zs.shutdown()
    in_version(monkeypatch, "2.99.0")
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    with pytest.warns(UserWarning, match="torch 2.99.0 is installed"):
        zs.init()
    zs.shutdown()


def test_a_library_that_is_not_imported_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_versions, "installed", lambda module: "0.1")
    monkeypatch.delitem(sys.modules, "paddle", raising=False)
    check_versions(("paddle",))
    with pytest.raises(zs.UnsupportedVersionError, match="torch 0.1"):
        check_versions(("torch",))


def test_importing_the_package_checks_no_version() -> None:
    script = (
        "from importlib import metadata; metadata.version = lambda package: '0.1'\n"
        "import zeroshard.torch\n"
        "try: zeroshard.init()\n"
        "except zeroshard.UnsupportedVersionError as error: print(error)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("torch 0.1 is installed"), done.stderr

"""The versions with which ZeroShard is tested, from the files that pin them."""

from __future__ import annotations

import re
import tomllib

import checkpoint
from sources import ROOT, table

REQUIREMENTS = ROOT / "tests/python"
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "lightning",
    "paddlepaddle",
    "grpcio",
    "safetensors",
)


def pinned() -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted(REQUIREMENTS.glob("requirements*.txt")):
        for name, version in re.findall(r"^([\w.-]+)(?:\[\w+\])?==(\S+)", path.read_text(), re.M):
            found[name] = version
    return found


def part() -> str:
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]
    project = tomllib.loads((ROOT / "client/python/pyproject.toml").read_text())["project"]
    versions = pinned()
    rows = [
        ["ZeroShard", workspace["version"]],
        ["checkpoint format", checkpoint.constant("manifest.rs", "FORMAT")],
        ["Rust, to build it", workspace["rust-version"]],
        ["Python, to use the package", project["requires-python"]],
    ]
    rows += [[f"`{name}`", versions[name]] for name in PACKAGES]
    return table(["what", "version"], rows)

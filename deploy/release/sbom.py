"""Prints the bill of materials of the released programs: every crate that they contain, with its
version, licence and checksum, in the format CycloneDX.

    python3 deploy/release/sbom.py
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

from cyclonedx.contrib.hash.factories import HashTypeFactory
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parents[2]
#: The packages that contain the programs and the extension module.
RELEASED = ["zeroshard-server", "zeroshard-trainer", "zeroshard-zsctl", "zeroshard-python"]


def metadata() -> dict:
    command = ["cargo", "metadata", "--locked", "--format-version=1"]
    command += ["--filter-platform", "x86_64-unknown-linux-gnu"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)


def contained(found: dict) -> set[str]:
    """The ids of all packages that are linked into the released ones."""
    ids = {package["id"]: package["name"] for package in found["packages"]}
    nodes = {node["id"]: node["deps"] for node in found["resolve"]["nodes"]}
    open_, seen = [id for id, name in ids.items() if name in RELEASED], set()
    while open_:
        id = open_.pop()
        if id in seen:
            continue
        seen.add(id)
        open_ += [
            dep["pkg"]
            for dep in nodes[id]
            if any(kind["kind"] is None for kind in dep["dep_kinds"])
        ]
    return seen


def main() -> None:
    found = metadata()
    ids = contained(found)
    locked = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
    checksums = {(of["name"], of["version"]): of.get("checksum") for of in locked}
    bom, licenses, hashes = Bom(), LicenseFactory(), HashTypeFactory()
    for package in found["packages"]:
        if package["id"] not in ids:
            continue
        name, version = package["name"], package["version"]
        url = PackageURL("cargo", name=name, version=version)
        component = Component(
            name=name, version=version, type=ComponentType.LIBRARY, purl=url, bom_ref=str(url)
        )
        if package["license"]:
            # Older crates separate alternatives with a slash.
            expression = package["license"].replace("/", " OR ")
            component.licenses.add(licenses.make_from_string(expression))
        if checksum := checksums.get((name, version)):
            component.hashes.add(hashes.from_hashlib_alg("sha256", checksum))
        bom.components.add(component)
    print(JsonV1Dot6(bom).output_as_string(indent=1))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Checks the dependencies against deny.toml: licences, banned crates, sources.

Reads the part of cargo-deny's format that deny.toml uses. Prints every violation and ends with 1 if
there is one.
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def cargo(*arguments: str) -> str:
    """What cargo prints."""
    return subprocess.run(
        ["cargo", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def packages(targets: list[str]) -> list[dict]:
    """Every package that is built on one of the targets. (`cargo metadata` alone also lists
    optional ones.)"""
    used = set()
    for target in targets:
        tree = cargo(
            "tree",
            "--locked",
            "--workspace",
            "--target",
            target,
            "--prefix",
            "none",
            "--format",
            "{p}",
        )
        used |= {tuple(line.split()[:2]) for line in tree.splitlines() if line}
    metadata = json.loads(cargo("metadata", "--locked", "--format-version", "1"))
    return [p for p in metadata["packages"] if (p["name"], "v" + p["version"]) in used]


def allowed(expression: str, allow: set[str]) -> bool:
    """Returns whether an SPDX expression can be met with the allowed licences alone.

    OR, AND and parentheses; `WITH` belongs to the licence before it; `/` is crates' old way to say
    OR.
    """
    words = re.findall(r"[()]|[^\s()]+", expression.replace("/", " OR "))
    terms: list[str] = []
    for word in words:
        if terms and (word == "WITH" or terms[-1].endswith(" WITH")):
            terms[-1] += " " + word
        else:
            terms.append(word)
    position = 0

    def one() -> bool:
        nonlocal position
        term = terms[position]
        position += 1
        if term != "(":
            return term in allow
        value = either()
        position += 1  # the closing one
        return value

    def both() -> bool:
        nonlocal position
        value = one()
        while position < len(terms) and terms[position] == "AND":
            position += 1
            value = one() and value
        return value

    def either() -> bool:
        nonlocal position
        value = both()
        while position < len(terms) and terms[position] == "OR":
            position += 1
            value = both() or value
        return value

    return either()


def violations(package: dict, rules: dict) -> list[str]:
    """What is wrong with one package."""
    wrong = []
    allow = set(rules["licenses"]["allow"])
    for exception in rules["licenses"]["exceptions"]:
        if exception["crate"] == package["name"]:
            allow |= set(exception["allow"])
    licence = package["license"]
    if licence is None:
        wrong.append("has no SPDX licence")
    elif not allowed(licence, allow):
        wrong.append(f"is under {licence!r}, which deny.toml does not allow")
    banned = {entry["crate"]: entry["reason"] for entry in rules["bans"]["deny"]}
    if package["name"] in banned:
        wrong.append(f"is banned: {banned[package['name']]}")
    source = package["source"]
    registries = {f"registry+{registry}" for registry in rules["sources"]["allow-registry"]}
    if source is not None and source not in registries:
        wrong.append(f"comes from {source}, which deny.toml does not allow")
    for dependency in package["dependencies"]:
        if source is None and dependency["req"] == "*" and "path" not in dependency:
            wrong.append(f"needs any version of {dependency['name']}: name one")
    return wrong


def main() -> int:
    """Checks all packages."""
    rules = tomllib.loads((ROOT / "deny.toml").read_text())
    found = packages(rules["graph"]["targets"])
    wrong = [(p["name"], p["version"], what) for p in found for what in violations(p, rules)]
    for name, version, what in wrong:
        print(f"{name} {version} {what}", file=sys.stderr)
    print(f"{len(found)} packages, {len(wrong)} violations of deny.toml")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

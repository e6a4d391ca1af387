"""The names that programs and scripts of users rely on: flags, variables, keys of the configuration
file, metrics, and the Python API.

    python3 tests/compat/names.py --write FILE    # keeps the names of a release
    python3 tests/compat/names.py                 # fails if a name of a kept release is gone

The names come from the pages in docs/reference, which tests/reference compares with the code. Only
releases with the major and minor version of this one count: docs/reference/compatibility.md.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).resolve().parent
REFERENCE = ROOT / "docs" / "reference"
FIRST_CELL = re.compile(r"^\| `([^`]+)`")


def lines(page: str) -> list[str]:
    return (REFERENCE / f"{page}.md").read_text().splitlines()


def by_heading(page: str) -> Iterator[tuple[str, str]]:
    """The lines of a page, with the heading above each: at first the name of the page."""
    heading = page
    for line in lines(page):
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        yield heading, line


def flags() -> Iterator[str]:
    for page in ("zeroshard-server", "zeroshard-worker", "zsctl"):
        for command, line in by_heading(page):
            if (found := FIRST_CELL.match(line)) and found[1].startswith("-"):
                yield f"flag {command} {found[1].split()[0]}"


def keys() -> Iterator[str]:
    for section, line in by_heading("configuration"):
        if section.startswith("[") and (found := FIRST_CELL.match(line)):
            yield f"key {section} {found[1]}"


def variables() -> Iterator[str]:
    for line in lines("environment"):
        if (found := FIRST_CELL.match(line)) and found[1].startswith("ZEROSHARD_"):
            yield f"variable {found[1]}"


def metrics() -> Iterator[str]:
    for line in lines("metrics"):
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 7 and cells[1].startswith("`zeroshard_"):
            name = cells[1].strip("`")
            yield f"metric {name} {cells[2]}"
            yield from (
                f"metric {name} label {label}" for label in re.findall(r"`(\w+)`", cells[3])
            )


def python() -> Iterator[str]:
    for page in ("python", "python-torch", "python-paddle"):
        module = ""
        for heading, line in by_heading(page):
            module = heading.partition(":")[0] or module
            if line.startswith("### "):
                yield f"python {module}.{line.removeprefix('### ')}"
        for block in re.findall(r"^```text\n(.*?)^```$", "\n".join(lines(page)), re.M | re.S):
            yield from (
                f"python {module.removesuffix('.parallel')} {name}" for name in signature(block)
            )


def signature(block: str) -> Iterator[str]:
    """The name in a signature, and its parameters."""
    text = block.strip().removeprefix("class ")
    if attribute := re.fullmatch(r"([\w.]+): .*", text, re.S):
        yield attribute[1]
    elif function := re.fullmatch(r"([\w.]+)\((.*)\)(?: -> .*)?", text, re.S):
        yield function[1]
        yield from (f"{function[1]} argument {name}" for name in arguments(function[2]))


def arguments(text: str) -> list[str]:
    try:
        [of] = ast.parse(f"def f({text}): ...").body
    except SyntaxError:
        return []  # the base class of a class
    assert isinstance(of, ast.FunctionDef)
    named = [*of.args.posonlyargs, *of.args.args, *of.args.kwonlyargs]
    return [argument.arg for argument in named]


def current() -> list[str]:
    return sorted({*flags(), *keys(), *variables(), *metrics(), *python()})


def version() -> list[str]:
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]
    return str(workspace["package"]["version"]).split(".")


def check() -> int:
    names = set(current())
    if missing := [kind for kind in KINDS if not any(name.startswith(kind) for name in names)]:
        print(f"docs/reference has no {missing[0]}, or in another form")
        return 1
    kept = sorted(path.parent for path in KEPT.glob("*/names.txt"))
    stable = [release for release in kept if release.name.split(".")[:2] == version()[:2]]
    is_gone = False
    for release in stable:
        for name in (release / "names.txt").read_text().splitlines():
            if name not in names:
                print(f"{name}, a name of {release.name}, is gone")
                is_gone = True
        print(f"{len(names)} public names; compared with {release.name}")
    return int(is_gone)


KINDS = ("flag", "key", "variable", "metric", "python")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the names to FILE")
    wanted = parser.parse_args()
    if wanted.write:
        wanted.write.write_text("".join(f"{name}\n" for name in current()))
        sys.exit()
    sys.exit(check())

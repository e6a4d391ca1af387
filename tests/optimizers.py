"""Checks that every part of every optimizer exists, and names the files that lack one.

    python3 tests/optimizers.py           # fails if a part is missing, or the table is another one
    python3 tests/optimizers.py --write   # writes the table, in docs/reference/apis.md

The optimizers are those of `KINDS`. A missing loop for the CPU is also an error of the compiler.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KINDS = "proto/model/src/optimizer/kinds.rs"
LOOPS = "server/kernels/src/loops"
CUDA = "server/kernels/src/cuda/kernels"
PTX = "server/kernels/src/cuda/kernels.ptx"
MAKE = "tests/golden/make.py"
GOLDEN = "tests/golden/cases.json"
TORCH = "client/python/zeroshard/torch/optim.py"
PADDLE = "client/python/zeroshard/paddle/_conversion.py"
DOCUMENT = "docs/reference/apis.md"
HEADING = "## Optimizers\n"
#: It takes no step of its own: a job of `DataParallel` uses it, and no framework has it.
AVERAGE = "average"


class Optimizer(NamedTuple):
    """An entry of the table in `KINDS`."""

    name: str
    state: list[str]
    #: With their defaults.
    hyperparameters: list[tuple[str, str]]


def text(path: str) -> str:
    return (ROOT / path).read_text()


def optimizers() -> list[Optimizer]:
    entry = r"^ {12}\w+ (\w+) \{\n {16}state\(\w+\) = (.*?);\n(.*?)^ {12}\}"
    field = r"^ {16}(\w+): \w+ = (.*?)(?: => \w+)?,$"
    found = []
    for name, state, rest in re.findall(entry, text(KINDS), re.M | re.S):
        values = re.findall(field, rest.replace("f32::EPSILON as f64", "2^-23"), re.M)
        found.append(Optimizer(name, list(dict.fromkeys(re.findall(r'"(\w+)"', state))), values))
    return found


def classes(path: str) -> str:
    """The table of a framework's classes and of the names of their optimizers."""
    return re.search(r"^NAMES.*?^\}", text(path), re.M | re.S)[0]


def missing(optimizer: Optimizer) -> Iterator[str]:
    """The parts that an optimizer lacks."""
    name = optimizer.name
    loop = f"{LOOPS}/{name}.rs"
    has_loop = (ROOT / loop).exists()
    if not has_loop:
        yield f"{loop} does not exist: it has the step on the CPU and the launches on a GPU"
    source = "".join(file.read_text() for file in (ROOT / CUDA).glob("*.cu"))
    for kernel in re.findall(r'"([a-z]\w*)"', text(loop)) if has_loop else [name]:
        if f"KERNEL {kernel}(" not in source:
            yield f"{CUDA}/{name}.cu has no kernel {kernel}, which its steps launch"
        elif f".entry {kernel}(" not in text(PTX):
            yield f"{PTX} has no kernel {kernel}; run `python tests/kernels.py build`"
    if name == AVERAGE:
        return
    index = json.loads(text(GOLDEN))
    if not any(case["optimizer"]["name"] == name for case in index["cases"]):
        yield f"{GOLDEN} has no case: add one to CASES in {MAKE}, and run it"
    if name not in index["tolerances"]:
        yield f"{GOLDEN} has no tolerance: add one to TOLERANCES in {MAKE}, and run it"
    if f'"{name}"' not in classes(TORCH):
        yield f"{TORCH} maps no class to it in NAMES"
    if not re.search(rf"\b{name}\b", classes(PADDLE)):
        yield f"{PADDLE} maps no class to it in NAMES, nor says there that Paddle has none"


def table(found: list[Optimizer]) -> str:
    """The section of `DOCUMENT`."""

    def cell(path: str, name: str) -> str:
        of = re.findall(rf'^    ((?:\w+\.)*)(\w+): "{name}",', classes(path), re.M)
        own = "zeroshard.torch."
        return ", ".join(f"`{'' if module else own}{each}`" for module, each in of) or "-"

    lines = [
        "| name | PyTorch | Paddle | state tensors, some with an option only | hyperparameters |",
        "|---|---|---|---|---|",
    ]
    for each in found:
        values = ", ".join(f"`{name}` {default}" for name, default in each.hyperparameters) or "-"
        state = ", ".join(f"`{name}`" for name in each.state) or "-"
        frameworks = f"{cell(TORCH, each.name)} | {cell(PADDLE, each.name)}"
        lines.append(f"| `{each.name}` | {frameworks} | {state} | {values} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    found = optimizers()
    if not found:
        sys.exit(f"{KINDS} has no entry that this script can read")
    lacks = [f"{each.name}: {what}" for each in found for what in missing(each)]
    before, heading, rest = text(DOCUMENT).partition(HEADING)
    section = re.search(r"^\|.*?\n(?!\|)", rest, re.M | re.S)
    if not heading or not section:
        sys.exit(f"{DOCUMENT} has no section {HEADING.strip()!r} with a table")
    rest = rest[: section.start()] + table(found) + "\n" + rest[section.end() :].lstrip("\n")
    written = before + heading + rest
    if sys.argv[1:] == ["--write"]:
        (ROOT / DOCUMENT).write_text(written)
    elif text(DOCUMENT) != written:
        lacks.append(f"{DOCUMENT} has another table; run `python3 tests/optimizers.py --write`")
    print("\n".join(lacks) or f"{len(found)} optimizers have all their parts")
    if lacks:
        sys.exit(1)


if __name__ == "__main__":
    main()

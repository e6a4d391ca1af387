"""The blocks of code in the documentation, and what a test needs to run each of them.

A comment in the page, `<!-- test: KIND -->` directly above a block, says how it is run. A block of
Python without one is a part of a script for PyTorch. `<!-- test: none, REASON -->` excludes a
block, and the tests print the reason. A block of YAML of the kind `values` has values of the Helm
chart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^(?:<!-- test: (.*?) -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: The kind of a block of Python without a comment.
PART = "part"
#: The kinds of the blocks of Python, by the folder of the tests that run them.
KINDS = {
    "torch": (
        PART,
        "averaged",
        "checkpoints",
        "ddp",
        "deepspeed",
        "follow",
        "follow boxes",
        "gan",
        "init",
        "load_weights",
        "meta",
        "pin",
        "script",
        "script, two ranks",
        "sharded",
        "sharded backward",
        "survive",
        "two ranks",
        "wrapped",
    ),
    # "recipes" need libraries of requirements-recipes.txt.
    "frameworks": ("frameworks", "recipes"),
    "paddle": ("paddle", "paddle sharded"),
}


@dataclass(frozen=True)
class Block:
    """A block of code in a page."""

    page: str
    #: The line of the page above its first one.
    line: int
    language: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def run(self, names: dict[str, object]) -> None:
        """Runs a block of Python. Errors have the lines of the page."""
        code = "\n" * self.line + self.text
        exec(compile(code, str(ROOT / self.page), "exec"), names)


def blocks(*languages: str) -> list[Block]:
    """The blocks in these languages, of the book and of the documents beside it."""
    pages = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
    pages += [ROOT / "client/python/README.md"]
    found = []
    for page in pages:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            kind, language, code = match.groups()
            if language in languages:
                line = text.count("\n", 0, match.start(3))
                name = str(page.relative_to(ROOT))
                found.append(Block(name, line, language, kind or PART, code))
    return found


def of_kinds(*kinds: str) -> list[Block]:
    """The blocks of Python of these kinds, each text once."""
    chosen = [block for block in blocks("python") if block.kind in kinds]
    return list({block.text: block for block in chosen}.values())

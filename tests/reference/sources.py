"""What the pages have in common: where the sources are, and Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", r"\|")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines += ["| " + " | ".join(cell(text) for text in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def slug(heading: str) -> str:
    """The anchor that the book gives to a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())

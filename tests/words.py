"""Checks the vocabulary of the project: words that were given up must not come back as identifiers,
and comments in Rust must fit into 100 columns.

The glossary, docs/internals/glossary.md, has one word for one thing. ruff checks Python's columns.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Words that were given up, with the words that replace them. A capitalised word is the name of a
#: type, and is matched as a whole identifier. A lower-case word is also matched as a word of a
#: longer identifier: ``area`` in ``area_of``, ``areas`` and ``AreaOf``.
RETIRED = {
    "BoxView": "StridedBox",
    "Region": "LocalTensor, StridedBox",
    "Uncut": "Contributions",
    "Filling": "Received",
    "Parcel": "DeliverRequest",
    "ParcelHeader": "DeliverHeader",
    "Surroundings": "Context",
}

#: Words that were given up in a part of the project. Elsewhere they have another meaning, for
#: example in the interface of a library.
RETIRED_IN = {
    ("area", "proto"): "TensorBox, Elements",
    ("area", "client"): "TensorBox, Elements",
    ("area", "server"): "TensorBox, Elements",
    ("area", "worker/src/parallel"): "TensorBox, Elements",
    ("lane", "server/src/shard"): "SliceContributors",
    ("lane", "server/shard"): "SliceContributors",
    ("piece", "server/src/shard"): "Chunk",
    ("piece", "server/shard/src/round"): "Chunk",
    ("piece", "server/shard/src/slice"): "Chunk",
    ("Run", "proto/model"): "a range of elements",
    ("Share", "client/src"): "LocalTensor",
    ("Plan", "client/src"): "ServerPush, ServerPull",
}

WIDTH = 100


def files(*patterns: str) -> list[Path]:
    """Tracked files, without those that are deleted in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    )
    paths = [ROOT / line for line in listed.stdout.splitlines()]
    return [path for path in paths if path.exists() and path != Path(__file__).resolve()]


def code_of(path: Path) -> list[str]:
    """The lines of a file, without comments and strings: prose may use any word."""
    text = path.read_text()
    if path.suffix == ".rs" or path.suffix == ".proto":
        text = re.sub(r"//[^\n]*", "", text)
    else:
        text = re.sub(r'"""(?:.|\n)*?"""', lambda m: "\n" * m.group().count("\n"), text)
        text = re.sub(r"#[^\n]*", "", text)
    text = re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', text)
    return text.splitlines()


def words_of(identifier: str) -> set[str]:
    """The identifier, and its words in lower case and in the singular."""
    words = re.findall(r"[A-Z]?[a-z]+", identifier)
    return {identifier} | {word.lower().removesuffix("s") for word in words}


def main() -> int:
    found: list[str] = []
    for path in files("*.rs", "*.py", "*.pyi", "*.proto"):
        name = str(path.relative_to(ROOT))
        retired = dict(RETIRED)
        retired |= {word: use for (word, part), use in RETIRED_IN.items() if name.startswith(part)}
        for number, line in enumerate(code_of(path), 1):
            for identifier in re.findall(r"[A-Za-z_]\w*", line):
                for word in sorted(words_of(identifier) & retired.keys()):
                    use = f"{word!r} was given up: use {retired[word]}"
                    found.append(f"{name}:{number}: {identifier}: {use}")
        if path.suffix == ".rs":
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if len(line) > WIDTH and line.lstrip().startswith(("// ", "/// ", "//! ")):
                    found.append(f"{name}:{number}: a comment of {len(line)} columns")
    print("\n".join(found) or "no retired words")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""The values of the Helm chart: names, defaults, and the comments above them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sources import ROOT, table

VALUES = ROOT / "deploy/helm/zeroshard/values.yaml"
KEY = re.compile(r"(?P<indent> *)(?P<key>\w+):(?: (?P<default>\S.*))?")


def values() -> Iterator[tuple[str, str, str]]:
    """Name, default and comment of each value; a group of values has no default.

    The file has one key in a line, and comments above it.
    """
    groups: list[str] = []
    comment: list[str] = []
    for line in VALUES.read_text().splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.strip().removeprefix("#").strip())
        elif found := KEY.fullmatch(line):
            groups = groups[: len(found["indent"]) // 2]
            name, default = ".".join([*groups, found["key"]]), found["default"] or ""
            if not comment:
                raise ValueError(f"values.yaml has no comment above {name}")
            yield name, default, " ".join(comment)
            groups.append(found["key"])
            comment = []
        else:
            # The comment at the head of the file ends with an empty line.
            comment = []


def part() -> str:
    rows = (
        [f"`{name}`", f"`{default}`" if default else "", meaning]
        for name, default, meaning in values()
    )
    return table(["value", "default", "meaning"], rows)

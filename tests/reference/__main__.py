"""Writes what the book has from the code, or checks that it is what the code says.

    python3 tests/reference            # fails if a page is stale
    python3 tests/reference --write    # writes the pages

A page has such a part between two marks:

    <!-- from the code: NAME -->
    <!-- from the code: end -->

Needs Python 3.11. The flags come from `--help` of the programs in target/try, so build them first;
everything else comes from the sources.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

import chart
import checkpoint
import compatibility
import environment
import errors
import programs
import promises
import protocol
import python_api
from sources import DOCS

#: A function for each part, by the name in its mark.
PARTS: dict[str, Callable[[], str]] = {
    "promises": promises.part,
    "zeroshard-server": lambda: programs.part("zeroshard-server"),
    "zeroshard-worker": lambda: programs.part("zeroshard-worker"),
    "zsctl": lambda: programs.part("zsctl"),
    "zs-bench": lambda: programs.part("zs-bench"),
    "configuration": programs.configuration,
    "variables": environment.part,
    "values": chart.part,
    "errors": errors.wire,
    "exceptions": errors.python,
    "services": protocol.services,
    "messages": protocol.messages,
    "zeroshard": python_api.core,
    "zeroshard.torch": python_api.torch,
    "zeroshard.paddle": python_api.paddle,
    "versions": compatibility.part,
    "checkpoint": lambda: checkpoint.fields("manifest.rs", "Contents"),
    "checkpoint file": lambda: checkpoint.fields("manifest.rs", "File"),
    "checkpoint slice": lambda: checkpoint.fields("manifest.rs", "SliceEntry"),
    "checkpoint rank": lambda: checkpoint.fields("manifest.rs", "RankEntry"),
    "claim": lambda: checkpoint.fields("claims.rs", "Claim"),
    "ancestor": lambda: checkpoint.fields("claims.rs", "Ancestor"),
    "claim times": checkpoint.times,
}
MARK = re.compile(
    r"^<!-- from the code: (?P<name>[\w. -]+?) -->\n(?P<old>.*?)^<!-- from the code: end -->$",
    re.M | re.S,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--write", action="store_true")
    writes = parser.parse_args().write
    unused = set(PARTS)
    stale = []

    def current(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in PARTS:
            sys.exit(f"no part is called {name!r}; the parts are {', '.join(PARTS)}")
        unused.discard(name)
        begin, end = f"<!-- from the code: {name} -->", "<!-- from the code: end -->"
        return f"{begin}\n\n{PARTS[name]().strip()}\n\n{end}"

    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text()
        if (new := MARK.sub(current, text)) == text:
            continue
        if writes:
            path.write_text(new)
        else:
            stale.append(path.relative_to(DOCS.parent))
    for path in stale:
        print(f"{path} is not what the code says; run python3 tests/reference --write")
    for name in unused:
        print(f"no page of the book has the part {name!r}")
    if not stale and not unused:
        print("the book is what the code says")
    return bool(stale or unused)


if __name__ == "__main__":
    sys.exit(main())

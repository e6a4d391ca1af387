"""The environment variables: those of flags, and those that the client and the package read."""

from __future__ import annotations

import re
import subprocess
import sys

from programs import command
from sources import DOCS, ROOT, table

PROGRAMS = ["zeroshard-server", "zeroshard-worker", "zsctl", "zs-bench"]
PAGE = DOCS / "reference/environment.md"
#: Names of tests, and prefixes of names.
OTHERS = re.compile(r"ZEROSHARD_(TEST_\w+|WRITE_TABLE|TLS_)$")


def in_sources() -> set[str]:
    """The variables that the sources of the client, the package and the worker name."""
    listed = subprocess.run(
        ["git", "grep", "-hoE", "ZEROSHARD_[A-Z_]+", "--", "client", "worker", "proto/net"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {name for name in listed.stdout.split() if not OTHERS.match(name)}


def part() -> str:
    """The variables of flags. The page must describe all others that the sources name."""
    flags: dict[str, dict[str, str]] = {}
    for program in PROGRAMS:
        for of in command(program).with_commands():
            for flag in (flag for group in of.flags.values() for flag in group):
                if flag.variable:
                    usage = flag.usage.split(", ")[-1].split(" ")[0]
                    flags.setdefault(flag.variable, {})[program] = usage
    written, _, _ = PAGE.read_text().partition("<!-- from the code")
    described = set(re.findall(r"^\| `(\w+)`", written, re.M))
    sources = in_sources()
    if missing := sources - described - flags.keys():
        sys.exit(f"{PAGE.relative_to(ROOT)} does not describe {', '.join(sorted(missing))}")
    ours = {name for name in described if name.startswith("ZEROSHARD_")}
    if unknown := ours - sources - flags.keys():
        sys.exit(
            f"{PAGE.relative_to(ROOT)} describes {', '.join(sorted(unknown))}, which nothing reads"
        )
    rows = (
        [f"`{name}`", ", ".join(f"[`{of}`]({of}.md) `{flag}`" for of, flag in uses.items())]
        for name, uses in sorted(flags.items())
    )
    return table(["variable", "flag"], rows)

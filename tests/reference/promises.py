"""The promises and their tests, from marks on the tests.

`promises.toml` has the promises. A test that holds one has a mark above it, before its attributes:
`// promise: atomic-steps` in Rust, `# promise: atomic-steps` in Python. A mark in the comments with
which a file begins (`//! promise: ...` in Rust) counts for all tests of the file.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from sources import ROOT, cell

LIST = Path(__file__).with_name("promises.toml")
MARK = re.compile(r"\s*(?://!?|#) promise: ([\w-]+(?:, [\w-]+)*)$")
COMMENT = {".rs": re.compile(r"\s*//"), ".py": re.compile(r"\s*#")}
TEST = {
    ".rs": re.compile(r"\s*(?:pub )?(?:async )?fn (\w+)"),
    ".py": re.compile(r"\s*(?:async )?def (test_\w+)"),
}
#: What may be between a mark and its test: comments, and attributes or decorators.
BETWEEN = {
    ".rs": re.compile(r"\s*(?://|#\[|\)\]|[\w\"].*[,(]$)"),
    ".py": re.compile(r"\s*(?:#|@|\)|\]|[\w\"(\[].*,$)"),
}
#: What makes a function a test.
ATTRIBUTE = {".rs": re.compile(r"#\[(?:[\w:]+::)?test\b", re.M), ".py": re.compile("")}


@dataclass
class Promise:
    title: str
    text: str
    #: The marked tests of each file; None: all of them.
    tests: dict[str, list[str] | None] = field(default_factory=dict)


def head(lines: list[str], kind: str) -> int:
    """The number of lines of the comments with which a file begins."""
    for number, line in enumerate(lines):
        if line.strip() and not COMMENT[kind].match(line):
            return number
    return len(lines)


def test_below(lines: list[str], kind: str) -> str | None:
    for number, line in enumerate(lines):
        if found := TEST[kind].match(line):
            is_test = ATTRIBUTE[kind].search("\n".join(lines[:number]))
            return found[1] if is_test else None
        if not BETWEEN[kind].match(line):
            return None
    return None


def has_tests(lines: list[str], kind: str) -> bool:
    text = "\n".join(lines)
    pattern = ATTRIBUTE[kind] if kind == ".rs" else re.compile(r"^\s*(?:async )?def test_", re.M)
    return bool(pattern.search(text))


def marks(path: str) -> list[tuple[int, str, str | None]]:
    """The marks of a file: their lines, the ids, and the test; None: all tests of the file."""
    lines = (ROOT / path).read_text().splitlines()
    kind = Path(path).suffix
    first = head(lines, kind)
    found = []
    for number, line in enumerate(lines):
        if not (mark := MARK.fullmatch(line)):
            continue
        test = test_below(lines[number + 1 :], kind)
        if test is None and (number >= first or not has_tests(lines, kind)):
            sys.exit(f"{path}:{number + 1}: there is no test under this mark")
        for promise in mark[1].split(", "):
            found.append((number + 1, promise, test))
    return found


def promises() -> dict[str, Promise]:
    listed = tomllib.loads(LIST.read_text())
    found = {name: Promise(of["title"], of["text"]) for name, of in listed.items()}
    grep = ["git", "grep", "--untracked", "-lE", r"^\s*(//!?|#) promise: ", "--", "*.rs", "*.py"]
    files = subprocess.run(grep, cwd=ROOT, capture_output=True, text=True).stdout.split()
    for path in sorted(files):
        for number, promise, test in marks(path):
            if promise not in found:
                known = ", ".join(found)
                sys.exit(f"{path}:{number}: no promise {promise}; the promises are {known}")
            tests = found[promise].tests
            if test is None:
                tests[path] = None
            elif (already := tests.setdefault(path, [])) is not None:
                already.append(test)
    for name, of in found.items():
        if not of.tests:
            sys.exit(f"no test has a mark of the promise {name}")
    return found


def fact(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


def part() -> str:
    text = ""
    for number, (name, of) in enumerate(promises().items(), 1):
        text += f"## {number}. {of.title}\n\n{of.text}\n\nMark: `promise: {name}`\n\n"
        for path, tests in of.tests.items():
            if tests is None:
                text += f"- `{path}`: all tests\n"
            else:
                text += f"- `{path}`\n" + "".join(f"    - {cell(fact(test))}\n" for test in tests)
        text += "\n"
    return text

"""Converts docstrings (Google's sections, reStructuredText's roles) to Markdown."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator

SECTIONS = ("Args", "Returns", "Raises", "Yields", "Attributes")
ROLE = re.compile(r":(?:class|func|meth|attr|mod|data|exc):`~?([^`]+)`")


def inline(text: str) -> str:
    """``code`` and roles become `code`."""
    text = ROLE.sub(lambda found: f"`{found[1].removeprefix('~')}`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def items(lines: list[str]) -> list[str]:
    """The items of a section: each begins at the first indentation."""
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    found: list[str] = []
    for line in text.splitlines():
        if line.startswith(" ") and found or not line.strip():
            if found:
                found[-1] += " " + line.strip()
        else:
            found.append(line.strip())
    return [of.strip() for of in found]


def section(name: str, lines: list[str]) -> str:
    if name == "Returns" or name == "Yields":
        text = inline(" ".join(line.strip() for line in lines if line.strip()))
        return f"**{name}:** {text}"
    rows = []
    for item in items(lines):
        key, colon, meaning = item.partition(": ")
        rows.append(f"- `{key}`: {inline(meaning)}" if colon else f"- {inline(item)}")
    return f"**{name}:**\n\n" + "\n".join(rows)


def code_lines(lines: list[str]) -> Iterator[bool]:
    """Whether each line is code: a block that is indented, after an empty line."""
    is_code, before = False, ""
    for line in lines:
        if line.strip():
            is_code = line.startswith("    ") and (is_code or not before.strip())
        yield is_code
        before = line


def body(lines: list[str]) -> str:
    """Paragraphs and blocks of code."""
    texts = []
    pairs = zip(code_lines(lines), lines, strict=True)
    for is_code, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        text = "\n".join(line for _, line in group)
        if is_code:
            texts.append(f"```text\n{textwrap.dedent(text).strip()}\n```")
        else:
            texts.append(re.sub("::$", ":", inline(text).strip(), flags=re.M))
    return "\n\n".join(text for text in texts if text)


def markdown(docstring: str) -> str:
    """A docstring, dedented, as Markdown."""
    blocks: list[tuple[str, list[str]]] = [("", [])]
    for line in docstring.splitlines():
        name = line.removesuffix(":")
        if line.endswith(":") and name in SECTIONS:
            blocks.append((name, []))
        elif blocks[-1][0] and line and not line.startswith(" "):
            blocks.append(("", [line]))
        else:
            blocks[-1][1].append(line)
    texts = (section(name, lines) if name else body(lines) for name, lines in blocks)
    return "\n\n".join(text for text in texts if text)

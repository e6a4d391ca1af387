"""The errors: the enum that crosses the wire, its gRPC codes, and the exceptions of Python."""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass

from markup import markdown
from sources import ROOT, table

RUST = ROOT / "proto/model/src/error.rs"
CODES = ROOT / "proto/src/status.rs"
PYTHON = ROOT / "client/python/zeroshard/errors.py"
#: A variant: its comment, its attributes, its name and its fields.
VARIANT = re.compile(
    r"((?:^    ///.*\n)+)"
    r"(?:    #\[(?:[^\]\"]|\"(?:[^\"\\]|\\.|\\\n)*\")*\]\n)*"
    r"    (\w+) \{([^}]*)\}",
    re.M,
)


@dataclass
class ExceptionClass:
    """An exception class of Python."""

    name: str
    bases: list[str]
    meaning: str
    remedy: str


def variants() -> dict[str, tuple[str, list[str]]]:
    """The variants of the enum: their meaning and their fields."""
    body = RUST.read_text().split("pub enum Error {", 1)[1].split("\n}\n", 1)[0]
    found = {}
    for comment, name, fields in VARIANT.findall(body):
        meaning = " ".join(
            line.strip().removeprefix("///").strip() for line in comment.splitlines()
        )
        meaning = re.sub(r"\[(`[^`]+`)\]", r"\1", meaning)
        found[name] = (meaning, re.findall(r"^        (\w+):", fields, re.M))
    return found


def codes() -> dict[str, str]:
    body = CODES.read_text().split("fn code(error: &Error)", 1)[1].split("\n}\n", 1)[0]
    found = {}
    for arm in re.findall(r"((?:\|? ?Error::\w+ \{ \.\. \}\s*)+)=>\s*\{?\s*Code::(\w+)", body):
        for name in re.findall(r"Error::(\w+)", arm[0]):
            found[name] = arm[1]
    return found


def remedy_of(statement: ast.stmt) -> str | None:
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if isinstance(statement, ast.AnnAssign):
        target = statement.target
    if isinstance(target, ast.Name) and target.id == "_remedy":
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        return str(ast.literal_eval(value)) if value else None
    return None


def exceptions() -> dict[str, ExceptionClass]:
    found: dict[str, ExceptionClass] = {}
    for node in ast.parse(PYTHON.read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [ast.unparse(base).removeprefix("builtins.") for base in node.bases]
        own = [text for text in map(remedy_of, node.body) if text]
        inherited = found[bases[0]].remedy if bases[0] in found else ""
        meaning = markdown(ast.get_docstring(node) or "").replace("\n", " ")
        found[node.name] = ExceptionClass(node.name, bases, meaning, own[0] if own else inherited)
    return found


def wire() -> str:
    """The errors that cross the wire."""
    errors, grpc, known = variants(), codes(), exceptions()
    if missing := errors.keys() - grpc.keys():
        sys.exit(f"no gRPC code was found for {', '.join(sorted(missing))}")
    rows = []
    for name, (meaning, fields) in errors.items():
        reason = re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()
        exception = known.get(f"{name}Error") or known["InvalidArgumentError"]
        fields = [field for field in fields if field not in ("sentence", "cause")]
        attributes = ", ".join(f"`{field}`" for field in fields)
        rows.append([f"`{reason}`", f"`{grpc[name]}`", f"`{exception.name}`", meaning, attributes])
    return table(["reason", "gRPC code", "Python exception", "meaning", "fields"], rows)


def python() -> str:
    """The exceptions of Python."""
    rows = (
        [f"`{of.name}`", ", ".join(f"`{base}`" for base in of.bases), of.meaning, of.remedy]
        for of in exceptions().values()
    )
    return table(["exception", "bases", "meaning", "remedy"], rows)

"""The protocol: services, methods, messages and enums, from the comments of the .proto files."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from sources import ROOT, slug, table

FILES = ROOT / "proto/zeroshard/v1"
#: The files in the order of the page.
ORDER = ["coordinator", "shard", "data", "worker", "types"]


@dataclass
class Node:
    """A service, method, message, enum, oneof, field or value."""

    kind: str
    name: str
    comment: str
    #: Of a field its type, of a method its request and its answer.
    type: str = ""
    number: str = ""
    children: list[Node] = field(default_factory=list)

    def below(self, *kinds: str) -> Iterator[Node]:
        yield from (child for child in self.children if child.kind in kinds)


LINE = re.compile(
    r"(?P<kind>service|message|enum|oneof) (?P<name>\w+) \{(?P<end>\})?"
    r"|rpc (?P<rpc>\w+)\((?P<request>[\w. ]+)\) returns \((?P<answer>[\w. ]+)\);"
    r"|(?P<type>(?:repeated |optional )?(?:map<[^>]+>|[\w.]+)) (?P<field>\w+) = (?P<number>\d+)"
    r"|(?P<value>[A-Z][A-Z0-9_]*) = (?P<index>\d+)"
)


def statements(text: str) -> Iterator[tuple[str, str]]:
    """The statements of a file, each with the comment above it."""
    comment: list[str] = []
    line = ""
    for raw in text.splitlines():
        stripped = raw.strip()
        if stripped.startswith("//"):
            comment.append(stripped.removeprefix("//").strip())
            continue
        if not stripped:
            comment = []
            continue
        line = f"{line} {stripped}".strip()
        if line.endswith((";", "{", "}")):
            yield line, "\n".join(comment)
            line, comment = "", []


@functools.cache
def file(name: str) -> Node:
    text = (FILES / f"{name}.proto").read_text()
    head = text.split("syntax =", 1)[0]
    lines = [line.removeprefix("//").strip() for line in head.splitlines()]
    root = Node("file", name, "\n".join(lines).strip())
    stack = [root]
    for statement, comment in statements(text.split(";", 1)[1]):
        if statement == "}":
            stack.pop()
            continue
        found = LINE.match(statement)
        if not found:
            continue
        if found["kind"]:
            node = Node(found["kind"], found["name"], comment)
            stack[-1].children.append(node)
            if not found["end"]:
                stack.append(node)
        elif found["rpc"]:
            type = f"{found['request']} -> {found['answer']}"
            stack[-1].children.append(Node("rpc", found["rpc"], comment, type))
        elif found["field"]:
            stack[-1].children.append(
                Node("field", found["field"], comment, found["type"], found["number"])
            )
        elif found["value"]:
            stack[-1].children.append(Node("value", found["value"], comment, "", found["index"]))
    assert stack == [root], f"{name}.proto has an open block"
    return root


@functools.cache
def names() -> frozenset[str]:
    """The full names of all messages and enums."""

    def under(node: Node, prefix: str) -> Iterator[str]:
        for child in node.below("message", "enum"):
            yield prefix + child.name
            yield from under(child, f"{prefix}{child.name}.")

    return frozenset(name for of in ORDER for name in under(file(of), ""))


def linked(type: str, scope: str, page: str) -> str:
    """A type, linked to its message if it is one; names are looked up from the inside out."""

    def link(found: re.Match[str]) -> str:
        parts = scope.split(".") if scope else []
        for depth in range(len(parts), -1, -1):
            name = ".".join([*parts[:depth], found[0]])
            if name in names():
                return f"[{found[0]}]({page}#{slug(name)})"
        return found[0]

    return re.sub(r"[A-Z]\w*(?:\.[A-Z]\w*)*", link, type)


def services() -> str:
    text = ""
    for name in ORDER:
        of = file(name)
        for service in of.below("service"):
            text += f"## {service.name}\n\n{service.comment}\n\n"
            rows = []
            for rpc in service.below("rpc"):
                request, answer = rpc.type.split(" -> ")
                types = [linked(one, "", "messages.md") for one in (request, answer)]
                rows.append([f"`{rpc.name}`", *types, rpc.comment])
            text += table(["method", "request", "answer", "meaning"], rows) + "\n"
    return text


def message(node: Node, scope: str) -> str:
    full = f"{scope}.{node.name}" if scope else node.name
    text = f"### {full}\n\n{node.comment}\n\n"
    if node.kind == "enum":
        rows = [[of.number, f"`{of.name}`", of.comment] for of in node.below("value")]
        return text + table(["number", "value", "meaning"], rows) + "\n"
    fields = [(of, "") for of in node.below("field")]
    for oneof in node.below("oneof"):
        fields += [(of, oneof.name) for of in oneof.below("field")]
        text += f"One of the fields of `{oneof.name}` is set: {oneof.comment}\n\n"
    rows = []
    for of, group in sorted(fields, key=lambda pair: int(pair[0].number)):
        name = f"`{of.name}`" + (f" ({group})" if group else "")
        rows.append([of.number, name, linked(of.type, full, ""), of.comment])
    if rows:
        text += table(["number", "field", "type", "meaning"], rows) + "\n"
    return text + "".join(message(of, full) for of in node.below("message", "enum"))


def messages() -> str:
    text = ""
    for name in ORDER:
        of = file(name)
        text += f"## {name}.proto\n\n{of.comment}\n\n"
        text += "".join(message(child, "") for child in of.below("message", "enum"))
    return text

"""The format of checkpoints: the fields of its documents, from the comments of the sources."""

from __future__ import annotations

import re

from sources import ROOT, table

SOURCES = ROOT / "proto/checkpoint/src"
#: The types of JSON, by those of Rust.
TYPES = {"String": "text", "Hash": "text", "pb::JobSpec": "object", "f64": "number"}


def json_type(rust: str) -> str:
    if inner := re.fullmatch(r"Vec<(.+)>", rust):
        return f"list of {json_type(inner[1])}s"
    if re.fullmatch(r"\(u64, u64\)", rust):
        return "pair"
    return TYPES.get(rust, "number" if re.fullmatch(r"u\d+", rust) else "object")


def fields(file: str, struct: str) -> str:
    """The fields of a struct that serde writes."""
    text = (SOURCES / file).read_text()
    found = re.search(rf"struct {struct} \{{\n(.*?)\n\}}", text, re.S)
    assert found, f"{file} has no struct {struct}"
    rows = []
    comment: list[str] = []
    for line in map(str.strip, found[1].splitlines()):
        if line.startswith("///"):
            comment.append(line.removeprefix("///").strip())
        elif field := re.match(r"(?:pub(?:\(crate\))? )?(\w+): (.+),$", line):
            assert comment, f"{struct}.{field[1]} has no comment"
            rows.append([f"`{field[1]}`", json_type(field[2]), " ".join(comment)])
            comment = []
    return table(["field", "type", "meaning"], rows)


def constant(file: str, name: str) -> str:
    text = (SOURCES / file).read_text()
    found = re.search(rf"const {name}: \w+ = (?:Duration::from_secs\()?(\d+)", text)
    assert found, f"{file} has no {name}"
    return found[1]


def times() -> str:
    rows = [
        ["the coordinator changes the owner's `.alive`, every", "claims.rs", "BEAT"],
        [
            "another job follows an owner whose `.alive` has not changed for",
            "claims.rs",
            "PATIENCE",
        ],
        [
            "a job keeps the checkpoints of an ancestor that has not ended for",
            "lines.rs",
            "GRACE",
        ],
    ]
    return table(["what", "seconds"], ([what, constant(file, of)] for what, file, of in rows))

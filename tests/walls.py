"""Prints the crates and what they depend on, and the circles of imports in each of them and in the
Python package.

    python3 tests/walls.py              # fails if a wall has a hole, or a circle is too large
    python3 tests/walls.py --circles    # also lists the files of each circle

Cargo refuses circles between crates. `WITHOUT` lists what a crate must not depend on, not even
through another crate. Inside a crate, files that import each other can only be understood
together; a circle has at most `LIMIT` files.

An import counts for the file that defines the name, not for one that only exports it. Tests do not
count. `PARTS` lists the structs whose fields are private.

The Python package has no circles: a circle of imports can fail when a program imports its files in
another order, and imports for type checking count because a reader follows them, too.
"""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The largest number of files of a circle.
LIMIT = 3
# What the dependencies of a crate must not include.
NETWORK = ["tonic", "tokio", "hyper", "rustls"]
WITHOUT = {
    "zeroshard-model": [*NETWORK, "prost", "prometheus", "tracing", "zeroshard-proto"],
    "zeroshard-loops": [*NETWORK, "prost", "prometheus", "tracing", "zeroshard-proto"],
    "zeroshard-changes": [*NETWORK, "prost", "prometheus", "tracing", "zeroshard-proto"],
    "zeroshard-shm": [*NETWORK, "prost", "prometheus", "tracing", "zeroshard-model"],
    "zeroshard-proto": ["opentelemetry", "prometheus", "zeroshard-net"],
    "zeroshard-coordinator": [*NETWORK, "prost", "prometheus", "tracing", "zeroshard-proto"],
    "zeroshard-shard": [
        *(of for of in NETWORK if of != "tokio"),
        "prost",
        "prometheus",
        "object_store",
        "zeroshard-proto",
        "zeroshard-net",
        "zeroshard-coordinator",
    ],
    "zeroshard-kernels": [*NETWORK, "prost", "prometheus", "zeroshard-proto", "zeroshard-net"],
    "zeroshard-net": ["prometheus", "object_store", "zeroshard-checkpoint", "zeroshard-client"],
    "zeroshard-admin": ["prometheus", "zeroshard-client", "zeroshard-server"],
    "zeroshard-checkpoint": ["prometheus", "zeroshard-client", "zeroshard-server"],
    "zeroshard-client": ["prometheus", "object_store", "burn", "zeroshard-server"],
    "zeroshard-mirror": ["prometheus", "object_store", "burn", "zeroshard-server"],
    "zeroshard-zsctl": ["prometheus", "burn", "zeroshard-server"],
    "zeroshard-server": ["burn", "pyo3", "zeroshard-client"],
    "zeroshard-worker": ["prometheus", "object_store", "clap_complete", "zeroshard-server"],
}

# The Python package.
PYTHON = ROOT / "client/python/zeroshard"

# The parts of a job's state, by the file that alone reads and writes their fields.
COORDINATOR = ROOT / "server/coordinator/src"
PARTS = {
    "cluster/acknowledgements": "Acknowledgements",
    "state/decided": "Decided",
    "state/departed": "Departed",
    "state/server_disconnects": "Disconnects",
    "cluster/index": "Index",
    "state/interrupted": "Interrupted",
    "cluster/jobs": "Jobs",
    "state/broken_links": "BrokenLinks",
    "state/memberships": "Peers",
    "state/progress": "Progress",
    "state/recovery": "Recovery",
    "state/replicas": "Replicas",
    "state/uneven_inputs": "UnevenInputs",
    "state/round": "Round",
    "state/saves": "Saves",
    "cluster/servers": "Servers",
    "cluster/startup": "Startup",
    "state/members": "Members",
    "state/scrub": "Scrub",
    "state/user_data": "UserData",
    "state/version": "Version",
}

Module = tuple[str, ...]
Edges = dict[Module, set[Module]]


def metadata() -> dict:
    command = ["cargo", "metadata", "--locked", "--format-version", "1"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)


def dependencies(found: dict) -> dict[str, list[str]]:
    """The normal dependencies of each package, by id."""
    edges = {}
    for node in found["resolve"]["nodes"]:
        kinds = {of["pkg"]: [kind["kind"] for kind in of["dep_kinds"]] for of in node["deps"]}
        edges[node["id"]] = [package for package, of in kinds.items() if None in of]
    return edges


def reachable(start: str, edges: dict[str, list[str]]) -> set[str]:
    seen, left = set(), [start]
    while left:
        package = left.pop()
        if package not in seen:
            seen.add(package)
            left += edges[package]
    return seen


class Crate:
    """The files of a crate by module, and their imports."""

    def __init__(self, root: Path) -> None:
        self.files: dict[Module, str] = {}
        self.add((), root, root.parent)

    def add(self, module: Module, file: Path, folder: Path) -> None:
        text = re.sub(r"//[^\n]*", "", file.read_text())
        # Tests in the file are at its end.
        self.files[module] = re.split(r"#\[cfg\(test\)\]\s*mod\s+\w+\s*\{", text)[0]
        declared = r"(#\[cfg\(test\)\]\s*)?(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?mod\s+(\w+);"
        for is_test, name in re.findall(declared, text):
            for path in (folder / f"{name}.rs", folder / name / "mod.rs"):
                if not is_test and path.exists():
                    self.add((*module, name), path, folder / name)

    def imports(self) -> Edges:
        used: dict[Module, list[Module]] = defaultdict(list)
        exported: dict[Module, dict[str, Module]] = defaultdict(dict)
        for module, text in self.files.items():
            for is_public, tree in re.findall(r"(pub(?:\([^)]*\))?\s+)?use\s+([^;]+);", text):
                for path in filter(None, (self.absolute(module, path) for path in paths(tree))):
                    if is_public:
                        exported[module][path[-1]] = path
                    else:
                        used[module].append(path)
            code = re.sub(r"use\s+[^;]+;", "", text)
            for path in re.findall(r"\b(?:crate|super)(?:::\w+)+", code):
                used[module].append(self.absolute(module, path.split("::")) or ())
        edges: Edges = defaultdict(set)
        for module, found in used.items():
            targets = {self.definition(path, exported) for path in found}
            edges[module] = targets - {module}
        return edges

    def absolute(self, module: Module, path: list[str]) -> Module | None:
        """The path from the root of the crate; None for other crates."""
        if path[0] == "crate":
            return tuple(path[1:])
        if path[0] == "self":
            return (*module, *path[1:])
        if path[0] == "super":
            ups = next((n for n, name in enumerate(path) if name != "super"), len(path))
            return (*module[: len(module) - ups], *path[ups:])
        return (*module, *path) if (*module, path[0]) in self.files else None

    def definition(self, path: Module, exported: dict[Module, dict[str, Module]]) -> Module:
        """The file that defines what a path names."""
        for _ in range(8):
            length = next(n for n in range(len(path), -1, -1) if path[:n] in self.files)
            module, names = path[:length], path[length:]
            if not names or names[0] not in exported[module]:
                break
            path = (*exported[module][names[0]], *names[1:])
        return module


def paths(tree: str) -> Iterator[list[str]]:
    """The paths that a `use` names."""
    depth, parts = 0, [""]
    for character in tree.strip():
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    for part in filter(None, map(str.strip, parts)):
        before, brace, inner = part.partition("{")
        prefix = [name for name in before.split(" as ")[0].strip().split("::") if name]
        if brace:
            yield from (prefix + path for path in paths(inner.rstrip()[:-1]))
        else:
            yield prefix


class Package:
    """The files of a Python package by module, and their imports, also those in functions and for
    type checking."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {self.module(file): file for file in sorted(root.rglob("*.py"))}

    def module(self, file: Path) -> Module:
        path = file.relative_to(self.root.parent).with_suffix("").parts
        return path[:-1] if path[-1] == "__init__" else path

    def imports(self) -> Edges:
        edges: Edges = {}
        for module, file in self.files.items():
            found = ast.walk(ast.parse(file.read_text(), file))
            targets = (self.definition(path) for node in found for path in self.named(node, file))
            edges[module] = {target for target in targets if target not in (None, module)}
        return edges

    def named(self, node: ast.AST, file: Path) -> Iterator[Module]:
        """The paths from the root that an import names."""
        if isinstance(node, ast.Import):
            yield from (tuple(of.name.split(".")) for of in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = file.relative_to(self.root.parent).parts[: -node.level] if node.level else ()
            base = (*folder, *(node.module.split(".") if node.module else ()))
            yield from ((*base, of.name) for of in node.names)

    def definition(self, path: Module) -> Module | None:
        """The file that a path names: a submodule, or the module that has the name. None for other
        packages, and for the extension module, which has a stub."""
        for module in (path, path[:-1]):
            if (self.root.parent.joinpath(*module)).with_suffix(".pyi").exists():
                return None
            if module in self.files:
                return module
        return None


def circles(edges: Edges) -> list[list[Module]]:
    """The sets of files that import each other, largest first."""
    after = {module: closure(module, edges) for module in edges}
    found, left = [], set(edges)
    while left:
        module = left.pop()
        circle = [other for other in after[module] if module in after.get(other, ())]
        left -= set(circle)
        if len(circle) > 1:
            found.append(sorted(circle))
    return sorted(found, key=len, reverse=True)


def closure(start: Module, edges: Edges) -> set[Module]:
    """What a module imports, also through others."""
    seen: set[Module] = set()
    left = list(edges[start])
    while left:
        module = left.pop()
        if module not in seen:
            seen.add(module)
            left += edges.get(module, ())
    return seen


def public_fields() -> Iterator[str]:
    """The fields of parts of a job's state that other files could read or write."""
    for file, part in PARTS.items():
        body = re.search(
            rf"struct {part} {{(.*?)\n}}", (COORDINATOR / f"{file}.rs").read_text(), re.DOTALL
        )
        if not body:
            yield f"{file}.rs has no struct {part}"
            continue
        for name in re.findall(r"\n    pub\S* (\w+):", body[1]):
            yield f"{part} of {file}.rs has the public field {name}"


def main() -> int:
    found = metadata()
    packages = {package["id"]: package for package in found["packages"]}
    edges, holes = dependencies(found), []
    for identity in sorted(found["workspace_members"], key=lambda of: packages[of]["name"]):
        name = packages[identity]["name"]
        reached = {packages[of]["name"] for of in reachable(identity, edges)}
        direct = {packages[of]["name"] for of in edges[identity]}
        uses = (of.removeprefix("zeroshard-") for of in sorted(direct) if "zeroshard-" in of)
        holes += [f"{name} depends on {of}" for of in WITHOUT.get(name, []) if of in reached]
        targets = packages[identity]["targets"]
        root = next(Path(of["src_path"]) for of in targets if "test" not in of["kind"])
        known = circles(Crate(root).imports())
        sizes = [len(circle) for circle in known if len(circle) > LIMIT]
        shown = f"{name:22} {len(reached):4} crates  circles {sizes or '-'!s:10}"
        print(f"{shown} -> {', '.join(uses) or 'nothing'}")
        if "--circles" in sys.argv:
            for circle in known:
                print("    " + ", ".join("::".join(module) or "lib" for module in circle))
        holes += [f"{name} has a circle of {size} files" for size in sizes]
    package = Package(PYTHON)
    known = circles(package.imports())
    sizes = [len(circle) for circle in known]
    print(f"{'client/python':22} {len(package.files):4} files   circles {sizes or '-'}")
    if "--circles" in sys.argv:
        for circle in known:
            print("    " + ", ".join(map(".".join, circle)))
    holes += [f"client/python has a circle of {size} files" for size in sizes]
    holes += public_fields()
    print("\n".join(holes) or "no holes")
    return bool(holes)


if __name__ == "__main__":
    sys.exit(main())

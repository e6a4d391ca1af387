"""Counts the private names of torch, Paddle and the libraries of the integrations that the Python
package uses, and where it uses them.

    python3 tests/python/private_names.py            # the numbers of names and places
    python3 tests/python/private_names.py --places   # also lists them
    python3 tests/python/private_names.py --package OTHER/client/python/zeroshard

A private name begins with one underscore and is not defined by the package. The script counts the
parts of imports, attributes, strings that are such a name as a whole (as for `getattr`), and
methods that override one. Modules under `paddle.base` are as internal as private names, and count
as well.

`_private.py` of each library is the only file that may use them: `outside` lists the other places,
of which there must be none. Where the package and a library use the same name, the object decides:
an attribute of `self` belongs to the package if its class defines it.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "client/python/zeroshard"
DOOR = "_private.py"
PRIVATE = re.compile(r"_[A-Za-z]\w*")
#: Modules of Paddle that its documentation does not have, although their names are not private.
INTERNAL = ("paddle.base",)
LIBRARIES = ("torch", "paddle", "transformers", "accelerate", "lightning")
#: Objects of Python's own modules.
PYTHON = {"sys", "os", "functools"}
#: What the package calls as a library does, on other objects than `self`: the folder, and the name.
OURS = {
    # A parallel style of the user overrides it, and so does each style of the package.
    ("torch/parallel/", "_apply"),
    # A method of the package's own optimizers.
    ("torch/optim.py", "_apply"),
    # The names that the documentation of parallel styles gives to arguments.
    ("torch/parallel/", "_prepare_input"),
    ("torch/parallel/", "_prepare_output"),
}


@dataclass(frozen=True, order=True)
class Use:
    """A use of a private name."""

    library: str
    name: str
    file: str
    line: int
    text: str


class Package:
    """The files of the package, and the private names that it defines itself."""

    def __init__(self, root: Path, vocabulary: Collection[str] = ()) -> None:
        """``vocabulary``: private names of libraries, in addition to those in the doors."""
        self._root = root
        self._trees = {path: ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
        #: By the first folder or the name of a file.
        self._vocabulary: dict[str, set[str]] = defaultdict(lambda: set(vocabulary))
        for folder, path in (*_listed(PACKAGE), *_listed(root)):
            self._vocabulary[folder].add(path.rpartition(".")[2])
        self._own = {path.stem for path in self._trees} | {path.parent.name for path in self._trees}
        #: The private names that a class defines, and its base classes, by its name.
        self._members: dict[str, set[str]] = defaultdict(set)
        self._bases: dict[str, set[str]] = defaultdict(set)
        #: The classes with a base class of a library.
        self._derived: set[str] = set()
        for tree in self._trees.values():
            self._own |= set(_defined(tree))
            imported = set(_imported(tree))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._members[node.name] |= set(_defined(node))
                    bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
                    self._bases[node.name] |= {base.rpartition(".")[2] for base in bases}
                    if any(base.partition(".")[0] in imported for base in bases):
                        self._derived.add(node.name)

    def uses(self) -> list[Use]:
        """All uses, also those in the doors."""
        return sorted({use for path, tree in self._trees.items() for use in self._of(path, tree)})

    def outside(self) -> list[Use]:
        """The uses in other files than the doors."""
        return [use for use in self.uses() if Path(use.file).name != DOOR]

    def _of(self, path: Path, tree: ast.Module) -> Iterator[Use]:
        file = str(path.relative_to(self._root))
        for name, node, text in self._found(file, tree):
            yield Use(_library(file, text), name, file, node.lineno, text)

    def _found(self, file: str, tree: ast.Module) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
        for node, kind in _with_classes(tree, None):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                paths = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from ((path, node, path) for path in paths if _is_private(path))
            elif isinstance(node, ast.Import):
                paths = [alias.name for alias in node.names]
                yield from ((path, node, path) for path in paths if _is_private(path))
            elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
                if self._is_foreign(file, node.attr, node.value, kind):
                    yield node.attr, node, ast.unparse(node)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value
                if PRIVATE.fullmatch(name) and not name.startswith("_zeroshard"):
                    if name not in self._own or self._is_known(file, name):
                        yield name, node, repr(name)
            elif isinstance(node, ast.FunctionDef) and kind is not None:
                if self._is_known(file, node.name) and self._overrides(kind):
                    yield node.name, node, f"def {node.name} in {kind}"

    def _is_known(self, file: str, name: str) -> bool:
        """Returns whether the library of a file has a private name."""
        return name in self._vocabulary[file.partition("/")[0]] and not _is_ours(file, name)

    def _is_foreign(self, file: str, name: str, value: ast.expr, kind: str | None) -> bool:
        if name.startswith("_zeroshard") or _is_ours(file, name):
            return False
        if isinstance(value, ast.Name) and value.id in PYTHON:
            return False
        if _is_self(value) and kind is not None:
            if name in self._members_of(kind):
                # An attribute that the class of a library has as well.
                return self._is_known(file, name) and self._overrides(kind)
        return name not in self._own or self._is_known(file, name)

    def _lineage(self, kind: str) -> set[str]:
        """The names of a class and of its base classes in the package."""
        found, left = set(), {kind}
        while left:
            found |= left
            left = {base for each in left for base in self._bases.get(each, ())} - found
        return found

    def _members_of(self, kind: str) -> set[str]:
        return {name for each in self._lineage(kind) for name in self._members.get(each, ())}

    def _overrides(self, kind: str) -> bool:
        """Returns whether a class has a base class of a library."""
        return not self._derived.isdisjoint(self._lineage(kind))


def _with_classes(node: ast.AST, kind: str | None) -> Iterator[tuple[ast.AST, str | None]]:
    """All nodes below a node, with the innermost class around each. Without docstrings."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        yield child, kind
        yield from _with_classes(child, child.name if isinstance(child, ast.ClassDef) else kind)


def _defined(tree: ast.AST) -> Iterator[str]:
    """The private names that a file or a class defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if _is_self(node.value):
                yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg


def _imported(tree: ast.AST) -> Iterator[str]:
    """The names under which a file imports libraries and what they define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                (each.asname or each.name).partition(".")[0]
                for each in node.names
                if each.name.partition(".")[0] in LIBRARIES
            )
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module.partition(".")[0] in LIBRARIES:
                yield from (each.asname or each.name for each in node.names)


def _is_self(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id in ("super", "type")
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def _is_private(path: str) -> bool:
    """Returns whether the path of an import has a private part, outside of the package."""
    if path.partition(".")[0] in ("zeroshard", "__future__"):
        return False
    if path.startswith(tuple(f"{module}." for module in INTERNAL)) or path in INTERNAL:
        return True
    return any(PRIVATE.fullmatch(part) for part in path.split("."))


def _is_ours(file: str, name: str) -> bool:
    return any(file.startswith(folder) and name == own for folder, own in OURS)


def _listed(root: Path) -> Iterator[tuple[str, str]]:
    """The paths of the names that the doors of a package list, with the folder of each door."""
    for path in root.rglob(DOOR):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                found = str(node.args[0].value)
                if found.partition(".")[0] in LIBRARIES and _is_private(found):
                    yield path.parent.name, found


def _library(file: str, text: str) -> str:
    """The library whose name a file uses."""
    folder, _, rest = file.partition("/")
    if folder in ("torch", "paddle"):
        return folder
    if folder == "integrations":
        return rest.removesuffix(".py") if rest != DOOR else "integrations"
    return "paddle" if "paddle" in text else "torch"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--package", type=Path, default=PACKAGE)
    parser.add_argument("--places", action="store_true")
    options = parser.parse_args()
    outside = Package(options.package).outside()
    listed: dict[str, set[str]] = defaultdict(set)
    for _, path in _listed(options.package):
        listed[path.partition(".")[0]].add(path)
    for library in LIBRARIES:
        uses = [use for use in outside if use.library == library]
        print(
            f"{library}: {len(listed[library])} names in {DOOR}; outside of it "
            f"{len({use.name for use in uses})} names at {len(uses)} places in "
            f"{len({use.file for use in uses})} files"
        )
        if options.places:
            for use in uses:
                print(f"    {use.name:50} {use.file}:{use.line}: {use.text}")


if __name__ == "__main__":
    main()

"""The Python API: signatures and docstrings of the public names, without importing the package."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

from markup import markdown
from sources import ROOT, table

PACKAGE = ROOT / "client/python/zeroshard"
Definition = ast.FunctionDef | ast.ClassDef


@functools.cache
def module(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def file_of(directory: Path, level: int, name: str | None) -> Path | None:
    """The file of a relative import."""
    for _ in range(level - 1):
        directory = directory.parent
    path = directory.joinpath(*(name or "").split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def assigned(node: ast.stmt) -> tuple[list[str], ast.expr | None]:
    """The names to which a statement assigns, and the value."""
    if isinstance(node, ast.Assign):
        return [of.id for of in node.targets if isinstance(of, ast.Name)], node.value
    if isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id], node.value
    return [], None


def public_names(path: Path) -> list[str]:
    """The names in ``__all__``, with those of other modules that are added to it."""
    names: list[str] = []
    for node in module(path).body:
        targets, value = assigned(node)
        if "__all__" not in targets:
            continue
        if isinstance(value, ast.List | ast.Tuple):
            names += [str(ast.literal_eval(of)) for of in value.elts]
        elif isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
            other = file_of(path.parent, 1, value.value.id)
            names += public_names(other) if other else []
    return names


def find(path: Path, name: str) -> tuple[Path, ast.stmt] | None:
    """The definition of a name in the file, or where it is imported from. Of overloads the last."""
    for node in reversed(module(path).body):
        is_definition = isinstance(node, Definition) and node.name == name
        if is_definition or name in assigned(node)[0]:
            return path, node
    # Imports for type checkers are below a condition.
    imports = (of for of in ast.walk(module(path)) if isinstance(of, ast.ImportFrom))
    for imported in imports:
        for alias in imported.names:
            is_name = (alias.asname or alias.name) == name
            if not imported.level and is_name:
                return path, imported
            if imported.level and (is_name or alias.name == "*"):
                other = file_of(path.parent, imported.level, imported.module)
                wanted = name if alias.name == "*" else alias.name
                if other and other != path and (found := find(other, wanted)):
                    return found
    return None


def parameter(of: ast.arg, default: ast.expr | None, stars: str = "") -> str:
    text = stars + of.arg + (f": {ast.unparse(of.annotation)}" if of.annotation else "")
    if default is None:
        return text
    return f"{text} = {ast.unparse(default)}" if of.annotation else f"{text}={ast.unparse(default)}"


def parameters(of: ast.arguments) -> list[str]:
    plain = [*of.posonlyargs, *of.args]
    defaults = [None] * (len(plain) - len(of.defaults)) + list(of.defaults)
    texts = [parameter(one, default) for one, default in zip(plain, defaults, strict=True)]
    if of.posonlyargs:
        texts.insert(len(of.posonlyargs), "/")
    if of.vararg:
        texts.append(parameter(of.vararg, None, "*"))
    elif of.kwonlyargs:
        texts.append("*")
    named = zip(of.kwonlyargs, of.kw_defaults, strict=True)
    texts += [parameter(one, default) for one, default in named]
    if of.kwarg:
        texts.append(parameter(of.kwarg, None, "**"))
    return texts


def signature(node: ast.FunctionDef, name: str, *, is_method: bool) -> str:
    texts = parameters(node.args)
    if is_method and "staticmethod" not in {ast.unparse(of) for of in node.decorator_list}:
        texts = [text for text in texts[1:] if text != "/"]
    is_class = node.name == "__init__"
    result = f" -> {ast.unparse(node.returns)}" if node.returns and not is_class else ""
    line = f"{name}({', '.join(texts)}){result}"
    if len(line) <= 96:
        return line
    return f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){result}"


def fence(text: str) -> str:
    return f"```text\n{text}\n```\n\n"


def members(node: ast.ClassDef, prefix: str) -> str:
    text = ""
    seen: set[str] = set()
    for of in node.body:
        if not isinstance(of, ast.FunctionDef) or of.name.startswith("_") or of.name in seen:
            continue
        decorators = {ast.unparse(one) for one in of.decorator_list}
        if any(one.endswith((".setter", "overload")) for one in decorators):
            continue
        seen.add(of.name)
        documentation = markdown(ast.get_docstring(of) or "")
        if not documentation:
            continue
        is_property = decorators & {"property", "functools.cached_property", "cached_property"}
        if is_property:
            result = f": {ast.unparse(of.returns)}" if of.returns else ""
            line = f"{prefix}.{of.name}{result}"
        else:
            line = signature(of, f"{prefix}.{of.name}", is_method=True)
        text += fence(line) + documentation + "\n\n"
    return text


def entry(path: Path, node: ast.stmt, name: str) -> str:
    text = f"### {name}\n\n"
    if isinstance(node, ast.FunctionDef):
        return text + fence(signature(node, name, is_method=False)) + documented(node) + "\n\n"
    if not isinstance(node, ast.ClassDef):
        return text + fence(ast.unparse(node))
    for of in node.body:
        if isinstance(of, ast.FunctionDef) and of.name == "__init__":
            text += fence("class " + signature(of, name, is_method=True))
            break
    else:
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        text += fence(f"class {name}" + (f"({bases})" if bases else ""))
    text += documented(node) + "\n\n"
    fields = annotated(path, node)
    if fields:
        text += table(["attribute", "type", "meaning"], fields) + "\n"
    return text + members(node, name)


def annotated(path: Path, node: ast.ClassDef) -> list[list[str]]:
    """The public attributes, with the comments ``#:`` above them."""
    lines = path.read_text().splitlines()
    rows = []
    for of in node.body:
        if not isinstance(of, ast.AnnAssign) or not isinstance(of.target, ast.Name):
            continue
        if of.target.id.startswith("_"):
            continue
        above = of.lineno - 2
        comment: list[str] = []
        while lines[above].strip().startswith("#:"):
            comment.insert(0, lines[above].strip().removeprefix("#:").strip())
            above -= 1
        meaning = markdown(" ".join(comment))
        rows.append([f"`{of.target.id}`", f"`{ast.unparse(of.annotation)}`", meaning])
    return rows


def documented(node: ast.FunctionDef | ast.ClassDef) -> str:
    return markdown(ast.get_docstring(node) or "")


def submodule(package: Path, name: str) -> Path | None:
    return file_of(package, 1, name)


def entries(path: Path, prefix: str, skip: set[str]) -> str:
    """The functions, the classes and the re-exported names of a module, and its modules."""
    texts: dict[str, list[str]] = {"Functions": [], "Classes": []}
    exported: dict[str, list[str]] = {}
    modules = []
    for name in sorted(set(public_names(path)) - skip, key=str.lower):
        found = find(path, name)
        if found is None:
            inner = submodule(path.parent, name)
            if inner is None:
                sys.exit(f"no definition of {name} in {path}")
            modules.append((name, inner))
        elif isinstance(found[1], ast.ImportFrom):
            exported.setdefault(found[1].module or "", []).append(f"`{name}`")
        else:
            kind = "Classes" if isinstance(found[1], ast.ClassDef) else "Functions"
            texts[kind].append(entry(*found, name))
    text = "".join(
        f"{', '.join(names)}: {'this is' if len(names) == 1 else 'these are'} the "
        f"{'class' if len(names) == 1 else 'classes'} of `{of}`.\n\n"
        for of, names in exported.items()
    )
    for kind, of_kind in texts.items():
        if of_kind:
            text += f"## {prefix}: {kind.lower()}\n\n" + "".join(of_kind)
    for name, inner in modules:
        text += entries(inner, f"{prefix}.{name}", skip)
    return text


def exceptions() -> set[str]:
    body = module(PACKAGE / "errors.py").body
    return {node.name for node in body if isinstance(node, ast.ClassDef)}


def core() -> str:
    # Errors have a page of their own.
    return entries(PACKAGE / "__init__.py", "zeroshard", {"errors", "__version__"} | exceptions())


def torch() -> str:
    return entries(PACKAGE / "torch/__init__.py", "zeroshard.torch", set())


def paddle() -> str:
    return entries(PACKAGE / "paddle/__init__.py", "zeroshard.paddle", set())

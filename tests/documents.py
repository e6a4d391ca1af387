"""Checks that the files, functions and tests that the documents name exist, that links lead to
files, and that files are what they look like: no symbolic link, which an archive or another system
may turn into a file with a path in it, and the same license wherever a package has its own.

    python3 tests/documents.py

A file may be named by the end of its path, such as `job/save.rs`. In tables with the columns
"function" and "file", each function must be defined in its file. mkdocs checks the links between
pages of the book, and their headings.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The entries of the changelog name what there was.
EXCEPT = "CHANGELOG.md"
NAMED = re.compile(r"`([\w./{},-]+\.(?:rs|py|cu|proto|toml|yaml|md|sh))`")
#: Files of readers, and of other systems.
NOT_OURS = {"script.py", "train.py", "zero_to_fp32.py"}
TEST = re.compile(r"`(test_\w+)(?:\[[^`]*\])?`")


def expanded(path: str) -> list[str]:
    """`tests/{a,b}.rs` names two files."""
    match = re.search(r"\{([^}]*)\}", path)
    if not match:
        return [path]
    found = []
    for part in match[1].split(","):
        found += expanded(path[: match.start()] + part.strip() + path[match.end() :])
    return found


def is_there(path: str, files: list[str]) -> bool:
    """Whether a file has this path or, where `src` is left out, ends with its parts in order."""
    parts = path.lstrip("./").split("/")
    for file in files:
        if Path(file).name == parts[-1]:
            rest = iter(reversed(file.split("/")))
            if all(part in rest for part in reversed(parts)):
                return True
    return False


def missing_files(text: str, files: list[str]) -> list[str]:
    named = {path for match in NAMED.finditer(text) for path in expanded(match[1])}
    return sorted(path for path in named - NOT_OURS if not is_there(path, files))


def missing_links(document: str, text: str) -> list[str]:
    """The links that lead to no file."""
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    there = (ROOT / document).parent
    return sorted({f"a link to {link}" for link in links if not (there / link).exists()})


def missing_tests(text: str, tests: str) -> list[str]:
    return [name for name in TEST.findall(text) if f"def {name}(" not in tests]


def missing_functions(text: str) -> list[str]:
    missing = []
    for name, path in re.findall(r"^\| \d+ \| `([\w:]+)` \| ([\w./]+\.rs) \|", text, re.M):
        source = ROOT / path
        function = rf"\bfn {name.split('::')[-1]}\b"
        if not source.exists() or not re.search(function, source.read_text()):
            missing.append(f"{name} in {path}")
    return missing


def other_than_they_look(files: list[str]) -> list[str]:
    """Symbolic links, and licenses that are not that of the project."""
    links = [f"{file} is a symbolic link" for file in files if (ROOT / file).is_symlink()]
    license = (ROOT / "LICENSE").read_bytes()
    licenses = [file for file in files if Path(file).name == "LICENSE"]
    others = [file for file in licenses if (ROOT / file).read_bytes() != license]
    return links + [f"{file} is not a copy of LICENSE" for file in others]


def main() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    files = listed.stdout.split()
    wrong = other_than_they_look(files)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    documents = [file for file in files if file.endswith(".md") and file != EXCEPT]
    tests = "".join((ROOT / file).read_text() for file in files if "/test_" in file)
    is_whole = not wrong
    for document in documents:
        text = (ROOT / document).read_text()
        missing = missing_files(text, files) + missing_functions(text)
        missing += missing_links(document, text) + missing_tests(text, tests)
        for what in missing:
            print(f"{document} names {what}, which does not exist")
            is_whole = False
    if not is_whole:
        sys.exit(1)
    print("all files, functions and tests that the documents name exist")


if __name__ == "__main__":
    main()

"""Tests the Python package with the oldest and the newest supported version of each library, and
with each interpreter that the machine has, and prints a table.

    python3 tests/versions.py                       # all rows
    python3 tests/versions.py --only torch-oldest   # the rows whose names contain a word
    python3 tests/versions.py --write               # also puts them into the page of versions

A row runs the short suite of its library: the test files in `SUITES`. The newest versions are those
of `tests/run`, in its environments. Each other row has an environment of its own in
`target/versions`, which is removed when the row ends (torch takes 6 GB) unless `--keep` is given.
The servers and the extension module are those that `cargo build --profile try --workspace` has
made.

An interpreter that the machine does not have is a row that says "untested". abi3audit checks that
the extension module uses no symbol that an interpreter from Python 3.10 on may not have.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
TABLE = ROOT / "docs/reference/versions.md"
MODULE = ROOT / "client/python/zeroshard/_native.abi3.so"

#: The test files of the short suite of each library.
SUITES = {
    "torch": [
        "tests/python/torch/test_private_names.py",
        "tests/python/torch/test_versions.py",
        "tests/python/torch/test_shard.py",
        "tests/python/torch/test_gradients.py",
        "tests/python/torch/test_optimizers.py",
        "tests/python/torch/test_optimizer_state.py",
        "tests/python/torch/test_data_parallel.py",
        "tests/python/torch/test_sharded_parameters.py",
        "tests/python/torch/test_saving.py",
        "tests/python/torch/test_compile.py",
        "tests/python/torch/test_parallel_styles.py",
        "tests/python/torch/test_zero_and_tensor_parallel.py",
    ],
    "paddle": [
        "tests/python/paddle/test_private_names.py",
        "tests/python/paddle/test_group_sharded.py",
        "tests/python/paddle/test_gradients.py",
        "tests/python/paddle/test_data_parallel.py",
        "tests/python/paddle/test_sharded_parameters.py",
        "tests/python/paddle/test_saving.py",
        "tests/python/paddle/test_shard_layer.py",
    ],
    "frameworks": ["tests/python/frameworks"],
}

#: Tests that a row leaves out, because the versions differ there: what the table says about it.
COMPILE = "tests/python/torch/test_compile.py"
DIFFERENCES = {
    "torch-oldest": {
        f"{COMPILE}::test_compiled_module_gives_the_same_bits_in_one_graph[whole]": (
            "a model that is compiled as a whole has more graphs"
        ),
        f"{COMPILE}::test_what_is_not_compiled_warns_and_gives_the_same_bits": (
            "no warning about parts of a program that are not compiled"
        ),
    },
    "paddle-oldest": {
        "tests/python/paddle/test_data_parallel.py::"
        "test_fused_allreduce_gradients_keeps_ranks_equal_with_one_job": (
            "DistributedStrategy of fleet fails with protobuf 7"
        ),
    },
}

#: The interpreters in addition to that of the newest versions.
OTHER_PYTHONS = ("3.10", "3.12", "3.13", "3.14")
#: The seconds that a row may take after its packages are installed.
TIMEOUT = 3600
ABI3AUDIT = "abi3audit==0.0.26"
#: The row of the extension module.
AUDIT = "extension-module"
HEADER = "| row | Python | versions | short suite | tested on |"
#: What tests need besides the library.
PYTEST = ["pytest==9.2.0", "pytest-xdist==3.8.0"]


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    name: str
    #: The libraries and their versions.
    libraries: dict[str, str]
    suite: str
    python: str = "3.11"
    #: An environment of `tests/run`. None: one is made of the libraries.
    environment: str | None = None
    #: An environment of `tests/run` whose packages the row uses as well.
    beside: str | None = None
    #: Further packages.
    packages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """What a row has found."""

    row: Row
    outcome: str
    ok: bool


def rows() -> Iterator[Row]:
    """All rows. The oldest versions are the bounds of the package."""
    oldest, newest = lowest(), pinned()
    frameworks = ("transformers", "accelerate", "lightning")
    numpy = f"numpy=={newest['numpy']}"
    torch = {"torch": newest["torch"]}
    paddle = {"paddlepaddle": newest["paddlepaddle"]}
    libraries = {**torch, **{name: newest[name] for name in frameworks}}
    yield Row("torch-newest", torch, "torch", environment="python-torch")
    yield Row("torch-oldest", {"torch": oldest["torch"]}, "torch", packages=(numpy,))
    yield Row("paddle-newest", paddle, "paddle", environment="python-paddle")
    yield Row(
        "paddle-oldest",
        {"paddlepaddle": oldest["paddlepaddle"]},
        "paddle",
        packages=(numpy, f"setuptools=={newest['setuptools']}"),
    )
    yield Row("frameworks-newest", libraries, "frameworks", environment="python-frameworks")
    yield Row(
        "frameworks-oldest",
        {**torch, **{name: oldest[name] for name in frameworks}},
        "frameworks",
        beside="python-torch",
        packages=tuple(
            f"{name}=={newest[name]}" for name in ("peft", "tensorboard", "timm", "torchvision")
        ),
    )
    for python in OTHER_PYTHONS:
        # The newest NumPy that the interpreter has.
        yield Row(f"python-{python}", torch, "torch", python, packages=("numpy",))


def lowest() -> dict[str, str]:
    """The oldest supported version of each library, with three numbers as the registry has it."""
    project = tomllib.loads((ROOT / "client/python/pyproject.toml").read_text())["project"]
    extras = [each for extra in project["optional-dependencies"].values() for each in extra]
    found = dict(re.findall(r"([\w-]+)>=([\d.]+),", " ".join(f"{each}," for each in extras)))
    return {name: version + ".0" * (2 - version.count(".")) for name, version in found.items()}


def pinned() -> dict[str, str]:
    """The versions that `tests/run` installs."""
    texts = [file.read_text() for file in (ROOT / "tests/python").glob("requirements*.txt")]
    return dict(re.findall(r"^([\w-]+)==([\w.]+)$", "\n".join(texts), re.M))


# ---- a row


def run(row: Row, *, keep: bool) -> Result:
    """Runs the short suite of a row, in an environment that is made for it."""
    if row.environment is not None:
        return tested(row, TARGET / row.environment / "bin/python")
    interpreter = interpreter_of(row.python)
    if interpreter is None:
        return Result(row, "untested: the machine has no such interpreter", True)
    folder = TARGET / "versions" / row.name
    try:
        failure = install(row, interpreter, folder)
        if failure is not None:
            # A library that an interpreter cannot install is not the package's fault.
            is_own = row.python == Row.python
            return Result(row, f"untested: pip cannot install it: {failure}", not is_own)
        return tested(row, folder / "bin/python")
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def interpreter_of(python: str) -> str | None:
    """The command of an interpreter that runs. pyenv has commands that do not."""
    candidates = [f"python{python}"]
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates += [str(path) for path in sorted(versions.glob(f"{python}.*/bin/python"))]
    for command in candidates:
        try:
            subprocess.run([command, "-c", ""], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return command
    return None


def install(row: Row, interpreter: str, folder: Path) -> str | None:
    """Makes the environment of a row. Returns why pip cannot."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    if row.beside is not None:
        (packages,) = (folder / "lib").glob("python*/site-packages")
        (others,) = (TARGET / row.beside / "lib").glob("python*/site-packages")
        line = f'import site; site.addsitedir("{others}")\n'
        (packages / f"{row.beside}.pth").write_text(line)
    libraries = [f"{name}=={version}" for name, version in row.libraries.items()]
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    command += ["--disable-pip-version-check", *libraries, *row.packages, *PYTEST]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    return errors[-1].removeprefix("ERROR: ") if errors else f"exit status {done.returncode}"


def tested(row: Row, python: Path) -> Result:
    """Runs the short suite of a row with an interpreter."""
    command = [str(python), "-m", "pytest", "-o", f"cache_dir={TARGET / 'pytest'}", "-q", "-rfE"]
    command += ["--numprocesses", "2", "--dist", "loadfile", *SUITES[row.suite]]
    differences = DIFFERENCES.get(row.name, {})
    command += [part for test in differences for part in ("--deselect", test)]
    environment = {**os.environ, "PYTHONPATH": str(MODULE.parent.parent)}
    environment["CARGO_TARGET_DIR"] = str(TARGET)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return Result(row, f"not complete after {TIMEOUT} s", False)
    lines = done.stdout.strip().splitlines()
    summary = lines[-1] if lines else done.stderr.strip()
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", summary)
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    print("\n".join(failed), file=sys.stderr)
    found = "; ".join([", ".join(counts) or summary, *differences.values()])
    return Result(row, found, done.returncode == 0)


# ---- the extension module


def audit() -> Result:
    """Checks the symbols that the extension module uses."""
    folder = TARGET / "versions/abi3audit"
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", ABI3AUDIT]
        subprocess.run([str(folder / "bin/python"), *install], check=True)
        command = [str(folder / "bin/abi3audit"), "--strict", "--summary"]
        command += ["--assume-minimum-abi3", "3.10", str(MODULE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    said = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", done.stderr + done.stdout).split())
    found = re.search(r"\d+ ABI version mismatch.* found", said)
    outcome = found[0] if found else said
    row = Row(AUDIT, dict([ABI3AUDIT.split("==")]), "", "3.10 and later")
    return Result(row, outcome, done.returncode == 0)


# ---- the table


def line_of(result: Result) -> str:
    """A result as a line of the table."""
    row = result.row
    versions = ", ".join(f"{name} {version}" for name, version in row.libraries.items())
    cells = (row.name, row.python, versions, result.outcome, f"{datetime.date.today():%d %B %Y}")
    return f"| {' | '.join(cells)} |"


def write(lines: list[str]) -> None:
    """Puts lines into the table of the page, in place of those of the same rows."""
    texts = TABLE.read_text().splitlines()
    for line in lines:
        start = line[: line.index("|", 1) + 1]
        known = [number for number, text in enumerate(texts) if text.startswith(start)]
        if not known:
            raise SystemExit(f"{TABLE} has no row {start}")
        texts[known[0]] = line
    TABLE.write_text("\n".join(texts) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args()
    lines, is_ok = [HEADER, "|---|---|---|---|---|"], True
    for row in rows():
        if options.only in row.name:
            print(f"{row.name} ...", file=sys.stderr, flush=True)
            result = run(row, keep=options.keep)
            lines.append(line_of(result))
            is_ok = is_ok and result.ok
            print(lines[-1], file=sys.stderr, flush=True)
    if options.only in AUDIT:
        result = audit()
        lines.append(line_of(result))
        is_ok = is_ok and result.ok
    print("\n".join(lines))
    if options.write:
        write(lines[2:])
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main())

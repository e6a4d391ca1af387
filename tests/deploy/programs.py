"""The flags and environment variables of the binaries, from their ``--help``."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
BINARIES = TARGET / "try"
#: The version of the programs, of the image and of the chart.
VERSION: str = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
#: Names of the binaries that the image contains.
PROGRAMS = ("zeroshard-server", "zeroshard-worker", "zsctl")


@dataclass(frozen=True)
class Help:
    """What a subcommand documents."""

    flags: frozenset[str]
    variables: frozenset[str]
    #: The names of its own subcommands.
    commands: frozenset[str]
    #: Address on which it listens by default, by flag.
    listens: dict[str, str]


@functools.cache
def help_of(program: str, *subcommand: str) -> Help:
    """Runs a subcommand with ``--help``."""
    command = [BINARIES / program, *subcommand, "--help"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    flags = re.findall(r"^ +(?:-\w, )?(--[a-z][a-z-]*)", text, re.MULTILINE)
    variables = re.findall(r"\[env: (\w+)", text)
    listens = re.findall(
        r"(--[a-z-]*listen) <IP:PORT>(?:(?!\n {2,8}--).)*?\[default: ([\d.:]+)\]", text, re.DOTALL
    )
    _, _, listed = text.partition("Commands:\n")
    commands = re.findall(r"^  ([a-z][a-z-]*)", listed.partition("\n\n")[0], re.MULTILINE)
    return Help(frozenset(flags), frozenset(variables), frozenset(commands), dict(listens))


def check_command(command: list[str]) -> Help:
    """Checks that a command of the image exists, with all its flags. Returns its documentation.

    A command is a binary, a subcommand, then flags and values.
    """
    program, subcommand, *arguments = command
    assert program in PROGRAMS, f"{program} is not in the image"
    documented = help_of(program, subcommand)
    for argument in arguments:
        if argument.startswith("--"):
            flag = argument.partition("=")[0]
            assert flag in documented.flags, f"{program} {subcommand} has no flag {flag}"
    return documented


def check_variables(documented: Help, names: list[str]) -> None:
    """Checks that the variables of ZeroShard in an environment are read by the command."""
    for name in names:
        if name.startswith("ZEROSHARD_"):
            assert name in documented.variables, f"no flag is set by the variable {name}"

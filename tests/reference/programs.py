"""The flags of the programs, from `--help` of the program and of each of its subcommands."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sources import ROOT, slug, table

#: Environment variables that a flag reads are part of its help, with their values.
ENVIRONMENT = {"PATH": os.environ["PATH"], "COLUMNS": "100"}
#: Flags that every program has.
STANDARD = ("-h, --help", "-V, --version")
#: What the help adds to the description of a flag. A value may have brackets of its own.
NOTE = re.compile(r"\[(env|default|possible values|aliases): ([^\]]*(?:\[[^\]]*\][^\]]*)*)\]")


@dataclass
class Flag:
    """A flag or an argument."""

    usage: str
    meaning: str
    variable: str = ""
    default: str = ""


@dataclass
class Command:
    """A program or a subcommand."""

    name: str
    about: str = ""
    usage: str = ""
    after: str = ""
    #: The flags by the heading under which the help lists them.
    flags: dict[str, list[Flag]] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)

    def with_commands(self) -> Iterator[Command]:
        yield self
        for command in self.commands:
            yield from command.with_commands()


def binary(name: str) -> Path:
    path = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "try" / name
    if not path.exists():
        sys.exit(f"{path} does not exist; run cargo build --profile try --workspace --bins")
    return path


def help_of(name: str, *commands: str) -> str:
    ran = subprocess.run(
        [binary(name), *commands, "--help"], env=ENVIRONMENT, capture_output=True, text=True
    )
    if ran.returncode:
        sys.exit(f"{name} {' '.join(commands)} --help fails: {ran.stderr}")
    return ran.stdout


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def parts(text: str) -> Iterator[tuple[str, list[str]]]:
    """The parts of a help text: those with a heading, and those before, between and after them."""
    heading = ""
    lines: list[str] = []
    for line in text.splitlines():
        found = re.fullmatch(r"(\w[\w .()-]*):( .*)?", line)
        if found and (found[2] is None or found[1] == "Usage"):
            yield heading, lines
            heading, lines = found[1], [found[2] or ""]
        elif line and not line.startswith(" ") and heading and heading != "Usage":
            yield heading, lines
            heading, lines = "", [line]
        else:
            lines.append(line)
    yield heading, lines


def paragraphs(lines: list[str]) -> str:
    """The text without its indentation."""
    text = "\n".join(line.strip() for line in lines)
    return re.sub(r"\n{2,}", "\n\n", text).strip()


def flag_of(usage: str, lines: list[str]) -> Flag:
    """A flag from the lines under it."""
    text = paragraphs(lines)
    flag = Flag(re.sub(r"\s+", " ", usage).strip(), "")
    values = re.search(r"\n*Possible values:\n((?:- .*\n?(?:(?!\[|- ).+\n?)*)+)", text)
    if values:
        text = text.replace(values[0], "\n\n")
        listed = re.findall(r"- ([\w-]+)(?::\s*([^\n]*(?:\n(?!- |\[).+)*))?", values[1])
        meanings = [f"`{value}`" + (f" ({what.strip()})" if what else "") for value, what in listed]
        text += " One of " + ", ".join(meanings) + "."
    for name, value in NOTE.findall(text):
        if name == "env":
            flag.variable = value.split("=")[0]
        elif name == "default":
            flag.default = value.replace("\n", " ")
        elif name == "possible values":
            text += " One of " + ", ".join(f"`{one.strip()}`" for one in value.split(",")) + "."
    text = NOTE.sub("", text)
    flag.meaning = sentence(text)
    return flag


def sentence(text: str) -> str:
    """Text whose end the help leaves out."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r"([^.:;!?]) One of ", r"\1. One of ", text)
    return text if not text or text[-1] in ".!?`:" and text[-1] != "`" else text + "."


def flags_of(lines: list[str]) -> list[Flag]:
    flags: list[tuple[str, list[str]]] = []
    for line in lines:
        stripped = line.strip()
        if stripped.startswith(("-", "<", "[")) and 0 < indent(line) <= 6:
            # A short description is on the line of the flag.
            usage, _, rest = stripped.partition("  ")
            flags.append((usage, [rest] if rest else []))
        elif flags:
            flags[-1][1].append(line)
    return [flag_of(usage, under) for usage, under in flags]


@functools.cache
def command(program: str, *path: str) -> Command:
    found = Command(" ".join((program, *path)))
    for heading, lines in parts(help_of(program, *path)):
        if heading == "Usage":
            usage, _, _ = "\n".join(line.strip() for line in lines).strip().partition("\n\n")
            found.usage = usage
        elif heading == "Commands":
            names = [re.match(r"  ([a-z][\w-]*)(?:\s|$)", line) for line in lines]
            for name in names:
                if name and name[1] != "help":
                    found.commands.append(command(program, *path, name[1]))
        elif heading and any(line.lstrip().startswith(("-", "<", "[")) for line in lines):
            flags = flags_of(lines)
            found.flags[heading] = [of for of in flags if of.usage not in STANDARD]
        elif not found.usage:
            found.about += "\n".join(lines)
        else:
            found.after += (f"{heading}: " if heading else "") + "\n".join(lines)
    return found


def text_of(text: str) -> str:
    """Paragraphs of a help text; indented lines are commands."""
    blocks = []
    for block in re.split(r"\n{2,}", text.strip("\n")):
        lines = block.splitlines()
        if lines and all(line.startswith("  ") for line in lines):
            blocks.append("```text\n" + "\n".join(line.strip() for line in lines) + "\n```")
        elif block.strip():
            blocks.append(sentence(block))
    return "\n\n".join(blocks)


def flag_table(flags: list[Flag]) -> str:
    has_variable = any(flag.variable for flag in flags)
    titles = ["flag", *(["variable"] if has_variable else []), "default", "meaning"]
    rows = []
    for flag in flags:
        usage, variable, default = (
            f"`{text}`" if text else "" for text in (flag.usage, flag.variable, flag.default)
        )
        rows.append([usage, *([variable] if has_variable else []), default, flag.meaning])
    return table(titles, rows)


def section(of: Command, common: set[str], described: dict[str, str]) -> str:
    """The section of a command. ``described``: groups of flags with the command that has them."""
    text = f"## {of.name}\n\n{text_of(of.about)}\n\n```text\n{of.usage}\n```\n\n"
    for heading, flags in of.flags.items():
        own = [flag for flag in flags if flag.usage not in common]
        if not own:
            continue
        flags_text = flag_table(own)
        named = heading not in ("Options", "Arguments")
        text += f"**{heading}**" if named else ""
        if (other := described.setdefault(flags_text, of.name)) != of.name and named:
            text += f": those of [{other}](#{slug(other)}).\n\n"
        else:
            text += ("\n\n" if named else "") + flags_text + "\n"
    return text + (text_of(of.after) + "\n\n" if of.after.strip() else "")


def part(program: str) -> str:
    top = command(program)
    every = list(top.with_commands())
    # The flags of the program are also those of each of its subcommands.
    usages = [{flag.usage for flags in of.flags.values() for flag in flags} for of in every]
    common = set.intersection(*usages)
    text = ""
    if common:
        # The first command may have longer texts for `--help`.
        flags = {flag.usage: flag for of in every for group in of.flags.values() for flag in group}
        shared = [flag for usage, flag in flags.items() if usage in common]
        text += "Every command has these flags:\n\n" + flag_table(shared) + "\n"
    described: dict[str, str] = {}
    return text + "".join(section(of, common, described) for of in every)


def configuration() -> str:
    """The keys of the configuration file: those of the flags, except of `--config` and `--json`."""
    roles = {of.name.split()[-1]: of for of in command("zeroshard-server").commands}
    groups = roles["shard"].flags
    shared = {flag.usage for heading in ("All servers", "Access") for flag in groups[heading]}
    sections = {"common": roles["shard"]}
    sections |= {name: roles[name] for name in ("coordinator", "shard", "all")}
    text = ""
    for name, role in sections.items():
        rows = []
        for flag in (flag for flags in role.flags.values() for flag in flags):
            key = flag.usage.split()[0].removeprefix("--")
            if key not in ("config", "json") and (flag.usage in shared) == (name == "common"):
                default = f"`{flag.default}`" if flag.default else ""
                rows.append([f"`{key.replace('-', '_')}`", default, flag.meaning])
        text += f"## [{name}]\n\n" + table(["key", "default", "meaning"], rows) + "\n"
    return text

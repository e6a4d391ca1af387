"""The shell commands in the documentation exist, with their flags, variables and files.

Commands of ZeroShard are compared with ``--help``. Of other programs only the files and directories
of this repository are checked.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from programs import PROGRAMS, ROOT, help_of

sys.path.insert(0, str(ROOT / "tests" / "python"))
from pages import Block, blocks

OURS = {*PROGRAMS, "zs-bench"}
#: Programs of others, which may be installed or not where the tests run.
OTHERS = frozenset(
    "apt-get awk cat cd chmod chown cp curl deactivate docker echo etcdctl git grep head helm "
    "install jq journalctl kill kubectl ls maturin mkdir mv npm openssl pip pkill promtool pytest "
    "python python3 rm sed sha256sum sleep source ssh sudo systemctl tar tee torchrun touch tr "
    "true vllm wget zeroshard".split()
)
#: Words of the shell before a command.
KEYWORDS = {"!", "do", "done", "else", "fi", "if", "then", "until", "while", "{", "}", "break"}
#: The first parts of paths in this repository.
TOP = {path.name for path in ROOT.iterdir()} - {"target"}
#: Where a variable that is no flag's is read.
READERS = ("client", "deploy", "tests/run")


def lines(block: Block) -> Iterator[str]:
    """The lines of a block, with those that continue others joined to them."""
    yield from block.text.replace("\\\n", " ").splitlines()


def commands(line: str) -> Iterator[list[str]]:
    """The commands in a line, each as a list of words."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;()<>")
    lexer.whitespace_split = True
    command: list[str] = []
    skips = False
    for word in lexer:
        if re.fullmatch(r"[|&;()]+", word):
            # `name() {` defines a function.
            if command and word != "()":
                yield command
            command = []
        elif re.fullmatch(r"[<>|&]+", word):
            skips = True
        elif skips or (not command and word in KEYWORDS):
            skips = False
        else:
            command.append(word)
    if command:
        yield command


def missing_flags(program: str, words: Sequence[str]) -> Iterator[str]:
    """What a program of ours does not have of a command."""
    path: list[str] = []
    while words and words[0] in help_of(program, *path).commands:
        path, words = [*path, words[0]], words[1:]
    has = help_of(program, *path)
    if has.commands and words and not words[0].startswith(("-", "$")):
        yield f"{program} has no command {' '.join([*path, words[0]])}"
        return
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in has.flags:
            yield f"{' '.join([program, *path])} has no flag {flag}"


def missing_variable(name: str) -> Iterator[str]:
    """A variable of ZeroShard that nothing reads."""
    if not name.startswith("ZEROSHARD_"):
        return
    servers = [("zeroshard-server", of) for of in ("coordinator", "shard")]
    if any(name in help_of(*of).variables for of in (*servers, ("zeroshard-worker", "train"))):
        return
    found = subprocess.run(["git", "grep", "-qw", name, "--", *READERS], cwd=ROOT, check=False)
    if found.returncode:
        yield f"nothing reads the variable {name}"


def missing_paths(words: Sequence[str]) -> Iterator[str]:
    """The files of this repository that a command names, and that do not exist."""
    for word in words:
        if word.removeprefix("./").split("/")[0] in TOP and "/" in word:
            path = word.removeprefix("./")
            if not any(ROOT.glob(path)) and not path.startswith("deploy/secrets"):
                yield f"{path} does not exist"


def mistakes(command: list[str]) -> Iterator[str]:
    """What is wrong with a command."""
    if command[0] == "for":
        return
    while command and (match := re.fullmatch(r"(\w+)=.*", command[0], re.DOTALL)):
        yield from missing_variable(match[1])
        command = command[1:]
    if not command:
        return
    program, words = command[0], command[1:]
    yield from missing_paths(command)
    if program == "export":
        for word in words:
            yield from missing_variable(word.partition("=")[0])
    elif program == "cargo":
        yield from cargo(words)
    elif (ROOT / program).is_file():
        if (
            program == "tests/run"
            and words
            and f"= {words[0]} ]" not in (ROOT / program).read_text()
        ):
            yield f"tests/run has no topic {words[0]}"
    elif Path(program).name in OURS:
        yield from missing_flags(Path(program).name, words)
    elif program in OTHERS:
        # `docker compose exec coordinator zsctl status` and `kubectl exec ... -- zsctl status`.
        for number, word in enumerate(words):
            if word in OURS and program in ("docker", "kubectl"):
                yield from missing_flags(word, words[number + 1 :])
    else:
        yield f"{program} is neither a program of ours nor in OTHERS"


def cargo(words: list[str]) -> Iterator[str]:
    """`cargo run --bin PROGRAM -- ARGUMENTS`, or a build."""
    own, arguments = words, []
    if "--" in words:
        split = words.index("--")
        own, arguments = words[:split], words[split + 1 :]
    if "--bin" in own:
        program = own[own.index("--bin") + 1]
        if program not in OURS:
            yield f"there is no program {program}"
        elif own[0] == "run":
            yield from missing_flags(program, arguments)


@pytest.mark.parametrize("block", blocks("sh", "bash", "console"), ids=str)
def test_commands_exist_with_their_flags(block: Block) -> None:
    if block.kind.startswith("none, "):
        pytest.skip(block.kind.removeprefix("none, "))
    found = []
    for number, line in enumerate(lines(block), block.line + 1):
        for command in commands(line):
            found += [f"{block.page}:{number}: {what}" for what in mistakes(command)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("zsctl statuses", "zsctl has no command statuses"),
        ("target/release/zsctl checkpoint ls --urls x", "zsctl checkpoint ls has no flag --urls"),
        ("sleep 1 && zeroshard-server shard --no-such 1", "zeroshard-server shard has no flag"),
        ("cargo run --bin zeroshard-worker -- train --no-such", "has no flag --no-such"),
        ("docker compose exec coordinator zsctl why --no-such", "zsctl why has no flag"),
        ("export ZEROSHARD_NO_SUCH=1", "nothing reads the variable ZEROSHARD_NO_SUCH"),
        ("deploy/no-such.sh", "deploy/no-such.sh does not exist"),
        ("tests/run no-such", "tests/run has no topic no-such"),
        ("no-such-program x", "is neither a program of ours"),
    ],
)
def test_mistakes_in_commands_are_found(line: str, expected: str) -> None:
    (command, *others) = list(commands(line))[::-1]
    assert not [what for other in others for what in mistakes(other)]
    assert any(expected in what for what in mistakes(command))

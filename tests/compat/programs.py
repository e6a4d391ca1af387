"""Trains with the programs of the last release and those of this tree together.

    python3 tests/compat/programs.py [--tag TAG]

Builds the programs of the tag in target/released. If both have the same minor version,
coordinators, shard servers and workers of both must work together, whoever is which, and give the
same bits; otherwise they must refuse each other. In both cases this tree must continue from a
checkpoint of the release. Needs the programs of this tree in target/try.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
RELEASED = TARGET / "released"
STEPS = 12
#: Seconds that a training may take. It takes about five.
LIMIT = 300


def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def last_release() -> str | None:
    """The last tag before this commit."""
    tags = git("tag", "--merged", "HEAD^", "--sort=-version:refname", "--list", "v*").split()
    return tags[0] if tags else None


def build(tag: str) -> Path:
    """Builds the programs of a tag. Returns their directory."""
    tree = RELEASED / "tree"
    if tree.exists():
        git("worktree", "remove", "--force", str(tree))
    git("worktree", "add", "--quiet", "--detach", str(tree), tag)
    command = ["cargo", "build", "--locked", "--profile", "try"]
    command += ["--bin", "zeroshard-server", "--bin", "zeroshard-worker"]
    target = RELEASED / "target"
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target)}
    subprocess.run(command, cwd=tree, env=environment, check=True)
    git("worktree", "remove", "--force", str(tree))
    return target / "try"


@contextlib.contextmanager
def server(programs: Path, *arguments: str) -> Iterator[str]:
    """Runs a server. Returns its address."""
    command = [str(programs / "zeroshard-server"), *arguments]
    command += ["--listen", "127.0.0.1:0", "--admin-listen", "off", "--json", "--log", "error"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.kill()
        process.communicate()


def train(coordinator: Path, shards: Sequence[Path], ranks: Sequence[Path], *arguments: str) -> str:
    """Trains with these programs. Returns the hash of the whole state."""
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(server(coordinator, "coordinator"))
        for programs in shards:
            stack.enter_context(server(programs, "shard", "--coordinator", address))
        out = stack.enter_context(tempfile.TemporaryDirectory())
        workers = []
        for rank, programs in enumerate(ranks):
            command = [str(programs / "zeroshard-worker"), "train", "--address", address]
            command += ["--rank", str(rank), "--data-parallel", str(len(ranks)), "--json"]
            command += ["--data", str(ROOT / "docs"), "--out", f"{out}/{rank}", "--width", "32"]
            command += ["--job", "train", "--shards", str(len(shards)), "--batch", "4"]
            command += ["--steps", str(STEPS), *arguments]
            workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        said = [worker.communicate(timeout=LIMIT)[0] for worker in workers]
        if failed := [worker.args for worker in workers if worker.returncode]:
            raise SystemExit(f"failed: {failed[0]}")
    done = [json.loads(line) for text in said for line in text.splitlines() if '"done"' in line]
    [found] = {event["state_hash"] for event in done if event["state_hash"]}
    return str(found)


def continued(old: Path, new: Path) -> str:
    """Trains with the release, and runs the second half again with this tree."""
    with tempfile.TemporaryDirectory() as directory:
        saves = ["--checkpoint", f"file://{directory}"]
        saves += ["--checkpoint-every", str(STEPS // 2), "--checkpoint-keep", "0"]
        train(old, [old, old], [old, old], *saves)
        shutil.rmtree(Path(directory) / "train" / f"{STEPS:020}")
        return train(new, [new], [new, new], *saves)


def minor(programs: Path) -> str:
    """The major and the minor version of programs."""
    command = [str(programs / "zeroshard-server"), "--version"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return ".".join(said.split()[1].split(".")[:2])


def is_refused(coordinator: Path, shard: Path) -> bool:
    """Whether a coordinator refuses a shard server of another version, which says why and dials
    again."""
    command = [str(shard / "zeroshard-server"), "shard", "--listen", "127.0.0.1:0"]
    command += ["--admin-listen", "off", "--log", "warn"]
    with server(coordinator, "coordinator") as address:
        command += ["--coordinator", address]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        limit = threading.Timer(LIMIT, process.kill)
        limit.start()
        try:
            assert process.stderr is not None
            said = next((line for line in process.stderr if "work together only if" in line), "")
        finally:
            limit.cancel()
            process.kill()
            process.communicate()
    print(said.strip() or "no refusal")
    return bool(said)


def compare(tag: str) -> int:
    old, new = build(tag), TARGET / "try"
    expected = train(new, [new, new], [new, new])
    runs = {f"{tag} alone": lambda: train(old, [old, old], [old, old])}
    is_equal = True
    if minor(old) == minor(new):
        runs[f"coordinator of {tag}"] = lambda: train(old, [old, new], [new, old])
        runs["coordinator of this tree"] = lambda: train(new, [new, old], [old, new])
    else:
        is_equal = is_refused(old, new) and is_refused(new, old)
    runs[f"checkpoint of {tag}"] = lambda: continued(old, new)
    for name, run in runs.items():
        found = run()
        print(f"{name}: {'the same bits' if found == expected else f'{found}, not {expected}'}")
        is_equal &= found == expected
    return 0 if is_equal else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", help="compare with this tag or commit; default: the last release")
    tag = parser.parse_args().tag or last_release()
    if tag is None:
        print("there is no release before this commit")
        sys.exit()
    sys.exit(compare(tag))

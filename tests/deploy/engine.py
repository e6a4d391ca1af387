"""A container engine of its own for the tests, and Compose."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from programs import DEPLOY

#: Seconds that the engine may take to start, and to stop.
START, STOP = 60, 30


class Unavailable(Exception):
    """The engine cannot start on this machine. The message says why."""


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """Runs dockerd with directories of its own, and sets ``DOCKER_HOST``.

    Containers, images and networks are gone at the end.

    Raises:
        Unavailable: the engine cannot start.
    """
    if os.geteuid() != 0:
        raise Unavailable("dockerd has to be started by root")
    if not shutil.which("dockerd"):
        raise Unavailable("dockerd is not installed")
    # The path of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="zeroshard-docker-"))
    # The name of the folder may have characters that those of containerd may not have.
    name = f"zeroshard-{secrets.token_hex(4)}"
    socket = f"unix://{folder}/docker.sock"
    command = ["dockerd", "--host", socket, "--data-root", folder / "data"]
    command += ["--exec-root", folder / "exec", "--pidfile", folder / "pid"]
    # The names keep it apart from another engine on this machine.
    command += ["--containerd-namespace", name, "--containerd-plugins-namespace"]
    # Compose creates a network of its own.
    command += [f"{name}-plugins", "--bridge", "none"]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    previous = os.environ.get("DOCKER_HOST")
    os.environ["DOCKER_HOST"] = socket
    try:
        _wait(process, folder / "log")
        yield
    finally:
        _stop(process)
        if previous is None:
            del os.environ["DOCKER_HOST"]
        else:
            os.environ["DOCKER_HOST"] = previous
        for mount in _mounts(folder):
            subprocess.run(["umount", "--lazy", mount], check=False)
        shutil.rmtree(folder)


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START
    while subprocess.run(["docker", "info"], capture_output=True).returncode != 0:
        if process.poll() is not None:
            lines = log.read_text().splitlines()
            raise Unavailable("dockerd ended: " + (lines[-1] if lines else "without a message"))
        if time.monotonic() > end:
            raise Unavailable(f"dockerd has not answered for {START} s")
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Removes all containers, and ends the engine."""
    if process.poll() is None:
        for remaining in docker("ps", "--all", "--quiet", check=False).split():
            docker("rm", "--force", "--volumes", remaining, check=False)
        for network in docker(
            "network", "ls", "--quiet", "--filter", "type=custom", check=False
        ).split():
            docker("network", "rm", network, check=False)
        process.terminate()
        try:
            process.wait(STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _mounts(folder: Path) -> list[str]:
    """What is still mounted below a directory, the innermost first."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    return sorted((path for path in mounted if path.startswith(f"{folder}/")), reverse=True)


def docker(*arguments: str, check: bool = True) -> str:
    """Runs the client, and returns what it prints on standard output."""
    process = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    assert not check or process.returncode == 0, process.stderr
    return process.stdout.strip()


class Project:
    """The services of the compose files."""

    def __init__(self, *files: str, environment: dict[str, str]) -> None:
        # docker-compose is version 1, or a wrapper of version 2.
        program = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        self.command = [*program, "--project-name", "zeroshard-test"]
        for file in files:
            self.command += ["--file", str(DEPLOY / file)]
        self.environment = {**os.environ, **environment}

    def run(self, *arguments: str) -> str:
        """Runs Compose, and returns what it prints on standard output."""
        process = subprocess.run(
            [*self.command, *arguments], capture_output=True, text=True, env=self.environment
        )
        assert process.returncode == 0, process.stderr
        return process.stdout.strip()

    def container(self, service: str) -> str:
        """The id of a service's container, also of one that has ended."""
        label = "com.docker.compose"
        filters = [f"label={label}.project=zeroshard-test", f"label={label}.service={service}"]
        arguments = [f"--filter={one}" for one in filters]
        return docker("ps", "--all", "--quiet", "--no-trunc", *arguments)

    def inspect(self, service: str, field: str) -> str:
        """A field of ``docker inspect``, as JSON."""
        return docker("inspect", "--format", "{{json " + field + "}}", self.container(service))

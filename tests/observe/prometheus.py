"""A Prometheus server with the configuration of `deploy/prometheus`, and its HTTP API."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
#: Seconds that Prometheus may take to start and to answer.
TIMEOUT = 20


def get(url: str, token: str | None = None) -> str:
    """Returns the text at a URL, which is requested with a token if there is one."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        return str(response.read().decode())


class Prometheus:
    """A running server, and its Alertmanager."""

    def __init__(self, address: str, alertmanager: str) -> None:
        self.address = address
        self.alertmanager = alertmanager

    def api(self, path: str, **parameters: str) -> Any:
        """The data of an answer.

        Raises:
            AssertionError: with the message of Prometheus, if it refuses the request.
        """
        query = urllib.parse.urlencode(parameters)
        try:
            answer = json.loads(get(f"http://{self.address}/api/v1/{path}?{query}"))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        return answer["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an expression at this moment."""
        result = self.api("query", query=expr)
        assert result["resultType"] == "vector", result
        return list(result["result"])

    def rules(self) -> list[dict[str, Any]]:
        """All alert rules, with their health and their alerts."""
        return [rule for group in self.api("rules")["groups"] for rule in group["rules"]]

    def alerts(self, state: str) -> set[str]:
        """The names of the alerts in this state."""
        alerts = self.api("alerts")["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == state}

    def received(self) -> set[str]:
        """The names of the alerts that Alertmanager has received."""
        alerts = json.loads(get(f"http://{self.alertmanager}/api/v2/alerts"))
        return {alert["labels"]["alertname"] for alert in alerts}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def configuration(directory: Path, token: str) -> Path:
    """Copies the configuration to a new directory, with a file that contains the token."""
    shutil.copytree(DEPLOY / "prometheus", directory)
    shutil.copy(DEPLOY / "helm" / "zeroshard" / "files" / "alerts.yml", directory)
    (directory / "token").write_text(token)
    path = directory / "prometheus.yml"
    text = path.read_text()
    file = "/run/secrets/token"
    assert file in text
    path.write_text(text.replace(file, "token"))
    return path


def _configure(path: Path, targets: Mapping[str, Sequence[str]], alertmanager: str) -> None:
    """Sets the targets of a configuration, and its intervals to one second."""
    directory = path.parent
    for role, addresses in targets.items():
        # JSON is YAML.
        listed = json.dumps([{"targets": list(addresses)}])
        (directory / "targets" / f"{role}.yml").write_text(listed)
    text = path.read_text()
    for found, replacement in [
        ("scrape_interval: 5s", "scrape_interval: 1s"),
        ("scrape_timeout: 4s", "scrape_timeout: 1s"),
        ("evaluation_interval: 5s", "evaluation_interval: 1s"),
        ("alertmanager:9093", alertmanager),
    ]:
        assert found in text, found
        text = text.replace(found, replacement)
    path.write_text(text)


@contextlib.contextmanager
def _running(command: Sequence[str], address: str) -> Iterator[None]:
    """Runs a server until it is not needed any more. Returns when it is ready."""
    process = subprocess.Popen([*command, f"--web.listen-address={address}", "--log.level=warn"])
    try:
        end = time.monotonic() + TIMEOUT
        while True:
            with contextlib.suppress(OSError):
                get(f"http://{address}/-/ready")
                break
            assert process.poll() is None and time.monotonic() < end, f"{command} has not started"
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(TIMEOUT)


@contextlib.contextmanager
def prometheus(
    directory: Path, targets: Mapping[str, Sequence[str]], token: str
) -> Iterator[Prometheus]:
    """Runs Prometheus and Alertmanager with the files in `directory`, which must not exist.
    `targets` contains the admin addresses, by the name of the file in `deploy/prometheus/targets`.
    `token` is the token of the cluster."""
    address, alertmanager = (f"127.0.0.1:{_free_port()}" for _ in range(2))
    config = configuration(directory, token)
    _configure(config, targets, alertmanager)
    receiver = ["prometheus-alertmanager", f"--config.file={directory / 'alertmanager.yml'}"]
    receiver += [f"--storage.path={directory / 'alertmanager'}", "--cluster.listen-address="]
    server = ["prometheus", f"--config.file={config}"]
    server += [f"--storage.tsdb.path={directory / 'data'}"]
    with _running(receiver, alertmanager), _running(server, address):
        yield Prometheus(address, alertmanager)

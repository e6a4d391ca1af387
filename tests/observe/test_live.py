"""A real Prometheus scrapes a real cluster that trains: every panel has data, every alert rule is
evaluated, and the loss of a server fires its alert."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path

import documents
from prometheus import Prometheus, get, prometheus
from training import JOB, TOKEN, tiers, training

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "python"))
import servers

#: Seconds in which every panel must have data. Rates need two samples.
DATA = 45
#: Seconds in which the loss of a server must fire its alert.
LOSS = 60

#: Panels without data in this cluster, and the reason.
WITHOUT_DATA = {
    "Memory of each GPU": "the servers compute on the CPU",
    "Copies": "the servers compute on the CPU",
    "Time in kernels": "the servers compute on the CPU",
}
#: Panels that have data after the loss of a server.
AFTER_A_LOSS = {"Time without all replicas"}
#: Families without series in this cluster, and the reason.
WITHOUT_SERIES = {
    "zeroshard_certificate_expiry_timestamp_seconds": "the servers have no certificates",
    "zeroshard_device_memory_bytes": "the servers compute on the CPU",
    "zeroshard_device_copied_bytes_total": "the servers compute on the CPU",
    "zeroshard_device_kernel_seconds_total": "the servers compute on the CPU",
}


def until(what: str, seconds: float, found: Callable[[], object]) -> None:
    """Waits until `found` returns nothing that is missing.

    Raises:
        AssertionError: with what is still missing.
    """
    end = time.monotonic() + seconds
    while missing := found():
        assert time.monotonic() < end, f"{what}, after {seconds} s still missing: {missing}"
        time.sleep(0.5)


def has_data(found: Prometheus, expr: str, instance: str) -> bool:
    """Returns whether an expression of a panel has a value that is a number."""
    for variable, value in [
        ("$__rate_interval", "10s"),
        ("$__range", "5m"),
        ("$instance", instance),
        ("$job", JOB),
    ]:
        expr = expr.replace(variable, value)
    assert not re.search(r"\$[a-z_]", expr), expr
    return any(not math.isnan(float(series["value"][1])) for series in found.query(expr))


def expressions(only: Callable[[str], bool]) -> list[tuple[str, str, str]]:
    """The dashboard, the title and each expression of the panels whose title is selected."""
    return [
        (dashboard.title, panel.title, query.expr)
        for dashboard in documents.dashboards.DASHBOARDS
        for panel in dashboard.panels()
        for query in panel.queries
        if only(panel.title)
    ]


class Live(unittest.TestCase):
    def test_prometheus_sees_a_cluster_and_the_loss_of_a_server(self) -> None:
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            running = servers.observed_servers([tiers(directory), [], []], TOKEN)
            address, (coordinator, *shards), processes = stack.enter_context(running)
            stack.enter_context(training(address, directory))
            targets = {"coordinators": [coordinator], "shards": shards}
            found = stack.enter_context(prometheus(directory / "prometheus", targets, TOKEN))
            self.check_panels(found, shards[0])
            self.check_rules(found)
            self.check_families([coordinator, *shards])
            self.assertEqual(found.alerts("firing"), set())
            began = time.monotonic()
            processes[2].kill()
            self.check_loss(found, shards[0])
            print(f"the alerts fired {time.monotonic() - began:.0f} s after the loss of a server")

    def check_panels(self, found: Prometheus, instance: str) -> None:
        """Each expression of each panel has a value."""
        wanted = expressions(lambda title: title not in WITHOUT_DATA | dict.fromkeys(AFTER_A_LOSS))

        def missing() -> list[tuple[str, str, str]]:
            return [of for of in wanted if not has_data(found, of[2], instance)]

        until("panels with data", DATA, missing)
        for dashboard, title, expr in expressions(lambda title: title in WITHOUT_DATA):
            with self.subTest(f"{dashboard}: {title}"):
                self.assertFalse(has_data(found, expr, instance), "it has data now")

    def check_rules(self, found: Prometheus) -> None:
        """Each alert rule is evaluated without an error."""
        until(
            "rules that are evaluated",
            DATA,
            lambda: [rule["name"] for rule in found.rules() if rule["health"] == "unknown"],
        )
        self.assertTrue(found.rules())
        for rule in found.rules():
            with self.subTest(rule["name"]):
                self.assertEqual((rule["health"], rule.get("lastError")), ("ok", None))

    def check_families(self, addresses: list[str]) -> None:
        """The processes show what docs/reference/metrics.md says, and all of it."""
        shown: dict[str, tuple[str, str]] = {}
        for address in addresses:
            help_texts: dict[str, str] = {}
            for line in get(f"http://{address}/metrics", TOKEN).splitlines():
                mark, keyword, name, *text = [*line.split(" ", 3), "", ""][:4]
                if mark == "#" and keyword == "HELP":
                    help_texts[name] = text[0]
                elif mark == "#" and keyword == "TYPE" and name.startswith("zeroshard_"):
                    shown[name] = (text[0], help_texts[name])
        # A mirror has a port of its own, which tests/tests/cluster/mirrors.rs reads.
        of_servers = [of for of in documents.metrics() if "_mirror_" not in of.name]
        table = {of.name: (of.kind, of.meaning) for of in of_servers}
        self.assertEqual(shown, {name: of for name, of in table.items() if name in shown})
        self.assertEqual(set(table) - set(shown), set(WITHOUT_SERIES))

    def check_loss(self, found: Prometheus, instance: str) -> None:
        """The alerts of a lost server fire, the job gets its replicas back and continues."""
        expected = {"ZeroShardServerLost", "ZeroShardTargetDown"}
        until("firing alerts", LOSS, lambda: expected - found.alerts("firing"))
        until("alerts in Alertmanager", LOSS, lambda: expected - found.received())
        wanted = expressions(lambda title: title in AFTER_A_LOSS)
        until(
            "panels with data after the loss",
            DATA,
            lambda: [of for of in wanted if not has_data(found, of[2], instance)],
        )
        steps = f'rate(zeroshard_job_steps_total{{job="{JOB}",outcome="applied"}}[5s]) > 0'
        until("steps after the loss", DATA, lambda: not found.query(steps))
        # The coordinator gives up a save for which it waits for the lost server.
        given_up = f'zeroshard_job_checkpoints_total{{job="{JOB}",outcome="failed"}} > 0'
        of_saves = {"ZeroShardCheckpointFailed"} if found.query(given_up) else set()
        self.assertEqual(found.alerts("firing") - of_saves, expected)


if __name__ == "__main__":
    os.environ.setdefault("CARGO_TARGET_DIR", str(ROOT / "target"))
    unittest.main()

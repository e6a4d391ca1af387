"""The files of `deploy/`: dashboards, alerts, runbook, and the table of the metrics."""

from __future__ import annotations

import re
import subprocess
import tempfile
import unittest
from pathlib import Path

import documents
import prometheus


def run(*command: str) -> None:
    """Runs a checker in the directory of Prometheus' files."""
    ran = subprocess.run(
        command, cwd=documents.DEPLOY / "prometheus", capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


class Files(unittest.TestCase):
    def test_dashboards_are_the_output_of_their_generator(self) -> None:
        written = set(documents.dashboards.FILES.glob("*.json"))
        expected = {documents.dashboards.path(of) for of in documents.dashboards.DASHBOARDS}
        self.assertEqual(written, expected)
        for dashboard in documents.dashboards.DASHBOARDS:
            with self.subTest(dashboard.title):
                text = documents.dashboards.path(dashboard).read_text()
                self.assertEqual(
                    text,
                    documents.dashboards.text(dashboard),
                    "run: python3 deploy/grafana/dashboards.py",
                )

    def test_panels_have_places_of_their_own_and_say_what_they_show(self) -> None:
        for dashboard in documents.dashboards.DASHBOARDS:
            titles = [panel.title for panel in dashboard.panels()]
            self.assertTrue(all(panel.description for panel in dashboard.panels()))
            self.assertEqual(len(titles), len(set(titles)), f"{dashboard.title}: {titles}")
            taken: set[tuple[int, int]] = set()
            for panel in dashboard.json()["panels"]:
                place = panel["gridPos"]
                self.assertLessEqual(place["x"] + place["w"], 24)
                columns = range(place["x"], place["x"] + place["w"])
                rows = range(place["y"], place["y"] + place["h"])
                cells = {(x, y) for x in columns for y in rows}
                self.assertFalse(taken & cells, f"{dashboard.title}: {panel['title']}")
                taken |= cells

    def test_timelines_have_a_word_and_a_colour_for_each_value(self) -> None:
        """A failed job is red and says so, and each state of a job has a word."""
        states = set()
        for panel in (of for all in documents.dashboards.DASHBOARDS for of in all.panels()):
            if panel.kind != "state-timeline":
                continue
            with self.subTest(panel.title):
                defaults = panel.json(1, 0, 0)["fieldConfig"]["defaults"]
                (mapping,) = defaults["mappings"]
                words = {of["text"]: of["color"] for of in mapping["options"].values()}
                bad = words.keys() & {"failed", "disconnected"}
                good = words.keys() & {"open", "connected"}
                self.assertEqual([words[of] for of in (*bad, *good)], ["red", "green"])
                for number, word in panel.words.items():
                    for query in (of for of in panel.queries if "job_state" in of.expr):
                        label = f'state="{word.text}"'
                        self.assertRegex(query.expr, rf"\b{number} \* \([^(]+{label}")
                        states.add(word.text)
        source = documents.DEPLOY.parent / "server/coordinator/src/operators/metrics_view.rs"
        labels = re.findall(r"Self::\w+ => \"([a-z]+)\"", source.read_text())
        self.assertEqual(states, set(labels))

    def test_dashboards_and_alerts_use_metrics_that_exist(self) -> None:
        known = {name for of in documents.metrics() for name in of.series()}
        texts = [documents.ALERTS.read_text(), documents.RUNBOOK.read_text()]
        texts += [documents.dashboards.text(of) for of in documents.dashboards.DASHBOARDS]
        for text in texts:
            used = set(re.findall(r"\bzeroshard_\w+", text))
            self.assertLessEqual(used, known)

    def test_each_alert_has_an_entry_in_the_runbook(self) -> None:
        alerts = re.findall(r"- alert: (\w+)", documents.ALERTS.read_text())
        headings = re.findall(r"^## (\w+)$", documents.RUNBOOK.read_text(), re.MULTILINE)
        self.assertEqual(sorted(alerts), sorted(headings))
        links = re.findall(
            r"runbook_url: \S+/docs/operate/runbook.md#(\w+)", documents.ALERTS.read_text()
        )
        self.assertEqual(links, [alert.lower() for alert in alerts])

    def test_each_alert_has_a_test(self) -> None:
        alerts = re.findall(r"- alert: (\w+)", documents.ALERTS.read_text())
        tests = (documents.DEPLOY / "prometheus" / "alerts_test.yml").read_text()
        self.assertEqual([alert for alert in alerts if alert not in tests], [])

    def test_the_tools_of_prometheus_accept_the_files(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            path = prometheus.configuration(Path(directory) / "prometheus", "a-token")
            run("promtool", "check", "config", str(path))
        run("promtool", "check", "rules", str(documents.ALERTS))
        run("promtool", "test", "rules", "alerts_test.yml")
        run("amtool", "check-config", "alertmanager.yml")

    def test_grafana_reads_the_dashboards_where_compose_puts_them(self) -> None:
        provider = documents.DEPLOY / "grafana/provisioning/dashboards/zeroshard.yaml"
        directory = re.search(r"path: (\S+)", provider.read_text())
        assert directory is not None
        self.assertEqual(Path(directory[1]), Path("/var/lib/grafana/dashboards"))


if __name__ == "__main__":
    unittest.main()

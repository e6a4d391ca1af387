"""The files that describe metrics and alerts, as data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
ALERTS = DEPLOY / "helm" / "zeroshard" / "files" / "alerts.yml"
RUNBOOK = ROOT / "docs" / "operate" / "runbook.md"
METRICS = ROOT / "docs" / "reference" / "metrics.md"

sys.path.insert(0, str(DEPLOY / "grafana"))
import dashboards

__all__ = ["ALERTS", "DEPLOY", "METRICS", "RUNBOOK", "Metric", "dashboards", "metrics"]


@dataclass(frozen=True)
class Metric:
    """A row of the table in docs/reference/metrics.md."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str

    def series(self) -> Iterator[str]:
        """The names of its series."""
        yield self.name
        if self.kind == "histogram":
            yield from (self.name + end for end in ("_bucket", "_sum", "_count"))


def metrics() -> list[Metric]:
    """The rows of the table in docs/reference/metrics.md."""
    rows = [line for line in METRICS.read_text().splitlines() if line.startswith("| `")]
    found = []
    for row in rows:
        name, kind, labels, _, meaning = (cell.strip() for cell in row.strip("|").split("|"))
        names = tuple(label.strip("` ") for label in labels.split(",") if label)
        found.append(Metric(name.strip("`"), kind, names, meaning))
    assert found, "the table is missing"
    return found

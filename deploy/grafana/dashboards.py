"""The dashboards of ZeroShard. Writes the files `dashboards/*.json` of the Helm chart:

python3 deploy/grafana/dashboards.py

A test checks that the JSON files are the output of this program. Change the program, not the files.
"""

from __future__ import annotations

import json
from pathlib import Path

from cluster_dashboard import CLUSTER
from job_dashboard import JOB
from panels import Dashboard
from server_dashboard import SERVER

# Helm reads files only below the directory of its chart.
FILES = Path(__file__).resolve().parents[1] / "helm" / "zeroshard" / "files" / "dashboards"
DASHBOARDS = (CLUSTER, JOB, SERVER)


def text(dashboard: Dashboard) -> str:
    """The content of the file of a dashboard."""
    return json.dumps(dashboard.json(), indent=2) + "\n"


def path(dashboard: Dashboard) -> Path:
    """The file of a dashboard."""
    return FILES / f"{dashboard.uid.removeprefix('zeroshard-')}.json"


if __name__ == "__main__":
    for one in DASHBOARDS:
        path(one).write_text(text(one))

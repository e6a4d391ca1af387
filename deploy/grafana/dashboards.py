"""The dashboards of ZeroShard. Writes `dashboards/*.json`:

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

HERE = Path(__file__).resolve().parent
DASHBOARDS = (CLUSTER, JOB, SERVER)


def text(dashboard: Dashboard) -> str:
    """The content of the file of a dashboard."""
    return json.dumps(dashboard.json(), indent=2) + "\n"


def path(dashboard: Dashboard) -> Path:
    """The file of a dashboard."""
    return HERE / "dashboards" / f"{dashboard.uid.removeprefix('zeroshard-')}.json"


if __name__ == "__main__":
    for one in DASHBOARDS:
        path(one).write_text(text(one))

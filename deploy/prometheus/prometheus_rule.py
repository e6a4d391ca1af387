"""Writes the alerts as a PrometheusRule, from `alerts.yml` of the Helm chart:

python3 deploy/prometheus/prometheus_rule.py

A test checks that the rule is the output of this program. Change alerts.yml, not the rule.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[1]
ALERTS = DEPLOY / "helm" / "zeroshard" / "files" / "alerts.yml"
RULE = DEPLOY / "k8s" / "components" / "alerts" / "prometheus-rule.yaml"

HEAD = """\
# Written by deploy/prometheus/prometheus_rule.py from alerts.yml of the Helm chart. Do not edit.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: zeroshard
  labels: {app.kubernetes.io/name: zeroshard}
spec:
"""


def text() -> str:
    """The content of the file of the PrometheusRule."""
    _, groups, rules = ALERTS.read_text().partition("groups:\n")
    return HEAD + textwrap.indent(groups + rules, "  ")


if __name__ == "__main__":
    RULE.write_text(text())

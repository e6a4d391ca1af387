"""Dashboards of Grafana as data: panels, rows, variables, and their conversion to JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: A JSON object.
Json = dict[str, Any]
Kind = Literal["timeseries", "stat", "bargauge", "heatmap", "state-timeline", "table"]

#: The width of a dashboard, in Grafana's units.
COLUMNS = 24
#: The version of the JSON model, of Grafana 10.4. Later versions of Grafana convert it.
SCHEMA = 39
#: The data source that the user selects.
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    """An expression of PromQL, and the name of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Word:
    """The text that stands for a value, and its colour, which is one of Grafana's names."""

    text: str
    color: str


@dataclass(frozen=True)
class Panel:
    """A panel. ``unit`` is a unit of Grafana: ``s``, ``bytes``, ``Bps``, ``ops``, ``short``,
    ``percentunit``. ``red_from``: the value from which a number is red."""

    title: str
    description: str
    queries: Sequence[Query]
    kind: Kind = "timeseries"
    unit: str = "short"
    width: int = 8
    height: int = 8
    stacked: bool = False
    red_from: float | None = None
    #: ``True`` if 0 is red, and everything else is green.
    red_at_zero: bool = False
    #: Words for values, such as ``{1: Word("connected", "green")}``.
    words: Mapping[int, Word] = field(default_factory=dict)

    def json(self, identity: int, x: int, y: int) -> Json:
        """The JSON model at a place of the dashboard."""
        panel: Json = {
            "id": identity,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": self._options(),
            "targets": [self._target(*numbered) for numbered in enumerate(self.queries)],
        }
        if self.kind == "table":
            hidden = {"Time": True, "__name__": True, "Value": True}
            options = {"excludeByName": hidden}
            panel["transformations"] = [{"id": "organize", "options": options}]
        return panel

    def _target(self, number: int, query: Query) -> Json:
        is_instant = self.kind in ("stat", "bargauge", "table")
        formats = {"heatmap": "heatmap", "table": "table"}
        return {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": query.expr,
            "legendFormat": query.legend or "__auto",
            "format": formats.get(self.kind, "time_series"),
            "instant": is_instant,
            "range": not is_instant,
        }

    def _defaults(self) -> Json:
        steps: list[Json] = [{"color": "green", "value": None}]
        if self.red_at_zero:
            steps = [{"color": "red", "value": None}, {"color": "green", "value": 1}]
        elif self.red_from is not None:
            steps.append({"color": "red", "value": self.red_from})
        defaults: Json = {"unit": self.unit, "thresholds": {"mode": "absolute", "steps": steps}}
        if self.kind in ("stat", "bargauge", "state-timeline"):
            # By default, a timeline colours a value by its rank among all values.
            defaults["color"] = {"mode": "thresholds"}
        if self.kind == "timeseries":
            stacking = "normal" if self.stacked else "none"
            defaults["min"] = 0
            defaults["custom"] = {
                "drawStyle": "line",
                "fillOpacity": 30 if self.stacked else 10,
                "lineWidth": 1,
                "showPoints": "never",
                "stacking": {"mode": stacking, "group": "A"},
            }
        if self.kind == "bargauge":
            defaults |= {"min": 0, "max": 1}
        if self.words:
            words = {str(value): asdict(word) for value, word in self.words.items()}
            defaults["mappings"] = [{"type": "value", "options": words}]
        return defaults

    def _options(self) -> Json:
        last = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        match self.kind:
            case "timeseries":
                legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
                return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
            case "stat":
                mode = {"colorMode": "value", "graphMode": "none", "textMode": "auto"}
                return {"reduceOptions": last, **mode}
            case "bargauge":
                return {"reduceOptions": last, "orientation": "horizontal", "displayMode": "basic"}
            case "heatmap":
                return {"calculate": False, "yAxis": {"unit": self.unit}, "legend": {"show": True}}
            case "state-timeline":
                return {"mergeValues": True, "showValue": "auto", "rowHeight": 0.9}
            case "table":
                return {"showHeader": True}


@dataclass(frozen=True)
class Row:
    """A heading and the panels below it."""

    title: str
    panels: Sequence[Panel]
    #: ``True`` if the panels are hidden until the row is opened.
    collapsed: bool = False


@dataclass(frozen=True)
class Variable:
    """A list of values of a label, of which the user selects one."""

    name: str
    label: str
    query: str

    def json(self) -> Json:
        """The JSON model."""
        return {
            "name": self.name,
            "label": self.label,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": self.query, "refId": self.name},
            "refresh": 2,
            "sort": 1,
        }


@dataclass(frozen=True)
class Dashboard:
    """A dashboard. ``uid`` is part of its address."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    variables: Sequence[Variable] = ()

    def panels(self) -> Iterator[Panel]:
        """All panels."""
        for row in self.rows:
            yield from row.panels

    def json(self) -> Json:
        """The JSON model."""
        source = {"name": "datasource", "label": "Prometheus", "type": "datasource"}
        variables = [source | {"query": "prometheus"}, *(of.json() for of in self.variables)]
        link = {"type": "dashboards", "tags": ["zeroshard"], "title": "ZeroShard"}
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["zeroshard"],
            "schemaVersion": SCHEMA,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "links": [link | {"asDropdown": True, "includeVars": True, "keepTime": True}],
            "templating": {"list": variables},
            "panels": list(self._placed()),
        }

    def _placed(self) -> Iterator[Json]:
        """The rows and panels with their places: from left to right, and from top to bottom."""
        y, identity = 0, 0
        for row in self.rows:
            identity += 1
            heading: Json = {
                "id": identity,
                "type": "row",
                "title": row.title,
                "collapsed": row.collapsed,
                "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
                "panels": [],
            }
            x, y, height, placed = 0, y + 1, 0, []
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    x, y, height = 0, y + height, 0
                identity += 1
                placed.append(panel.json(identity, x, y))
                x, height = x + panel.width, max(height, panel.height)
            y += height
            if row.collapsed:
                # Grafana keeps the panels of a closed row inside it.
                heading["panels"], placed, y = placed, [], heading["gridPos"]["y"] + 1
            yield heading
            yield from placed

"""Expressions and panels that several dashboards have."""

from __future__ import annotations

from typing import Any

from panels import Panel, Query, Row, Word

#: The steps that count for the speed of a job.
DECIDED = 'outcome=~"applied|skipped"'

#: The states of a job in the label ``state``, with the colours of their severity.
STATES = {
    1: Word("waiting", "yellow"),
    2: Word("opening", "blue"),
    3: Word("open", "green"),
    4: Word("restoring", "orange"),
    5: Word("recovering", "orange"),
    6: Word("failed", "red"),
}
CONNECTION = {0: Word("disconnected", "red"), 1: Word("connected", "green")}


def state(labels: str) -> str:
    """The state of each selected job, as its number in :data:`STATES`."""
    numbered = (
        f'{number} * (zeroshard_job_state{{{labels}, state="{word.text}"}} == 1)'
        for number, word in STATES.items()
    )
    return f"max by (job) ({' or '.join(numbered)})"


def rate(metric: str, by: str, labels: str = "") -> str:
    """The sum of a counter's rates by these labels."""
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def mean(histogram: str, by: str, labels: str = "") -> str:
    """The mean of a histogram's observations by these labels."""
    return f"{rate(f'{histogram}_sum', by, labels)} / {rate(f'{histogram}_count', by, labels)}"


def quantile(share: float, histogram: str, by: str, labels: str = "") -> str:
    """A quantile of a histogram by these labels."""
    le = "le" if not by else f"le, {by}"
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', le, labels)})"


def number(title: str, description: str, expr: str, **options: Any) -> Panel:
    """A panel with one number."""
    shape: dict[str, Any] = {"kind": "stat", "width": 4, "height": 4}
    return Panel(title, description, [Query(expr, title)], **(shape | options))


def calls(labels: str) -> Row:
    """The panels of the gRPC calls of a selection of processes."""
    failed = f'{labels}, code!="Ok"'.removeprefix(", ")
    return Row(
        "gRPC calls",
        [
            Panel(
                "Completed calls",
                "Calls that ended, by method. Streams of workers and servers count when they end.",
                [Query(rate("zeroshard_requests_total", "method", labels), "{{method}}")],
                unit="ops",
            ),
            Panel(
                "Calls without success",
                "Calls that ended with an error, by code. Cancelled: the caller has left.",
                [Query(f"{rate('zeroshard_requests_total', 'code', failed)} or vector(0)")],
                unit="ops",
            ),
            Panel(
                "Open calls",
                "Calls that have not ended, by method. Pulls, pushes and commits wait for others.",
                [Query(f"sum by (method) (zeroshard_requests_in_flight{{{labels}}})")],
            ),
            Panel(
                "Duration of calls, 99th percentile",
                "To the end of the response, including the wait for other ranks and servers.",
                [Query(quantile(0.99, "zeroshard_request_seconds", "method", labels))],
                unit="s",
                width=24,
            ),
        ],
        collapsed=True,
    )


def processes(labels: str) -> Row:
    """The panels of a selection of processes."""
    return Row(
        "Processes",
        [
            Panel(
                "CPU",
                "Cores in use.",
                [
                    Query(
                        f"rate(process_cpu_seconds_total{{{labels}}}[$__rate_interval])",
                        "{{instance}}",
                    )
                ],
            ),
            Panel(
                "Resident memory",
                "Memory of the process, as the operating system counts it.",
                [Query(f"process_resident_memory_bytes{{{labels}}}", "{{instance}}")],
                unit="bytes",
            ),
            Panel(
                "Open files and connections",
                "File descriptors of the process.",
                [Query(f"process_open_fds{{{labels}}}", "{{instance}}")],
            ),
        ],
        collapsed=True,
    )

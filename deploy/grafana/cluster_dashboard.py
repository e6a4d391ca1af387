"""The dashboard of a cluster: its servers and jobs, and what needs attention."""

from __future__ import annotations

from common import CONNECTION, DECIDED, STATES, calls, number, processes, quantile, rate, state
from panels import Dashboard, Panel, Query, Row

CLUSTER = Dashboard(
    uid="zeroshard-cluster",
    title="ZeroShard cluster",
    description="The servers and jobs of a cluster, and what needs attention.",
    rows=[
        Row(
            "Overview",
            [
                number(
                    "Leaders",
                    "Coordinators that lead. Without one, no job makes steps.",
                    "sum(zeroshard_leader) or vector(0)",
                    red_at_zero=True,
                    width=3,
                ),
                number(
                    "Shard servers",
                    "Servers that are connected to the coordinator.",
                    "sum(zeroshard_servers)",
                    red_at_zero=True,
                    width=3,
                ),
                number(
                    "Missing servers",
                    "Servers that were connected, and were not drained before they left.",
                    "sum(zeroshard_servers_missing) or vector(0)",
                    red_from=1,
                    width=3,
                ),
                number(
                    "Jobs",
                    "Jobs in any state.",
                    "count(zeroshard_job_workers) or vector(0)",
                    width=3,
                ),
                number(
                    "Failed jobs",
                    "Jobs that have ended with an error and have not been deleted.",
                    'sum(zeroshard_job_state{state="failed"}) or vector(0)',
                    red_from=1,
                    width=3,
                ),
                number(
                    "Failed saves",
                    "Saves of checkpoints that failed in the last hour.",
                    'round(sum(increase(zeroshard_checkpoints_total{outcome="failed"}[1h])))',
                    red_from=1,
                    width=3,
                ),
                number(
                    "Degraded slices",
                    "Slices with fewer replicas than their job asks for.",
                    "sum(zeroshard_job_degraded_slices) or vector(0)",
                    red_from=1,
                    width=3,
                ),
                number("Workers", "Workers with a lease.", "sum(zeroshard_job_workers)", width=3),
            ],
        ),
        Row(
            "Jobs",
            [
                Panel(
                    "State",
                    "The state of each job over time.",
                    [Query(state('job!=""'), "{{job}}")],
                    kind="state-timeline",
                    width=12,
                    words=STATES,
                ),
                Panel(
                    "Steps",
                    "Steps per second of each job.",
                    [Query(rate("zeroshard_job_steps_total", "job", DECIDED), "{{job}}")],
                    unit="ops",
                    width=12,
                ),
                Panel(
                    "Aborted and skipped steps",
                    "Aborted: a rank or a server was lost, and the step is run again. Skipped: the"
                    " gradient had inf or NaN.",
                    [
                        Query(
                            rate("zeroshard_job_steps_total", "job, outcome", 'outcome!="applied"'),
                            "{{job}}: {{outcome}}",
                        )
                    ],
                    unit="ops",
                ),
                Panel(
                    "Degraded slices by job",
                    "Slices with fewer replicas than the job asks for. They must fall to 0.",
                    [Query("max by (job) (zeroshard_job_degraded_slices)", "{{job}}")],
                ),
                Panel(
                    "Time without all replicas",
                    "From the loss of a server until a job has all its replicas again.",
                    [
                        Query(
                            quantile(0.5, "zeroshard_degraded_seconds", "").replace(
                                "$__rate_interval", "$__range"
                            ),
                            "median",
                        )
                    ],
                    kind="stat",
                    unit="s",
                ),
            ],
        ),
        Row(
            "Checkpoints",
            [
                Panel(
                    "Age of the last checkpoint",
                    "Since the completion of the last save.",
                    [
                        Query(
                            "time() - max by (job)"
                            " (zeroshard_job_last_checkpoint_timestamp_seconds)",
                            "{{job}}",
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    "Duration of the last save",
                    "From its begin to its completion. Training continues meanwhile.",
                    [
                        Query(
                            "max by (job) (zeroshard_job_last_checkpoint_duration_seconds)",
                            "{{job}}",
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    "Saves",
                    "Saves that succeeded and failed in the last hour.",
                    [
                        Query(
                            "sum by (outcome) (increase(zeroshard_checkpoints_total[1h]))",
                            "{{outcome}}",
                        )
                    ],
                ),
            ],
        ),
        Row(
            "Servers",
            [
                Panel(
                    "Pushed to each server",
                    "Gradients and initial parameters, including duplicates.",
                    [
                        Query(
                            rate("zeroshard_payload_bytes_total", "instance", 'operation="push"'),
                            "{{instance}}",
                        )
                    ],
                    unit="Bps",
                ),
                Panel(
                    "Pulled from each server",
                    "Parameters.",
                    [
                        Query(
                            rate("zeroshard_payload_bytes_total", "instance", 'operation="pull"'),
                            "{{instance}}",
                        )
                    ],
                    unit="Bps",
                ),
                Panel(
                    "Memory of each server",
                    "Slices, gradients, pinned versions and second copies of all jobs.",
                    [Query("sum by (instance) (zeroshard_memory_bytes)", "{{instance}}")],
                    unit="bytes",
                ),
                Panel(
                    "Versions",
                    "The version of the program on each server, and its role.",
                    [Query("zeroshard_build_info")],
                    kind="table",
                    width=12,
                ),
                Panel(
                    "Connection to the coordinator",
                    "Servers without a connection keep their jobs.",
                    [Query("zeroshard_coordinator_connected", "{{instance}}")],
                    kind="state-timeline",
                    width=12,
                    words=CONNECTION,
                ),
            ],
        ),
        calls(""),
        processes('job=~"zeroshard.*"'),
    ],
)

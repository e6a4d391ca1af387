"""The dashboard of one shard server: its memory, traffic, steps and devices."""

from __future__ import annotations

from common import CONNECTION, calls, mean, number, processes, rate
from panels import Dashboard, Panel, Query, Row, Variable

#: The selection of the server.
SELECTED = 'instance="$instance"'

SERVER = Dashboard(
    uid="zeroshard-server",
    title="ZeroShard server",
    description="One shard server: its memory, traffic, steps and devices.",
    variables=[
        Variable("instance", "Server", "label_values(zeroshard_coordinator_connected, instance)")
    ],
    rows=[
        Row(
            "Overview",
            [
                number(
                    "Coordinator",
                    "Whether the server is connected to the coordinator.",
                    f"zeroshard_coordinator_connected{{{SELECTED}}}",
                    words=CONNECTION,
                ),
                number(
                    "Jobs",
                    "Jobs of which the server holds slices.",
                    f'count(zeroshard_job_epoch{{{SELECTED}, role="shard"}}) or vector(0)',
                ),
                number(
                    "Uptime",
                    "Since the start of the process.",
                    f"time() - process_start_time_seconds{{{SELECTED}}}",
                    unit="s",
                ),
                number(
                    "Stalled reads",
                    "Pulls that were ended because their client read nothing.",
                    f"zeroshard_stalled_reads_total{{{SELECTED}}}",
                ),
                Panel(
                    "Limits",
                    "The part of each limit that is in use.",
                    [
                        Query(
                            f"zeroshard_memory_bytes{{{SELECTED}}} / on (instance, kind)"
                            " (zeroshard_memory_limit_bytes > 0)",
                            "{{kind}}",
                        ),
                        Query(
                            f'label_replace(zeroshard_tier_bytes{{{SELECTED}}}, "kind", "$1",'
                            ' "tier", "(.*)") / on (instance, kind)'
                            " (zeroshard_memory_limit_bytes > 0)",
                            "{{kind}}",
                        ),
                    ],
                    kind="bargauge",
                    unit="percentunit",
                    height=4,
                    red_from=0.9,
                ),
            ],
        ),
        Row(
            "Memory",
            [
                Panel(
                    "Memory by content",
                    "Master weights, optimizer state, accumulators, published copies, early"
                    " gradients (parked), versions that readers have pinned, and second copies"
                    " during saves (snapshot).",
                    [Query(f"zeroshard_memory_bytes{{{SELECTED}}}", "{{kind}}")],
                    unit="bytes",
                    stacked=True,
                ),
                Panel(
                    "Slices by tier",
                    "On a server with budgets: the memory of the GPU, host memory, disk.",
                    [Query(f"zeroshard_tier_bytes{{{SELECTED}}}", "{{tier}}")],
                    unit="bytes",
                    stacked=True,
                ),
                Panel(
                    "Transfers of tiers",
                    "Bytes read from and written to host memory (with a GPU) and the disk.",
                    [
                        Query(
                            rate(
                                "zeroshard_tier_transferred_bytes_total",
                                "tier, direction",
                                SELECTED,
                            ),
                            "{{tier}}: {{direction}}",
                        )
                    ],
                    unit="Bps",
                ),
            ],
        ),
        Row(
            "Work",
            [
                Panel(
                    "Payload",
                    "Parameters sent, gradients received, and bytes that were received again.",
                    [
                        Query(
                            rate("zeroshard_payload_bytes_total", "operation, direction", SELECTED),
                            "{{operation}}: {{direction}}",
                        )
                    ],
                    unit="Bps",
                ),
                Panel(
                    "Phases of a step",
                    "Mean time of each phase, by job.",
                    [
                        Query(
                            mean("zeroshard_job_step_phase_seconds", "job, phase", SELECTED),
                            "{{job}}: {{phase}}",
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    "Payload by job",
                    "Bytes per second of pulls and pushes.",
                    [Query(rate("zeroshard_job_payload_bytes_total", "job", SELECTED), "{{job}}")],
                    unit="Bps",
                ),
            ],
        ),
        Row(
            "GPUs",
            [
                Panel(
                    "Memory of each GPU",
                    "In use by any process, and all of it.",
                    [Query(f"zeroshard_device_memory_bytes{{{SELECTED}}}", "{{device}}: {{kind}}")],
                    unit="bytes",
                ),
                Panel(
                    "Copies",
                    "Bytes copied to each GPU and from it.",
                    [
                        Query(
                            rate(
                                "zeroshard_device_copied_bytes_total",
                                "device, direction",
                                SELECTED,
                            ),
                            "{{device}}: {{direction}}",
                        )
                    ],
                    unit="Bps",
                ),
                Panel(
                    "Time in kernels",
                    "The part of the time in which kernels ran.",
                    [
                        Query(
                            rate("zeroshard_device_kernel_seconds_total", "device", SELECTED),
                            "{{device}}",
                        )
                    ],
                    unit="percentunit",
                ),
            ],
            collapsed=True,
        ),
        calls(SELECTED),
        processes(SELECTED),
    ],
)

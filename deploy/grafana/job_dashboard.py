"""The dashboard of one job: its speed, what its steps wait for, and its safety."""

from __future__ import annotations

from common import DECIDED, STATES, mean, number, quantile, rate, state
from panels import Dashboard, Panel, Query, Row, Variable

JOB = Dashboard(
    uid="zeroshard-job",
    title="ZeroShard job",
    description="One training job: its speed, what its steps wait for, and its safety.",
    variables=[Variable("job", "Job", "label_values(zeroshard_job_workers, job)")],
    rows=[
        Row(
            "Overview",
            [
                Panel(
                    "State",
                    "waiting (for servers), opening, open, restoring (a checkpoint), recovering"
                    " (after a restart of the coordinator) or failed.",
                    [Query(state('job="$job"'), "{{job}}")],
                    kind="state-timeline",
                    words=STATES,
                    width=8,
                    height=4,
                ),
                number(
                    "Version",
                    "The number of steps of the job.",
                    'max(zeroshard_job_version{job="$job", role="coordinator"})',
                ),
                number(
                    "Workers", "Workers with a lease.", 'max(zeroshard_job_workers{job="$job"})'
                ),
                number(
                    "Saved version",
                    "The version of the last checkpoint.",
                    'max(zeroshard_job_last_checkpoint_version{job="$job"})',
                ),
                number(
                    "Degraded slices",
                    "Slices with fewer replicas than the job asks for.",
                    'max(zeroshard_job_degraded_slices{job="$job"})',
                    red_from=1,
                ),
            ],
        ),
        Row(
            "Training",
            [
                Panel(
                    "Loss",
                    "The mean loss of the ranks in the last step. Only if they report it.",
                    [Query('max(zeroshard_job_loss{job="$job"})', "loss")],
                    width=12,
                ),
                Panel(
                    "Gradient norm",
                    "Of the mean gradient, before it is clipped.",
                    [Query('max(zeroshard_job_gradient_norm{job="$job"})', "norm")],
                    width=12,
                ),
            ],
        ),
        Row(
            "Steps",
            [
                Panel(
                    "Steps",
                    "Steps per second, by outcome.",
                    [
                        Query(
                            rate("zeroshard_job_steps_total", "outcome", 'job="$job"'),
                            "{{outcome}}",
                        )
                    ],
                    unit="ops",
                ),
                Panel(
                    "Waits of a step",
                    "Mean time for which the coordinator waited: for ranks (from the first commit"
                    " to the last) and then for servers (until the decision).",
                    [
                        Query(
                            mean("zeroshard_job_step_wait_seconds", "for", 'job="$job"'), "{{for}}"
                        )
                    ],
                    unit="s",
                ),
                Panel(
                    "Phases of a step on the servers",
                    "Mean time of the slowest server: reduce (first gradient to last sum), decide"
                    " (report to decision), apply (optimizer).",
                    [
                        Query(
                            "max by (phase) ("
                            + mean(
                                "zeroshard_job_step_phase_seconds", "instance, phase", 'job="$job"'
                            )
                            + ")",
                            "{{phase}}",
                        )
                    ],
                    unit="s",
                ),
            ],
        ),
        Row(
            "Ranks",
            [
                Panel(
                    "Lateness of ranks",
                    "How much later than the first rank the other ranks have committed.",
                    [
                        Query(
                            "sum by (le) (increase("
                            'zeroshard_job_rank_lateness_seconds_bucket{job="$job"}'
                            "[$__rate_interval]))",
                            "{{le}}",
                        )
                    ],
                    kind="heatmap",
                    unit="s",
                ),
                Panel(
                    "Lateness of ranks, quantiles",
                    "The same as numbers.",
                    [
                        Query(
                            quantile(
                                share, "zeroshard_job_rank_lateness_seconds", "", 'job="$job"'
                            ),
                            name,
                        )
                        for share, name in [(0.5, "median"), (0.9, "90%"), (0.99, "99%")]
                    ],
                    unit="s",
                ),
                Panel(
                    "Slowest rank",
                    "The rank that commits last on average, and its lateness.",
                    [Query('zeroshard_job_slowest_rank_seconds{job="$job"}', "rank {{rank}}")],
                    unit="s",
                ),
            ],
        ),
        Row(
            "Traffic",
            [
                Panel(
                    "Payload",
                    "Bytes per second of all workers: pulled parameters and pushed gradients.",
                    [
                        Query(
                            rate("zeroshard_job_payload_bytes_total", "operation", 'job="$job"'),
                            "{{operation}}",
                        )
                    ],
                    unit="Bps",
                ),
                Panel(
                    "Payload of a step",
                    "Bytes of all workers per step.",
                    [
                        Query(
                            rate("zeroshard_job_payload_bytes_total", "operation", 'job="$job"')
                            + " / ignoring (operation) group_left () "
                            + rate("zeroshard_job_steps_total", "", f'job="$job", {DECIDED}'),
                            "{{operation}}",
                        )
                    ],
                    unit="bytes",
                ),
                Panel(
                    "Payload of each server",
                    "A server with more than its share has more slices, or readers.",
                    [
                        Query(
                            rate("zeroshard_job_payload_bytes_total", "instance", 'job="$job"'),
                            "{{instance}}",
                        )
                    ],
                    unit="Bps",
                ),
            ],
        ),
        Row(
            "Safety",
            [
                Panel(
                    "Epoch",
                    "It changes when a rank or a server joins or is lost.",
                    [Query('max(zeroshard_job_epoch{job="$job", role="coordinator"})', "epoch")],
                ),
                Panel(
                    "Version on each server",
                    "Servers differ while they apply a step, or if one of them hangs.",
                    [Query('zeroshard_job_version{job="$job", role="shard"}', "{{instance}}")],
                ),
                Panel(
                    "Steps that are not saved",
                    "The current version less that of the last checkpoint.",
                    [
                        Query(
                            'max(zeroshard_job_version{job="$job", role="coordinator"})'
                            ' - max(zeroshard_job_last_checkpoint_version{job="$job"})',
                            "steps",
                        )
                    ],
                ),
            ],
        ),
    ],
)

"""The line about a model that has been sharded."""

from __future__ import annotations

import math
from typing import Any

from .._log import log, numel_text
from ..errors import Error
from .gather import Gatherer
from .job import ModelJob


def log_start(job: ModelJob[Any], level: str, gatherer: Gatherer[Any] | None) -> None:
    """Logs what is held where."""
    try:
        servers = len(job.connection.status().servers)
    except Error:
        return  # the next step reports it
    total = sum(math.prod(entry.shape) for entry in job.parameters)
    held = _held(job, level, gatherer)
    ranks = job.optimizer.on_ranks
    if ranks is not None:
        held += f"; {ranks.name} runs on the ranks, and sends new values and state in each step"
    log(
        "%s, level %s: %s parameters on %d shard server%s; %s",
        job.job.name,
        level,
        numel_text(total),
        servers,
        "" if servers == 1 else "s",
        held,
    )


def _held(job: ModelJob[Any], level: str, gatherer: Gatherer[Any] | None) -> str:
    if level == "os":
        return (
            "each worker holds all parameters and gradients; master weights and optimizer state "
            "are on the servers"
        )
    if gatherer is None or not gatherer.units:
        held = "each worker holds all parameters"
    else:
        kept = sum(
            job.framework.numel(entry.tensor)
            for entry in job.entries
            if entry.resident and not entry.buffer
        )
        largest = max(
            sum(map(job.framework.numel, unit.parameters.values())) for unit in gatherer.units
        )
        held = (
            f"each worker keeps {numel_text(kept)} of them and gathers the others by module, of "
            f"which the largest has {numel_text(largest)}"
        )
    return f"{held}; gradients and optimizer state are on the servers"

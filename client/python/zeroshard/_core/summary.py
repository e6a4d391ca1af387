"""The line about a model that has been sharded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from .._log import log, numel_text
from ..errors import Error

if TYPE_CHECKING:
    from .sharding import Sharding


def log_start(sharding: Sharding[Any]) -> None:
    """Logs what is held where."""
    job = sharding.job
    try:
        servers = len(job.connection.status().servers)
    except Error:
        return  # the next step reports it
    total = sum(math.prod(entry.shape) for entry in job.entries if not entry.buffer)
    log(
        "%s, level %s: %s parameters on %d shard server%s; %s",
        job.job.name,
        sharding.level,
        numel_text(total),
        servers,
        "" if servers == 1 else "s",
        _held(sharding),
    )


def _held(sharding: Sharding[Any]) -> str:
    if sharding.level == "os":
        return (
            "each worker holds all parameters and gradients; master weights and optimizer state "
            "are on the servers"
        )
    gatherer, framework = sharding.gatherer, sharding.job.framework
    if gatherer is None or not gatherer.units:
        held = "each worker holds all parameters"
    else:
        kept = sum(
            framework.numel(entry.tensor)
            for entry in sharding.job.entries
            if entry.resident and not entry.buffer
        )
        largest = max(
            sum(map(framework.numel, unit.parameters.values())) for unit in gatherer.units
        )
        held = (
            f"each worker keeps {numel_text(kept)} of them and gathers the others by module, of "
            f"which the largest has {numel_text(largest)}"
        )
    return f"{held}; gradients and optimizer state are on the servers"

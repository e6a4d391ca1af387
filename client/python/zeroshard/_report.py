"""``report``: what a sharded model holds where, and what its training costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._activity import Wait, waiting_text
from ._core.sharded_models import find
from ._core.sharding import Sharding
from ._log import bytes_text, steps_text
from .errors import InvalidArgumentError, NotInitialisedError

if TYPE_CHECKING:
    from ._status import ServerStatus


@dataclass(frozen=True)
class TrainingReport:
    """The memory, the traffic and the waiting times of a sharded model, as seen by one process."""

    #: The name of the job, as in ``zsctl status``.
    job: str
    #: ``os``, ``os_g`` or ``p_g_os``.
    level: str
    #: The steps of the model.
    steps: int
    #: Seconds since the first model of the process was sharded.
    seconds: float
    #: Bytes of parameters that are on this worker now.
    parameter_bytes: int
    #: Bytes of gradients that are on this worker now.
    gradient_bytes: int
    #: The most bytes of gathered parameters that were on this worker at one time; 0 unless the
    #: level is ``p_g_os``.
    peak_gathered_bytes: int
    #: The shard servers and the bytes that they hold for all jobs, as last reported by them, within
    #: a second.
    servers: list[ServerStatus]
    #: Bytes that this process has pulled for all of its models.
    pulled_bytes: int
    #: Bytes that this process has pushed for all of its models, with the initial parameters.
    pushed_bytes: int
    #: Seconds for which this process has waited for all of its models: ``"pull"``: for tensors;
    #: ``"push"``: for gradients that are sent during backward; ``"commit"``: for steps, which
    #: include the remaining gradients, the other ranks and the new parameters.
    waited: dict[Wait, float]

    def as_dict(self) -> dict[str, float]:
        """Returns the numbers of this report for a logger, such as TensorBoard or W&B.

        Each name begins with ``zeroshard/`` and says its unit. ``server_bytes`` are those of all
        servers, and ``waited_seconds/pull``, ``/push`` and ``/commit`` are the times in ``waited``.
        """
        numbers = {
            name: value for name, value in vars(self).items() if isinstance(value, int | float)
        }
        numbers["server_bytes"] = sum(
            server.master_bytes
            + server.published_bytes
            + server.accumulator_bytes
            + server.parked_bytes
            + server.state_bytes
            for server in self.servers
        )
        numbers |= {f"waited_seconds/{operation}": time for operation, time in self.waited.items()}
        return {f"zeroshard/{name}": number for name, number in numbers.items()}

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("", "parameters", "gradients", "optimizer state"),
            ("this worker", bytes_text(self.parameter_bytes), bytes_text(self.gradient_bytes), "-"),
        ]
        for server in self.servers:
            rows.append(
                (
                    f"server at {server.address}",
                    bytes_text(server.master_bytes + server.published_bytes),
                    bytes_text(server.accumulator_bytes + server.parked_bytes),
                    bytes_text(server.state_bytes),
                )
            )
        first = (
            f"job {self.job}, level {self.level}: {steps_text(self.steps)} in {self.seconds:,.1f} s"
        )
        traffic = f"pulled {bytes_text(self.pulled_bytes)}, pushed {bytes_text(self.pushed_bytes)}"
        if self.level == "p_g_os":
            traffic += f", gathered at most {bytes_text(self.peak_gathered_bytes)} at a time"
        return "\n".join([first, *_table(rows), traffic, waiting_text(self.waited, self.seconds)])


def _table(rows: list[tuple[str, ...]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join(["  " + name.ljust(widths[0]), *aligned])


def report(model: Any) -> TrainingReport:
    """The memory, the traffic and the waiting times of a sharded model. Any rank may call it.

    Args:
        model: a model or an optimizer of :func:`zeroshard.shard` or ``group_sharded_parallel``, a
            ``DistModel``, or a module with parameters of a sharded model.

    Raises:
        InvalidArgumentError: the model is not sharded.
        NotInitialisedError: the session has ended.
    """
    sharding = _sharding(model)
    connection = sharding.job.connection
    if connection.closed:
        raise NotInitialisedError(
            "the session of this model has ended; call report before zeroshard.shutdown(), or "
            "inside the block of zeroshard.init"
        )
    pulled, pushed = connection.cluster.traffic()
    parameter_bytes, gradient_bytes = sharding.bytes_here()
    return TrainingReport(
        job=sharding.job.job.name,
        level=sharding.level,
        steps=sharding.steps,
        seconds=connection.activity.seconds,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        peak_gathered_bytes=0
        if sharding.gatherer is None
        else sharding.gatherer.holdings.peak_nbytes,
        servers=connection.status().servers,
        pulled_bytes=pulled,
        pushed_bytes=pushed,
        waited=dict(connection.activity.waited),
    )


def _sharding(model: Any) -> Sharding[Any]:
    for holder in (model, getattr(model, "optimizer", None)):
        found = getattr(holder, "sharding", None)
        if isinstance(found, Sharding):
            return found
    parameters = getattr(model, "parameters", None)
    found = find(parameters()) if callable(parameters) else None
    if found is None:
        raise InvalidArgumentError(
            f"model is a {type(model).__name__} that is not sharded; pass the model that "
            "group_sharded_parallel has returned"
        )
    return found

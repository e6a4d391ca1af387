"""Commits a step: sends what goes with the gradients, votes, and receives the new parameters."""

from __future__ import annotations

from typing import Generic

from .._native import Report
from .._spikes import SpikePolicy
from .buffers import SharedBuffers
from .clipping import Clipping
from .entry import Entry
from .gradients import Gradients
from .job import ModelJob
from .rank_steps import RankSteps
from .step_state import Step
from .tensors import T
from .traffic import Traffic
from .writes import hashes_of_written


class Commit(Generic[T]):
    """How the steps of a model are committed."""

    def __init__(
        self,
        job: ModelJob[T],
        traffic: Traffic[T],
        step: Step,
        gradients: Gradients[T],
        clipping: Clipping[T],
        buffers: SharedBuffers[T],
        rank_steps: RankSteps[T] | None,
        spikes: SpikePolicy | None,
    ) -> None:
        self._job = job
        self._traffic = traffic
        self._step = step
        self._gradients = gradients
        self._clipping = clipping
        self._buffers = buffers
        self._rank_steps = rank_steps
        self._spikes = spikes

    def send_values(self, written: list[Entry[T]]) -> None:
        """Sends the values that the program has written, buffers, and new values of the parameters
        that this rank steps itself."""
        arrays = [
            (entry.index, entry.outgoing())
            for entry in (*written, *self._buffers.to_send())
            if self._job.job.uploads(entry.index) and not self._is_stepped_here(entry)
        ]
        if arrays:
            self._job.job.replace(self._job.version, arrays)
        if self._rank_steps is not None:
            self._rank_steps.send(written, *self._clipping.of_step())

    def _is_stepped_here(self, entry: Entry[T]) -> bool:
        """Returns whether a rank updates the parameter, and sends it itself."""
        return self._rank_steps is not None and self._rank_steps.runs(entry)

    def commit(self, written: list[Entry[T]], data: tuple[bytes | None, bool]) -> Report:
        """Commits the step, waits for the decision, and receives the parameters that stay on this
        worker. ``data``: that of this rank for a checkpoint, and whether it follows."""
        job = self._job
        received = [(entry.index, entry.incoming()) for entry in job.trained if entry.resident]
        arrays = [(index, incoming.array) for index, incoming in received]
        factors, max_norm = self._clipping.of_step()
        hashes = hashes_of_written(job, written)
        if self._rank_steps is not None:
            hashes = self._rank_steps.hashes(hashes)
        loss = None if self._spikes is None else self._spikes.loss_of_step()
        self._step.vote(job.version)
        with job.connection.activity.waiting("commit"):
            report: Report = job.job.commit(
                job.version,
                job.optimizer.groups(),
                loss_scale=self._gradients.looks.loss_scale,
                max_norm=max_norm,
                gradient_factors=factors,
                written=hashes,
                targets=arrays if self._traffic.group_size == 1 else [],
                user_data=data[0],
                user_data_follows=data[1],
                loss=loss,
            )
        self._traffic.pull_decided(report.version, arrays)
        for _, incoming in received:
            incoming.finish()
        return report

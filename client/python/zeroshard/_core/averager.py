"""A job whose servers average gradients: its version ``v + 1`` is the mean gradient of step
``v``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from .. import _native
from .._agreement import exchange_equal
from .._connection import Connection
from .._native import Rest
from .._rendezvous import ProcessGroup
from ..errors import StepAbortedError, StepMismatchError, UnusedParameterError
from .parameters import Parameters
from .tensors import T

#: The parameter group of a job whose servers average gradients.
AVERAGE: tuple[str, dict[str, float]] = ("average", {})

#: A name and a tensor.
Named = tuple[str, T]


class Averager(Generic[T]):
    """Averages the gradients of a list of parameters, once per step.

    In each step, every rank calls :meth:`send` until every parameter was sent once, then
    :meth:`finish`. The caller keeps the parameters and passes the same list to every call.

    Args:
        connection: the connection to the cluster.
        framework: the framework of the parameters.
        purpose: a part of the job's name.
        group: the ranks to average over.
        parameters: names and parameters, in the same order on every rank. None of them is empty.
        constants: other tensors to broadcast from rank 0, of any dtype.
        broadcast: whether all ranks receive the parameters and constants of rank 0.

    Raises:
        InvalidArgumentError: a parameter is neither float32 nor bfloat16 nor float16.
        DisagreementError: the parameters of the ranks differ in names, shapes or dtypes.
    """

    def __init__(
        self,
        connection: Connection,
        framework: Parameters[T],
        purpose: str,
        group: ProcessGroup,
        parameters: Sequence[Named[T]],
        constants: Sequence[Named[T]] = (),
        broadcast: bool = False,
    ) -> None:
        self.connection = connection
        self._framework = framework
        self._names = [name for name, _ in parameters]
        self._group = group
        self._step = 0
        #: The gradients that were sent. The mean replaces their values.
        self._gradients: dict[int, T] = {}
        self._absent: list[int] = []
        #: ``True`` if the servers may have a part of a step that this rank has abandoned.
        self._interrupted = False
        #: ``True`` if this rank does not know the open step, since its rest was interrupted.
        self._is_behind = False

        specs = [
            _native.TensorSpec(
                name, framework.shape(tensor), framework.dtype_of(f"parameter {name!r}", tensor)
            )
            for name, tensor in parameters
        ]
        specs += [
            _native.TensorSpec(name, [framework.words(tensor)], buffer=True)
            for name, tensor in constants
        ]
        name = connection.job_name(purpose, group.ranks)
        kinds = {
            f"tensor {name!r}": f"{framework.dtype_text(tensor)} of shape "
            f"{list(framework.shape(tensor))}"
            for name, tensor in (*parameters, *constants)
        }
        exchange_equal(
            lambda what, value: connection.exchange(f"{name}/{what}", value, group.ranks),
            kinds,
            group.ranks,
        )
        numel = sum(framework.numel(tensor) for _, tensor in parameters)
        self._job = connection.open(name, specs, [AVERAGE], group, numel)
        self._start(
            [tensor for _, tensor in parameters], [tensor for _, tensor in constants], broadcast
        )
        connection.activity.begin()

    def _start(self, parameters: list[T], constants: list[T], broadcast: bool) -> None:
        """Uploads the parameters of rank 0 as version 0, and broadcasts them if requested."""
        framework = self._framework
        label = "broadcasting parameters" if broadcast else None
        if self._group.rank == 0:
            arrays = [framework.outgoing(parameter) for parameter in parameters]
            arrays += [framework.outgoing_words(constant) for constant in constants]
            self._job.initialise(list(enumerate(arrays)), label=label)
            self._job.initialised()
        elif broadcast:
            targets = [framework.incoming(parameter) for parameter in parameters]
            targets += [framework.incoming_words(constant) for constant in constants]
            # A pull with a part is exact for every dtype on the wire.
            self._job.fetch(
                0, [(i, target.array) for i, target in enumerate(targets)], part="", label=label
            )
            for target in targets:
                target.finish()
        else:
            smallest = min(
                range(len(parameters)), key=lambda tensor: framework.numel(parameters[tensor])
            )
            scratch = framework.host(framework.shape(parameters[smallest]))
            self._job.fetch(0, [(smallest, framework.array(scratch))], part="")

    def send(self, parameters: Sequence[T], indices: Sequence[int]) -> None:
        """Starts to send the gradients of these parameters. Does not wait for the transfer.

        :meth:`finish` reports the parameters that have no gradient.
        """
        pushed = []
        for index in indices:
            gradient = self._framework.gradient(parameters[index])
            if gradient is None:
                self._absent.append(index)
                continue
            # The mean is written to the gradient, so each element must have its own memory.
            own = self._framework.own_elements(gradient)
            if own is not gradient:
                self._framework.set_gradient(parameters[index], own)
            self._gradients[index] = own
            pushed.append((index, self._framework.outgoing(own)))
        if pushed:
            self._job.push(self._step, pushed)

    def finish(self, parameters: Sequence[T], unused: bool) -> None:
        """Waits for the mean gradients and writes them to the parameters' gradients.

        A parameter with a gradient on other ranks only receives the mean, to which this rank
        contributes zeros. A parameter without a gradient on any rank keeps none.

        Args:
            parameters: the parameters, all of which were sent.
            unused: whether a parameter may have no gradient on some of the ranks.

        Raises:
            UnusedParameterError: a parameter has no gradient on some of the ranks, and ``unused``
                is False.
        """
        if self._absent:
            self._job.absent(self._step, self._absent)
        for index in self._absent:
            self._gradients[index] = self._framework.zeros_like(parameters[index])
        targets = {
            index: self._framework.incoming(gradient) for index, gradient in self._gradients.items()
        }
        arrays = [(index, target.array) for index, target in targets.items()]
        with self.connection.activity.waiting("commit"):
            report = self._job.commit(self._step, [AVERAGE], targets=arrays)
        self.connection.activity.steps += 1
        for target in targets.values():
            target.finish()
        self._step = report.version
        gradients, self._gradients, self._absent = self._gradients, {}, []
        for index, rank, everywhere in report.absent:
            if everywhere:
                del gradients[index]
            elif not unused and rank not in report.resting:
                raise UnusedParameterError(
                    f"parameter {self._names[index]!r} has a gradient on other ranks, but none on "
                    f"rank {self._group.ranks[rank]}; pass find_unused_parameters=True if ranks "
                    "may leave parameters unused"
                )
        for index, gradient in gradients.items():
            self._framework.set_gradient(parameters[index], gradient)

    def rest(self, excluded: bool) -> Rest:
        """Contributes nothing more until every rank rests. ``excluded``: means are over the ranks
        that do not rest."""
        self.resume()
        self._is_behind = True
        return self._job.rest(self._step, excluded)

    def any_rests(self) -> bool:
        """Returns whether a rank rests."""
        return bool(self.connection.status_of(self._job).resting)

    def end_rest(self, rest: Rest) -> int:
        """Waits until every rank rests. Returns the highest rank of those that made the last
        step."""
        with self.connection.activity.waiting("commit"):
            self._step, last = rest.wait()
        self._is_behind = False
        return last

    def abandon(self) -> None:
        """Drops the current step after an error. :meth:`resume` must be called before the next
        :meth:`send`."""
        self._job.forget()
        self._gradients, self._absent = {}, []
        self._interrupted = True

    def resume(self) -> None:
        """Makes the servers drop their part of an abandoned step, if there is one. Every rank must
        call it.

        Raises:
            DisagreementError: another rank has finished the step.
        """
        if self._is_behind:
            self._step = self.connection.status_of(self._job).version or 0
            self._is_behind, self._interrupted = False, True
        if not self._interrupted:
            return
        try:
            self._job.discard(self._step)
        except StepAbortedError:
            pass  # the servers have already dropped it
        except StepMismatchError:
            self._step += 1  # the step was decided before it was abandoned
        self._interrupted = False

    def retire(self) -> None:
        """Leaves the job."""
        self.connection.leave(self._job)

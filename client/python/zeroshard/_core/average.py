"""A job whose servers average gradients: version ``v + 1`` of it is the mean gradient of step
``v``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from .. import _native
from .._session import Session
from ..errors import StepAborted, StepMismatch, UnusedParameter
from .framework import Framework, Place, T
from .kinds import AVERAGE

#: A name and a tensor.
Named = tuple[str, T]


class Averages(Generic[T]):
    """Averages gradients of one list of parameters, step after step.

    A step is :meth:`send` for what is complete, in as many parts as wanted and each parameter once,
    then :meth:`finish`, on every rank. The parameters belong to the caller, who gives the same ones
    to every call.

    Args: session: where the cluster is. framework: whose tensors they are. kind: what the job's
        name tells of it. place: this rank and the others. parameters: names and parameters in the
        same order on every rank; none of them empty. constants: what rank 0 shares besides: tensors
        of any dtype. share: whether all ranks take over rank 0's parameters and constants.

    Raises: InvalidArgument: a parameter is neither float32 nor bfloat16 nor float16. JobExists: the
        ranks' parameters differ in names, shapes or dtypes.
    """

    def __init__(
        self,
        session: Session,
        framework: Framework[T],
        kind: str,
        place: Place,
        parameters: Sequence[Named[T]],
        constants: Sequence[Named[T]] = (),
        share: bool = False,
    ) -> None:
        self.session = session
        self._framework = framework
        self._names = [name for name, _ in parameters]
        self._rank, world, self._ranks = place
        self._step = 0
        #: What is being sent; the mean is to replace it.
        self._gradients: dict[int, T] = {}
        self._absent: list[int] = []
        #: Whether the servers may have parts of a step that this rank has abandoned.
        self._interrupted = False

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
        name = session.name(kind, self._ranks)
        numel = sum(framework.numel(tensor) for _, tensor in parameters)
        self._job = session.open(name, specs, [AVERAGE], (self._rank, world), numel)
        self._start(
            [tensor for _, tensor in parameters], [tensor for _, tensor in constants], share
        )

    def _start(self, parameters: list[T], constants: list[T], share: bool) -> None:
        """Makes version 0: rank 0's parameters, which the others need not take over."""
        framework = self._framework
        label = "sharing parameters" if share else None
        if self._rank == 0:
            arrays = [framework.outgoing(parameter) for parameter in parameters]
            arrays += [framework.outgoing_words(constant) for constant in constants]
            self._job.initialise(list(enumerate(arrays)), label=label)
            self._job.initialised()
        elif share:
            targets = [framework.incoming(parameter) for parameter in parameters]
            targets += [framework.incoming_words(constant) for constant in constants]
            # With a part everything is exact, whatever the wire's dtype.
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
        """Starts to send the gradients of those parameters. Returns at once.

        Parameters without a gradient are told by :meth:`finish`.
        """
        pushed = []
        for index in indices:
            gradient = self._framework.gradient(parameters[index])
            if gradient is None:
                self._absent.append(index)
                continue
            # The mean has its own element for each of the parameter's.
            own = self._framework.own_elements(gradient)
            if own is not gradient:
                self._framework.set_gradient(parameters[index], own)
            self._gradients[index] = own
            pushed.append((index, self._framework.outgoing(own)))
        if pushed:
            self._job.push(self._step, pushed)

    def finish(self, parameters: Sequence[T], unused: bool) -> None:
        """Waits for the mean gradients, and puts them where the gradients were.

        A parameter that only other ranks have a gradient for gets the mean as well (its own share
        is zeros). One that no rank has a gradient for is left without.

        Args: parameters: the parameters, each of which was sent. unused: whether a parameter may be
            without a gradient on some ranks.

        Raises: UnusedParameter: one is, and may not be.
        """
        if self._absent:
            self._job.absent(self._step, self._absent)
        for index in self._absent:
            self._gradients[index] = self._framework.zeros_like(parameters[index])
        targets = {
            index: self._framework.incoming(gradient) for index, gradient in self._gradients.items()
        }
        arrays = [(index, target.array) for index, target in targets.items()]
        report = self._job.commit(self._step, [AVERAGE], targets=arrays)
        for target in targets.values():
            target.finish()
        self._step = report.version
        gradients, self._gradients, self._absent = self._gradients, {}, []
        for index, rank, everywhere in report.absent:
            if everywhere:
                del gradients[index]
            elif not unused:
                raise UnusedParameter(
                    f"parameter {self._names[index]!r} has no gradient on rank {self._ranks[rank]}, and has one on "
                    "other ranks: with find_unused_parameters=True it gets the average"
                )
        for index, gradient in gradients.items():
            self._framework.set_gradient(parameters[index], gradient)

    def abandon(self) -> None:
        """Drops the step that is under way, after an error; :meth:`resume` must come before the
        next :meth:`send`."""
        self._job.forget()
        self._gradients, self._absent = {}, []
        self._interrupted = True

    def resume(self) -> None:
        """Has the servers drop what they have of an abandoned step, if there is one. Every rank
        must do the same.

        Raises: Disagreement: another rank has finished the step.
        """
        if not self._interrupted:
            return
        try:
            self._job.discard(self._step)
        except StepAborted:
            pass  # they have dropped it already
        except StepMismatch:
            self._step += 1  # it had been decided before it was abandoned
        self._interrupted = False

    def retire(self) -> None:
        """Leaves the job, once no rank uses it any more."""
        self.session.retire(self._job)

"""What can go wrong. Every error says what was wrong, where, and what would be right.

Those that come from a cluster have its fields as attributes (``job``, ``step``, ``rank``,
``epoch``, ...).
"""

from __future__ import annotations


class Error(Exception):
    """Any error of ZeroShard."""


class InvalidArgument(Error, ValueError):
    """An argument is wrong; given again it will be refused again."""


class NotATensor(Error, TypeError, RuntimeError):
    """A value is not a tensor, and must be one."""


class UnsupportedModule(Error, NotImplementedError):
    """A parallel style cannot be applied to a module of this type; the message lists the types that
    it knows."""


class AlreadyParallel(Error, RuntimeError):
    """The module has been parallelised before."""


class NotInitialised(Error):
    """There is no session, or it does not fit: call :func:`zeroshard.init` first."""


class UnsupportedOptimizer(Error, TypeError):
    """The servers cannot run this optimizer."""


class UnusedParameter(Error):
    """A parameter has a gradient on some ranks only."""


class UnknownJob(Error):
    """There is no such job."""


class JobExists(Error):
    """A job of this name exists and is another: the ranks disagree about the model or the
    optimizer."""


class JobFailed(Error):
    """The job cannot go on."""


class JobReplaced(Error):
    """The job was deleted, and another one has its name."""


class NotHere(Error):
    """Another server owns the slice."""


class StaleEpoch(Error):
    """The membership has changed since."""


class StaleTerm(Error):
    """The coordinator has been replaced by a later one."""


class StaleAttempt(Error):
    """The ranks have discarded the attempt at the step."""


class RankLeft(Error):
    """A rank that the step needs has left the job: every rank must run the same number of steps."""


class StepMismatch(Error):
    """The step is not the open one."""


class StepAborted(Error):
    """All gradients of the step were dropped, because a rank was lost. Run the step again, from the
    same data."""


class VersionGone(Error):
    """The version was there, and has been replaced."""


class Timeout(Error, TimeoutError):
    """A deadline passed; the message says what was waited for."""


class RankTaken(Error):
    """Another worker holds the rank."""


class LeaseLost(Error):
    """This worker's hold on its rank has ended."""


class Unavailable(Error, ConnectionError):
    """A server cannot be reached."""


class Unauthenticated(Error, PermissionError):
    """The cluster's token is missing or wrong."""


class Disagreement(Error):
    """The ranks asked for different things: in a step, or of a mesh, a plan or a placement."""


class ParkingFull(Error):
    """A server has no room for gradients that came early."""


class OutOfMemory(Error, MemoryError):
    """A server cannot hold the job."""


class Internal(Error):
    """A bug."""

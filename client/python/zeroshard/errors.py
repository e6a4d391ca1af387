"""The exceptions of ZeroShard.

An error that the servers or the client report is named after its Rust variant: ``JobFailed`` is
:class:`JobFailedError`. The fields of the variant (``job``, ``step``, ``rank``, ``epoch``, ...) are
attributes of the exception. If Python has a built-in exception with the same meaning, the class is
also a subclass of it.
"""

from __future__ import annotations

import builtins


class Error(Exception):
    """Base class of all exceptions of ZeroShard."""


# ---- reported by the servers and the client


class InvalidArgumentError(Error, ValueError):
    """An argument is invalid. Repeating the call does not help."""


class UnauthenticatedError(Error, PermissionError):
    """The cluster's token is missing or wrong."""


class ForbiddenError(Error, PermissionError):
    """The token or certificate has a role that does not permit the call."""


class TlsError(Error, ConnectionError):
    """The two sides of a connection do not trust each other, or only one of them uses TLS."""


class VersionMismatchError(Error):
    """The client and the coordinator do not have the same minor version."""


class UnknownJobError(Error):
    """The cluster has no job of this name."""


class JobExistsError(Error):
    """A different job of this name exists: the ranks disagree about the model or the optimizer."""


class JobFailedError(Error):
    """The job cannot continue."""


class NotHereError(Error):
    """Another server owns the slice."""


class StaleEpochError(Error):
    """The epoch of the call is not the job's current epoch."""


class JobReplacedError(Error):
    """The job was deleted, and a new job has its name."""


class StaleTermError(Error):
    """A newer coordinator has taken over."""


class StaleAttemptError(Error):
    """The ranks have discarded this attempt at the step."""


class RankLeftError(Error):
    """A rank that the step needs has left the job. Every rank must run the same number of steps."""


class StepMismatchError(Error):
    """The step is not the job's open step."""


class StepAbortedError(Error):
    """A rank or a server was lost, and all gradients of the step were dropped. Run the step again
    with the same data, or use :func:`zeroshard.steps`, which does."""


class RolledBackError(Error):
    """A server, or the data of a rank for checkpoints, was lost, and the job was restored from its
    last checkpoint. ``version`` is the version of the checkpoint; call
    :meth:`zeroshard.Checkpoints.resume` to continue from it, or use :func:`zeroshard.steps`, which
    does."""

    version: int


class NoCheckpointError(Error):
    """There is no complete checkpoint."""


class UserDataLostError(NoCheckpointError):
    """A version cannot be saved because the data of a rank for it was lost: the rank ended before
    it had sent the data, or the coordinator before it had stored it."""


class CheckpointDamagedError(Error):
    """A file of a checkpoint is missing, incomplete or damaged."""


class StorageError(Error, OSError):
    """A checkpoint cannot be read or written."""


class VersionGoneError(Error):
    """The version is no longer available: a later version has replaced it."""


class TimeoutError(Error, builtins.TimeoutError):
    """The timeout expired. The message names what the call was waiting for."""


class RankTakenError(Error):
    """Another worker holds the rank."""


class ServerIdTakenError(Error):
    """Another shard server has registered with the same id, and answers."""


class LeaseLostError(Error):
    """This worker's lease on its rank has ended."""


class DisagreementError(Error):
    """The ranks passed different values that must be equal: in a step, or for a mesh, a plan or
    placements."""


class ParkingFullError(Error):
    """The server's buffer for early gradients is full."""


class OutOfMemoryError(Error, MemoryError):
    """A server does not have enough memory for the job."""


class InsufficientMemoryError(OutOfMemoryError):
    """The shard servers have no room for the job; the message has the bytes of each server."""


class LimitExceededError(Error):
    """A limit of the cluster or of a server is reached, such as its number of jobs."""


class DeviceError(Error):
    """A device of a server has failed. The message names it, and the slice if that is known."""


class UnavailableError(Error, ConnectionError):
    """A server cannot be reached."""


class InternalError(Error):
    """A bug in ZeroShard."""


# ---- raised by the Python package


class NotInitialisedError(Error):
    """No session is open, or it does not fit this process: call :func:`zeroshard.init` first."""


class InvalidTypeError(InvalidArgumentError, TypeError):
    """An argument has a type that is not accepted."""


class LayoutsError(InvalidArgumentError, AssertionError):
    """The declared and the desired layouts of a module's inputs or outputs differ in number or in
    the names of the inputs."""


class NotATensorError(Error, TypeError, RuntimeError):
    """A tensor was expected, and another type was passed."""


class UnsupportedModuleError(Error, NotImplementedError):
    """The parallel style does not support this type of module. The message lists the supported
    types."""


class StaticGraphError(Error, NotImplementedError):
    """The function was called in Paddle's static graph mode."""


class AlreadyParallelError(Error, RuntimeError):
    """The module is already parallelised."""


class UnsupportedOptimizerError(Error, TypeError):
    """The shard servers do not implement this optimizer."""


class UnusedParameterError(Error):
    """A parameter has a gradient on some ranks only."""

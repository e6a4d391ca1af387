"""The exceptions of ZeroShard.

Most scripts catch :class:`Error`, or one of four: :class:`StepAbortedError` (run the step again),
:class:`TimeoutError` and :class:`UnavailableError` (the cluster or another rank does not answer),
and :class:`DisagreementError` (the ranks do not run the same script). ``error.remedy`` says what to
do.

An error that the servers or the client report is named after its Rust variant: ``JobFailed`` is
:class:`JobFailedError`. The fields of the variant (``job``, ``step``, ``rank``, ``epoch``, ...) are
attributes of the exception. If Python has a built-in exception with the same meaning, the class is
also a subclass of it.
"""

from __future__ import annotations

import builtins
import re

#: Separates what happened from what to do in a message. A remedy may consist of alternatives.
_BEFORE_REMEDY = re.compile("; (?!or )")


class Error(Exception):
    """Base class of all exceptions of ZeroShard.

    ``str(error)`` says what happened and where. :attr:`remedy` says what to do.
    """

    #: The remedy if the message states none.
    _remedy: str = "correct what the message names, and run the script again"
    #: ``False`` if the text after a semicolon in the message is not a remedy.
    _states_remedy: bool = True

    @property
    def remedy(self) -> str:
        """What to do: the part of the message after its last semicolon, or, if the message states
        no remedy, the one that applies to every error of this class."""
        _, *stated = _BEFORE_REMEDY.split(str(self))
        return stated[-1] if stated and self._states_remedy else self._remedy

    @remedy.setter
    def remedy(self, remedy: str) -> None:
        # The extension module sets the fields of a variant, of which one is called so.
        self._remedy = remedy


# ---- reported by the servers and the client


class InvalidArgumentError(Error, ValueError):
    """An argument is invalid. Repeating the call does not help."""


class UnauthenticatedError(Error, PermissionError):
    """The cluster's token is missing or wrong."""

    _remedy = "set ZEROSHARD_TOKEN to the token of the cluster"


class ForbiddenError(Error, PermissionError):
    """The token or certificate has a role that does not permit the call."""

    _remedy = "use a token or a certificate of a role that permits the call"


class TlsError(Error, ConnectionError):
    """The two sides of a connection do not trust each other, or only one of them uses TLS."""

    _remedy = "pass both sides certificates of the same authority, or none"


class VersionMismatchError(Error):
    """The client and the coordinator do not have the same minor version."""

    _remedy = "install the same version of the client and of the servers"


class UnknownJobError(Error):
    """The cluster has no job of this name."""

    _remedy = "list the jobs with `zsctl status`"


class JobExistsError(Error):
    """A different job of this name exists: the ranks disagree about the model or the optimizer."""

    _remedy = "choose another name with zeroshard.init(name=...), or delete the existing job"


class JobFailedError(Error):
    """The job cannot continue."""

    _remedy = "start all ranks again; they continue from the last checkpoint if there is one"


class NotHereError(Error):
    """Another server owns the slice."""

    _remedy = "call again: the client asks the coordinator for the current placement"


class StaleEpochError(Error):
    """The epoch of the call is not the job's current epoch."""

    _remedy = "run the step again in the current epoch"


class JobReplacedError(Error):
    """The job was deleted, and a new job has its name."""

    _remedy = "end this process, and start it again to join the new job"


class StaleTermError(Error):
    """A newer coordinator has taken over."""

    _remedy = "connect to the coordinator of the current term"
    _states_remedy = False


class StaleAttemptError(Error):
    """The ranks have discarded this attempt at the step."""

    _remedy = "run the step again"


class RankLeftError(Error):
    """A rank that the step needs has left the job. Every rank must run the same number of steps."""

    _remedy = "run the same number of steps on every rank, or train inside zeroshard.torch.join"


class StepMismatchError(Error):
    """The step is not the job's open step."""

    _remedy = "call backward() and optimizer.step() once per step on every rank"
    _states_remedy = False


class StepAbortedError(Error):
    """A rank or a server was lost, and all gradients of the step were dropped. Run the step again
    with the same data, or use :func:`zeroshard.steps`, which does."""

    _remedy = "run the step again with the same data, or loop over zeroshard.steps, which does"


class RolledBackError(Error):
    """The job has returned to a checkpoint, because a server or the data of a rank for checkpoints
    was lost, or by :func:`zeroshard.rewind`. ``version`` is the version of the checkpoint; call
    :meth:`zeroshard.Checkpoints.resume` to continue from it, or use :func:`zeroshard.steps`, which
    does."""

    _remedy = "call Checkpoints.resume(), or loop over zeroshard.steps, which does"

    version: int


class NoCheckpointError(Error):
    """There is no complete checkpoint."""

    _remedy = "list the checkpoints with `zsctl checkpoint ls`"


class UserDataLostError(NoCheckpointError):
    """A version cannot be saved because the data of a rank for it was lost: the rank ended before
    it had sent the data, or the coordinator before it had stored it."""

    _remedy = "save a later version, or continue from an earlier checkpoint"


class CheckpointDamagedError(Error):
    """A file of a checkpoint is missing, incomplete or damaged."""

    _remedy = "restore another version, or another copy of the checkpoint"


class StorageError(Error, OSError):
    """A checkpoint cannot be read or written."""

    _remedy = "check the URL of the checkpoints, its permissions and its free space"


class VersionGoneError(Error):
    """The version is no longer available: a later version has replaced it."""

    _remedy = "read the current version"
    _states_remedy = False


class TimeoutError(Error, builtins.TimeoutError):
    """The timeout expired. The message names what the call was waiting for."""

    _remedy = (
        "check what the message says the call waited for, or raise zeroshard.init(timeout=...)"
    )


class RankTakenError(Error):
    """Another worker holds the rank."""

    _remedy = "end the other worker of this rank, or wait until its lease has ended"


class ServerIdTakenError(Error):
    """Another shard server has registered with the same id, and answers."""

    _remedy = "give each server an id of its own with --id"


class LeaseLostError(Error):
    """This worker's lease on its rank has ended."""

    _remedy = "start this rank again"


class DisagreementError(Error):
    """The ranks passed different values that must be equal: in a step, or for a mesh, a plan or
    placements."""

    _remedy = "pass the same values on all ranks"


class ParkingFullError(Error):
    """The server's buffer for early gradients is full."""

    _remedy = "raise --parked-bytes of the servers"


class OutOfMemoryError(Error, MemoryError):
    """A server does not have enough memory for the job."""

    _remedy = "add shard servers, or give them more memory with --memory"


class InsufficientMemoryError(OutOfMemoryError):
    """The shard servers have no room for the job; the message has the bytes of each server."""


class LimitExceededError(Error):
    """A limit of the cluster or of a server is reached, such as its number of jobs."""

    _remedy = "raise the limit that the message names"
    _states_remedy = False


class DeviceError(Error):
    """A device of a server has failed. The message names it, and the slice if that is known."""

    _remedy = "replace the device, or start the server without it"


class UnavailableError(Error, ConnectionError):
    """A server cannot be reached."""

    _remedy = "check with `zsctl status` that the servers run and can be reached from this host"


class InternalError(Error):
    """A bug in ZeroShard."""

    _remedy = "report the bug with this message"


# ---- raised by the Python package


class NotInitialisedError(Error):
    """No session is open, or it does not fit this process: call :func:`zeroshard.init` first."""

    _remedy = "call zeroshard.init() first"


class InvalidTypeError(InvalidArgumentError, TypeError):
    """An argument has a type that is not accepted."""


class LayoutsError(InvalidArgumentError, AssertionError):
    """The declared and the desired layouts of a module's inputs or outputs differ in number or in
    the names of the inputs."""


class NotATensorError(Error, TypeError, RuntimeError):
    """A tensor was expected, and another type was passed."""

    _remedy = "pass a tensor"


class UnsupportedModuleError(Error, NotImplementedError):
    """The parallel style does not support this type of module. The message lists the supported
    types."""

    _remedy = "use another parallel style, or leave the module out of the plan"


class StaticGraphError(Error, NotImplementedError):
    """The function was called in Paddle's static graph mode."""

    _remedy = "call paddle.disable_static() first"


class AlreadyParallelError(Error, RuntimeError):
    """The module is already parallelised."""

    _remedy = "parallelize each module once"


class UnsupportedOptimizerError(Error, TypeError):
    """The shard servers do not implement this optimizer."""

    _remedy = "use one of the optimizers that the message lists"


class UnusedParameterError(Error):
    """A parameter has a gradient on some ranks only."""

    _remedy = "pass find_unused_parameters=True"


class UnsupportedVersionError(Error, ImportError):
    """The installed version of torch, Paddle or another library is outside of the bounds."""

    _remedy = "install a version within the bounds; zeroshard.check() lists them"


class MissingNameError(Error, NotImplementedError):
    """The installed version of torch, Paddle or another library has no private name that the
    feature needs. Other features work."""

    _remedy = "install a version that zeroshard.check() lists"

"""ZeroShard: optimizer state, gradients and parameters of a training job, on shard servers.

import zeroshard as zs

zs.init()
zs.shard(model, optimizer)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import errors
from ._averages import Average
from ._checkpoints import Checkpoints
from ._environment import Environment, check
from ._native import __version__
from ._pin import Pinned
from ._report import TrainingReport, report
from ._rewind import rewind
from ._session import Session, init, shutdown, status
from ._spikes import SpikePolicy
from ._status import JobStatus, ServerStatus, Status
from ._steps import Step, steps
from .errors import (
    AlreadyParallelError,
    CheckpointDamagedError,
    DeviceError,
    DisagreementError,
    Error,
    ForbiddenError,
    InsufficientMemoryError,
    InternalError,
    InvalidArgumentError,
    InvalidTypeError,
    JobExistsError,
    JobFailedError,
    JobReplacedError,
    LayoutsError,
    LeaseLostError,
    LimitExceededError,
    MissingNameError,
    NoCheckpointError,
    NotATensorError,
    NotHereError,
    NotInitialisedError,
    OutOfMemoryError,
    ParkingFullError,
    RankLeftError,
    RankTakenError,
    ServerIdTakenError,
    RolledBackError,
    StaleAttemptError,
    StaleEpochError,
    StaleTermError,
    StaticGraphError,
    StepAbortedError,
    StepMismatchError,
    StorageError,
    TimeoutError,
    TlsError,
    UnauthenticatedError,
    UnavailableError,
    UnknownJobError,
    UnsupportedModuleError,
    UnsupportedOptimizerError,
    UnsupportedVersionError,
    UnusedParameterError,
    UserDataLostError,
    VersionGoneError,
    VersionMismatchError,
)

if TYPE_CHECKING:
    from .torch import shard as shard

# Without "shard", since `from zeroshard import *` would import torch.
__all__ = [
    "AlreadyParallelError",
    "Average",
    "CheckpointDamagedError",
    "Checkpoints",
    "DeviceError",
    "DisagreementError",
    "Environment",
    "Error",
    "ForbiddenError",
    "InsufficientMemoryError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "JobExistsError",
    "JobFailedError",
    "JobReplacedError",
    "JobStatus",
    "LayoutsError",
    "LeaseLostError",
    "LimitExceededError",
    "MissingNameError",
    "NoCheckpointError",
    "NotATensorError",
    "NotHereError",
    "NotInitialisedError",
    "OutOfMemoryError",
    "ParkingFullError",
    "Pinned",
    "RankLeftError",
    "RankTakenError",
    "ServerIdTakenError",
    "ServerStatus",
    "Session",
    "RolledBackError",
    "StaleAttemptError",
    "StaleEpochError",
    "StaleTermError",
    "StaticGraphError",
    "SpikePolicy",
    "Status",
    "Step",
    "StepAbortedError",
    "StepMismatchError",
    "StorageError",
    "TimeoutError",
    "TrainingReport",
    "TlsError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownJobError",
    "UnsupportedModuleError",
    "UnsupportedOptimizerError",
    "UnsupportedVersionError",
    "UnusedParameterError",
    "UserDataLostError",
    "VersionGoneError",
    "VersionMismatchError",
    "__version__",
    "check",
    "errors",
    "init",
    "report",
    "rewind",
    "shutdown",
    "status",
    "steps",
]


def __getattr__(name: str) -> Any:
    """Imports ``zeroshard.shard``, and with it torch, when it is first used."""
    if name != "shard":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .torch import shard
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise ImportError(
            "zeroshard.shard is for PyTorch, which is not installed; install torch or, for models "
            "of Paddle, use zeroshard.paddle.group_sharded_parallel"
        ) from error
    return shard

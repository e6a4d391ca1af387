"""ZeroShard: optimizer state, gradients and parameters of a training job, on shard servers.

import zeroshard as zs
from zeroshard.torch import group_sharded_parallel

zs.init()
model, optimizer, scaler = group_sharded_parallel(model, optimizer, "p_g_os")
"""

from __future__ import annotations

from . import errors
from ._checkpoints import Checkpoints
from ._native import __version__
from ._pin import Pinned
from ._report import TrainingReport, report
from ._session import Session, init, shutdown, status
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
    NoCheckpointError,
    NotATensorError,
    NotHereError,
    NotInitialisedError,
    OutOfMemoryError,
    ParkingFullError,
    RankLeftError,
    RankTakenError,
    RolledBackError,
    StaleAttemptError,
    StaleEpochError,
    StaleTermError,
    StaticGraphError,
    StepAbortedError,
    StepMismatchError,
    StorageError,
    TimeoutError,
    UnauthenticatedError,
    UnavailableError,
    UnknownJobError,
    UnsupportedModuleError,
    UnsupportedOptimizerError,
    UnusedParameterError,
    UserDataLostError,
    VersionGoneError,
    VersionMismatchError,
)

__all__ = [
    "AlreadyParallelError",
    "CheckpointDamagedError",
    "Checkpoints",
    "DeviceError",
    "DisagreementError",
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
    "NoCheckpointError",
    "NotATensorError",
    "NotHereError",
    "NotInitialisedError",
    "OutOfMemoryError",
    "ParkingFullError",
    "Pinned",
    "RankLeftError",
    "RankTakenError",
    "ServerStatus",
    "Session",
    "RolledBackError",
    "StaleAttemptError",
    "StaleEpochError",
    "StaleTermError",
    "StaticGraphError",
    "Status",
    "Step",
    "StepAbortedError",
    "StepMismatchError",
    "StorageError",
    "TimeoutError",
    "TrainingReport",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownJobError",
    "UnsupportedModuleError",
    "UnsupportedOptimizerError",
    "UnusedParameterError",
    "UserDataLostError",
    "VersionGoneError",
    "VersionMismatchError",
    "__version__",
    "errors",
    "init",
    "report",
    "shutdown",
    "status",
    "steps",
]

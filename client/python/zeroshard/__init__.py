"""ZeroShard: optimizer state, gradients and parameters of a training job, on shard servers.

import zeroshard as zs
from zeroshard.torch import group_sharded_parallel

zs.init()
model, optimizer, scaler = group_sharded_parallel(model, optimizer, "p_g_os")
"""

from __future__ import annotations

from . import errors
from ._native import __version__
from ._session import JobStatus, ServerStatus, Session, Status, init, shutdown, status
from .errors import (
    AlreadyParallel,
    Disagreement,
    Error,
    Internal,
    InvalidArgument,
    JobExists,
    JobFailed,
    JobReplaced,
    LeaseLost,
    NotATensor,
    NotHere,
    NotInitialised,
    OutOfMemory,
    ParkingFull,
    RankLeft,
    RankTaken,
    StaleAttempt,
    StaleEpoch,
    StaleTerm,
    StepAborted,
    StepMismatch,
    Timeout,
    Unauthenticated,
    Unavailable,
    UnknownJob,
    UnsupportedModule,
    UnsupportedOptimizer,
    UnusedParameter,
    VersionGone,
)

__all__ = [
    "AlreadyParallel",
    "Disagreement",
    "Error",
    "Internal",
    "InvalidArgument",
    "JobExists",
    "JobFailed",
    "JobReplaced",
    "JobStatus",
    "LeaseLost",
    "NotATensor",
    "NotHere",
    "NotInitialised",
    "OutOfMemory",
    "ParkingFull",
    "RankLeft",
    "RankTaken",
    "ServerStatus",
    "Session",
    "StaleAttempt",
    "StaleEpoch",
    "StaleTerm",
    "Status",
    "StepAborted",
    "StepMismatch",
    "Timeout",
    "Unauthenticated",
    "Unavailable",
    "UnknownJob",
    "UnsupportedModule",
    "UnsupportedOptimizer",
    "UnusedParameter",
    "VersionGone",
    "__version__",
    "errors",
    "init",
    "shutdown",
    "status",
]

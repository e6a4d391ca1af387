"""The environment of the processes that test a library of torch. Importing it sets the environment,
and has to come before the import of torch."""

from __future__ import annotations

import os

# One thread a process, as every rank has, and nothing of a launcher's environment.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
for name in (
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ZEROSHARD_ADDRESS",
    "ZEROSHARD_TOKEN",
):
    os.environ.pop(name, None)

#: What ranks that train many models may take, in seconds.
LONG = 600.0
#: ``True`` if trainings have the number of steps that `tests/run long` has time for.
IS_LONG = os.environ.get("ZEROSHARD_TEST_LONG") == "1"

"""The end of a rank's process, when the libraries are finalized."""

from __future__ import annotations

import os
import subprocess
import sys

from ranks import environments

#: Functions that are registered with ``on_exit`` before Paddle is imported run after its static
#: objects are destroyed. glibc passes them the exit status and a pointer: ``sleep(2)`` waits two
#: seconds, and ``dprintf(2, "ending\\n")`` writes to standard error. The last one runs first.
PROGRAM = """
import ctypes
import sys

libc = ctypes.CDLL(None)
libc.on_exit.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
text = b"ending\\n"
if {rank} == 0:
    libc.on_exit(ctypes.cast(libc.sleep, ctypes.c_void_p), None)
    libc.on_exit(ctypes.cast(libc.dprintf, ctypes.c_void_p), text)

import paddle
import zeroshard.paddle as dist

mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
dist.shard_tensor(paddle.ones([4, 4]), mesh, [dist.Shard(0)])
if {rank} == 1:
    sys.stdin.read()
sys.exit(2)
"""


def test_rank_0_exits_with_its_own_status_when_another_rank_disconnects_meanwhile() -> None:
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(rank=rank)],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank, environment in enumerate(environments(2))
    )
    with first, second:
        try:
            assert first.stderr is not None
            said: list[str] = []
            while not said or said[-1] not in ("ending\n", ""):
                said.append(first.stderr.readline())
            assert said[-1] == "ending\n", said
            second.communicate("")
            assert (first.wait(60), second.wait(60)) == (2, 2)
        finally:
            first.kill()
            second.kill()


#: The wrapper is deleted, and a forward of the layer cannot fetch its parameters.
FAILED_FETCH = """
import gc
import paddle
import paddle.distributed
import zeroshard as zs
import zeroshard.paddle as dist

paddle.distributed.init_parallel_env()
layer = paddle.nn.Sequential(paddle.nn.Linear(8, 8), paddle.nn.Linear(8, 8))
optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
model, optimizer, _ = dist.group_sharded_parallel(layer, optimizer, "p_g_os", segment_size=16)
model(paddle.ones([2, 8])).mean().backward()
optimizer.step()
del model, optimizer
gc.collect()
try:
    layer(paddle.ones([2, 8]))
except zs.Error:
    print("failed")
"""


def test_ranks_exit_after_a_forward_that_could_not_fetch_parameters() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", FAILED_FETCH],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for environment in environments(2)
    ]
    try:
        said = [process.communicate(timeout=60)[0] for process in processes]
        assert said == ["failed\n", "failed\n"]
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()

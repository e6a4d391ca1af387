"""A client that nobody wrote for ZeroShard: generated from the .proto files by grpc_tools, against
the shipped binaries.

Creates a job, joins it, pushes parameters and gradients, commits, pulls, and tells errors apart by
their type.
"""

import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

import grpc
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_status import rpc_status
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
# Every wait has an end.
TIMEOUT = 30


def generate(folder: str) -> None:
    """Writes the stubs that any user of the .proto files would have."""
    files = sorted(str(path) for path in (ROOT / "proto" / "zeroshard").rglob("*.proto"))
    arguments = [
        "protoc",
        f"-I{ROOT / 'proto'}",
        f"--python_out={folder}",
        f"--grpc_python_out={folder}",
        *files,
    ]
    if protoc.main(arguments) != 0:
        raise RuntimeError("the .proto files do not compile")
    sys.path.insert(0, folder)


STUBS = tempfile.TemporaryDirectory()
generate(STUBS.name)

from zeroshard.v1 import (  # noqa: E402 (generated above)
    coordinator_pb2,
    coordinator_pb2_grpc,
    data_pb2,
    data_pb2_grpc,
    shard_pb2,
    shard_pb2_grpc,
    types_pb2,
)


class Server:
    """A server process on port 0."""

    def __init__(self, *arguments: str) -> None:
        command = [TARGET / "release" / "zeroshard-server", *arguments]
        command += ["--listen", "127.0.0.1:0", "--admin-listen", "off", "--json", "--log", "error"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.address = json.loads(self.process.stdout.readline())["address"]
        self.channel = grpc.insecure_channel(self.address)

    def stop(self) -> int:
        """Asks it to end; its exit status."""
        self.channel.close()
        self.process.terminate()
        status = self.process.wait(TIMEOUT)
        self.process.stdout.close()
        return status


def floats(values: list[float]) -> bytes:
    """Little-endian f32."""
    return struct.pack(f"<{len(values)}f", *values)


def numbers(payload: bytes) -> list[float]:
    """What `floats` was made of."""
    return list(struct.unpack(f"<{len(payload) // 4}f", payload))


class StockClient(unittest.TestCase):
    """One cluster for all tests; a job for each."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.coordinator = Server("coordinator")
        cls.shards = [Server("shard", "--coordinator", cls.coordinator.address) for _ in range(2)]
        cls.stub = coordinator_pb2_grpc.CoordinatorServiceStub(cls.coordinator.channel)

    @classmethod
    def tearDownClass(cls) -> None:
        statuses = [server.stop() for server in [*cls.shards, cls.coordinator]]
        assert statuses == [0, 0, 0], statuses

    def spec(self, name: str) -> types_pb2.JobSpec:
        """Plain SGD on a matrix, a bias that is tied to nothing, and a frozen tensor."""
        f32 = types_pb2.DTYPE_F32
        return types_pb2.JobSpec(
            name=name,
            tensors=[
                types_pb2.Tensor(name="w", shape=[2, 3], dtype=f32),
                types_pb2.Tensor(name="b", shape=[], dtype=f32),
                types_pb2.Tensor(name="frozen", shape=[2], dtype=f32, frozen=True),
            ],
            groups=[types_pb2.Optimizer(name="sgd", hyperparameters={"lr": 0.5})],
            world=1,
            min_servers=2,
        )

    def start(self, name: str) -> tuple:
        """Creates and joins a job: the lease, and the stream that keeps it."""
        request = coordinator_pb2.CreateJobRequest(spec=self.spec(name))
        self.stub.CreateJob(request, timeout=TIMEOUT)
        stream = self.stub.Join(coordinator_pb2.JoinRequest(job=name, rank=0))
        lease = next(stream)
        self.addCleanup(stream.cancel)
        return lease, stream

    def data(
        self, lease: coordinator_pb2.JoinResponse, slice_number: int
    ) -> data_pb2_grpc.DataServiceStub:
        """The server that owns a slice."""
        address = lease.placement.servers[lease.placement.owners[slice_number]].address
        server = next(shard for shard in self.shards if shard.address == address)
        return data_pb2_grpc.DataServiceStub(server.channel)

    def push(
        self, lease, name: str, slice_number: int, values: list[float], step: int | None = None
    ) -> data_pb2.PushResponse:
        """Pushes a whole slice, an element a message: a gradient, or without a step the initial
        parameters."""
        opening = data_pb2.PushBegin(
            job=name, job_id=lease.job_id, lease=lease.lease, epoch=lease.epoch, rank=0
        )
        if step is None:
            opening.upload.SetInParent()
        else:
            opening.gradients.step = step
        messages = [data_pb2.PushRequest(begin=opening)]
        for offset, value in enumerate(values):
            extent = {"slice": slice_number, "offset": offset, "dtype": types_pb2.DTYPE_F32}
            messages.append(data_pb2.PushRequest(payload=floats([value]), **extent))
        return self.data(lease, slice_number).Push(iter(messages), timeout=TIMEOUT)

    def pull(self, lease, name: str, version: int, slice_number: int) -> list[float]:
        """A whole slice."""
        request = data_pb2.PullRequest(
            job=name,
            job_id=lease.job_id,
            epoch=lease.epoch,
            version=version,
            dtype=types_pb2.DTYPE_F32,
            extents=[data_pb2.Extent(slice=slice_number)],
        )
        answer = self.data(lease, slice_number).Pull(request, timeout=TIMEOUT)
        return [value for message in answer for value in numbers(message.payload)]

    def refused(self, call, code: grpc.StatusCode) -> tuple[str, dict]:
        """The reason that a call is refused with, and its fields."""
        with self.assertRaises(grpc.RpcError) as raised:
            call()
        self.assertEqual(raised.exception.code(), code)
        status = rpc_status.from_call(raised.exception)
        info = error_details_pb2.ErrorInfo()
        self.assertTrue(status.details[0].Unpack(info))
        self.assertEqual(info.domain, "zeroshard")
        return info.reason, json.loads(info.metadata["detail"])

    def test_a_generated_client_trains_a_step(self) -> None:
        """Parameters in, gradients in, commit, parameters out: w - lr * g."""
        lease, _ = self.start("step")
        initial = [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [7.0], [8.0, 9.0]]
        for number, values in enumerate(initial):
            pushed = self.push(lease, "step", number, values)
            self.assertEqual((pushed.added, pushed.duplicates), (len(values), 0))
        gradients = [[1.0, -1.0, 0.0, 2.0, -2.0, 0.5], [4.0]]
        for number, values in enumerate(gradients):
            self.push(lease, "step", number, values, step=0)
            again = self.push(lease, "step", number, values, step=0)
            self.assertEqual((again.added, again.duplicates), (0, len(values)))
        turn = coordinator_pb2.Turn(
            job="step",
            job_id=lease.job_id,
            lease=lease.lease,
            epoch=lease.epoch,
            rank=0,
            step=0,
            attempt=0,
        )
        commit = coordinator_pb2.CommitRequest(turn=turn, loss=2.5)
        report = self.stub.Commit(commit, timeout=TIMEOUT)
        self.assertTrue(report.applied)
        self.assertEqual((report.version, report.world, report.loss), (1, 1, 2.5))
        norm = sum(value * value for values in gradients for value in values) ** 0.5
        self.assertAlmostEqual(report.gradient_norm, norm, places=12)
        for number, (before, gradient) in enumerate(zip(initial, gradients)):
            expected = [w - 0.5 * g for w, g in zip(before, gradient)]
            self.assertEqual(self.pull(lease, "step", 1, number), expected)
        self.assertEqual(self.pull(lease, "step", 1, 2), initial[2])
        described = self.stub.DescribeJob(
            coordinator_pb2.DescribeJobRequest(job="step"), timeout=TIMEOUT
        )
        self.assertEqual(described.version, 1)
        digests = [
            digest.slice
            for shard in self.shards
            for digest in shard_pb2_grpc.ShardServiceStub(shard.channel)
            .Digest(shard_pb2.DigestRequest(job="step", version=1), timeout=TIMEOUT)
            .slices
        ]
        self.assertEqual(sorted(digests), [0, 1, 2])

    def test_a_pull_waits_for_its_version(self) -> None:
        """Sent before the parameters are there."""
        lease, _ = self.start("wait")
        pulled = []
        thread = threading.Thread(target=lambda: pulled.append(self.pull(lease, "wait", 0, 0)))
        thread.start()
        for number, values in enumerate([[1.0] * 6, [2.0], [3.0] * 2]):
            self.push(lease, "wait", number, values)
        thread.join(TIMEOUT)
        self.assertEqual(pulled, [[1.0] * 6])

    def test_errors_have_types(self) -> None:
        """A reason in google.rpc.ErrorInfo, and fields that a program can read."""
        lease, _ = self.start("errors")
        for number, values in enumerate([[1.0] * 6, [2.0], [3.0] * 2]):
            self.push(lease, "errors", number, values)

        reason, detail = self.refused(
            lambda: self.push(lease, "errors", 0, [0.0] * 7, step=0),
            grpc.StatusCode.INVALID_ARGUMENT,
        )
        self.assertEqual(reason, "INVALID")
        self.assertIn('"w"', detail["what"])
        self.assertIn("6", detail["expected"])

        reason, _ = self.refused(
            lambda: self.push(lease, "errors", 2, [0.0], step=0), grpc.StatusCode.INVALID_ARGUMENT
        )
        self.assertEqual(reason, "INVALID")

        reason, detail = self.refused(
            lambda: self.push(lease, "errors", 0, [0.0], step=5),
            grpc.StatusCode.FAILED_PRECONDITION,
        )
        self.assertEqual((reason, detail["step"], detail["current"]), ("STEP_MISMATCH", 5, 0))

        stale = coordinator_pb2.JoinResponse()
        stale.CopyFrom(lease)
        stale.epoch -= 1
        reason, detail = self.refused(
            lambda: self.push(stale, "errors", 0, [0.0], step=0),
            grpc.StatusCode.FAILED_PRECONDITION,
        )
        self.assertEqual((reason, detail["current"]), ("STALE_EPOCH", lease.epoch))

        reason, detail = self.refused(
            lambda: self.stub.DescribeJob(
                coordinator_pb2.DescribeJobRequest(job="nobody's"), timeout=TIMEOUT
            ),
            grpc.StatusCode.NOT_FOUND,
        )
        self.assertEqual((reason, detail["job"]), ("UNKNOWN_JOB", "nobody's"))

        reason, detail = self.refused(
            lambda: next(
                self.stub.Join(
                    coordinator_pb2.JoinRequest(job="errors", rank=0, wait_ms=1), timeout=TIMEOUT
                )
            ),
            grpc.StatusCode.ALREADY_EXISTS,
        )
        self.assertEqual((reason, detail["rank"]), ("RANK_TAKEN", 0))

        request = data_pb2.PullRequest(
            job="errors",
            version=9,
            dtype=types_pb2.DTYPE_F32,
            extents=[data_pb2.Extent(slice=0)],
        )
        # The server answers before the deadline of the call.
        reason, detail = self.refused(
            lambda: list(self.data(lease, 0).Pull(request, timeout=2)),
            grpc.StatusCode.DEADLINE_EXCEEDED,
        )
        self.assertEqual(reason, "TIMEOUT")
        self.assertIn("version 9", detail["waiting_for"])

    def test_health_is_served(self) -> None:
        """As load balancers and Kubernetes ask for it."""
        for server in [self.coordinator, *self.shards]:
            answer = health_pb2_grpc.HealthStub(server.channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT
            )
            self.assertEqual(answer.status, health_pb2.HealthCheckResponse.SERVING)

    def test_reflection_describes_every_service(self) -> None:
        """v1, whose messages are those of v1alpha."""
        for server, service in [
            (self.coordinator, "CoordinatorService"),
            (self.shards[0], "DataService"),
            (self.shards[0], "ShardService"),
        ]:
            reflect = server.channel.stream_stream(
                "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            name = f"zeroshard.v1.{service}"
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=name),
            ]
            listed, described = reflect(iter(requests), timeout=TIMEOUT)
            services = [each.name for each in listed.list_services_response.service]
            self.assertIn(name, services)
            self.assertIn("grpc.health.v1.Health", services)
            found = [
                descriptor_pb2.FileDescriptorProto.FromString(file)
                for file in described.file_descriptor_response.file_descriptor_proto
            ]
            self.assertTrue(any(s.name == service for file in found for s in file.service))


if __name__ == "__main__":
    unittest.main()

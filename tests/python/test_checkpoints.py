"""Checkpoints in an S3 store over HTTP, and their files as the official reader of safetensors
finds them.

The store is the server of moto. The cluster, the worker and zsctl are the binaries of tests/run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import tempfile
import unittest
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer
from safetensors import safe_open

from servers import BINARY, servers

BUCKET = "checkpoints"
PLACE = f"s3://{BUCKET}/some prefix"
JOB = "train"
#: Seconds that a command may take.
TIMEOUT = 120
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "checkpoint"
#: Large enough that a file is uploaded in several parts.
MODEL = "--width 384 --blocks 2 --context 16 --batch 2 --sample-chars 0"


def tensors(path: Path) -> dict[str, Any]:
    """The tensors of a file, by name."""
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_slice(name) for name in file.keys()}


class GoldenCheckpoint(unittest.TestCase):
    def test_every_file_is_read(self) -> None:
        found = {}
        for path in GOLDEN.rglob("*.safetensors"):
            for name, tensor in tensors(path).items():
                found[name] = (tensor.get_dtype(), tensor.get_shape())
        self.assertEqual(
            found,
            {
                "master/embedding.weight/0": ("F32", [24]),
                "row_var/embedding.weight/0": ("F32", [6]),
                "col_var/embedding.weight/0": ("F32", [4]),
                "master/block.weight/0": ("F32", [12]),
                "row_var/block.weight/0": ("F32", [4]),
                "col_var/block.weight/0": ("F32", [3]),
                "master/block.bias/0": ("F32", [3]),
                "variance/block.bias/0": ("F32", [3]),
                "values/block.scale/0": ("BF16", [5]),
                "values/norm.running_mean/0": ("F32", [2]),
                "master/temperature/0": ("F32", [1]),
                "variance/temperature/0": ("F32", [1]),
                "rank/0": ("U8", [12]),
                "rank/3": ("U8", [1000]),
            },
        )


class ObjectStore(unittest.TestCase):
    def setUp(self) -> None:
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (self.folder / "data").mkdir()
        # Short, because the worker evaluates the model on a part of it after each step.
        (self.folder / "data" / "text.md").write_text("The quick brown fox jumps. " * 30)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        store = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        store.start()
        stack.callback(store.stop)
        host, port = store.get_host_and_port()
        variables = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
            # Not a variable of a store, although an option of S3 has this name.
            "ENDPOINT": "http://127.0.0.1:1",
        }
        before = dict(os.environ)
        stack.callback(lambda: (os.environ.clear(), os.environ.update(before)))
        os.environ |= variables
        self.s3 = boto3.client(
            "s3", endpoint_url=variables["AWS_ENDPOINT_URL"], region_name="us-east-1"
        )
        self.s3.create_bucket(Bucket=BUCKET)

    def objects(self) -> dict[str, Any]:
        """The objects of the bucket, by key, without the claims of jobs."""
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        found = [item for page in pages for item in page.get("Contents", [])]
        return {item["Key"]: item for item in found if "/claims/" not in item["Key"]}

    def run_binary(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(BINARY.with_name(name)), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)

    def zsctl(self, *arguments: str) -> list[Any]:
        """Runs ``zsctl checkpoint``. Returns what it prints."""
        result = self.run_binary("zsctl", "checkpoint", "--json", *arguments, "--url", PLACE)
        self.assertEqual(result.returncode, 0, result.stderr)
        return [json.loads(line) for line in result.stdout.splitlines()]

    def train(self, steps: int, *flags: str, shards: int = 2) -> list[Any]:
        """Trains on a new cluster. Returns what the worker prints."""
        with servers(shards) as address:
            result = self.run_binary(
                "zeroshard-worker",
                *["train", "--json", "--address", address, "--shards", str(shards)],
                *["--data", str(self.folder / "data"), "--out", str(self.folder / "out")],
                *["--job", JOB, "--steps", str(steps), *MODEL.split()],
                *["--checkpoint", PLACE, "--checkpoint-keep", "2", *flags],
            )
        self.assertEqual(result.returncode, 0, result.stderr)
        return [json.loads(line) for line in result.stdout.splitlines()]

    def test_a_job_is_saved_resumed_verified_exported_and_removed(self) -> None:
        # The policy saves version 2, and 4 unless 2 is still being saved. The last is always saved.
        self.train(7, "--checkpoint-every", "2")
        first, last = [line["version"] for line in self.zsctl("ls")]
        self.assertIn(first, (2, 4, 6))
        self.assertEqual(last, 7)
        objects = self.objects()
        files = [key for key in objects if key.endswith(".safetensors")]
        # Two checkpoints of two servers: earlier ones have been removed.
        self.assertEqual((len(files), len(objects)), (4, 6), objects.keys())
        parts = [int(objects[key]["ETag"].strip('"').rpartition("-")[2]) for key in files]
        self.assertGreater(min(parts), 1, "every file has several parts")
        self.assertEqual(self.s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []), [])

        self.check_files(files)
        [verified] = self.zsctl("verify", JOB)
        self.assertEqual(verified["version"], 7)
        self.check_export()
        self.check_second_save()
        self.check_damage(files[0])

        # Another number of servers continues from the latest version.
        resumed = self.train(9, "--checkpoint-every", "2", shards=3)
        steps = [line["step"] for line in resumed if line.get("event") == "step"]
        self.assertEqual(steps[0], 7)
        # The first cluster has not ended its job, and could come back for some minutes: its
        # checkpoints stay.
        versions = [line["version"] for line in self.zsctl("ls")]
        self.assertEqual(versions, [first, 7, 8, 9])
        for version in versions:
            self.zsctl("rm", JOB, str(version))
        self.assertEqual(self.objects(), {})

    def check_files(self, files: list[str]) -> None:
        """The official reader opens every file, and finds the state of every parameter."""
        names: list[str] = []
        for number, key in enumerate(files):
            path = self.folder / f"{number}.safetensors"
            self.s3.download_file(BUCKET, key, str(path))
            names += tensors(path)
        parts = {part: {n.split("/", 1)[1] for n in names if n.startswith(part + "/")}
                 for part in ("master", "exp_avg", "exp_avg_sq")}  # fmt: skip
        self.assertTrue(parts["master"])
        self.assertEqual(parts["master"], parts["exp_avg"])
        self.assertEqual(parts["master"], parts["exp_avg_sq"])

    def check_export(self) -> None:
        one, several = self.folder / "one", self.folder / "several"
        self.zsctl("export", JOB, "--to", str(one))
        self.zsctl("export", JOB, "--to", str(several), "--file-bytes", "2000000")
        index = json.loads((several / "model.safetensors.index.json").read_text())
        whole = tensors(one / "model.safetensors")
        self.assertEqual(whole.keys(), index["weight_map"].keys())
        for name, file in index["weight_map"].items():
            part = tensors(several / file)[name]
            self.assertTrue((part[...] == whole[name][...]).all(), name)

    def check_second_save(self) -> None:
        """The first complete checkpoint of a version remains, and the files of the second save are
        removed."""
        with servers(1) as address:
            self.zsctl("restore", JOB, "7", "--name", "again", "--address", address)
            first = self.zsctl("save", "again", "--address", address)
            objects = self.objects()
            self.assertEqual(self.zsctl("save", "again", "--address", address), first)
            self.assertEqual(self.objects(), objects)
        self.zsctl("rm", "again", "7")

    def check_damage(self, key: str) -> None:
        """A change of a byte is found, and the error names the file."""
        content = bytearray(self.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        version = str(int(key.split("/")[-2]))
        for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content[:-1]):
            self.s3.put_object(Bucket=BUCKET, Key=key, Body=bytes(damaged))
            result = self.run_binary("zsctl", "checkpoint", "verify", JOB, version, "--url", PLACE)
            self.assertNotEqual(result.returncode, 0)
            self.assertIn(key.rpartition("/")[2], result.stderr)
        self.s3.put_object(Bucket=BUCKET, Key=key, Body=bytes(content))
        self.zsctl("verify", JOB, version)

    def test_a_missing_bucket_is_an_error_that_names_it(self) -> None:
        place = "s3://nowhere/prefix"
        result = self.run_binary("zsctl", "checkpoint", "ls", "--url", place)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn(place, result.stderr)
        # The answer of the store: a store at another address would not give it.
        self.assertIn("NoSuchBucket", result.stderr)


if __name__ == "__main__":
    unittest.main()

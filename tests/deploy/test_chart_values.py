"""Every value of the Helm chart has an effect, and wrong values are refused by name."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from manifests import CHART, Manifest, helm, templated
from programs import ROOT, VERSION

sys.path.insert(0, str(ROOT / "tests" / "python"))
from pages import Block, blocks

VALUES: Manifest = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: Manifest = json.loads((CHART / "values.schema.json").read_text())
DIGEST = "sha256:" + 64 * "0"
ELECTION = "coordinators.election.url=https://etcd.example:2379/a"
#: Values that no example sets: further values that each needs, and what is rendered with it.
OTHERS: dict[str, tuple[list[str], str]] = {
    "image.repository=example.com:5000/a": ([], f"image: example.com:5000/a:{VERSION}\n"),
    "image.tag=0.1.1": ([], "image: zeroshard:0.1.1\n"),
    f"image.digest={DIGEST}": (["image.tag=0.1.1"], f"image: zeroshard@{DIGEST}\n"),
    "image.pullSecrets={a-registry}": ([], "imagePullSecrets:\n        - name: a-registry\n"),
    "tokenSecret=a-token": ([], "secret: {secretName: a-token,"),
    "servers.gpu.memory=70GiB": (
        ["servers.gpu.enabled=true"],
        '{name: ZEROSHARD_DEVICE, value: "cuda:0"}\n'
        '            - {name: ZEROSHARD_DEVICE_MEMORY, value: "70GiB"}\n',
    ),
    "servers.gpu.runtimeClass=nvidia": (["servers.gpu.enabled=true"], "runtimeClassName: nvidia\n"),
    "servers.env.ZEROSHARD_LOG=warn": ([], '{name: ZEROSHARD_LOG, value: "warn"}'),
    "servers.nodeSelector.pool=a": ([], "nodeSelector:\n        pool: a\n"),
    "servers.tolerations[0].key=a": ([], "tolerations:\n        - key: a\n"),
    "coordinators.cpu=2": ([], 'cpu: "2"\n'),
    "coordinators.memory=1Gi": ([], "memory: 1Gi\n"),
    "coordinators.election.seconds=20": (
        [ELECTION],
        '{name: ZEROSHARD_ELECTION_SECONDS, value: "20"}',
    ),
    "coordinators.election.namespace=": ([ELECTION], "- {protocol: TCP, port: 2379}\n---"),
    "coordinators.election.secret=a-secret": (
        [ELECTION],
        "- name: etcd\n          secret: {secretName: a-secret,",
    ),
    "coordinators.env.ZEROSHARD_LOG=warn": ([], '{name: ZEROSHARD_LOG, value: "warn"}'),
    "coordinators.nodeSelector.pool=a": ([], "nodeSelector:\n        pool: a\n"),
    "coordinators.tolerations[0].key=a": ([], "tolerations:\n        - key: a\n"),
    "tls.secret=a-secret": (["tls.enabled=true"], "secretName: a-secret\n"),
    "tls.issuer.name=an-issuer": (["tls.enabled=true"], "{name: an-issuer, kind: Issuer}"),
    "tls.issuer.kind=ClusterIssuer": (
        ["tls.enabled=true"],
        "{name: zeroshard, kind: ClusterIssuer}",
    ),
    "checkpoints.ports={9001}": (["checkpoints.secret=a"], "port: 9001}\n---"),
    "metrics.namespace=a-place": ([], "{kubernetes.io/metadata.name: a-place}"),
    "metrics.labels.release=a-name": (["metrics.alerts=true"], "release: a-name\n"),
    "traces.ratio=0.5": (
        ["traces.endpoint=http://collector:4317"],
        '{name: ZEROSHARD_TRACE_RATIO, value: "0.5"}',
    ),
    "traces.namespace=a-place": (
        ["traces.endpoint=http://collector:4317"],
        "{kubernetes.io/metadata.name: a-place}",
    ),
}
#: Values that are refused, with what the message must say.
REFUSED: dict[tuple[str, ...], str] = {
    ("serverz.count=1",): "additional properties 'serverz' not allowed",
    ("servers.gpu.memroy=1GiB",): "at '/servers/gpu': additional properties 'memroy' not allowed",
    ("servers.count=three",): "at '/servers/count': got string, want integer",
    ("servers.count=0",): "at '/servers/count': minimum: got 0, want 1",
    ("servers.memory=lots",): "at '/servers/memory': 'lots' does not match pattern",
    ("servers.spread=somehow",): "at '/servers/spread': value must be one of",
    ("image.digest=sha256:1",): "at '/image/digest': 'sha256:1' does not match pattern",
    ("image.repository=a:latest",): "at '/image/repository': 'a:latest' does not match pattern",
    ("traces.ratio=2",): "at '/traces/ratio': maximum: got 2, want 1",
    ("servers.env.ZEROSHARD_LOG=1",): "at '/servers/env/ZEROSHARD_LOG': got number, want string",
    ("image.tag=latest",): "image.tag is latest",
    ("coordinators.count=3",): "coordinators.count is 3, but coordinators.election.url is empty",
    ("coordinators.election.secret=a",): "coordinators.election.secret is a, but",
    ("servers.gpu.memory=1GiB",): "servers.gpu.memory is 1GiB, but servers.gpu.enabled is false",
    ("servers.gpu.runtimeClass=a",): "servers.gpu.runtimeClass is a, but",
    ("checkpoints.env.AWS_REGION=a",): "checkpoints.env is set, but checkpoints.secret is empty",
    ("servers.env.ZEROSHARD_ZONE=a",): 'servers.env.ZEROSHARD_ZONE is "a", but the chart',
    ("servers.env.ZEROSHARD_LISTEN=a",): 'servers.env.ZEROSHARD_LISTEN is "a", but the chart',
    (
        "checkpoints.secret=a",
        "checkpoints.env.AWS_REGION=a",
        "coordinators.env.AWS_REGION=b",
    ): 'coordinators.env.AWS_REGION is "b", but the chart',
}


def sets(assignments: list[str] | tuple[str, ...]) -> list[str]:
    return [part for assignment in assignments for part in ("--set", assignment)]


def leaves(values: Manifest, path: str = "") -> Iterator[str]:
    """The names of the values that are no groups of others."""
    for key, value in values.items():
        if isinstance(value, dict) and value and key != "env":
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key


def test_every_value_is_tested() -> None:
    ours = [yaml.safe_load(path.read_text()) for path in (CHART / "examples").iterdir()]
    in_examples = {leaf for values in ours for leaf in leaves(values)}
    in_others = {
        re.split(r"=|\[|(?<=env)\.|(?<=nodeSelector)\.|(?<=labels)\.", each)[0] for each in OTHERS
    }
    assert in_examples.isdisjoint(in_others)
    assert in_examples | in_others == set(leaves(VALUES))


@pytest.mark.parametrize("assignment", OTHERS)
def test_a_value_changes_what_is_rendered(assignment: str) -> None:
    needed, expected = OTHERS[assignment]
    assert expected not in templated(*sets(needed))
    assert expected in templated(*sets([*needed, assignment]))


@pytest.mark.parametrize("assignments", REFUSED, ids=" ".join)
def test_wrong_values_are_refused_by_name(assignments: tuple[str, ...]) -> None:
    process = helm("template", CHART, *sets(assignments))
    assert process.returncode != 0
    assert REFUSED[assignments] in process.stderr


@pytest.mark.parametrize(
    "block", [block for block in blocks("yaml") if block.kind == "values"], ids=str
)
def test_values_in_the_documentation_are_accepted(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "my-cluster.yaml"
    file.write_text(block.text)
    assert templated("--values", file) != templated()


def test_the_schema_has_exactly_the_values_of_the_chart() -> None:
    # Helm adds it where a chart is a part of another.
    del SCHEMA["properties"]["global"]
    check_schema(VALUES, SCHEMA)


def check_schema(values: Manifest, schema: Manifest) -> None:
    assert schema["additionalProperties"] is False
    assert list(schema["properties"]) == list(values)
    assert schema["required"] == list(values)
    for key, value in values.items():
        if isinstance(value, dict) and value:
            check_schema(value, schema["properties"][key])

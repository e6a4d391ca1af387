"""Each overlay changes what it promises to change."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from manifests import environment, manifests, of_kind
from programs import BINARIES

SHARD, COORDINATOR = "zeroshard-shard", "zeroshard-coordinator"


def container_of(overlay: str, stateful: str) -> dict:
    (container,) = of_kind(overlay, "StatefulSet")[stateful]["spec"]["template"]["spec"][
        "containers"
    ]
    return container


def spread_of(overlay: str, stateful: str) -> dict[str, str]:
    """What the scheduler does when it cannot spread, by topology."""
    specification = of_kind(overlay, "StatefulSet")[stateful]["spec"]["template"]["spec"]
    return {
        constraint["topologyKey"]: constraint["whenUnsatisfiable"]
        for constraint in specification["topologySpreadConstraints"]
    }


def test_the_base_spreads_servers_and_keeps_all_but_one() -> None:
    assert spread_of("s3-checkpoints", SHARD) == {
        "topology.kubernetes.io/zone": "ScheduleAnyway",
        "kubernetes.io/hostname": "ScheduleAnyway",
    }
    assert of_kind("s3-checkpoints", "PodDisruptionBudget")[SHARD]["spec"]["maxUnavailable"] == 1


def test_minimal_is_one_server() -> None:
    counts = {
        name: item["spec"]["replicas"] for name, item in of_kind("minimal", "StatefulSet").items()
    }
    assert counts == {COORDINATOR: 1, SHARD: 1}


def test_highly_available_has_an_election_and_zones() -> None:
    overlay = "highly-available"
    coordinators = of_kind(overlay, "StatefulSet")[COORDINATOR]["spec"]["replicas"]
    assert coordinators == 2
    variables = environment(container_of(overlay, COORDINATOR))
    assert re.fullmatch(r"etcd://[\w.]+:2379/\w+", variables["ZEROSHARD_ELECTION"])
    addresses = environment(container_of(overlay, SHARD))["ZEROSHARD_COORDINATOR"].split(",")
    assert addresses == [
        f"{COORDINATOR}-{index}.{COORDINATOR}:7400" for index in range(coordinators)
    ]
    for stateful in (SHARD, COORDINATOR):
        assert spread_of(overlay, stateful) == {
            "topology.kubernetes.io/zone": "DoNotSchedule",
            "kubernetes.io/hostname": "DoNotSchedule",
        }
    assert set(of_kind(overlay, "PodDisruptionBudget")) == {COORDINATOR, SHARD}


def test_gpu_asks_for_a_device() -> None:
    container = container_of("gpu", SHARD)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert environment(container)["ZEROSHARD_DEVICE"] == "auto"
    assert "nvidia.com/gpu" not in container_of("gpu", COORDINATOR)["resources"]["limits"]


@pytest.mark.parametrize("stateful", [SHARD, COORDINATOR])
def test_s3_credentials_come_from_a_secret(stateful: str) -> None:
    sources = container_of("s3-checkpoints", stateful)["envFrom"]
    assert {"secretRef": {"name": "zeroshard-s3"}} in sources
    (name,) = (source["configMapRef"]["name"] for source in sources if "configMapRef" in source)
    assert of_kind("s3-checkpoints", "ConfigMap")[name]["data"] == {"AWS_REGION": "us-east-1"}
    assert not any(manifest["kind"] == "Secret" for manifest in manifests("s3-checkpoints"))


def test_the_servers_may_connect_to_an_object_store_and_to_minio() -> None:
    (egress,) = of_kind("s3-checkpoints", "NetworkPolicy")["zeroshard-s3"]["spec"]["egress"]
    assert {port["port"] for port in egress["ports"]} == {443, 9000}


def test_a_zone_without_a_name_is_accepted() -> None:
    """Before version 1.35 of Kubernetes, the label of the zone is empty."""
    command = [BINARIES / "zeroshard-server", "shard", "--listen", "127.0.0.1:0", "--json"]
    command += ["--admin-listen", "off", "--coordinator", "127.0.0.1:1", "--log", "error"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={"ZEROSHARD_ZONE": ""}
    )
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "listening"
    finally:
        process.kill()
        process.communicate()

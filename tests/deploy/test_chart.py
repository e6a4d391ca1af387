"""The Helm chart renders what Kustomize renders."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from manifests import (
    CHART,
    COMPONENTS,
    EXAMPLES,
    HELM,
    NAMESPACE,
    OVERLAYS,
    Manifest,
    examples,
    helm,
    manifests,
    pods,
    templated,
)
from programs import DEPLOY, VERSION


def compared(name: str) -> dict[tuple[str, str], Manifest]:
    """The objects by kind and name, without the differences that have no effect: the order of
    variables and volumes, and where the namespace is written."""
    objects = {(each["kind"], each["metadata"]["name"]): each for each in manifests(name)}
    settings = {
        key: each["data"]
        for key, each in objects.items()
        if key[0] == "ConfigMap" and "AWS_REGION" in each["data"]
    }
    for key in settings:
        del objects[key]
    for each in objects.values():
        each["metadata"].pop("namespace", None)
        for _, specification in pods(each):
            in_order(specification, {name: data for (_, name), data in settings.items()})
    if certificate := objects.get(("Certificate", "zeroshard-server")):
        # The component names two coordinators, because it does not know their number.
        coordinators = objects["StatefulSet", "zeroshard-coordinator"]["spec"]["replicas"]
        names = certificate["spec"]["dnsNames"]
        if (
            coordinators == 1
            and (second := "zeroshard-coordinator-1.zeroshard-coordinator") in names
        ):
            names.remove(second)
    return objects


def in_order(specification: Manifest, settings: dict[str, dict[str, str]]) -> None:
    """Sorts what has no order in the pods of a cluster, and replaces ConfigMaps by their values."""
    specification["volumes"].sort(key=lambda volume: volume["name"])
    for container in specification["containers"]:
        container["volumeMounts"].sort(key=lambda mount: mount["name"])
        variables = container["env"]
        # Kubernetes replaces $(NAME) only if it has come to NAME before.
        for number, variable in enumerate(variables):
            before = {each["name"] for each in variables[:number]}
            assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= before
        sources = container.pop("envFrom", [])
        for source in sources:
            if "configMapRef" in source:
                of = settings[source["configMapRef"]["name"]]
                variables += [{"name": key, "value": value} for key, value in of.items()]
        container["secrets"] = [each for each in sources if "secretRef" in each]
        names = [variable["name"] for variable in variables]
        assert len(set(names)) == len(names), names
        variables.sort(key=lambda variable: variable["name"])


@pytest.mark.parametrize("name", [*OVERLAYS, *COMPONENTS, "highly-available+tls"])
def test_an_example_of_the_chart_equals_its_overlay_or_component(name: str) -> None:
    ours, theirs = compared(f"chart:{name}"), compared(name)
    assert ours.keys() == theirs.keys()
    for key, manifest in theirs.items():
        # Helm adds labels. Those of pods and selectors are compared with everything else.
        labels = ours[key]["metadata"].pop("labels")
        assert manifest["metadata"].pop("labels", {}).items() <= labels.items()
        assert ours[key] == manifest, key


def test_there_is_an_example_for_each_overlay_and_component() -> None:
    assert set(EXAMPLES) == {*OVERLAYS, *COMPONENTS}


def test_the_chart_has_the_version_of_the_programs() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


@pytest.mark.parametrize("arguments", [[], examples("everything")], ids=["default", "everything"])
def test_lint_finds_nothing(arguments: list[str | Path]) -> None:
    process = helm("lint", "--strict", CHART, *arguments)
    assert process.returncode == 0, process.stdout


def test_prometheus_checks_certificates_by_a_name_that_they_have() -> None:
    objects = compared("chart:service-monitor+tls")
    (endpoint,) = objects["ServiceMonitor", "zeroshard"]["spec"]["endpoints"]
    certificate = objects["Certificate", "zeroshard-server"]["spec"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["serverName"] in certificate["dnsNames"]
    secret = endpoint["tlsConfig"]["ca"]["secret"]
    assert secret == {"name": certificate["secretName"], "key": "ca.crt"}


def test_without_an_issuer_the_certificate_is_that_of_the_user() -> None:
    text = templated("--set", "tls.enabled=true,tls.issuer.name=")
    assert "kind: Certificate" not in text
    assert text.count("secretName: zeroshard-server-tls") == 2


def test_the_notes_name_the_secret_and_the_addresses() -> None:
    arguments = examples("highly-available+tls")
    process = helm("install", "--dry-run=client", "a-release", CHART, "-n", NAMESPACE, *arguments)
    _, _, notes = process.stdout.partition("\nNOTES:\n")
    addresses = [f"zeroshard-coordinator-{each}.zeroshard-coordinator:7400" for each in (0, 1)]
    assert "ZEROSHARD_ADDRESS=" + ",".join(addresses) in notes
    assert f"kubectl -n {NAMESPACE} create secret generic zeroshard-token" in notes
    assert "zeroshard-server-tls" in notes


def test_the_package_renders_what_the_directory_renders(tmp_path: Path) -> None:
    """The package has files where the directory has links, and is the same each time."""
    written = []
    for folder in ("first", "second"):
        command = [DEPLOY / "helm/package.sh", tmp_path / folder]
        subprocess.run(command, check=True, env=os.environ | {"HELM": str(HELM)})
        written.append(tmp_path / folder / f"zeroshard-{VERSION}.tgz")
    arguments = examples("everything")
    assert templated(*arguments, chart=written[0]) == templated(*arguments)
    assert written[0].read_bytes() == written[1].read_bytes()

"""The manifests of deploy/k8s, as kubectl renders them, and the chart of deploy/helm."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from programs import DEPLOY, TARGET

KUBERNETES = DEPLOY / "k8s"
CHART = DEPLOY / "helm/zeroshard"
#: Programs that tests/run installs.
KUBECTL = TARGET / "kubernetes/kubectl/kubectl"
HELM = TARGET / "kubernetes/helm/helm"
#: Programs that are installed beside this interpreter.
BIN = Path(sys.executable).parent
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
#: Values of the chart that give what the overlay or component of the same name gives.
EXAMPLES = sorted(path.stem for path in (CHART / "examples").iterdir())
#: The chart with the values of each example, and with those of all but `minimal` together.
EVERYTHING = "chart:everything"
CHARTS = [*(f"chart:{name}" for name in EXAMPLES), EVERYTHING]
Manifest = dict[str, Any]
#: The namespace of the chart, and of what is rendered with a component.
NAMESPACE = "a-namespace"


def _kustomize(directory: Path) -> str:
    command = [KUBECTL, "kustomize", directory]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "deprecated" not in process.stderr, process.stderr
    return process.stdout


def _write(folder: Path, content: Manifest) -> None:
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a command of Helm."""
    return subprocess.run([HELM, *arguments], capture_output=True, text=True)


@functools.cache
def templated(*arguments: str | Path, chart: Path = CHART) -> str:
    """The text of the chart with these arguments, which name values."""
    process = helm("template", "zeroshard", chart, "--namespace", NAMESPACE, *arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout


def examples(name: str) -> list[str | Path]:
    """The arguments for the values of ``everything``, of an example, or of several joined by +."""
    names = name.split("+")
    if name == "everything":
        names = [each for each in EXAMPLES if each != "minimal"]
    return [part for each in names for part in ("--values", CHART / "examples" / f"{each}.yaml")]


@functools.cache
def rendered(name: str) -> str:
    """The text of an overlay, of a component together with the base, or of the workers.

    ``OVERLAY+COMPONENT`` is a component together with an overlay, and ``chart:EXAMPLES`` is the
    chart with these values.
    """
    if name.startswith("chart:"):
        return templated(*examples(name.removeprefix("chart:")))
    if name in OVERLAYS:
        return _kustomize(KUBERNETES / "overlays" / name)
    overlay, _, component = name.rpartition("+")
    if component in COMPONENTS:
        resources = f"overlays/{overlay}" if overlay else "base"
        with tempfile.TemporaryDirectory() as folder:
            # An overlay sets the namespace, and another one adds the component, as in the guide.
            inner = Path(folder).resolve() / "inner"
            inner.mkdir()
            below = [os.path.relpath(KUBERNETES / resources, inner)]
            _write(inner, {"namespace": NAMESPACE, "resources": below})
            added = [os.path.relpath(KUBERNETES / "components" / component, inner.parent)]
            outer = {"namespace": NAMESPACE, "resources": ["inner"], "components": added}
            _write(inner.parent, outer)
            return _kustomize(inner.parent)
    return _kustomize(KUBERNETES / name)


def manifests(name: str) -> list[Manifest]:
    """The objects of :func:`rendered`."""
    # The loader in C: the dashboards have 5,000 lines.
    loaded = yaml.load_all(rendered(name), yaml.CSafeLoader)
    return [manifest for manifest in loaded if manifest]


def of_kind(name: str, kind: str) -> dict[str, Manifest]:
    """The objects of a kind, by name."""
    return {
        manifest["metadata"]["name"]: manifest
        for manifest in manifests(name)
        if manifest["kind"] == kind
    }


def pods(value: Any) -> Iterator[tuple[Manifest, Manifest]]:
    """The pod templates within an object: their metadata and specification."""
    if isinstance(value, dict):
        specification = value.get("spec")
        if isinstance(specification, dict) and "containers" in specification:
            yield value.get("metadata", {}), specification
        else:
            for inner in value.values():
                yield from pods(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from pods(inner)


def environment(container: Manifest) -> dict[str, str]:
    """The environment of a container; a value from elsewhere is empty."""
    return {entry["name"]: entry.get("value", "") for entry in container.get("env", [])}

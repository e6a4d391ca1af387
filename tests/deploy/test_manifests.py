"""The manifests for Kubernetes fit the schemas, the binaries, and the Pod Security Standard
"restricted"."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import urllib.parse
from typing import Any

import kubeflow_trainer_api.models as trainer
import pytest
import yaml
from manifests import (
    BIN,
    CHARTS,
    COMPONENTS,
    EVERYTHING,
    NAMESPACE,
    OVERLAYS,
    environment,
    manifests,
    of_kind,
    pods,
    rendered,
)
from programs import DEPLOY, ROOT, VERSION, check_command, check_variables, help_of

CLUSTERS = [*OVERLAYS, *COMPONENTS, *CHARTS]
ALL = [*CLUSTERS, "workers"]
#: Kinds without a schema in Kubernetes; the tests below check their fields.
CUSTOM = {
    "Certificate",
    "JobSet",
    "PrometheusRule",
    "RayJob",
    "ServiceMonitor",
    "TrainJob",
    "TrainingRuntime",
}
#: Models of custom resources in the package of Kubeflow Trainer.
MODELS = {
    "JobSet": trainer.JobsetV1alpha2JobSet,
    "TrainJob": trainer.TrainerV1alpha1TrainJob,
    "TrainingRuntime": trainer.TrainerV1alpha1TrainingRuntime,
}
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "runAsGroup": 65532,
    "fsGroup": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
#: Seconds between the end of --drain-seconds and the end of the process.
LAST_TASKS = 5


# The chart renders the same objects; see test_chart.py.
@pytest.mark.parametrize("name", [*OVERLAYS, *COMPONENTS, "workers", EVERYTHING])
def test_manifests_fit_the_schemas_of_kubernetes(name: str) -> None:
    command = [BIN / "kubernetes-validate", "--strict", "-"]
    process = subprocess.run(command, input=rendered(name), capture_output=True, text=True)
    output = process.stdout + process.stderr
    assert process.returncode == 0, output
    unknown = set(re.findall(r"Couldn't find schema for kind (\w+)", output))
    assert unknown <= CUSTOM, output


@pytest.mark.parametrize("kind", MODELS)
def test_custom_resources_of_workers_fit_their_models(kind: str) -> None:
    found = of_kind("workers", kind)
    assert found
    for manifest in found.values():
        # A model ignores fields that it does not know: they are missing when it is written again.
        assert_within(manifest, MODELS[kind].from_dict(manifest).to_dict())


def assert_within(given: Any, written: Any, path: str = "") -> None:
    """Checks that everything in ``given`` is in ``written``."""
    if isinstance(given, dict):
        for key, value in given.items():
            assert key in (written or {}), f"{path}/{key} is not a field"
            assert_within(value, written[key], f"{path}/{key}")
    elif isinstance(given, list):
        for index, (value, other) in enumerate(zip(given, written, strict=True)):
            assert_within(value, other, f"{path}/{index}")
    else:
        assert given == written, path


def test_the_ray_job_has_only_fields_of_its_version() -> None:
    (job,) = of_kind("workers", "RayJob").values()
    assert job["apiVersion"] == "ray.io/v1"
    specification = job["spec"]
    assert specification.keys() <= {
        "entrypoint",
        "submissionMode",
        "shutdownAfterJobFinishes",
        "ttlSecondsAfterFinished",
        "rayClusterSpec",
    }
    assert specification["submissionMode"] in {"K8sJobMode", "HTTPMode"}
    cluster = specification["rayClusterSpec"]
    assert cluster.keys() == {"headGroupSpec", "workerGroupSpecs"}
    assert cluster["headGroupSpec"].keys() == {"rayStartParams", "template"}
    (group,) = cluster["workerGroupSpecs"]
    assert group.keys() == {
        "groupName",
        "replicas",
        "minReplicas",
        "maxReplicas",
        "rayStartParams",
        "template",
    }
    example = re.fullmatch(r"python /examples/(\w+\.py)", specification["entrypoint"])
    assert example and (ROOT / "client/python/examples" / example[1]).exists()


def test_the_service_monitor_selects_the_services_and_their_port() -> None:
    (monitor,) = of_kind("service-monitor", "ServiceMonitor").values()
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    specification = monitor["spec"]
    keys = {"jobLabel", "selector", "targetLabels", "endpoints"}
    assert specification.keys() == keys
    (endpoint,) = specification["endpoints"]
    keys = {"port", "path", "honorLabels", "interval", "scrapeTimeout", "authorization"}
    assert endpoint.keys() == keys
    # The token must be that of the servers.
    token = endpoint["authorization"]["credentials"]
    servers = of_kind("service-monitor", "StatefulSet")
    assert len(servers) == 2
    for server in servers.values():
        volumes = server["spec"]["template"]["spec"]["volumes"]
        (secret,) = [volume["secret"] for volume in volumes if "secret" in volume]
        assert token == {"name": secret["secretName"], "key": "token"}
    # The series have a label job, which is the name of a training job.
    assert endpoint["honorLabels"] is True
    wanted = specification["selector"]["matchLabels"].items()
    services = of_kind("service-monitor", "Service")
    assert len(services) == 2
    for service in services.values():
        assert wanted <= service["metadata"]["labels"].items()
        # The name of Prometheus' job, for which the alerts look.
        assert service["metadata"]["labels"][specification["jobLabel"]].startswith("zeroshard")
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}


def test_the_alerts_are_a_rule_of_the_prometheus_operator() -> None:
    (rule,) = of_kind("alerts", "PrometheusRule").values()
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    assert rule["spec"] == yaml.safe_load((DEPLOY / "helm/zeroshard/files/alerts.yml").read_text())
    program = runpy.run_path(str(DEPLOY / "prometheus/prometheus_rule.py"))
    assert program["RULE"].read_text() == program["text"](), (
        "run: python3 deploy/prometheus/prometheus_rule.py"
    )


def test_the_dashboards_are_those_of_compose_and_grafana_finds_them() -> None:
    (dashboards,) = of_kind("dashboards", "ConfigMap").values()
    files = {
        path.name: path.read_text()
        for path in DEPLOY.glob("helm/zeroshard/files/dashboards/*.json")
    }
    assert dashboards["data"] == files
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"
    # `kubectl apply` stores a copy in an annotation.
    assert len(json.dumps(dashboards)) < 256 * 1024


@pytest.mark.parametrize("cluster", ["tls", "highly-available+tls", "chart:tls", EVERYTHING])
def test_the_certificate_of_servers_has_their_role_and_the_names_at_which_they_are_dialled(
    cluster: str,
) -> None:
    (certificate,) = of_kind(cluster, "Certificate").values()
    assert certificate["apiVersion"] == "cert-manager.io/v1"
    specification = certificate["spec"]
    assert specification.keys() == {
        "secretName",
        "issuerRef",
        "duration",
        "renewBefore",
        "privateKey",
        "usages",
        "uris",
        "dnsNames",
    }
    assert specification["uris"] == ["zeroshard:server"]
    assert {"server auth", "client auth"} <= set(specification["usages"])
    namespace = certificate["metadata"]["namespace"]
    servers = of_kind(cluster, "StatefulSet")
    assert len(servers) == 2
    for name, server in servers.items():
        pod = server["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        variables = environment(container)
        dialled = [
            address
            for key in ("ZEROSHARD_ADVERTISE", "ZEROSHARD_COORDINATOR")
            if key in variables
            for address in variables[key].split(",")
        ]
        for address in dialled:
            host = address.rpartition(":")[0]
            host = host.replace("$(POD_NAME)", f"{name}-0").replace("$(POD_NAMESPACE)", namespace)
            assert any(
                host == known or known[:2] == "*." and host.partition(".")[2] == known[2:]
                for known in specification["dnsNames"]
            ), host
        files = {"CA": "ca.crt", "CERT": "tls.crt", "KEY": "tls.key"}
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "tls"]
        for key, file in files.items():
            assert variables[f"ZEROSHARD_TLS_{key}"] == f"{mount['mountPath']}/{file}"
        (volume,) = [volume["secret"] for volume in pod["volumes"] if volume["name"] == "tls"]
        assert volume["secretName"] == specification["secretName"]


def test_servers_may_connect_to_the_collector_of_their_traces() -> None:
    servers = of_kind("traces", "StatefulSet")
    assert len(servers) == 2
    for server in servers.values():
        (container,) = server["spec"]["template"]["spec"]["containers"]
        variables = environment(container)
        collector = urllib.parse.urlsplit(variables["ZEROSHARD_OTLP_ENDPOINT"])
        assert 0 < float(variables["ZEROSHARD_TRACE_RATIO"]) <= 1
    (egress,) = of_kind("traces", "NetworkPolicy")["zeroshard-traces"]["spec"]["egress"]
    assert [port["port"] for port in egress["ports"]] == [collector.port]
    (namespace,) = (
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for peer in egress["to"]
    )
    assert collector.hostname is not None
    assert collector.hostname.endswith(f".{namespace}")


@pytest.mark.parametrize("name", ALL)
def test_pods_are_restricted(name: str) -> None:
    found = [pod for manifest in manifests(name) for pod in pods(manifest)]
    assert found
    for _, specification in found:
        assert specification["securityContext"] == POD_SECURITY
        assert specification["automountServiceAccountToken"] is False
        assert specification["enableServiceLinks"] is False
        for field in ("hostNetwork", "hostPID", "hostIPC"):
            assert field not in specification
        for volume in specification["volumes"]:
            assert volume.keys() <= {"name", "secret", "configMap", "emptyDir"}
        for container in specification["containers"]:
            assert container["securityContext"] == CONTAINER_SECURITY
            resources = container["resources"]
            assert resources["requests"]["memory"] == resources["limits"]["memory"]
            assert all("hostPort" not in port for port in container.get("ports", []))
            # Environment variables are visible to others of the node; the token is a file.
            assert "ZEROSHARD_TOKEN" not in environment(container)
            token = environment(container)["ZEROSHARD_TOKEN_FILE"]
            mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
            assert mounts[token.rpartition("/")[0]]["readOnly"] is True


@pytest.mark.parametrize("name", ALL)
def test_images_have_the_version_of_the_programs(name: str) -> None:
    """A tag such as ``latest`` may be another version on each node."""
    for manifest in manifests(name):
        for _, specification in pods(manifest):
            for container in specification["containers"]:
                assert container["image"].partition(":")[2] == VERSION


@pytest.mark.parametrize("name", [*OVERLAYS, "workers"])
def test_no_namespace_is_hard_coded(name: str) -> None:
    """``kubectl -n`` selects the namespace, or an overlay of the user."""
    assert not of_kind(name, "Namespace")
    assert not [of for of in manifests(name) if "namespace" in of["metadata"]]
    assert not re.search(r"\.zeroshard\.svc|-n zeroshard\b", rendered(name))


@pytest.mark.parametrize("name", [*COMPONENTS, *CHARTS])
def test_objects_are_in_the_namespace_of_the_overlay_or_release(name: str) -> None:
    assert {of["metadata"]["namespace"] for of in manifests(name)} == {NAMESPACE}


@pytest.mark.parametrize("name", ALL)
def test_flags_and_variables_exist_in_the_binaries(name: str) -> None:
    for manifest in manifests(name):
        for _, specification in pods(manifest):
            for container in specification["containers"]:
                if container["image"].partition(":")[0] == "zeroshard":
                    documented = check_command(container["command"])
                    check_variables(documented, list(environment(container)))
                else:
                    # The Python package reads the variables of the Rust worker.
                    documented = help_of("zeroshard-worker", "train")
                    check_variables(documented, list(environment(container)))


@pytest.mark.parametrize("name", CLUSTERS)
def test_ports_are_those_of_the_servers(name: str) -> None:
    services = of_kind(name, "Service")
    for stateful in of_kind(name, "StatefulSet").values():
        (container,) = stateful["spec"]["template"]["spec"]["containers"]
        variables = environment(container)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        defaults = help_of(*container["command"]).listens
        for port, variable, flag in (
            ("grpc", "ZEROSHARD_LISTEN", "--listen"),
            ("admin", "ZEROSHARD_ADMIN_LISTEN", "--admin-listen"),
        ):
            assert variables[variable] == f"0.0.0.0:{ports[port]}"
            assert defaults[flag].rpartition(":")[2] == str(ports[port])
        service = services[stateful["spec"]["serviceName"]]["spec"]
        # A name of its own for each pod.
        assert service["clusterIP"] == "None"
        assert {port["name"]: port["port"] for port in service["ports"]} == ports
        assert all(port["targetPort"] == port["name"] for port in service["ports"])


@pytest.mark.parametrize("name", CLUSTERS)
def test_probes_ask_services_of_the_servers(name: str) -> None:
    health = (ROOT / "server/src/health.rs").read_text()
    services = set(re.findall(r'const \w+: &str = "(\w+)"', health))
    assert services == {"liveness", "readiness"}
    for stateful in of_kind(name, "StatefulSet").values():
        (container,) = stateful["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[probe]
            assert ("grpc" in asked) != ("httpGet" in asked)
            if "grpc" in asked:
                expected = "readiness" if probe == "readinessProbe" else "liveness"
                assert asked["grpc"] == {"port": ports["grpc"], "service": expected}
            else:
                assert asked["httpGet"] == {"path": "/healthz", "port": "admin"}


@pytest.mark.parametrize("name", CLUSTERS)
def test_servers_have_time_to_drain(name: str) -> None:
    for stateful in of_kind(name, "StatefulSet").values():
        specification = stateful["spec"]["template"]["spec"]
        (container,) = specification["containers"]
        before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain = int(environment(container)["ZEROSHARD_DRAIN_SECONDS"])
        grace = specification["terminationGracePeriodSeconds"]
        assert grace >= before + drain + LAST_TASKS


@pytest.mark.parametrize("name", CLUSTERS)
def test_policies_and_budgets_select_the_pods(name: str) -> None:
    budgets = of_kind(name, "PodDisruptionBudget").values()
    policies = of_kind(name, "NetworkPolicy").values()
    stateful = of_kind(name, "StatefulSet")
    ports = set()
    for selector, what in [
        *((budget["spec"]["selector"], budget) for budget in budgets),
        *((policy["spec"]["podSelector"], policy) for policy in policies),
    ]:
        selected = [
            server
            for server in stateful.values()
            if matches(selector, server["spec"]["template"]["metadata"]["labels"])
        ]
        assert selected, what["metadata"]["name"]
    for server in stateful.values():
        labels = server["spec"]["template"]["metadata"]["labels"]
        assert matches(server["spec"]["selector"], labels)
        covering = [
            policy["spec"] for policy in policies if matches(policy["spec"]["podSelector"], labels)
        ]
        types = {kind for policy in covering for kind in policy["policyTypes"]}
        assert types == {"Ingress", "Egress"}
        for policy in covering:
            for rule in policy.get("ingress", []):
                assert rule["from"], "every rule names its sources"
                ports |= {port["port"] for port in rule["ports"]}
    assert ports == {7400, 7401, 9400, 9401}


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Returns whether a label selector selects these labels. Its expressions have the operator
    In."""
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    return all(labels.get(part["key"]) in part["values"] for part in expressions)

"""The Dockerfiles, the compose files and the configuration of Prometheus fit each other and the
binaries."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml
from manifests import BIN
from programs import DEPLOY, ROOT, check_command, check_variables, help_of

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SERVERS = ["coordinator", "shard-1", "shard-2", "shard-3"]
WORKERS = ["worker-0", "worker-1"]


@pytest.mark.parametrize("name", ["Dockerfile", "torch.Dockerfile"])
def test_dockerfiles_have_no_findings(name: str) -> None:
    process = subprocess.run([BIN / "hadolint", DEPLOY / name], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


def test_the_image_has_no_root_and_no_shell() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    last = text[text.index("\nFROM scratch\n") :]
    assert "\nUSER 65532:65532\n" in last
    assert "\nRUN " not in last
    assert "--mount" not in text and "<<" not in text, "the legacy builder refuses these"
    assert 'CMD ["/usr/local/bin/zeroshard-server", "probe"]' in last
    assert "--service" in help_of("zeroshard-server", "probe").flags
    # The context of the final stage is the same for deploy/image.sh, which replaces this line.
    assert last.count("COPY") == 1 and "\nCOPY --from=build /rootfs/ /\n" in last


def test_the_services_are_those_of_the_guide() -> None:
    assert set(SERVICES) == {*SERVERS, *WORKERS, "prometheus", "alertmanager", "grafana"}
    observing = {
        name for name, service in SERVICES.items() if service.get("profiles") == ["observe"]
    }
    assert observing == {"prometheus", "alertmanager", "grafana"}


@pytest.mark.parametrize("name", SERVICES)
def test_containers_are_hardened(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"].partition(":")[0] != "0"
    assert service["mem_limit"] == service["memswap_limit"]
    assert service["pids_limit"] > 0
    assert service["restart"] == ("on-failure" if name in WORKERS else "unless-stopped")
    assert service["healthcheck"] and service["stop_grace_period"] and service["logging"]
    for port in service.get("ports", []):
        assert port.startswith("127.0.0.1:"), "ports are for this machine only"
    for volume in service.get("volumes", []):
        if volume.startswith((".", "$")):
            assert volume.endswith(":ro")


@pytest.mark.parametrize("name", SERVERS + WORKERS)
def test_flags_and_variables_exist_in_the_binaries(name: str) -> None:
    service = SERVICES[name]
    documented = check_command(service["command"])
    check_variables(documented, list(service["environment"]))
    assert service["environment"]["ZEROSHARD_TOKEN_FILE"] == "/run/secrets/token"
    assert service["secrets"] == ["token"]


@pytest.mark.parametrize("name", SERVERS)
def test_servers_listen_on_their_ports_and_can_drain(name: str) -> None:
    service = SERVICES[name]
    variables = service["environment"]
    listens = help_of(*service["command"][:2]).listens
    for flag, variable in (
        ("--listen", "ZEROSHARD_LISTEN"),
        ("--admin-listen", "ZEROSHARD_ADMIN_LISTEN"),
    ):
        assert variables[variable] == "0.0.0.0:" + listens[flag].rpartition(":")[2]
    assert (
        int(service["stop_grace_period"].rstrip("s"))
        >= int(variables["ZEROSHARD_DRAIN_SECONDS"]) + 5
    )
    assert service["healthcheck"]["test"] == ["CMD", "zeroshard-server", "probe"]


def test_images_of_others_are_pinned() -> None:
    for name in ("prometheus", "alertmanager", "grafana"):
        _, _, tag = SERVICES[name]["image"].rpartition(":")
        assert tag[-1].isdigit() and tag.count(".") == 2


def test_the_override_has_no_image_of_a_registry() -> None:
    override = yaml.safe_load((DEPLOY / "compose.debian.yaml").read_text())["services"]
    assert set(override) == {"prometheus", "alertmanager", "grafana"}
    assert override["grafana"]["scale"] == 0
    built = (DEPLOY / "debian-images.sh").read_text()
    for service in override.values():
        assert f"build {service['image']} " in built


def test_prometheus_scrapes_the_servers_of_the_compose_file() -> None:
    path = DEPLOY / "prometheus" / "prometheus.yml"
    if not path.exists():
        pytest.skip(f"{path.relative_to(ROOT)} does not exist")
    configuration = yaml.safe_load(path.read_text())
    groups = [
        group
        for job in configuration["scrape_configs"]
        for group in [
            *job.get("static_configs", []),
            *(
                group
                for files in job.get("file_sd_configs", [])
                for name in files["files"]
                for group in yaml.safe_load((path.parent / name).read_text())
            ),
        ]
    ]
    targets = {target for group in groups for target in group["targets"]}
    ports = {
        name: SERVICES[name]["environment"]["ZEROSHARD_ADMIN_LISTEN"].rpartition(":")[2]
        for name in SERVERS
    }
    assert {f"{name}:{port}" for name, port in ports.items()} <= targets
    managers = configuration["alerting"]["alertmanagers"]
    assert {"alertmanager:9093"} == {
        target
        for one in managers
        for static in one["static_configs"]
        for target in static["targets"]
    }


def test_prometheus_has_the_token_that_it_sends() -> None:
    configuration = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    jobs = [job for job in configuration["scrape_configs"] if job["job_name"] != "prometheus"]
    assert [job["authorization"] for job in jobs] == [
        {"credentials_file": "/run/secrets/token"}
    ] * 2
    assert SERVICES["prometheus"]["secrets"] == ["token"]


def test_secrets_are_not_in_the_repository_or_the_context() -> None:
    assert "/deploy/secrets" in (ROOT / ".gitignore").read_text().splitlines()
    assert "deploy/secrets" in (ROOT / ".dockerignore").read_text().splitlines()
    listed = subprocess.run(
        ["git", "ls-files", "deploy/secrets"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert listed.stdout == ""

"""The compose file starts a cluster in containers. It trains the trainer's model with the bits of a
run without containers, also when shard servers are restarted and killed."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import Project, Unavailable, docker, engine
from programs import DEPLOY, BINARIES, ROOT

IMAGE = "zeroshard-test"
SHARDS = ["shard-1", "shard-2", "shard-3"]
SERVERS = ["coordinator", *SHARDS]
WORKERS = ["worker-0", "worker-1"]
#: Steps of a run that nothing happens to, and the least of one in which servers are restarted.
SHORT, LONG = 60, 400
#: Seconds for which workers should train at least, so that all servers can be restarted meanwhile.
TRAINING = 35.0
#: Seconds for the start of all containers, for a step of a run, and until an alert fires.
START, STEP, ALERT = 90.0, 120.0, 60.0
#: Seconds for an answer. Other tests run beside these.
ANSWER = 60.0


def wait_for(what: str, condition: Callable[[], Any], seconds: float) -> Any:
    """Waits until a condition is true, and returns its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.3)
    return value


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """An engine with the image of the binaries."""
    with pytest.MonkeyPatch.context() as patch:
        try:
            with engine():
                # docker build must not ask the user of the machine for credentials.
                patch.setenv("DOCKER_CONFIG", "/nonexistent")
                subprocess.run([DEPLOY / "image.sh", IMAGE, BINARIES], check=True)
                yield IMAGE
        except Unavailable as error:
            pytest.skip(f"no container engine: {error}")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of this repository as training text, readable for the user in the containers."""
    folder = tmp_path_factory.mktemp("text")
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.rs"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    for path in [*folder.parents[:3], folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    return folder


@pytest.fixture
def project(image: str, text: Path, tmp_path: Path) -> Iterator[Callable[[int, bool], Project]]:
    """Creates the services for a number of steps, with the profile `observe` or without."""
    secrets = tmp_path / "secrets"
    subprocess.run([DEPLOY / "secrets.sh", secrets], check=True)
    started: list[Project] = []

    def create(steps: int, observe: bool) -> Project:
        files = ["compose.yaml"] + ["compose.debian.yaml"] * observe
        ports = ["ZEROSHARD_STATUS", "PROMETHEUS", "ALERTMANAGER", "GRAFANA"]
        environment = {f"{name}_PORT": "" for name in ports}
        environment |= {"ZEROSHARD_IMAGE": image, "ZEROSHARD_TEXT": str(text)}
        environment |= {"ZEROSHARD_STEPS": str(steps), "ZEROSHARD_SECRETS": str(secrets)}
        environment |= {"COMPOSE_PROFILES": "observe" if observe else ""}
        started.append(Project(*files, environment=environment))
        return started[-1]

    yield create
    for each in started:
        each.run("down", "--volumes", "--timeout", "1")


def reference(text: Path, steps: int, out: Path) -> dict[str, Any]:
    """The summary of a run in one process, without replicas."""
    command = [BINARIES / "zeroshard-worker", "train", "--steps", str(steps), "--json"]
    command += ["--data", text, "--out", out]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def short(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of the short run without containers."""
    return reference(text, SHORT, tmp_path_factory.mktemp("out"))


def zsctl(project: Project, *arguments: str) -> list[dict[str, Any]]:
    """Runs zsctl in the container of the coordinator, which has the token."""
    command = ["exec", project.container("coordinator"), "zsctl", "--json", *arguments]
    # `status` exits with 3 while a job lacks workers or replicas.
    output = docker(*command, check="status" not in arguments)
    return [json.loads(line) for line in output.splitlines()]


def state(project: Project, servers: list[str]) -> None:
    """Waits until servers are healthy, as their own probe says."""
    for name in servers:
        wait_for(
            f"{name} is healthy",
            lambda name=name: project.inspect(name, ".State.Health.Status") == '"healthy"',
            START,
        )


def finish(project: Project) -> str:
    """Waits until the workers have ended well. Returns the hash of the job's state.

    A run takes as long as it makes steps: beside other tests, nobody knows how long."""
    for name in WORKERS:
        latest, since = -1, time.monotonic()
        while project.inspect(name, ".State.Status") != '"exited"':
            if (now := version(project)) != latest:
                latest, since = now, time.monotonic()
            assert time.monotonic() - since < STEP, (
                f"{name} is at version {latest} for {STEP:.0f} s"
            )
            time.sleep(0.3)
        output = docker("logs", project.container(name))
        assert project.inspect(name, ".State.ExitCode") == "0", output
    return zsctl(project, "hash", "train")[0]["state_hash"]


def limit_and_peak(container: str) -> tuple[int, int]:
    """The memory limit of a container, and the most that it has used, as the kernel says."""
    root = Path("/sys/fs/cgroup")
    if (root / "memory/docker").exists():
        group = root / "memory/docker" / container
        names = "memory.limit_in_bytes", "memory.max_usage_in_bytes"
    else:
        (group,) = root.glob(f"**/*{container}*/")
        names = "memory.max", "memory.peak"
    limit, peak = (int((group / name).read_text()) for name in names)
    return limit, peak


def test_workers_train_to_the_bits_of_a_run_without_containers(
    project: Callable[[int, bool], Project], short: dict[str, Any]
) -> None:
    services = project(SHORT, False)
    services.run("up", "--detach")
    state(services, SERVERS)
    for name in SERVERS + WORKERS:
        host = json.loads(services.inspect(name, ".HostConfig"))
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        assert services.inspect(name, ".Config.User") == '"65532:65532"'
    assert finish(services) == short["state_hash"]
    for name in SERVERS:
        limit, peak = limit_and_peak(services.container(name))
        assert limit == json.loads(services.inspect(name, ".HostConfig.Memory")) > 0
        assert peak < limit
        assert services.inspect(name, ".State.OOMKilled") == "false"
    # The status page is on the loopback address of this machine.
    page = f"http://{services.run('port', 'coordinator', '9400')}/"
    assert page.startswith("http://127.0.0.1:")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(page, timeout=ANSWER)
    token = Path(services.environment["ZEROSHARD_SECRETS"], "token").read_text()
    asked = urllib.request.Request(page, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked, timeout=ANSWER) as answer:
        assert answer.status == 200
    # Another container of the network, without the token.
    command = ["run", "--rm", "--network", "zeroshard-test_default", IMAGE]
    command += ["zsctl", "--address", "coordinator:7400", "status"]
    refused = subprocess.run(["docker", *command], capture_output=True, text=True)
    assert refused.returncode != 0 and "token" in refused.stderr, refused.stderr


def test_servers_restart_and_die_under_training(
    project: Callable[[int, bool], Project], text: Path, tmp_path: Path, short: dict[str, Any]
) -> None:
    observe = observed_by_debian()
    steps = max(LONG, int(TRAINING * SHORT / short["seconds"]))
    services = project(steps, observe)
    services.run("up", "--detach")
    if observe:
        assert not services.container("grafana"), "Debian has no Grafana"
    state(services, SERVERS + (["prometheus", "alertmanager"] if observe else []))
    wait_for("training has begun", lambda: version(services) >= 20, START)
    if observe:
        wait_for("Prometheus has series of every server", lambda: series(services), START)
    for name in SHARDS:
        wait_for("every slice has two replicas", lambda: replicas(services) == 2.0, START)
        services.run("restart", name)
        state(services, [name])
    wait_for("every slice has two replicas", lambda: replicas(services) == 2.0, START)
    assert version(services) < steps, "the job has ended before the last server died"
    docker("kill", services.container("shard-2"))
    killed = time.monotonic()
    if observe:
        fired = wait_for("an alert names shard-2", lambda: alerts(services, "shard-2"), ALERT)
        print(f"{time.monotonic() - killed:.0f} s after the kill: {', '.join(sorted(fired))}")
    assert finish(services) == reference(text, steps, tmp_path / "out")["state_hash"]
    assert services.inspect("shard-2", ".State.Running") == "false"


def version(project: Project) -> int:
    """The version of the job; 0 before it exists and has parameters."""
    jobs = [line for line in zsctl(project, "status") if line["event"] == "job"]
    return (jobs[0]["version"] or 0) if jobs else 0


def replicas(project: Project) -> float:
    """The mean number of servers of a slice."""
    lines = zsctl(project, "status")
    slices = sum(line["slices"] for line in lines if line["event"] == "server")
    (job,) = (line for line in lines if line["event"] == "job")
    return slices / job["slices"]


def observed_by_debian() -> bool:
    """Builds the images of Prometheus and Alertmanager. Says so where that is not possible."""
    if not shutil.which("apt-get"):
        print("without Prometheus: this system has no Debian packages")
        return False
    subprocess.run([DEPLOY / "debian-images.sh"], check=True)
    return True


def fetch(project: Project, service: str, port: str, path: str) -> Any:
    """An answer of Prometheus or Alertmanager."""
    url = f"http://{project.run('port', service, port)}/{path}"
    with urllib.request.urlopen(url, timeout=ANSWER) as answer:
        return json.load(answer)


def series(project: Project) -> bool:
    """Returns whether Prometheus has series of ZeroShard from every server."""
    query = urllib.parse.quote('count by (instance) ({__name__=~"zeroshard_.+"})')
    result = fetch(project, "prometheus", "9090", f"api/v1/query?query={query}")["data"]["result"]
    found = {one["metric"]["instance"].partition(":")[0] for one in result}
    return found >= set(SERVERS)


def alerts(project: Project, name: str) -> set[str]:
    """The alerts about a server that Alertmanager has."""
    found = fetch(project, "alertmanager", "9093", "api/v2/alerts")
    labels = [one["labels"] for one in found if one["status"]["state"] != "resolved"]
    return {one["alertname"] for one in labels if one.get("instance", "").startswith(f"{name}:")}


def test_a_job_beyond_the_memory_limit_is_refused_and_nothing_is_killed(
    image: str, text: Path
) -> None:
    command = ["run", "--detach", "--memory", "64m", "--memory-swap", "64m", "--network", "none"]
    command += ["--read-only", "--volume", f"{text}:/text:ro", image]
    # The parameters of this model alone are 400 MB.
    command += ["zeroshard-worker", "train", "--width", "1024", "--steps", "1", "--data", "/text"]
    container = docker(*command)
    assert docker("wait", container) == "1"
    assert docker("inspect", "--format", "{{.State.OOMKilled}}", container) == "false"
    logs = subprocess.run(["docker", "logs", container], capture_output=True, text=True)
    assert "give them more memory (--memory)" in logs.stdout + logs.stderr


@pytest.mark.parametrize(
    "directory", ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64"]
)
def test_the_driver_of_a_gpu_is_found(image: str, directory: str, tmp_path: Path) -> None:
    """A driver without its functions, in the directories where container runtimes mount it."""
    library = tmp_path / "libcuda.so.1"
    source = tmp_path / "driver.c"
    source.write_text("int cuInit(unsigned flags) { return 100; }\n")
    # NVIDIA's driver is linked to these libraries, which are empty since glibc 2.34.
    link = ["-Wl,--no-as-needed", "-ldl", "-lpthread", "-lrt", "-lm"]
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, *link], check=True)
    command = ["run", "--rm", "--read-only", "--cap-drop", "ALL", "--network", "none"]
    server = ["zeroshard-server", "shard", "--device", "cuda:0", "--coordinator", "127.0.0.1:1"]
    without, found = (
        subprocess.run(["docker", *command, *mount, image, *server], capture_output=True, text=True)
        for mount in ([], ["--volume", f"{library}:{directory}/libcuda.so.1:ro"])
    )
    assert without.returncode != 0 and "libcuda.so was not found" in without.stderr
    assert found.returncode != 0 and "not found" not in found.stderr
    assert "driver" in found.stderr

"""The image, built and run for real: what is in it, joining, health, leaving, and what its volume keeps.

Its store, some 5 GB, is removed at the end. SWARM_CONTAINER_STORE=DIR keeps it there, for the next time.
SWARM_CONTAINER_DEVICE=cuda does all of it with the image for GPUs: 20 GB, and half an hour; no GPU is needed.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from packaging.requirements import Requirement

from peers.events import Contributed, Event, JoinLine, Serving, Started, StepDone, StopNow
from swarm.manifest import audit_run
from tests.process.podman import ROOT, Podman, base_image, remove

E = TypeVar("E", bound=Event)

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(2400)]

DEVICE = os.environ.get("SWARM_CONTAINER_DEVICE", "cpu")
IMAGE = f"localhost/swarm:test-{DEVICE}"
MAX_BYTES = {"cpu": 2.5e9, "cuda": 6.5e9}
KERNELS = {"cpu": "", "cuda": "libbitsandbytes_cuda130.so"}
LIMIT_S = 240.0
GRACE_S = 10
"""`docker stop` kills after this."""
HARDENED = ("--read-only", "--tmpfs=/tmp:mode=1777", "--cap-drop=all", "--security-opt=no-new-privileges")
"""As docs/security.md has it."""


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    kept = os.environ.get("SWARM_CONTAINER_STORE")
    folder = Path(kept) if kept else Path(tempfile.mkdtemp(prefix="swarm-images-"))
    try:
        podman = Podman(folder)
        podman.make_base(base_image())
        code, said = podman.once(base_image(), "true")
        if code:
            pytest.skip(f"containers cannot be run here: {said.strip()}")
        podman.build(IMAGE, "--build-arg", f"DEVICE={DEVICE}")
        try:
            yield podman
        finally:
            podman.close()
    finally:
        if not kept:
            remove(folder)


def inside(podman: Podman, script: str, *options: str) -> str:
    """What a shell in a container of the image prints."""
    code, said = podman.once(IMAGE, "-c", script, options=["--entrypoint", "/bin/sh", *options])
    assert code == 0, said
    return said.strip()


def test_the_image_is_lean_and_its_user_is_nobody(podman: Podman) -> None:
    assert inside(podman, "id -u; id -g").split() == ["10001", "10001"]
    compilers = "gcc cc g++ c++ clang make ld as tcc rustc cargo go nvcc /opt/swarm/bin/pip"
    assert not inside(podman, f"for name in {compilers}; do command -v $name; done; true")
    kernels = "find / -xdev -name 'libbitsandbytes_*' ! -name '*_cpu*' -printf '%f ' 2>/dev/null; true"
    assert inside(podman, kernels) == KERNELS[DEVICE]
    assert not inside(podman, "find /opt /root /data /tmp -xdev -name '*.whl' 2>/dev/null; true")
    assert not inside(podman, "find /opt /usr /etc -xdev -writable ! -type l 2>/dev/null; true")
    assert inside(podman, "touch /data/x && stat -c %a /data") == "700"
    about = podman.inspect(IMAGE)
    assert about["Config"]["User"] == "10001:10001"
    assert about["Config"]["Volumes"] == {"/data": {}}
    assert about["Healthcheck"]["Test"] == ["CMD", "swarm", "health", "/tmp/health.sock"]
    assert about["Config"]["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert about["Size"] < MAX_BYTES[DEVICE], f"{about['Size'] / 1e9:.2f} GB"
    code, said = podman.once(IMAGE)
    assert code == 0
    assert "swarm COMMAND --help" in said
    assert podman.once(IMAGE, "manifest")[1].startswith("# A run:")


def test_all_that_is_in_it_is_pinned(podman: Podman) -> None:
    """So the image of tomorrow is this one."""
    script = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
    )
    code, said = podman.once(IMAGE, "-c", script, options=["--entrypoint", "/opt/swarm/bin/python"])
    assert code == 0, said
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [Requirement(line) for line in lines if line]
    pinned = {(_normal(pin.name), str(pin.specifier).removeprefix("==")) for pin in pins}
    there = {(_normal(name), version.removesuffix("+cpu")) for name, version in json.loads(said).items()}
    assert {name for name, _ in there - pinned} == {"swarm-train"}
    assert ("torch", "2.13.0") in there
    assert any(name.startswith("nvidia-cu") for name, _ in there) == (DEVICE == "cuda")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_without_a_gpu_it_says_what_to_do(podman: Podman) -> None:
    code, said = podman.once(IMAGE, "check", "--device", "cuda")
    lacks = {"cpu": "has no CUDA; take --device cpu", "cuda": "A container needs --gpus all"}
    assert code != 0
    assert lacks[DEVICE] in said
    code, said = podman.once(IMAGE, "check")
    assert code == 0, said
    assert ("sees no GPU" in said) == (DEVICE == "cuda")


def test_the_first_process_can_be_stopped_before_it_has_a_role(podman: Podman) -> None:
    """Its kind gets no signal that it does not handle; a role handles them once it runs."""
    script = (
        "import os, signal; import sys; sys.argv = ['swarm', '--version']; "
        "from peers.__main__ import main; main(); "
        "print(os.getpid(), signal.getsignal(signal.SIGTERM) is signal.default_int_handler)"
    )
    code, said = podman.once(IMAGE, "-c", script, options=["--entrypoint", "python"])
    assert (code, said.split()[-2:]) == (0, ["1", "True"]), said


def eventually(condition: Callable[[], bool], why: Callable[[], str]) -> None:
    """Within `LIMIT_S`: a container announces nothing to us."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, why()
        time.sleep(0.5)


class Containers:
    """A run of one stage; all in the first one's network, where there is nothing but loopback."""

    def __init__(self, podman: Podman, manifest: Path) -> None:
        self.podman = podman
        read = ["--volume", f"{manifest}:/run.toml:ro"]
        podman.start(
            "bootstrap", IMAGE, "bootstrap", "--manifest", "/run.toml", "--log-format", "json",
            options=["--network", "none", *read, *HARDENED],
        )  # fmt: skip
        self.join = self.hear("bootstrap", JoinLine).line.split()[2:]

    def start(self, name: str, role: str, *words: str) -> None:
        """`docker run … role --run … --join …`, the port aside: they share one machine's."""
        self.podman.start(
            name, IMAGE, role, *self.join, "--log-format", "json", "--port", "0", *words,
            options=["--network", "container:bootstrap", "--volume", f"{name}:/data", *HARDENED],
        )  # fmt: skip

    def heard(self, name: str, kind: type[E]) -> list[E]:
        return [event for event in self.podman.events(name) if isinstance(event, kind)]

    def hear(self, name: str, kind: type[E], count: int = 1) -> E:
        """Wait for the `count`-th event of that kind."""
        eventually(lambda: len(self.heard(name, kind)) >= count, lambda: name + self.podman("logs", name))
        return self.heard(name, kind)[count - 1]

    def steps(self) -> int:
        return len(self.heard("trainer", StepDone))

    def goes_on(self) -> None:
        """Two steps more are taken."""
        before = self.steps()
        eventually(lambda: self.steps() >= before + 2, lambda: self.podman("logs", "trainer"))

    def stop(self, name: str, grace_s: float = LIMIT_S) -> None:
        """`docker stop`; it ends by itself, with 0, before it would be killed, with 137."""
        self.podman("stop", "--time", str(round(grace_s)), name, limit_s=grace_s + LIMIT_S)
        assert self.podman.inspect(name)["State"]["ExitCode"] == 0, self.podman("logs", name)


@pytest.fixture
def containers(podman: Podman, tmp_path: Path) -> Iterator[Containers]:
    manifest = tmp_path / "run.toml"
    manifest.write_text(audit_run(stages=1, steps=1_000_000).to_toml())
    manifest.chmod(0o644)
    try:
        yield Containers(podman, manifest)
    finally:
        podman.close()


def test_a_peer_joins_trains_leaves_when_told_and_comes_back_as_itself(containers: Containers) -> None:
    podman = containers.podman
    containers.start("first", "peer")
    containers.start("second", "peer")
    containers.hear("first", Serving)
    containers.hear("second", Serving)
    containers.start("trainer", "train", "--window", "6")
    containers.goes_on()
    assert all(map(podman.well, ("bootstrap", "first", "second", "trainer")))
    assert podman("exec", "first", "cat", "/proc/1/comm").strip() == "swarm"

    # It leaves in good order, and the others go on.
    containers.stop("second", GRACE_S)
    said = [type(event) for event in podman.events("second")]
    assert said.index(StopNow) < said.index(Contributed)
    assert said.index(Contributed) == len(said) - 1
    containers.goes_on()

    # Removed, and made anew with its volume: the same peer.
    before = containers.hear("second", Started).peer
    podman("rm", "second")
    containers.start("second", "peer")
    assert containers.hear("second", Started).peer == before
    containers.hear("second", Serving)
    containers.goes_on()

    # Hung, it is ill; once it has had the time to start, the runtime says so. Then it is well again.
    def status() -> str:
        podman.well("second")  # asked here: systemd would do it
        return podman.inspect("second")["State"]["Health"]["Status"]

    podman("kill", "--signal", "STOP", "second")
    assert not podman.well("second")
    eventually(lambda: status() == "unhealthy", status)
    podman("kill", "--signal", "CONT", "second")
    eventually(lambda: status() == "healthy", status)

    # One that has not joined yet leaves, too.
    containers.start("hasty", "peer")
    containers.hear("hasty", Started)
    for name in ("hasty", "trainer", "first", "bootstrap"):
        containers.stop(name)


def settings(service: dict[str, Any]) -> list[str]:
    """A service of compose as options of `run`, but for its network."""
    assert service["read_only"]
    words = ["--read-only", *(f"--cap-drop={name}" for name in service["cap_drop"])]
    words += [f"--security-opt={name.partition(':')[0]}" for name in service["security_opt"]]
    words += [f"--tmpfs={place}" for place in service["tmpfs"]]
    for volume in service["volumes"]:
        words.append(f"--volume={volume.replace('${SWARM_MANIFEST:-.', f'{ROOT}/scripts').replace('}', '')}")
    return words


def test_the_swarm_of_compose_comes_up(podman: Podman) -> None:
    """Its services, started in one network by podman: there need be no Docker to read the file."""
    services = yaml.safe_load((ROOT / "scripts" / "compose.yaml").read_text())["services"]
    alone = ["--network=none", "--hostname=bootstrap", "--add-host=bootstrap:127.0.0.1"]
    together = ["--network=container:bootstrap"]

    def start(name: str, service: dict[str, Any], network: list[str], *more: str) -> None:
        words = [*service["command"], *more]
        podman.start(name, IMAGE, *words, options=[*settings(service), *network])

    def comes(name: str, condition: Callable[[], bool]) -> None:
        eventually(condition, lambda: podman("logs", name))

    try:
        start("bootstrap", services["bootstrap"], alone)
        comes("bootstrap", lambda: podman.well("bootstrap"))
        for n in range(2):  # one a stage; compose starts more
            start(f"peer{n}", services["peer"], together, "--port", "0")
        for name in ("trainer", "keeper"):
            start(name, services[name], together, "--port", "0")
        start("dashboard", services["dashboard"], together)
        comes("trainer", lambda: "step 2 done" in podman("logs", "trainer"))
        cmd, *check = services["dashboard"]["healthcheck"]["test"]
        assert cmd == "CMD"
        comes("dashboard", lambda: podman.code("exec", "dashboard", *check)[0] == 0)
        for name in ("peer0", "peer1", "keeper", "trainer"):
            assert podman.well(name), podman("logs", name)
        ask = (
            "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/api/health').read().decode())"
        )

        def shown() -> bool:
            """The page has all of them, and where the run is."""
            health = json.loads(podman("exec", "dashboard", "python", "-c", ask))
            serving = [stage["serving"] for stage in health["stages"]]
            who = len(health["keepers"]), len(health["trainers"])
            return serving == [1, 1] and who == (1, 1) and health["version"] > 0

        comes("dashboard", shown)
    finally:
        podman.close()
    assert not podman("ps", "--all", "--quiet").split()
    assert not podman("volume", "ls", "--quiet").split()

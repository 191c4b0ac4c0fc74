"""The image, built and run for real: what is in it, joining, health, leaving, and what its volume keeps.

Its store, some 5 GB, is removed at the end. SWARM_CONTAINER_STORE=DIR keeps it there, for the next time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from peers.events import Contributed, Event, JoinLine, LeavingNow, Serving, Started, StepDone
from swarm.run import counting_run
from tests.process.podman import ROOT, Podman, base_image, remove

E = TypeVar("E", bound=Event)

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(2400)]

IMAGE = "localhost/swarm:test"
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
        podman.build(IMAGE)
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
    assert not inside(podman, "find / -xdev -name 'libbitsandbytes_cuda*' 2>/dev/null; true")
    assert not inside(podman, "find /opt /usr /etc -xdev -writable ! -type l 2>/dev/null; true")
    assert inside(podman, "touch /data/x && stat -c %a /data") == "700"
    about = podman.inspect(IMAGE)
    assert about["Config"]["User"] == "10001:10001"
    assert about["Config"]["Volumes"] == {"/data": {}}
    assert about["Healthcheck"]["Test"] == ["CMD", "swarm", "health", "/tmp/health.sock"]
    assert about["Size"] < 2.5e9, f"{about['Size'] / 1e9:.2f} GB"
    code, said = podman.once(IMAGE)
    assert code == 0
    assert "swarm COMMAND --help" in said
    assert podman.once(IMAGE, "manifest")[1].startswith("# A run:")


def test_the_first_process_can_be_stopped_before_it_has_a_role(podman: Podman) -> None:
    """Its kind gets no signal that it does not handle; a role handles them once it runs."""
    script = (
        "import os, signal; from peers.cli import main; main(['--version']); "
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
    manifest.write_text(counting_run(stages=1, steps=1_000_000).to_toml())
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
    assert said.index(LeavingNow) < said.index(Contributed)
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
        words.append(f"--volume={volume.replace('${SWARM_RUN:-.', f'{ROOT}/scripts').replace('}', '')}")
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
    finally:
        podman.close()

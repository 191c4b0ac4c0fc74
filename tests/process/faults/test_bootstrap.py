"""The bootstrap dies, loses its p2pd, and returns: the run does not notice, and newcomers find it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import pytest

from peers.events import JoinLine, Serving, StateFetched
from swarm.manifest import audit_run
from tests.process.swarm_processes import Program, Swarm, eventually

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


def free_port() -> int:
    """One that nobody is given by chance while it is free: below those that the system hands out."""
    for port in range(20_000 + os.getpid() % 9_000, 30_000):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


class Bootstrapped(Swarm):
    """A swarm whose bootstrap has an identity file and a port of its own, as one on the internet has."""

    job_s = 0.05

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, audit_run(stages=2, steps=1_000_000, microbatches_per_step=4))
        port = free_port()
        self._words = [
            "--manifest",
            str(self.manifest),
            "--identity",
            str(folder / "id"),
            "--port",
            str(port),
        ]

    def bootstrap(self) -> Program:
        """Start it, knowing nobody."""
        program = self.start("bootstrap", ["bootstrap", *self._words])
        self.hear(program, JoinLine)
        return program

    def newcomer(self, stage: int, address: str) -> Program:
        """A peer that knows one address only."""
        words = ["--run", self.run.id, "--stage", str(stage), "--device", "cpu", "--threads", "1"]
        return self.start(self._name("newcomer"), ["peer", "--join", address, *words])

    def joins_the_run(self, program: Program, version: int) -> None:
        """It finds the run that goes on, takes its state, and takes its steps."""
        assert self.hear(program, StateFetched).version >= version
        self.hear(program, Serving)
        self.takes_part(program)


def test_the_run_does_not_notice_that_its_bootstrap_dies_and_returns(tmp_path: Path) -> None:
    with Bootstrapped(tmp_path) as swarm:
        bootstrap = swarm.bootstrap()
        address = bootstrap.address
        # Two that know nobody but the bootstrap, and two that know others too.
        lonely = [swarm.newcomer(stage, address) for stage in (0, 1)]
        swarm.all_serve()
        swarm.until(lambda: all(peer.heard(Serving) for peer in lonely), "they do not serve")
        swarm.peers(2)
        swarm.trainer("--window", "3")
        swarm.goes_on(3)

        killed = time.time()
        swarm.kill(bootstrap)
        swarm.goes_on(5)
        print(f"\nBOOTSTRAP KILLED: 5 steps in {time.time() - killed:.1f} s")

        # All that it could join at is dead, and so is its p2pd: it finds those it met.
        alone = lonely[1]
        dead = alone.family().p2pd
        before = time.time()
        dead.kill()
        eventually(lambda: "p2pd" in alone.family().names, lambda: "no new p2pd is started")
        swarm.takes_part(alone)
        print(
            f"P2PD KILLED with all addresses to join at dead: takes part after {time.time() - before:.1f} s"
        )

        # A newcomer at any peer.
        version = swarm.version()
        swarm.joins_the_run(swarm.newcomer(0, lonely[0].address), version)

        # The bootstrap returns without knowing anybody, and a newcomer knows only the bootstrap.
        before = time.time()
        back = swarm.bootstrap()
        assert back.address == address
        version = swarm.version()
        swarm.joins_the_run(swarm.newcomer(1, address), version)
        print(f"BOOTSTRAP BACK: a newcomer through it takes part after {time.time() - before:.1f} s")
        swarm.assert_each_counted_once()


def test_a_bootstrap_that_loses_its_p2pd_is_found_where_it_was(tmp_path: Path) -> None:
    with Bootstrapped(tmp_path) as swarm:
        bootstrap = swarm.bootstrap()
        swarm.peers(1)
        swarm.trainer("--window", "3")
        swarm.goes_on()
        for victim in ("p2pd", "sh"):
            before = bootstrap.family()
            before.names[victim].kill()
            eventually(
                lambda old=before: bootstrap.family().names.get("p2pd", old.p2pd).pid != old.p2pd.pid,
                lambda: "no new p2pd is started",
            )
        version = swarm.version()
        newcomer = swarm.newcomer(1, bootstrap.address)
        swarm.joins_the_run(newcomer, version)
        assert bootstrap.returncode is None
        assert any("p2pd was started again" in line for line in bootstrap.errors), bootstrap.errors
        swarm.assert_each_counted_once()

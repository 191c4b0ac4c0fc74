"""`swarm peer` on several devices at once: two peers of one command, and one Ctrl-C."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from peers.events import Serving, Started, Trouble
from swarm.manifest import audit_run
from tests.process.swarm_processes import Swarm

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


def test_two_devices_are_two_peers_and_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))
    run = audit_run(stages=1, steps=1_000_000, microbatches_per_step=8)
    with Swarm(tmp_path, run) as swarm:
        swarm.bootstrap()
        keys = tmp_path / "keys"
        words = ["--stage", "0", "--device", "cpu,cpu", "--threads", "1", "--identity", str(keys)]
        fleet = swarm.start("fleet", ["peer", *swarm.membership(), *words])
        swarm.hear(fleet, Serving, 2)
        assert sorted(path.name for path in keys.iterdir()) == ["cpu#2.key", "cpu.key"]
        first, second = fleet.heard(Started)
        assert first.peer != second.peer and first.pid != second.pid
        swarm.trainer("--window", "6")
        swarm.until_version(2)

        psutil.Process(second.pid).send_signal(signal.SIGKILL)
        died = swarm.hear(fleet, Trouble)
        assert "died (signal 9): it is started again in 5 s; the others go on" in died.text
        swarm.hear(fleet, Serving, 3)
        assert fleet.heard(Started)[2].peer == second.peer, "it comes back as the same peer"
        swarm.goes_on(2)

        family = fleet.family()
        swarm.leaves(fleet)
        family.assert_gone()

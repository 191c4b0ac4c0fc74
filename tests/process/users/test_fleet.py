"""`swarm peer` on several devices at once: two peers of one command, and one Ctrl-C."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from peers.events import Serving, Started, Trouble
from peers.net.direct.memory import AVAILABLE
from peers.net.node import Node
from swarm.ids import Stage
from swarm.manifest import audit_run, demo_run
from swarm.wire.messages import AskStatus, LinkStatus, PeerStatus, pack, unpack_answer
from tests.process.swarm_processes import Swarm

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


def test_two_devices_are_two_peers_and_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))
    run = audit_run(stages=1, steps=1_000_000, microbatches_per_step=4)
    with Swarm(tmp_path, run) as swarm:
        swarm.bootstrap()
        keys = tmp_path / "keys"
        words = ["--stage", "0", "--device", "cpu,cpu", "--threads", "1", "--identity", str(keys)]
        fleet = swarm.start("fleet", ["peer", *swarm.membership(), *words])
        swarm.hear(fleet, Serving, 2)
        assert sorted(path.name for path in keys.iterdir()) == ["cpu#2.key", "cpu.key"]
        first, second = fleet.heard(Started)
        assert first.peer != second.peer and first.pid != second.pid
        swarm.trainer("--window", "3")
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


@pytest.mark.skipif(not AVAILABLE, reason="Linux only")
def test_consecutive_stages_on_one_machine_hand_over_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))
    with Swarm(tmp_path, demo_run(stages=2, steps=1_000_000)) as swarm:
        swarm.bootstrap()
        words = ["--device", "cpu,cpu", "--stages", "0,1", "--threads", "1"]
        fleet = swarm.start("fleet", ["peer", *swarm.membership(), *words])
        swarm.hear(fleet, Serving, 2)
        assert sorted(event.stage for event in fleet.heard(Serving)) == [0, 1]
        swarm.trainer("--window", "3")

        async def ask(node: Node) -> dict[Stage, PeerStatus]:
            found = {}
            for started in fleet.heard(Started):
                node.transport.addresses.learn(started.peer, started.addresses)
                question = pack(AskStatus(run=swarm.run.id))
                answer = await node.transport.call(started.peer, "status", question)
                status = unpack_answer(started.peer, answer.header, PeerStatus)
                found[status.stage] = status
            return found

        def between() -> list[LinkStatus]:
            """What each of the two says of the other."""
            said = swarm.as_a_node(ask)
            return [link for s in (0, 1) for link in said[s].links if link.peer == said[1 - s].peer]

        swarm.until(lambda: min((link.memory_bytes for link in between()), default=0) > 1 << 20, "no memory")
        before = between()
        swarm.goes_on(3)
        for old, new in zip(before, between(), strict=True):
            moved = new.bytes_in + new.bytes_out - old.bytes_in - old.bytes_out
            assert new.memory_bytes - old.memory_bytes >= 0.9 * moved > 0, "bodies, and what goes with them"
        swarm.leaves(fleet)

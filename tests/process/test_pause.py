"""`swarm pause` and `swarm resume` by processes: the run goes on, and its result is that of one process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from peers.events import Paused, Serving, StateFetched
from tests.process.faults.test_exact import tiny
from tests.process.swarm_processes import Swarm, swarm_command

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of other tests, and of whoever works here, are not meant."""
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))


def test_a_run_with_pauses_equals_one_process_to_the_last_bit(tmp_path: Path) -> None:
    run = tiny(dtype="float32", codec="blockwise8", steps=1000)
    with Swarm(tmp_path, run) as swarm:
        swarm.bootstrap()
        swarm.peers(1)
        key = tmp_path / "peer.key"
        guest = swarm.peer(1, "--identity", str(key))
        swarm.hear(guest, Serving)
        (replica,) = [program for program in swarm.serving(1) if program is not guest]
        trainer = swarm.trainer("--window", "3")
        swarm.until_version(2)

        told = swarm_command("pause", "--identity", str(key))
        assert told.returncode == 0 and "paused at stage 1, swarm pause; the device is free" in told.stdout
        assert len(told.stdout.splitlines()) == 1, "the others are not meant"
        assert not swarm.hear(guest, Paused).alone
        assert swarm_command("pause", "--pid", str(guest.pid)).stdout == told.stdout, "twice is once"
        assert len(guest.heard(Paused)) == 1
        swarm.goes_on(4)

        assert swarm_command("resume", "--identity", str(key)).returncode == 0
        swarm.hear(guest, Serving, 2)
        swarm.goes_on(2)

        # Now the guest is the only one left: what it has goes on from its memory.
        swarm.leaves(replica)
        told = swarm_command("pause", "--pid", str(guest.pid))
        assert "No other peer serves stage 1: the run stands still" in told.stdout
        fetched = len(guest.heard(StateFetched))
        assert swarm_command("resume").returncode == 0
        swarm.hear(guest, Serving, 3)
        assert len(guest.heard(StateFetched)) == fetched
        swarm.goes_on(2)
        swarm.leaves(trainer)

        steps = swarm.version() + 1
        swarm.train_to(steps)
        weights = swarm.audited_weights()
    for name, weight in swarm.single_process(steps).named_weights().items():
        assert torch.equal(weights[name], weight), name


def test_a_paused_peer_leaves_at_ctrl_c_or_dies_and_nothing_is_left(tmp_path: Path) -> None:
    run = tiny(dtype="float32", codec="none", steps=1000)
    with Swarm(tmp_path, run) as swarm:
        swarm.bootstrap()
        swarm.peers(1)
        leaving, dying = swarm.peer(2), swarm.peer(0)
        for program in (leaving, dying):
            swarm.hear(program, Serving)
        swarm.trainer("--window", "3")
        swarm.until_version(1)
        for program in (leaving, dying):
            assert swarm_command("pause", "--pid", str(program.pid)).returncode == 0
        family = leaving.family()
        leaving.signal(signal.SIGINT)
        swarm.ends(leaving)
        family.assert_gone()
        swarm.kill(dying)
        swarm.goes_on(2)
        told = swarm_command("pause", "--pid", str(dying.pid))
        assert told.returncode == 3 and f"none has pid {dying.pid}" in told.stderr
        assert not list((tmp_path / "control").glob(f"{dying.pid}.sock"))

"""`swarm health` of real programs: well, stopped, gone; and joining by the file that a bootstrap wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.events import JoinLine, Serving
from swarm.manifest import audit_run
from tests.process.swarm_processes import Swarm, swarm_command

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(120)]


def health(socket: Path) -> tuple[int, str]:
    """Exit code and words."""
    done = swarm_command("health", str(socket))
    return done.returncode, (done.stdout + done.stderr).strip()


def test_a_program_is_well_until_it_hangs(tmp_path: Path) -> None:
    join, socket = tmp_path / "join", tmp_path / "peer.sock"
    with Swarm(tmp_path, audit_run(stages=1, steps=1_000_000)) as swarm:
        bootstrap = swarm.start_bootstrap("--join-file", str(join))
        line = swarm.hear(bootstrap, JoinLine).line
        assert line.split()[2:] == join.read_text().split()
        peer = swarm.start("peer", ["peer", f"@{join}", "--health", str(socket)])
        swarm.hear(peer, Serving)
        code, said = health(socket)
        assert code == 0, said
        assert said.endswith("serving stage 0 at version 0, connected to 1 peer")
        swarm.trainer()
        swarm.until_version(2)
        assert "connected to 2 peers" in health(socket)[1]

        peer.stop()
        assert health(socket) == (
            1, f"swarm health: the program at {socket} does not answer within 5 s: it hangs",
        )  # fmt: skip
        peer.cont()
        assert health(socket)[0] == 0

        peer.family().p2pd.suspend()
        code, said = health(socket)
        assert (code, said.partition(" is not well: ")[2]) == (1, "its p2pd does not answer")
        peer.family().p2pd.resume()
        assert health(socket)[0] == 0
        swarm.kill(peer)
        assert health(socket)[0] == 1

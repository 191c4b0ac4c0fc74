"""The whole path of a charter: made, published, found by its name, and a ban that all follow."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from peers.cli import Exit
from peers.events import JoinLine, Serving
from swarm.manifest import audit_run
from tests.process.swarm_processes import Processes, swarm_command
from tests.stopping import stop

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(240)]

FOLLOWED_S = 30.0


def run(*words: str) -> str:
    """What a command prints; it ends with 0."""
    done = swarm_command(*words)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def test_a_run_is_made_joined_by_name_and_a_banned_peer_is_out_within_30_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path / "cache"))
    manifest, folder, join = tmp_path / "a.toml", tmp_path / "mine", tmp_path / "join.txt"
    manifest.write_text(audit_run(stages=1, steps=1_000_000).to_toml().replace("tokens = 4096", "tokens = 0"))
    printed = run("init", str(folder), "--manifest", str(manifest), "--peers", "token")
    assert "run mine@" in printed
    assert "swarm bootstrap --manifest" in printed
    token = run("invite", "--manifest", f"{folder}/run.toml", "--owner", f"{folder}/owner.key").strip()
    with Processes() as programs:
        words = ["--manifest", f"{folder}/run.toml", "--charter", f"{folder}/charter"]
        key = ["--identity", f"{folder}/owner.key", "--join-file", str(join)]
        bootstrap = programs.start("bootstrap", ["bootstrap", *words, *key])
        line = programs.hear(bootstrap, JoinLine).line
        assert printed.split()[1] in line, "the run's name and its owner's fingerprint"
        words = ["peer", f"@{join}", "--device", "cpu", "--threads", "1"]
        peer = programs.start("peer", [*words, "--identity", str(tmp_path / "peer.key"), "--token", token])
        uninvited = programs.start("peer without a token", words)
        uninvited.sentenced = True
        assert uninvited.wait() == Exit.SETUP
        assert any("it has no token: ask the owner for one" in line for line in uninvited.errors)
        programs.hear(peer, Serving)
        for command in (["export", "--out", str(tmp_path / "model.safetensors")], ["eval"], ["generate"]):
            done = swarm_command(*command, f"@{join}")
            assert "no version of all stages could be fetched" in done.stderr  # none is saved before a step

        peer.sentenced = True
        owner = [f"@{join}", "--owner", f"{folder}/owner.key"]
        banned_at = time.monotonic()
        assert "is banned. Charter 2 holds until" in run(
            "ban", peer.peer_id, *owner, "--why", "wrong gradients"
        )
        assert peer.wait(FOLLOWED_S) == Exit.SETUP
        assert any(line.endswith("the owner of the run banned it: wrong gradients") for line in peer.errors)
        print(f"\nBANNED: out after {time.monotonic() - banned_at:.1f} s")
        again = programs.start("peer", [*words, "--identity", str(tmp_path / "peer.key"), "--token", token])
        again.sentenced = True
        assert again.wait() == Exit.SETUP
        assert f"  {peer.peer_id} wrong gradients" in run("charter", f"@{join}")

        # A peer that does not listen to the ban is not listened to: its record is gone, too.
        run("unban", peer.peer_id, *owner)
        deaf = programs.start("peer", [*words, "--identity", str(tmp_path / "peer.key"), "--token", token])
        programs.hear(deaf, Serving)
        stop(deaf.pid)
        deaf.sentenced = True
        run("ban", deaf.peer_id, *owner, "--why", "deaf")
        status = json.loads(run("status", f"@{join}", "--json", "--no-calls"))
        assert [stage["serving"] for stage in status["stages"]] == [0]
        programs.kill(deaf)

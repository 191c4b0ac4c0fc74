"""Real processes of a run whose tokens are on web servers, some of which are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from peers.events import StepDone
from peers.net.identity import Identity
from swarm.manifest import AdmissionSpec
from swarm.model.reference import SingleProcess
from tests.process.faults.test_exact import tiny
from tests.process.swarm_processes import Swarm, farthest, swarm_command
from tests.serving import Server

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]


def make_mixture(folder: Path) -> tuple[Path, bytes]:
    """The index of three sources, and all of their text."""
    rows = [{"id": n, "text": f"On day {n} it rained {n * 7 % 13} hours."} for n in range(900)]
    (folder / "weather.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    song = "".join(f"{n} green bottles, hanging on the wall. " for n in range(600))
    (folder / "song.txt").write_text(song)
    words = b"".join(f"x{n} = {n * n};\n".encode() for n in range(2000))
    (folder / "code.bin").write_bytes(b"".join(bytes([byte, 0]) for byte in words))
    out = folder / "served"
    files = [str(folder / name) for name in ("weather.jsonl", "song.txt", "code.bin")]
    weights = ["--weights", "5", "3", "2", "--vocab-size", "256"]
    made = swarm_command("tokenize", *files, *weights, "--out", str(out))
    assert made.returncode == 0, made.stderr
    return out / "index.json", "".join(row["text"] for row in rows).encode() + song.encode() + words


def test_a_mixture_from_servers_that_are_wrong_or_gone_is_that_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three indexed sources, a trainer with an empty cache, a corrupt shard, an address that is gone."""
    index, text = make_mixture(tmp_path)
    told = json.loads(index.read_bytes())
    served = index.parent
    (served / "code.bin").write_bytes((tmp_path / "code.bin").read_bytes())
    corrupt = served / "corrupt"
    corrupt.mkdir()
    shards = [source["shards"][0] for source in told["sources"]]
    names = [Path(shard["at"][0]).name for shard in shards]
    (corrupt / names[0]).write_bytes((served / names[0]).read_bytes().replace(b"rained", b"snowed"))
    server = Server(served)
    key = tmp_path / "trainer.key"
    trainers = AdmissionSpec(trainers=(Identity.load_or_create(key).peer_id,))
    run = tiny(dtype="float32", codec="blockwise8", steps=12)
    run = replace(run, data=replace(run.data, source="files"), admission=trainers)
    try:
        shards[0]["at"] = [f"{server.url}/corrupt/{names[0]}", f"{server.url}/{names[0]}"]
        shards[1]["at"] = [f"http://127.0.0.1:9/{names[1]}", f"{server.url}/gone", names[1]]
        shards[2]["at"] = [f"{server.url}/code.bin"]
        index.write_text(json.dumps(told))
        with Swarm(tmp_path, run, data=[served]) as swarm:
            assert [weight for weight, _ in swarm.run.data.sources] == [5, 3, 2] and swarm.run.data.root
            monkeypatch.setenv("SWARM_CACHE", str(tmp_path / "empty"))
            swarm.bootstrap()
            swarm.peer(1, kill_at="backward:9")
            swarm.peers(1)
            doomed = swarm.trainer("--identity", str(key), kill_at="trainer:13")
            swarm.dies(doomed)
            said = "\n".join(doomed.errors)
            assert f"{server.url}/corrupt/{names[0]}: it is not what the index says: it is corrupt" in said
            assert f"http://127.0.0.1:9/{names[1]}: it cannot be had: " in said
            assert f"{server.url}/gone: it cannot be had: " in said and "another address is taken" in said
            asked = len(server.asked)
            trainer = swarm.trainer("--identity", str(key))
            swarm.ends(trainer)
            assert len(server.asked) == asked, "what was verified before is not fetched again"
            steps = [*doomed.heard(StepDone), *trainer.heard(StepDone)]
            weights = swarm.weights()
    finally:
        server.close()
    assert_as_one_process(swarm, text, steps, weights)


def test_a_trainer_gets_from_a_keeper_and_another_trainer_what_no_server_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shards are with a keeper only; the second trainer has the first one to ask, and no keeper."""
    index, text = make_mixture(tmp_path)
    run = tiny(dtype="float32", codec="blockwise8", steps=40)
    run = replace(run, data=replace(run.data, source="files"))
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "index.tree").write_bytes((index.parent / "index.tree").read_bytes())
    told = json.loads(index.read_bytes())
    for source in told["sources"]:
        source["shards"][0]["at"] = ["http://127.0.0.1:9/gone"]
    (bare / "index.json").write_text(json.dumps(told))
    with Swarm(tmp_path, run, data=[index.parent]) as swarm:
        swarm.bootstrap()
        keeper = swarm.keeper(tmp_path / "kept", "--data", str(index.parent))
        swarm.peers(1)
        monkeypatch.setenv("SWARM_CACHE", str(tmp_path / "first"))
        first = swarm.trainer("--data", str(bare))
        swarm.until(lambda: first.heard(StepDone), "no step is taken")
        swarm.leaves(keeper)
        monkeypatch.setenv("SWARM_CACHE", str(tmp_path / "second"))
        second = swarm.trainer("--data", str(bare))
        swarm.until(lambda: list((tmp_path / "second").glob("blocks/??/*")), "no block comes")
        swarm.ends(first)
        swarm.ends(second)
        for trainer in (first, second):
            assert "http://127.0.0.1:9/gone: it cannot be had: " in "\n".join(trainer.errors)
        steps, weights = first.heard(StepDone), swarm.weights()
    assert_as_one_process(swarm, text, steps, weights)


def assert_as_one_process(
    swarm: Swarm, text: bytes, steps: list[StepDone], weights: dict[str, torch.Tensor]
) -> None:
    run = swarm.run
    tokens, window = np.frombuffer(text, np.uint8), run.data.sequence_length + 1
    single = SingleProcess(run, lambda offsets: np.stack([tokens[at : at + window] for at in offsets]))
    losses = [sum(single.step(t)) / run.M for t in range(run.steps)]
    assert all(event.loss == losses[event.t] for event in steps)
    assert len({event.t for event in steps}) >= run.steps - 2, "none hears of a step while none trains"
    assert farthest(weights, single) == 0.0

"""A keeper among real processes: all die, and its folder alone is the run; and a model to use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from peers.events import Kept, Serving, Started, StateFetched
from peers.net.node import Node
from peers.programs.trained import spread
from peers.storage import checkpoint
from peers.transfer.catalog import is_keeper
from swarm.ids import Microbatch
from swarm.model.reference import SingleProcess
from tests.model.chain import loss_of_single
from tests.process.faults.test_exact import tiny
from tests.process.swarm_processes import Program, Swarm, eventually, farthest, swarm_command

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(500)]


def command(*words: str) -> str:
    """What `swarm WORDS` prints."""
    done = swarm_command(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def announced(swarm: Swarm, keeper: Program) -> None:
    """Wait until the keeper's record is in the directory: peers without a disk save for a keeper only."""
    swarm.hear(keeper, Started)

    async def look(node: Node) -> bool:
        return any(is_keeper(record) for record in await node.directory.refresh())

    eventually(lambda: swarm.as_a_node(look), lambda: "the keeper is not announced")


def keeps(swarm: Swarm, keeper: Program, version: int) -> None:
    swarm.until(
        lambda: any(event.version == version for event in keeper.heard(Kept)),
        f"the keeper does not keep version {version}",
    )


def versions_held(peer: Program) -> set[int]:
    return {event.version for event in [*peer.heard(Serving), *peer.heard(StateFetched)]}


def test_the_folder_of_a_keeper_is_the_run_when_everybody_is_dead(tmp_path: Path) -> None:
    run = replace(tiny(dtype="float64", codec="none", steps=6), checkpoint_every=2)
    kept, out = tmp_path / "kept", tmp_path / "model.safetensors"
    with Swarm(tmp_path, run) as swarm:
        run = swarm.run
        swarm.bootstrap()
        keeper = swarm.keeper(kept)
        announced(swarm, keeper)
        for stage in range(run.S):
            swarm.peer(stage)
        swarm.all_serve()
        swarm.train_to(4)
        keeps(swarm, keeper, 4)
        assert keeper.heard(Kept)[-1].words() == "keeps version 4 of stages 0 1 2"
        told = json.loads(command("status", *swarm.membership(), "--json"))
        assert [(k["peer"], k["version"]) for k in told["keepers"]] == [(keeper.peer_id, 4)]
        fetched = tmp_path / "fetched.safetensors"
        assert "step 4, " in command("export", *swarm.membership(), "--out", str(fetched))
        for program in list(swarm.programs):
            if program.returncode is None:
                swarm.kill(program)
    assert checkpoint.newest_common_step(kept, run) == 4

    # A model to use, on any machine.
    assert "step 4, " in command("export", "--checkpoint-dir", str(kept), "--out", str(out))
    words = ["generate", "--model", str(out), "--tokens", "5", "The import "]
    text = command(*words)
    assert text.startswith("The import ") and len(text) > len("The import \n")
    assert command(*words) == text
    found = json.loads(command("eval", "--model", str(out), "--samples", "8", "--json"))
    single = SingleProcess(run, swarm.data.batch)
    for t in range(4):
        single.step(t)
    assert found["loss"] == pytest.approx(loss_of(single, spread(run.data.tokens, 17, 8)), rel=1e-9)

    # Other machines, without any file of the dead, go on from the keeper's folder.
    with Swarm(tmp_path, run) as others:
        others.bootstrap()
        keeper = others.keeper(kept)
        announced(others, keeper)
        peers = [others.peer(stage) for stage in range(run.S)]
        others.all_serve()
        # At once, or, where a peer does not know of the keeper yet, by following the other stages.
        others.until(lambda: all(4 in versions_held(peer) for peer in peers), "not all come to version 4")
        others.train_to(6)
        keeps(others, keeper, 6)
        weights = others.weights()
        others.leaves(keeper)
    for t in range(4, 6):
        single.step(t)
    assert farthest(weights, single) < 1e-9
    assert checkpoint.newest_common_step(kept, run) == 6


def loss_of(single: SingleProcess, offsets: Sequence[int]) -> float:
    """The single process's mean loss of those samples, with the weights that it has now."""
    size = single.run.batch.microbatch_size
    told = [list(offsets[i : i + size]) for i in range(0, len(offsets), size)]
    rows = single._batch
    losses = []
    for part in told:
        single._batch = lambda _, part=part: rows(part)
        losses.append(loss_of_single(single, Microbatch(single.version, 0)))
    single._batch = rows
    return sum(losses) / len(losses)

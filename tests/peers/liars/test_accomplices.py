"""Accomplices on both sides of a cut: what receipts and audits still show, and what only `swarm verify` does.

An answer is audited by who got it: a trainer that of stage 0, a peer that of the stage behind it. Accomplices
do not audit one another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peers.programs.tool_options import VerifyOptions
from peers.programs.verify import run_verify
from peers.sim.network import SimSigner
from peers.storage.transcript import path_of
from peers.trainer import Trainer
from tests.model.chain import TEXT, batch_of
from tests.peers.admitted import admitting
from tests.peers.liars.test_false_answers import LIES, TRAINER, accused, audit, lie
from tests.peers.liars.test_false_contributions import suspect
from tests.peers.loops import Swarm, swarm
from tests.peers.programs.test_verify import small
from tests.peers.runs.test_loops import Text
from tests.peers.transfer.test_keeping import add_keeper
from tests.seeds import some

pytestmark = [pytest.mark.virtual_time, pytest.mark.timeout(240)]

RUN = admitting(
    small(
        steps=2, checkpoint_every=9, model={"stages": 3, "layers": 3}, batch={"microbatches_per_step": 12},
        codec={"forward": "none", "backward": "none"},
    ),
    TRAINER,
)  # fmt: skip


def looks_away(caller: Any) -> None:
    """It has no answer computed again."""
    audits = caller._audits if isinstance(caller, Trainer) else caller._neighbours
    audits.answered = audits.used = lambda *answer: None


def both_neighbours(s: Swarm, trainer: Trainer) -> None:
    """One before a stage, and one behind it."""
    lie(s.peers["s0p1"], LIES["sign flip"])
    lie(s.peers["s2p1"], LIES["sign flip"])


def trainer_and_peer(s: Swarm, trainer: Trainer) -> None:
    lie(s.peers["s0p1"], LIES["sign flip"])
    looks_away(trainer)


def peer_and_its_callers(s: Swarm, trainer: Trainer) -> None:
    lie(s.peers["s2p1"], LIES["sign flip"])
    for name in s.of_stage(1):
        looks_away(s.peers[name])


def both_of_a_stage(change: Callable[[Any], None]) -> Callable[[Swarm, Trainer], None]:
    """All of stage 1 do the same to a round's result, which none of them checks, and sign it."""

    def collude(s: Swarm, trainer: Trainer) -> None:
        for name in s.of_stage(1):
            rounds = s.peers[name].actions._all_reduce  # type: ignore
            rounds._audits = SimpleNamespace(open=lambda *_: None)
            change(rounds)

    return collude


def false_sum(rounds: Any) -> None:
    honest = rounds._answer
    rounds._answer = lambda total: -honest(total)


def false_norm(rounds: Any) -> None:
    """With it the step has next to no size, in all stages."""
    honest = rounds._sqnorm
    rounds._sqnorm = lambda reduced: 1e12 * honest(reduced)


async def play(
    folder: Path, collude: Callable[[Swarm, Trainer], None], suspects: tuple[str, ...] = (), replicas: int = 3
) -> set[str]:
    """Who was convicted of a whole run, of which a keeper wrote the transcript; its data is there, too."""
    torch.set_num_threads(1)
    (folder / "text").write_bytes(TEXT.tobytes())
    async with swarm(RUN, replicas=replicas, batches=Text(batch_of(RUN))) as s:
        await s.until_serving()
        keeper = add_keeper(s, folder)
        collude(s, s.add_trainer(TRAINER))

        def over() -> bool:
            for peer in suspects:
                suspect(s, peer)
            left = [name for name in s.peers if name not in accused(s)]
            return all(s.peers[name].core.version >= RUN.steps for name in left)

        await s.until(over, limit_s=600.0)
        await asyncio.sleep(20.0)
        await keeper._recorders[0].record(all_of_it=True)  # type: ignore
        return accused(s)


def differing(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The first words of what `swarm verify` says of the steps, line by line."""
    options = VerifyOptions(transcript=path_of(folder, RUN), data=(folder / "text",), from_=0, to=RUN.steps)
    capsys.readouterr()
    assert not run_verify(options, verify=SimSigner("reader").verify)
    said = capsys.readouterr().out.splitlines()
    return [line.partition(" than ")[0] for line in said if line.startswith("step ")]


@pytest.mark.slow
async def test_two_around_a_stage_are_found_by_their_other_neighbours_and_nobody_between_them_is_accused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit(monkeypatch, share=1.0)
    assert await play(tmp_path, both_neighbours) == {"s0p1", "s2p1"}


@pytest.mark.parametrize(
    ("collude", "liar", "differ", "found"),
    [
        pytest.param(trainer_and_peer, "s0p1", (0, 1, 2), {"s0p1"}, id="a trainer and a peer of stage 0"),
        pytest.param(peer_and_its_callers, "s2p1", (0, 1), set(), id="a peer and all that call it"),
    ],
)
@pytest.mark.slow
async def test_what_accomplices_answer_one_another_is_found_afterwards_only(
    collude: Callable[[Swarm, Trainer], None],
    liar: str,
    differ: tuple[int, ...],
    found: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Though what the liar adds is computed again in each step: to its own sum it adds what is right. What it
    sent on is compared, if the stage behind it is honest; what it answered is not.
    """
    audit(monkeypatch, share=1.0)
    assert await play(tmp_path, collude, suspects=(liar,)) == found
    assert differing(tmp_path, capsys) == [f"step 0, stage {stage}: other sum" for stage in differ]


@pytest.mark.parametrize(
    ("lie", "what"),
    some([(false_sum, "1: other sum"), (false_norm, "0: other norm")], quick=[(false_sum, "1: other sum")]),
    ids=["sum", "commit"],
)
async def test_what_both_replicas_of_a_stage_sign_is_found_afterwards_only(
    lie: Callable[[Any], None], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two signatures prove it to the run, and no product contradicts them."""
    assert await play(tmp_path, both_of_a_stage(lie), replicas=2) == set()
    assert differing(tmp_path, capsys)[0] == f"step 0, stage {what}"

"""Peers believe those that worked for the run, however many others speak; also outside of the steps.

The strangers of these tests answer first, and are more than the peers that answer honestly.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from peers.clock import now_s
from peers.events import Note, Trouble
from peers.ports import Answer, Handler, Request
from peers.stage.joining import VOICED_S
from peers.status_query import all_have, run_position
from peers.storage import checkpoint
from peers.transfer.server import StateLeases
from swarm.errors import Busy, SwarmError
from swarm.ids import Generation, Position
from swarm.manifest import audit_run
from swarm.protocol.ledger import Bitmap
from swarm.protocol.messages import Directive, ReplicaReport, RunStatus
from swarm.protocol.rounds import StepReport
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import PeerStatus, Watched, pack, unpack
from swarm.wire.trails import Word
from tests.peers.lies import coordinate_all, direct_falsely, offered
from tests.peers.loops import Swarm, swarm
from tests.peers.sybils import FIRST, TRAINER, MadeUp, add_liar, admitting, give_voice
from tests.peers.transfer.test_keeping import add_keeper
from tests.seeds import some

pytestmark = pytest.mark.virtual_time

RUN = admitting(replace(audit_run(stages=2, steps=12, microbatches_per_step=4), checkpoint_every=2))
PEERS = tuple(f"s{stage}p{replica}" for stage in range(2) for replica in range(2))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def begun(s: Swarm, *, version: int = 2) -> None:
    """A run that has taken some steps and then lost its trainer: it stands still. Its peers have voice."""
    give_voice(s, *PEERS)
    await s.until_serving()
    s.add_trainer(TRAINER, steps=version)
    await s.until_version(version)


async def joined(s: Swarm, stage: int = 1) -> None:
    s.add_peer("newcomer", stage)
    await s.until(lambda: s.peers["newcomer"].core.joined, limit_s=120.0)


def assert_honest(s: Swarm) -> None:
    """All live peers of a stage have the same weights, and each microbatch is in them once a step."""
    for name, row in s.count_matrix().items():
        assert (row == s.peers[name].core.version).all(), f"{name}: {row.tolist()}"


@pytest.mark.parametrize(("ahead", "strangers"), [(0, 3), (1, 20), (5, 3)])
async def test_a_newcomer_takes_the_state_of_those_with_voice(ahead: int, strangers: int) -> None:
    async with swarm(RUN, replicas=2) as s:
        await begun(s)
        for number in range(strangers):
            await add_liar(s, f"a{number}", 1, 2 + ahead)
        await joined(s)
        assert s.peers["newcomer"].core.version == 2
        assert_honest(s)


async def test_a_newcomer_waits_for_those_with_voice_that_do_not_answer_at_first() -> None:
    async with swarm(RUN, replicas=2) as s:
        await begun(s)
        for number in range(3):
            await add_liar(s, f"a{number}", 1, 3)
        for name in PEERS:
            s.network.drop_answer(name, "status", 1)
            s.network.drop_answer(name, "status", 2)
        await joined(s)
        assert_honest(s)


async def test_a_newcomer_that_alone_has_voice_does_not_wait_for_itself() -> None:
    """Seed 700144: for 30 s, and its stage with it."""
    async with swarm(RUN, replicas=2) as s:
        await s.until_serving()
        s.add_trainer(TRAINER, steps=2)
        await s.until_version(2)
        give_voice(s, "newcomer")
        began = now_s()
        await joined(s)
        assert now_s() - began < VOICED_S / 3
        assert s.peers["newcomer"].core.version == 2
        assert_honest(s)


async def test_where_all_with_voice_are_gone_a_newcomer_takes_what_there_is() -> None:
    """Their records live a while longer than they do."""
    async with swarm(RUN, replicas=2) as s:
        give_voice(s, "s1p0")
        await s.until_serving()
        s.add_trainer(TRAINER, steps=2)
        await s.until_version(2)
        s.kill("s1p0")
        await joined(s)
        assert s.peers["newcomer"].core.version == 2
        assert_honest(s)


async def go_on_without(s: Swarm, away: Sequence[str], *, version: int) -> None:
    """The others come to a version while some are cut off and forgotten, and then back."""
    s.network.cut(away)
    for name in away:
        s.network.dht.cut_off.add(name)
        s.network.dht.forget(name)
    went_on = [peer for name, peer in s.live() if name not in away]
    await s.until(lambda: all(peer.core.version >= version for peer in went_on))
    s.network.heal()
    s.network.dht.cut_off.clear()


@pytest.mark.parametrize("stage", some([0, 1], quick=[0]))
@pytest.mark.parametrize("with_voice", [1, 2])
async def test_those_with_voice_take_what_their_stage_did_without_them(with_voice: int, stage: int) -> None:
    """What proved those steps then proves nothing once they are back. The other stage has taken them."""
    away = [f"s{stage}p{number}" for number in range(with_voice)]
    async with swarm(RUN, replicas=3) as s:
        give_voice(s, *away, *s.of_stage(1 - stage))
        await s.until_serving()
        s.add_trainer(TRAINER)
        await s.until_version(1)
        await go_on_without(s, away, version=4)
        await s.until_finished()
        s.assert_each_counted_once()
        assert not [name for name, peer in s.live() if peer.core.generation.number], "the run went back"


@pytest.mark.parametrize("said", [2, 3], ids=["as they were when it was told", "as they are"])
async def test_one_of_two_that_is_told_late_takes_what_the_other_has_by_now(said: int) -> None:
    """It looked for one that is just where the coordinator said, and was behind while steps were quick."""
    async with swarm(RUN, replicas=2) as s:
        give_voice(s, *PEERS)
        await s.until_serving()
        s.add_trainer(TRAINER, steps=3)
        await s.until_version(1)
        late = s.peers["s1p1"]
        late.coordination.act = lambda action: None  # type: ignore[method-assign]
        await go_on_without(s, ["s1p1"], version=3)
        told = Directive(run=RUN.id, stage=1, coordinator="s1p0", version=said, sources=("s1p0",))
        assert await late._recovery.to(told)  # type: ignore
        assert late.core.version == 3
        assert_honest(s)


async def test_one_with_most_voice_takes_what_all_others_did_without_it() -> None:
    """One with less voice went on, by what no peer with voice of the next stage proved (seed 902339)."""
    away = ["s0p0", "s1p0"]
    async with swarm(RUN, replicas=2) as s:
        give_voice(s, *away, "s0p1", steps={"s0p0": 100})
        await s.until_serving()
        s.add_trainer(TRAINER)
        await s.until_version(1)
        await go_on_without(s, away, version=RUN.steps)
        await s.until_finished()
        s.assert_each_counted_once()


async def test_one_that_was_away_when_the_run_went_back_hears_that_though_all_others_are_further() -> None:
    """Each second it went where they are, in vain, as it knew their generation by then only. It was busy
    whenever the others had just answered that they are in that one: for ever, once no step was taken.
    """
    run, new = admitting(audit_run(stages=2, steps=12, microbatches_per_step=4)), ("n0", "n1")
    async with swarm(run, replicas=3) as s:
        give_voice(s, *s.peers, *new)
        await s.until_serving()
        s.add_trainer(TRAINER)
        await s.until_version(4)
        for name in s.of_stage(1):
            s.kill(name)
        for name in new:
            s.add_peer(name, 1)
        await go_on_without(s, ["s0p2"], version=run.steps)
        late = s.peers["s0p2"].core
        assert late.generation == FIRST and late.version < run.steps
        await s.until(lambda: late.finished, limit_s=20.0)
        assert late.generation.number == 1
        assert_honest(s)


async def test_strangers_replace_no_weights_of_the_only_one_with_voice() -> None:
    async with swarm(RUN, replicas=1) as s:
        give_voice(s, "s0p0", "s1p0")
        await s.until_serving()
        s.add_trainer(TRAINER, steps=2)
        await s.until_version(2)
        strangers = tuple(f"a{number}" for number in range(3))
        for name in strangers:
            await add_liar(s, name, 1, 2)
        to = Directive(run=RUN.id, stage=1, coordinator="a0", generation=FIRST, version=2, sources=strangers)
        assert not await s.peers["s1p0"]._recovery.to(to)  # type: ignore
        assert "others do not bear that out" in s.seen(Note)[-1].text
        assert_honest(s)


async def test_stages_that_do_not_answer_bear_out_what_they_are_not_needed_for_only() -> None:
    async with swarm(RUN, replicas=2) as s:
        await begun(s)
        transport, stages = s.peers["s0p0"].core.transport, [["s0p1"], ["s1p0", "s1p1"]]
        assert await all_have(RUN, transport, stages, Position(FIRST, 2))
        assert not await all_have(RUN, transport, stages, Position(Generation(1), 0))
        assert await run_position(RUN, transport, stages) == Position(FIRST, 2)
        s.network.cut(["s1p0", "s1p1"])
        assert await run_position(RUN, transport, stages) == Position(FIRST, 2)
        assert not await all_have(RUN, transport, stages, Position(FIRST, 2))
        s.network.cut(["s0p1"])
        assert await run_position(RUN, transport, stages) is None


@pytest.mark.parametrize(("number", "version"), [(0, 12), (1_000_000, 2)])
async def test_one_with_voice_says_not_alone_where_a_run_is_that_lost_a_stage(
    number: int, version: int
) -> None:
    """No generation comes after the last one: who restores a stage in it holds the run up for good."""
    async with swarm(RUN, replicas=2) as s:
        await begun(s)
        give_voice(s, "liar")
        await add_liar(s, "liar", 0, version, generation=Generation(number))
        s.kill_and_forget("s1p0", "s1p1")
        began = now_s()
        await joined(s)
        assert now_s() - began < 15.0
        assert s.peers["newcomer"].core.generation == Generation(1, 0, lost_stage=1, lost_version=2)


@pytest.mark.parametrize("lost_stage", some([0, 1], quick=[0]))
async def test_a_generation_that_only_strangers_are_in_is_not_entered(lost_stage: int) -> None:
    """They are more than the peers, say it again and again, and the run stands still."""
    lie = Generation(1, 0, lost_stage=lost_stage, lost_version=2)
    async with swarm(RUN, replicas=2) as s:
        await begun(s)
        for number in range(9):
            await add_liar(s, f"a{number}", number % 2, 2, generation=lie)
        stranger = s.network.peers["a1"].transport
        report = ReplicaReport(run=RUN.id, stage=1, version=2, generation=lie)
        until = s.network.loop.now_s + 40.0
        while s.network.loop.now_s < until:
            for name in ("s1p0", "s1p1"):
                with contextlib.suppress(SwarmError):
                    await stranger.call(name, "report", pack(report))
            await asyncio.sleep(0.5)
        assert {peer.core.generation for peer in s.peers.values()} == {Generation()}


async def test_how_far_the_run_is_strangers_do_not_witness() -> None:
    """Even one with voice that says it is far ahead is asked about at other stages."""
    async with swarm(RUN, replicas=2) as s:
        await begun(s)
        give_voice(s, "z")
        for number in range(9):
            await add_liar(s, f"a{number}", 0, 9)
        await add_liar(s, "z", 1, 9)
        report = ReplicaReport(run=RUN.id, stage=1, version=9)
        for _ in range(20):
            for name in ("s1p0", "s1p1"):
                with contextlib.suppress(SwarmError):
                    await s.network.peers["z"].transport.call(name, "report", pack(report))
            await asyncio.sleep(0.5)
        assert {peer.core.version for peer in s.peers.values()} == {2}
        assert_honest(s)


def kept(folder: Path) -> tuple[int | None, list[bool]]:
    """The newest version that a keeper has of all stages, and of which it is the honest state."""
    version = checkpoint.newest_common_step(folder, RUN)
    if version is None:
        return None, []
    states = [checkpoint.Checkpoint(folder, RUN, stage, version).load() for stage in range(RUN.S)]
    return version, [bool((state["weights"] * RUN.M == -version).all()) for state in states]


@pytest.mark.parametrize("saved", [pytest.param((11,), marks=pytest.mark.further), (3, 5)])
async def test_a_keeper_keeps_what_those_with_voice_saved(saved: tuple[int, ...], tmp_path: Path) -> None:
    """Two strangers of each stage offer versions that nobody computed, newer ones and ones in between."""
    async with swarm(RUN, replicas=2) as s:
        add_keeper(s, tmp_path)
        await begun(s, version=5)
        await s.until(lambda: kept(tmp_path) == (4, [True, True]))
        for name, stage in (("a0", 0), ("a1", 1), ("b0", 0), ("b1", 1)):
            await add_liar(s, name, stage, max(saved), saved=saved)
        await asyncio.sleep(60.0)
        assert kept(tmp_path) == (4, [True, True])


def busy_for_keepers(s: Swarm, *peers: str) -> None:
    """They give no keeper anything for 90 s."""
    free_s = now_s() + 90.0
    for name in peers:
        transport = s.network.peers[name].transport
        honest, _ = transport.handlers["state"]

        async def busy(request: Request, honest: Handler = honest) -> Answer:
            if request.peer == "keeper" and now_s() < free_s:
                raise Busy("gives to others")
            return await honest(request)

        transport.serve("state", busy)


@pytest.mark.parametrize("lie", some(["weights", "signed weights", "moments"], quick=["weights", "moments"]))
async def test_a_keeper_keeps_nothing_that_those_who_gave_none_contradict(lie: str, tmp_path: Path) -> None:
    """Two replicas are busy when one with voice gives out what it made up."""
    run = replace(RUN, optimizer=replace(RUN.optimizer, momentum=0.5)) if lie == "moments" else RUN
    async with swarm(run, replicas=3) as s:
        give_voice(s, *PEERS, "s0p2", "s1p2")
        await s.until_serving()
        liar = s.peers["s0p0"]
        honest, made_up = liar.store.load, MadeUp(run, 0, ()).load(4)

        def load(version: int) -> Mapping[str, torch.Tensor]:
            return {**honest(version), "momentum": made_up["momentum"]} if lie == "moments" else made_up

        liar.store.load = load  # type: ignore[method-assign]
        if lie == "signed weights":
            weighs = liar.core.trail.weighs
            liar.core.trail.weighs = lambda version, digest: weighs(version, "ab" * 16)  # type: ignore[method-assign]
        busy_for_keepers(s, "s0p1", "s0p2")
        add_keeper(s, tmp_path)
        await s.until(lambda: "keeper" in s.network.records)
        s.add_trainer(TRAINER, steps=5)
        await s.until_version(5)
        said = "version 4 of stage 0 is not kept: its replicas signed another"
        await s.until(lambda: said in [event.text for event in s.seen(Trouble)])
        saved = checkpoint.Checkpoint(tmp_path, run, 0, 4)
        assert not saved.path.exists()
        await s.until(saved.path.exists)
        right = s.peers["s0p1"].store.load(4)
        assert all(torch.equal(vector, right[name]) for name, vector in saved.load().items())
        assert len(right) == (2 if lie == "moments" else 1)


@pytest.mark.parametrize("other_signs", [True, False])
async def test_one_replica_that_signs_other_weights_keeps_no_keeper_from_its_work(
    other_signs: bool, tmp_path: Path
) -> None:
    async with swarm(RUN, replicas=2) as s:
        give_voice(s, *PEERS, steps={"s0p0": 100})
        await s.until_serving()
        if not other_signs:
            del s.network.peers["s0p1"].transport.handlers["trail"]
        trail = s.peers["s0p0"].core.trail
        weighs = trail.weighs
        trail.weighs = lambda version, digest: weighs(version, "ab" * 16)  # type: ignore[method-assign]
        add_keeper(s, tmp_path)
        await s.until(lambda: "keeper" in s.network.records)
        s.add_trainer(TRAINER, steps=5)
        await s.until(lambda: kept(tmp_path) == (4, [True, True]))
        assert not s.seen(Trouble)


async def test_what_a_keeper_took_from_strangers_gives_way_to_what_those_with_voice_saved(
    tmp_path: Path,
) -> None:
    """It was there before them, and what it took is newer."""
    for stage in range(RUN.S):
        made_up = dict(MadeUp(RUN, stage, ()).load(11))
        checkpoint.Checkpoint(tmp_path, RUN, stage, 11).save(made_up, voiced=False)
    async with swarm(RUN, replicas=2) as s:
        add_keeper(s, tmp_path)
        assert kept(tmp_path) == (11, [False, False])
        await begun(s, version=5)
        await s.until(lambda: kept(tmp_path) == (4, [True, True]), limit_s=60.0)


async def test_a_keeper_takes_nothing_from_strangers_when_all_with_voice_are_gone(tmp_path: Path) -> None:
    async with swarm(RUN, replicas=2) as s:
        add_keeper(s, tmp_path)
        await begun(s, version=4)
        await s.until(lambda: kept(tmp_path) == (4, [True, True]))
        s.kill_and_forget(*PEERS)
        for name, stage in (("a0", 0), ("a1", 1)):
            await add_liar(s, name, stage, 8)
        await asyncio.sleep(60.0)
        assert kept(tmp_path) == (4, [True, True])


async def test_a_trainer_ends_only_by_the_word_of_those_with_voice() -> None:
    """Strangers of every stage bear one another out that the run is over."""
    async with swarm(RUN, replicas=2) as s:
        await begun(s)
        for number in range(9):
            await add_liar(s, f"a{number}", number % 2, RUN.steps)
        status = RunStatus(run=RUN.id, version=RUN.steps, held_by_all=RUN.steps)

        async def watch(request: Request) -> Answer:
            await asyncio.sleep(0.5)
            return Answer(pack(Watched(revision=1, version=RUN.steps, status=status)))

        async def nonsense(request: Request) -> Answer:
            return Answer(b"\xc1")

        for number in range(9):
            s.network.peers[f"a{number}"].transport.serve("watch", watch)
            s.network.peers[f"a{number}"].transport.serve("work", nonsense, max_body_bytes=1 << 20)
        s.kill(TRAINER)
        s.add_trainer(TRAINER)
        await s.until_finished(limit_s=300.0)
        assert_honest(s)


async def test_strangers_of_a_later_stage_that_refuse_everything_end_no_trainer() -> None:
    """The stage before them would tell it that its microbatches are refused, by as many as it believes."""
    async with swarm(RUN, replicas=2) as s:
        await begun(s)
        for number in range(9):
            await add_liar(s, f"a{number}", 1, s.peers["s1p0"].core.version)
        s.kill(TRAINER)
        s.add_trainer(TRAINER)
        await s.until_finished(limit_s=300.0)
        assert_honest(s)
        assert sum(s.network.peers[f"a{number}"].transport.calls["work"] for number in range(9)) < 100


async def test_a_stranger_that_says_it_has_all_that_others_have_makes_none_undo_its_own() -> None:
    """It never retracts what it never had, and holds up nothing."""
    async with swarm(RUN, replicas=2) as s:
        give_voice(s, *PEERS)
        await s.until_serving()
        await add_liar(s, "liar", 1, 0, state="joining")

        async def repeat() -> None:
            while True:
                t = max(peer.core.version for _, peer in s.live())
                theirs = Bitmap(s.done("s1p0", t) | s.done("s1p1", t))
                step = StepReport(t=t, done=theirs)
                report = ReplicaReport(run=RUN.id, stage=1, version=t, steps=(step,))
                with contextlib.suppress(SwarmError):
                    await s.network.peers["liar"].transport.call(
                        "s1p0", "report", pack(report), [bytes(8 * theirs.bit_count())]
                    )
                await asyncio.sleep(0.02)

        lying = asyncio.create_task(repeat())
        await asyncio.sleep(1.0)
        s.add_trainer(TRAINER)
        await s.until_finished(limit_s=20.0)  # after 30 s it would be left out in any case
        lying.cancel()
        s.assert_each_counted_once()
        assert s.undone == 0


async def test_a_stranger_that_says_it_has_a_stage_has_its_last_replica_not_move_away() -> None:
    """It would take the stage's state along, and the run would go back to a checkpoint."""
    async with swarm(RUN, replicas=1) as s:
        s.add_peer("s1p1", 1)
        give_voice(s, "s0p0", "s1p0", "s1p1")
        await s.until_serving()
        await add_liar(s, "liar", 1, 0)
        alone = s.peers["s1p0"]
        assert await alone.core.keep_stage()
        s.kill_and_forget("s1p1")
        await s.until(lambda: "liar" in {r.peer for r in alone.core.directory.at(1)})
        assert not await alone.core.keep_stage()
        await alone.moving.move(0, why="others are slower", going=())
        assert s.network.records["s1p0"].stage == 1
    async with swarm(RUN, replicas=2) as s:
        await s.until_serving()
        assert await s.peers["s1p0"].core.keep_stage(), "where nobody has voice the word of each counts"


async def test_who_says_that_it_is_fast_has_no_others_move_away_until_it_is_one_of_two() -> None:
    """They would go where they are needed more, and it could add what it likes."""
    names = [f"s1p{replica}" for replica in range(4)]
    async with swarm(RUN, replicas=4) as s:
        give_voice(s, *names)
        await s.until_serving()
        for name in names[:2]:
            await s.peers[name].moving.move(0, why="stage 1 is fast", going=())
        assert [s.peers[name].moving.going for name in names] == [True, False, False, False]
        s.kill_and_forget(names[0], *(f"s0p{replica}" for replica in range(4)))
        await s.until(lambda: not s.peers[names[1]].core.directory.at(0))
        await s.peers[names[1]].moving.move(0, why="the run stands still", going=())
        assert s.peers[names[1]].moving.going


async def assert_begins_at_4(s: Swarm, keeper: str) -> None:
    """New peers of all stages take what the honest keeper has."""
    await s.until(lambda: keeper in s.network.records)
    for stage in range(RUN.S):
        s.add_peer(f"new{stage}", stage)
    await s.until_serving()
    assert {peer.core.version for peer in s.peers.values()} == {4}
    assert_honest(s)


async def assert_joins_at_4(s: Swarm) -> None:
    """A newcomer of the lost stage takes what honest keepers have of it."""
    await joined(s)
    assert s.peers["newcomer"].core.version == 4
    assert_honest(s)


def add_lying_keeper(
    s: Swarm, name: str, saved: Sequence[int], shown: Sequence[Sequence[Word]] = ((), ())
) -> Awaitable[None]:
    """A stranger that offers made-up states of all stages. `shown`: what was signed of each, as it says."""
    end = s.network.join(name)
    made_up = {stage: MadeUp(s.run, stage, saved, shown[stage]) for stage in range(s.run.S)}
    StateLeases(s.run, end.transport, made_up)
    return end.directory.announce(
        PeerRecord(peer=name, run=s.run.id, stage=NO_STAGE, state="keeping", version=max(saved))
    )


@pytest.mark.parametrize(
    "saved",
    [pytest.param((4,), marks=pytest.mark.further), (5,), pytest.param((4, 5), marks=pytest.mark.further)],
)
async def test_of_a_lost_stage_a_founders_keeper_is_believed_however_many_others_there_are(
    saved: tuple[int, ...], tmp_path: Path
) -> None:
    """They offer other weights, or a version that it does not have: just where the run is."""
    founder = "12D3KooW" + "K" * 44
    run = replace(RUN, admission=replace(RUN.admission, founders=(founder,)))
    async with swarm(run, replicas=2) as s:
        keeper = add_keeper(s, tmp_path, founder)
        await begun(s, version=5)
        await s.until(lambda: keeper.version == 4)
        for number in range(9):
            await add_lying_keeper(s, f"a{number}", saved)
        s.kill_and_forget("s1p0", "s1p1")
        await assert_joins_at_4(s)


@pytest.mark.parametrize(
    "saved",
    [pytest.param((4,), marks=pytest.mark.further), (5,), pytest.param((2, 4, 5), marks=pytest.mark.further)],
)
async def test_of_a_lost_stage_most_keepers_say_which_versions_there_are(
    saved: tuple[int, ...], tmp_path: Path
) -> None:
    async with swarm(RUN, replicas=2) as s:
        keepers = [add_keeper(s, tmp_path / name, name) for name in ("k0", "k1")]
        await begun(s, version=5)
        await s.until(lambda: all(keeper.version == 4 for keeper in keepers))
        await add_lying_keeper(s, "a0", saved)
        s.kill_and_forget("s1p0", "s1p1")
        await assert_joins_at_4(s)


async def test_before_the_first_vouchers_keepers_copy_no_version_that_one_of_them_alone_has(
    tmp_path: Path,
) -> None:
    """Each of two honest ones sees one that has it, and one that has not."""
    async with swarm(RUN, replicas=2) as s:
        keepers = [add_keeper(s, tmp_path / name, name) for name in ("k0", "k1")]
        await s.until_serving()
        s.add_trainer(TRAINER, steps=5)
        await s.until_version(5)
        await s.until(lambda: all(keeper.version == 4 for keeper in keepers))
        s.kill_and_forget("s1p0", "s1p1")
        await add_lying_keeper(s, "a0", (4, 5))
        await asyncio.sleep(60.0)
        await assert_joins_at_4(s)


async def test_a_keeper_alone_does_not_say_from_where_a_run_begins_that_two_others_kept(
    tmp_path: Path,
) -> None:
    """All peers are gone: of what is saved a run begins again from what most keepers have."""
    async with swarm(RUN, replicas=2) as s:
        keepers = [add_keeper(s, tmp_path / name, name) for name in ("k0", "k1")]
        await begun(s, version=4)
        await s.until(lambda: all(keeper.version == 4 for keeper in keepers))
    async with swarm(RUN, replicas=0) as s:
        for name in ("k0", "k1"):
            add_keeper(s, tmp_path / name, name)
        await add_lying_keeper(s, "a0", (8,))
        await s.until(lambda: {"k0", "k1"} <= s.network.records.keys())
        for stage in range(RUN.S):
            s.add_peer(f"new{stage}", stage)
        await s.until_serving()
        assert {peer.core.version for peer in s.peers.values()} == {4}
        assert_honest(s)


def diagonal(every_lost: Sequence[str], every_saved: Sequence[tuple[int, ...]]) -> list[Any]:
    """All pairs, of which only those of the same place are not `further`."""
    return [
        pytest.param(lost, saved, id=f"{lost}-saved{n}", marks=[] if n == at else pytest.mark.further)
        for at, lost in enumerate(every_lost)
        for n, saved in enumerate(every_saved)
    ]


@pytest.mark.parametrize(
    ("lost", "saved"),
    diagonal(("stage", "run", "run, and it shows the same"), ((4,), (5,), (2, 5))),
)
async def test_of_two_keepers_the_one_whose_state_two_peers_signed_is_believed(
    lost: str, saved: tuple[int, ...], tmp_path: Path
) -> None:
    """The other one has as much voice, is asked first, and offers what it made up, of that version or not."""
    async with swarm(RUN, replicas=2) as s:
        keeper = add_keeper(s, tmp_path)
        await begun(s, version=5)
        await s.until(lambda: keeper.version == 4)
        shown = [checkpoint.Checkpoint(tmp_path, RUN, stage, 4).signed for stage in range(RUN.S)]
        if lost == "stage":
            await add_lying_keeper(s, "a0", saved)
            s.kill_and_forget("s1p0", "s1p1")
            await assert_joins_at_4(s)
            return
    async with swarm(RUN, replicas=0) as s:
        add_keeper(s, tmp_path)
        await add_lying_keeper(s, "a0", saved, shown if "same" in lost else ((), ()))
        await assert_begins_at_4(s, "keeper")


async def test_what_peers_signed_goes_from_keeper_to_keeper(tmp_path: Path) -> None:
    """The second one comes when all peers are gone, and takes nothing from one that lies."""
    async with swarm(RUN, replicas=2) as s:
        keeper = add_keeper(s, tmp_path / "k0", "k0")
        await begun(s, version=5)
        await s.until(lambda: keeper.version == 4)
        signed = [checkpoint.Checkpoint(tmp_path / "k0", RUN, stage, 4).signed for stage in range(RUN.S)]
        assert [{by.peer for _, by in words} for words in signed] == [{*PEERS[:2]}, {*PEERS[2:]}]
        s.kill_and_forget(*PEERS)
        await add_lying_keeper(s, "a0", (4, 5))
        other = add_keeper(s, tmp_path / "k1", "k1")
        await s.until(lambda: other.version == 4)
        s.kill_and_forget("k0", "a0")
        await add_lying_keeper(s, "a1", (8, 12))
        await asyncio.sleep(60.0)  # beside what was signed it takes nothing that was not
    assert kept(tmp_path / "k1") == (4, [True, True])
    assert [checkpoint.Checkpoint(tmp_path / "k1", RUN, stage, 4).signed for stage in range(RUN.S)] == signed


@pytest.mark.parametrize(("lost", "saved"), diagonal(("run", "stage"), ((4,), (5,), (4, 8))))
async def test_what_peers_signed_is_believed_however_many_keepers_say_otherwise(
    lost: str, saved: tuple[int, ...], tmp_path: Path
) -> None:
    """They say that they are far ahead, show the same signatures, and are more than are asked at once."""
    async with swarm(RUN, replicas=2) as s:
        keeper = add_keeper(s, tmp_path, "z")
        await begun(s, version=5)
        await s.until(lambda: keeper.version == 4)
        shown = [checkpoint.Checkpoint(tmp_path, RUN, stage, 4).signed for stage in range(RUN.S)]
        if lost == "stage":
            for number in range(20):
                await add_lying_keeper(s, f"a{number:02}", saved, shown if 4 in saved else ((), ()))
            s.kill_and_forget("s1p0", "s1p1")
            await assert_joins_at_4(s)
            return
    async with swarm(RUN, replicas=0) as s:
        add_keeper(s, tmp_path, "z")
        for number in range(20):
            await add_lying_keeper(s, f"a{number:02}", saved, shown if 4 in saved else ((), ()))
        await assert_begins_at_4(s, "z")


@pytest.mark.parametrize("ahead", [0, 1, 5])
async def test_a_coordinator_with_voice_alone_replaces_no_weights(ahead: int) -> None:
    """Attack 1, by a peer that has worked: it names itself as the only source of another state."""
    async with swarm(RUN, replicas=3) as s:
        peers = [f"s{stage}p{replica}" for stage in range(2) for replica in range(3)]
        give_voice(s, *peers, "liar")
        await s.until_serving()
        s.add_trainer(TRAINER, steps=2)
        await s.until_version(2)
        await add_liar(s, "liar", 1, 2 + ahead)
        peer = s.peers["s1p0"]
        await s.until(lambda: "liar" in peer.core.voice())
        says = Directive(
            run=RUN.id, stage=1, coordinator="liar", version=2 + ahead, sources=("liar",), digest="made up"
        )
        assert not await peer.actions._recovery.to(says)
        assert peer.core.version == 2
        assert_honest(s)
        text = f"stage 1: its coordinator liar wants version {2 + ahead} of it taken; others do not"
        assert any(note.text.startswith(text) for note in s.seen(Note))


async def test_a_coordinator_with_voice_alone_replaces_no_weights_of_a_newcomer() -> None:
    """Which then computed falsely what others audit, and added that to the sums of its stage."""
    async with swarm(RUN, replicas=3) as s:
        give_voice(s, *s.peers)
        await s.until_serving()
        s.add_trainer(TRAINER, steps=2)
        await s.until_version(2)
        liar = s.peers["s0p0"].coordination.coordinator(0)
        assert liar is not None

        def directive(peer: str, said: Directive) -> Directive:
            made_up = msgspec.structs.replace(said, version=3, digest="ab" * 16, sources=(liar,))
            return made_up if peer == "newcomer" else said

        direct_falsely(s.peers[liar].coordination.protocol, directive)
        StateLeases(RUN, s.network.peers[liar].transport, {0: MadeUp(RUN, 0, (3,))})  # type: ignore[dict-item]
        await joined(s, 0)
        await asyncio.sleep(5.0)
        assert f"its coordinator {liar} wants version 3 of it taken; others do not" in s.seen(Note)[-1].text
        assert_honest(s)


@pytest.mark.parametrize("ahead", [0, 1])
async def test_a_coordinator_with_voice_alone_replaces_no_weights_when_a_run_goes_back(ahead: int) -> None:
    """Another stage was lost. All of its own stage took what it made up, and went on with that."""
    async with swarm(RUN, replicas=3) as s:
        give_voice(s, *s.peers, steps={"s0p0": 45})
        coordinate_all(s)
        await s.until_serving()
        s.add_trainer(TRAINER, steps=3)
        await s.until_version(3)
        transport = s.network.peers["s0p0"].transport
        gone_back = Generation(1, 0, lost_stage=1, lost_version=3)
        commits = tuple(s.peers["s0p0"].core.commits.values())

        def directive(peer: str, said: Directive) -> Directive:
            made_up = msgspec.structs.replace(
                said, version=ahead, digest="ab" * 16, sources=("s0p0",), commits=commits
            )
            return made_up if said.generation == gone_back and peer != "s0p0" else said

        direct_falsely(s.peers["s0p0"].coordination.protocol, directive)
        StateLeases(RUN, transport, {0: MadeUp(RUN, 0, (ahead,))})  # type: ignore[dict-item]
        state, status = (transport.handlers[method][0] for method in ("state", "status"))

        async def opened(request: Request) -> Answer:
            return offered(generation=gone_back)(await state(request))

        async def said(request: Request) -> Answer:
            told = unpack((await status(request)).header, PeerStatus)
            lie = msgspec.structs.replace(told, generation=gone_back, version=ahead, digest="ab" * 16)
            return Answer(pack(lie if "newcomer" in s.peers else told))

        transport.serve("state", opened)
        transport.serve("status", said)
        s.kill_and_forget("s1p0", "s1p1", "s1p2")
        s.add_peer("newcomer", 1)
        others = [s.peers[name] for name in ("s0p1", "s0p2", "newcomer")]
        await s.until(lambda: all(peer.core.generation == gone_back for peer in others), limit_s=60.0)
        await asyncio.sleep(5.0)
        assert {peer.core.version for peer in others} == {0}
        del s.peers["s0p0"]
        assert_honest(s)


async def test_at_peers_that_serve_or_pause_and_at_keepers_those_come_first_that_have_worked(
    tmp_path: Path,
) -> None:
    """In the queue of those that want a state: `tests/peers/transfer/test_state_leases.py`."""
    async with swarm(RUN) as s:
        await begun(s)
        add_keeper(s, tmp_path)
        await add_liar(s, "stranger", 1, 2)
        s.owners["s1p0"].pause("by hand", "swarm pause")
        await s.until(lambda: s.owners["s1p0"].doing == "paused")
        await s.until(lambda: "keeper" in s.network.records)
        for name in ("s0p0", "s1p0", "keeper"):
            handler = s.network.peers[name].transport.handlers["state"][0]
            leases = handler.__self__  # type: ignore[attr-defined]
            first = [leases._comes_first(peer) for peer in (*PEERS, "stranger", "nobody")]
            assert first == [True] * len(PEERS) + [False] * 2, name

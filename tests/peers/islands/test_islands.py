"""Islands that meet every few steps: whole swarms in memory, with faults, against a single process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peers.events import Note, RolledBack, StepDone
from peers.islands.trainers import IslandTrainers
from peers.ports import Answer
from peers.sim.loop import WORLD
from peers.sim.network import SimSigner
from peers.storage.checkpoint import Checkpoint
from peers.trainer import TrainerSettings
from peers.transfer.keeper import CheckpointKeeper, KeepingSettings
from peers.transfer.leases import Snapshot
from swarm.floats import mean_of
from swarm.manifest import AdmissionSpec, IslandsSpec, Run, audit_run
from swarm.model.layout import initial_state
from swarm.model.reference import SingleProcess
from swarm.protocol.statements import sign
from swarm.protocol.sums import Projected
from swarm.wire.evidence import ShowEvidence, WrongContribution
from swarm.wire.messages import Opened, OpenHeld, pack
from tests.model.chain import batch_of, tiny_run, weights_of
from tests.peers.admitted import OTHER
from tests.peers.loops import Swarm, swarm
from tests.peers.network import End
from tests.peers.sybils import TRAINER, give_voice
from tests.seeds import cases, some

pytestmark = pytest.mark.virtual_time

STEPS = 6  # two meetings, two steps before each


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def counting(*, steps: int = STEPS, microbatches: int = 4, **spec: Any) -> Run:
    """Whose weights say how often each microbatch of each island was counted, if all go all the way."""
    given = {"count": 2, "local_steps": 2, "outer_lr": 1.0, "outer_momentum": 0.0, **spec}
    run = audit_run(stages=2, steps=steps, microbatches_per_step=microbatches)
    return replace(run, islands=IslandsSpec(**given))


class Text:
    """The bytes that the single process reads too."""

    def __init__(self, batch: Callable[[list[int]], np.ndarray]) -> None:
        self.batch = batch


def train(s: Swarm, name: str = "trainer", *, steps: int | None = None) -> None:
    """A trainer for each island."""
    for number in range(s.run.islands.count):
        s.add_trainer(f"{name} {number}", island=number, steps=steps)


async def between_meetings(s: Swarm) -> None:
    """Train until each island is a step beyond the first meeting, and rest there, with one replica paused."""
    await s.until_serving()
    train(s, steps=4)
    await s.until_version(4)
    s.owners["s1p0"].pause("by hand", "swarm pause")
    await s.until(lambda: s.owners["s1p0"].doing == "paused")
    assert s.network.records["s1p0"].version == 4


def assert_counted(s: Swarm) -> None:
    for name, peer in s.live():
        weights = weights_of(peer.core.compute).popitem()[1]
        counts, due = (-weights * s.run.M).tolist(), s.run.islands.trained(s.run.steps)
        assert counts == [due] * s.run.M, (name, s.story())


def names_of(s: Swarm, island: int) -> list[str]:
    cells = range(island * s.run.S, (island + 1) * s.run.S)
    return [name for name in s.peers if name.startswith(tuple(f"s{cell}p" for cell in cells))]


def trained_alone(run: Run, batch: Any = None) -> dict[str, torch.Tensor]:
    """The weights at the end of the run in a single process."""
    single = SingleProcess(run, batch or batch_of(run))
    for t in range(run.steps):
        single.step(t)
    return single.named_weights()


def assert_bits(s: Swarm, reference: dict[str, torch.Tensor]) -> None:
    for name, peer in s.live():
        for weight, value in weights_of(peer.core.compute).items():
            assert torch.equal(value, reference[weight]), f"{weight} of {name}"


async def test_each_microbatch_of_each_island_counts_once() -> None:
    async with swarm(counting()) as s:
        await s.until_serving()
        train(s)
        await s.until_finished(limit_s=60.0)
        assert_counted(s)
        assert (s.undone, s.replayed, s.voids()) == (0, 0, [])


async def test_islands_of_real_weights_equal_a_single_process_to_rounding() -> None:
    run = replace(tiny_run(), steps=STEPS, islands=IslandsSpec(count=2, local_steps=2))
    reference = trained_alone(run)
    async with swarm(run, batches=Text(batch_of(run))) as s:
        train(s)
        await s.until_finished(limit_s=60.0)
        for _, peer in s.live():
            for name, weight in weights_of(peer.core.compute).items():
                far = (weight - reference[name]).norm() / reference[name].norm()
                assert far < 1e-9, f"{name} is {far:.2e} away"


async def test_four_islands_end_with_the_bits_of_a_single_process() -> None:
    """Sums of three floats and more depend on their order: all add up in that of the islands."""
    run = replace(
        tiny_run(dtype="float32", model={"stages": 1}), steps=3, islands=IslandsSpec(count=4, local_steps=2)
    )
    async with swarm(run, replicas=1, batches=Text(batch_of(run))) as s:
        train(s)
        await s.until_finished(limit_s=60.0)
        assert_bits(s, trained_alone(run))


@pytest.mark.parametrize(
    "terms",
    [
        pytest.param({"codec": {"reduce": "rounded16"}}, id="rounded sums"),
        pytest.param(
            {"optimizer": {"moments": "bfloat16"}}, id="bfloat16 moments", marks=pytest.mark.further
        ),
    ],
)
async def test_an_island_that_rounds_and_is_lost_ends_with_the_bits_of_a_single_process(terms: Any) -> None:
    base = tiny_run(dtype="float32", model={"stages": 1}, **terms)
    run = replace(base, steps=STEPS, islands=IslandsSpec(count=2, local_steps=2))
    async with swarm(run, batches=Text(batch_of(run))) as s:
        await s.until_serving()
        train(s)
        await s.until(lambda: all(s.peers[name].core.version >= 4 for name in names_of(s, 1)))
        for name in names_of(s, 1):
            s.kill(name)
        for name in ("new 0", "new 1"):
            s.add_peer(name, 1)
        await s.until_finished(limit_s=200.0)
        assert_bits(s, trained_alone(run))


async def test_replicas_meet_at_once_and_give_one_another_nothing() -> None:
    """Those of a stage of an island have changed the same; each gives it to the other island."""
    async with swarm(counting(steps=12, microbatches=8, local_steps=5)) as s:
        await s.until_serving()
        asked: set[tuple[str, str]] = set()
        s.orders.append(lambda caller, callee, method: method == "chunk" and asked.add((caller, callee)))
        train(s)
        began = ended = 0.0
        for met in (5, 11):
            await s.until_version(met)
            began = s.network.loop.now_s
            await s.until_version(met + 1)
            ended = s.network.loop.now_s
            assert ended - began < 0.2
        assert asked and not [(one, other) for one, other in asked if one[:2] == other[:2]]
        assert_counted(s)


# --- faults -------------------------------------------------------------------------------------------------


ABOUT_A_STEP = ("work", "part", "report", "held", "chunk", "summary")


@pytest.mark.parametrize(
    ("method", "nth"),
    cases(
        [(method, (1, 3)[number % 2]) for number, method in enumerate(ABOUT_A_STEP)],
        name="{0}-{1}",
        quick=lambda method, nth: method == "chunk",
    ),
)
async def test_a_replica_that_dies_changes_no_weight(method: str, nth: int) -> None:
    async with swarm(counting()) as s:
        await s.until_serving()
        s.on_call(method, lambda caller, callee: s.kill(callee), nth=nth)
        train(s)
        await s.until_finished(limit_s=120.0)
        assert_counted(s)


@pytest.mark.parametrize("version", some([1, 2, 5], quick=[1]))
async def test_a_cell_that_is_lost_is_had_from_another_island(version: int) -> None:
    """Both replicas of a stage of an island die: the newcomer starts from the last meeting."""
    async with swarm(counting()) as s:
        await s.until_serving()
        train(s)
        await s.until(lambda: all(p.core.version >= version for n, p in s.live() if n.startswith("s3")))
        s.kill("s3p0")
        s.kill("s3p1")
        s.add_peer("newcomer", 3)
        await s.until_finished(limit_s=200.0)
        assert_counted(s)
        assert len(s.live()) == 7


async def test_an_island_that_is_lost_whole_is_made_again_from_the_others() -> None:
    async with swarm(counting()) as s:
        await s.until_serving()
        train(s)
        await s.until(lambda: all(p.core.version >= 4 for n, p in s.live() if n in names_of(s, 1)))
        for name in names_of(s, 1):
            s.kill(name)
        s.add_peer("new 0", 2)
        s.add_peer("new 1", 3)
        await s.until_finished(limit_s=200.0)
        assert_counted(s)


@pytest.mark.slow
async def test_islands_that_are_cut_off_from_one_another_wait_for_each_other() -> None:
    async with swarm(counting()) as s:
        await s.until_serving()
        here, there = names_of(s, 0), names_of(s, 1)
        s.network.cut(here, there)
        train(s)
        await s.until(lambda: all(p.core.version == 2 for _, p in s.live()), limit_s=60.0)
        await asyncio.sleep(20.0)
        assert all(p.core.version == 2 for _, p in s.live())
        s.network.heal()
        await s.until_finished(limit_s=120.0)
        assert_counted(s)


async def test_what_an_island_gave_at_a_meeting_is_had_after_its_next_step() -> None:
    """Others have slower lines, and get it while this island trains on."""
    async with swarm(counting()) as s:
        await s.until_serving()
        train(s, steps=4)
        await s.until_version(4)
        stranger = s.add_stranger()
        for shared in ({"shared_with": 1}, {"shared_of": 1}):  # its own change, and what it got
            question = OpenHeld(run=s.run.island(0).id, t=2, **shared)
            opened = await stranger.ask("s1p0", "held", question, Opened)
            assert opened.version == 2


async def test_what_a_cell_has_between_meetings_is_no_state_of_another_island() -> None:
    """A stage is lost when its twin on the other island offers just the version that the run is at."""
    async with swarm(counting()) as s:
        await between_meetings(s)
        s.kill("s3p0")
        s.kill("s3p1")
        s.add_peer("newcomer", 3)
        train(s, "again")
        await s.until_finished(limit_s=200.0)
        assert_counted(s)


async def test_each_island_goes_on_from_what_a_keeper_has(tmp_path: Path) -> None:
    """All machines but the keeper's were gone, and those of the first island come back later."""
    run = counting()
    for stage in range(run.S):
        Checkpoint(tmp_path, run, stage, 3).save(initial_state(run, stage))
    async with swarm(run, replicas=0) as s:
        end = s.network.join("keeper")
        settings = KeepingSettings(folder=tmp_path)
        s.start(end, CheckpointKeeper(run, end.transport, end.directory, settings, s.events.append).run())
        await s.until(lambda: "keeper" in s.network.records)
        for cell in (2, 3):
            s.add_peer(f"s{cell}p0", cell)
        await s.until_serving()
        assert [peer.core.version for _, peer in s.live()] == [3, 3]


async def test_a_keeper_keeps_nothing_that_an_island_has_between_meetings(tmp_path: Path) -> None:
    async with swarm(counting()) as s:
        end = s.network.join("keeper")
        settings = KeepingSettings(folder=tmp_path)
        keeper = CheckpointKeeper(s.run, end.transport, end.directory, settings, s.events.append)
        s.start(end, keeper.run())
        await between_meetings(s)
        await asyncio.sleep(10.0)  # it looks every 3 s
        assert keeper.offers == {0: [3], 1: [3]}
        assert keeper.version == 3


async def test_an_island_that_waits_for_a_slow_one_asks_now_and_then() -> None:
    async with swarm(counting()) as s:
        await s.until_serving()
        s.add_trainer("trainer 0")
        await s.until(lambda: all(s.peers[name].core.version == 2 for name in names_of(s, 0)))
        calls = s.network.peers["s2p0"].transport.calls["held"]
        await asyncio.sleep(20.0)
        assert 0 < s.network.peers["s2p0"].transport.calls["held"] - calls < 24
        s.add_trainer("trainer 1", island=1)
        await s.until_finished(limit_s=60.0)
        assert_counted(s)


async def test_an_island_that_begins_anew_takes_what_the_others_left_behind() -> None:
    """It is at a meeting of which the others, that are done, hold nothing any more."""
    async with swarm(counting()) as s:
        train(s)
        await s.until_finished(limit_s=60.0)
        kept = names_of(s, 0)
        for name in names_of(s, 1):
            s.kill(name)
        s.network.cut(kept)
        s.add_peer("new 0", 2)
        s.add_peer("new 1", 3)
        s.add_trainer("again", island=1)
        await s.until(lambda: all(s.peers[name].core.version == 2 for name in ("new 0", "new 1")))
        s.network.heal()
        await s.until_finished(limit_s=60.0)
        assert_counted(s)
        assert any("where the other islands are" in note.text for note in s.seen(Note))


@pytest.mark.parametrize("cut_off_s", some([0.0, 7.0], quick=[7.0]))
async def test_an_island_that_begins_anew_catches_up_with_others_that_wait_for_it(cut_off_s: float) -> None:
    """They wait at a later meeting. For longer than 5 s it cannot even download where they have been."""
    async with swarm(replace(counting(), steps=9)) as s:
        await s.until_serving()
        train(s)
        await s.until(lambda: all(p.core.version >= 6 for _, p in s.live()))
        for name in names_of(s, 0):
            s.kill(name)
        kept = names_of(s, 1)
        await s.until(lambda: all(s.peers[name].core.version == 8 for name in kept))
        s.network.cut(kept)
        s.add_peer("new 0", 0)
        s.add_peer("new 1", 1)
        new = [s.peers[name] for name in ("new 0", "new 1")]
        await s.until(lambda: all(peer.core.version == 2 for peer in new), limit_s=200)
        await asyncio.sleep(cut_off_s)
        s.network.heal()
        await s.until_finished(limit_s=60.0)
        assert_counted(s)


async def test_strangers_are_heard_of_a_meeting_that_no_peer_with_voice_has() -> None:
    """Seed 900829: the only one with voice had come after it, and the late island waited for ever."""
    run = replace(counting(), steps=9, admission=AdmissionSpec(trainers=(TRAINER, OTHER)))
    async with swarm(run) as s:
        await s.until_serving()
        for island, name in enumerate((TRAINER, OTHER)):
            s.add_trainer(name, island=island)
        await s.until(lambda: all(p.core.version >= 6 for _, p in s.live()))
        for name in names_of(s, 0):
            s.kill(name)
        kept = names_of(s, 1)
        await s.until(lambda: all(s.peers[name].core.version == 8 for name in kept))
        give_voice(s, "late", run=run.island(1))
        s.network.cut([*kept, "late"])
        late = s.add_peer("late", 2)
        await s.until(lambda: late.core.joined and late.core.version == 8, limit_s=60)
        new = [s.add_peer("new 0", 0), s.add_peer("new 1", 1)]
        await s.until(lambda: all(peer.core.version == 2 for peer in new), limit_s=200)
        s.network.heal()
        await s.until_finished(limit_s=120.0)
        assert_counted(s)


@pytest.mark.parametrize("is_cut_off", some([False, True], quick=[False]))
async def test_what_a_newcomer_took_of_a_meeting_is_had_from_it(is_cut_off: bool) -> None:
    """It took what its stage was after a meeting from another island, which then is lost: the only copy."""
    async with swarm(replace(counting(), steps=9)) as s:
        await s.until_serving()
        train(s)
        await s.until(lambda: all(p.core.version >= 4 for _, p in s.live()))
        s.kill("s3p0")
        s.kill("s3p1")
        s.add_peer("alone", 3)
        await s.until(lambda: s.peers["alone"].core.version == s.peers["s2p0"].core.version == 5, limit_s=60)
        for name in names_of(s, 0):
            s.kill(name)
        if is_cut_off:
            s.network.cut(["alone", "s2p0", "s2p1"])
        new = [s.add_peer(f"new {cell}", cell) for cell in (0, 1)]
        if is_cut_off:
            await s.until(lambda: all(peer.core.version == 2 for peer in new), limit_s=200)
            s.network.heal()
        await s.until_finished(limit_s=120.0)
        assert_counted(s)


def trainers_of(s: Swarm, end: End) -> IslandTrainers:
    """One trainer of all islands, as `swarm train` has it; it runs nothing yet."""
    settings = TrainerSettings(window=6)
    return IslandTrainers(s.run, s.batches, end.transport, end.directory, settings, s.events.append)


def step_done(t: int, *losses: float) -> StepDone:
    """As the trainer of an island tells a step."""
    loss = mean_of(losses) if losses else None
    meets = not losses
    return StepDone(t=t, steps=STEPS, loss=loss, losses=losses, tokens_per_s=1.0, peers=(1,), meeting=meets)


async def test_the_loss_of_a_step_of_all_islands_is_the_mean_of_its_microbatches() -> None:
    """That of the islands' means is another number by its last bits, and one process does not say it."""
    async with swarm(counting(), replicas=0) as s:
        islands = trainers_of(s, s.network.join("trainer"))
        losses = [(5.238, 5.544, 5.37), (5.604, 5.626, 5.066)]
        for number, each in enumerate(losses):
            islands._heard(number, step_done(1, *each))
            islands._heard(number, step_done(2))
        assert [event.loss for event in s.seen(StepDone)] == [mean_of([*losses[0], *losses[1]]), None]


async def test_steps_that_an_island_takes_again_are_told_in_order_and_kept_no_longer() -> None:
    """Others took them before, or another is behind where a trainer begins."""
    async with swarm(counting(), replicas=0) as s:
        islands = trainers_of(s, s.network.join("trainer"))
        for number, t in ((0, 2), (0, 3), (1, 0), (1, 1), (1, 2)):
            islands._heard(number, step_done(t, 1.0))
        islands._heard(0, RolledBack(stage=-1, step=0))
        for number, t in ((1, 3), (0, 0), (0, 1), (0, 2), (0, 3)):
            islands._heard(number, step_done(t, 1.0))
        assert [event.t for event in s.seen(StepDone)] == [2, 3]
        assert not islands._done


async def test_a_trainer_stays_with_an_island_that_is_done_until_all_are() -> None:
    """The power fails between the end of one and of the other: the one that was done is trained again."""
    async with swarm(counting()) as s:
        await s.until_serving()
        end = s.network.join("trainer")
        trainers = trainers_of(s, end)
        s.start(end, trainers.run())
        first, second = trainers.trainers
        last = names_of(s, 1)
        await s.until(lambda: all(s.peers[name].core.version == 5 for name in last))
        s.network.cut(last, ["trainer"])
        await s.until(lambda: first.is_done)
        assert not second.is_done
        for name in list(s.peers):
            s.kill(name)
        s.network.heal()
        for cell in range(4):
            s.add_peer(f"new {cell}", cell)
        await s.until_finished(limit_s=200.0)
        assert_counted(s)
        await s.until(lambda: s.tasks["trainer"].done(), limit_s=30.0)


# --- lies ---------------------------------------------------------------------------------------------------


def say_of_changes(s: Swarm, name: str, number: float) -> None:
    """This peer says of each number that its island has changed by so much."""
    leases = s.peers[name]._states
    honest = leases.lend

    async def lend(reader: str, pool: str, what: Any, content: Snapshot, lent: torch.Tensor) -> Answer:
        if what[0] >= 0:
            changed = torch.full((s.run.M,), number, dtype=torch.float64)
            content = content._replace(tensors={"gradient": changed.view(torch.uint8)})
        return await honest(reader, pool, what, content, lent)

    leases.lend = lend  # type: ignore[method-assign]


@pytest.mark.parametrize("number", some([math.inf, math.nan], quick=[math.inf]))
async def test_a_change_that_is_no_number_is_had_from_another_replica(number: float) -> None:
    async with swarm(counting()) as s:
        await s.until_serving()
        say_of_changes(s, "s2p0", number)
        train(s)
        await s.until_finished(limit_s=200.0)
        assert_counted(s)


async def test_replicas_that_have_worked_little_do_not_say_what_an_island_has_changed() -> None:
    """Two say the same, and one that has worked for longer something else."""
    run = replace(counting(), admission=AdmissionSpec(trainers=(TRAINER, OTHER)))
    async with swarm(run, replicas=3) as s:
        give_voice(s, "s2p0", "s2p1", "s2p2", steps={"s2p2": 90}, run=run.island(1))
        await s.until_serving()
        for liar in ("s2p0", "s2p1"):
            say_of_changes(s, liar, 1.0)
        for number, name in enumerate((TRAINER, OTHER)):
            s.add_trainer(name, island=number)
        await s.until_finished(limit_s=200.0)
        assert_counted(s)


@pytest.mark.parametrize("island", [0, 1])
async def test_the_trainer_of_all_islands_hears_whom_each_of_them_convicts(island: int) -> None:
    run = replace(counting(), admission=AdmissionSpec(trainers=(TRAINER,)))
    async with swarm(run, replicas=3) as s:
        liar, *judges = sorted(names_of(s, island))[:3]
        give_voice(s, liar, *judges, run=run.island(island))
        await s.until_serving()
        trainers = trainers_of(s, s.network.join(TRAINER))
        said, terms = Projected(0, 0, "round", (), (), ()), run.island(island)
        signature = sign(SimSigner(liar), terms.id, said)
        lie = WrongContribution(accused=liar, statement=said, signature=signature)
        for judge in judges:
            s.peers[judge].convictions.convicted.add(liar)
        header = pack(ShowEvidence(run=terms.id, evidence=lie))
        await s.network.peers[judges[0]].transport.call(TRAINER, "evidence", header, deadline_s=5.0)
        convicted = [trainer.verdicts.convicted for trainer in trainers.trainers]
        assert convicted == [{liar} if number == island else set() for number in range(2)]


COMMANDS = ("pause", "leave", "pause and resume at once")
OF_A_MEETING = ("meeting", "encoded", "gathered", "given")
COMMANDED = [
    (2 if (p + c) % 2 == 0 else 4, point, command)
    for (p, point), (c, command) in product(enumerate(OF_A_MEETING), enumerate(COMMANDS))
]
"""Each command at each point, of two islands and of four in turn."""


@pytest.mark.parametrize(
    ("islands", "point", "command"),
    cases(
        COMMANDED,
        name="{0}-{1}-{2}",
        quick=lambda _, point, command: (point, command) == ("encoded", "leave"),
    ),
)
async def test_an_owner_may_take_a_device_back_in_the_midst_of_a_meeting(
    command: str, point: str, islands: int
) -> None:
    """Twice: of two replicas the one that gathers what the islands have changed, or gives it out."""
    run = counting(count=islands)
    async with swarm(run) as s:
        await s.until_serving()
        commanded: list[str] = []

        def take_back(name: str) -> None:
            commanded.append(name)
            owner = s.owners[name]
            if command == "leave":
                owner.leave()
                return
            owner.pause("by hand", "swarm pause")
            later_s = 0.0 if "at once" in command else 5.0
            s.network.loop.call_later(later_s, owner.resume, context=WORLD)

        for nth in (1, 3):
            s.at_point(point, take_back, nth=nth, when=lambda name: name.endswith("p0"))
        train(s)
        await s.until_finished(limit_s=200.0)
        assert_counted(s)
        assert commanded

"""A cell of one peer lies at a meeting: nobody else has what its island changed of the stage.

The other islands wait until somebody else serves the cell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from peers.events import PeerLost
from peers.ports import Answer
from peers.transfer.leases import Snapshot
from swarm.errors import NotReady
from swarm.manifest import AdmissionSpec, IslandsSpec, Run, audit_run
from swarm.model.meeting import unlike
from swarm.records import PeerRecord
from tests.model.chain import tiny_run
from tests.peers.admitted import admitting, trainer_name
from tests.peers.islands.test_islands import Text, assert_bits, trained_alone
from tests.peers.loops import Swarm, swarm
from tests.peers.sybils import TRAINER, give_voice
from tests.seeds import some

pytestmark = pytest.mark.virtual_time

LIAR, TRAINERS = "s2p0", [TRAINER, *map(trainer_name, "uv")]
FIRST_MEETING = 2
WORDS = np.frombuffer(b"what is learnt of one part of it is of use for others " * 100, dtype=np.uint8)

Lie = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def lone_cells(count: int = 3) -> Run:
    """Each island is one peer."""
    base = tiny_run(dtype="float32", model={"stages": 1}, batch={"microbatches_per_step": count})
    return admitting(replace(base, steps=6, islands=IslandsSpec(count=count, local_steps=2)), *TRAINERS)


def batch(offsets: list[int]) -> np.ndarray:
    """Text that islands change alike with: of random bytes none learns what another does."""
    return np.stack([WORDS[start : start + 17] for start in offsets])


def noise(changed: torch.Tensor) -> torch.Tensor:
    found = torch.randn(changed.shape, generator=torch.Generator().manual_seed(1))
    return changed + 5.0 * found * changed.norm() / found.norm()


LIES: dict[str, Lie] = {
    "times 100": lambda changed: 100.0 * changed,
    "noise": noise,
    "sign flip": torch.neg,
    "too large for a norm": lambda changed: torch.full_like(changed, 1e30),
}


def change_falsely(s: Swarm, lie: Lie, name: str = LIAR) -> None:
    """Have a peer lie about what its island has changed."""
    leases: Any = s.peers[name]._states
    honest = leases.lend

    async def lend(reader: str, pool: str, what: Any, content: Snapshot, lent: torch.Tensor) -> Answer:
        core = s.peers[name].core
        known = [one for one in (*core.steps.values(), core.met) if one is not None]
        if pool == "held" and any(lent is one.reduced for one in known):
            changed = content.tensors["gradient"].view(torch.float32)
            content = content._replace(tensors={"gradient": lie(changed).view(torch.uint8)})
        return await honest(reader, pool, what, content, lent)

    leases.lend = lend


def give_nothing(s: Swarm) -> None:
    """Have a peer give nothing of what its island has changed by the first meeting."""
    leases: Any = s.peers[LIAR]._states
    honest = leases.lend

    async def lend(reader: str, pool: str, what: Any, content: Snapshot, lent: torch.Tensor) -> Answer:
        core = s.peers[LIAR].core
        known = [one for one in (*core.steps.values(), core.met) if one is not None]
        if pool == "held" and any(lent is one.reduced for one in known if one.t == FIRST_MEETING):
            raise NotReady("not yet", version=FIRST_MEETING)
        return await honest(reader, pool, what, content, lent)

    leases.lend = lend


def train(s: Swarm) -> None:
    for number, name in enumerate(TRAINERS):
        s.add_trainer(name, island=number)


def others_wait(s: Swarm) -> bool:
    return all(peer.core.version == FIRST_MEETING for name, peer in s.live() if name != LIAR)


async def replaced(s: Swarm, run: Run) -> None:
    """Another one serves the liar's cell: the run ends as if the liar had never been."""
    s.kill_and_forget(LIAR)
    s.add_peer("honest", 2)
    await s.until_finished(limit_s=300.0)
    assert_bits(s, trained_alone(run, batch))


@pytest.mark.parametrize("kind", some(list(LIES), quick=["sign flip"]))
async def test_no_island_takes_a_change_that_is_unlike_its_own(kind: str) -> None:
    run = lone_cells()
    async with swarm(run, replicas=1, batches=Text(batch)) as s:
        await s.until_serving()
        change_falsely(s, LIES[kind])
        train(s)
        await s.until(lambda: s.peers[LIAR].core.version > FIRST_MEETING)
        await asyncio.sleep(60.0)
        assert others_wait(s)
        assert all(event.peer == LIAR and "a change " in event.why for event in s.seen(PeerLost))
        assert 4 <= len(s.seen(PeerLost)) < 20  # both say it, less and less often
        await replaced(s, run)


@pytest.mark.usefixtures("summed_by_parts")
async def test_no_island_takes_a_sum_that_is_unlike_what_it_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a part that only the liar adds up."""
    monkeypatch.setattr("peers.islands.meeting.told_of", lambda *given: told_of(*given))
    from swarm.model.meeting import told_of as honest

    def told_of(run: Run, layout: Any, total: torch.Tensor, part: int) -> torch.Tensor:
        return honest(run, layout, total * (100.0 if part == 2 and lies else 1.0), part)

    run, lies = lone_cells(), True
    async with swarm(run, replicas=1, batches=Text(batch)) as s:
        train(s)
        await s.until(lambda: s.peers[LIAR].core.version > FIRST_MEETING)
        await asyncio.sleep(20.0)
        assert others_wait(s)
        lies = False
        await replaced(s, run)


@pytest.mark.parametrize("strangers", [False, True])
async def test_what_one_island_alone_says_a_meeting_left_is_not_taken(strangers: bool) -> None:
    """It gives the others nothing to add up, and is past the meeting, perhaps with weights of its own. Peers
    without voice say that the other islands are past it, too.
    """
    run = lone_cells()
    async with swarm(run, replicas=1, batches=Text(batch)) as s:
        for number in range(3 * strangers):
            give_voice(s, f"s{number}p0", run=run.island(number))
        await s.until_serving()
        give_nothing(s)
        train(s)
        await s.until(lambda: s.peers[LIAR].core.version > FIRST_MEETING)
        for second in range(30):
            for cell in range(2 * strangers) if second % 10 == 0 else ():
                await says_it_is_past(s, cell)
            await asyncio.sleep(1.0)
        assert others_wait(s)
        await replaced(s, run)


async def test_among_friends_what_one_island_alone_says_a_meeting_left_is_taken() -> None:
    """It came back from its disk, and nobody had what it had changed: two others waited (seed 9501665)."""
    run = replace(lone_cells(), admission=AdmissionSpec())
    async with swarm(run, replicas=1, batches=Text(batch)) as s:
        await s.until_serving()
        give_nothing(s)
        train(s)
        await s.until_finished(limit_s=60.0)
        assert_bits(s, trained_alone(run, batch))


async def test_what_an_island_has_changed_is_given_out_after_a_pause_as_well() -> None:
    """The others had not got it before: they waited for it for ever, as it is one that alone is past."""
    run = lone_cells()
    async with swarm(run, replicas=1, batches=Text(batch)) as s:
        await s.until_serving()
        give_nothing(s)
        train(s)
        await s.until(lambda: s.peers[LIAR].core.version > FIRST_MEETING)
        s.owners[LIAR].pause("by hand", "swarm pause")
        await s.until(lambda: s.owners[LIAR].doing == "paused")
        s.owners[LIAR].resume()
        await s.until_finished(limit_s=60.0)
        assert_bits(s, trained_alone(run, batch))


async def says_it_is_past(s: Swarm, cell: int) -> None:
    name = f"stranger {cell}"
    directory = s.network.peers[name].directory if name in s.network.peers else s.network.join(name).directory
    await directory.announce(
        PeerRecord(
            peer=name, run=s.run.id, stage=cell, state="serving", version=FIRST_MEETING + 1, max_inflight=8,
            since=1e12,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("times", "friends"), [(2.0, False), (10.0, True)])
async def test_a_change_of_ordinary_length_is_taken_and_among_friends_any(
    times: float, friends: bool
) -> None:
    """What nobody notices moves the weights hardly further than honest islands do."""
    run = replace(lone_cells(), admission=AdmissionSpec()) if friends else lone_cells()
    async with swarm(run, replicas=1, batches=Text(batch)) as s:
        await s.until_serving()
        change_falsely(s, lambda changed: times * changed)
        train(s)
        await s.until_finished(limit_s=60.0)
        assert not s.seen(PeerLost)


@pytest.mark.usefixtures("summed_by_parts")
@pytest.mark.parametrize(
    "lie",
    [torch.neg, pytest.param(lambda changed: 5.0 * changed, marks=pytest.mark.further)],
    ids=["turned", "longer"],
)
async def test_a_part_is_compared_with_all_that_the_own_island_has_changed(lie: Lie) -> None:
    """Of few tokens honest islands change parts as unlike as that, and one that is refused holds all up."""
    async with swarm(lone_cells(), replicas=1, batches=Text(batch)) as s:
        await s.until_serving()
        change_falsely(s, lie)
        train(s)
        await s.until_finished(limit_s=60.0)
        assert not s.seen(PeerLost)


@pytest.mark.usefixtures("summed_by_parts")
async def test_a_sum_is_taken_where_the_own_island_has_changed_nothing_of_that_part() -> None:
    """Weights may be frozen there; in the model that counts, an island changes those of its microbatches."""
    run = audit_run(stages=1, steps=6, microbatches_per_step=3)
    run = admitting(replace(run, islands=IslandsSpec(count=3, local_steps=2)), *TRAINERS)
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        train(s)
        await s.until_finished(limit_s=60.0)
        assert not s.seen(PeerLost)


def test_where_an_island_has_changed_nothing_no_other_may() -> None:
    nothing, some_of_it = torch.zeros(9), torch.ones(9)
    assert unlike(nothing, nothing) is None
    assert unlike(nothing, some_of_it) == "a change as long as 3, where that of this island is as long as 0"
    assert "as long as inf" in str(unlike(some_of_it, 1e30 * some_of_it))

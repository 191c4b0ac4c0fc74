"""Attack 18, in what is sent on: a peer feeds the next stage falsely first, then truly, and answers truly."""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from peers.audit.neighbours import STRANGERS_SHARE
from peers.events import Trouble
from peers.ports import Answer, Request
from peers.stage.server import StagePeer
from swarm.audit.answers import digest
from swarm.errors import Refused
from swarm.wire.codec import Encoded
from tests.peers import sybils
from tests.peers.admitted import TRAINER, admitting
from tests.peers.liars.test_false_answers import (
    LIES,
    Change,
    Counting,
    accused,
    audited_run,
    changed,
    decoder_run,
)
from tests.peers.loops import Swarm, swarm
from tests.seeds import some

pytestmark = [pytest.mark.virtual_time, pytest.mark.timeout(240)]

RUN = audited_run(steps=3)
Made = tuple[bytes, list[Encoded]]
MakeUp = Callable[[StagePeer, Any, Any, Any, Change], Made]
"""What a liar sends on of a microbatch, and of which inputs it says that it made that, by their digest."""


def other_outputs(liar: StagePeer, step: Any, work: Any, fwd: Any, change: Change) -> Made:
    return work.fed.inputs, changed(fwd.outputs, change)


def of_no_inputs(liar: StagePeer, step: Any, work: Any, fwd: Any, change: Change) -> Made:
    return bytes(len(work.fed.inputs)), changed(fwd.outputs, change)


def feed_falsely(
    liar: StagePeer, change: Change, make_up: MakeUp = other_outputs, *, to: str = ""
) -> set[bytes]:
    """Have a peer send on each microbatch falsely, and then truly; the digests of what is false. `to`: who
    alone is sent it falsely, and nothing else.
    """
    server: Any = liar.microbatches
    call, choose, false = server._call_next, server._next._choose, set[bytes]()
    lying = contextvars.ContextVar("lying", default=False)

    def chosen(work: Any, away: set[str]) -> str:
        return to if lying.get() else choose(work, away | {to})

    async def twice(step: Any, work: Any, fwd: Any, sent: bytes, *_: Any) -> Any:
        other = copy.copy(fwd)
        made_of, other.outputs = make_up(liar, step, work, fwd, change)
        named = digest(other.outputs)
        false.add(named)
        half = msgspec.structs.replace(work.fed, inputs=made_of, outputs=named)
        token = lying.set(True)
        with contextlib.suppress(Refused):
            await call(step, msgspec.structs.replace(work, fed=half), other, named)
        lying.reset(token)
        return await call(step, work, fwd, sent)

    if to:
        server._next._choose = chosen
    server._call_next = twice
    return false


def refused(s: Swarm) -> set[str]:
    """By those that they send on to, for a while."""
    said = [event.text for event in s.events if isinstance(event, Trouble)]
    return {text.split()[1] for text in said if " is refused for a while: what it sent on was " in text}


def audit_what_is_sent_on(s: Swarm, *peers: str) -> None:
    """Have those, or all, audit all of that, and no answers by chance."""
    for name, peer in s.peers.items():
        audits: Any = peer._neighbours  # type: ignore
        audits._falls = lambda _, toss, name=name: toss.purpose == "sent on" and (not peers or name in peers)


def audit_strangers(s: Swarm, *, stage: int = -1) -> None:
    """Have what comes from a stranger audited each time, by all or a stage, and nothing else: nothing looks
    strange.
    """
    for peer in s.peers.values():
        audits: Any = peer._neighbours  # type: ignore
        audits._falls = lambda share, toss, by=peer.stage: (
            toss.purpose == "sent on" and share == STRANGERS_SHARE and stage in (-1, by)
        )
        audits._losses.strange = audits._sent_on.strange = lambda _: None


@pytest.mark.parametrize(
    ("what", "stage"), some([("sign flip", 0), ("zero", 1), ("times 100", 1)], quick=[("zero", 1)])
)
async def test_a_peer_that_feeds_the_next_stage_falsely_first_is_found_and_left_out(
    what: str, stage: int
) -> None:
    async with swarm(RUN, replicas=3) as s:
        await s.until_serving()
        audit_what_is_sent_on(s)
        liar = f"s{stage}p1"
        false = feed_falsely(s.peers[liar], LIES[what])
        s.add_trainer(TRAINER)
        honest = [peer for name, peer in s.peers.items() if name != liar]
        await s.until(lambda: all(liar in p.convictions.convicted for p in honest), limit_s=100.0)
        assert false and accused(s) == {liar} and refused(s) <= {liar}
        await s.until(lambda: all(p.core.version == RUN.steps for p in honest), limit_s=100.0)


async def test_more_is_computed_again_of_what_strangers_send_on_where_others_have_voice() -> None:
    """After 133 microbatches it would take another name."""
    known = [f"s{stage}p{n}" for stage in range(3) for n in range(3) if (stage, n) != (1, 1)]
    async with swarm(sybils.admitting(RUN), replicas=3) as s:
        sybils.give_voice(s, *known)
        await s.until_serving()
        audit_strangers(s)
        false = feed_falsely(s.peers["s1p1"], LIES["sign flip"])
        s.add_trainer(sybils.TRAINER)
        await s.until(lambda: accused(s) == {"s1p1"}, limit_s=20.0)
        assert len(false) < 12


async def test_where_none_has_voice_no_more_is_computed_again() -> None:
    async with swarm(RUN, replicas=2) as s:
        await s.until_serving()
        audit_strangers(s)
        s.add_trainer(TRAINER)
        await s.until(lambda: s.finished, limit_s=100.0)
        assert not any(peer.answer_audits.audited for peer in s.peers.values() if peer.stage == 1)


@pytest.mark.parametrize("stage", some([0, 1], quick=[0]))
async def test_nobody_takes_what_was_made_of_inputs_that_were_never_sent(stage: int) -> None:
    async with swarm(RUN, replicas=3) as s:
        await s.until_serving()
        audit_what_is_sent_on(s, "nobody")
        false = feed_falsely(s.peers[f"s{stage}p1"], LIES["sign flip"], of_no_inputs)
        s.add_trainer(TRAINER)
        await s.until(lambda: s.finished, limit_s=100.0)
        assert false and not false & {
            kept.inputs_digest
            for peer in s.peers.values()
            if peer.core.applied is not None
            for kept in peer.core.applied.kept.values()
        }


async def test_who_shows_nothing_of_what_it_sent_on_is_refused_by_those_that_it_feeds() -> None:
    """If who fed it shows that as little. It proves nothing to others."""
    async with swarm(RUN, replicas=3) as s:
        await s.until_serving()
        audit_what_is_sent_on(s, "s2p0", "s2p1", "s2p2")
        feed_falsely(s.peers["s1p1"], LIES["sign flip"])
        for silent in ("s1p1", "s0p0", "s0p1", "s0p2"):
            s.peers[silent].core.transport.serve("kept", shows_nothing)
        s.add_trainer(TRAINER)
        fed = [peer for peer in s.peers.values() if peer.stage == 2]
        await s.until(lambda: s.finished, limit_s=100.0)
        assert "s1p1" in refused(s) and accused(s) == set()
        applied = [peer.core.applied for peer in fed]
        last = [kept for step in applied if step is not None for kept in step.kept.values()]
        assert last and not any("s1p1" in kept.by for kept in last)


async def test_of_two_replicas_one_has_none_refused_that_it_judges_alone() -> None:
    async with swarm(RUN, replicas=2) as s:
        await s.until_serving()
        audit_what_is_sent_on(s)
        feed_falsely(s.peers["s1p1"], LIES["sign flip"])
        for silent in ("s1p1", "s0p0", "s0p1"):
            s.peers[silent].core.transport.serve("kept", shows_nothing)
        s.add_trainer(TRAINER)
        await s.until(lambda: s.finished, limit_s=100.0)
        assert refused(s) == set()


@pytest.mark.slow
async def test_honest_peers_are_never_refused_for_what_they_sent_on() -> None:
    """Though calls break, and microbatches are sent on a second time."""
    async with swarm(RUN, replicas=3) as s:
        await s.until_serving()
        audit_what_is_sent_on(s)
        s.add_trainer(TRAINER)
        await s.until_version(1)
        s.kill("s2p1")
        await s.until_version(2)
        s.kill("s1p0")
        await s.until(lambda: s.finished, limit_s=100.0)
        assert accused(s) == set() == refused(s)


@pytest.mark.parametrize(("stage", "by"), some([(0, 1), (0, 2), (1, 2), (1, 3)], quick=[(0, 2), (1, 2)]))
async def test_a_stranger_is_convicted_of_what_it_sent_on_though_it_shows_nothing_and_another_passed_it_on(
    stage: int, by: int
) -> None:
    """Else one with voice could pass on what another name of its own makes up. `by`: who audits."""
    run = audited_run(stages=4)
    liar = f"s{stage}p1"
    async with swarm(sybils.admitting(run), replicas=3) as s:
        sybils.give_voice(s, *(f"s{at}p{n}" for at in range(4) for n in range(3) if (at, n) != (stage, 1)))
        await s.until_serving()
        audit_strangers(s, stage=by)
        feed_falsely(s.peers[liar], LIES["sign flip"])
        s.peers[liar].core.transport.serve("kept", shows_nothing)
        s.add_trainer(sybils.TRAINER)
        await s.until(lambda: accused(s) == {liar}, limit_s=100.0)


@pytest.mark.parametrize("shows", some([True, False], quick=[True]))
async def test_one_with_voice_does_not_feed_falsely_through_a_stranger(shows: bool) -> None:
    """The stranger computes that truly, and nobody else gets it."""
    run, liar, stranger = audited_run(stages=4), "s1p1", "s2p1"
    async with swarm(sybils.admitting(run), replicas=3) as s:
        sybils.give_voice(s, *(f"s{at}p{n}" for at in range(4) for n in range(3) if f"s{at}p{n}" != stranger))
        await s.until_serving()
        audit_strangers(s, stage=3)
        feed_falsely(s.peers[liar], LIES["sign flip"], to=stranger)
        if not shows:
            s.peers[liar].core.transport.serve("kept", shows_nothing)
        s.add_trainer(sybils.TRAINER)
        await s.until(lambda: accused(s) == {liar}, limit_s=100.0)


async def test_what_a_convicted_stranger_sent_on_counts_nowhere_that_it_came_through() -> None:
    known = [f"s{stage}p{n}" for stage in range(3) for n in range(3) if (stage, n) != (0, 1)]
    async with swarm(sybils.admitting(RUN), replicas=3) as s:
        sybils.give_voice(s, *known)
        await s.until_serving()
        s.add_trainer(sybils.TRAINER)
        last = [s.peers[f"s2p{n}"] for n in range(3)]

        def of_liar() -> list[StagePeer]:
            steps = [(peer, step) for peer in last for step in peer.core.steps.values()]
            return [p for p, step in steps if any("s0p1" in kept.by for kept in step.kept.values())]

        await s.until(lambda: bool(of_liar()))
        undone = of_liar()[0]
        before = undone.core.undone
        undone.convictions.on_conviction("s0p1")
        await s.until(lambda: undone.core.undone > before)


async def shows_nothing(request: Request) -> Answer:
    raise Refused("it is not shown")


async def test_who_sends_on_what_turns_others_sums_around_is_found_by_what_follows() -> None:
    run = decoder_run(steps=16)
    async with swarm(admitting(run, TRAINER), replicas=(1, 3, 1), batches=Counting(run)) as s:
        await s.until_serving()
        audit_what_is_sent_on(s, "nobody")
        s.add_trainer(TRAINER)
        await s.until_version(6)
        feed_falsely(s.peers["s1p1"], LIES["sign flip"])
        await s.until(lambda: accused(s) or s.finished, limit_s=100.0)
        assert accused(s) == {"s1p1"}

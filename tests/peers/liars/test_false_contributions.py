"""Attack 18, in what a replica adds: it answers truly, and contributes something else. All microbatches of
one replica are computed again; each replica finds the lie itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from peers.events import Trouble
from peers.ports import Answer, Request
from peers.sim.network import SimSigner
from peers.stage.server import StagePeer
from swarm.audit.answers import split_tensors
from swarm.errors import Refused, Stale
from swarm.manifest import Run
from swarm.model.stage import StageCompute
from swarm.protocol.statements import sign
from swarm.protocol.sums import Projected
from swarm.wire.evidence import AskKept, Audited, KeptTensors, ShowEvidence, WrongContribution
from swarm.wire.messages import pack, unpack
from tests.peers.liars.test_false_answers import TRAINER, accused, audited_run, changed
from tests.peers.loops import Swarm, swarm
from tests.seeds import some

pytestmark = [pytest.mark.virtual_time, pytest.mark.timeout(240)]

LIES: dict[str, float] = {"sign flip": -1.0, "zero": 0.0, "times 100": 100.0, "a tenth more": 1.1}


def add_falsely(liar: StagePeer, factor: float) -> None:
    """Have a peer answer truly, and add other gradients than it computes."""
    compute: Any = liar.core.compute
    honest = compute.add

    def add(found: Any) -> None:
        found.terms = {name: term * factor for name, term in found.terms.items()}
        honest(found)

    compute.add = add
    compute.snapshot = looks_at_nobody


def looks_at_nobody(t: int) -> None:
    raise RuntimeError("no memory")


def suspect(s: Swarm, peer: str, by: str = "") -> None:
    """Have one replica, or all, look at what a peer contributes next."""
    for other in s.peers.values():
        if other.core.me != peer and other.stage == s.peers[peer].stage and by in ("", other.core.me):
            other.contribution_audits.audit_next(peer)


async def play(
    run: Run, liar: str | None, factor: float = 1.0, *, suspects: tuple[str, ...] = (), by: str = "",
    replicas: int = 3,
    also: Callable[[Swarm], None] = lambda s: None,
) -> Swarm:  # fmt: skip
    """Run beside a liar, whose stage alone has replicas, until all know it, or to the end; honest replicas,
    or the one `by`, look at `suspects` in each step.
    """
    many = [replicas if liar is None or liar.startswith(f"s{at}p") else 1 for at in range(run.S)]
    async with swarm(run, replicas=many) as s:
        await s.until_serving()
        if liar is not None:
            add_falsely(s.peers[liar], factor)
        also(s)
        s.add_trainer(TRAINER)
        honest = [name for name in s.peers if name != liar]

        def over() -> bool:
            for peer in suspects:
                suspect(s, peer, by)
            convicted = [liar in s.peers[name].convictions.convicted for name in honest]
            return all(convicted) or all(s.peers[name].core.version >= run.steps for name in honest)

        await s.until(over, limit_s=600.0)
        if not any(liar in s.peers[name].convictions.convicted for name in honest):
            await asyncio.sleep(10.0)
        return s


@pytest.mark.parametrize(
    ("kind", "stage"),
    some(
        [("sign flip", 0), *((kind, 1) for kind in LIES), ("a tenth more", 2)],
        quick=[("sign flip", 0), ("times 100", 1), ("a tenth more", 2)],
    ),
)
async def test_a_replica_that_adds_wrongly_is_found_by_each_that_looks(kind: str, stage: int) -> None:
    liar = f"s{stage}p1"
    s = await play(audited_run(steps=12), liar, LIES[kind], suspects=(liar,))
    assert accused(s) == {liar}
    assert all(liar in peer.convictions.convicted for name, peer in s.peers.items() if name != liar)
    said = f"peer {liar} is left out: its signed projected of step"
    assert any(event.text.startswith(said) for event in s.seen(Trouble))


def send_on(liar: StagePeer, factor: float) -> None:
    """Have a peer send other outputs on, and show those; it adds what it computes."""
    compute: Any = liar.core.compute
    honest = compute.forward

    def forward(*args: Any, **more: Any) -> Any:
        fwd = honest(*args, **more)
        fwd.outputs = changed(fwd.outputs, lambda values: values * factor)
        return fwd

    compute.forward = forward
    compute.snapshot = looks_at_nobody


def find_nothing_in_answers(s: Swarm) -> None:
    async def fits(request: Request) -> Answer:
        return Answer(pack(Audited(fits=True)))

    for peer in s.peers.values():
        peer.core.transport.serve("audit", fits)


@pytest.mark.parametrize(("stage", "factor"), some([(0, 100.0), (1, 100.0), (1, -1.0)], quick=[(0, 100.0)]))
async def test_a_replica_that_adds_truly_what_follows_from_a_lie_that_it_sent_on_is_found(
    stage: int, factor: float
) -> None:
    """Its sum is true, and so is its answer to who asked: of both the gradient is that of the lie."""
    liar = f"s{stage}p1"

    def also(s: Swarm) -> None:
        send_on(s.peers[liar], factor)
        find_nothing_in_answers(s)

    s = await play(audited_run(steps=12), liar, suspects=(liar,), also=also)
    assert accused(s) == {liar}
    assert all(liar in peer.convictions.convicted for name, peer in s.peers.items() if name != liar)


async def test_who_shows_other_outputs_than_the_next_stage_got_is_left_out_for_a_while() -> None:
    def also(s: Swarm) -> None:
        liar = s.peers["s1p1"]
        send_on(liar, 100.0)
        find_nothing_in_answers(s)
        honest, _ = liar.core.transport.handlers["kept"]  # type: ignore[attr-defined]

        async def as_if_it_were_true(request: Request) -> Answer:
            answer = await honest(request)
            if not unpack(request.header, AskKept).made:
                return answer
            told = unpack(answer.header, KeptTensors)
            split = split_tensors((told.forth, told.back), answer.body)
            assert split is not None
            forth = changed(split[0], lambda values: values / 100.0)
            return Answer(answer.header, [buffer for one in (*forth, *split[1]) for buffer in one.buffers])

        liar.core.transport.serve("kept", as_if_it_were_true)

    s = await play(audited_run(steps=4), "s1p1", suspects=("s1p1",), also=also)
    assert not accused(s)
    assert "s1p1" in s.peers["s1p0"].coordination.left_out


@pytest.mark.slow
async def test_honest_contributions_are_computed_again_and_accuse_nobody() -> None:
    everybody = tuple(f"s{stage}p{place}" for stage in range(3) for place in range(3))
    s = await play(audited_run(), None, suspects=everybody)
    assert not accused(s)
    assert sum(peer.contribution_audits.audited for peer in s.peers.values()) > 20
    assert all((row == 4).all() for row in s.count_matrix().values())


async def test_a_sum_that_is_made_again_changes_under_the_books_since_several_may_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added: list[int] = []
    snapshot = StageCompute.snapshot

    def checked(self: StageCompute, t: int) -> StageCompute:
        (device,) = [p.core.device for p in peers if p.core.compute is self]
        found = snapshot(self, t)
        add = found.sums.add
        found.sums.add = lambda one: (device.books.check(), added.append(t), add(one))[-1]  # type: ignore[method-assign]
        return found

    monkeypatch.setattr(StageCompute, "snapshot", checked)
    peers: list[StagePeer] = []
    also: Callable[[Swarm], None] = lambda s: peers.extend(s.peers.values())  # noqa: E731
    await play(audited_run(steps=3), None, suspects=("s1p1",), also=also)
    assert added


@pytest.mark.parametrize("kind", ["zero", "times 100"])
async def test_what_looks_unlike_the_others_is_computed_again_at_once(kind: str) -> None:
    s = await play(audited_run(steps=8, microbatches=16), "s1p1", LIES[kind])
    assert accused(s) == {"s1p1"}


async def test_who_finds_a_lie_tells_the_others_and_they_look_themselves() -> None:
    s = await play(audited_run(steps=8), "s1p1", LIES["a tenth more"], suspects=("s1p1",), by="s1p0")
    assert all("s1p1" in peer.convictions.convicted for name, peer in s.peers.items() if name != "s1p1")


async def test_a_replica_that_shows_nothing_of_what_it_added_is_left_out_for_a_while() -> None:
    def hides(s: Swarm) -> None:
        async def nothing(request: Request) -> Answer:
            raise Stale("microbatch (0, 0) is not kept here", version=0)

        s.peers["s1p1"].core.transport.serve("kept", nothing)

    s = await play(audited_run(steps=4), "s1p1", LIES["a tenth more"], suspects=("s1p1",), also=hides)
    assert not accused(s)  # there is nothing to show
    coordinator = s.peers["s1p0"].coordination
    assert "s1p1" in coordinator.left_out


async def test_a_replica_that_shows_gradients_that_suit_its_sum_is_left_out_for_a_while() -> None:
    """Nobody signed those: its neighbours signed the true ones."""

    def suits(s: Swarm) -> None:
        liar = s.peers["s1p1"]
        honest, _ = liar.core.transport.handlers["kept"]  # type: ignore[attr-defined]

        async def negated(request: Request) -> Answer:
            answer = await honest(request)
            told = unpack(answer.header, KeptTensors)
            split = split_tensors((told.forth, told.back), answer.body)
            assert split is not None
            back = changed(split[1], np.negative)
            return Answer(answer.header, [buffer for one in (*split[0], *back) for buffer in one.buffers])

        liar.core.transport.serve("kept", negated)

    s = await play(audited_run(steps=4), "s1p1", LIES["sign flip"], suspects=("s1p1",), also=suits)
    assert not accused(s)
    assert "s1p1" in s.peers["s1p0"].coordination.left_out


async def test_of_contributions_that_nobody_audits_no_samples_are_kept() -> None:
    run = audited_run(steps=2)
    for codec in (run.codec, replace(run.codec, forward="topk:0.5")):
        async with swarm(replace(run, codec=codec), replicas=2) as s:
            await s.until_serving()
            s.add_trainer(TRAINER)
            await s.until_finished()
            checks = [c for p in s.peers.values() for c in p.contribution_audits._sums._checks.values()]  # type: ignore
            assert len(checks) == 12
            assert all(bool(check.samples()) == (codec == run.codec) for check in checks)


async def test_only_replicas_with_voice_have_others_looked_at_and_once_in_a_while() -> None:
    async with swarm(audited_run(), replicas=3) as s:
        await s.until_serving()
        looked: list[str] = []
        s.network.join("stranger")
        s.peers["s1p0"].convictions.suspect = looked.append
        for t, teller, why in (
            (0, "s1p1", None), (19, "s1p1", "may name a suspect once in 20 steps"), (20, "s1p1", None),
            (20, "s0p0", "may name a suspect"), (40, "stranger", "may name a suspect"),
        ):  # fmt: skip
            s.peers["s1p0"].convictions.last_added = lambda _, t=t: t
            said = Projected(1, 100 * t + len(looked), "r", (), (), ())  # any that it has signed is shown
            evidence = WrongContribution(
                accused="s1p2", statement=said, signature=sign(SimSigner("s1p2"), s.run.id, said)
            )
            show = pack(ShowEvidence(run=s.run.id, evidence=evidence))
            call = s.network.peers[teller].transport.call("s1p0", "evidence", show, deadline_s=1.0)
            if why is None:
                await call
            else:
                with pytest.raises(Refused, match=why):
                    await call
        assert looked == ["s1p2", "s1p2"]

"""Attack 18, in answers: some are computed again by another replica of the stage, and a liar is left out."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec.structs import replace as replaced

from peers.audit import answers as answer_audits
from peers.audit import asking
from peers.clock import now_s
from peers.events import PeerLost, Trouble
from peers.ports import Answer, Buffer, Request
from peers.sim.network import SimSigner
from peers.stage.open_step import KeptMicrobatch
from peers.stage.server import StagePeer
from swarm.audit.answers import digest
from swarm.errors import Busy, Refused, Stale, SwarmError
from swarm.ids import Microbatch
from swarm.manifest import AdmissionSpec, Run, audit_run, demo_run
from swarm.protocol.voice import RENEW_EVERY
from swarm.wire.codec import Encoded
from swarm.wire.evidence import AskKept, AuditAnswer, Audited, KeptTensors, WrongAnswer
from swarm.wire.messages import Locate, Located, pack, unpack
from swarm.wire.receipts import give_receipt
from tests.model.chain import weights_of
from tests.peers import sybils
from tests.peers.admitted import TRAINER, admitting
from tests.peers.loops import Swarm, swarm
from tests.peers.sybils import give_voice
from tests.seeds import some

pytestmark = [pytest.mark.virtual_time, pytest.mark.timeout(240)]

Change = Callable[[np.ndarray], np.ndarray]
LIES: dict[str, Change] = {
    "sign flip": lambda values: -values,
    "zero": lambda values: values * 0,
    "times 100": lambda values: values * 100,
}


def audit(monkeypatch: pytest.MonkeyPatch, *, share: float) -> None:
    monkeypatch.setattr(asking, "SHARE", share)


def audited_run(*, stages: int = 3, steps: int = 4, microbatches: int = 8) -> Run:
    run = audit_run(stages=stages, steps=steps, microbatches_per_step=microbatches, seed=1)
    return admitting(replace(run, dtype="float32"), TRAINER)


def decoder_run(*, steps: int) -> Run:
    """A small decoder that computes gradients of samples."""
    run = demo_run(steps=steps, codec="none")
    return replace(
        run,
        model=replace(run.model, hidden=16, heads=2, ffn_hidden=32),
        data=replace(run.data, sequence_length=16, tokens=10_000),
        batch=replace(run.batch, microbatch_size=1, microbatches_per_step=12),
    )


def changed(tensors: Sequence[Encoded], change: Change) -> list[Encoded]:
    """Tensors of floats, with other values."""
    found = []
    for one in tensors:
        if one.meta.dtype != "float32":
            found.append(one)
            continue
        values = change(np.frombuffer(memoryview(one.buffers[0]).cast("B"), np.float32))
        found.append(Encoded(one.meta, [memoryview(values.astype(np.float32).tobytes())]))
    return found


def lie(liar: StagePeer, change: Change) -> None:
    """Have a peer answer, and send on, other values than it computes; its own sum stays true."""
    compute: Any = liar.core.compute
    forward, gradients, loss_gradients = compute.forward, compute.gradients, compute.loss_gradients

    def false_forward(*args: Any, **more: Any) -> Any:
        fwd = forward(*args, **more)
        fwd.outputs = changed(fwd.outputs, change)
        return fwd

    def false(honest: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **more: Any) -> Any:
            found = honest(*args, **more)
            found.answer = changed(found.answer, change)
            return found

        return answer

    async def says_that_it_fits(request: Request) -> Answer:
        return Answer(pack(Audited(fits=True)))

    async def believes_nothing(evidence: WrongAnswer, body: Sequence[Buffer]) -> bool:
        return False

    transport = liar.core.transport
    transport.serve("audit", says_that_it_fits)
    liar.convictions.judge = believes_nothing
    compute.forward = false_forward
    compute.gradients, compute.loss_gradients = false(gradients), false(loss_gradients)


def boast(peer: StagePeer) -> None:
    """Have a peer of the last stage say losses that are too low."""
    compute: Any = peer.core.compute
    honest = compute.loss_gradients

    def boasts(*args: Any, **more: Any) -> Any:
        found = honest(*args, **more)
        found.loss -= 5.0
        return found

    compute.loss_gradients = boasts


async def play(
    run: Run, stage: int | None, change: Change, *, replicas: int = 3, others: int = 1
) -> tuple[Swarm, int]:
    """Run beside a liar at `stage` until all know it, or to the end; how many microbatches it had answered
    when it was found. `others`: replicas of the other stages.
    """
    async with swarm(run, replicas=[replicas if stage in (None, at) else others for at in range(run.S)]) as s:
        await s.until_serving()
        liar = f"s{stage}p1"
        found_after = -1

        def convicted() -> bool:
            mates = [p for n, p in s.peers.items() if p.stage == stage and n != liar]
            return bool(mates) and any(liar in p.convictions.convicted for p in mates)

        if stage is not None:
            lie(s.peers[liar], change)
        s.add_trainer(TRAINER)
        honest = [name for name in s.peers if name != liar]

        def over() -> bool:
            nonlocal found_after
            if found_after < 0 and convicted():
                found_after = s.peers[liar].microbatches.answered
            told = [liar in s.peers[name].convictions.convicted for name in honest]
            return all(told) or all(s.peers[name].core.version >= run.steps for name in honest)

        await s.until(over, limit_s=600.0)
        if found_after < 0:
            await asyncio.sleep(10.0)
        return s, found_after


def accused(s: Swarm) -> set[str]:
    return {name for peer in s.peers.values() for name in peer.convictions.convicted}


@pytest.mark.parametrize(
    ("kind", "stage"),
    some(
        [("sign flip", 0), *((kind, 1) for kind in LIES), ("zero", 2)],
        quick=[("sign flip", 0), ("zero", 2)],
    ),
)
async def test_a_peer_that_answers_wrongly_is_found_and_left_out(
    kind: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit(monkeypatch, share=1.0)
    s, found_after = await play(audited_run(), stage, LIES[kind])
    assert accused(s) == {f"s{stage}p1"}
    # In the first step all activations are zero, so stage 0 tells no lie in it.
    assert 0 <= found_after <= (24 if stage == 0 else 8)
    assert all(
        f"s{stage}p1" in peer.convictions.convicted for peer in s.peers.values() if peer.stage != stage
    )
    said = f"peer s{stage}p1 is left out: its signed answered of step"
    assert any(event.text.startswith(said) for event in s.seen(Trouble))


@pytest.mark.parametrize("shown", ["other gradients", "fewer bytes"])
async def test_who_shows_other_gradients_than_it_signed_is_not_believed_by_who_computes_them_again(
    shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are linear: with the opposite of what it got, the opposite of what it should answer fits."""
    audit(monkeypatch, share=1.0)
    async with swarm(audited_run(), replicas=[1, 3, 1]) as s:
        await s.until_serving()
        liar, fits = s.peers["s1p1"], list[bool]()
        compute: Any = liar.core.compute
        gradients, (kept, _) = compute.gradients, s.network.peers["s1p1"].transport.handlers["kept"]

        def false(*args: Any, **more: Any) -> Any:
            found = gradients(*args, **more)
            found.answer = changed(found.answer, LIES["sign flip"])
            return found

        async def shows(request: Request) -> Answer:
            answer = await kept(request)
            ask, told = unpack(request.header, AskKept), unpack(answer.header, KeptTensors)
            if ask.made or not told.back:
                return answer
            if shown == "fewer bytes":
                return Answer(answer.header, [*answer.body[:-1], memoryview(answer.body[-1]).cast("B")[:-1]])
            last = [Encoded(told.back[-1], [answer.body[-1]])]
            return Answer(answer.header, [*answer.body[:-1], *changed(last, LIES["sign flip"])[0].buffers])

        def noted(name: str) -> None:
            honest, _ = s.network.peers[name].transport.handlers["audit"]

            async def audits(request: Request) -> Answer:
                ask, answer = unpack(request.header, AuditAnswer), await honest(request)
                if ask.peer == "s1p1" and not ask.statement.is_half:
                    fits.append(unpack(answer.header, Audited).fits)
                return answer

            s.network.peers[name].transport.serve("audit", audits)

        compute.gradients = false
        s.network.peers["s1p1"].transport.serve("kept", shows)
        noted("s1p0")
        noted("s1p2")
        s.add_trainer(TRAINER)
        await s.until(lambda: len(fits) >= 3)
        assert not any(fits)


async def test_honest_answers_are_computed_again_and_accuse_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    audit(monkeypatch, share=1.0)
    s, _ = await play(audited_run(steps=2), None, LIES["zero"])
    assert not accused(s)
    assert sum(peer.answer_audits.audited for peer in s.peers.values()) > 30
    assert all((row == 2).all() for row in s.count_matrix().values())


@pytest.mark.slow
async def test_a_share_of_the_answers_is_audited_whoever_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    audit(monkeypatch, share=0.2)
    s, _ = await play(audited_run(steps=3, microbatches=16), None, LIES["zero"])
    audited = sum(peer.answer_audits.audited for peer in s.peers.values())
    assert 0.5 <= audited / (0.2 * 3 * 16 * 3) <= 1.5


class Noise:
    """Samples of a decoder."""

    def __init__(self, run: Run) -> None:
        self._shape = run.data.sequence_length + 1

    def batch(self, offsets: list[int]) -> np.ndarray:
        found = [np.random.default_rng(at).integers(0, 256, self._shape) for at in offsets]
        return np.stack(found).astype(np.uint8)


async def test_nothing_stays_in_an_open_step_of_the_gradients_that_a_liar_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    audit(monkeypatch, share=1.0)
    run = decoder_run(steps=1)

    async def trained(liar: str) -> dict[str, dict[str, torch.Tensor]]:
        async with swarm(admitting(run, TRAINER), replicas=3, batches=Noise(run)) as s:
            await s.until_serving()
            if liar:
                lie(s.peers[liar], LIES["zero"])
            s.add_trainer(TRAINER, window=2)
            if liar:  # all have to hear of it while the step is open
                await s.until(lambda: accused(s))
                s.kill(TRAINER)
                honest = [peer for name, peer in s.peers.items() if name != liar]
                await s.until(lambda: all(liar in peer.convictions.convicted for peer in honest))
                assert all(peer.core.version == 0 for peer in s.peers.values())
                s.add_trainer(TRAINER)
            names = ("s0p0", "s1p0", "s2p0")
            await s.until(lambda: all(s.peers[n].core.version >= run.steps for n in names), limit_s=100.0)
            assert accused(s) == ({liar} if liar else set())
            return {name: dict(weights_of(s.peers[name].core.compute)) for name in names}

    clean, lied = await trained(""), await trained("s2p1")
    assert all(torch.equal(value, lied[peer][name]) for peer in clean for name, value in clean[peer].items())


def judges_falsely(s: Swarm, liar: StagePeer) -> None:
    """Have a peer say that no answer fits, and show what it is given as evidence against who answered."""
    honest = liar.answer_audits.judge

    async def sees_lies(evidence: WrongAnswer, body: Sequence[Buffer]) -> bool:
        await honest(evidence, body)
        return True

    liar.answer_audits.judge = sees_lies  # type: ignore[method-assign]
    audit = liar.answer_audits._core.compute  # type: ignore
    assert audit is liar.core.compute
    made = answer_audits.make

    def make(compute: Any, *args: Any) -> Any:
        found = made(compute, *args)
        return found._replace(input_grads=[], outputs=[]) if compute is liar.core.compute else found

    answer_audits.make = make


async def test_a_judge_that_lies_convicts_nobody_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    audit(monkeypatch, share=1.0)
    monkeypatch.setattr(answer_audits, "make", answer_audits.make)
    run = audited_run()
    async with swarm(run, replicas=(1, 3, 1)) as s:
        await s.until_serving()
        judges_falsely(s, s.peers["s1p1"])
        s.add_trainer(TRAINER)
        await s.until(lambda: s.peers["s1p1"].convictions.convicted, limit_s=60.0)
        await asyncio.sleep(20.0)
        others = [peer for name, peer in s.peers.items() if name != "s1p1"]
        assert not any(peer.convictions.convicted for peer in others)


@pytest.mark.parametrize(
    "why",
    [
        None,
        Refused("no"),
        *(
            pytest.param(why, marks=pytest.mark.further)
            for why in (Busy("later"), Stale("that step is over", version=99))
        ),
    ],
)
async def test_a_peer_that_shows_nothing_of_what_it_keeps_is_left_alone_by_its_callers(
    why: SwarmError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit(monkeypatch, share=1.0)
    run = audited_run(steps=2)
    async with swarm(run, replicas=(1, 3, 1)) as s:
        await s.until_serving()
        liar = s.peers["s1p1"]
        lie(liar, LIES["zero"])

        async def others(request: Request) -> Answer:
            if why is not None:
                raise why
            return Answer(pack(KeptTensors(forth=(), back=())))

        liar.core.transport.serve("kept", others)
        s.add_trainer(TRAINER)
        await s.until_finished(limit_s=200.0)
        assert not accused(s)  # there is nothing to show
        lost = [event for event in s.seen(PeerLost) if event.peer == "s1p1"]
        assert lost and "its answer was computed again, and is another" in lost[0].why
        assert liar.microbatches.answered < run.steps * run.M / 3


async def test_a_peer_that_shows_something_else_than_it_answered_is_left_alone_by_its_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It shows truly what came in, and of what it made nothing: no judge found that its answer is another."""
    audit(monkeypatch, share=1.0)
    run = audited_run(steps=2)
    async with swarm(run, replicas=(1, 3, 1)) as s:
        await s.until_serving()
        liar = s.peers["s1p1"]
        lie(liar, LIES["zero"])
        honest, _ = liar.core.transport.handlers["kept"]

        async def others(request: Request) -> Answer:
            is_made = unpack(request.header, AskKept).made
            return Answer(pack(KeptTensors(forth=(), back=()))) if is_made else await honest(request)

        liar.core.transport.serve("kept", others)
        s.add_trainer(TRAINER, steps=1)
        await s.until_version(1)
        lost = [event for event in s.seen(PeerLost) if event.peer == "s1p1"]
        assert lost and "its answer was computed again, and is another" in lost[0].why
        assert not accused(s)


Call = Callable[[Any, Any, Any, bytes], Awaitable[tuple[str, Any, list[Encoded]]]]
"""How a peer has a microbatch done by the next stage: who did, what it said, and the gradients."""
MakeUp = Callable[[StagePeer, Call, Any, Any, Any, bytes], Awaitable[tuple[str, Any, list[Encoded]]]]


async def unsigned(
    liar: StagePeer, call: Call, step: Any, work: Any, fwd: Any, sent: bytes
) -> tuple[str, Any, list[Encoded]]:
    """Of other gradients than the next stage signed."""
    peer, done, grads = await call(step, work, fwd, sent)
    grads, hop = changed(grads, LIES["sign flip"]), done.hops[0]
    receipt = replaced(hop.receipt, input_grads=digest(grads))
    return peer, replaced(done, hops=(replaced(hop, receipt=receipt),)), grads


async def signed_by_nobody(
    liar: StagePeer, call: Call, step: Any, work: Any, fwd: Any, sent: bytes
) -> tuple[str, Any, list[Encoded]]:
    """The same, signed by a name that is announced nowhere."""
    peer, done, grads = await unsigned(liar, call, step, work, fwd, sent)
    nobody, hop = SimSigner("nobody"), done.hops[0]
    said = hop.receipt.statement(liar.stage + 1, fwd.mb, done.loss)
    hop = replaced(hop, peer=nobody.peer_id, receipt=give_receipt(nobody, liar.core.run.id, said))
    return peer, replaced(done, hops=(hop,)), grads


async def of_other_outputs(
    liar: StagePeer, call: Call, step: Any, work: Any, fwd: Any, sent: bytes
) -> tuple[str, Any, list[Encoded]]:
    """Of the gradients that the next stage answered truly, to something else."""
    other = copy.copy(fwd)
    other.outputs = changed(fwd.outputs, LIES["times 100"])
    named = digest(other.outputs)
    return await call(step, replaced(work, fed=replaced(work.fed, outputs=named)), other, named)


def answer_of_other_gradients(liar: StagePeer, make_up: MakeUp) -> None:
    """Have a peer answer what follows truly from gradients that were not answered to it."""
    server: Any = liar.microbatches
    call = server._call_next
    server._call_next = lambda *args: make_up(liar, call, *args[:4])


def found_false(s: Swarm) -> list[str]:
    """Whose answers callers left alone for a while, as judges had computed them again; each time."""
    return [event.peer for event in s.seen(PeerLost) if "and is another" in event.why]


@pytest.mark.parametrize("make_up", [unsigned, signed_by_nobody, of_other_outputs])
async def test_who_answers_of_gradients_that_it_never_got_is_left_alone_by_its_callers(
    make_up: MakeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it answers follows from those that it shows: computed again, it is right."""
    audit(monkeypatch, share=1.0)
    run = audited_run(steps=4)
    async with swarm(run, replicas=(1, 3, 1)) as s:
        await s.until_serving()
        answer_of_other_gradients(s.peers["s1p1"], make_up)
        s.add_trainer(TRAINER)
        await s.until_finished(limit_s=200.0)
        assert set(found_false(s)) == {"s1p1"} and not accused(s)
        callers = [peer.core.backoff for peer in s.peers.values() if peer.stage == 0]
        assert any(backoff.rests("s1p1", now=now_s()) for backoff in callers), "twice, and it is for a minute"


async def test_of_two_replicas_one_has_the_other_left_alone_for_no_more_than_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    audit(monkeypatch, share=1.0)
    async with swarm(audited_run(steps=3), replicas=2) as s:
        await s.until_serving()

        async def says_that_none_fits(request: Request) -> Answer:
            return Answer(pack(Audited(fits=False)))

        s.network.transports["s1p1"].serve("audit", says_that_none_fits)
        s.add_trainer(TRAINER)
        await s.until_finished(limit_s=200.0)
        assert found_false(s).count("s1p0") > 2
        assert not any(peer.core.backoff.rests("s1p0", now=now_s()) for peer in s.peers.values())


async def test_who_passed_on_gradients_of_a_peer_that_was_convicted_since_is_not_at_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To its judges that one is announced nowhere any more."""
    audit(monkeypatch, share=1.0)
    async with swarm(audited_run(steps=2), replicas=3) as s:
        await s.until_serving()
        for name in ("s1p0", "s1p2"):
            s.peers[name].convictions.convicted.add("s2p1")
        s.add_trainer(TRAINER)
        await s.until_finished(limit_s=200.0)
        assert s.peers["s2p1"].microbatches.answered
        assert not found_false(s)


async def test_who_takes_a_microbatch_out_of_its_sum_shows_still_what_it_answered() -> None:
    """Honest peers that had done so were said to have answered falsely."""
    async with swarm(audited_run(steps=1), replicas=1) as s:
        await s.until_serving()
        s.add_trainer(TRAINER)
        peer = s.peers["s1p0"]
        step, server = peer.core.steps[0], cast(Any, peer.microbatches)
        await s.until(lambda: bool(step.kept))
        m, kept = next(iter(step.kept.items()))
        await peer.core.retract(step, 1 << m)
        assert m not in step.kept and step.shown(m, kept.inputs_digest) is kept
        await s.until(lambda: m in step.kept)
        assert step.kept[m] is not kept and step.sent_on[m, kept.inputs_digest] is kept
        other = replaced_input(kept)
        not_counted: Any = SimpleNamespace(mb=Microbatch(0, m), terms_wanted=False, arrived=(), terms={})
        server._count(step, not_counted, other)
        assert step.shown(m, other.inputs_digest) is other


def replaced_input(kept: KeptMicrobatch) -> KeptMicrobatch:
    """The same of other inputs."""
    hop = kept.answer.hops[0]
    receipt = replaced(hop.receipt, inputs=bytes(32))  # type: ignore[type-var]
    return replace(kept, answer=replaced(kept.answer, hops=(replaced(hop, receipt=receipt),)))


async def test_its_stage_says_that_a_convicted_peer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the stage before asks it again for what its stage lacks: the run stood still."""
    audit(monkeypatch, share=1.0)
    async with swarm(audited_run(), replicas=3) as s:
        await s.until_serving()
        lie(s.peers["s1p1"], LIES["zero"])
        s.add_trainer(TRAINER)
        await s.until(lambda: all("s1p1" in s.peers[p].convictions.convicted for p in ("s1p0", "s1p2")))
        asked = await s.add_stranger().send("s1p0", "locate", Locate(run=s.run.id, t=0, m=0))
        assert unpack(asked.header, Located).left_out == ("s1p1",)


async def test_an_answer_whose_loss_is_far_from_the_usual_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the audits by chance, in one of which it would be found sooner or later."""
    audit(monkeypatch, share=0.0)
    s, found_after = await play(audited_run(steps=8, microbatches=16), 0, LIES["sign flip"], others=3)
    assert accused(s) == {"s0p1"} and 0 < found_after < 20


async def test_of_one_stage_such_an_answer_is_seen_by_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several also by the stage behind."""
    audit(monkeypatch, share=0.0)
    async with swarm(audited_run(stages=1), replicas=3) as s:
        await s.until_serving()
        boast(s.peers["s0p1"])
        s.add_trainer(TRAINER)
        others = [peer for name, peer in s.peers.items() if name != "s0p1"]
        await s.until(lambda: all("s0p1" in p.convictions.convicted for p in others), limit_s=60.0)


async def test_an_answer_whose_gradient_is_far_shorter_is_computed_again() -> None:
    """Its loss is true, and callers have to know first how long gradients are. (Longer: `test_screen.py`.)"""
    answered = count()

    def later(values: np.ndarray) -> np.ndarray:
        return values * 0.0 if next(answered) >= 24 else values

    s, found_after = await play(audited_run(steps=8, microbatches=16), 2, later)
    assert accused(s) == {"s2p1"} and 0 < found_after < 34


async def test_a_loss_is_computed_again_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    audit(monkeypatch, share=1.0)
    run = audited_run()
    async with swarm(run, replicas=3) as s:
        await s.until_serving()
        boast(s.peers["s2p1"])
        s.add_trainer(TRAINER)
        others = [peer for name, peer in s.peers.items() if name[:2] == "s2" and name != "s2p1"]
        await s.until(lambda: all("s2p1" in p.convictions.convicted for p in others), limit_s=60.0)


@pytest.mark.slow
async def test_of_a_stage_that_was_there_from_the_start_all_have_voice_at_once() -> None:
    """Some had it 20 steps before the others, who had missed a step: with one of those beside it, a liar made
    the run stand still.
    """
    async with swarm(audited_run(stages=2, steps=RENEW_EVERY + 1, microbatches=6), replicas=3) as s:
        await s.until_serving()
        s.add_trainer(TRAINER)
        await s.until_finished()
        assert all(s.network.records[name].voucher for name in s.peers)


async def test_where_no_third_has_voice_the_founder_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    audit(monkeypatch, share=1.0)
    founder = sybils.TRAINER[:-1] + "F"
    run = replace(audited_run(), admission=AdmissionSpec(trainers=(sybils.TRAINER,), founders=(founder,)))
    async with swarm(run, replicas=1) as s:
        s.add_peer(founder, 1)
        give_voice(s, "s0p0", "s1p0", "s2p0", steps={"s1p0": 100})
        await s.until_serving()
        lie(s.peers["s1p0"], LIES["zero"])

        async def give_nothing(request: Request) -> Answer:
            raise Refused("its neighbours cannot judge by weights that it does not give")

        s.network.transports["s1p0"].serve("state", give_nothing)
        s.add_trainer(sybils.TRAINER)
        honest = [peer for name, peer in s.peers.items() if name != "s1p0"]
        await s.until(lambda: all(peer.core.version >= run.steps for peer in honest), limit_s=100.0)
        assert all(peer.convictions.convicted == {"s1p0"} for peer in honest)


async def test_a_trainer_vouches_for_nobody_that_a_stage_has_convicted() -> None:
    """It is shown no evidence, and asks. One replica of three that says so convicts nobody."""
    async with swarm(audited_run(stages=2, steps=RENEW_EVERY + 1, microbatches=6), replicas=3) as s:
        await s.until_serving()
        trainer = s.add_trainer(TRAINER)
        await s.until_version(RENEW_EVERY - 2)
        for name in ("s1p0", "s1p2"):
            s.peers[name].convictions.convicted.add("s1p1")
        s.peers["s0p0"].convictions.convicted.update(("s0p1", "s1p1"))
        s.peers["s1p0"].convictions.convicted.add("s0p1")
        honest = [peer for name, peer in s.peers.items() if name not in ("s0p1", "s1p1")]
        await s.until(lambda: all(p.core.version >= RENEW_EVERY + 1 for p in honest), limit_s=60.0)
        assert [n for n in s.peers if not s.network.records[n].voucher] == ["s1p1"]
        assert trainer.verdicts.convicted == {"s1p1"}


class Counting:
    """Samples in which each token follows from the one before."""

    def __init__(self, run: Run) -> None:
        self._shape = run.data.sequence_length + 1

    def batch(self, offsets: list[int]) -> np.ndarray:
        return np.stack([(np.arange(self._shape) + at) % 7 for at in offsets]).astype(np.uint8)


async def test_a_peer_whose_gradients_have_another_sign_is_found_by_what_follows_from_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the last stage: its loss and its sum are true, and its gradients as long as others'. Callers have to
    know first how alike honest ones are.
    """
    audit(monkeypatch, share=0.0)
    run = decoder_run(steps=16)
    async with swarm(admitting(run, TRAINER), replicas=(1, 1, 3), batches=Counting(run)) as s:
        await s.until_serving()
        s.add_trainer(TRAINER)
        await s.until_version(6)
        lie(s.peers["s2p1"], LIES["sign flip"])
        answered = s.peers["s2p1"].microbatches.answered
        await s.until(lambda: accused(s) or s.finished, limit_s=100.0)
        assert accused(s) == {"s2p1"}
        assert s.peers["s2p1"].microbatches.answered < answered + 15, "else its sum is audited, after 20"


@pytest.mark.parametrize("hears", [True, False], ids=["when-it-is-prepared", "never"])
async def test_one_that_hears_late_who_lied_holds_no_step_up_for_long(hears: bool) -> None:
    """It gave again and again what the liar had answered, which the stage before it did not count."""
    run, others = audited_run(), ("s0p0", "s2p0", "s2p2")
    async with swarm(run, replicas=(1, 1, 3)) as s:
        await s.until_serving()
        late = s.peers["s1p0"]
        for name in others:
            s.peers[name].convictions.leave_out("s2p1", "it lied")
        s.add_trainer(TRAINER)
        await s.until(lambda: 0 in late.core.steps and late.core.steps[0].prepared is not None)
        if hears:
            late.convictions.leave_out("s2p1", "it lied")
        all_but_it = [s.peers[name].core for name in ("s1p0", *others)]
        await s.until(lambda: all(core.finished for core in all_but_it), limit_s=30.0 if hears else 100.0)
        assert late.convictions.convicted == {"s2p1"}

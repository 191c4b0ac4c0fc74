"""`scripts/bench/recovery/random_lies.py`: a seed says the same lies each time, and they are told so."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from peers.ports import Answer
from peers.sim.dice import Dice
from peers.sim.faults import KINDS as FAULTS
from peers.sim.loop import run_virtual
from peers.sim.network import SimSigner
from scripts.bench.common.inventions import FORMS, INVENTIONS, Scene, invented
from scripts.bench.common.lies import ACTS, KINDS, RECORD, REFUSALS, TRUTH, Lie, altered, drawn, inventing
from scripts.bench.recovery.random_lies import Liar, draw
from swarm.errors import PeerSilent, SwarmError
from swarm.ids import Microbatch
from swarm.manifest import audit_run
from swarm.protocol.ledger import Bitmap
from swarm.protocol.messages import (
    Directive,
    ReplicaReport,
    RunStatus,
    StageSummary,
    StepDirective,
    StepLacking,
)
from swarm.protocol.proofs import check_signed_report
from swarm.protocol.rounds import (
    Commit,
    FetchResult,
    Plan,
    Prepared,
    Proof,
    StepReport,
    StepSummary,
    round_id,
)
from swarm.protocol.statements import is_signed
from swarm.protocol.sums import Contribution, PartProof, Reduced, ReducedProof
from swarm.records import PeerRecord, Voucher
from swarm.wire import messages as wire
from swarm.wire.chunks import pack_chunk
from swarm.wire.evidence import Audited, Convicted, Projecting, Reveal, Revealed, ShownChunk
from swarm.wire.receipts import Link, Receipt
from swarm.wire.trails import TookStep, TookSteps, pack_rows

LIE = TRUTH._replace(kind="locate", chance=1.0, share=1.0, lasts_s=math.inf, by_s=2.5, number=1)
Told = list[tuple[float, Any]]
"""Each question that reached the other one, and each answer that the liar gave it: when, and what it said."""


async def tell(lie: Lie) -> tuple[Told, int]:
    """A liar asks 0 and 1, and is asked 10 and 11: in truth it answers 100 and 101. And how often it lied."""
    told: Told = []
    now = asyncio.get_running_loop().time
    handlers: dict[str, Any] = {}

    async def call(peer: str, kind: str, header: bytes, body: Any, **limits: float) -> Answer:
        told.append((now(), msgspec.msgpack.decode(header)))
        return Answer(b"", [])

    async def handle(request: Any) -> Answer:
        return Answer(msgspec.msgpack.encode(90 + msgspec.msgpack.decode(request.header)), [])

    def serve(kind: str, handler: Any, **limits: int) -> None:
        handlers[kind] = handler

    swarm: Any = SimpleNamespace(told=0, say=lambda text: None, network=SimpleNamespace(transports=["other"]))
    swarm.loop, swarm.begun_s = SimpleNamespace(now_s=1.0), 0.0
    member: Any = SimpleNamespace(name="liar", transport=SimpleNamespace(call=call, serve=serve))
    member.directory = SimpleNamespace(announce=None)
    Liar(swarm, member, [lie])
    member.transport.serve("locate", handle)
    for number in (0, 1):
        request = SimpleNamespace(peer="other", header=msgspec.msgpack.encode(10 + number), body_sizes=())
        try:
            await member.transport.call("other", "locate", msgspec.msgpack.encode(number), deadline_s=9.0)
        except PeerSilent:
            told.append((now(), "silence"))
        try:
            answer = await asyncio.wait_for(handlers["locate"](request), 7.0)
            told.append((now(), msgspec.msgpack.decode(answer.header)))
        except SwarmError as error:
            told.append((now(), error.code))
        except asyncio.TimeoutError:
            told.append((now(), "no answer"))
    return told, swarm.told


ASKS: dict[str, Told] = {
    "drops": [(9.0, "silence"), (9.0, 100), (18.0, "silence"), (18.0, 101)],
    "delays": [(2.5, 0), (2.5, 100), (5.0, 1), (5.0, 101)],
    "doubles": [(0.0, 0), (0.0, 0), (0.0, 100), (0.0, 1), (0.0, 1), (0.0, 101)],
    "replays": [(0.0, 0), (0.0, 100), (0.0, 0), (0.0, 101)],
    "mixes up": [(0.0, 0), (0.0, 100), (0.0, 10), (0.0, 101)],
    "alters": [(0.0, 0), (0.0, 100), (0.0, 2), (0.0, 101)],
    "refuses": [(0.0, 0), (0.0, "silence"), (0.0, 100), (0.0, 1), (0.0, "silence"), (0.0, 101)],
}
ANSWERS: dict[str, Told] = {
    "drops": [(0.0, 0), (7.0, "no answer"), (7.0, 1), (14.0, "no answer")],
    "delays": [(0.0, 0), (2.5, 100), (2.5, 1), (5.0, 101)],
    "replays": [(0.0, 0), (0.0, 100), (0.0, 1), (0.0, 100)],
    "alters": [(0.0, 0), (0.0, 200), (0.0, 1), (0.0, 202)],
    "refuses": [(0.0, 0), (0.0, "stale"), (0.0, 1), (0.0, "stale")],
}


@pytest.mark.parametrize(("answers", "due"), [(False, ASKS), (True, ANSWERS)], ids=["asks", "answers"])
def test_a_lie_is_told_as_its_words_say(answers: bool, due: dict[str, Told]) -> None:
    for act, told in due.items():
        assert run_virtual(tell(LIE._replace(act=act, answers=answers))) == (told, 2), act
    assert ASKS.keys() == ACTS.keys() and ANSWERS.keys() == ACTS.keys() - {"doubles", "mixes up"}


def test_a_lie_that_is_not_due_or_about_something_else_is_not_told() -> None:
    for lie in (LIE._replace(since_s=1.5), LIE._replace(lasts_s=0.5), LIE._replace(kind="work"),
                LIE._replace(share=0.0), LIE._replace(chance=0.0)):  # fmt: skip
        assert run_virtual(tell(lie._replace(act="drops"))) == (
            [(0.0, 0), (0.0, 100), (0.0, 1), (0.0, 101)],
            0,
        )


def test_of_an_altered_message_one_field_is_another_one() -> None:
    true = {"run": "r", "peer": "a", "t": 3, "done": b"\0\x05", "ready": False, "steps": [1, 2], "s": 1.5}
    seen = set()
    for number in range(200):
        found = altered(true, Dice(number), ["a", "b"])
        (field,) = [name for name in true if found[name] != true[name]] or ["none"]
        seen.add(field)
        assert field == "none" or type(found[field]) is type(true[field])
    assert seen == {*true, "none"} - {"run"}


def test_a_seed_says_the_same_each_time_and_every_kind_of_run() -> None:
    said = [draw(seed) for seed in range(12)]
    assert [setting.words() for setting in said] == [draw(seed).words() for seed in range(12)]
    shapes = [(len(setting.lies), len(setting.faults)) for setting in said]
    assert shapes == 3 * [(1, 0), (2, 0), (1, 1), (2, 1)]
    assert {fault.kind for setting in said for fault in setting.faults} <= FAULTS.keys()


def test_lies_at_random_are_of_every_kind() -> None:
    lies = [drawn(Dice(number)) for number in range(600)]
    assert {(lie.kind, lie.answers) for lie in lies} >= {(kind, False) for kind in KINDS}
    assert {lie.kind for lie in lies if lie.answers} == KINDS.keys() - {RECORD}
    assert {lie.act for lie in lies} == ACTS.keys()
    assert LIE._replace(act="delays", answers=True, chance=0.5).words() == (
        "delays answers to locate by 2.5 s, 50% of them, from 0.00 s on"
    )
    invented_lies = [inventing(Dice(number), FORMS) for number in range(900)]
    assert {(lie.kind, lie.answers) for lie in invented_lies} == FORMS.keys()
    assert {refuse().code for refuse in REFUSALS} == {"refused", "stale", "busy", "leaving", "not-ready"}


ROUND = "0" * 32


def scene_of() -> tuple[Scene, list[Any]]:
    """A liar, and messages that it sends."""
    signer = SimSigner("liar")
    run = audit_run(stages=2, steps=9, microbatches_per_step=4)
    scene = Scene(
        run=run, stage=0, signer=signer, names=["liar", "other"], mates=["liar", "other"], to="other"
    )
    scene.round, scene.asked, scene.leased = ROUND, Microbatch(3, 0), bytes(16)
    held = Prepared(ROUND, 2.0, "a" * 32)
    words = Proof("other", held), Proof("liar", held)
    commit = Commit(2, 4.0, (words, words))
    plan = Plan(ROUND, 1, ("liar", "other"), (Bitmap(3), Bitmap(12)), (4, 4))
    fetch = FetchResult(ROUND, ("liar",), False, 2.0, (Proof("other", held),))
    step = StepReport(t=3, done=Bitmap(3), in_progress=Bitmap(4), frozen_for=ROUND, prepared=held)
    lacking = StepLacking(t=3, by_stage=(Bitmap(1), Bitmap(0)))
    status = RunStatus(run=run.id, version=3, held_by_all=2, commits=(commit,), lacking=(lacking,))
    of = {"run": run.id, "stage": 0, "version": 3}
    receipt = Receipt(bytes(32), bytes(32), bytes(32), bytes(32), bytes(64))
    meta, body = pack_chunk(torch.arange(4.0), name="numbers")
    contributions = tuple(Contribution(name, bytes(32), bytes(32), bytes(64)) for name in plan.members)
    summed = ReducedProof(contributions, bytes(32), bytes(64))
    said = Projecting(contributions=(b"1" * 32,), nonces=(bytes(16),), sums=(b"2" * 8,), signature=b"")
    voucher = Voucher("trainer", 20, 3, b"")
    work = wire.Work(
        run=run.id, t=3, m=0, version=3, tensors=(meta,), fed=receipt, through=(Link("other", receipt),)
    )
    hop = wire.Hop(stage=0, peer="liar", own_s=1.0, compute_s=0.5, receipt=receipt)
    part = wire.Part(run=run.id, t=3, round=ROUND, start=0, numel=4, tensors=(meta,))
    form = wire.TensorForm(name="w", numel=4, dtype="float32")
    took = TookSteps(0, 2, "kind", pack_rows([TookStep("a" * 32, 1.0, "b" * 32)]))
    record = PeerRecord(
        peer="liar",
        run=run.id,
        stage=0,
        state="serving",
        version=3,
        voucher=voucher,
        max_inflight=2,
        addresses=("a",),
    )
    there: list[tuple[str, bool, Any, Sequence[bytes]]] = [
        ("report", False, ReplicaReport(**of, steps=(step,), commits=(commit,)), [bytes(16)]),
        ("directive", False, Directive(
            **of, coordinator="liar", commits=(commit,), run_status=status, left_out=("else",),
            steps=(StepDirective(t=3, plan=plan, fetch=fetch),),
        ), []),
        ("summary", False, StageSummary(
            **of, members=2, commits=(commit,), steps=(StepSummary(t=3, ready=True, proofs=commit.proofs[0]),)
        ), []),
        ("summary", False, StageSummary(**of, members=2, steps=(StepSummary(t=3, unclaimed=Bitmap(1)),)), []),
        ("run", False, status, []),
        ("watch", True, wire.Watched(revision=1, version=3, status=status), []),
        ("work", False, work, []),
        ("work", True, wire.WorkDone(loss=1.0, tensors=(meta,), hops=(hop, hop)), []),
        ("locate", True, wire.Located(has=True), []),
        ("part", False, replace(part, proof=PartProof(bytes(32), bytes(32), bytes(64))), body),
        ("part", True, wire.PartDone(crc=0, tensors=(meta,), proof=summed), body),
        ("reveal", False, Reveal(run=run.id, round=ROUND, nonces=(b"1" * 16, b"2" * 16)), []),
        ("reveal", True, Revealed(nonces=(b"1" * 16, b"2" * 16), said={"liar": said}), []),
        ("show", True, ShownChunk(digests=bytes(32)), []), ("audit", True, Audited(fits=True), []),
        ("convicted", True, Convicted(yes=False), []),
        ("held", True, wire.Opened(
            lease="1", version=3, tensors=(form,), last_commit=commit, prepared=held
        ), [bytes(32)]),
        ("status", True, wire.PeerStatus(
            peer="liar", stage=0, state="serving", device="cpu", version=3, since=2.0, done=2, max_inflight=2
        ), []),
        ("trail", True, wire.Trail(steps=took, signature=b""), []),
        ("saved", True, wire.Saved(stages=(wire.SavedStage(stage=0, versions=(3,)),)), []),
        (RECORD, False, record, []),
    ]  # fmt: skip
    scene.rounds["1" * 32] = 3
    ticket = wire.Ticket(trainer="trainer", inputs=b"1", to="liar", signature=b"")
    others: list[Any] = [
        replace(there[0][2], steps=(replace(step, done=Bitmap(12)),)),
        replace(work, t=2, m=1, fed=replace(receipt, inputs=b"1"), ticket=ticket), plan,
        replace(held, digest="b" * 32), replace(record, voucher=replace(voucher, steps=10)),
        replace(plan, number=0), fetch,
        replace(fetch, round="1" * 32), replace(summed, chunks=b""), replace(said, nonces=(b"3" * 16,)),
        replace(receipt, inputs=b"2", outputs=b"3", output_grads=b"4", input_grads=b"5"),
    ]  # fmt: skip
    for old in (*(message for _, _, message, _ in there), *others):
        scene.notes(old)
    return scene, there


def test_each_invention_is_another_message_of_the_same_form() -> None:
    scene, there = scene_of()
    assert {(kind, answers) for kind, answers, _, _ in there} == FORMS.keys() - {
        ("report", True), ("summary", True), ("state", True)
    }  # fmt: skip
    told = set[tuple[type, str]]()
    for _, _, true, body in there:
        for words, invention in INVENTIONS[type(true)].items():
            for _ in range(4):
                made = invention(scene, true, [bytes(part) for part in body]) or true
                message, new = made if isinstance(made, tuple) else (made, [*map(bytes, body)])
                assert wire.unpack(wire.pack(message), type(true)) == message, (type(true), words)
                if (message, new) != (true, [*map(bytes, body)]):
                    told.add((type(true), words))
    assert {(form, words) for form, those in INVENTIONS.items() for words in those} - told == set()


def test_what_is_invented_is_signed_by_who_says_it() -> None:
    scene, there = scene_of()
    true = {(kind, answers): (message, list(body)) for kind, answers, message, body in there}
    report, body = true["report", False]
    for words in ("has the result of another", "one microbatch more", "its result has another norm"):
        made, losses = INVENTIONS[ReplicaReport][words](scene, report, [*body])
        check_signed_report(made, "liar", scene.signer)
        assert len(losses[0]) == 8 * made.steps[0].done.bit_count()
    reduced, _ = INVENTIONS[wire.PartDone]["another result"](scene, *true["part", True])
    said = Reduced(0, 3, ROUND, reduced.proof.contributions, reduced.proof.chunks)
    assert is_signed(scene.signer, "liar", scene.run.id, said, reduced.proof.signature)
    plan = INVENTIONS[Directive]["leaves one out of the plan"](scene, *true["directive", False]).steps[0].plan
    assert plan.ledgers == (Bitmap(15),) and plan.parts == (8,)
    of = (plan.number, plan.members, plan.ledgers, plan.parts)
    assert plan.round == round_id(scene.run.id, 0, 3, *of)


def test_who_has_nothing_to_invent_tells_the_truth() -> None:
    scene, _ = scene_of()
    true = wire.pack(StageSummary(run=scene.run.id, stage=0, version=3, members=1)), []
    said = [invented(scene, "summary", False, true, Dice(number)) for number in range(40)]
    assert ("", true) in said and any(words for words, _ in said)
    assert invented(scene, "close", False, true, Dice(1)) == ("", true)

"""Vouchers: named trainers count the work of peers, and peers carry what they were given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peers.ports import Answer, Request
from peers.sim.directory import LAG_S
from peers.sim.network import SimSigner
from peers.vouching.giver import VoucherGiver
from peers.vouching.own import OwnVoucher
from swarm.charter import callers_of
from swarm.errors import Leaving, Refused
from swarm.ids import Microbatch
from swarm.manifest import Run, audit_run
from swarm.protocol.voice import MIN_STEPS, Worked, voice_of, vouch
from swarm.records import PeerRecord, Voucher
from swarm.wire.evidence import Convicted
from swarm.wire.messages import Ack, GiveVoucher, Hop, Work, WorkDone, pack, unpack
from swarm.wire.receipts import Answered, give_receipt
from tests.peers.admitted import OTHER, TRAINER, admitting
from tests.peers.alone import Line, Records
from tests.peers.loops import Swarm, swarm
from tests.peers.sybils import add_liar

pytestmark = pytest.mark.virtual_time

RUN = admitting(audit_run(stages=2, steps=45, microbatches_per_step=4))
READER = SimSigner("reader")


def voucher(peer: str, steps: int = 30, t: int = 40, *, by: str = TRAINER, run: Run = RUN) -> Voucher:
    return vouch(SimSigner(by), run.id, Worked(peer, steps, t))


def given(one: Voucher, run: Run = RUN) -> GiveVoucher:
    return GiveVoucher(run=run.id, voucher=one)


def voice(s: Swarm, peer: str, version: int) -> int:
    return voice_of(peer, s.network.records[peer].voucher, s.run, READER, version=version)


# --- a run --------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_peers_that_answer_come_to_carry_vouchers() -> None:
    async with swarm(RUN) as s:
        s.add_trainer(TRAINER)
        await s.until_version(19)
        assert not any(record.voucher for record in s.network.records.values())
        await s.until_version(31)
        for peer in s.peers:
            carried = s.network.records[peer].voucher
            assert carried is not None and carried.trainer == TRAINER
            assert 10 <= carried.steps <= 20 and carried.t < 20
            assert voice(s, peer, 31) == carried.steps


@pytest.mark.slow
async def test_vouchers_that_all_see_at_other_times_have_nothing_computed_again() -> None:
    """Each turns to another coordinator for them, which has to hear of all ledgers."""
    async with swarm(RUN) as s:
        s.network.dht.lag_s = LAG_S
        await s.until_serving()
        await asyncio.sleep(LAG_S[1])
        trainer = s.add_trainer(TRAINER)
        await s.until_finished()
        assert voice(s, "s0p0", 45) >= 36
        assert (trainer.replayed, s.undone) == (0, 0)


async def test_without_named_trainers_nobody_vouches() -> None:
    async with swarm(audit_run(stages=2, steps=25, microbatches_per_step=2), replicas=1) as s:
        s.add_trainer("trainer")
        await s.until_finished()
        assert not any(end.transport.calls["voucher"] for end in s.network.peers.values())


@pytest.mark.slow
async def test_another_trainer_goes_on_where_the_first_one_died() -> None:
    async with swarm(RUN, replicas=1) as s:
        s.add_trainer(TRAINER)
        await s.until_version(23)
        s.kill(TRAINER)
        s.add_trainer(OTHER)
        await s.until_version(43)
        for peer in s.peers:
            carried = s.network.records[peer].voucher
            assert carried is not None and (carried.trainer, carried.t) == (OTHER, 39)
            assert carried.steps >= 36, "what it saw itself is not 20 steps"


# --- what a peer takes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("by", "one", "text"),
    [
        ("stranger", voucher("s0p0", by="stranger"), "does not name stranger as a trainer that vouches"),
        ("stranger", voucher("s0p0"), "does not name stranger as a trainer that vouches"),
        (TRAINER, voucher("s0p0", by=OTHER), f"does not name {TRAINER} as a trainer that vouches"),
        (TRAINER, voucher("s0p1"), "a voucher that gives this peer no voice"),
        (TRAINER, voucher("s0p0", steps=MIN_STEPS - 1), "a voucher that gives this peer no voice"),
        (TRAINER, msgspec.structs.replace(voucher("s0p0"), t=99), "a voucher that gives this peer no voice"),
    ],
    ids=["stranger", "passed-on", "another-trainer", "another-peer", "too-short", "forged"],
)
async def test_a_voucher_that_is_not_for_this_peer_is_refused(by: str, one: Voucher, text: str) -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        with pytest.raises(Refused, match=text):
            await s.add_stranger(by).send("s0p0", "voucher", given(one))
        assert s.network.records["s0p0"].voucher is None


async def test_a_late_or_lower_voucher_replaces_no_better_one() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        trainers = {by: s.add_stranger(by) for by in (TRAINER, OTHER)}
        best = voucher("s0p0", 60, 80, by=OTHER)
        for one in (
            voucher("s0p0", 40, 60), best, voucher("s0p0", 40, 60), voucher("s0p0", 59, 90),
            voucher("s0p0", 60, 79),
        ):  # fmt: skip
            await trainers[one.trainer].ask("s0p0", "voucher", given(one), Ack)
        assert s.network.records["s0p0"].voucher == best, "it is announced at once"
        later = voucher("s0p0", 60, 81)
        await trainers[TRAINER].ask("s0p0", "voucher", given(later), Ack)
        assert s.network.records["s0p0"].voucher == later


async def test_a_voucher_that_has_ended_is_replaced_by_any() -> None:
    own, line = OwnVoucher(), Line("me")
    version = 40

    async def told() -> None:
        return None

    own.serve(RUN, line, lambda: version, told)  # type: ignore[arg-type]

    async def give(one: Voucher) -> None:
        await line.handlers["voucher"](_Asked(TRAINER, pack(given(one))))

    await give(voucher("me", 100, 40))
    version = 250
    await give(voucher("me", 20, 240))
    assert own.value == voucher("me", 20, 240)


class _Asked:
    body_sizes = ()

    def __init__(self, peer: str, header: bytes) -> None:
        self.peer, self.header = peer, header


def test_only_trainers_call_for_it() -> None:
    assert callers_of("voucher", 0) == callers_of("voucher", 3) == ("trainer",)


# --- over moves, pauses and restarts ------------------------------------------------------------------------


async def test_a_peer_that_pauses_keeps_its_voucher() -> None:
    async with swarm(RUN, replicas=1) as s:
        s.add_peer("s0p1", 0, voucher=OwnVoucher())
        await s.until_serving()
        trainer, owner = s.add_stranger(TRAINER), s.owners["s0p1"]
        await trainer.ask("s0p1", "voucher", given(voucher("s0p1")), Ack)
        owner.pause("by hand", "swarm pause")
        await s.until(lambda: owner.doing == "paused")
        assert voice(s, "s0p1", 41) == 30
        with pytest.raises(Leaving, match="paused"):
            await trainer.send("s0p1", "voucher", given(voucher("s0p1", 40, 50)))
        owner.resume()
        await s.until(lambda: s.network.records["s0p1"].state == "serving")
        assert voice(s, "s0p1", 41) == 30


async def test_a_peer_that_moves_keeps_its_voucher() -> None:
    async with swarm(RUN, replicas=1) as s:
        mover = s.add_peer("m", 0, voucher=OwnVoucher())
        await s.until_serving()
        await s.add_stranger(TRAINER).ask("m", "voucher", given(voucher("m")), Ack)
        mover._move(1)  # type: ignore
        await s.until(lambda: (r := s.network.records["m"]).stage == 1 and r.state == "serving")
        assert voice(s, "m", 41) == 30


def recalled(path: Path, *, run: Run = RUN, peer: str = "s0p0") -> Voucher | None:
    own = OwnVoucher(path)
    own.recall(run, Line(peer))  # type: ignore[arg-type]
    return own.value


async def test_a_peer_that_starts_again_with_its_identity_has_its_voucher(tmp_path: Path) -> None:
    path = tmp_path / "peer.key.voucher"
    async with swarm(RUN, replicas=0) as s:
        s.add_peer("s0p0", 0, voucher=OwnVoucher(path))
        s.add_peer("s1p0", 1)
        await s.until_serving()
        trainer = s.add_stranger(TRAINER)
        await trainer.ask("s0p0", "voucher", given(voucher("s0p0")), Ack)
        s.kill("s0p0")
        s.add_peer("s0p0", 0, voucher=OwnVoucher(path))
        await s.until(lambda: "s0p0" in s.network.records)
        assert voice(s, "s0p0", 41) == 30
    assert recalled(path) == voucher("s0p0")
    assert recalled(path, peer="another") is None
    assert recalled(path, run=admitting(audit_run(stages=2), TRAINER)) is None
    assert recalled(tmp_path / "none") is None
    for junk in (b"", b"\xc1" * 9000, pack(given(msgspec.structs.replace(voucher("s0p0"), steps=99)))):
        path.write_bytes(junk)
        assert recalled(path) is None


async def test_a_disk_that_is_full_costs_no_voucher_of_this_process(tmp_path: Path) -> None:
    async with swarm(RUN, replicas=0) as s:
        s.add_peer("s0p0", 0, voucher=OwnVoucher(tmp_path / "no folder" / "peer.key.voucher"))
        s.add_peer("s1p0", 1)
        await s.until_serving()
        await s.add_stranger(TRAINER).ask("s0p0", "voucher", given(voucher("s0p0")), Ack)
        assert voice(s, "s0p0", 41) == 30


# --- what a trainer counts ----------------------------------------------------------------------------------


def answer(t: int, m: int, **lies: Any) -> WorkDone:
    """Of two stages, whose receipts are a chain from b"in", but for the lies."""
    hops = []
    for stage, peer in enumerate(("a", "b")):
        came = lies.get("came", b"x") if stage else b"in"
        said = Answered(stage, t, m, came, b"x", b"g", b"g", lies.get("signed_loss", 1.0) if stage else 1.0)
        receipt = give_receipt(SimSigner(lies.get("signer", peer) if stage else peer), RUN.id, said)
        hop = Hop(stage=stage, peer=peer, own_s=0.1, compute_s=0.1, receipt=receipt)
        hops.append(msgspec.structs.replace(hop, stage=9) if stage and "stage" in lies else hop)
    return WorkDone(loss=1.0, hops=tuple(hops))


async def nothing() -> None:
    """No stage is asked."""


async def vouched(
    *, by: str = TRAINER, inputs: bytes = b"in", added: Sequence[int | None] = (), **lies: Any
) -> set[str]:
    """The peers that get vouchers after 20 steps of four answers. `added`: what others of stage 0 say when
    each contributed last.
    """
    line, records = Line(by), Records()
    others = {f"c{number}": last for number, last in enumerate(added)}
    records.known = [
        PeerRecord(peer=peer, run=RUN.id, stage=int(peer == "b"), state="serving", version=0)
        for peer in ("a", "b", *others)
    ]
    line.answers["convicted"] = lambda peer, _: Convicted(yes=False, added=others.get(peer, 19))
    got: dict[str, Voucher] = {}

    def take(peer: str, header: bytes) -> Ack:
        got[peer] = unpack(header, GiveVoucher).voucher
        return Ack()

    line.answers["voucher"] = take
    giver = VoucherGiver(RUN, line, records, nothing)  # type: ignore[arg-type]
    for t in range(20):
        for m in range(4):
            giver.answered(Microbatch(t, m), inputs, answer(t, m, **lies))
        giver.stepped(t, t + 1)
    await asyncio.sleep(1.0)
    await giver.close()
    assert all(voice_of(peer, one, RUN, READER, version=20) == 20 for peer, one in got.items())
    return set(got)


async def test_what_receipts_show_is_vouched_for() -> None:
    assert await vouched() == {"a", "b"}


@pytest.mark.parametrize(
    ("added", "left"),
    [
        ((9, 19), {"a", "b"}), ((8,), {"b"}), ((8, 9), {"a", "b"}), ((8, 8, 19), {"b"}),
        ((8, 19, 9), {"a", "b"}), ((None, None, 8), {"b"}), ((None,), {"a", "b"}),
    ],
)  # fmt: skip
async def test_who_adds_nothing_to_the_sums_of_its_stage_gets_none(
    added: Sequence[int | None], left: set[str]
) -> None:
    """So say most of some others of that stage, which add them up; b is of another one."""
    assert await vouched(added=added) == left


@pytest.mark.parametrize(
    ("lie", "left"),
    [
        ({"signer": "c"}, {"a"}), ({"came": b"other"}, {"a"}), ({"stage": 9}, {"a"}),
        ({"signed_loss": 2.0}, {"a"}),
    ],
)  # fmt: skip
async def test_a_receipt_that_does_not_hold_counts_nothing(lie: dict[str, Any], left: set[str]) -> None:
    assert await vouched(**lie) == left


async def test_the_receipt_of_stage_0_is_not_verified_again() -> None:
    line, verified = Line(TRAINER), list[str]()

    def verify(peer: str, data: bytes, signature: bytes) -> bool:
        verified.append(peer)
        return READER.verify(peer, data, signature)

    line.signer.verify = verify  # type: ignore[method-assign]
    giver = VoucherGiver(RUN, line, Records(), nothing)  # type: ignore[arg-type]
    giver.answered(Microbatch(0, 0), b"in", answer(0, 0))
    assert verified == ["b"]


async def test_an_answer_to_something_else_than_was_sent_counts_nothing_for_stage_0() -> None:
    assert await vouched(inputs=b"what was sent") == {"b"}


async def test_a_trainer_that_is_not_named_vouches_for_nobody() -> None:
    assert await vouched(by="stranger") == set()


# --- whose work it is ---------------------------------------------------------------------------------------


def show_as_work_of(s: Swarm, liar: str, accomplices: Sequence[str]) -> None:
    """What the next stage answered to a peer it shows as answers of accomplices, in turn, who sign that."""
    server = s.peers[liar].microbatches

    async def serve(request: Request) -> Answer:
        work = unpack(request.header, Work)
        answer = await server._serve_work(request)  # type: ignore
        done = unpack(answer.header, WorkDone)
        own, true = done.hops
        assert true.receipt is not None
        peer = accomplices[work.m % len(accomplices)]
        said = true.receipt.statement(1, Microbatch(work.t, work.m), done.loss)
        false = msgspec.structs.replace(
            true, peer=peer, receipt=give_receipt(SimSigner(peer), s.run.id, said)
        )
        return Answer(pack(msgspec.structs.replace(done, hops=(own, false))), answer.body)

    s.network.peers[liar].transport.serve("work", serve, max_body_bytes=1 << 20)


async def test_who_signs_the_work_of_another_gets_no_voucher_for_it() -> None:
    """A peer of stage 0 has accomplices sign what honest peers of stage 1 computed: each would have voice."""
    run, given = admitting(audit_run(stages=2, steps=32, microbatches_per_step=8)), list[Voucher]()

    async def take(request: Request) -> Answer:
        given.append(unpack(request.header, GiveVoucher).voucher)
        return Answer(pack(Ack()))

    async with swarm(run) as s:
        await s.until_serving()
        for name in ("idle0", "idle1"):
            await add_liar(s, name, 1, 0)
            s.network.peers[name].transport.serve("voucher", take)
        show_as_work_of(s, "s0p1", ["idle0", "idle1"])
        s.add_trainer(TRAINER)
        await s.until_version(31)
        assert all(voice(s, name, 31) for name in s.peers)
        assert not given

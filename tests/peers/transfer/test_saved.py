"""Who can give out which checkpoint: asked of few, believed within bounds."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from peers.ports import Answer, Request
from peers.sim.network import SimSigner
from peers.transfer.catalog import (
    AGAIN_S,
    MAX_ASKED,
    MAX_KEEPERS,
    MAX_SIGNED,
    ask_saved,
    check_saved,
    chosen,
    signed_states,
)
from swarm.errors import BadAnswer, PeerFault, Refused
from swarm.manifest import Run, audit_run
from swarm.protocol.statements import sign
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import AskSaved, Saved, SavedStage, pack, unpack
from swarm.wire.trails import Signed, TookStep, TookSteps, Word, pack_rows, weights_of
from tests.peers.network import CalmNetwork
from tests.peers.sybils import admitting, voucher

pytestmark = pytest.mark.virtual_time

RUN = audit_run(stages=2, steps=40)


def serving(peer: str, stage: int, version: int = 0, **fields: object) -> PeerRecord:
    record = PeerRecord(peer=peer, run=RUN.id, stage=stage, state="serving", version=version)
    return msgspec.structs.replace(record, **fields)


def keeper(peer: str) -> PeerRecord:
    return serving(peer, NO_STAGE, state="keeping")


def offer(**versions: tuple[int, ...]) -> Saved:
    """`offer(s0=(10, 20))`"""
    return Saved(stages=tuple(SavedStage(stage=int(k[1:]), versions=v) for k, v in versions.items()))


class Net(CalmNetwork):
    """`give(record, saved)`: somebody who answers so."""

    def __init__(self, run: Run = RUN) -> None:
        super().__init__(silence_s=0.05)
        self.run = run
        self.me = self.join("me")
        self.list: list[PeerRecord] = []

    def give(self, record: PeerRecord, answer: Saved | bytes | None) -> None:
        self.list.append(record)
        transport = self.join(record.peer).transport

        async def handle(request: Request) -> Answer:
            assert unpack(request.header, AskSaved).run == self.run.id
            return Answer(answer if isinstance(answer, bytes) else pack(answer))

        if answer is not None:
            transport.serve("saved", handle)


async def test_versions_are_told_by_stage_with_who_has_them_keepers_first() -> None:
    net = Net()
    net.give(serving("a", 0), offer(s0=(10, 20)))
    net.give(serving("b", 1), offer(s1=(10,)))
    net.give(serving("c", 1, state="joining"), offer(s1=(30,)))
    net.give(keeper("k"), offer(s0=(10,), s1=(10, 20)))
    found = (await ask_saved(RUN, net.me.transport, net.list)).sources
    assert found == {0: {10: ["k", "a"], 20: ["a"]}, 1: {10: ["k", "b"], 20: ["k"], 30: ["c"]}}


async def test_who_is_dead_cut_off_or_has_nothing_is_left_out_and_the_reason_is_told() -> None:
    net = Net()
    net.give(serving("old", 0), None)
    net.give(serving("dead", 0), offer(s0=(10,)))
    net.give(serving("hung", 1), offer(s1=(10,)))
    net.give(serving("liar", 1), b"\xc1")
    net.kill("dead")
    net.stop("hung")
    faults: list[PeerFault] = []
    assert (await ask_saved(RUN, net.me.transport, net.list, on_fault=faults.append)).sources == {
        0: {},
        1: {},
    }
    assert sorted(fault.peer for fault in faults) == ["dead", "hung", "liar"]
    await net.close()


@pytest.mark.parametrize(
    ("record", "said", "why"),
    [
        (serving("p", 0), offer(s1=(10,)), "serves stage 0 and offers checkpoints of 1"),
        (keeper("p"), offer(s2=(10,)), "offers checkpoints of stage 2, twice or of 2 stages"),
        (
            keeper("p"),
            Saved(stages=(SavedStage(stage=0, versions=()),) * 2),
            "offers checkpoints of stage 0, twice or of 2 stages",
        ),
        (serving("p", 0), offer(s0=(41,)), "offers impossible versions of stage 0: [41] of 40"),
        (serving("p", 0), offer(s0=(-1,)), "offers impossible versions of stage 0: [-1] of 40"),
        (serving("p", 0), offer(s0=(20, 10)), "offers impossible versions of stage 0: [20, 10] of 40"),
        (serving("p", 0), offer(s0=(7, 7)), "offers impossible versions of stage 0: [7, 7] of 40"),
        (serving("p", 0), offer(s0=tuple(range(65))), "offers 65 checkpoints of stage 0"),
    ],
)
async def test_what_cannot_be_is_refused_with_its_reason(record: PeerRecord, said: Saved, why: str) -> None:
    with pytest.raises(BadAnswer) as caught:
        check_saved(RUN, record, said)
    assert caught.value.text == f"peer p: {why}"
    net = Net()
    net.give(record, said)
    faults: list[PeerFault] = []
    assert (await ask_saved(RUN, net.me.transport, net.list, on_fault=faults.append)).sources == {
        0: {},
        1: {},
    }
    assert [fault.text for fault in faults] == [f"peer p: {why}"]


ADMITTING = admitting(replace(RUN, checkpoint_every=10))


def word(
    peer: str,
    digest: str = "aa",
    *,
    version: int = 10,
    steps: int = 30,
    by: str = "",
    of: str = "",
    rows: int = 1,
) -> Word:
    """That `peer` took the step to a version; `by`: who signed it, `of`: whose voucher it shows."""
    row = TookStep("", 1.5, digest * 16 if digest else "")
    took = TookSteps(0, version - rows, "cpu", pack_rows([row] * rows))
    signature = sign(SimSigner(by or peer), ADMITTING.id, took)
    return took, Signed(peer, signature, voucher(ADMITTING, of or peer, steps=steps))


def shown(*words: Word, versions: tuple[int, ...] = (10,)) -> Saved:
    return Saved(stages=(SavedStage(stage=0, versions=versions, signed=words),))


@pytest.mark.parametrize(
    "lie",
    [
        word("p", by="k"), word("p", of="k"), word("p", steps=9), word("p", ""), word("p", version=11),
        word("p", version=20), word("p", rows=2), (word("p")[0], Signed("p", b"")),
    ],
    ids=["signature", "voucher", "few steps", "no digest", "not whole", "not offered", "two steps", "none"],
)  # fmt: skip
async def test_a_keeper_that_shows_what_no_peer_with_voice_signed_is_not_believed(lie: Word) -> None:
    net = Net(ADMITTING)
    net.give(keeper("k"), shown(word("p"), lie, versions=(10, 11)))
    faults: list[PeerFault] = []
    found = await ask_saved(ADMITTING, net.me.transport, net.list, on_fault=faults.append)
    assert (found.sources[0], found.signed[0]) == ({}, {})
    assert len(faults) == 1 and "peer k: shows " in faults[0].text


async def test_more_words_than_a_keeper_has_room_for_are_not_believed() -> None:
    net = Net(ADMITTING)
    net.give(keeper("k"), shown(*[word("p")] * (MAX_SIGNED // ADMITTING.S + 1)))
    assert (await ask_saved(ADMITTING, net.me.transport, net.list)).sources == {0: {}, 1: {}}


async def test_no_signature_that_a_keeper_shows_is_checked_on_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One identity with voice signs as many words as it likes: thirty-two keepers show seconds of them."""
    net, beside, checked = Net(ADMITTING), False, 0
    for number in range(3):
        net.give(keeper(f"k{number}"), shown(*(word(f"p{number}{n}") for n in range(9))))
    verify = SimSigner.verify

    async def to_thread(job: Callable[..., object], *given: object) -> object:
        nonlocal beside
        beside = True
        try:
            return job(*given)
        finally:
            beside = False

    def verified(self: SimSigner, peer: str, data: bytes, signature: bytes) -> bool:
        nonlocal checked
        checked += 1
        assert beside
        return verify(self, peer, data, signature)

    monkeypatch.setattr("peers.transfer.catalog.asyncio.to_thread", to_thread)
    monkeypatch.setattr(SimSigner, "verify", verified)
    found = await ask_saved(ADMITTING, net.me.transport, net.list)
    assert len(found.signed[0][10]) == 27 and checked == 2 * 27


@pytest.mark.parametrize(
    ("words", "digest"),
    [
        ([], None),
        ([word("p")], "aa"),
        ([word("p"), word("q", "bb")], None),
        ([word("p"), word("p"), word("q", "bb", steps=99)], None),
        ([word("p"), word("q"), word("r", "bb", steps=99)], "aa"),
        ([word("p"), word("q"), word("r", "bb"), word("s", "bb")], None),
        ([word("p"), word("q"), word("r", "bb"), word("s", "bb", steps=31)], "bb"),
    ],
)
def test_what_two_signed_is_the_state_or_what_the_only_one_did(words: list[Word], digest: str | None) -> None:
    found = signed_states(ADMITTING, SimSigner("me"), words).get(10, [])
    assert {weights_of(one) for one in found} == ({digest * 16} if digest else set())
    assert len({by.peer for _, by in found}) == len(found)


@pytest.mark.parametrize("words", [[word("p")], [word("p"), word("q")]])
async def test_a_founders_keeper_says_what_a_state_is_and_those_with_voice_against_one_word(
    words: list[Word],
) -> None:
    founder = "12D3KooW" + "K" * 44
    for teller, known in ((keeper(founder), False), (serving("v", 0), len(words) > 1), (keeper("l"), True)):
        run = replace(ADMITTING, admission=replace(ADMITTING.admission, founders=(founder,)))
        net = Net(run)
        net.give(keeper("k"), shown(*(resigned(run, one) for one in words)))
        net.give(teller, shown())
        found = await ask_saved(run, net.me.transport, net.list, voice={"v": 30})
        assert (10 in found.signed[0]) == known
        assert sorted(found.sources[0][10]) == sorted(["k", teller.peer])


def resigned(run: Run, one: Word) -> Word:
    took, by = one
    signature = sign(SimSigner(by.peer), run.id, took)
    return took, Signed(by.peer, signature, voucher(run, by.peer))


def test_few_are_asked_and_the_furthest_first() -> None:
    records = [serving(f"p{i}", i % 2, version=i) for i in range(4 * MAX_ASKED)]
    records += [keeper(f"k{i:02}") for i in range(MAX_KEEPERS + 3)]
    records += [serving("gone", 0, 99, state="left"), serving("new", 1, 99, state="joining")]
    newest = records[4 * MAX_ASKED - 1].peer
    asked = [record.peer for record in chosen(RUN, records, newest)]
    furthest = range(4 * MAX_ASKED - 2, 2 * MAX_ASKED - 2, -2)
    keepers = set(asked[:MAX_KEEPERS])
    assert len(keepers) == MAX_KEEPERS and {peer[0] for peer in keepers} == {"k"}
    assert asked[MAX_KEEPERS:] == [
        *(f"p{i}" for i in furthest),
        *(f"p{i - 1}" for i in furthest),
    ]


def test_names_that_are_made_for_it_do_not_keep_a_keeper_from_being_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checksums of two names differ by the same bits whoever asks, and whenever: names can be made that are
    before another one nearly always.
    """
    honest, dice = zlib.crc32(b"honest 20000.0"), random.Random(1)
    near: dict[int, list[str]] = {}  # by the number of first bits that are those of the honest one
    while len(near) < 7 or min(map(len, near.values())) < MAX_KEEPERS:
        name = "".join(dice.choices("abcdefgh", k=6))
        alike = 32 - (zlib.crc32(f"{name} 20000.0".encode()) ^ honest).bit_length()
        if alike < 7 and len(near.setdefault(alike, [])) < MAX_KEEPERS:
            near[alike].append(name)
    records = [keeper(name) for names in near.values() for name in names] + [keeper("honest")]
    asked = 0
    for turn in range(200):
        monkeypatch.setattr("peers.transfer.catalog.now_s", lambda turn=turn: (20_000 + turn) * AGAIN_S)
        asked += "honest" in {record.peer for record in chosen(RUN, records, "me")}
    assert asked > 200 * MAX_KEEPERS / len(records) / 2


async def test_a_refusal_is_no_fault() -> None:
    net = Net()
    net.give(serving("p", 0), None)

    async def refuse(request: Request) -> Answer:
        raise Refused("no")

    net.peers["p"].transport.serve("saved", refuse)
    faults: list[PeerFault] = []
    assert (await ask_saved(RUN, net.me.transport, net.list, on_fault=faults.append)).sources == {
        0: {},
        1: {},
    }
    assert faults == []

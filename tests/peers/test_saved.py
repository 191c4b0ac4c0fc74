"""Who can give out which checkpoint: asked of few, believed within bounds."""

from __future__ import annotations

import msgspec
import pytest

from peers.ports import Answer, Request
from peers.transfer.catalog import MAX_ASKED, ask_saved, check_saved, chosen
from swarm.errors import BadAnswer, PeerFault, Refused
from swarm.manifest import audit_run
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import AskSaved, Saved, SavedStage, pack, unpack
from tests.peers.network import CalmNetwork

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

    def __init__(self) -> None:
        super().__init__(silence_s=0.05)
        self.me = self.join("me")
        self.list: list[PeerRecord] = []

    def give(self, record: PeerRecord, answer: Saved | bytes | None) -> None:
        self.list.append(record)
        transport = self.join(record.peer).transport

        async def handle(request: Request) -> Answer:
            assert unpack(request.header, AskSaved).run == RUN.id
            return Answer(answer if isinstance(answer, bytes) else pack(answer))

        if answer is not None:
            transport.serve("saved", handle)


async def test_versions_are_told_by_stage_with_who_has_them_keepers_first() -> None:
    net = Net()
    net.give(serving("a", 0), offer(s0=(10, 20)))
    net.give(serving("b", 1), offer(s1=(10,)))
    net.give(serving("c", 1, state="joining"), offer(s1=(30,)))
    net.give(keeper("k"), offer(s0=(10,), s1=(10, 20)))
    found = await ask_saved(RUN, net.me.transport, net.list)
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
    assert await ask_saved(RUN, net.me.transport, net.list, on_fault=faults.append) == {0: {}, 1: {}}
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
    assert await ask_saved(RUN, net.me.transport, net.list, on_fault=faults.append) == {0: {}, 1: {}}
    assert [fault.text for fault in faults] == [f"peer p: {why}"]


def test_few_are_asked_and_the_furthest_first() -> None:
    records = [serving(f"p{i}", i % 2, version=i) for i in range(4 * MAX_ASKED)]
    records += [keeper(f"k{i:02}") for i in range(MAX_ASKED + 3)]
    records += [serving("gone", 0, 99, state="left"), serving("new", 1, 99, state="joining")]
    newest = records[4 * MAX_ASKED - 1].peer
    asked = [record.peer for record in chosen(RUN, records, newest)]
    furthest = range(4 * MAX_ASKED - 2, 2 * MAX_ASKED - 2, -2)
    assert asked == [
        *(f"k{i:02}" for i in range(MAX_ASKED)),
        *(f"p{i}" for i in furthest),
        *(f"p{i - 1}" for i in furthest),
    ]


async def test_a_refusal_is_no_fault() -> None:
    net = Net()
    net.give(serving("p", 0), None)

    async def refuse(request: Request) -> Answer:
        raise Refused("no")

    net.peers["p"].transport.serve("saved", refuse)
    faults: list[PeerFault] = []
    assert await ask_saved(RUN, net.me.transport, net.list, on_fault=faults.append) == {0: {}, 1: {}}
    assert faults == []

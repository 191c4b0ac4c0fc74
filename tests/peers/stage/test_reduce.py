"""The all-reduce alone: all of it or nothing, the same bits at every member, and what is refused."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from peers.clock import now_s
from peers.ports import Answer, NetworkPath, Rank, Request
from peers.sim.dice import Dice
from peers.sim.lines import Lines, Sent
from peers.stage import all_reduce as reduce
from peers.stage.all_reduce import AllReduce, RoundAborted, checksum, read_part
from peers.stage.open_step import KeptMicrobatch, OpenStep
from scripts.bench.common.host_lines import HostLines
from swarm.errors import BadAnswer, Busy, NotReady, Refused
from swarm.manifest import audit_run
from swarm.model.reductions import sqnorm, vectors_digest
from swarm.plan.network import Device, Network
from swarm.protocol.blame import Awaited
from swarm.protocol.ledger import Bitmap, Ledger
from swarm.protocol.messages import Directive, StepDirective
from swarm.protocol.rounds import Plan, Prepared, round_id
from swarm.wire.codec import TensorMeta
from swarm.wire.messages import Hop, Part, PartDone, Work, WorkDone, as_bad_answer, pack
from swarm.wire.receipts import Receipt
from tests.peers.alone import Alone
from tests.peers.loops import obey, swarm
from tests.peers.network import CalmNetwork, calm

pytestmark = pytest.mark.virtual_time

NUMEL = 10
WORK = Work(run="run", t=0, m=1, version=0)
HOP = Hop(stage=0, peer="me", own_s=0.0, compute_s=0.0, receipt=Receipt(b"in", b"", b"", b"", b""))
UNCHECKED: Any = SimpleNamespace(open=lambda *_: None)
"""Audits of a run whose sums are not checked."""


@dataclass
class Group:
    """Members a, b, c … with a vector each, and the plan to add them up."""

    network: CalmNetwork
    plan: Plan
    totals: dict[str, torch.Tensor]
    sides: dict[str, AllReduce] = field(default_factory=dict)

    async def reduce(self, *names: str) -> list[tuple[torch.Tensor, Prepared] | BaseException]:
        """Run the round at `names` (all members unless given); results or errors."""
        runs = [self.sides[n].run(self.plan, 3, self.totals[n]) for n in names or self.plan.members]
        return await asyncio.gather(*runs, return_exceptions=True)

    async def results(self) -> list[tuple[torch.Tensor, Prepared]]:
        found = await self.reduce()
        assert not [one for one in found if isinstance(one, BaseException)], found
        return found  # type: ignore[return-value]

    async def first_void(self) -> str:
        """Why the first member gave up. The others wait until their coordinator tells them to."""
        runs = [asyncio.create_task(self.reduce(name)) for name in self.plan.members]
        done, waiting = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        for run in waiting:
            run.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        (void,) = done.pop().result()
        assert isinstance(void, RoundAborted)
        return void.text

    def part(self, **changes: Any) -> Part:
        """b's contribution to the first chunk of a, but for the changes."""
        body = self.body()
        meta = TensorMeta((self.plan.parts[0],), "float64", "none")
        good = Part(
            run="run", t=3, round=self.plan.round, start=0, numel=self.plan.parts[0], crc=checksum(body),
            tensors=(meta,),
        )  # fmt: skip
        return msgspec.structs.replace(good, **changes)

    def body(self) -> list[bytes]:
        part = self.totals["b"][: self.plan.parts[0]]
        return [struct.pack(f"<{part.numel()}d", *part.tolist())]


def group(
    parts: Sequence[int] = (4, 6),
    *,
    ledgers: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Group:
    names = "abcdef"[: len(parts)]
    torch.manual_seed(1)
    totals = {
        name: torch.randn(sum(parts), dtype=dtype)
        if dtype.is_floating_point
        else torch.randint(-8000, 8000, (sum(parts),))
        for name in names
    }
    plan = Plan("round", 0, tuple(names), tuple(ledgers or [1 << i for i in range(len(parts))]), tuple(parts))
    built = Group(CalmNetwork(silence_s=0.1), plan, totals)
    for name in names:
        transport = built.network.join(name).transport
        built.sides[name] = AllReduce("run", name, transport, dtype, UNCHECKED, lambda total: total)
    return built


@pytest.fixture
async def open_group() -> AsyncIterator[Group]:
    """a waits in its round for b."""
    built = group()
    running = asyncio.create_task(built.reduce("a"))
    while not built.sides["a"]._rounds:
        await asyncio.sleep(0.001)
    yield built
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await built.network.close()


# --- adding up ----------------------------------------------------------------------------------------------


async def test_rounded_sums_are_answered_in_two_bytes_and_valued_once_all_is_there() -> None:
    numel = 1 << 12
    built = group((numel // 2, numel // 2), dtype=torch.int64)
    sent: list[int] = []
    transport = built.sides["a"]._transport
    honest = transport.call

    async def call(*call: Any, **limits: Any) -> Answer:
        answer = await honest(*call, **limits)
        sent.extend(sum(map(len, buffers)) for buffers in (call[-1], answer.body))
        return answer

    transport.call = call  # type: ignore[method-assign]
    results = await asyncio.gather(
        *(
            side.run(built.plan, 3, built.totals[name], lambda answer: answer.float() / 4)
            for name, side in built.sides.items()
        )
    )
    for reduced, held in results:
        assert torch.equal(reduced, (built.totals["a"] + built.totals["b"]).float() / 4)
        assert held.sqnorm == sqnorm(reduced)
    assert sent == [numel + numel // 512] * 2, "two bytes a number, and the width of each block"


@pytest.mark.parametrize("parts", [(10,), (4, 6), (0, 10), (10, 0, 0), (3, 3, 4), (1, 2, 3, 4)])
@pytest.mark.parametrize("chunk", [1 << 20, 2])
async def test_all_members_get_the_sum_of_all(
    parts: Sequence[int], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reduce, "CHUNK_ELEMENTS", chunk)
    built = group(parts)
    expected = torch.zeros(NUMEL, dtype=torch.float64)
    for name in built.plan.members:  # in the order of their ids
        expected += built.totals[name]
    for reduced, held in await built.results():
        assert torch.equal(reduced, expected)
        assert held == Prepared("round", sqnorm(expected), vectors_digest([expected], on_device=False))


async def test_all_members_hold_the_same_bits_of_floats() -> None:
    built = group((300, 350, 374), dtype=torch.float32)
    results = await built.results()
    assert len({vectors_digest([reduced], on_device=False) for reduced, _ in results}) == 1
    assert len({held for _, held in results}) == 1
    exact = torch.stack(list(built.totals.values())).sum(0)
    assert (results[0][0] - exact).norm() < 1e-6 * exact.norm()


async def test_a_member_with_an_empty_ledger_contributes_nothing_and_gets_the_result() -> None:
    built = group((4, 3, 3), ledgers=(1, 0, 2))
    built.totals["b"].fill_(float("nan"))  # whatever its memory holds
    for reduced, _ in await built.results():
        assert torch.equal(reduced, built.totals["a"] + built.totals["c"])


async def test_a_member_may_start_a_little_later_than_the_others() -> None:
    built = group()
    early = asyncio.create_task(built.reduce("a"))
    while not built.sides["a"]._rounds:
        await asyncio.sleep(0.001)
    late = await built.reduce("b")
    assert torch.equal(late[0][0], (await early)[0][0])  # type: ignore[index]


async def test_an_owner_that_holds_as_much_as_it_may_of_a_member_is_asked_again() -> None:
    built = group()
    transport = built.network.peers["a"].transport
    take, refused = built.sides["a"]._serve_part, list[str]()

    async def serve(request: Request) -> Answer:
        if len(refused) < 3:
            refused.append(request.peer)
            raise Busy("too many bodies of yours are waiting to be accepted", retry_after_s=0.001)
        return await take(request)

    transport.serve("part", serve, max_body_bytes=1000)
    (total_a, _), (total_b, _) = await built.results()
    assert refused == ["b"] * 3
    assert torch.equal(total_a, total_b)
    await built.network.close()


async def test_upload_is_measured_with_parts_of_a_fair_size() -> None:
    built = group((1 << 14, 1 << 14))
    built.network.lines = calm(0.001)
    await built.results()
    assert built.sides["a"].bandwidth_bps > 0
    small = group()
    await small.results()
    assert small.sides["a"].bandwidth_bps == 0


# --- all or nothing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["drop_answer", "corrupt_answer"])
async def test_a_lost_or_broken_answer_voids_the_round_and_leaves_the_sums(fault: str) -> None:
    built = group((4, 3, 3))
    before = {name: total.clone() for name, total in built.totals.items()}
    getattr(built.network, fault)("a", "part")
    found = await built.reduce()
    assert any(isinstance(one, RoundAborted) for one in found)
    for name, total in built.totals.items():
        assert torch.equal(total, before[name])
    whole = sum(before.values())
    for one in found:  # who has a result has all of it
        assert isinstance(one, RoundAborted) or torch.equal(one[0], whole)  # type: ignore[index]
    assert all(not side._rounds for side in built.sides.values())


async def test_without_one_member_nobody_gets_a_result() -> None:
    built = group((4, 3, 3))
    built.network.kill("c")
    found = await built.reduce("a", "b")
    assert [type(one) for one in found] == [RoundAborted, RoundAborted]
    assert {str(one) for one in found} <= {"peer c: cannot be reached", "round 'round' is not open here"} | {
        str(one) for one in found if "is void" in str(one)
    }


async def test_a_member_that_does_not_take_part_voids_the_round() -> None:
    built = group()
    (void,) = await built.reduce("a")
    assert isinstance(void, RoundAborted)
    assert (void.text, void.by) == ("too little came from b for 5.0 s", ("b",))


@dataclass(slots=True)
class SlowUpload(Lines):
    """Lines that take no time, but for what one member sends."""

    upload_bytes_per_s: float = 250.0
    of: str = "b"

    def lasts_s(self, sent: Sent, dice: Dice) -> float:
        slow = sent.source == self.of and sent.size_bytes > 4096
        return sent.size_bytes / self.upload_bytes_per_s if slow else 0.001


async def test_a_member_whose_contribution_trickles_voids_the_round_and_is_named() -> None:
    """It has minutes for its megabyte, if it only has to begin."""
    built = group((100_000, 0, 0))
    built.network.lines = SlowUpload()
    began_s, (others, void) = now_s(), (asyncio.create_task(built.reduce("b", "c")), await built.reduce("a"))
    assert isinstance(void[0], RoundAborted) and void[0].by == ("b",)
    assert now_s() - began_s < 7.0
    others.cancel()


@pytest.mark.parametrize(
    ("parts", "owns", "sends", "seen"),
    [
        ((4, 6), 0, False, True),
        ((4, 6), 0, True, False),
        ((4, 6, 0), 0, False, False),
        ((10, 0), 0, True, True),
        ((10, 0, 0), 1, False, False),
        ((0, 10), 0, False, True),
    ],
)
async def test_who_keeps_its_nonce_is_seen_only_of_two_or_where_it_or_who_sees_it_owns_all(
    parts: tuple[int, ...], owns: int, sends: bool, seen: bool
) -> None:
    """Another owner may keep a result from it, and what one of two sends may be on its way."""
    plan, total = group(parts).plan, torch.zeros(10)
    chunks = {0: reduce._Chunk(parts[owns], 0)} if parts[owns] else {}
    check: Any = SimpleNamespace(nonces={"a": b"1", "c": b"3"}, lacking=lambda: ["b"])
    this = reduce._Round(plan, 3, total, total, chunks, check)
    for chunk in this.chunks.values():
        chunk.result.set_result((PartDone(crc=0, tensors=()), ()))
    assert this.awaited(sends=sends) == (frozenset("b"), len(parts), seen)
    check.nonces["b"] = b"2"
    assert this.awaited() == (frozenset("b"), len(parts), True), "what it has to say hangs on no other then"


async def test_time_in_which_a_member_itself_stood_still_is_not_charged() -> None:
    built, told = group((10, 0)), list[float]()
    loop, side = built.network.loop, built.sides["a"]

    def wait(awaited: Awaited, waited_s: float) -> Sequence[str]:
        told.append(waited_s)
        return ()

    reducing = asyncio.create_task(side.run(built.plan, 3, built.totals["a"], wait=wait))
    await asyncio.sleep(1.1)
    loop.now_s += 20.0
    await asyncio.sleep(1.0)
    reducing.cancel()
    assert told and max(told) == 2 * reduce.WATCH_S


async def test_a_round_that_was_given_up_tells_its_members_what_they_sent() -> None:
    built = group((100_000, 0, 0))
    lines = built.network.peers["b"].transport.lines
    lines["a"] = NetworkPath(sent_bytes=1_000)
    reducing = asyncio.create_task(built.reduce("b"))
    await asyncio.sleep(0.4)
    lines["a"] = NetworkPath(sent_bytes=31_000)
    await asyncio.sleep(0.4)
    assert not built.sides["b"].last_bps, "what took a moment was no slow line"
    await asyncio.sleep(0.2)
    lines["a"] = NetworkPath(sent_bytes=51_000)
    for sent_bytes in (51_400, 51_800, 52_200):  # its reports
        await asyncio.sleep(1.0)
        lines["a"] = NetworkPath(sent_bytes=sent_bytes)
    reducing.cancel()
    await asyncio.sleep(0.1)
    until_s = 1.0 + reduce.WATCH_S  # what it waits for since then is not its upload
    assert 8 * 50_000 / until_s <= built.sides["b"].last_bps <= 8 * 50_000 / 1.0


async def test_a_member_on_a_slow_line_is_waited_for() -> None:
    built = group((400_000, 0, 0))
    built.network.lines = SlowUpload(upload_bytes_per_s=30_000.0)
    began_s = now_s()
    results = await built.results()
    assert len({held for _, held in results}) == 1 and now_s() - began_s > 10.0


async def test_members_that_wait_for_answers_of_a_slow_line_are_not_blamed_for_it() -> None:
    """The seventh chunk is sent when the first is answered: here after more than the 5 s of a silent one."""
    built = group((140_000, 0, 0))
    built.network.lines = SlowUpload(upload_bytes_per_s=16_000.0, of="a")
    began_s = now_s()
    results = await built.results()
    assert len({held for _, held in results}) == 1 and now_s() - began_s > 15.0


async def test_a_member_that_takes_its_answers_and_sends_no_more_is_named_soon() -> None:
    built = group((140_000, 0, 0))
    built.network.lines = SlowUpload(upload_bytes_per_s=100_000.0, of="a")
    call, calls = built.sides["b"]._call_until_ready, list[Part]()

    async def seven(owner: str, part: Part, body: Any, limit_s: float) -> Answer:
        calls.append(part)
        if len(calls) > 6:
            await asyncio.sleep(1000.0)
        return await call(owner, part, body, limit_s)

    built.sides["b"]._call_until_ready = seven  # type: ignore[method-assign]
    began_s, (others, void) = now_s(), (asyncio.create_task(built.reduce("b", "c")), await built.reduce("a"))
    assert isinstance(void[0], RoundAborted) and void[0].by == ("b",)
    assert now_s() - began_s < 11.0, "twice the limit: it is looked at when the limit is over"
    others.cancel()


def lines_of(built: Group, mbit: float, *, down_mbit: dict[str, float] | None = None) -> HostLines:
    """Lines of that many Mbit/s up and down; `down_mbit`: of some members, down."""
    down = dict.fromkeys(built.plan.members, mbit) | (down_mbit or {})
    hosts = [Device(name, 0, 1.0, 1e6 * mbit, 1e6 * down[name]) for name in built.plan.members]
    lines = HostLines(Network(tuple(hosts), ("lab",), np.array([[0.001]]), np.array([[np.inf]])))
    lines.device_of = {name: i for i, name in enumerate(built.plan.members)}
    return lines


async def test_a_line_that_becomes_slow_after_fast_rounds_voids_none() -> None:
    """Fast rounds take less than 5 s. On the slow line the first to have its part waits longer for others."""
    built = group((70_000, 70_000, 70_000))
    built.network.lines = lines_of(built, 1000.0)
    for _ in range(3):
        await built.results()
    built.network.lines = lines_of(built, 0.4)
    for _ in range(2):
        began_s, results = now_s(), await built.results()
        assert len({held for _, held in results}) == 1 and now_s() - began_s > 30.0


async def test_owners_on_a_slow_line_are_waited_for_while_their_answers_come() -> None:
    """The others have their own parts at once: they do not see in those how slow the line of one is."""
    built = group((200_000, 200_000, 200_000))
    built.network.lines = lines_of(built, 1000.0)
    await built.results()
    built.network.lines = lines_of(built, 1000.0, down_mbit={"c": 2.0})
    began_s, results = now_s(), await built.results()
    assert len({held for _, held in results}) == 1 and now_s() - began_s > 10.0


async def test_an_owner_that_answers_no_more_is_given_up_after_the_last_answer() -> None:
    built = group((70_000, 70_000))
    await built.results()
    built.network.delay_answer("b", "part", 4.0)
    for nth in range(2, 6):
        built.network.delay_answer("b", "part", 1000.0, nth=nth)
    began_s, (other, void) = now_s(), (asyncio.create_task(built.reduce("b")), await built.reduce("a"))
    assert str(void[0]) == "the owners of other parts did not answer within 5.0 s"
    assert now_s() - began_s == pytest.approx(9.0, abs=0.1)
    other.cancel()


async def test_a_chunk_that_is_not_finite_voids_the_round() -> None:
    built = group()
    built.totals["b"][0] = float("inf")
    assert await built.first_void() == "a gradient sum is not finite"


async def test_an_answer_whose_checksum_does_not_fit_voids_the_round() -> None:
    built = group()
    transport = built.network.peers["a"].transport
    honest, limit = transport.handlers["part"]

    async def flip_a_bit(request: Request) -> Answer:
        answer = await honest(request)
        body = bytearray(answer.body[0])
        body[3] ^= 1
        return Answer(answer.header, [body])

    transport.serve("part", flip_a_bit, max_body_bytes=limit)
    found = await built.reduce()
    assert str(found[1]) == "peer a: the checksum of a chunk does not fit its bytes"


async def test_an_answer_of_another_shape_voids_the_round() -> None:
    built = group()
    transport = built.network.peers["a"].transport

    async def lie(request: Request) -> Answer:
        await request.accept()
        body, meta = [bytes(8)], TensorMeta((1,), "float64", "none")
        return Answer(pack(PartDone(crc=checksum(body), tensors=(meta,))), body)

    transport.serve("part", lie, max_body_bytes=1000)
    assert await built.first_void() == "peer a: a chunk is float64[1] as none; expected float64[4] as none"


# --- contributions that are refused -------------------------------------------------------------------------


async def refusal(built: Group, part: Part, body: list[bytes] | None = None, *, by: str = "b") -> str:
    with pytest.raises((Refused, NotReady)) as caught:
        await built.network.peers[by].transport.call(
            "a", "part", pack(part), built.body() if body is None else body, max_answer_bytes=1000
        )
    return caught.value.text


async def test_contributions_of_others_than_members_are_refused(open_group: Group) -> None:
    open_group.network.join("stranger")
    assert (
        await refusal(open_group, open_group.part(), by="stranger")
        == "stranger is not a member of round round"
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"run": "other"}, "this peer serves run run, not 'other'"),
        ({"round": "unknown"}, "round 'unknown' is not open here"),
        ({"start": 4}, "elements from 4 of step 3 are not a chunk that this peer owns"),
        ({"start": -1}, "elements from -1 of step 3 are not a chunk that this peer owns"),
        ({"numel": 3}, "elements from 0 of step 3 are not a chunk that this peer owns"),
        ({"t": 2}, "elements from 0 of step 2 are not a chunk that this peer owns"),
        ({"crc": 1}, "the checksum of a chunk does not fit its bytes"),
        (
            {"tensors": (TensorMeta((4,), "float64", "bf16"),)},
            "a chunk is float64[4] as bf16; expected float64[4] as none",
        ),
        (
            {"tensors": (TensorMeta((4,), "int64", "none"),)},
            "a chunk is int64[4] as none; expected float64[4] as",
        ),
        (
            {"tensors": (TensorMeta((2, 2), "float64", "none"),)},
            "a chunk is float64[2, 2] as none; expected float64[4] as none",
        ),
        (
            {"tensors": (TensorMeta((4,), "complex", "none"),)},
            "a chunk is complex[4] as none; expected float64[4] as none",
        ),
    ],
)
async def test_a_contribution_that_does_not_fit_is_refused(
    changes: dict[str, Any], text: str, open_group: Group
) -> None:
    assert (await refusal(open_group, open_group.part(**changes))).startswith(text)


async def test_an_empty_contribution_is_expected_exactly_of_an_empty_ledger(open_group: Group) -> None:
    text = "the contribution does not fit the ledger: something was expected exactly if it is not empty"
    assert await refusal(open_group, open_group.part(tensors=(), crc=0), []) == text
    assert await refusal(open_group, open_group.part(tensors=open_group.part().tensors * 2)) == text


async def test_buffers_that_no_chunk_comes_in_are_refused_before_they_come(open_group: Group) -> None:
    text = "the announced buffers do not fit the tensor"
    assert await refusal(open_group, open_group.part(), [bytes(8)]) == text


async def test_a_contribution_that_is_not_finite_is_refused(open_group: Group) -> None:
    body = [struct.pack("<4d", 1.0, float("nan"), 1.0, 1.0)]
    part = open_group.part(crc=checksum(body))
    assert await refusal(open_group, part, body) == "a chunk is not finite"


async def test_a_contribution_to_a_round_that_ended_hears_that_it_is_void(open_group: Group) -> None:
    three = group((4, 3, 3))
    running = asyncio.create_task(three.reduce("a"))
    while not three.sides["a"]._rounds:
        await asyncio.sleep(0.001)
    call = asyncio.create_task(refusal(three, three.part()))
    while not three.sides["a"]._rounds["round"].chunks[0].contributions.get("b", None) is not None:
        await asyncio.sleep(0.001)
    running.cancel()
    assert await call == "round round is void: the round ended"


def test_chunks_are_checked_as_answers_and_as_requests() -> None:
    with pytest.raises(Refused, match="0 tensors where one chunk was expected"):
        read_part((), 0, [], 4, torch.float64)
    with pytest.raises(BadAnswer, match="0 tensors where one chunk was expected"), as_bad_answer("a"):
        read_part((), 0, [], 4, torch.float64)


# --- the sum is left alone while it is given out ------------------------------------------------------------


async def test_a_sum_is_not_opened_again_before_its_reduce_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that enters while a cancelled reduce still answers would be in one part and not in another."""
    run = audit_run(stages=1, steps=1, microbatches_per_step=4)
    ended: list[str | None] = []
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        peer, step = s.peers["s0p0"], s.step("s0p0")
        with peer.core.device.books:
            for m in range(4):
                step.ledger.record(m)

        async def reluctant(*_: object) -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await asyncio.sleep(0.05)
                ended.append(step.ledger.frozen_for)

        monkeypatch.setattr(AllReduce, "run", reluctant)
        name = round_id(run.id, 0, 0, 0, ["s0p0"], [0b1111], [4])
        plan = Plan(round=name, number=0, members=("s0p0",), ledgers=(Bitmap(15),), parts=(4,))

        def directive(**what: Any) -> Directive:
            return Directive(
                run=run.id, stage=0, coordinator="s0p0", version=0, steps=(StepDirective(t=0, **what),)
            )

        peer.coordination._silent = True  # type: ignore
        obey(peer, directive(plan=plan))
        await s.until(lambda: step.ledger.frozen_for == name)
        obey(peer, directive())
        await s.until(lambda: step.ledger.frozen_for is None)
        assert ended == [name]


def test_a_step_keeps_two_inputs_for_each_of_its_microbatches_the_latest() -> None:
    step, answer = OpenStep(0, Ledger(0, 2)), WorkDone(loss=0.0)
    for n in range(5):
        step.send_on(0, bytes([n]), KeptMicrobatch([], (), answer, ()))
    assert [inputs for _, inputs in step.sent_on] == [b"\1", b"\2", b"\3", b"\4"]


def test_a_step_is_audited_by_what_it_gave_though_another_came_since() -> None:
    """A coordinator has an honest peer take a microbatch out after it has said its products, and accomplices
    feed it something else: with that its sum looked false.
    """
    step = OpenStep(0, Ledger(0, 2))
    gave, came, other = (
        KeptMicrobatch([], (), WorkDone(loss=float(n), hops=(HOP,)), (), asked=("feeder", WORK))
        for n in range(3)
    )
    step.kept[0] = gave
    step.give_all("round")
    step.kept[0], step.kept[1] = came, other
    assert step.shown(0, b"") is gave and step.shown(1, b"") is other
    step.drop()
    assert step.shown(0, b"") is gave
    step.give_all("")  # nobody shows it how that round ended
    assert step.shown(0, b"") is gave
    step.give_all("another")
    assert step.shown(0, b"") is None


async def test_a_step_that_begins_again_is_audited_by_what_it_gave_before() -> None:
    """Until it says other products, others can tell an auditor of those."""
    alone = await Alone(audit_run()).opened()
    step, gave = alone.core.steps[0], KeptMicrobatch([], (), WorkDone(loss=0.0), ())
    step.given[0] = gave
    await alone.core.begin_again(step)
    assert alone.core.steps[0] is not step and alone.core.steps[0].shown(0, b"") is gave
    state = alone.core.compute.state.copy()
    await alone.core.load(alone.core.position, state)  # a coordinator may name another of this version
    assert alone.core.steps[0].shown(0, b"") is gave
    alone.core.close()


async def test_answers_of_a_sum_that_is_given_up_are_shown_still() -> None:
    """Whose answer was audited just then looked like a liar: it kept nothing that it had signed."""
    alone = await Alone(audit_run()).opened()
    answered = KeptMicrobatch([], (), WorkDone(loss=0.0, hops=(HOP,)), (), asked=("feeder", WORK))
    alone.core.steps[0].kept[1] = answered
    await alone.core.begin_again(alone.core.steps[0])
    assert alone.core.steps[0].shown(1, b"in") is answered and not alone.core.steps[0].kept
    again = replace(answered, grads_out=())
    alone.core.steps[0].kept[1] = again
    await alone.core.device.run(Rank.STEP, 0, alone.core.steps[0].drop)
    assert alone.core.steps[0].shown(1, b"in") is again
    alone.core.close()


async def test_a_closed_step_waits_for_all_that_it_stopped() -> None:
    step = OpenStep(0, Ledger(0, 4))
    log: list[str] = []

    async def slow(name: str) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0.01)
            log.append(name)

    for name in ("reduce", "fetch"):
        step.work[name] = asyncio.create_task(slow(name))
    await asyncio.sleep(0)
    step.close()
    step.stop("reduce")
    await step.stopped()
    assert step.over
    assert sorted(log) == ["fetch", "reduce"]
    await step.stopped()

"""Serving microbatches: what is refused and how it is said, and what a lying peer achieves (nothing)."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest

from peers.clock import now_s
from peers.events import PeerLost
from peers.ports import Answer, Request
from peers.sim.lines import Lines
from peers.stage.microbatches import MAX_AGAIN
from peers.stage.next_stage import NextStage
from peers.stage.open_step import HOLD_S, OpenStep
from peers.trainer import Trainer
from swarm.codecs import PACKED
from swarm.errors import Busy, Leaving, NotNow, NotReady, Refused, SetupError, Stale
from swarm.ids import Microbatch
from swarm.manifest import AdmissionSpec, CodecSpec, Run, audit_run
from swarm.model.gradient_sum import Gradients, SumLost
from swarm.model.stage import StageCompute
from swarm.model.stage_io import input_metas
from swarm.policy.backoff import BUDGET_ROUNDS, FIRST_REST_S, Backoff
from swarm.policy.router import Router
from swarm.policy.timeouts import MIN_S
from swarm.protocol.ledger import MAX_MICROBATCHES, Bitmap
from swarm.protocol.messages import Directive, StepDirective
from swarm.records import PeerRecord, State
from swarm.wire.codec import TensorMeta, encode
from swarm.wire.messages import (
    Hop,
    Locate,
    Located,
    Work,
    WorkDone,
    pack,
    unpack,
)
from tests.peers.loops import Stranger, Swarm, obey, swarm

pytestmark = pytest.mark.virtual_time

RUN = audit_run(stages=2, steps=2, microbatches_per_step=4)


def first(terms: Run, **changes: object) -> Work:
    """A good request to stage 0, but for the changes."""
    good = Work(run=terms.id, t=0, m=0, version=0, tensors=input_metas(terms, 0))
    return msgspec.structs.replace(good, **changes)


def second(**changes: object) -> Work:
    """A good request to stage 1, but for the changes."""
    return msgspec.structs.replace(first(RUN, tensors=input_metas(RUN, 1)), **changes)


def undo(bitmap: int) -> Directive:
    """What the coordinator of stage 1 says when members have the same microbatch."""
    steps = (StepDirective(t=0, retract=Bitmap(bitmap)),)
    return Directive(run=RUN.id, stage=1, coordinator="s1p0", version=0, steps=steps)


def hidden(value: float = 0.0) -> list[Any]:
    """The body of a request to stage 1: one float64, and 9 tokens."""
    return [struct.pack("<d", value), bytes(9)]


def announced(s: Swarm, name: str, stage: int, state: State = "serving") -> Stranger:
    """A stranger that announced itself at `stage`, as anybody may."""
    stranger = s.add_stranger(name)
    s.network.announce(PeerRecord(peer=name, run=s.run.id, stage=stage, state=state, version=0))
    return stranger


async def refusal(stranger: Stranger, peer: str, work: Work, body: list[Any]) -> str:
    with pytest.raises(Refused) as caught:
        await stranger.send(peer, "work", work, body)
    return caught.value.text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"run": "other"}, f"this peer serves run {RUN.id}, not 'other'"),
        ({"m": 4}, "no microbatch (0, 4) in 2 steps of 4"),
        ({"m": -1}, "no microbatch (0, -1) in 2 steps of 4"),
        ({"t": 2}, "no microbatch (2, 0) in 2 steps of 4"),
        ({"t": -1}, "no microbatch (-1, 0) in 2 steps of 4"),
        ({"t": 1, "version": 0}, "step 1 is computed with weights 1, not 0"),
        ({"version": 1}, "step 0 is computed with weights 0, not 1"),
        ({"tensors": ()}, "stage 0 takes uint8[1, 9] as none; offered were nothing"),
        (
            {"tensors": (TensorMeta((1, 8), "uint8", "none"),)},
            "stage 0 takes uint8[1, 9] as none; offered were uint8[1, 8] as none",
        ),
        (
            {"tensors": (TensorMeta((1, 9), "int64", "none"),)},
            "stage 0 takes uint8[1, 9] as none; offered were int64[1, 9] as none",
        ),
        (
            {"tensors": (TensorMeta((1, 9), "uint8", "bf16"),) * 2},
            "stage 0 takes uint8[1, 9] as none; offered were uint8[1, 9] as bf16, uint8[1, 9] as bf16",
        ),
    ],
)
async def test_a_request_that_does_not_belong_here_is_refused_with_its_reason(
    changes: dict[str, object], text: str
) -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        assert await refusal(s.add_stranger(), "s0p0", first(RUN, **changes), [bytes(9)]) == text
        assert s.step("s0p0").ledger.in_progress == 0


async def test_another_codec_than_that_of_the_manifest_is_refused_with_the_right_one() -> None:
    run = replace(RUN, codec=CodecSpec(forward="none", backward="none"))
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        takes, tokens = input_metas(run, 1)
        offered = (msgspec.structs.replace(takes, codec="topk:0.25"), tokens)
        work = first(run, tensors=offered)
        text = await refusal(s.add_stranger(), "s1p0", work, [bytes(8)])
        assert text == (
            "stage 1 takes float64[1, 1, 1] as none, uint8[1, 9] as none; "
            "offered were float64[1, 1, 1] as topk:0.25, uint8[1, 9] as none"
        )


async def test_a_microbatch_takes_the_route_that_its_trainer_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = list[tuple[str, ...]]()
    chosen = list[tuple[str, ...]]()
    call = Trainer._call

    async def note(self: Trainer, route: list[str], *given: Any) -> Any:
        answered = await call(self, route, *given)
        chosen.append(tuple(route))
        taken.append(tuple(hop.peer for hop in answered[1].hops))
        return answered

    monkeypatch.setattr(Trainer, "_call", note)
    async with swarm(replicas=3) as s:
        await s.until_serving()
        s.add_trainer("trainer")
        await s.until_finished()
        s.assert_each_counted_once()
    assert taken == chosen and len(taken) >= 3 * 8


async def test_buffers_that_do_not_fit_their_tensors_are_refused_before_they_are_received() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        stranger = s.add_stranger()
        for body, sizes in (([bytes(8)], "[8]"), ([], "[]"), ([bytes(4), bytes(5)], "[4, 5]")):
            text = await refusal(stranger, "s0p0", first(RUN), body)
            assert text == f"the announced buffers, {sizes} bytes, do not fit the tensors"
        assert "a body of 10 bytes" in await refusal(stranger, "s0p0", first(RUN), [bytes(10)])
        assert s.peers["s0p0"].microbatches.taken == 0


async def test_a_malformed_header_is_refused() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        with pytest.raises(Refused, match="malformed Work header"):
            await s.add_stranger().send("s0p0", "work", b"\xc1")


async def test_who_is_not_admitted_as_a_trainer_is_told_so() -> None:
    run = replace(RUN, admission=AdmissionSpec(trainers=("12D3KooW" + "A" * 44,)))
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        text = await refusal(s.add_stranger(), "s0p0", first(run), [bytes(9)])
        assert text == "run 'counting' does not admit stranger as a trainer"


async def test_a_trainer_that_is_not_admitted_ends_with_the_reason() -> None:
    run = replace(RUN, admission=AdmissionSpec(trainers=("12D3KooW" + "A" * 44,)))
    async with swarm(run, replicas=1) as s:
        s.add_trainer("trainer")
        with pytest.raises(SetupError, match=r"is refused again and again: .* does not admit trainer"):
            await asyncio.wait_for(s.tasks["trainer"], 20)
        s.tasks["trainer"] = asyncio.get_running_loop().create_task(asyncio.sleep(0))


class Changing:
    """Data whose samples are others than before."""

    def batch(self, offsets: list[int]) -> Any:
        raise SetupError(f"sample {offsets[0]} holds other numbers")


async def test_a_trainer_whose_samples_change_ends_with_the_reason() -> None:
    async with swarm(RUN, replicas=1) as s:
        s.add_trainer("trainer", batches=Changing())
        with pytest.raises(SetupError, match=r"^sample \d+ holds other numbers$"):
            await asyncio.wait_for(s.tasks["trainer"], 20)
        s.tasks["trainer"] = asyncio.get_running_loop().create_task(asyncio.sleep(0))


async def test_only_announced_peers_of_the_stage_before_may_send_activations() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        with pytest.raises(NotNow, match="peer ranger is not announced at stage 0"):
            await s.add_stranger().send("s1p0", "work", second(), hidden())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_an_activation_that_is_not_finite_is_refused_and_counts_nothing(value: float) -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        sender = announced(s, "sender", 0, "joining")
        assert await refusal(sender, "s1p0", second(), hidden(value)) == "hidden is not finite"
        ledger = s.step("s1p0").ledger
        assert (ledger.done, ledger.in_progress) == (0, 0)
        assert s.peers["s1p0"].microbatches.inflight == 0
        assert not s.peers["s1p0"].core.compute.sums.of(0).any()


async def test_a_repeated_request_is_answered_from_memory() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        sender = announced(s, "sender", 0, "joining")
        answers = [await sender.send("s1p0", "work", second(), hidden(1.0)) for _ in range(3)]
        assert len({(a.header, bytes(a.body[0])) for a in answers}) == 1
        assert s.peers["s1p0"].core.computed == 1


@pytest.mark.parametrize(("mbps", "part"), [(200.0, PACKED["none"]), (201.0, 1.0)])
async def test_a_peer_says_how_long_its_upload_is_busy_with_what_it_sends_packed(
    mbps: float, part: float
) -> None:
    async with swarm(RUN, replicas=1) as s:
        s.add_peer("home", 1, upload_bps=1e6 * mbps)
        await s.until_serving()
        answer = await announced(s, "sender", 0, "joining").send("home", "work", second(), hidden(1.0))
        (hop,) = unpack(answer.header, WorkDone).hops
        assert hop.upload_s == pytest.approx(part * 8 * 8 / (1e6 * mbps)), "one float64"


async def test_two_requests_at_once_are_computed_once() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        sender = announced(s, "sender", 0, "joining")
        calls = [sender.send("s1p0", "work", second(), hidden(1.0)) for _ in range(4)]
        answers = await asyncio.gather(*calls)
        assert len({a.header for a in answers}) == 1
        assert s.peers["s1p0"].core.computed == 1


async def test_a_peer_says_whether_it_has_a_microbatch() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        sender = announced(s, "sender", 0, "joining")
        await sender.send("s1p0", "work", second(m=2), hidden())

        async def has(**changes: object) -> bool:
            question = Locate(**{"run": RUN.id, "t": 0, "m": 2, **changes})  # type: ignore[arg-type]
            return (await sender.ask("s1p0", "locate", question, Located)).has

        assert await has()
        for changes in ({"m": 1}, {"m": -1}, {"m": 10**9}, {"t": 1}, {"t": -1}, {"run": "other"}):
            assert not await has(**changes)


@pytest.mark.parametrize(("left_out", "told"), [(("z",), ("z",)), (("s1p0", "z"), ())])
async def test_one_that_is_left_out_names_nobody_else_that_is(
    left_out: tuple[str, ...], told: tuple[str, ...]
) -> None:
    """By the word of one coordinator, and its echo, the stage before gave work to it alone."""
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        s.peers["s1p0"].microbatches._left_out = lambda: left_out
        sender = announced(s, "sender", 0, "joining")
        answer = await sender.ask("s1p0", "locate", Locate(run=RUN.id, t=0, m=0), Located)
        assert answer.left_out == told


async def test_a_step_that_will_not_open_soon_is_not_waited_for() -> None:
    run = audit_run(stages=1, steps=9, microbatches_per_step=4)
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        with pytest.raises(NotReady, match="step 5 is not open; stage 0 is at version 0") as caught:
            await s.add_stranger().send("s0p0", "work", first(run, t=5, version=5), [bytes(9)])
        assert caught.value.version == 0


async def test_a_step_that_is_over_is_said_to_be_stale() -> None:
    async with swarm(RUN, replicas=1) as s:
        s.add_trainer("trainer")
        await s.until_finished()
        with pytest.raises(Stale, match="step 1 is over; stage 0 is at version 2") as caught:
            await s.add_stranger().send("s0p0", "work", first(RUN, t=1, version=1), [bytes(9)])
        assert caught.value.version == 2


async def test_a_full_peer_says_busy_and_a_leaving_one_says_so() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        stranger = s.add_stranger()
        s.network.stop("s1p0")
        desk = s.peers["s0p0"].microbatches
        desk.max_inflight = 1
        pending = asyncio.create_task(stranger.send("s0p0", "work", first(RUN), [bytes(9)]))
        await s.until(lambda: desk.inflight == 1)
        with pytest.raises(Busy, match="1 microbatches are in flight; no more fit"):
            await stranger.send("s0p0", "work", first(RUN, m=1), [bytes(9)])
        s.peers["s0p0"].core.leaving = True
        with pytest.raises(Leaving, match="this peer is leaving"):
            await stranger.send("s0p0", "work", first(RUN, m=1), [bytes(9)])
        s.peers["s0p0"].core.leaving = False
        s.network.go_on("s1p0")
        await pending


# --- lying answers ------------------------------------------------------------------------------------------

GRADIENT = TensorMeta((1, 1, 1), "float64", "none")


def lies(**changes: object) -> Callable[[Request], Awaitable[Answer]]:
    """A handler of `work` that takes everything and computes nothing."""
    header = changes.pop("header", None)
    body = changes.pop("body", [struct.pack("<d", 0.25)])
    done = WorkDone(**{"loss": 0.0, "tensors": (GRADIENT,), **changes})  # type: ignore[arg-type]

    async def handle(request: Request) -> Answer:
        await request.accept()
        return Answer(header if header is not None else pack(done), body)  # type: ignore[arg-type]

    return handle


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lies(body=[struct.pack("<d", float("nan"))]), "the gradient is not finite"),
        (lies(body=[struct.pack("<d", float("inf"))]), "the gradient is not finite"),
        (lies(loss=float("nan")), "malformed WorkDone header: Expected `float` > -1e+30 - at `$.loss`"),
        (lies(loss=1e31), "malformed WorkDone header: Expected `float` < 1e+30 - at `$.loss`"),
        (lies(tensors=()), "answered nothing where float64[1, 1, 1] as none was due"),
        (
            lies(tensors=(TensorMeta((1, 1, 1), "float32", "none"),)),
            "answered float32[1, 1, 1] as none where float64[1, 1, 1] as none was due",
        ),
        (lies(body=[bytes(4)]), "answered buffers that do not fit their tensor"),
        (lies(body=[]), "answered buffers that do not fit their tensor"),
        (lies(body=[bytes(1 << 16)]), "an answer of 65536 bytes; at most 8 fit"),
        (lies(header=b"\xc1"), "malformed WorkDone header"),
        (lies(header=pack(Located(has=True))), "malformed WorkDone header"),
    ],
)
async def test_a_peer_that_answers_nonsense_is_left_alone_and_another_does_the_work(
    lie: Callable[[Request], Awaitable[Answer]], why: str
) -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        liar = announced(s, "s1z-liar", 1)
        liar.end.transport.serve("work", lie, max_body_bytes=1 << 20)
        s.add_trainer("trainer")
        await s.until_finished()
        s.assert_each_counted_once()
        lost = [event.why for event in s.seen(PeerLost) if event.peer == "s1z-liar"]
        assert lost
        assert all(why in text for text in lost)


async def test_no_peer_is_at_fault_for_inputs_of_which_no_gradient_can_be_used() -> None:
    """Its caller chose them: again and again, it had all peers of the next stage left alone, and no others
    got an answer.
    """
    async with swarm(RUN, replicas=2) as s:
        await s.until_serving()
        compute, asked = s.peers["s0p0"].core.compute, list[str]()
        s.network.on_deliver = lambda caller, callee, method: asked.extend([callee] * (method == "work"))

        def overflows(*_: object, **__: object) -> Gradients:
            raise Refused("the gradient of the weights is beyond 1024")

        compute.gradients = overflows  # type: ignore[method-assign]
        why = await refusal(s.add_stranger(), "s0p0", first(RUN), [bytes(9)])
        assert why == "the gradient of the weights is beyond 1024"
        assert set(asked) == {"s0p0", "s1p0", "s1p1"}, "another one may have answered something else"
        router = s.peers["s0p0"].microbatches._next.router  # type: ignore[union-attr]
        assert not any(router.backoff.is_failing(peer) for peer in ("s1p0", "s1p1"))
        assert not s.seen(PeerLost)


async def test_a_peer_that_refuses_what_others_take_is_passed_by() -> None:
    async def refuse(request: Request) -> Answer:
        raise Refused("I do not like it")

    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        announced(s, "s1z-liar", 1).end.transport.serve("work", refuse, max_body_bytes=1 << 20)
        s.add_trainer("trainer")
        await s.until_finished()
        s.assert_each_counted_once()


async def test_what_all_peers_of_a_stage_refuse_ends_the_trainer_with_the_reason() -> None:
    async def refuse(request: Request) -> Answer:
        raise Refused("I do not like it")

    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        s.network.peers["s1p0"].transport.serve("work", refuse, max_body_bytes=1 << 20)
        s.add_trainer("trainer")
        with pytest.raises(SetupError, match=r"stage 1 refuses \(0, \d\): I do not like it"):
            await asyncio.wait_for(s.tasks["trainer"], 20)
        s.tasks["trainer"] = asyncio.get_running_loop().create_task(asyncio.sleep(0))


async def test_impossible_times_of_an_answer_do_not_reach_the_router() -> None:
    hops = tuple(
        Hop(stage=stage, peer="s1z-liar", own_s=own_s, compute_s=0.0)
        for stage, own_s in ((1, -5.0), (9, 1.0))
    )
    run = audit_run(stages=1, steps=2, microbatches_per_step=4)
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        good = s.network.peers["s0p0"].transport.handlers["work"][0]

        async def handle(request: Request) -> Answer:
            answer = await good(request)
            done = msgspec.msgpack.decode(answer.header, type=WorkDone)
            return Answer(pack(msgspec.structs.replace(done, hops=hops)), answer.body)

        s.network.peers["s0p0"].transport.serve("work", handle, max_body_bytes=1 << 20)
        s.add_trainer("trainer")
        await s.until_finished()
        s.assert_each_counted_once()


class Measured(Lines):
    """Lines of which small calls tell something."""

    def round_trip_s(self, here: str, there: str) -> float:
        return 0.02


async def test_a_trainer_hears_from_callers_how_much_of_a_links_time_is_its_length() -> None:
    async with swarm(audit_run(stages=2, steps=2, microbatches_per_step=4), replicas=1) as s:
        s.network.lines = s.network.calm = Measured()
        trainer = s.add_trainer("trainer")
        await s.until_finished()
        assert trainer._latency._rtt_s == {("s0p0", "s1p0"): 0.02}
        assert trainer._latency.busy_s("s0p0", 0, 1) == trainer._latency.busy_s("s1p0", 1, 0) > 1e-4


# --- a sum is lost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
async def test_an_addition_that_breaks_takes_its_ledger_with_it_and_all_is_run_again(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, left, whole = f"s{number}p0", 3, StageCompute.add

    def breaks(self: StageCompute, found: Gradients) -> None:
        nonlocal left
        whole(self, found)
        if self.stage == number:
            left -= 1
            if left == 0:
                self.sums.of(0).zero_()
                raise SumLost("out of memory")

    monkeypatch.setattr(StageCompute, "add", breaks)
    async with swarm(RUN, replicas=1) as s:
        s.add_trainer("trainer", window=1)
        await s.until_finished()
        s.assert_each_counted_once()
        assert left < 0
        assert s.peers[name].core.computed > 2 * RUN.M


async def test_an_undo_that_breaks_takes_the_ledger_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        sender = announced(s, "sender", 0, "joining")
        for m in (0, 1, 2):
            await sender.send("s1p0", "work", second(m=m), hidden())
        peer = s.peers["s1p0"]

        def breaks(self: StageCompute, *_: object) -> None:
            self.sums.of(0).zero_()
            raise SumLost("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(StageCompute, "subtract", breaks)
            directive = Directive(
                run=RUN.id,
                stage=1,
                coordinator="s1p0",
                version=0,
                steps=(StepDirective(t=0, retract=Bitmap(2)),),
            )
            obey(peer, directive)
            await s.until(lambda: s.done("s1p0") == 0 and not s.step("s1p0").kept)
        s.add_trainer("trainer")
        await s.until_finished()
        s.assert_each_counted_once()


async def test_an_impossible_undo_is_said_and_changes_nothing() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        sender = announced(s, "sender", 0, "joining")
        await sender.send("s1p0", "work", second(), hidden())
        directive = Directive(
            run=RUN.id,
            stage=1,
            coordinator="s1p0",
            version=0,
            steps=(StepDirective(t=0, retract=Bitmap(0x101)),),
        )
        obey(s.peers["s1p0"], directive)
        said = "stage 1: an impossible undo: the ledger names a microbatch beyond 3"
        await s.until(lambda: said in [event.words() for event in s.events])
        assert s.done("s1p0") == 1


async def test_what_was_undone_is_computed_again_when_asked() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        sender = announced(s, "sender", 0, "joining")
        await sender.send("s1p0", "work", second(), hidden())
        peer, total = s.peers["s1p0"], encode(s.peers["s1p0"].core.compute.sums.of(0).clone(), "none")
        obey(
            peer,
            Directive(
                run=RUN.id,
                stage=1,
                coordinator="s1p0",
                version=0,
                steps=(StepDirective(t=0, retract=Bitmap(1)),),
            ),
        )
        await s.until(lambda: s.done("s1p0") == 0)
        assert not peer.core.compute.sums.of(0).any()
        await sender.send("s1p0", "work", second(), hidden())
        assert not peer.core.compute.sums.of(0).any(), "so soon nobody knows that it is lacking"
        await asyncio.sleep(HOLD_S)
        await sender.send("s1p0", "work", second(), hidden())
        assert bytes(encode(peer.core.compute.sums.of(0), "none").buffers[0]) == bytes(total.buffers[0])
        assert (peer.core.computed, peer.core.undone) == (3, 1)


class Trickle:
    """A request whose body comes a byte a second."""

    def __init__(self, work: Work, sizes: list[int]) -> None:
        self.peer, self.header, self.body_sizes = "s0p0", pack(work), sizes

    async def accept(self) -> list[memoryview]:
        await asyncio.sleep(1e6)
        raise AssertionError("nobody waits for so long")


async def test_a_body_that_trickles_makes_way_for_one_that_waits() -> None:
    """Attack 14: it had its place for ever, and with `max_inflight` of them the run took no step."""
    run = audit_run(stages=2, steps=2, microbatches_per_step=16)
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        server = s.peers["s1p0"].microbatches
        held = [
            asyncio.ensure_future(server._serve_work(Trickle(second(run=run.id, m=m), [8, 9])))
            for m in range(server.max_inflight)
        ]
        began = s.network.loop.now_s
        s.add_trainer("trainer")
        await s.until_next_step()
        assert s.network.loop.now_s - began < 20.0
        given_up = [task for task in held if task.done()]
        assert given_up
        for task in given_up:
            with pytest.raises(NotReady, match="came too slowly, and others wait for its place"):
                task.result()
        for task in held:
            task.cancel()


async def test_who_offers_a_microbatch_whose_body_trickles_has_it_computed() -> None:
    """Were it refused with the other, its caller would leave this peer alone, which waits for the other; and
    were it later than what a caller of the last stage waits, it would take this peer for the slow one.
    """
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        sender, server = announced(s, "sender", 0, "joining"), s.peers["s1p0"].microbatches
        slow = asyncio.ensure_future(server._serve_work(Trickle(second(), [8, 9])))
        await s.until(lambda: server.inflight == 1)
        waiting = [sender.send("s1p0", "work", second(), hidden(1.0)) for _ in range(2)]
        first, other = await asyncio.wait_for(asyncio.gather(*waiting), MIN_S)
        assert bytes(first.header) == bytes(other.header) and s.peers["s1p0"].core.computed == 1
        with pytest.raises(NotReady):
            await slow


async def test_a_body_that_comes_slowly_keeps_its_place_while_no_other_waits() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        server = s.peers["s1p0"].microbatches
        slow = asyncio.ensure_future(server._serve_work(Trickle(second(), [8, 9])))
        await s.until(lambda: s.step("s1p0").ledger.in_progress)
        assert s.step("s1p0").ledger.promised, "it may come in time"
        await asyncio.sleep(600.0)
        assert not slow.done() and server.inflight == 1
        ledger = s.step("s1p0").ledger
        assert ledger.in_progress == 1 and not ledger.promised, "nobody else waits for it"
        slow.cancel()


async def test_no_more_microbatches_are_fed_again_at_once_than_may_be_in_flight() -> None:
    """Who repeats all that are finished, as if the next stage had lost them, had all outputs held at once."""
    run, again, fed = audit_run(stages=2, steps=2, microbatches_per_step=32), asyncio.Event(), list[int]()
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        stranger, server = s.add_stranger(), s.peers["s0p0"].microbatches
        server.max_inflight = s.peers["s1p0"].microbatches.max_inflight = 32
        works = [first(run, m=m) for m in range(24)]  # of 32: the step stays open
        await asyncio.gather(*(stranger.ask("s0p0", "work", work, WorkDone, [bytes(9)]) for work in works))
        served = s.network.transports["s1p0"].handlers["work"][0]

        async def slow(request: Request) -> Answer:
            fed.append(unpack(request.header, Work).m)
            await again.wait()
            return await served(request)

        s.network.transports["s1p0"].serve("work", slow, max_body_bytes=1 << 20)
        await asyncio.sleep(0.3)
        server.max_inflight = 4
        lost = [msgspec.structs.replace(work, deepest=1) for work in works]
        asked = [
            asyncio.ensure_future(stranger.ask("s0p0", "work", work, WorkDone, [bytes(9)])) for work in lost
        ]
        await asyncio.sleep(0.5)
        assert len(fed) == MAX_AGAIN
        assert sum(isinstance(one.exception(), Busy) for one in asked if one.done()) == 24 - MAX_AGAIN
        again.set()
        await asyncio.gather(*asked, return_exceptions=True)
        for m in sorted({*range(24)}.difference(fed)):  # their turn comes
            await stranger.ask("s0p0", "work", lost[m], WorkDone, [bytes(9)])
        assert sorted(fed) == [*range(24)]


def test_a_microbatch_that_all_others_answered_in_vain_does_not_wait_for_a_peer_that_rests() -> None:
    """For a minute honest peers of three stages waited so for a tarpit that had cost too much."""
    router = Router(Backoff())
    router.set_peers(1, ["a", "b", "z"])
    router.backoff.charge("z", t=0, since_s=now_s(), now=now_s(), rounds=BUDGET_ROUNDS)
    nothing: Any = None
    stage = NextStage("run", 1, nothing, nothing, router, stages=2, on_fault=lambda fault: None)
    work = Work(run="run", t=0, m=0, version=0, deepest=1)
    stage.note_answered(Microbatch(0, 0), "a")
    assert stage._choose(work, set()) == "b"  # type: ignore
    stage.note_answered(Microbatch(0, 0), "b")
    assert stage._choose(work, set()) in ("a", "b")  # type: ignore


async def test_two_tasks_that_open_a_step_at_once_open_it_once() -> None:
    """One that takes a step, and one that joined. What was claimed between them was in no ledger."""
    async with swarm(stages=1) as s:
        await s.until_serving()
        core, opened = s.peers["s0p0"].core, list[OpenStep]()
        core.steps.pop(0).close()
        core.opened = opened.append
        await asyncio.gather(core.open_steps(), core.open_steps())
        assert opened == [core.steps[0]]


def test_to_note_who_answered_takes_no_longer_in_a_step_of_many_microbatches() -> None:
    """Each answer went through all of two steps: a trainer needed 9 s more for a step of 8192."""
    nothing: Any = None
    stage = NextStage("run", 1, nothing, nothing, Router(), stages=2, on_fault=lambda fault: None)
    began = time.process_time()
    for t, m in product(range(3), range(MAX_MICROBATCHES)):
        stage.note_answered(Microbatch(t, m), "a")
    assert time.process_time() - began < 1.0
    assert (stage.answered_by(Microbatch(0, 7)), stage.answered_by(Microbatch(1, 7))) == (set(), {"a"})


def test_one_whose_answers_did_not_count_in_two_steps_is_asked_only_if_no_other_can_be() -> None:
    """One of two that was left out took work all the same: the half of each step was computed twice."""
    router = Router(Backoff())
    router.set_peers(1, ["a", "z"])
    nothing: Any = None
    stage = NextStage("run", 1, nothing, nothing, router, stages=2, on_fault=lambda fault: None)
    router.answered(1, "a", 0.1)

    def chosen(t: int) -> str:
        return stage._choose(Work(run="run", t=t, m=9, version=t, route=("z",)), set())  # type: ignore

    for t, goes_to in ((0, "z"), (7, "a"), (8, "a")):
        for mb in (Microbatch(t, 0), Microbatch(t, 1)):  # of one step: they were in one sum
            stage.note_answered(mb, "z")
            stage.note_lacking(mb, {"z"})
        assert chosen(t) == goes_to
    stage.note_lacking(Microbatch(0, 0), {"z"})
    assert not stage.answered_by(Microbatch(0, 0)), "that was long ago"
    router.failed("a", now=now_s())
    assert chosen(8) == "z"


async def test_one_whose_answers_do_not_count_is_asked_again_after_a_minute_each_time() -> None:
    """At the sixth time it was after an hour, and of two the other one alone says that they do not count."""
    router = Router(Backoff())
    router.set_peers(1, ["a", "z"])
    nothing: Any = None
    stage = NextStage("run", 1, nothing, nothing, router, stages=2, on_fault=lambda fault: None)
    router.answered(1, "a", 0.1)
    for first_step in (0, 100):
        for t in (first_step, first_step + 1):
            stage.note_answered(Microbatch(t, 0), "z")
            stage.note_lacking(Microbatch(t, 0), {"z"})
        await asyncio.sleep(FIRST_REST_S - 1.0)
        assert stage.rather_not() == {"z"}
        await asyncio.sleep(1.0)
        assert not stage.rather_not()


def test_those_whose_answers_did_not_count_do_not_make_way_for_one_that_is_unknown() -> None:
    """It got all at once, be it a tarpit: an unknown one gets one microbatch while others can be asked."""
    router = Router(Backoff())
    router.set_peers(1, ["ann", "bob"])
    nothing: Any = None
    stage = NextStage("run", 1, nothing, nothing, router, stages=2, on_fault=lambda fault: None)
    for peer in ("ann", "bob"):
        router.answered(1, peer, 0.1)
    for t in range(2):
        for peer in ("ann", "bob"):
            stage.note_answered(Microbatch(t, 0), peer)
        stage.note_lacking(Microbatch(t, 0), {"ann", "bob"})
    router.set_peers(1, ["ann", "bob", "new"])
    works = [Work(run="run", t=2, m=m, version=2) for m in range(8)]
    assert Counter(stage._choose(work, set()) for work in works)["new"] == 1  # type: ignore
    router.answered(1, "new", 0.1)
    assert {stage._choose(work, set()) for work in works} == {"new"}  # type: ignore


def test_a_microbatch_does_not_take_a_route_that_has_failed_here() -> None:
    """A trainer that did not know sent each step's share to a tarpit by each peer of the stage before."""
    router = Router(Backoff())
    router.set_peers(1, ["a", "z"])
    router.answered(1, "a", 0.1)
    nothing: Any = None
    stage = NextStage("run", 1, nothing, nothing, router, stages=2, on_fault=lambda fault: None)
    work = Work(run="run", t=0, m=0, version=0, route=("z",))
    assert stage._choose(work, set()) == "z"  # type: ignore
    router.failed("z", now=now_s() - 60.0)
    router.answered(1, "a", 0.1)
    chosen = {stage._choose(work, set()) for _ in range(9)}  # type: ignore
    assert "a" in chosen
    router.answered(1, "z", 0.1)
    assert stage._choose(work, set()) == "z"  # type: ignore
    router.backoff.charge("z", t=0, since_s=now_s(), now=now_s(), rounds=BUDGET_ROUNDS)
    assert stage._choose(work, set()) == "a"  # type: ignore

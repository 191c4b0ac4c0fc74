"""Attack 18, in sums: an owner that adds wrongly, tells members different things, or a member that lies about
what it sent. Found in the same round, shown to others, left out; the result is as if it had not been there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from peers.audit import sum_check
from peers.audit import sums as audits
from peers.audit.sum_check import SumCheck
from peers.events import Stepped, Trouble
from peers.ports import Answer, Request
from peers.sim.loop import run_virtual
from peers.stage.server import StagePeer
from swarm.audit.projection import MODULUS
from swarm.digest import digest_of
from swarm.errors import BadAnswer, Refused
from swarm.manifest import Run, audit_run
from swarm.protocol.statements import sign
from swarm.protocol.sums import PartProof, Projected, Reduced, nth_sum
from swarm.wire.evidence import Reveal, Revealed
from swarm.wire.messages import PartDone, pack, unpack
from tests.peers.alone import Line
from tests.peers.loops import Swarm, swarm
from tests.seeds import cases, some

pytestmark = pytest.mark.virtual_time

TRAINER = "12D3KooW" + "t" * 44
LIAR = "s1p1"
STEPS = 3


def checked_run(**changes: int) -> Run:
    run = audit_run(stages=2, steps=STEPS, microbatches_per_step=8)
    return replace(run, dtype="float32", admission=replace(run.admission, trainers=(TRAINER,)), **changes)


def rounding(run: Run) -> Run:
    """The same run, whose gradients are rounded."""
    return replace(run, codec=replace(run.codec, reduce="rounded16"))


async def play(
    lie: Callable[[Swarm, StagePeer], None] | None, *, replicas: int = 3, run: Run | None = None
) -> tuple[Swarm, float]:
    """Run to the end beside a liar; the swarm, and how long it took, s."""
    async with swarm(run or checked_run(), replicas=replicas) as s:
        await s.until_serving()
        if lie is not None:
            lie(s, s.peers[LIAR])
        s.add_trainer(TRAINER)
        began = s.network.loop.now_s
        honest = [name for name in s.peers if name != LIAR or lie is None]
        await s.until(lambda: all(s.peers[n].core.version >= STEPS for n in honest), limit_s=120.0)
        took_s = s.network.loop.now_s - began
        await asyncio.sleep(1.0)  # a step is told of a moment after it was taken
        counts = s.count_matrix()
        assert all((counts[name] == STEPS).all() for name in honest), s.story()
        return s, took_s


def convicted(s: Swarm) -> dict[str, set[str]]:
    """Whom each peer has convicted."""
    return {name: set(peer.convictions.convicted) for name, peer in s.peers.items()}


def assert_only_the_liar_is_left_out(s: Swarm) -> None:
    found = convicted(s)
    mates = [name for name, peer in s.peers.items() if peer.stage == 1 and name != LIAR]
    assert all(found[name] == {LIAR} for name in mates), found
    assert all(who <= {LIAR} for name, who in found.items() if name != LIAR), found


def value(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Swarm, StagePeer], None]:
    """An owner whose results are changed."""

    def lie(s: Swarm, liar: StagePeer) -> None:
        reducer = liar.actions._all_reduce  # type: ignore
        honest = reducer._answer  # type: ignore
        reducer._answer = lambda total: change(honest(total))

    return lie


def one_more(result: torch.Tensor) -> torch.Tensor:
    result[-1] += 0.01
    return result


def one_huge(result: torch.Tensor) -> torch.Tensor:
    """So large that its rounding alone is more than products modulo 2^64 can tell."""
    result[-1] = 1e15
    return result


CHANGES: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("sign flip", torch.neg),
    ("zero", torch.zeros_like),
    ("times 100", lambda result: result * 100),
]


@pytest.fixture(scope="module")
def honest_s() -> float:
    """How long a run takes without a liar."""
    return run_virtual(play(None))[1]


@pytest.mark.parametrize(
    ("name", "change"),
    cases(
        [*CHANGES, ("a hundredth in one element", one_more)],
        name="{0}",
        quick=lambda name, _: name in ("sign flip", "a hundredth in one element"),
    ),
)
async def test_an_owner_that_adds_wrongly_is_found_in_the_same_round(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], honest_s: float
) -> None:
    s, took_s = await play(value(change))
    assert_only_the_liar_is_left_out(s)
    assert took_s - honest_s < 10.0
    texts = [event.text for event in s.seen(Trouble)]
    assert f"peer {LIAR} is left out: its signed reduced of step 0 is false" in texts


@pytest.mark.parametrize(
    ("name", "change"),
    cases(
        [*CHANGES, ("the least there is", lambda result: result + 1)],
        name="{0}",
        quick=lambda name, _: name == "the least there is",
    ),
)
async def test_an_owner_that_adds_rounded_sums_wrongly_is_found_whatever_it_adds(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    s, _ = await play(value(change), run=rounding(checked_run()))
    assert_only_the_liar_is_left_out(s)


async def test_a_lie_too_large_for_products_is_found_without_a_spot_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def finds_nothing(*_: object) -> bool:
        return False

    monkeypatch.setattr(audits.SumAudits, "_spot_check", finds_nothing)
    s, _ = await play(value(one_huge))
    assert_only_the_liar_is_left_out(s)


async def test_a_result_of_which_no_product_is_sure_is_computed_again_and_accuses_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of honest sums that are very large."""
    monkeypatch.setattr(sum_check, "fits", lambda *_: False)
    s, _ = await play(None)
    assert not any(convicted(s).values())
    assert not s.seen(Trouble) and not s.voids()


@pytest.mark.parametrize("shorter", [0, 1])
async def test_a_member_shows_no_less_than_its_chunk(shorter: int) -> None:
    """It may have signed the digest of less: the sum would look wrong, and its owner like a liar."""
    chunk, parts = torch.arange(4 - shorter), (((0, 4),),)
    digests = sum_check.chunk_digests(chunk, [(0, len(chunk))])
    said = SimpleNamespace(contributions=[SimpleNamespace(chunks=digest_of(digests))])
    check: Any = SimpleNamespace(
        plan=SimpleNamespace(members=["me"]), reduced=[[said]], parts=parts, digests=[digests],
        contributes=lambda _: True, chunk=lambda *_: chunk,
    )  # fmt: skip
    line: Any = Line("me")
    sums = audits.SumAudits(audit_run(stages=1), 0, line, SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(BadAnswer, match="does not show the contribution") if shorter else nullcontext():
        assert (await sums.shown(check, 0, 0, 0))[0] == digests


@pytest.mark.parametrize("terms", [lambda run: run, rounding], ids=["exact", "rounded"])
async def test_without_a_liar_nobody_is_accused_and_each_round_is_checked(
    terms: Callable[[Run], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audits, "SPOT_CHECKS", 1.0)
    s, _ = await play(None, run=terms(checked_run()))
    assert not any(convicted(s).values())
    assert not s.seen(Trouble) and not s.voids()
    assert len(s.seen(Stepped)) == STEPS * len(s.peers)


def answers(liar: StagePeer, method: str, change: Callable[[Request, Answer], Answer]) -> None:
    """Change what a liar answers."""
    transport = liar.core.transport
    honest, limit = transport.handlers[method]  # type: ignore[attr-defined]

    async def serve(request: Request) -> Answer:
        return change(request, await honest(request))

    transport.serve(method, serve, max_body_bytes=limit)


def checks(liar: StagePeer) -> SumCheck:
    """Of the liar's newest round."""
    reducer = liar.actions._all_reduce  # type: ignore
    assert reducer._audits is not None  # type: ignore
    return list(reducer._audits._checks.values())[-1]  # type: ignore


def resigned(s: Swarm, check: SumCheck, done: PartDone, body: list[bytes]) -> Answer:
    """An owner's last answer, of a part of one chunk, with another result that it signs as well."""
    assert done.proof is not None
    reduced = Reduced(1, check.t, check.plan.round, done.proof.contributions, done.proof.chunks)
    signer = s.network.peers[LIAR].transport.signer
    proof = msgspec.structs.replace(done.proof, signature=sign(signer, s.run.id, reduced))
    return Answer(pack(msgspec.structs.replace(done, proof=proof)), body)


async def test_an_owner_that_gives_members_different_results_is_found_by_those_that_it_lied_to() -> None:
    def lie(s: Swarm, liar: StagePeer) -> None:
        def change(request: Request, answer: Answer) -> Answer:
            done = unpack(answer.header, PartDone)
            if request.peer != "s1p0" or done.proof is None:
                return answer
            body = [bytes(len(buffer)) for buffer in answer.body]
            chunks = digest_of(body[0])
            other = msgspec.structs.replace(done, proof=msgspec.structs.replace(done.proof, chunks=chunks))
            return resigned(s, checks(liar), other, body)

        answers(liar, "part", change)

    s, _ = await play(lie)
    assert_only_the_liar_is_left_out(s)


async def test_an_owner_that_names_a_contribution_that_nobody_sent_is_found() -> None:
    """Else it could blame a member for what it added."""

    def lie(s: Swarm, liar: StagePeer) -> None:
        def change(request: Request, answer: Answer) -> Answer:
            done = unpack(answer.header, PartDone)
            if done.proof is None:
                return answer
            first, *rest = done.proof.contributions
            forged = msgspec.structs.replace(first, chunks=bytes(32))
            other = msgspec.structs.replace(done.proof, contributions=(forged, *rest))
            return resigned(s, checks(liar), msgspec.structs.replace(done, proof=other), list(answer.body))

        answers(liar, "part", change)

    s, _ = await play(lie)
    assert convicted(s)["s1p0"] == {LIAR}  # the first member, in whose name it lied
    assert_only_the_liar_is_left_out(s)


async def test_a_member_that_lies_about_its_product_is_found_and_no_owner_is_accused() -> None:
    def lie(s: Swarm, liar: StagePeer) -> None:
        def change(request: Request, answer: Answer) -> Answer:
            revealed, check = unpack(answer.header, Revealed), checks(liar)
            told = revealed.said.get(LIAR)
            if told is None:
                return answer
            sums = tuple(
                (((nth_sum(one, 0) or 0) + 3 & MODULUS - 1) ^ 1 << 50).to_bytes(8, "little") if one else one
                for one in told.sums
            )
            said = Projected(1, check.t, check.plan.round, told.nonces, told.contributions, sums)
            signature = sign(s.network.peers[LIAR].transport.signer, s.run.id, said)
            lie = msgspec.structs.replace(told, sums=sums, signature=signature)
            return Answer(pack(msgspec.structs.replace(revealed, said={LIAR: lie})))

        answers(liar, "reveal", change)

    s, _ = await play(lie)
    assert_only_the_liar_is_left_out(s)


async def test_a_contribution_that_was_not_signed_is_not_added() -> None:
    """The round ends; nothing is added that its member could deny."""

    def lie(s: Swarm, liar: StagePeer) -> None:
        left = 2

        def forge(self: SumCheck, place: int, honest: Callable[[int], PartProof]) -> PartProof:
            nonlocal left
            left -= 1
            proof = honest(place)
            return msgspec.structs.replace(proof, chunks=bytes(32)) if left >= 0 else proof

        reducer = liar.actions._all_reduce  # type: ignore
        audit = reducer._audits  # type: ignore
        assert audit is not None
        opened = audit.open

        def open_(*args: object) -> SumCheck | None:
            check = opened(*args)  # type: ignore[arg-type]
            if check is not None:
                honest = check.proof
                check.proof = lambda place: forge(check, place, honest)  # type: ignore[method-assign]
            return check

        audit.open = open_  # type: ignore[method-assign]

    s, _ = await play(lie)
    assert not any(convicted(s).values())
    assert any("whose signature is not its member's" in why for why in s.voids()), s.voids()


async def test_a_contribution_that_is_not_the_one_that_was_signed_is_not_added() -> None:
    """Else its member could have an honest owner convicted: of a sum that is not that of what it signed."""

    def lie(s: Swarm, liar: StagePeer) -> None:
        transport = liar.core.transport
        honest, left = transport.call, [2]

        async def call(peer: str, method: str, header: bytes, body: Any = (), **limits: Any) -> Answer:
            if method == "part" and body and left[0]:
                left[0] -= 1
                body = [bytes(memoryview(body[0]).nbytes), b""]
            return await honest(peer, method, header, body, **limits)

        transport.call = call  # type: ignore[method-assign]

    s, _ = await play(lie)
    assert not any(convicted(s).values())
    assert any("not the one that was signed" in why for why in s.voids()), s.voids()


@pytest.mark.parametrize(
    "other", some([b"", b"another nonce"], quick=[b"another nonce"]), ids=["none", "another than was sealed"]
)
async def test_a_member_that_reveals_no_nonce_or_another_has_no_honest_one_accused(
    other: bytes,
) -> None:
    def lie(s: Swarm, liar: StagePeer) -> None:
        transport = liar.core.transport
        honest, left = transport.call, [2]

        async def call(peer: str, method: str, header: bytes, *args: object, **limits: object) -> Answer:
            if method == "reveal" and left[0]:
                left[0] -= 1
                if not other:
                    raise Refused("not revealed")
                reveal = unpack(header, Reveal)
                nonces = tuple(other for _ in reveal.nonces)
                header = pack(msgspec.structs.replace(reveal, nonces=nonces))
            return await honest(peer, method, header, *args, **limits)  # type: ignore[arg-type]

        transport.call = call  # type: ignore[method-assign]

    s, _ = await play(lie)
    assert not any(convicted(s).values())
    assert not other or not s.voids(), s.voids()  # the true one is heard when it answers
    assert other or any("not revealed" in why for why in s.voids()), s.voids()

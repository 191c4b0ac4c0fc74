"""The check of a round, as one member sees it."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import pytest
import torch

from peers.audit.sum_check import SumCheck
from peers.audit.sums import Withheld
from peers.sim.network import SimSigner
from swarm.errors import BadAnswer, Refused
from swarm.protocol.ledger import Bitmap
from swarm.protocol.rounds import Plan
from swarm.protocol.statements import sign
from swarm.protocol.sums import Reduced, ReducedProof
from swarm.wire.codec import chunk_digest

MEMBERS = ("ann", "bob", "cid")
PLAN = Plan("r", 0, MEMBERS, (Bitmap(1), Bitmap(2), Bitmap(4)), (8, 0, 0))
ONE, TWO = [[(0, 8)], [], []], [[(0, 4), (4, 4)], [], []]
"""The vector in one chunk and in two, all of it of ann."""


class Round(NamedTuple):
    ann: SumCheck
    """The owner of the vector."""
    bob: SumCheck
    cid: SumCheck


def check_of(
    member: str, total: torch.Tensor | None = None, parts: list[list[tuple[int, int]]] = ONE
) -> SumCheck:
    """Of a member that has committed to its sum."""
    check = SumCheck("run", 1, SimSigner(member), PLAN, 0, parts, torch.arange(8) if total is None else total)
    check.commit()
    return check


def summed(*, agreed: bool = True) -> Round:
    """The sums of all members are added, and each has the result."""
    totals = {name: torch.arange(8) + n for n, name in enumerate(MEMBERS)}
    found = Round(*(check_of(member, totals[member]) for member in MEMBERS))
    for check, member in zip(found, MEMBERS, strict=True):
        if check is not found.ann:
            found.ann.take(member, 0, check.proof(0), totals[member])
    proof = found.ann.made(0, torch.stack([*totals.values()]).sum(0))
    for check in found:
        if check is not found.ann:
            check.came(0, proof)
        if agreed:
            check.agree()
        check.reveal()
    assert chunk_digest(totals["ann"]) == found.ann.digests[0]
    return found


async def test_a_nonce_that_is_passed_on_counts_if_it_is_the_one_that_was_sealed() -> None:
    ann, bob, cid = summed()
    made_up = tuple(secrets.token_bytes(16) for _ in MEMBERS)
    ann.unseal("bob", (b"", bob.known_nonces()[1], made_up[2]))
    assert ann.known_nonces()[2] == b"" and not ann.unsealed.is_set()
    ann.unseal("bob", (b"", b"", cid.known_nonces()[2]))
    assert ann.unsealed.is_set() and len({*ann.known_nonces()}) == 3


async def test_a_nonce_that_came_before_its_seal_is_checked_when_that_is_here() -> None:
    ann, bob, cid = summed(agreed=False)
    ann.unseal("bob", bob.known_nonces())
    ann.unseal("cid", (b"", b"", bytes(16)))
    assert not ann.unsealed.is_set()
    ann.agree()
    assert ann.known_nonces()[1:] == (bob.known_nonces()[1], b"") and not ann.unsealed.is_set()
    ann.unseal("bob", cid.known_nonces())
    assert ann.unsealed.is_set()


async def test_products_that_are_passed_on_are_those_that_their_member_signed() -> None:
    ann, bob, cid = checks = summed()
    nonces = all_nonces(checks)
    said = {name: check.project(nonces) for name, check in zip(MEMBERS, (ann, bob, cid), strict=True)}
    with pytest.raises(BadAnswer, match="bob: signed its products"):
        ann.hear("cid", said["bob"], by="bob")
    ann.note("ann", said["ann"])
    ann.hear("bob", said["bob"], by="bob")
    assert ann.lacking() == ("cid",) and not ann.heard.is_set()
    ann.hear("cid", said["cid"], by="bob")
    assert ann.heard.is_set()


async def test_a_member_that_hears_no_nonce_of_any_other_blames_none() -> None:
    """Perhaps it is the one that is slow, and they lack what it has to give."""
    ann, bob, cid = summed()
    assert Withheld(ann).nonces == [] and str(Withheld(ann)) == "the nonces of bob, cid did not come in time"
    ann.unseal("bob", bob.known_nonces())
    assert Withheld(ann).nonces == ["cid"] and Withheld(ann).products == []
    ann.unseal("cid", cid.known_nonces())
    ann.note("ann", ann.project(ann.known_nonces()))
    assert Withheld(ann).products == ["bob", "cid"]


def all_nonces(checks: Round) -> tuple[bytes, ...]:
    """Revealed to all."""
    for check in checks:
        for other, name in zip(checks, MEMBERS, strict=True):
            check.unseal(name, other.known_nonces())
    return checks.ann.known_nonces()


async def test_an_owner_takes_what_a_member_signed_once_for_all_of_its_chunks() -> None:
    ann, bob = check_of("ann", parts=TWO), check_of("bob", parts=TWO)
    with pytest.raises(Refused, match="signed, and this contribution is not"):
        ann.take("bob", 0, None, bob.chunk(0, 0))
    with pytest.raises(Refused, match="with 32 bytes of digests; it has 2 chunks"):
        ann.take("bob", 0, check_of("bob").proof(0), None)
    with pytest.raises(Refused, match="signature is not its member's"):
        ann.take("cid", 0, bob.proof(0), None)
    with pytest.raises(Refused, match="not the one that was signed"):
        ann.take("bob", 0, bob.proof(0), bob.chunk(0, 1))
    ann.take("bob", 0, bob.proof(0), bob.chunk(0, 0))
    with pytest.raises(Refused, match="not signed as its other chunks were"):
        ann.take("bob", 1, check_of("bob", parts=TWO).proof(0), bob.chunk(0, 1))


async def test_an_owner_signs_its_results_itself_and_of_all_members() -> None:
    ann, bob, _ = summed(agreed=False)
    (result, signature), newcomer = ann.reduced[0], check_of("bob")
    with pytest.raises(BadAnswer, match="ann: did not sign its results"):
        newcomer.agree()
    forged = sign(SimSigner("bob"), "run", result)
    with pytest.raises(BadAnswer, match="ann: signed its results with another key"):
        newcomer.came(0, ReducedProof(result.contributions, result.chunks, forged))
    fewer = Reduced(1, 0, "r", result.contributions[:2], result.chunks)
    with pytest.raises(BadAnswer, match="ann: signed results of other members' contributions"):
        newcomer.came(0, ReducedProof(fewer.contributions, fewer.chunks, sign(ann._signer, "run", fewer)))
    none = Reduced(1, 0, "r", result.contributions, b"")
    newcomer.came(0, ReducedProof(none.contributions, b"", sign(ann._signer, "run", none)))
    with pytest.raises(BadAnswer, match="ann: did not sign its results"):
        newcomer.agree()
    newcomer.came(0, ReducedProof(result.contributions, result.chunks, signature))
    newcomer.agree()
    assert newcomer.forger() == 0, "it began the round again, so ann took another contribution of it"
    assert bob.forger() is None


async def test_a_member_that_seals_two_nonces_in_a_round_ends_it_and_no_owner_is_blamed() -> None:
    parts = [[(0, 4)], [(4, 4)], []]
    ann, bob, cid, again = (check_of(name, parts=parts) for name in ("ann", "bob", "cid", "cid"))
    for place, (owner, others) in enumerate(
        ((ann, {"bob": bob, "cid": cid}), (bob, {"ann": ann, "cid": again}))
    ):
        for name, other in others.items():
            owner.take(name, 0, other.proof(place), None)
        proof = owner.made(0, torch.arange(4))
        for check in (ann, bob):
            check.came(place, proof)
    with pytest.raises(Refused, match="cid sealed two nonces"):
        ann.agree()


async def test_products_are_of_the_chunks_the_nonces_and_the_sums_that_were_agreed_on() -> None:
    ann, bob, cid = checks = summed()
    nonces = all_nonces(checks)
    with pytest.raises(BadAnswer, match="bob: says that other nonces were revealed"):
        ann.hear("bob", bob.project((*nonces[:2], bytes(16))), by="bob")
    with pytest.raises(BadAnswer, match="bob: answered products of other chunks"):
        ann.hear("bob", check_of("bob", torch.arange(8) + 1, TWO).project(nonces), by="bob")
    another = check_of("bob", torch.arange(8) + 5).project(nonces)
    with pytest.raises(BadAnswer, match="bob: says that it sent another sum to ann"):
        ann.hear("bob", another, by="bob")
    with pytest.raises(Refused, match="bob says that it sent another sum to ann"):
        cid.hear("bob", another, by="bob")  # or ann lies
    assert ann.lacking() == MEMBERS

"""The check of a round, as one member sees it."""

from __future__ import annotations

import secrets
from typing import NamedTuple

import pytest
import torch

from peers.audit.sum_check import SumCheck
from peers.audit.sums import Withheld
from peers.sim.network import SimSigner
from swarm.errors import BadAnswer
from swarm.protocol.ledger import Bitmap
from swarm.protocol.rounds import Plan
from swarm.wire.codec import chunk_digest

MEMBERS = ("ann", "bob", "cid")
PLAN = Plan("r", 0, MEMBERS, (Bitmap(1), Bitmap(2), Bitmap(4)), (8, 0, 0))


class Round(NamedTuple):
    ann: SumCheck
    """The owner of the vector."""
    bob: SumCheck
    cid: SumCheck


def summed(*, agreed: bool = True) -> Round:
    """The sums of all members are added, and each has the result."""
    totals = {name: torch.arange(8) + n for n, name in enumerate(MEMBERS)}
    parts = [[(0, 8)], [], []]
    found = Round(*(SumCheck("run", 1, SimSigner(m), PLAN, 0, parts, totals[m]) for m in MEMBERS))
    for check, member in zip(found, MEMBERS, strict=True):
        check.commit()
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
    ann, bob, cid = summed()
    for check in (ann, bob, cid):
        for other, name in zip((ann, bob, cid), MEMBERS, strict=True):
            check.unseal(name, other.known_nonces())
    nonces = ann.known_nonces()
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

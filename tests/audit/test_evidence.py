"""No evidence is made against an honest peer, whatever is made of what it signed; and each lie is shown."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import torch

from peers.sim.network import SimSigner
from swarm.audit.evidence import numbers, proves
from swarm.audit.projection import coefficients, product, reduced_of
from swarm.digest import digest_of
from swarm.manifest import Run, audit_run
from swarm.protocol.statements import sign
from swarm.protocol.sums import (
    SUM_BYTES,
    Contribution,
    Projected,
    Reduced,
    contributed,
    seed_of,
)
from swarm.wire.buffers import Buffer
from swarm.wire.codec import chunk_digest
from swarm.wire.evidence import Evidence, FalseContribution, ShowEvidence, WrongProduct, WrongSum
from swarm.wire.messages import pack, unpack

RUN = replace(audit_run(), dtype="float32")
MEMBERS = ("a", "b", "c")
SIGNERS = {name: SimSigner(name) for name in MEMBERS}
CHUNKS, NUMEL = 2, 5


@dataclass
class Round:
    """One round of three honest members, of whom each owns a part of two chunks; c has computed nothing."""

    seed: int
    run: Run = RUN
    chunks: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)
    """By member, owner's place and index."""
    lists: dict[tuple[str, int], bytes] = field(default_factory=dict)
    reduced: list[WrongSum] = field(default_factory=list)
    projected: list[WrongProduct] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        for name in MEMBERS:
            for place in range(3):
                found = b""
                for index in range(CHUNKS if name != "c" else 0):
                    chunk = torch.from_numpy(rng.integers(-(2**50), 2**50, NUMEL))
                    self.chunks[name, place, index] = chunk
                    found += chunk_digest(chunk)
                self.lists[name, place] = found
        self.nonces = tuple(name.encode() * 16 for name in MEMBERS)
        self.reduced = [self._reduced(place, owner) for place, owner in enumerate(MEMBERS)]
        self.projected = [self._projected(name) for name in MEMBERS]

    def _reduced(self, place: int, owner: str) -> WrongSum:
        said = []
        for name in MEMBERS:
            one = Contribution(
                name, digest_of(self.lists[name, place]), digest_of(self.nonces[MEMBERS.index(name)]), b""
            )
            signature = sign(SIGNERS[name], self.run.id, contributed(1, 4, "round", owner, one))
            said.append(msgspec.structs.replace(one, signature=signature))
        results = [
            reduced_of([self.chunks[name, place, index] for name in "ab"], rounded=self.run.rounds_sums)
            for index in range(CHUNKS)
        ]
        statement = Reduced(1, 4, "round", tuple(said), b"".join(map(chunk_digest, results)))
        signature = sign(SIGNERS[owner], self.run.id, statement)
        return WrongSum(
            accused=owner, statement=statement, signature=signature, index=0,
            lists=tuple(self.lists[name, place] for name in MEMBERS),
        )  # fmt: skip

    def _projected(self, name: str) -> WrongProduct:
        seed, sums = seed_of(self.nonces), []
        for place in range(3):
            there = [i for i in range(CHUNKS) if (name, place, i) in self.chunks]
            found = [product(self.chunks[name, place, i], coefficients(seed, place, i, NUMEL)) for i in there]
            sums.append(b"".join(one.to_bytes(SUM_BYTES, "little") for one in found))
        lists = tuple(digest_of(self.lists[name, place]) for place in range(3))
        statement = Projected(1, 4, "round", self.nonces, lists, tuple(sums))
        return WrongProduct(
            accused=name, statement=statement, signature=sign(SIGNERS[name], self.run.id, statement), place=0,
            index=0, digests=self.lists[name, 0],
        )  # fmt: skip

    def body(self, place: int, index: int, names: str = "ab") -> list[Buffer]:
        return [bytes(self.chunks[name, place, index].numpy().data.cast("B")) for name in names]


def shown(evidence: Evidence, body: list[Buffer], run: Run = RUN) -> bool:
    """Whether a peer that got it believes it."""
    came = unpack(pack(ShowEvidence(run=run.id, evidence=evidence)), ShowEvidence)
    return proves(SIGNERS["a"], run, came.evidence, body)


def test_what_honest_members_signed_accuses_none_of_them() -> None:
    told = Round(1)
    for place in range(3):
        for index in range(CHUNKS):
            fair = msgspec.structs.replace(told.reduced[place], index=index)
            assert not shown(fair, told.body(place, index))
            for name in "ab":
                one = msgspec.structs.replace(
                    told.projected[MEMBERS.index(name)], place=place, index=index,
                    digests=told.lists[name, place],
                )  # fmt: skip
                assert not shown(one, told.body(place, index, name))
        for number in range(-1, 4):
            forged = FalseContribution(
                accused=MEMBERS[place], statement=told.reduced[place].statement,
                signature=told.reduced[place].signature, place=number,
            )  # fmt: skip
            assert not shown(forged, [])


def test_nothing_that_is_made_of_it_does_either() -> None:
    """Other places, chunks, lists, bytes and signatures, 20,000 of them, all of two rounds."""
    dice = random.Random(1)
    rounds = [Round(1), Round(2)]
    blobs = [bytes(c.numpy().data.cast("B")) for told in rounds for c in told.chunks.values()]
    blobs += [b"", bytes(40), bytes(7), bytes(range(8))]
    lists = [one for told in rounds for one in told.lists.values()] + [b"", bytes(64)]

    def changed(evidence: Any) -> Any:
        fields: dict[str, Any] = {}
        if dice.random() < 0.5:
            fields["index"] = dice.choice((-1, 0, 1, 2, 1 << 40))
        if hasattr(evidence, "lists"):
            if dice.random() < 0.5:
                fields["lists"] = tuple(dice.choices(lists, k=dice.choice((2, 3, 3, 3, 4))))
        else:
            fields["place"] = dice.choice((-1, 0, 1, 2, 3))
            fields["digests"] = dice.choice(lists)
        if dice.random() < 0.1:
            fields["accused"] = dice.choice(MEMBERS)
        return msgspec.structs.replace(evidence, **fields)

    for _ in range(20_000):
        told = dice.choice(rounds)
        evidence = changed(dice.choice([*told.reduced, *told.projected]))
        if dice.random() < 0.5:
            body = told.body(dice.randrange(3), dice.randrange(CHUNKS), dice.choice(("ab", "ba", "a", "b")))
        else:
            body = dice.choices(blobs, k=dice.randrange(4))
        assert not shown(evidence, body), (evidence, body)


def test_a_wrong_sum_a_wrong_product_and_a_forged_contribution_are_shown() -> None:
    told = Round(3)
    fair = told.reduced[0]
    lie = msgspec.structs.replace(fair.statement, chunks=bytes(64))
    wrong = msgspec.structs.replace(fair, statement=lie, signature=sign(SIGNERS["a"], RUN.id, lie))
    assert shown(wrong, told.body(0, 0))
    assert not shown(msgspec.structs.replace(wrong, accused="b"), told.body(0, 0))  # it did not sign that
    assert not shown(wrong, told.body(0, 0)[:1])
    assert not proves(SIGNERS["a"], audit_run(), wrong, told.body(0, 0))  # sums that are not exact

    product_ = told.projected[1]
    said = msgspec.structs.replace(product_.statement, sums=(bytes(16),) * 3)
    wrong_product = msgspec.structs.replace(
        product_, statement=said, signature=sign(SIGNERS["b"], RUN.id, said)
    )
    assert shown(wrong_product, told.body(0, 0, "b"))
    assert not shown(wrong_product, told.body(0, 0, "a"))

    first, *rest = fair.statement.contributions
    forged = msgspec.structs.replace(first, chunks=bytes(32))
    named = msgspec.structs.replace(fair.statement, contributions=(forged, *rest))
    evidence = FalseContribution(
        accused="a", statement=named, signature=sign(SIGNERS["a"], RUN.id, named), place=0
    )
    assert shown(evidence, [])
    assert not shown(msgspec.structs.replace(evidence, place=1), [])


def test_a_rounded_sum_is_shown_to_be_wrong_if_it_is_one_off() -> None:
    run = replace(RUN, codec=replace(RUN.codec, reduce="rounded16"))
    told = Round(3, run)
    fair = told.reduced[0]
    assert not shown(fair, told.body(0, 0), run)
    result = told.chunks["a", 0, 0] + told.chunks["b", 0, 0]
    for wrong in (result + 1, result.double().float(), result * 2):
        chunks = chunk_digest(wrong) + fair.statement.chunks[len(chunk_digest(wrong)) :]
        lie = msgspec.structs.replace(fair.statement, chunks=chunks)
        evidence = msgspec.structs.replace(fair, statement=lie, signature=sign(SIGNERS["a"], run.id, lie))
        assert shown(evidence, told.body(0, 0), run)


def test_numbers_travel_as_whole_numbers_of_eight_bytes() -> None:
    assert numbers(b"") is None and numbers(bytes(9)) is None
    assert numbers(bytes(range(8))).tolist() == [0x0706050403020100]  # type: ignore[union-attr]

"""One round as one member checks it: what it signs of its sum, and whether what the others say fits.

No IO, but that hashes and products take a while: `commit` and `project` are run in threads.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping, Sequence

import torch
from msgspec.structs import replace

from swarm.audit.projection import MODULUS, coefficients, fits, product
from swarm.audit.screen import SAMPLE
from swarm.digest import DIGEST_BYTES, digest_of
from swarm.errors import BadAnswer, Refused
from swarm.ids import PeerId, Stage
from swarm.protocol.rounds import Plan
from swarm.protocol.statements import Coin, Signer, is_signed, sign
from swarm.protocol.sums import (
    NONCE_BYTES,
    SUM_BYTES,
    Contribution,
    PartProof,
    Projected,
    Reduced,
    ReducedProof,
    contributed,
    nth_digest,
    nth_sum,
    seed_of,
)
from swarm.wire.codec import chunk_digest
from swarm.wire.evidence import Projecting

Chunks = Sequence[tuple[int, int]]
"""(first element, elements) of each chunk of a part."""


class SumCheck:
    """A member's side of one round."""

    def __init__(
        self, run: str, stage: Stage, signer: Signer, plan: Plan, t: int, parts: Sequence[Chunks],
        total: torch.Tensor,
    ) -> None:  # fmt: skip
        """`parts`: the chunks of each owner; `total`: this member's sum, int64, host, read only."""
        self._run, self._stage, self._signer = run, stage, signer
        self.plan, self.t, self.parts = plan, t, parts
        self._me = plan.members.index(signer.peer_id)
        self._total = total
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self.digests: list[bytes] = []
        """Of this member's contribution to each part, once it has committed."""
        self._signed: list[Contribution] = []
        self._taken: dict[PeerId, tuple[PartProof, Contribution]] = {}
        """As an owner: what each member contributes."""
        self._samples: dict[PeerId, list[torch.Tensor]] = {}
        """As an owner: some elements of each contribution."""
        self._made: dict[int, bytes] = {}
        """As an owner: digests of the results, by chunk."""
        self.reduced: dict[int, tuple[Reduced, bytes]] = {}
        """What the owners signed."""
        self._seals: dict[PeerId, bytes] = {}
        """Of the nonces: one for each member, in all that the owners signed; empty before all have."""
        self.nonces: dict[PeerId, bytes] = {}
        self.unsealed = asyncio.Event()
        """All nonces are here."""
        self.projected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """This member has said its products."""
        self._said: dict[PeerId, Projecting] = {}
        """What the members signed of their products."""
        self.heard = asyncio.Event()
        """All products are here."""
        self.limit_s = math.inf
        """For whatever another member has to say."""
        self.unchecked: torch.Tensor | None = None
        """All that the owners answered: from when this member says its products until it has compared."""

    def contributes(self, place: int) -> bool:
        """Whether the ledger of a member is not empty."""
        return bool(self.plan.ledgers[place])

    def chunk(self, place: int, index: int) -> torch.Tensor:
        """This member's sum, as far as the chunk goes."""
        start, numel = self.parts[place][index]
        return self._total[start : start + numel]

    # -- the contribution ---------------------------------------------------------------------------

    def commit(self) -> None:
        """Hash this member's sum, and sign it: 4.5 ms for each million weights. In any thread."""
        seal = digest_of(self._nonce)
        for place, owner in enumerate(self.plan.members):
            there = self.parts[place] if self.contributes(self._me) else ()
            digests = chunk_digests(self._total, there)
            unsigned = Contribution(self._signer.peer_id, digest_of(digests), seal, b"")
            statement = contributed(self._stage, self.t, self.plan.round, owner, unsigned)
            signature = sign(self._signer, self._run, statement)
            self.digests.append(digests)
            self._signed.append(Contribution(unsigned.member, unsigned.chunks, seal, signature))
        self._taken[self._signer.peer_id] = (self.proof(self._me), self._signed[self._me])

    def proof(self, place: int) -> PartProof:
        """What goes with each chunk to the owner at `place`."""
        signed = self._signed[place]
        return PartProof(self.digests[place], signed.seal, signed.signature)

    # -- an owner -----------------------------------------------------------------------------------

    def take(self, member: PeerId, index: int, proof: PartProof | None, chunk: torch.Tensor | None) -> None:
        """Check a chunk of a contribution to this member's part; None: nothing is contributed.

        Raises:
            Refused: it is not what its member signed.
        """
        if proof is None:
            raise Refused("the sums of this run are signed, and this contribution is not")
        known = self._taken.get(member)
        if known is None:
            known = self._taken[member] = (proof, self._check_contribution(member, proof))
        if known[0] != proof:
            raise Refused("this contribution is not signed as its other chunks were")
        if chunk is not None and chunk_digest(chunk) != nth_digest(proof.chunks, index):
            raise Refused("a chunk of a contribution is not the one that was signed")

    def _check_contribution(self, member: PeerId, proof: PartProof) -> Contribution:
        there = len(self.parts[self._me]) if self.contributes(self.plan.members.index(member)) else 0
        said = Contribution(member, digest_of(proof.chunks), proof.seal, proof.signature)
        statement = contributed(self._stage, self.t, self.plan.round, self._signer.peer_id, said)
        if len(proof.chunks) != there * DIGEST_BYTES or len(proof.seal) != DIGEST_BYTES:
            raise Refused(f"a contribution with {len(proof.chunks)} bytes of digests; it has {there} chunks")
        if not is_signed(self._signer, member, self._run, statement, proof.signature):
            raise Refused("a contribution whose signature is not its member's")
        return said

    def sample(self, contributions: Mapping[PeerId, torch.Tensor | None]) -> None:
        """Note what the members contribute to a chunk of this owner."""
        for member, part in contributions.items():
            if part is not None:
                self._samples.setdefault(member, []).append(part[:SAMPLE].clone())

    def samples(self) -> dict[PeerId, torch.Tensor]:
        """The same elements of the sum of each member that contributes, as far as this one owns them."""
        return {member: torch.cat(parts) for member, parts in sorted(self._samples.items())}

    def counts(self) -> dict[PeerId, int]:
        """How many microbatches are in the sum of each member."""
        return {m: b.bit_count() for m, b in zip(self.plan.members, self.plan.ledgers, strict=True)}

    def made(self, index: int, result: torch.Tensor) -> ReducedProof | None:
        """Note a result of this owner; of the last one, return what goes with it."""
        self._made[index] = chunk_digest(result)
        if len(self._made) < len(self.parts[self._me]):
            return None
        contributions = tuple(self._taken[member][1] for member in self.plan.members)
        chunks = b"".join(self._made[index] for index in sorted(self._made))
        statement = Reduced(self._stage, self.t, self.plan.round, contributions, chunks)
        signature = sign(self._signer, self._run, statement)
        self.reduced[self._me] = (statement, signature)
        return ReducedProof(contributions, chunks, signature)

    # -- the results --------------------------------------------------------------------------------

    def came(self, place: int, proof: ReducedProof | None) -> None:
        """Note what an owner signed, if that came with a result.

        Raises:
            BadAnswer: the owner did not sign that.
        """
        if proof is None:
            return
        owner = self.plan.members[place]
        statement = Reduced(self._stage, self.t, self.plan.round, proof.contributions, proof.chunks)
        if not is_signed(self._signer, owner, self._run, statement, proof.signature):
            raise BadAnswer(owner, "signed its results with another key")
        if tuple(said.member for said in proof.contributions) != self.plan.members:
            raise BadAnswer(owner, "signed results of other members' contributions")
        self.reduced[place] = (statement, proof.signature)

    def agree(self) -> None:
        """Check that all owners signed as many results as they own, and one seal of each member.

        Whether the bytes that came are those is checked where they do not fit: they are not hashed here.

        Raises:
            BadAnswer: an owner did not.
            Refused: a member has two seals.
        """
        seals: dict[PeerId, bytes] = {}
        for place, owner in enumerate(self.plan.members):
            if not self.parts[place]:
                continue
            said = self.reduced.get(place)
            if said is None or len(said[0].chunks) != DIGEST_BYTES * len(self.parts[place]):
                raise BadAnswer(owner, "did not sign its results")
            for contribution in said[0].contributions:
                if seals.setdefault(contribution.member, contribution.seal) != contribution.seal:
                    # A member that began the round again has another nonce, and is no liar; nor is an owner.
                    raise Refused(f"{contribution.member} sealed two nonces in this round")
        self._seals = seals
        self.nonces = {m: nonce for m, nonce in self.nonces.items() if self._is_sealed(m, nonce)}
        self._count_nonces()

    def forger(self) -> int | None:
        """The place of an owner that names a contribution which this member did not sign."""
        there = self.reduced.items()
        return next((p for p, (said, _) in there if said.contributions[self._me] != self._signed[p]), None)

    # -- nonces and products ------------------------------------------------------------------------

    def reveal(self) -> None:
        """Unseal this member's nonce: all results are here."""
        me = self._signer.peer_id
        self.unseal(me, [self._nonce if m == me else b"" for m in self.plan.members])

    def unseal(self, by: PeerId, nonces: Sequence[bytes]) -> None:
        """Note the nonces that a member knows. Before the seals are here it tells only its own."""
        for member, nonce in zip(self.plan.members, nonces, strict=False):
            if self._is_sealed(member, nonce) if self._seals else member == by:
                self.nonces.setdefault(member, nonce)
        self._count_nonces()

    def _is_sealed(self, member: PeerId, nonce: bytes) -> bool:
        return digest_of(nonce) == self._seals[member]

    def _count_nonces(self) -> None:
        if self._seals and len(self.nonces) == len(self.plan.members):
            self.unsealed.set()

    def known_nonces(self) -> tuple[bytes, ...]:
        """The nonces that are here, in the order of the members; empty: it is not."""
        return tuple(self.nonces.get(member, b"") for member in self.plan.members)

    def project(self, nonces: tuple[bytes, ...]) -> Projecting:
        """This member's products: 2.5 ms for each million weights. In any thread."""
        seed = seed_of(nonces)
        sums = []
        for place, part in enumerate(self.parts):
            found = b""
            for index, (_, numel) in enumerate(part if self.contributes(self._me) else ()):
                r = coefficients(seed, place, index, numel)
                found += product(self.chunk(place, index), r).to_bytes(SUM_BYTES, "little")
            sums.append(found)
        contributions = tuple(digest_of(digests) for digests in self.digests)
        unsigned = Projecting(contributions=contributions, nonces=nonces, sums=tuple(sums), signature=b"")
        signature = sign(self._signer, self._run, self._statement(unsigned))
        return replace(unsigned, signature=signature)

    def hear(self, member: PeerId, told: Projecting, by: PeerId) -> None:
        """Note what a member says of its products, as `by` shows it.

        Raises:
            BadAnswer: it did not sign that, or does not fit what this owner took of it.
            Refused: it does not fit what another owner says that it contributed. One of them lies.
        """
        place = self.plan.members.index(member)
        if not is_signed(self._signer, member, self._run, self._statement(told), told.signature):
            raise BadAnswer(by, "signed its products with another key")
        if told.nonces != self.known_nonces():
            raise BadAnswer(by, "says that other nonces were revealed")
        due = [len(part) * SUM_BYTES if self.contributes(place) else 0 for part in self.parts]
        if [len(sums) for sums in told.sums] != due or len(told.contributions) != len(self.parts):
            raise BadAnswer(by, "answered products of other chunks")
        for owner, (reduced, _) in self.reduced.items():
            if reduced.contributions[place].chunks != told.contributions[owner]:
                text = f"says that it sent another sum to {self.plan.members[owner]}"
                raise BadAnswer(by, text) if owner == self._me else Refused(f"{member} {text}")
        self.note(member, told)

    def note(self, member: PeerId, told: Projecting) -> None:
        """Note what a member, or this one, says of its products."""
        self._said[member] = told
        if len(self._said) == len(self.plan.members):
            self.heard.set()

    def lacking(self) -> tuple[PeerId, ...]:
        """The members whose products are not here."""
        return tuple(member for member in self.plan.members if member not in self._said)

    def doubtful(self, reduced: torch.Tensor) -> list[tuple[int, int]]:
        """Owner and chunk of the results that are not surely the sums of the contributions. In any thread."""
        seed, found = seed_of(self.nonces[member] for member in self.plan.members), list[tuple[int, int]]()
        for place, part in enumerate(self.parts):
            for index, (start, numel) in enumerate(part):
                r = coefficients(seed, place, index, numel)
                expected = sum(nth_sum(said.sums[place], index) or 0 for said in self._said.values())
                if not fits(reduced[start : start + numel], r, expected % MODULUS):
                    found.append((place, index))
        return found

    def product_of(self, place: int) -> tuple[Projected, bytes]:
        """What a member signed of its products, and its signature."""
        told = self._said[self.plan.members[place]]
        return self._statement(told), told.signature

    def told_of(self, member: PeerId) -> Projecting | None:
        """The same as it travels, if this member has heard it."""
        return self._said.get(member)

    def _statement(self, told: Projecting) -> Projected:
        return Projected(self._stage, self.t, self.plan.round, told.nonces, told.contributions, told.sums)


def any_chunk(parts: Sequence[Chunks], coin: Coin) -> tuple[int, int]:
    """The place of an owner, and the number of a chunk of its part, as a coin falls."""
    chunks = [(place, index) for place, part in enumerate(parts) for index in range(len(part))]
    return chunks[coin.below(len(chunks))]


def chunk_digests(total: torch.Tensor, chunks: Chunks) -> bytes:
    """The digests of the chunks of a part of a sum, one after the other."""
    return b"".join(chunk_digest(total[start : start + numel]) for start, numel in chunks)

"""The charter of a run: which peers its owner lets take part, as what. Rules only: bytes in, decisions out.

How it is signed, found and followed: docs/design.md, *The charter*. Of two charters the one with the higher
sequence holds (`Charter.rank`). One that has expired holds no more: no peer is admitted, and the run stands
still until the owner has signed another. So a peer that withholds a new charter gains 30 days at most.

A *peer* serves a stage, a *trainer* sends microbatches, a *keeper* keeps checkpoints; a reader needs no
admission, and only a ban keeps it out. Others than the owner are admitted as the charter says of their role:

    open    any peer; with a stamp, if `work_bits` asks for one
    token   peers that are named, or bring a token that the owner made (`swarm invite`)
    list    peers that are named
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec

from swarm.errors import Refused, SetupError, clean, decoded
from swarm.ids import PEER_ID, RUN_NAME, PeerId, Stage

MAX_CHARTER_BYTES = 16_000
"""About 270 peer ids, bans and names together. Bans do not scale: identities cost nothing, tokens do."""
MAX_LIFE_DAYS = 30
MAX_LIFE_S = MAX_LIFE_DAYS * 86_400
MAX_LEFT_S = MAX_LIFE_S + 3_600
"""The owner's clock may be an hour ahead of ours."""
MAX_WORK_BITS = 40
"""Each bit doubles the work: 27 take two minutes of a core, 40 a fortnight."""
MAX_WHY_CHARS = 100
MAX_REVOCATIONS_TAKEN = 64
"""Into charters, of keys that the owner did not name: any peer can make keys that revoke themselves."""
MAX_USES = 1000
"""Identities that a token admits at a time, and beyond what it admits that are counted."""
Role: TypeAlias = Literal["peer", "trainer", "keeper"]
ROLES: tuple[Role, ...] = ("peer", "trainer", "keeper")
Door: TypeAlias = Literal["open", "list", "token"]

_PeerId: TypeAlias = Annotated[str, msgspec.Meta(pattern=rf"\A{PEER_ID.pattern}\Z")]
_PeerIds: TypeAlias = Annotated[tuple[_PeerId, ...], msgspec.Meta(max_length=300)]


class Ban(msgspec.Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True):
    """A peer that takes no part, whatever else is said of it."""

    peer: _PeerId
    why: Annotated[str, msgspec.Meta(max_length=MAX_WHY_CHARS)]


class AdmissionRule(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which peers are admitted as one role."""

    door: Door = "open"
    named: _PeerIds = ()


class Charter(msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """What an owner says of a run. Sets are sorted, so that equal charters are equal bytes."""

    name: Annotated[str, msgspec.Meta(pattern=rf"\A{RUN_NAME}\Z")]
    run: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    """The id of its manifest, which has the same name and owner."""
    sequence: Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]
    expires: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
    """Unix seconds."""
    peers: AdmissionRule = AdmissionRule()
    trainers: AdmissionRule = AdmissionRule("list")
    keepers: AdmissionRule = AdmissionRule()
    work_bits: Annotated[int, msgspec.Meta(ge=0, le=MAX_WORK_BITS)] = 0
    """Of peers that enter by an open door."""
    founders: _PeerIds = ()
    """Peers that the owner vouches for: they are admitted as peers. Voice have those of the manifest."""
    trusted_stages: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=-1024, lt=1024)], ...], msgspec.Meta(max_length=64)
    ] = ()
    """Served by peers that are named or invited, on all islands; -1 is the last one."""
    bans: Annotated[tuple[Ban, ...], msgspec.Meta(max_length=300)] = ()
    revocations: _PeerIds = ()
    """Keys that said of themselves that they are to be trusted no more."""

    def __post_init__(self) -> None:
        sets = (self.peers.named, self.trainers.named, self.keepers.named, self.founders, self.revocations)
        for some in (*sets, tuple(ban.peer for ban in self.bans), self.trusted_stages):
            if list(some) != sorted(set(some)):
                raise ValueError("a set that is not sorted, or names a peer twice")

    @property
    def rank(self) -> tuple[int, bytes]:
        """Of two charters of an owner that of higher rank holds: all agree, even on two of one sequence."""
        return self.sequence, hashlib.sha256(encode(self)).digest()

    def rule(self, role: Role) -> AdmissionRule:
        return {"peer": self.peers, "trainer": self.trainers, "keeper": self.keepers}[role]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Charter)


def encode(charter: Charter) -> bytes:
    """The canonical bytes, which the owner signs."""
    return _encoder.encode(charter)


def decode(data: bytes) -> Charter:
    """A charter from a stranger's bytes.

    Raises:
        Refused: oversized, malformed, or not the canonical bytes of what it says.
    """
    charter = decoded(data, _decoder.decode, "charter", MAX_CHARTER_BYTES)
    if encode(charter) != data:
        raise Refused("a charter that is not in canonical form")
    return charter


def why_not_held(charter: Charter, *, now: float) -> str:
    """Why it does not hold: it has expired, or wants to for too long. Empty if it does. `now`: Unix s."""
    if charter.expires > now + MAX_LEFT_S:
        return f"a charter that wants to hold for more than {MAX_LIFE_DAYS} days"
    ended = f"the charter of {charter.name!r} has expired: its owner has to sign another one (swarm charter)"
    return ended if charter.expires <= now else ""


class Token(NamedTuple):
    """What a token says that the owner made, once its signatures were checked."""

    id: PeerId
    """That of its own key: no two are alike, and a ban of it takes the token back."""
    role: Role
    expires: float
    """Unix seconds."""
    uses: int
    """Identities that it admits at a time."""


class Credential(NamedTuple):
    """What a peer brought, checked: it holds for this peer and this run."""

    token: Token | None = None
    stamp_bits: int = 0


NOTHING = Credential()


class TokenUses:
    """Which identities used which token, by all records and callers that we saw.

    A token is a secret, and its holder can bind it to any identity. So of more identities than it admits none
    is better than another: whatever chose between them (the first to come, the smallest id) could be arranged
    by a thief, and peers that saw other records would choose differently. All of them are refused, and the
    token with them, while so many are there.
    """

    def __init__(self, most: int = 65_536) -> None:
        self._most = most
        self._until: dict[PeerId, dict[PeerId, float]] = {}
        self._count = 0

    def saw(self, token: PeerId, peer: PeerId, *, until: float, now: float) -> None:
        """A peer uses a token, for all that we know until then (Unix seconds)."""
        known = self._until.get(token, {})
        if peer not in known and (self._count >= self._most or len(known) > MAX_USES):
            self._expire(now)
            if self._count >= self._most or len(self._until.get(token, ())) > MAX_USES:
                return
        users = self._until.setdefault(token, {})
        self._count += peer not in users
        users[peer] = max(until, users.get(peer, 0.0))

    def users(self, token: PeerId, *, now: float) -> int:
        """How many identities use it."""
        return sum(until > now for until in self._until.get(token, {}).values())

    def _expire(self, now: float) -> None:
        self._until = {
            token: living
            for token, users in self._until.items()
            if (living := {peer: until for peer, until in users.items() if until > now})
        }
        self._count = sum(map(len, self._until.values()))


class Applicant(NamedTuple):
    """A peer that wants to take part, and as what."""

    peer: PeerId
    role: Role
    credential: Credential = NOTHING
    stage: Stage | None = None
    """That a peer serves, as far as it is known."""
    closed: bool = False
    """Only peers that are named or invited come in, whatever the charter says."""


class AdmissionTerms(NamedTuple):
    """What is decided by: a charter, and what it says nothing of."""

    charter: Charter
    owner: PeerId
    stages: int = 0
    """Of the run; 0: not known yet."""
    trainers: tuple[PeerId, ...] = ()
    """That the manifest names (`admission.trainers`)."""
    founders: tuple[PeerId, ...] = ()
    """Likewise (`admission.founders`)."""
    revoked: frozenset[PeerId] = frozenset()
    """Keys that revoked themselves, besides those in the charter."""

    def stage_of(self, cell: Stage | None) -> Stage | None:
        """The stage of a cell, on whichever island; of a run without islands they are the same."""
        return cell if cell is None or not self.stages else cell % self.stages


def why_shut_out(terms: AdmissionTerms, peer: PeerId) -> str:
    """Why a peer may not even read; empty if it may."""
    charter = terms.charter
    if peer in charter.revocations or peer in terms.revoked:
        return "its key was revoked by itself: start with another identity"
    return _why_banned(charter, peer)


def _why_banned(charter: Charter, peer: PeerId) -> str:
    place = bisect_left(charter.bans, peer, key=lambda ban: ban.peer)  # asked at each call
    for ban in charter.bans[place : place + 1]:
        if ban.peer == peer:
            return f"the owner of the run banned it: {clean(ban.why) or 'without a reason'}"
    return ""


def why_not_admitted(terms: AdmissionTerms, who: Applicant, uses: TokenUses, *, now: float) -> str:
    """Why a peer may not take part as that role; empty if it may. `now`: Unix seconds."""
    charter = terms.charter
    if {terms.owner} & {*charter.revocations, *terms.revoked}:
        return "the key of the run's owner was revoked: nobody is admitted any more"
    if why := why_not_held(charter, now=now) or why_shut_out(terms, who.peer):
        return why
    if who.role == "trainer" and terms.trainers and who.peer not in terms.trainers:
        return "the run's manifest names its trainers (admission.trainers): give the --identity of one"
    if is_named(terms, who):
        return ""
    rule, credential = charter.rule(who.role), who.credential
    trusted = who.stage in [one + terms.stages * (one < 0) for one in charter.trusted_stages]
    if rule.door == "list":
        return f"the run's charter names its {who.role}s, and this is none of them: ask the owner"
    why = _why_not_invited(charter, who, uses, now=now)
    if not why:
        return ""
    if trusted:
        return f"stage {who.stage} is served only by peers that the owner named or invited: {why}"
    if rule.door == "token" or who.closed:
        return f"the run admits {who.role}s that were invited: {why}"
    if credential.stamp_bits < charter.work_bits:
        asked, bits = charter.work_bits, credential.stamp_bits
        return f"the run asks for a stamp of {asked} bits of work, and this has {bits}: start it again"
    return ""


def is_named(terms: AdmissionTerms, who: Applicant) -> bool:
    """Whether the owner named a peer as that role, in the charter or the manifest."""
    named = {"peer": (*terms.charter.founders, *terms.founders), "trainer": terms.trainers}.get(who.role, ())
    return who.peer == terms.owner or who.peer in (*terms.charter.rule(who.role).named, *named)


def _why_not_invited(charter: Charter, who: Applicant, uses: TokenUses, *, now: float) -> str:
    token, role = who.credential.token, who.role
    if token is None:
        return "it has no token: ask the owner for one (swarm invite), and give it as --token"
    if why := _why_banned(charter, token.id):  # not by a word of its own: others may have it, too
        return f"its token was taken back: {why}"
    if token.role != role:
        return f"its token is for a {token.role}"
    if token.expires <= now:
        return "its token has expired: ask the owner for another one"
    if (count := uses.users(token.id, now=now)) > token.uses:
        return (
            f"its token is used by {count} identities, and admits {token.uses}: keep your --identity, "
            "or ask the owner for another token"
        )
    return ""


# --- what an owner changes ----------------------------------------------------------------------------------


def succeed(charter: Charter, *, now: float, days: float = MAX_LIFE_DAYS, **changes: Any) -> Charter:
    """The charter that comes after this one: changed, and with a new term. Sets may come in any order.

    Raises:
        SetupError: it is no charter; says why.
    """
    fields = {name: getattr(charter, name) for name in charter.__struct_fields__} | changes
    fields |= {"sequence": charter.sequence + 1, "expires": int(now + days * 86_400)}
    return make(**fields)


def make(**fields: Any) -> Charter:
    """A charter, with its sets in order. Raises SetupError: it is none; says why."""
    for name, value in fields.items():
        if isinstance(value, AdmissionRule):
            fields[name] = AdmissionRule(value.door, tuple(sorted(set(value.named))))
        elif not isinstance(value, str | int):
            fields[name] = tuple(sorted(set(value)))
    try:
        charter = Charter(**fields)
        decode(encode(charter))
    except (Refused, ValueError) as error:
        raise SetupError(f"this cannot be a charter: {error}") from None
    return charter


def ban(charter: Charter, peer: PeerId, why: str) -> tuple[Ban, ...]:
    """The bans of a charter with another one. Raises SetupError: it is banned already."""
    if any(one.peer == peer for one in charter.bans):
        raise SetupError(f"{peer} is banned already: swarm charter shows why")
    return tuple(sorted((*charter.bans, Ban(peer, clean(why, MAX_WHY_CHARS)))))


def unban(charter: Charter, peer: PeerId) -> tuple[Ban, ...]:
    """The bans of a charter without that of a peer. Raises SetupError: there is none."""
    left = tuple(one for one in charter.bans if one.peer != peer)
    if len(left) == len(charter.bans):
        raise SetupError(f"{peer} is not banned: swarm charter lists who is")
    return left


# --- which roles may call what ------------------------------------------------------------------------------

READS = frozenset({"status", "state", "saved", "trail", "convicted", "chunk", "close", "version", "reach"})
"""Methods that every peer answers, to every peer that is not banned."""
TRAINERS_CALL = frozenset(
    {"work", "locate", "watch", "voucher", "audit", "products", "kept", "evidence"}
    | {"eval", "evaluated", "block"}
)
"""Trainers and peers; a method that is in no list is for peers alone."""
REPLICAS_CALL = frozenset({"report", "part"})
"""Those that only peers of the same stage call."""


def callers_of(method: str, stage: Stage | None) -> tuple[Role, ...]:
    """Roles that may call a method of a peer at `stage`; none: everybody but the banned."""
    if method in READS:
        return ()
    if method in ("voucher", "evaluated", "block") or (method in ("work", "eval") and stage == 0):
        return ("trainer",)
    return ("peer", "trainer") if method in TRAINERS_CALL else ("peer",)


def callees_of(method: str) -> tuple[Role, ...]:
    """Roles that are called for a method; none: everybody but the banned."""
    if method == "block":
        return ("trainer", "keeper")
    return () if method in READS else ("peer",)

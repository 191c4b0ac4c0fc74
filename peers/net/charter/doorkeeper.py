"""Which streams, calls and records are let in, by the charter that holds now. Without a charter, all.

It keeps what peers brought with them, opened when it is needed: a caller may come before we know of the
charter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from peers.clock import unix_s
from peers.net.charter.signed import MAX_CREDENTIAL_BYTES, open_credential
from peers.net.direct.paths import METHOD as DIRECT_METHOD
from peers.net.signed_records import Announced
from peers.ports import Answer, Request
from swarm.charter import (
    MAX_WORK_BITS,
    NOTHING,
    REPLICAS_CALL,
    AdmissionTerms,
    Applicant,
    Credential,
    Role,
    Token,
    TokenUses,
    callees_of,
    callers_of,
    why_not_admitted,
    why_shut_out,
)
from swarm.errors import Refused, count
from swarm.ids import PeerId, Stage
from swarm.records import NO_STAGE, PeerRecord

SHOW_METHOD = "admit"
"""A caller shows what admits it, first on each stream."""
MAX_SHOWN = 16_384
"""4 MB. A credential that admits no peer is not kept, once there is a charter to tell."""
USED_S = 60.0
"""A caller's token is in use for so long after each of its calls, and for as long as its record is there."""

_opened = functools.lru_cache(maxsize=8192)(open_credential)


class Doorkeeper:
    """The charter that holds for one run, and what peers brought."""

    def __init__(self, most_shown: int = MAX_SHOWN) -> None:
        self._most_shown = most_shown
        self.terms: AdmissionTerms | None = None
        self.stage: Stage | None = None
        """That we serve, if we serve one; of a run with islands the cell."""
        self.credential = b""
        """What we show to be admitted: on each stream that we open, and in our record."""
        self.on_change: list[Callable[[], None]] = []
        self._shown: dict[PeerId, tuple[bytes, Token | None]] = {}
        """Credentials, the latest last, and the token in each."""
        self._uses = TokenUses()

    def set(self, terms: AdmissionTerms) -> None:
        """Go by these from now on."""
        if terms != self.terms:
            self.terms = terms
            for told in self.on_change:
                told()

    def refusal(self, peer: PeerId, method: str, incoming: bool) -> str:
        """Why a peer may not call this method (empty for a stream), or be called for it; empty if it may."""
        if self.terms is None:
            return ""
        now = unix_s()
        if why := why_shut_out(self.terms, peer):
            return f"not admitted: {why}"
        if method in ("", SHOW_METHOD, DIRECT_METHOD):  # a stream, what is shown on it, and a better one
            return ""
        roles = callers_of(method, self.terms.stage_of(self.stage)) if incoming else callees_of(method)
        return self._why_none(peer, roles, now=now, stage=self.stage if method in REPLICAS_CALL else None)

    def _why_none(self, peer: PeerId, roles: tuple[Role, ...], *, now: float, **more: Any) -> str:
        """Why a peer is admitted as none of these; empty if it is, or there are none. See `why_not`."""
        whys = list[str]()
        for role in roles:
            if not (why := self.why_not(peer, role, now=now, **more)):
                return ""
            whys.append(f"as a {role}: {why}")
        return f"not admitted {'; '.join(whys)}" if whys else ""

    def invited(self, peer: PeerId) -> bool:
        """Whether the owner named a peer to serve a stage, or gave it a token that holds."""
        return self.terms is not None and not self.why_not(peer, "peer", now=unix_s(), closed=True)

    def lacks_stamp(self, peer: PeerId, role: Role, carried: bytes | None = None) -> bool:
        """Whether a stamp is all that a peer needs to be admitted as a role; `carried` as for `why_not`."""
        now = unix_s()
        enough = self.why_not(peer, role, now=now, carried=carried, stamped_bits=MAX_WORK_BITS)
        return not enough and bool(self.why_not(peer, role, now=now, carried=carried))

    def why_not(
        self, peer: PeerId, role: Role, *, now: float, stage: Stage | None = None,
        carried: bytes | None = None, until: float = 0.0, stamped_bits: int = 0, closed: bool = False,
    ) -> str:  # fmt: skip
        """Why a peer is not admitted as a role; empty if it is, or everybody is.

        Args:
            carried: its credential; None: the one that it showed last. `until`: in a record that ends then.
            stamped_bits: it is taken to have a stamp of so many, besides.
            closed: as if the door were open only to those that the owner named or invited.
        """
        if self.terms is None:
            return ""
        try:
            credential = self._open(peer, self.shown(peer) if carried is None else carried)
        except Refused as refusal:
            if carried is None:
                del self._shown[peer]  # shown before we knew the charter: not to be checked at each call
            return refusal.text
        credential = credential._replace(stamp_bits=max(stamped_bits, credential.stamp_bits))
        if credential.token is not None and not why_shut_out(self.terms, peer):  # a banned thief is no user
            self._uses.saw(credential.token.id, peer, until=max(until, now + USED_S), now=now)
        who = Applicant(peer, role, credential, self.terms.stage_of(stage), closed)
        return why_not_admitted(self.terms, who, self._uses, now=now)

    def _open(self, peer: PeerId, credential: bytes) -> Credential:
        assert self.terms is not None
        if not credential:
            return NOTHING
        return _opened(credential, self.terms.charter.run, self.terms.owner, peer)

    def why_not_record(self, announced: Announced) -> str:
        """Why a record must not be kept, nor believed; empty if it may, or is of another run."""
        record = announced.record
        if self.terms is None or record.run != self.terms.charter.run:
            return ""
        carried, now = announced.credential, unix_s()
        stage = None if record.stage == NO_STAGE else record.stage
        more = {"stage": stage, "carried": carried, "until": announced.expires}
        why = self._why_none(record.peer, _roles_of(record), now=now, **more)
        if not why:
            self._keep(record.peer, carried)
        return why

    def shown(self, peer: PeerId) -> bytes:
        return self._shown[peer][0] if peer in self._shown else b""

    def show(self, peer: PeerId, credential: bytes) -> None:
        """A peer brought this. Raises Refused: it is too large, or nothing that admits here."""
        if len(credential) > MAX_CREDENTIAL_BYTES:
            raise Refused(f"a credential of {count(len(credential), 'byte')}")
        if not self._keep(peer, credential):
            raise Refused("a credential that is worth nothing here")

    def _keep(self, peer: PeerId, credential: bytes) -> bool:
        """Remember a credential, unless it is worth nothing. One token under many names drives out nothing
        that others showed, nor do records that any name can carry."""
        token = None
        if self.terms is not None:
            token, bits = self._open(peer, credential)
            if token is None and not 0 < self.terms.charter.work_bits <= bits:
                return False
        if credential and self.shown(peer) != credential:
            self._shown.pop(peer, None)
            if len(self._shown) >= self._most_shown:
                alike = (one for one, (_, its) in self._shown.items() if token is not None and its == token)
                del self._shown[next(alike, next(iter(self._shown)))]
            self._shown[peer] = credential, token
        return True

    async def serve_show(self, request: Request) -> Answer:
        """Handler: a caller shows its credential."""
        self.show(request.peer, request.header)
        return Answer(b"")


def _roles_of(record: PeerRecord) -> tuple[Role, ...]:
    if record.state in ("keeping", "feeding"):
        return ("keeper",) if record.state == "keeping" else ("trainer",)
    return ("peer", "keeper", "trainer") if record.stage == NO_STAGE and record.state == "left" else ("peer",)

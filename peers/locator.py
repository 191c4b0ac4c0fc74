"""Asking the peers of a stage which of them has a microbatch, and which of them it leaves out."""

from __future__ import annotations

from collections.abc import Collection

from peers.clock import now_s
from peers.ports import Transport
from peers.status_query import ask_all
from swarm.ids import Microbatch, PeerId
from swarm.policy.backoff import BUDGET_ROUNDS, Backoff
from swarm.protocol.rounds import named_by_most
from swarm.wire.messages import Locate, Located

LOCATE_S = 1.0
"""How long to ask which peer has a microbatch before it is recomputed."""
MAX_ASKED = 16
"""Peers asked where a microbatch is. Missing a holder costs an undo, not correctness."""


class Locator:
    """Asks, and leaves out the peers that their stage leaves out: what they compute is run again."""

    def __init__(self, run: str, transport: Transport, backoff: Backoff) -> None:
        self._run, self._transport, self._backoff = run, transport, backoff

    async def holders(self, microbatch: Microbatch, peers: Collection[PeerId]) -> list[PeerId]:
        """Those of `peers` that have `microbatch` or compute it, and are not left out."""
        now, (t, m) = now_s(), microbatch
        asked = [peer for peer in peers if not self._backoff.in_backoff(peer, now=now)][:MAX_ASKED]
        question = Locate(run=self._run, t=t, m=m)
        told = await ask_all(self._transport, asked, "locate", question, Located, deadline_s=LOCATE_S)
        named = named_by_most({p: answer.left_out for p, answer in told.items()})
        for peer in named:
            self._backoff.charge(peer, t=t, since_s=now, now=now_s(), rounds=BUDGET_ROUNDS)
        return [peer for peer, answer in told.items() if answer.has and peer not in named]

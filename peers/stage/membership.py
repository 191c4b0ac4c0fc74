"""Which peers may speak for a stage: those that announced themselves there, in records that they signed."""

from __future__ import annotations

from collections.abc import Sequence

from peers.clock import now_s
from peers.ports import Directory
from swarm.errors import NotNow, short
from swarm.ids import PeerId, Stage
from swarm.records import PeerRecord

REFRESH_S = 0.5
"""A newcomer may call before the cached records have it; strangers must not cause endless queries."""


class Membership:
    """The announced replicas of each stage, as the directory has them."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._asked_at = float("-inf")

    def at(self, stage: Stage) -> Sequence[PeerRecord]:
        """The records of a stage, in whatever state, sorted by peer id."""
        return self._directory.at(stage)

    def has(self, peer: PeerId, stage: Stage) -> bool:
        """Whether `peer` announced that it serves, or joins, `stage`."""
        record = self._directory.find(peer)
        return record is not None and record.stage == stage and record.state != "left"

    async def require(self, peer: PeerId, stage: Stage) -> None:
        """Return if `peer` is announced at `stage`.

        Raises:
            NotNow: it is not, as far as is known now.
        """
        if self.has(peer, stage):
            return
        if now_s() - self._asked_at > REFRESH_S:
            self._asked_at = now_s()
            await self._directory.refresh({stage})
            if self.has(peer, stage):
                return
        raise NotNow(f"peer {short(peer)} is not announced at stage {stage}", retry_after_s=REFRESH_S)

"""Which peers may speak for a stage, and whose word counts, by their records in the directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from peers.clock import now_s
from peers.ports import Directory
from swarm.errors import NotNow, short
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.statements import Signer
from swarm.protocol.voice import Electorate, heard

REFRESH_S = 0.5
"""A newcomer may call before the cached records have it; strangers must not cause endless queries."""


class Voices:
    """How much the word of each peer counts (`swarm.protocol.voice`), as this peer's directory has it now.

    A peer without an entry has no voice; where all mappings are empty, the word of each counts alike.
    """

    def __init__(
        self, run: Run, signer: Signer, directory: Directory, version: Callable[[], int] = lambda: 0
    ) -> None:
        """`version`: where the run is, as far as is known."""
        self._stages, self._directory, self._version = range(run.S), directory, version
        self._electorate = Electorate(run, signer)

    def of(self, stage: Stage) -> Mapping[PeerId, int]:
        """Of the peers of a stage."""
        return self._electorate.of(stage, self._directory.at(stage), version=self._version())

    def counted(self, stage: Stage) -> list[PeerId]:
        """The serving peers of a stage whose word counts."""
        return heard([r.peer for r in self._directory.at(stage) if r.state == "serving"], self.of(stage))

    def counts(self, peer: PeerId, stage: Stage) -> bool:
        """Whether a peer has voice at a stage; where no peer has, whether it is announced there."""
        voice, is_stage = self.of(stage), stage in self._stages  # keepers are at none
        return peer in voice if voice else is_stage and Membership(self._directory).has(peer, stage)

    def has(self, peer: PeerId) -> bool:
        """Whether the word of a peer counts at the stage that it is announced at."""
        record = self._directory.find(peer)
        return record is not None and peer in self.of(record.stage)

    def of_all(self, stages: Iterable[Stage] | None = None) -> dict[PeerId, int]:
        """Of the peers of some stages together; None: of all."""
        found: dict[PeerId, int] = {}
        for stage in self._stages if stages is None else stages:
            found |= self.of(stage)
        return found


class Membership:
    """The announced replicas of each stage, in records that they signed, as the directory has them."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._asked_at = float("-inf")

    def has(self, peer: PeerId, stage: Stage) -> bool:
        """Whether `peer` announced that it serves, or joins, `stage`."""
        record = self._directory.find(peer)
        return record is not None and record.stage == stage and record.state != "left"

    async def require(self, peer: PeerId, stage: Stage) -> None:
        """Return if `peer` is announced at `stage`. Raises NotNow: it is not, as far as is known now."""
        if self.has(peer, stage):
            return
        await self.refresh({stage})
        if not self.has(peer, stage):
            raise NotNow(f"peer {short(peer)} is not announced at stage {stage}", retry_after_s=REFRESH_S)

    async def refresh(self, stages: Iterable[Stage]) -> None:
        """Read the records of some stages anew, if that was not done just now."""
        if now_s() - self._asked_at > REFRESH_S:
            self._asked_at = now_s()
            await self._directory.refresh(set(stages))

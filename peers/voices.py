"""The peers whose word counts, by the vouchers in the records of the directory: `swarm.protocol.voice`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from peers.ports import Directory
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.statements import Signer
from swarm.protocol.voice import Electorate

CHECKS_KEPT = 16_384
"""Vouchers whose signatures were checked: records come again with each picture of the directory."""


class _Remembers:
    """Fulfils `Signer`, and checks no signature twice."""

    def __init__(self, signer: Signer) -> None:
        self.peer_id, self.sign = signer.peer_id, signer.sign
        self.verify = lru_cache(CHECKS_KEPT)(signer.verify)


class Voices:
    """How much the word of each peer counts, as this peer's directory has it now.

    A peer without an entry has no voice; where all mappings are empty, the word of each counts alike.
    """

    def __init__(self, run: Run, signer: Signer, directory: Directory) -> None:
        self._stages, self._directory = range(run.S), directory
        self._electorate = Electorate(run, _Remembers(signer))

    def of(self, stage: Stage, *, version: int = 0) -> Mapping[PeerId, int]:
        """Of the peers of a stage. `version`: where the run is, as far as is known."""
        return self._electorate.of(stage, self._directory.at(stage), version=version)

    def of_all(self, stages: Iterable[Stage] | None = None, *, version: int = 0) -> dict[PeerId, int]:
        """Of the peers of some stages together; None: of all."""
        found: dict[PeerId, int] = {}
        for stage in self._stages if stages is None else stages:
            found |= self.of(stage, version=version)
        return found

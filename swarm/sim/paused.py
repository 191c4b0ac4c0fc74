"""A peer whose owner has the device: what `peers/paused.py` does."""

from __future__ import annotations

from typing import Any, NamedTuple

from swarm.errors import Leaving
from swarm.ids import PeerId, Stage, Standing
from swarm.policy.rounds import Go
from swarm.sim.check import Weights
from swarm.sim.clock import Clock
from swarm.sim.network import Network, Node
from swarm.sim.terms import Directory, Entry, Shelf, Status

ABSENT = (
    "work", "locate", "part", "held", "shared", "state", "chunk", "saved", "offer", "take", "report",
    "brief", "summary", "run", "watch",
)  # fmt: skip


class Snapshot(NamedTuple):
    """What a peer comes back with. Of what was in its sums nothing: that counts where it was handed to."""

    standing: Standing
    weights: Weights
    last_go: Go | None


class PausedPeer(Node):
    """Holds the place of a peer, and gives its state out."""

    def __init__(
        self,
        clock: Clock,
        name: PeerId,
        stage: Stage,
        kept: Snapshot | None,
        network: Network,
        directory: Directory,
        shelf: Shelf,
    ) -> None:
        super().__init__(clock, name)
        self.stage, self.kept, self._shelf = stage, kept, shelf
        self.handlers.update(dict.fromkeys(ABSENT, self._refuse))
        standing = Standing() if kept is None else kept.standing
        self.handlers["status"] = lambda caller, question: Status(standing, stays=False)
        if kept is not None:
            shelf.pinned[name] = (stage, kept.weights)
        network.replace(self)
        directory.announce(Entry(name, stage, "paused", clock.now))

    def _refuse(self, caller: PeerId, question: Any) -> Any:
        raise Leaving("this peer is paused")

    def kill(self) -> None:
        """Also when it resumes: what it kept is to be had of it no more."""
        super().kill()
        self._shelf.pinned.pop(self.name, None)

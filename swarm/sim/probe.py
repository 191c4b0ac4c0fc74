"""Asking those that fell silent whether they are back: what `peers/probe.py` does."""

from __future__ import annotations

from swarm.errors import PeerFault, SwarmError
from swarm.ids import PeerId
from swarm.policy.bans import Bans
from swarm.sim.network import Network, Node
from swarm.sim.terms import Directory

PROBE_EVERY_S = 0.5
PROBE_S = 3.0


class Prober:
    """Ends the rest of silent peers as soon as they answer anything."""

    def __init__(self, node: Node, network: Network, directory: Directory, bans: Bans) -> None:
        self._node, self._network, self._directory, self._bans = node, network, directory, bans
        self._asking: set[PeerId] = set()
        self._ticking = False

    def failed(self, peer: PeerId) -> None:
        """`peer` gave no answer: it rests until it is heard."""
        self._bans.failed(peer, now=self._node.clock.now, silent=True)
        self._tick_later()

    def _tick_later(self) -> None:
        if not self._ticking and self._bans.silent():
            self._ticking = True
            self._node.clock.after(PROBE_EVERY_S, self._node, self._tick)

    def _tick(self, _: None) -> None:
        self._ticking = False
        for peer in self._bans.silent():
            if self._directory.state(peer) == "left":
                self._bans.forget(peer)
            elif peer not in self._asking:
                self._asking.add(peer)
                self._node.spawn(self._ask(peer))
        self._tick_later()

    async def _ask(self, peer: PeerId) -> None:
        try:
            await self._network.call(self._node, peer, "locate", (0, 0), PROBE_S)
        except PeerFault:
            pass  # still silent
        except SwarmError:
            self._bans.heard(peer)
        else:
            self._bans.heard(peer)
        finally:
            self._asking.discard(peer)

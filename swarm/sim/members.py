"""Who is up, and of which stage: devices that come, load a state, serve and vanish."""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm.ids import PeerId, Stage
from swarm.plan.network import BACKWARD_FORWARDS
from swarm.sim.actors import Peer
from swarm.sim.trace import Change
from swarm.sim.world import NOBODY, Part, World

MEMORY_SHARE = 0.5
"""Of the memory that is free after the state, for microbatches in flight; as in `peers/programs/roles.py`."""
LOST_S = 6.0
"""A joiner of a stage that nobody serves waits so long for a member that may be cut off."""
DOWNLOAD_PIECES = 32
"""A state travels in so many pieces from each source, between which other transfers have their turn."""


class Members(Part):
    """Keeps `world.peers`, who is up, and `world.stages`, who serves."""

    def __init__(self, world: World, layout: Sequence[Stage]) -> None:
        super().__init__(world)
        self._layout = list(layout)
        self._free = list(range(len(layout)))[::-1]
        self._idle: dict[PeerId, int] = {}
        """Joiners that no stage fits into, and their devices."""

    def begin(self) -> None:
        """All of the layout are there from the beginning."""
        for device, stage in enumerate(self._layout):
            if stage != NOBODY:
                self._free.remove(device)
                self.add(device, stage, f"p{device:06d}")
                self._report.joins += 1

    def change(self, change: Change) -> None:
        """Who vanishes and who comes at this time."""
        for name in change.died:
            if name in self._world.peers:
                self._die(self._world.peers[name])
            else:
                self._free.append(self._idle.pop(name))
        first = change.at_s == 0.0
        for name in change.joined:
            device = self._free.pop()
            stage = self._layout[device] if first else NOBODY
            if stage == NOBODY:
                stage = self._world.placing.where_needed(device)
            self._report.joins += 1
            if stage == NOBODY:
                self._report.idle += 1
                self._idle[name] = device
                continue
            self.add(device, stage, name)

    def add(self, device: int, stage: Stage, name: PeerId) -> None:
        """`device` comes to `stage`: it serves when it has the state."""
        job, there, now_s = self._job, self._network.devices[device], self._clock.now
        forward_s = there.compute_s(job.forward_flops[stage]) + self._settings.job_s
        backward_s = there.compute_s(BACKWARD_FORWARDS * job.forward_flops[stage]) + self._settings.job_s
        room = self._settings.max_inflight
        free_bytes = MEMORY_SHARE * (there.memory_bytes - job.state_bytes[stage])
        if job.activation_bytes[stage] and math.isfinite(free_bytes):
            room = max(1, min(room, int(free_bytes / job.activation_bytes[stage])))
        peer = Peer(device, name, stage, (forward_s, backward_s), room, now_s)
        self._world.peers[name] = peer
        if now_s == 0.0 or (self._world.version == 0 and not self._world.steps.covered):
            self._serve(peer)  # version 0 follows from the seed
        elif self._world.stages[stage]:
            self._download(peer)
        else:
            down_s = self._lines.down_s(device, job.state_bytes[stage])
            self._report.download_bytes += job.state_bytes[stage]
            self._clock.after(LOST_S + down_s, self._restore, peer)

    def _download(self, peer: Peer) -> None:
        sources = [source.device for source in self._world.stages[peer.stage].values()]
        piece_bytes = self._job.state_bytes[peer.stage] / len(sources) / DOWNLOAD_PIECES
        self._report.download_bytes += self._job.state_bytes[peer.stage]
        left = [DOWNLOAD_PIECES * len(sources)]
        for source in sources:
            self._piece((peer, source, piece_bytes, DOWNLOAD_PIECES, left))

    def _piece(self, download: tuple[Peer, int, float, int, list[int]]) -> None:
        peer, source, piece_bytes, pieces, left = download
        if not peer.alive:
            return
        if pieces:
            there_s = self._lines.send(source, peer.device, piece_bytes, self._clock.now)
            again = (peer, source, piece_bytes, pieces - 1, left)
            self._clock.after(there_s - self._clock.now, self._piece, again)
            left[0] -= 1
        elif left[0] == 0:
            left[0] = -1  # the other sources end later, or have ended
            self._serve(peer)

    def _restore(self, peer: Peer) -> None:
        """A stage had lost all its members: the run goes back to what can be had of all stages."""
        if not peer.alive:
            return
        if self._world.stages[peer.stage]:
            self._serve(peer)  # another one was first
            return
        world = self._world
        back_to = world.version - world.version % self._settings.checkpoint_every
        self._report.generations += bool(world.steps.covered) or world.version != back_to
        world.generation += 1
        for other in list(world.peers.values()):  # who is on the way out goes with its last microbatch
            for flight in list(other.flights):
                world.trainers.cancel(flight)
        world.steps.drop()
        self._report.recomputed += (world.version - back_to) * self._job.microbatches * self._job.stages
        world.version = back_to
        del self._report.step_ends_s[back_to:]
        world.trainers.went_back(back_to)
        self._serve(peer)

    def _serve(self, peer: Peer) -> None:
        world = self._world
        peer.serving, peer.served_from_s = True, self._clock.now
        peer.load_at_s = self._clock.now
        world.stages[peer.stage][peer.name] = peer
        world.trainers.tell(peer.stage)
        if world.empty_since_s is not None and all(world.stages):
            self._report.waited_s += self._clock.now - world.empty_since_s
            world.empty_since_s = None
        if self._clock.now > 0.0:  # those who begin together are all there before anything starts
            world.trainers.start_all()

    def _count_out(self, peer: Peer) -> None:
        """What a peer did in its stage goes into the report."""
        if peer.serving:
            self._report.busy_s[peer.stage] += peer.busy_s
            self._report.there_s[peer.stage] += self._clock.now - peer.served_from_s
        peer.alive = peer.serving = False

    def leave(self, peer: Peer) -> None:
        """It does not serve its stage any more."""
        was_serving = peer.serving
        self._count_out(peer)
        del self._world.peers[peer.name]
        self._world.stages[peer.stage].pop(peer.name, None)
        if was_serving and not self._world.stages[peer.stage] and self._world.empty_since_s is None:
            self._world.empty_since_s = self._clock.now

    def count_out_all(self) -> None:
        """The time is over."""
        for peer in self._world.peers.values():
            self._count_out(peer)

    def _die(self, peer: Peer) -> None:
        self._report.deaths += 1
        self.leave(peer)
        self._free.append(peer.device)
        self._world.steps.without(peer)
        self._clock.after(self._settings.detect_s, self.missed, peer)

    def missed(self, peer: Peer) -> None:
        """Now the others know that it is dead."""
        self._world.trainers.tell(peer.stage)
        for flight in list(peer.flights):
            self._world.repair.repair(flight, peer.stage)
        self._world.trainers.news_soon()

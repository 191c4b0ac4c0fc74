"""Who goes where: newcomers to the stage of greatest need, members by the live rule."""

from __future__ import annotations

import math

from swarm.ids import Stage
from swarm.policy.rebalance import Stay, neediest, rebalance
from swarm.records import PeerRecord
from swarm.sim.actors import Peer
from swarm.sim.report import Moved
from swarm.sim.world import NOBODY, Part


class Placing(Part):
    """Decides from records like those that live peers publish."""

    def where_needed(self, device: int) -> Stage:
        """The stage of greatest need that fits into the device."""
        job, there = self._job, self._network.devices[device]
        fit = [stage for stage in range(job.stages) if job.fits(stage, there)]
        needy = neediest(self._records(), stages=job.stages, now_s=self._clock.now)
        both = [stage for stage in needy if stage in fit]
        if both:
            return self._world.dice.pick(both)
        speeds = [sum(1 / sum(p.job_s) for p in self._world.stages[s].values()) for s in range(job.stages)]
        return min(fit, key=lambda s: (speeds[s], s), default=NOBODY)

    def _records(self) -> list[PeerRecord]:
        now_s = self._clock.now
        found: list[PeerRecord] = []
        for peer in self._world.peers.values():
            if peer.draining_to is not None:
                continue
            seconds = now_s - peer.served_from_s
            peer.count_load(now_s)
            period_s = min(seconds, self._settings.rebalance_every_s) or 1.0
            upload_bps = self._network.devices[peer.device].upload_bps
            found.append(
                PeerRecord(
                    peer=peer.name,
                    run="simulated",
                    stage=peer.stage,
                    state="serving" if peer.serving else "joining",
                    version=self._world.version,
                    speed=1.0 / sum(peer.job_s) if peer.computed else 0.0,
                    load=peer.load_s / period_s if peer.serving else 0.0,
                    state_bytes=round(self._job.state_bytes[peer.stage]),
                    bandwidth_bps=upload_bps if math.isfinite(upload_bps) else 0.0,
                    since=peer.came_s,
                )
            )
        return found

    def rebalance(self, _: None) -> None:
        """Once a period."""
        period_s = self._settings.rebalance_every_s
        self._clock.after(period_s, self.rebalance, None)
        told = rebalance(self._records(), stages=self._job.stages, period_s=period_s, now_s=self._clock.now)
        for peer in self._world.peers.values():
            peer.load_s = 0.0
        if isinstance(told, Stay):
            return
        for move in told.moves:
            peer = self._world.peers[move.peer]
            if self._job.fits(move.to_stage, self._network.devices[peer.device]):
                moved = Moved(self._clock.now, peer.name, peer.stage, move.to_stage, move.why)
                self._report.moves.append(moved)
                peer.draining_to = move.to_stage
                del self._world.stages[peer.stage][peer.name]
                self._world.trainers.tell(peer.stage)
                self.leave_if_done(peer)

    def leave_if_done(self, peer: Peer) -> None:
        """It goes when nothing is under way there; its sums are a replica's then."""
        if peer.draining_to is None or peer.flights or not peer.alive:
            return
        world, stage, to_stage = self._world, peer.stage, peer.draining_to
        world.steps.hand_over(peer, next(iter(world.stages[stage].values()), None))
        world.members.leave(peer)
        world.steps.reduce_if_whole(stage)
        world.members.add(peer.device, to_stage, peer.name)

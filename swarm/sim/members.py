"""Membership: devices that come, load a state, serve, move by the live rule, and vanish."""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm.ids import PeerId, Stage
from swarm.plan.network import BACKWARD_FORWARDS
from swarm.policy.rebalance import Stay, neediest, rebalance
from swarm.records import NO_STAGE, PeerRecord
from swarm.sim.pipeline import Pipeline
from swarm.sim.report import Moved
from swarm.sim.steps import Steps
from swarm.sim.trace import Change
from swarm.sim.trainers import Trainers
from swarm.sim.world import Peer, World

MEMORY_SHARE = 0.5
"""Of the memory that is free after the state, for microbatches in flight; as in `peers/programs/roles.py`."""
LOST_S = 6.0
"""A joiner of a stage without peers waits so long for one that may be cut off."""
DOWNLOAD_PARTS = 32
"""A state travels in so many parts from each source, between which other transfers have their turn."""


class Members:
    """Keeps `world.peers` and `world.stages`."""

    def __init__(
        self, world: World, steps: Steps, pipeline: Pipeline, trainers: Trainers, layout: Sequence[Stage]
    ) -> None:
        self._world, self._steps, self._pipeline, self._trainers = world, steps, pipeline, trainers
        self._clock, self._report, self._job = world.clock, world.report, world.job
        self._layout = list(layout)
        self._free = list(range(len(layout)))[::-1]
        self._idle: dict[PeerId, int] = {}
        """Joiners that no stage fits into, and their devices."""
        pipeline.on_released, trainers.on_unreachable = self._leave_if_drained, self._detected

    # -- come and go ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Let all devices of the layout serve from the beginning."""
        for device, stage in enumerate(self._layout):
            if stage != NO_STAGE:
                self._free.remove(device)
                self._add(device, stage, f"p{device:06d}")
                self._report.joins += 1

    def change(self, change: Change) -> None:
        """Let peers vanish and come, as the trace says for this time."""
        for name in change.died:
            if name in self._world.peers:
                self._die(self._world.peers[name])
            else:
                self._free.append(self._idle.pop(name))
        for name in change.joined:
            device = self._free.pop()
            stage = self._layout[device] if change.at_s == 0.0 else NO_STAGE
            if stage == NO_STAGE:
                stage = self._neediest(device)
            self._report.joins += 1
            if stage == NO_STAGE:
                self._report.idle += 1
                self._idle[name] = device
            else:
                self._add(device, stage, name)

    def _add(self, device: int, stage: Stage, name: PeerId) -> None:
        """Bring `device` to `stage`: it serves when it has the state."""
        world, job, now_s = self._world, self._job, self._clock.now
        there, extra_s = world.network.devices[device], world.settings.job_s
        forward_s = there.compute_s(job.forward_flops[stage]) + extra_s
        backward_s = there.compute_s(BACKWARD_FORWARDS * job.forward_flops[stage]) + extra_s
        room = world.settings.max_inflight
        free_bytes = MEMORY_SHARE * (there.memory_bytes - job.state_bytes[stage])
        if job.activation_bytes[stage] and math.isfinite(free_bytes):
            room = max(1, min(room, int(free_bytes / job.activation_bytes[stage])))
        peer = Peer(device, name, stage, (forward_s, backward_s), room, now_s, now_s)
        world.peers[name] = peer
        if now_s == 0.0 or (world.version == 0 and not self._steps.covered):
            self._serve(peer)  # version 0 follows from the seed
            return
        self._report.download_bytes += job.state_bytes[stage]
        if world.stages[stage]:
            self._download(peer)
        else:
            down_s = world.lines.down_s(device, job.state_bytes[stage])
            self._clock.after(LOST_S + down_s, self._restore, peer)

    def _download(self, peer: Peer) -> None:
        sources = [source.device for source in self._world.stages[peer.stage].values()]
        part_bytes = self._job.state_bytes[peer.stage] / len(sources) / DOWNLOAD_PARTS
        left = [DOWNLOAD_PARTS * len(sources)]
        for source in sources:
            self._send_part((peer, source, part_bytes, DOWNLOAD_PARTS, left))

    def _send_part(self, download: tuple[Peer, int, float, int, list[int]]) -> None:
        """Send one of `parts` from a source; `left`: of all sources."""
        peer, source, part_bytes, parts, left = download
        if not peer.alive:
            return
        if parts:
            there_s = self._world.lines.send(source, peer.device, part_bytes, self._clock.now)
            again = (peer, source, part_bytes, parts - 1, left)
            self._clock.after(there_s - self._clock.now, self._send_part, again)
            left[0] -= 1
        elif left[0] == 0:
            left[0] = -1  # the other sources end later, or have ended
            self._serve(peer)

    def _restore(self, peer: Peer) -> None:
        """Serve a stage that had lost all its peers: the run goes back to its last checkpoint."""
        if not peer.alive:
            return
        world, steps = self._world, self._steps
        if not world.stages[peer.stage]:  # else another one was first
            back_to = world.version - world.version % world.settings.checkpoint_every
            self._report.generations += bool(steps.covered) or world.version != back_to
            world.generation += 1
            for other in list(world.peers.values()):  # a draining one goes with its last microbatch
                for flight in list(other.flights):
                    self._pipeline.cancel(flight)
            steps.drop()
            self._report.recomputed += (world.version - back_to) * self._job.microbatches * self._job.stages
            world.version = back_to
            del self._report.step_ends_s[back_to:]
            self._trainers.went_back(back_to)
        self._serve(peer)

    def _serve(self, peer: Peer) -> None:
        world, now_s = self._world, self._clock.now
        peer.serving, peer.served_from_s, peer.load_at_s = True, now_s, now_s
        world.stages[peer.stage][peer.name] = peer
        self._trainers.set_peers(peer.stage)
        if world.empty_since_s is not None and all(world.stages):
            self._report.waited_s += now_s - world.empty_since_s
            world.empty_since_s = None
        if now_s > 0.0:  # those that begin together are all there before anything starts
            self._trainers.start_all()

    def _count_out(self, peer: Peer) -> None:
        """Add what a peer did in its stage to the report."""
        if peer.serving:
            self._report.busy_s[peer.stage] += peer.busy_s
            self._report.there_s[peer.stage] += self._clock.now - peer.served_from_s
        peer.alive = peer.serving = False

    def count_out_all(self) -> None:
        """End the run."""
        for peer in self._world.peers.values():
            self._count_out(peer)

    def _leave(self, peer: Peer) -> None:
        world, was_serving = self._world, peer.serving
        self._count_out(peer)
        del world.peers[peer.name]
        world.stages[peer.stage].pop(peer.name, None)
        if was_serving and not world.stages[peer.stage] and world.empty_since_s is None:
            world.empty_since_s = self._clock.now

    def _die(self, peer: Peer) -> None:
        self._report.deaths += 1
        self._leave(peer)
        self._free.append(peer.device)
        self._steps.lose(peer)
        self._clock.after(self._world.settings.detect_s, self._detected, peer)

    def _detected(self, peer: Peer) -> None:
        """Now the others know that a peer is gone."""
        self._trainers.set_peers(peer.stage)
        for flight in list(peer.flights):
            self._pipeline.repair(flight, peer.stage)
        self._trainers.report_soon()

    # -- the choice of stages ---------------------------------------------------------------------

    def _neediest(self, device: int) -> Stage:
        """The stage of greatest need that fits into the device."""
        job, there = self._job, self._world.network.devices[device]
        fit = [stage for stage in range(job.stages) if job.fits(stage, there)]
        needy = neediest(self._records(), stages=job.stages, now_s=self._clock.now)
        both = [stage for stage in needy if stage in fit]
        if both:
            return self._world.dice.pick(both)
        speeds = [sum(1 / sum(p.job_s) for p in self._world.stages[s].values()) for s in range(job.stages)]
        return min(fit, key=lambda s: (speeds[s], s), default=NO_STAGE)

    def _records(self) -> list[PeerRecord]:
        """Records like those that live peers publish."""
        now_s, found = self._clock.now, list[PeerRecord]()
        for peer in self._world.peers.values():
            if peer.draining_to is not None:
                continue
            peer.count_load(now_s)
            period_s = min(now_s - peer.served_from_s, self._world.settings.rebalance_every_s) or 1.0
            upload_bps = self._world.network.devices[peer.device].upload_bps
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
        """Move peers by the live rule; once a period."""
        world, period_s = self._world, self._world.settings.rebalance_every_s
        self._clock.after(period_s, self.rebalance, None)
        told = rebalance(self._records(), stages=self._job.stages, period_s=period_s, now_s=self._clock.now)
        for peer in world.peers.values():
            peer.load_s = 0.0
        for move in () if isinstance(told, Stay) else told.moves:
            peer = world.peers[move.peer]
            if self._job.fits(move.to_stage, world.network.devices[peer.device]):
                moved = Moved(self._clock.now, peer.name, peer.stage, move.to_stage, move.why)
                self._report.moves.append(moved)
                peer.draining_to = move.to_stage
                del world.stages[peer.stage][peer.name]
                self._trainers.set_peers(peer.stage)
                self._leave_if_drained(peer)

    def _leave_if_drained(self, peer: Peer) -> None:
        """Move a peer without microbatches in flight; a replica takes its sums."""
        stage, to_stage = peer.stage, peer.draining_to
        if to_stage is None or peer.flights or not peer.alive:
            return
        self._steps.hand_over(peer, next(iter(self._world.stages[stage].values()), None))
        self._leave(peer)
        self._steps.reduce_if_complete(stage)
        self._add(peer.device, to_stage, peer.name)

"""Steps: the microbatches of each sum, reduces of stages that have all, and the barrier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from peers.sim.throughput.world import Peer, World
from swarm.ids import Microbatch, Stage
from swarm.protocol.ledger import everything


class Steps:
    """What the ledgers of a stage have together."""

    def __init__(self, world: World) -> None:
        self._world, self._report, self._loop = world, world.report, world.loop
        self._every = everything(world.job.microbatches)
        self.covered: dict[int, list[int]] = {}
        """Step -> per stage, the microbatches that are in some sum."""
        self.damaged: set[int] = set()
        """Open steps of which some sum was lost."""
        self.on_step: Callable[[int], None]
        """Called when a step was taken."""
        self._reducing: dict[Stage, asyncio.TimerHandle] = {}
        self._prepared: set[Stage] = set()
        self._committing: asyncio.TimerHandle | None = None

    @property
    def open(self) -> int:
        """Microbatches in sums of steps that were not taken yet, counted by stage."""
        return sum(bitmap.bit_count() for covered in self.covered.values() for bitmap in covered)

    def cover(self, t: int) -> list[int]:
        """Per stage, the microbatches of the step that are in some sum."""
        return self.covered.setdefault(t, [0] * self._world.job.stages)

    def has(self, t: int, stage: Stage, m: int) -> bool:
        """Whether a microbatch is in some sum of the stage, or its step is over."""
        return t < self._world.version or bool(self.cover(t)[stage] >> m & 1)

    def record(self, peer: Peer, t: int, m: int) -> None:
        """Add a microbatch to the sum of a peer; with the last one of a stage begins its reduce."""
        stage, covered = peer.stage, self.covered[t]
        self._report.computed += 1
        peer.ledgers[t].record(m)
        assert not covered[stage] >> m & 1, f"{Microbatch(t, m)} counts twice in stage {stage}"
        covered[stage] |= 1 << m
        if covered[stage] == self._every:
            self.reduce_if_complete(stage)

    def lacking(self, t: int) -> list[int]:
        """Per stage, the microbatches that are in no sum."""
        return [self._every & ~bitmap for bitmap in self.covered[t]]

    def reduce_if_complete(self, stage: Stage) -> None:
        """Begin a round if all microbatches of the open step are in the stage's sums."""
        world, t = self._world, self._world.version
        if t not in self.covered or self.covered[t][stage] != self._every:
            return
        if stage in self._reducing or stage in self._prepared:
            return
        union, there = 0, [p for p in world.peers.values() if p.stage == stage and p.serving]
        for peer in there:
            assert not union & peer.done(t), f"a microbatch of step {t} counts twice in stage {stage}"
            union |= peer.done(t)
        assert union == self._every, f"step {t} lacks a microbatch in stage {stage}"
        size_bytes = world.job.gradient_bytes[stage]
        self._report.reduce_bytes += 2 * (len(there) - 1) * size_bytes
        reduce_s = world.lines.reduce_s([peer.device for peer in there], size_bytes)
        self._reducing[stage] = self._loop.call_later(reduce_s, self._reduced, stage)

    def _reduced(self, stage: Stage) -> None:
        del self._reducing[stage]
        self._prepared.add(stage)
        world = self._world
        if len(self._prepared) == world.job.stages and world.empty_since_s is None:
            # Stage coordinators report to the run coordinator and get its directive.
            heads = [min(world.serving(s), key=lambda p: p.name).device for s in range(world.job.stages)]
            trip_s = 2 * max(world.lines.latency_s(heads[0], head) for head in heads)
            self._committing = self._loop.call_later(trip_s + world.settings.step_s, self._commit)

    def _commit(self) -> None:
        t, self._committing = self._world.version, None
        self._world.version += 1
        self._report.step_ends_s.append(self._loop.now_s)
        self._prepared.clear()
        self.covered.pop(t, None)
        self.damaged.discard(t)
        for peer in self._world.peers.values():
            peer.ledgers.pop(t, None)
        for stage in range(self._world.job.stages):
            self.reduce_if_complete(stage)
        self.on_step(t)

    # -- lost sums --------------------------------------------------------------------------------

    def lose(self, peer: Peer) -> None:
        """Remove the sums of a peer that died."""
        stage, t = peer.stage, self._world.version
        if stage in self._prepared and not self._world.serving(stage):
            # Only peers that are gone had the result, with the parts of those that died before.
            self._prepared.discard(stage)
            if self._committing is not None:
                self._committing.cancel()
            covered = self.covered[t]
            self._report.recomputed += (covered[stage] & ~peer.done(t)).bit_count()
            covered[stage] &= peer.done(t)
        self._remove(peer)
        if stage in self._reducing:
            self._reducing.pop(stage).cancel()
            self.reduce_if_complete(stage)

    def hand_over(self, peer: Peer, replica: Peer | None) -> None:
        """Give the sums of a peer that moves away to a replica, if it has one."""
        if replica is None:
            self._remove(peer)
            return
        for t, ledger in peer.ledgers.items():
            if ledger.done:
                replica.ledger(t, self._world.job.microbatches).take_over(ledger.done)
        if peer.stage in self._reducing:
            self._reducing.pop(peer.stage).cancel()

    def drop(self) -> None:
        """Forget all open steps: the run goes back to a checkpoint."""
        self._report.recomputed += self.open
        for peer in self._world.peers.values():
            peer.ledgers.clear()
        for due in (*self._reducing.values(), self._committing):
            if due is not None:
                due.cancel()
        self.covered.clear()
        self.damaged.clear()
        self._reducing.clear()
        self._prepared.clear()

    def _remove(self, peer: Peer) -> None:
        for t, ledger in peer.ledgers.items():
            # In a prepared stage all replicas hold the complete result: nothing is lost with one of them.
            if ledger.done and not (t == self._world.version and peer.stage in self._prepared):
                self.covered[t][peer.stage] &= ~ledger.done
                self.damaged.add(t)
                self._report.recomputed += ledger.done.bit_count()

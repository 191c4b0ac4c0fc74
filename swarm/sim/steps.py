"""Steps: the microbatches of each sum, reduces of stages that have all, and the barrier."""

from __future__ import annotations

from collections.abc import Callable

from swarm.ids import Microbatch, Stage
from swarm.protocol.ledger import Ledger, everything
from swarm.sim.world import Peer, World


class Steps:
    """The live `Ledger` of each peer, and what the ledgers of a stage have together."""

    def __init__(self, world: World) -> None:
        self._world, self._report, self._clock = world, world.report, world.clock
        self._every = everything(world.job.microbatches)
        self.covered: dict[int, list[int]] = {}
        """Step -> per stage, the microbatches that are in some sum."""
        self.damaged: set[int] = set()
        """Open steps of which some sum was lost."""
        self.on_step: Callable[[int], None]
        """Called when a step was taken."""
        self._reducing: dict[Stage, object] = {}
        self._prepared: set[Stage] = set()
        self._committing: object | None = None

    @property
    def open(self) -> int:
        """Microbatches in sums of steps that were not taken yet, counted by stage."""
        return sum(bitmap.bit_count() for covered in self.covered.values() for bitmap in covered)

    def is_complete(self, t: int, stage: Stage) -> bool:
        """Whether all microbatches are in the stage's sums."""
        return self.covered[t][stage] == self._every

    def cover(self, t: int) -> list[int]:
        """Per stage, the microbatches of the step that are in some sum."""
        return self.covered.setdefault(t, [0] * self._world.job.stages)

    def ledger(self, peer: Peer, t: int) -> Ledger:
        """The ledger of one peer for the step."""
        ledger = peer.ledgers.get(t)
        if ledger is None:
            ledger = peer.ledgers[t] = Ledger(t, self._world.job.microbatches)
        return ledger

    def record(self, peer: Peer, t: int, m: int) -> None:
        """Add a microbatch to the sum of a peer."""
        ledger, covered = peer.ledgers[t], self.covered[t]
        ledger.release(m)
        ledger.record(m)
        assert not covered[peer.stage] >> m & 1, f"{Microbatch(t, m)} counts twice in stage {peer.stage}"
        covered[peer.stage] |= 1 << m

    def lacking(self, t: int) -> list[int]:
        """Per stage, the microbatches that are in no sum."""
        return [self._every & ~bitmap for bitmap in self.covered[t]]

    def reduce_if_complete(self, stage: Stage) -> None:
        """Begin a round if all microbatches of the open step are in the stage's sums."""
        world, t = self._world, self._world.version
        if t not in self.covered or not self.is_complete(t, stage):
            return
        if stage in self._reducing or stage in self._prepared:
            return
        union, there = 0, [p for p in world.peers.values() if p.stage == stage and p.serving]
        for peer in there:
            done = self._done(peer)
            assert not union & done, f"a microbatch of step {t} counts twice in stage {stage}"
            union |= done
        assert union == self._every, f"step {t} lacks a microbatch in stage {stage}"
        token = self._reducing[stage] = object()
        size_bytes = world.job.gradient_bytes[stage]
        self._report.reduce_bytes += 2 * (len(there) - 1) * size_bytes
        reduce_s = world.lines.reduce_s([peer.device for peer in there], size_bytes)
        self._clock.after(reduce_s, self._reduced, (stage, token))

    def _reduced(self, reduced: tuple[Stage, object]) -> None:
        stage, token = reduced
        if self._reducing.get(stage) is not token:
            return
        del self._reducing[stage]
        self._prepared.add(stage)
        world = self._world
        if len(self._prepared) == world.job.stages and all(world.stages):
            # Stage coordinators report to the run coordinator and get its directive.
            heads = [min(there.values(), key=lambda p: p.name).device for there in world.stages]
            trip_s = 2 * max(world.lines.latency_s(heads[0], head) for head in heads)
            self._committing = object()
            self._clock.after(trip_s + world.settings.step_s, self._commit, self._committing)

    def _commit(self, token: object) -> None:
        if token is not self._committing:
            return
        t = self._world.version
        self._world.version += 1
        self._report.step_ends_s.append(self._clock.now)
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
        """Remove the sums of a peer that died, and that is no longer in `world.stages`."""
        stage, version = peer.stage, self._world.version
        if stage in self._prepared and not self._world.stages[stage]:
            # Only peers that are gone had the result, with the parts of those that died before.
            self._prepared.discard(stage)
            self._committing = None
            covered = self.covered[version]
            self._report.recomputed += (covered[stage] & ~self._done(peer)).bit_count()
            covered[stage] &= self._done(peer)
        self._remove(peer)
        if stage in self._reducing:
            del self._reducing[stage]  # the round is void
            self.reduce_if_complete(stage)

    def hand_over(self, peer: Peer, replica: Peer | None) -> None:
        """Give the sums of a peer that moves away to a replica, if it has one."""
        if replica is None:
            self._remove(peer)
            return
        for t, ledger in peer.ledgers.items():
            if ledger.done:
                self.ledger(replica, t).take_over(ledger.done)
        self._reducing.pop(peer.stage, None)

    def drop(self) -> None:
        """Forget all open steps: the run goes back to a checkpoint."""
        self._report.recomputed += self.open
        for peer in self._world.peers.values():
            peer.ledgers.clear()
        self.covered.clear()
        self.damaged.clear()
        self._reducing.clear()
        self._prepared.clear()
        self._committing = None

    def _remove(self, peer: Peer) -> None:
        for t, ledger in peer.ledgers.items():
            # In a prepared stage all replicas hold the complete result: nothing is lost with one of them.
            if ledger.done and not (t == self._world.version and peer.stage in self._prepared):
                self.covered[t][peer.stage] &= ~ledger.done
                self.damaged.add(t)
                self._report.recomputed += ledger.done.bit_count()

    def _done(self, peer: Peer) -> int:
        """The microbatches of the open step in the sum of a peer."""
        ledger = peer.ledgers.get(self._world.version)
        return ledger.done if ledger is not None else 0

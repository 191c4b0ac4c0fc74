"""Steps: what is in which sum, reduces when a stage has all, and the barrier."""

from __future__ import annotations

from swarm.ids import Microbatch, Stage
from swarm.protocol.ledger import Ledger, everything
from swarm.sim.actors import Peer
from swarm.sim.world import Part, World


class Steps(Part):
    """The live `Ledger` of each peer, and what they have together."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._every = everything(world.job.microbatches)
        self.covered: dict[int, list[int]] = {}
        """Step -> per stage, the microbatches that are in some sum."""
        self.hurt: set[int] = set()
        """Open steps of which some sum was lost."""
        self._reducing: dict[Stage, object] = {}
        self._prepared: set[Stage] = set()
        self._going: object | None = None

    @property
    def open(self) -> int:
        """Microbatches in sums of steps that were not taken yet, counted by stage."""
        return sum(bitmap.bit_count() for covered in self.covered.values() for bitmap in covered)

    def whole(self, t: int, stage: Stage) -> bool:
        """Whether all microbatches are in the stage's sums."""
        return self.covered[t][stage] == self._every

    def cover(self, t: int) -> list[int]:
        """What is in some sum of the step, by stage."""
        if t not in self.covered:
            self.covered[t] = [0] * self._job.stages
        return self.covered[t]

    def ledger(self, peer: Peer, t: int) -> Ledger:
        """A peer's own, of the step."""
        ledger = peer.ledgers.get(t)
        if ledger is None:
            ledger = peer.ledgers[t] = Ledger(t, self._job.microbatches)
        return ledger

    def record(self, peer: Peer, t: int, m: int) -> None:
        """A microbatch goes into the sum of a peer."""
        ledger, covered = peer.ledgers[t], self.covered[t]
        ledger.release(m)
        ledger.record(m)
        assert not covered[peer.stage] >> m & 1, f"{Microbatch(t, m)} counts twice in stage {peer.stage}"
        covered[peer.stage] |= 1 << m

    def lacking(self, t: int) -> list[int]:
        """Of each stage the microbatches that are in no sum."""
        return [self._every & ~bitmap for bitmap in self.covered[t]]

    def reduce_if_whole(self, stage: Stage) -> None:
        """Begin a round if all microbatches of the open step are in the stage's sums."""
        covered = self.covered.get(self._world.version)
        if covered is None or covered[stage] != self._every:
            return
        if stage in self._reducing or stage in self._prepared:
            return
        t, union = self._world.version, 0
        there = [p for p in self._world.peers.values() if p.stage == stage and p.serving]
        for peer in there:
            done = self._done(peer)
            assert not union & done, f"a microbatch of step {t} counts twice in stage {stage}"
            union |= done
        assert union == self._every, f"step {t} is not whole in stage {stage}"
        token = self._reducing[stage] = object()
        size_bytes = self._job.gradient_bytes[stage]
        self._report.reduce_bytes += 2 * (len(there) - 1) * size_bytes
        reduce_s = self._lines.reduce_s([peer.device for peer in there], size_bytes)
        self._clock.after(reduce_s, self._reduced, (stage, token))

    def _reduced(self, reduced: tuple[Stage, object]) -> None:
        stage, token = reduced
        if self._reducing.get(stage) is not token:
            return
        del self._reducing[stage]
        self._prepared.add(stage)
        if len(self._prepared) == self._job.stages and all(self._world.stages):
            # Coordinators report to the run coordinator, and hear from it.
            heads = [min(there.values(), key=lambda p: p.name).device for there in self._world.stages]
            trip_s = 2 * max(self._lines.latency_s(heads[0], head) for head in heads)
            self._going = object()
            self._clock.after(trip_s + self._settings.step_s, self._go, self._going)

    def _go(self, token: object) -> None:
        if token is not self._going:
            return
        t = self._world.version
        self._world.version += 1
        self._report.step_ends_s.append(self._clock.now)
        self._prepared.clear()
        self.covered.pop(t, None)
        self.hurt.discard(t)
        for peer in self._world.peers.values():
            peer.ledgers.pop(t, None)
        self._world.trainers.stepped(t)
        for stage in range(self._job.stages):
            self.reduce_if_whole(stage)
        self._world.trainers.start_all()

    # -- what is lost -----------------------------------------------------------------------------

    def without(self, peer: Peer) -> None:
        """It died, and so did its sums; it is in `world.stages` no more."""
        stage, version = peer.stage, self._world.version
        if stage in self._prepared and not self._world.stages[stage]:
            # Results of members that died before had only been with those that are gone now, too.
            self._prepared.discard(stage)
            self._going = None
            covered = self.covered[version]
            self._report.recomputed += (covered[stage] & ~self._done(peer)).bit_count()
            covered[stage] &= self._done(peer)
        self._lose(peer)
        if stage in self._reducing:
            del self._reducing[stage]  # the round is void
            self.reduce_if_whole(stage)

    def hand_over(self, peer: Peer, replica: Peer | None) -> None:
        """It goes elsewhere: its sums are a replica's then, if it has one."""
        if replica is None:
            self._lose(peer)
            return
        for t, ledger in peer.ledgers.items():
            if ledger.done:
                self.ledger(replica, t).take_over(ledger.done)
        self._reducing.pop(peer.stage, None)

    def drop(self) -> None:
        """The run goes back: what the open steps hold is worth nothing any more."""
        self._report.recomputed += self.open
        for peer in self._world.peers.values():
            peer.ledgers.clear()
        self.covered.clear()
        self.hurt.clear()
        self._reducing.clear()
        self._prepared.clear()
        self._going = None

    def _lose(self, peer: Peer) -> None:
        """Its sums are gone."""
        for t, ledger in peer.ledgers.items():
            # Of a prepared stage all the others hold the whole result: nothing is lost with one of them.
            if ledger.done and not (t == self._world.version and peer.stage in self._prepared):
                self.covered[t][peer.stage] &= ~ledger.done
                self.hurt.add(t)
                self._report.recomputed += ledger.done.bit_count()

    def _done(self, peer: Peer) -> int:
        """What it has in its sum of the open step."""
        ledger = peer.ledgers.get(self._world.version)
        return ledger.done if ledger is not None else 0

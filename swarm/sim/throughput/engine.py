"""One run, event by event: the live policies over devices, lines, deaths and joins.

A microbatch goes as in `docs/design.md`: routed by the trainer's `Router`, forward through a peer of each
stage, loss and backward in the last one, and back, each peer taking it into its `Ledger`. Devices do one job
at a time, backwards first. When a stage has all microbatches its members reduce; when all stages have, the
conductor says go and the next step begins, whose first requests wait at stage 0 already. What a dead peer had
under way is given to another one of its stage, what it had in its sum is run again through the `WorkList`.

What is coarse: control messages take no bandwidth; tokens and labels are small; a reduce is a formula
(`Lines.reduce_s`) and does not share the lines with transfers; trainers know of each other's claims at once,
so nothing is done twice and undone; full peers let requests wait instead of refusing them; a joiner serves
as soon as it has the state; a keeper has whatever a lost stage goes back to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from swarm.errors import SetupError
from swarm.ids import PeerId, Stage
from swarm.plan.advice import Advice, Newcomer, choose_stages
from swarm.plan.network import BACKWARD_FORWARDS, Job, Network
from swarm.plan.places import read_place
from swarm.policy.ledger import Claim, Ledger, everything
from swarm.policy.rebalance import Stay, neediest, rebalance
from swarm.policy.router import NoPeerForStage, Router
from swarm.policy.window import Window
from swarm.policy.worklist import Work, WorkList
from swarm.records import PeerRecord
from swarm.sim.clock import Clock
from swarm.sim.dice import Dice
from swarm.sim.throughput.actors import Flight, Peer, Trainer
from swarm.sim.throughput.lines import Lines
from swarm.sim.throughput.report import Moved, Report, Settings
from swarm.sim.throughput.trace import Change, Trace, changes
from swarm.sim.throughput.whereabouts import Whereabouts, whereabouts

NOBODY: Stage = -1
"""In a layout: this device is not used (yet)."""
MEMORY_SHARE = 0.5
"""Of the memory that is free after the state, for microbatches in flight; as in `peers/roles.py`."""
LOST_S = 6.0
"""A joiner of a stage that nobody serves waits so long for a member that may be cut off."""
DOWNLOAD_PIECES = 32
"""A state travels in so many pieces from each source, between which other transfers have their turn."""


def simulate(
    network: Network,
    job: Job,
    layout: Sequence[Stage],
    *,
    end_s: float,
    settings: Settings | None = None,
    trace: Trace | None = None,
    steps: int | None = None,
    seed: int = 0,
) -> Report:
    """A run from version 0, until `end_s` or after `steps` steps.

    Args:
        layout: the stage of each device of the network, `NOBODY` for those that are not used.
        trace: how many devices are up. Who is up at its beginning takes its stage from the layout, who comes
            later goes where it is needed most. None: all of the layout, for ever.

    Raises:
        SetupError: the layout, the job and the network do not fit together; the text says where.
    """
    if not 0 < end_s < math.inf:
        raise SetupError(f"cannot simulate for {end_s} s")
    run = Simulation(network, job, layout, settings or Settings(), trace, seed)
    return run.run(end_s, steps)


class Simulation:
    """See `simulate`."""

    def __init__(
        self,
        network: Network,
        job: Job,
        layout: Sequence[Stage],
        settings: Settings,
        trace: Trace | None,
        seed: int,
    ) -> None:
        _check(network, job, layout, trace)
        self.network, self.job, self.settings = network, job, settings
        self.clock, self.lines, self._dice = Clock(), Lines(network), Dice(seed)
        self.report = Report(
            job.microbatches, job.stages, busy_s=[0.0] * job.stages, there_s=[0.0] * job.stages,
            bin_s=settings.bin_s,
        )  # fmt: skip
        self._layout = list(layout)
        self._all = everything(job.microbatches)
        self._seed = seed
        self._version = self._era = 0
        self._stages: list[dict[PeerId, Peer]] = [{} for _ in range(job.stages)]
        """Who serves."""
        self._peers: dict[PeerId, Peer] = {}
        """Who is up: joining, serving, draining."""
        self._free = list(range(len(network)))[::-1]
        self._idle: dict[PeerId, int] = {}
        """Joiners that no stage fits into, and their devices."""
        self._made = 0
        self._known = whereabouts(network, seed) if settings.planned else []
        self._covered: dict[int, list[int]] = {}
        """Step -> per stage, the microbatches that are in some sum."""
        self._under_way: dict[int, int] = {}
        """Step -> microbatches in flight."""
        self._reducing: dict[Stage, object] = {}
        self._prepared: set[Stage] = set()
        self._going: object | None = None
        self._empty_since_s: float | None = 0.0
        self._hurt: set[int] = set()
        """Open steps of which some sum was lost."""
        self._news_due = False
        self._wakeup_s = math.inf
        self._went_at_s = 0.0
        self._trace = trace
        self._todo = WorkList(self._order, job.microbatches)
        window = settings.window
        self._trainers = [
            Trainer(
                (i * len(network)) // settings.trainers,
                Router(),
                Window(start=window or 2 * job.stages, largest=window or 1024, fixed=bool(window)),
            )
            for i in range(settings.trainers)
        ]

    # -- beginning and end ------------------------------------------------------------------------

    def run(self, end_s: float, steps: int | None) -> Report:
        clock = self.clock
        if self._trace is None:
            for device, stage in enumerate(self._layout):
                if stage != NOBODY:
                    self._free.remove(device)
                    self._add(device, stage, f"p{device:06d}")
                    self.report.joins += 1
        else:
            for change in changes(self._trace, self._seed):
                if change.at_s < end_s:
                    clock.after(change.at_s, None, self._change, change)
        if self.settings.rebalance_every_s:
            clock.after(self.settings.rebalance_every_s / 2, None, self._rebalance, None)
        clock.after(0.0, None, self._wake, None)
        clock.run(until=lambda: steps is not None and self._version >= steps, limit_s=end_s)
        report, ended_s = self.report, clock.now if steps is not None and self._version >= steps else end_s
        self.clock.now = ended_s
        if self._empty_since_s is not None:
            report.waited_s += ended_s - self._empty_since_s
        for peer in list(self._peers.values()):
            self._count_out(peer)
        report.end_s, report.version, report.events = ended_s, self._version, clock.events
        report.replayed = self._todo.replayed
        report.open = sum(bitmap.bit_count() for covered in self._covered.values() for bitmap in covered)
        return report

    def _order(self, t: int) -> Sequence[int]:
        return Dice(self._seed * 1_000_003 + t).shuffled(range(self.job.microbatches))

    # -- coming and going -------------------------------------------------------------------------

    def _change(self, change: Change) -> None:
        for name in change.died:
            if name in self._peers:
                self._die(self._peers[name])
            else:
                self._free.append(self._idle.pop(name))
        first = change.at_s == 0.0
        for name in change.joined:
            device = self._free.pop()
            stage = self._layout[device] if first else NOBODY
            if stage == NOBODY:
                stage = self._where_needed(device)
            self.report.joins += 1
            if stage == NOBODY:
                self.report.idle += 1
                self._idle[name] = device
                continue
            self._add(device, stage, name)

    def _where_needed(self, device: int) -> Stage:
        """The stage of greatest need that fits into the device."""
        job, there = self.job, self.network.devices[device]
        fit = [stage for stage in range(job.stages) if job.fits(stage, there)]
        records = self._records()
        if self._known and len(fit) == job.stages:
            newcomer = Newcomer(f"p{self._made:06d}", read_place(self._known[device].place))
            return choose_stages(records, job, [newcomer])[newcomer.peer]
        needy = neediest(records, stages=job.stages, now_s=self.clock.now)
        both = [stage for stage in needy if stage in fit]
        if both:
            return self._dice.pick(both)
        speeds = [sum(1 / sum(p.job_s) for p in self._stages[s].values()) for s in range(job.stages)]
        return min(fit, key=lambda s: (speeds[s], s), default=NOBODY)

    def _add(self, device: int, stage: Stage, name: PeerId) -> None:
        """`device` comes to `stage`: it serves when it has the state."""
        job, there, now_s = self.job, self.network.devices[device], self.clock.now
        forward_s = there.compute_s(job.forward_flops[stage]) + self.settings.job_s
        backward_s = there.compute_s(BACKWARD_FORWARDS * job.forward_flops[stage]) + self.settings.job_s
        room = self.settings.max_inflight
        free_bytes = MEMORY_SHARE * (there.memory_bytes - job.state_bytes[stage])
        if job.activation_bytes[stage] and math.isfinite(free_bytes):
            room = max(1, min(room, int(free_bytes / job.activation_bytes[stage])))
        peer = Peer(device, name, stage, (forward_s, backward_s), room, now_s)
        self._peers[name] = peer
        if now_s == 0.0 or (self._version == 0 and not self._covered):
            self._serve(peer)  # version 0 follows from the seed
        elif self._stages[stage]:
            self._download(peer)
        else:
            down_s = self.lines._down_s[device] * job.state_bytes[stage]
            self.report.download_bytes += job.state_bytes[stage]
            self.clock.after(LOST_S + down_s, None, self._bring_back, peer)

    def _download(self, peer: Peer) -> None:
        sources = [source.device for source in self._stages[peer.stage].values()]
        piece_bytes = self.job.state_bytes[peer.stage] / len(sources) / DOWNLOAD_PIECES
        self.report.download_bytes += self.job.state_bytes[peer.stage]
        left = [DOWNLOAD_PIECES * len(sources)]
        for source in sources:
            self._piece((peer, source, piece_bytes, DOWNLOAD_PIECES, left))

    def _piece(self, download: tuple[Peer, int, float, int, list[int]]) -> None:
        peer, source, piece_bytes, pieces, left = download
        if not peer.alive:
            return
        if pieces:
            there_s = self.lines.send(source, peer.device, piece_bytes, self.clock.now)
            again = (peer, source, piece_bytes, pieces - 1, left)
            self.clock.after(there_s - self.clock.now, None, self._piece, again)
            left[0] -= 1
        elif left[0] == 0:
            left[0] = -1  # the other sources end later, or have ended
            self._serve(peer)

    def _bring_back(self, peer: Peer) -> None:
        """A stage had lost all its members: the run goes back to what can be had of all stages."""
        if not peer.alive:
            return
        if self._stages[peer.stage]:
            self._serve(peer)  # another one was first
            return
        back_to = self._version - self._version % self.settings.checkpoint_every
        self.report.eras += bool(self._covered) or self._version != back_to
        self._era += 1
        self._drop_all()
        self.report.recomputed += (self._version - back_to) * self.job.microbatches * self.job.stages
        self._version = back_to
        del self.report.step_ends_s[back_to:]
        self._todo.went_back(back_to)
        self._serve(peer)

    def _drop_all(self) -> None:
        """What the open steps hold is worth nothing any more."""
        for peer in list(self._peers.values()):  # who is on the way out goes with its last microbatch
            for flight in list(peer.flights):
                self._cancel(flight)
        for covered in self._covered.values():
            self.report.recomputed += sum(bitmap.bit_count() for bitmap in covered)
        for peer in self._peers.values():
            peer.ledgers.clear()
        self._covered.clear()
        self._hurt.clear()
        self._reducing.clear()
        self._prepared.clear()
        self._going = None

    def _serve(self, peer: Peer) -> None:
        peer.serving, peer.served_from_s = True, self.clock.now
        peer.load_at_s = self.clock.now
        self._stages[peer.stage][peer.name] = peer
        self._tell_trainers(peer.stage)
        if self._empty_since_s is not None and all(self._stages):
            self.report.waited_s += self.clock.now - self._empty_since_s
            self._empty_since_s = None
        if self.clock.now > 0.0:  # those who begin together are all there before anything starts
            self._start_all()

    def _tell_trainers(self, stage: Stage) -> None:
        names = list(self._stages[stage])
        room = sum(peer.room for peer in self._stages[0].values())
        for trainer in self._trainers:
            trainer.router.set_peers(stage, names)
            if self.settings.window is None and room:
                trainer.window.set_largest(room)

    def _count_out(self, peer: Peer) -> None:
        """What a peer did in its stage goes into the report."""
        if peer.serving:
            self.report.busy_s[peer.stage] += peer.busy_s
            self.report.there_s[peer.stage] += self.clock.now - peer.served_from_s
        peer.alive = peer.serving = False

    def _out(self, peer: Peer) -> None:
        """It does not serve its stage any more."""
        was_serving = peer.serving
        self._count_out(peer)
        del self._peers[peer.name]
        self._stages[peer.stage].pop(peer.name, None)
        if was_serving and not self._stages[peer.stage] and self._empty_since_s is None:
            self._empty_since_s = self.clock.now

    def _die(self, peer: Peer) -> None:
        self.report.deaths += 1
        self._out(peer)
        self._free.append(peer.device)
        stage = peer.stage
        if stage in self._prepared and not self._stages[stage]:
            # Results of members that died before had only been with those that are gone now, too.
            self._prepared.discard(stage)
            self._going = None
            self.report.recomputed += (self._covered[self._version][stage] & ~self._done(peer)).bit_count()
            self._covered[self._version][stage] &= self._done(peer)
        self._lose(peer)
        if stage in self._reducing:
            del self._reducing[stage]  # the round is void
            self._reduce_if_whole(stage)
        self.clock.after(self.settings.detect_s, None, self._missed, peer)

    def _lose(self, peer: Peer) -> None:
        """Its sums are gone."""
        for t, ledger in peer.ledgers.items():
            # Of a prepared stage all the others hold the whole result: nothing is lost with one of them.
            if ledger.done and not (t == self._version and peer.stage in self._prepared):
                self._covered[t][peer.stage] &= ~ledger.done
                self._hurt.add(t)
                self.report.recomputed += ledger.done.bit_count()

    def _done(self, peer: Peer) -> int:
        """What it has in its sum of the open step."""
        ledger = peer.ledgers.get(self._version)
        return ledger.done if ledger is not None else 0

    def _missed(self, peer: Peer) -> None:
        """Now the others know that it is dead."""
        self._tell_trainers(peer.stage)
        for flight in list(peer.flights):
            self._repair(flight, peer.stage)
        self._news_soon()

    # -- moving -----------------------------------------------------------------------------------

    def _records(self) -> list[PeerRecord]:
        now_s = self.clock.now
        found: list[PeerRecord] = []
        for peer in self._peers.values():
            if peer.draining_to is not None:
                continue
            seconds = now_s - peer.served_from_s
            peer.count_load(now_s)
            period_s = min(seconds, self.settings.rebalance_every_s) or 1.0
            upload_bps = self.network.devices[peer.device].upload_bps
            known = self._known[peer.device] if self._known else Whereabouts((), 0.0, 0.0)
            found.append(
                PeerRecord(
                    peer=peer.name,
                    run="simulated",
                    stage=peer.stage,
                    state="serving" if peer.serving else "joining",
                    version=self._version,
                    speed=1.0 / sum(peer.job_s) if peer.computed else 0.0,
                    load=peer.load_s / period_s if peer.serving else 0.0,
                    state_bytes=round(self.job.state_bytes[peer.stage]),
                    bandwidth_bps=upload_bps if math.isfinite(upload_bps) else 0.0,
                    place=known.place,
                    widest_bps=known.widest_bps,
                    in_flight_bytes=known.in_flight_bytes,
                    since=peer.came_s,
                )
            )
        return found

    def _rebalance(self, _: None) -> None:
        period_s = self.settings.rebalance_every_s
        self.clock.after(period_s, None, self._rebalance, None)
        records = self._records()
        told = rebalance(
            records, stages=self.job.stages, period_s=period_s, now_s=self.clock.now,
            step_s=Advice(records, self.job).step_s if self._known else None,
        )  # fmt: skip
        for peer in self._peers.values():
            peer.load_s = 0.0
        if isinstance(told, Stay):
            return
        for move in told.moves:
            peer = self._peers[move.peer]
            if self.job.fits(move.to_stage, self.network.devices[peer.device]):
                self.report.moves.append(
                    Moved(self.clock.now, peer.name, peer.stage, move.to_stage, move.why)
                )
                peer.draining_to = move.to_stage
                del self._stages[peer.stage][peer.name]
                self._tell_trainers(peer.stage)
                self._leave_if_done(peer)

    def _leave_if_done(self, peer: Peer) -> None:
        """It goes when nothing is under way there; its sums are a mate's then."""
        if peer.draining_to is None or peer.flights or not peer.alive:
            return
        mate = next(iter(self._stages[peer.stage].values()), None)
        if mate is not None:
            for t, ledger in peer.ledgers.items():
                if ledger.done:
                    self._ledger(mate, t).take_over(ledger.done)
            if peer.stage in self._reducing:
                del self._reducing[peer.stage]
        else:
            self._lose(peer)
        stage, to_stage = peer.stage, peer.draining_to
        self._out(peer)
        self._reduce_if_whole(stage)
        self._add(peer.device, to_stage, peer.name)

    # -- trainers ---------------------------------------------------------------------------------

    def _start_all(self) -> None:
        for trainer in self._trainers:
            self._start(trainer)

    def _start(self, trainer: Trainer) -> None:
        """As many microbatches as the window holds."""
        if self._empty_since_s is not None:
            return
        now_s = self.clock.now
        newest = self._version + self.settings.delayed_updates
        while trainer.running < trainer.window.size:
            item = self._todo.next(newest, now=now_s)
            if item is None:
                due_s = self._todo.next_wakeup(now=now_s)
                if due_s is not None and not now_s < self._wakeup_s <= due_s:
                    self._wakeup_s = max(due_s, now_s + 0.001)
                    self.clock.after(self._wakeup_s - now_s, None, self._wake, None)
                return
            if not self._launch(trainer, item):
                return

    def _wake(self, _: None) -> None:
        self._wakeup_s = math.inf
        self._start_all()

    def _launch(self, trainer: Trainer, item: Work) -> bool:
        """Send a microbatch on its way; False if some stage cannot be reached."""
        now_s, t, m = self.clock.now, item.microbatch.t, item.microbatch.m
        covered = self._cover(t)
        horizon_s = trainer.pace.horizon_s(
            self._todo.unstarted(t) + (self.job.microbatches if self.settings.delayed_updates else 0)
        )
        hops: list[Peer] = []
        held = [bool(bitmap >> m & 1) for bitmap in covered]
        try:
            for stage, there in enumerate(self._stages):
                if held[stage]:
                    hops.append(self._holder(t, m, stage))
                else:
                    way_s = None
                    if self.settings.routers_learn == "ways" and hops:
                        way_s = partial(trainer.ways.expected_s, hops[-1].name)
                    route = trainer.router.route(stage, now=now_s, horizon_s=horizon_s, way_s=way_s)
                    hops.append(there.get(route.peer) or self._dead(route.peer, stage))
        except NoPeerForStage:
            self._todo.failed(item.microbatch)
            return False
        flight = Flight(trainer, item.microbatch, hops, self._era)
        if all(held):
            self._todo.finished(item.microbatch, now=now_s)
            return True
        if any(held):
            # Who has the microbatch gives what it kept: the input from below, the gradient from above.
            flight.recorded = held
            lacking = [stage for stage, has in enumerate(held) if not has]
            flight.first, flight.last = max(0, lacking[0] - 1), min(flight.last, lacking[-1] + 1)
        trainer.running += 1
        self._under_way[t] = self._under_way.get(t, 0) | 1 << m
        for stage in range(flight.first, flight.last + 1):
            hops[stage].flights[flight] = None
        flight.pos = flight.first
        # The first requests of a step were sent ahead, and wait where they are needed.
        latency_s = 0.0
        if flight.first == 0 and now_s > self._went_at_s:
            latency_s = self.lines.latency_s(trainer.device, hops[0].device)
        self.clock.after(latency_s, None, self._arrive, (flight, flight.first, hops[flight.first]))
        return True

    def _dead(self, name: PeerId, stage: Stage) -> Peer:
        """A peer of which its death, or that it goes, is not known yet: whoever calls it will find out."""
        gone = Peer(0, name, stage, (0.0, 0.0), 1, self.clock.now)
        gone.alive = False
        self.clock.after(self.settings.detect_s, None, self._missed, gone)
        return gone

    def _holder(self, t: int, m: int, stage: Stage) -> Peer:
        for peer in self._peers.values():
            if peer.stage == stage and t in peer.ledgers and peer.ledgers[t].done >> m & 1:
                return peer
        # Its stage is prepared: all members hold the result, and the tensors were passed on.
        return next(iter(self._stages[stage].values()))

    def _answered(self, flight: Flight) -> None:
        """The trainer has the loss."""
        trainer, now_s = flight.trainer, self.clock.now
        trainer.running -= 1
        if flight.era != self._era:
            self._start(trainer)
            return
        self._todo.finished(flight.microbatch, now=now_s)
        trainer.window.answered(now=now_s)
        trainer.pace.answered(now=now_s)
        trainer.shared += flight.t == self._version
        computing = self.settings.routers_learn != "response"
        for here, there, way_s in zip(flight.hops, flight.hops[1:], flight.way_s, strict=False):
            if way_s > 0.0:
                trainer.ways.took(here.name, there.name, way_s)
        for stage in range(flight.first, flight.last + 1):
            own_s, hop = flight.own_s[stage], flight.hops[stage]
            if own_s > 0.0:
                trainer.router.answered(stage, hop.name, sum(hop.job_s) if computing else own_s)
        self._count_answer(now_s)
        self._start(trainer)

    def _count_answer(self, now_s: float) -> None:
        number, answered = int(now_s / self.report.bin_s), self.report.answered
        while len(answered) <= number:
            answered.append(0)
        answered[number] += 1

    def _cancel(self, flight: Flight) -> None:
        """Its call failed: it is to be started again."""
        if not flight.alive:
            return
        flight.alive = False
        self._land(flight)
        for stage in range(flight.first, flight.last + 1):
            peer = flight.hops[stage]
            if flight in peer.flights:
                self._leave_peer(flight, peer)
                if flight.t in peer.ledgers and not flight.recorded[stage]:
                    peer.ledgers[flight.t].release(flight.m)
        self._todo.failed(flight.microbatch)
        self.clock.after(0.05, None, self._failed, flight.trainer)

    def _failed(self, trainer: Trainer) -> None:
        trainer.running -= 1
        self._news_soon()
        self._start(trainer)

    def _land(self, flight: Flight) -> None:
        if flight.t in self._under_way:
            self._under_way[flight.t] &= ~(1 << flight.m)

    # -- devices ----------------------------------------------------------------------------------

    def _arrive(self, arrival: tuple[Flight, Stage, Peer]) -> None:
        """Activations are there."""
        flight, stage, peer = arrival
        if not flight.alive or not peer.alive or flight.hops[stage] is not peer:
            return  # whoever sent them hears of it
        if flight.recorded[stage]:
            self._forward_done(flight, stage, peer)
            return
        claim = self._ledger(peer, flight.t).claim(flight.m)
        assert claim is Claim.NEW, f"{flight.microbatch} came to {peer.name} twice"
        flight.reached_s[stage] = self.clock.now
        peer.count_load(self.clock.now)
        if len(peer.held) >= peer.room:
            peer.waiting.append(flight)
        else:
            self._admit(peer, flight)

    def _admit(self, peer: Peer, flight: Flight) -> None:
        peer.held[flight] = None
        peer.forwards.append(flight)
        if not peer.busy:
            self._work(peer)

    def _work(self, peer: Peer) -> None:
        """The next job of an idle device."""
        while peer.backwards or peer.forwards:
            back = bool(peer.backwards)
            flight = peer.backwards.popleft() if back else peer.forwards.popleft()
            if not flight.alive or flight.hops[peer.stage] is not peer:
                continue
            peer.busy = True
            forward_s, backward_s = peer.job_s
            job_s = backward_s if back else forward_s
            if not back and peer.stage == self.job.stages - 1:
                job_s += backward_s
            self.clock.after(job_s, None, self._worked, (peer, flight, back, job_s))
            return

    def _worked(self, job: tuple[Peer, Flight, bool, float]) -> None:
        peer, flight, back, job_s = job
        if not peer.alive:
            return
        peer.count_load(self.clock.now)
        peer.busy = False
        peer.busy_s += job_s
        sent_s = self.clock.now
        if flight.alive and flight.hops[peer.stage] is peer:
            stage = peer.stage
            flight.own_s[stage] += self.clock.now - flight.reached_s[stage]
            if back or stage == self.job.stages - 1:
                sent_s = self._backward_done(flight, stage, peer)
            else:
                sent_s = self._forward_done(flight, stage, peer)
        if self.settings.blocking and sent_s > self.clock.now:
            peer.busy = True
            self.clock.after(sent_s - self.clock.now, None, self._sent, peer)
        else:
            self._work(peer)

    def _sent(self, peer: Peer) -> None:
        if peer.alive:
            peer.busy = False
            self._work(peer)

    def _forward_done(self, flight: Flight, stage: Stage, peer: Peer) -> float:
        """Activations go on; returns when they are there."""
        if flight.refill == stage:
            self._refilled(flight, stage)
            return self.clock.now
        if stage == flight.last:
            return self._send_back(flight, stage)  # it kept the gradient for its input
        flight.pos = stage + 1
        return self._send_on(flight, stage)

    def _send_on(self, flight: Flight, stage: Stage) -> float:
        size_bytes = self.job.forward_bytes[stage]
        self.report.boundary_bytes += size_bytes
        here, there = flight.hops[stage], flight.hops[stage + 1]
        there_s = self.lines.send(here.device, there.device, size_bytes, self.clock.now)
        flight.way_s[stage] = there_s - self.clock.now
        self.clock.after(there_s - self.clock.now, None, self._arrive, (flight, stage + 1, there))
        return there_s

    def _backward_done(self, flight: Flight, stage: Stage, peer: Peer) -> float:
        """The gradient of its weights goes into the sum, that of its input back."""
        peer.computed += 1
        self.report.computed += 1
        ledger = peer.ledgers[flight.t]
        ledger.release(flight.m)
        ledger.record(flight.m)
        flight.recorded[stage] = True
        covered = self._covered[flight.t]
        assert not covered[stage] >> flight.m & 1, f"{flight.microbatch} counts twice in stage {stage}"
        covered[stage] |= 1 << flight.m
        self._leave_peer(flight, peer)
        sent_s = self._send_back(flight, stage)
        if covered[stage] == self._all:
            self._reduce_if_whole(stage)
        return sent_s

    def _leave_peer(self, flight: Flight, peer: Peer) -> None:
        """It has nothing to do with it any more: room for another."""
        peer.flights.pop(flight, None)
        if flight in peer.held:
            del peer.held[flight]
            while peer.waiting and len(peer.held) < peer.room:
                self._admit(peer, peer.waiting.popleft())
        elif peer.waiting and flight in peer.waiting:
            peer.waiting.remove(flight)
        if peer.draining_to is not None:
            self._leave_if_done(peer)

    def _send_back(self, flight: Flight, stage: Stage) -> float:
        """The gradient of its input to whoever gave that; from the first stage, the answer to the trainer."""
        now_s, here = self.clock.now, flight.hops[stage]
        flight.back = True
        if stage == flight.first:
            self._land(flight)
            for kept in (flight.first, flight.last):  # who only passed on what it had
                self._leave_peer(flight, flight.hops[kept])
            latency_s = self.lines.latency_s(here.device, flight.trainer.device) if stage == 0 else 0.0
            self.clock.after(latency_s, None, self._answered, flight)
            return now_s
        flight.pos = stage - 1
        there = flight.hops[stage - 1]
        size_bytes = self.job.backward_bytes[stage - 1]
        self.report.boundary_bytes += size_bytes
        there_s = self.lines.send(here.device, there.device, size_bytes, now_s)
        flight.way_s[stage - 1] += there_s - now_s
        self.clock.after(there_s - now_s, None, self._returned, (flight, stage - 1, there))
        return there_s

    def _returned(self, arrival: tuple[Flight, Stage, Peer]) -> None:
        """A gradient is there."""
        flight, stage, peer = arrival
        if not flight.alive or not peer.alive or flight.hops[stage] is not peer:
            return
        if flight.refill == stage:
            flight.grad = "here"
            return
        if flight.recorded[stage]:
            self._send_back(flight, stage)
            return
        flight.reached_s[stage] = self.clock.now
        peer.count_load(self.clock.now)
        peer.backwards.append(flight)
        if not peer.busy:
            self._work(peer)

    # -- what a death leaves behind ---------------------------------------------------------------

    def _repair(self, flight: Flight, stage: Stage) -> None:
        """A hop of this microbatch is dead: another peer of the stage takes its place."""
        dead = flight.hops[stage]
        dead.flights.pop(flight, None)
        if not flight.alive or dead.alive:
            return
        if any(flight.recorded[s] for s in range(flight.first, stage + 1)):
            self._cancel(flight)  # a replay, or one whose way back is cut: rare, and begun anew
            return
        try:
            name = flight.trainer.router.route(stage, now=self.clock.now, exclude=(dead.name,)).peer
        except NoPeerForStage:
            self._cancel(flight)
            return
        peer = self._stages[stage].get(name)
        if peer is None:
            self._cancel(flight)
            return
        flight.hops[stage] = peer
        peer.flights[flight] = None
        flight.own_s[stage] = flight.reached_s[stage] = 0.0
        if not flight.back and flight.pos < stage:
            return  # not there yet
        if flight.back or flight.pos > stage:
            # Beyond it the work goes on; it needs the activations again before it can go back through here.
            if flight.refill not in (-1, stage):
                self._cancel(flight)
                return
            flight.grad = "lost" if flight.back and flight.pos == stage else flight.grad
            flight.refill = stage
        if stage == flight.first:
            latency_s = self.lines.latency_s(flight.trainer.device, peer.device)
            self.clock.after(latency_s, None, self._arrive, (flight, stage, peer))
        elif flight.hops[stage - 1].alive:
            self._send_on(flight, stage - 1)
        else:
            self._cancel(flight)

    def _refilled(self, flight: Flight, stage: Stage) -> None:
        grad, flight.grad, flight.refill = flight.grad, "", -1
        if grad == "here":
            self._returned((flight, stage, flight.hops[stage]))
        elif grad == "lost":
            if flight.hops[stage + 1].alive:
                self._send_back(flight, stage + 1)
            else:
                self._cancel(flight)

    def _news_soon(self) -> None:
        if not self._news_due:
            self._news_due = True
            self.clock.after(self.settings.report_s, None, self._news, None)

    def _news(self, _: None) -> None:
        """Reports tell trainers what is lacking, until nothing is."""
        self._news_due = False
        for t in self._hurt:
            doing = self._under_way.get(t, 0)
            lacking = [self._all & ~bitmap & ~doing for bitmap in self._covered[t]]
            self._todo.lacking(t, lacking, now=self.clock.now)
        self._start_all()
        if self._hurt:
            self._news_soon()

    # -- steps ------------------------------------------------------------------------------------

    def _cover(self, t: int) -> list[int]:
        if t not in self._covered:
            self._covered[t] = [0] * self.job.stages
        return self._covered[t]

    def _ledger(self, peer: Peer, t: int) -> Ledger:
        ledger = peer.ledgers.get(t)
        if ledger is None:
            ledger = peer.ledgers[t] = Ledger(t, self.job.microbatches)
        return ledger

    def _reduce_if_whole(self, stage: Stage) -> None:
        covered = self._covered.get(self._version)
        if covered is None or covered[stage] != self._all:
            return
        if stage in self._reducing or stage in self._prepared:
            return
        there = [p for p in self._peers.values() if p.stage == stage and p.serving]
        union = 0
        for peer in there:
            if self._version in peer.ledgers:
                done = peer.ledgers[self._version].done
                assert not union & done, f"a microbatch of step {self._version} counts twice in stage {stage}"
                union |= done
        assert union == self._all, f"step {self._version} is not whole in stage {stage}"
        token = self._reducing[stage] = object()
        size_bytes = self.job.gradient_bytes[stage]
        self.report.reduce_bytes += 2 * (len(there) - 1) * size_bytes
        reduce_s = self.lines.reduce_s([peer.device for peer in there], size_bytes)
        self.clock.after(reduce_s, None, self._reduced, (stage, token))

    def _reduced(self, reduced: tuple[Stage, object]) -> None:
        stage, token = reduced
        if self._reducing.get(stage) is not token:
            return
        del self._reducing[stage]
        self._prepared.add(stage)
        if len(self._prepared) == self.job.stages and all(self._stages):
            # Coordinators report to the conductor, and hear from it.
            heads = [min(there.values(), key=lambda p: p.name).device for there in self._stages]
            trip_s = 2 * max(self.lines.latency_s(heads[0], head) for head in heads)
            self._going = object()
            self.clock.after(trip_s + self.settings.step_s, None, self._go, self._going)

    def _go(self, token: object) -> None:
        if token is not self._going:
            return
        t, now_s = self._version, self.clock.now
        self._version += 1
        self.report.step_ends_s.append(now_s)
        self._prepared.clear()
        self._covered.pop(t, None)
        self._hurt.discard(t)
        self._under_way.pop(t, None)
        for peer in self._peers.values():
            peer.ledgers.pop(t, None)
        self._todo.stepped(self._version)
        for trainer in self._trainers:
            trainer.window.paused()
            trainer.pace.stepped(trainer.shared / self.job.microbatches)
            trainer.shared = 0
        self._went_at_s = now_s
        for stage in range(self.job.stages):
            self._reduce_if_whole(stage)
        self._start_all()


def _check(network: Network, job: Job, layout: Sequence[Stage], trace: Trace | None) -> None:
    if len(layout) != len(network):
        raise SetupError(f"the layout names {len(layout)} stages for {len(network)} devices")
    for device, stage in zip(network.devices, layout, strict=True):
        if not NOBODY <= stage < job.stages:
            raise SetupError(f"device {device.name!r} is put into stage {stage} of {job.stages}")
        if stage != NOBODY and not job.fits(stage, device):
            need = job.state_bytes[stage] + job.activation_bytes[stage]
            raise SetupError(
                f"stage {stage} does not fit into device {device.name!r}: it needs {need / 1e9:.2f} GB of "
                f"{device.memory_bytes / 1e9:.2f} GB"
            )
    if trace is not None:
        if max(trace.counts) > len(network):
            raise SetupError(
                f"the trace has {max(trace.counts)} devices up at once, but only {len(network)} are described"
            )
        return
    empty = sorted(set(range(job.stages)) - set(layout))
    if empty:
        raise SetupError(f"no device is in stage {', '.join(map(str, empty))}")

"""The route of a microbatch through devices, forth and back, and its repair after a death."""

from __future__ import annotations

from collections.abc import Callable

from swarm.ids import Stage
from swarm.policy.router import NoPeerForStage
from swarm.protocol.ledger import Claim
from swarm.sim.steps import Steps
from swarm.sim.world import Flight, Peer, World


class Pipeline:
    """Moves flights from hop to hop. A device does one job at a time."""

    def __init__(self, world: World, steps: Steps) -> None:
        self._world, self._steps = world, steps
        self._clock, self._lines, self._report = world.clock, world.lines, world.report
        self._last = world.job.stages - 1
        self.on_answer: Callable[[Flight], None]
        """Called when the trainer has the loss."""
        self.on_failure: Callable[[Flight], None]
        """Called when a flight was cancelled."""
        self.on_released: Callable[[Peer], None]
        """Called when a draining peer has one microbatch less."""

    # -- forth and back ---------------------------------------------------------------------------

    def arrive(self, arrival: tuple[Flight, Stage, Peer]) -> None:
        """Activations have arrived at a peer."""
        flight, stage, peer = arrival
        if not flight.alive or not peer.alive or flight.hops[stage] is not peer:
            return  # the sender is told
        if flight.recorded[stage]:
            self._forward_done(flight, stage)
            return
        claim = self._steps.ledger(peer, flight.t).claim(flight.m)
        assert claim is Claim.NEW, f"{flight.microbatch} came to {peer.name} twice"
        flight.reached_s[stage] = self._clock.now
        peer.count_load(self._clock.now)
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
        """Start the next job of an idle device."""
        while peer.backwards or peer.forwards:
            back = bool(peer.backwards)
            flight = peer.backwards.popleft() if back else peer.forwards.popleft()
            if not flight.alive or flight.hops[peer.stage] is not peer:
                continue
            peer.busy = True
            forward_s, backward_s = peer.job_s
            job_s = backward_s if back else forward_s
            if not back and peer.stage == self._last:
                job_s += backward_s
            self._clock.after(job_s, self._worked, (peer, flight, back, job_s))
            return

    def _worked(self, job: tuple[Peer, Flight, bool, float]) -> None:
        peer, flight, back, job_s = job
        if not peer.alive:
            return
        sent_s, stage, now_s = self._clock.now, peer.stage, self._clock.now
        peer.count_load(now_s)
        peer.busy = False
        peer.busy_s += job_s
        if flight.alive and flight.hops[stage] is peer:
            flight.own_s[stage] += now_s - flight.reached_s[stage]
            done = self._backward_done if back or stage == self._last else self._forward_done
            sent_s = done(flight, stage)
        if self._world.settings.blocking and sent_s > now_s:
            peer.busy = True
            self._clock.after(sent_s - now_s, self._sent, peer)
        else:
            self._work(peer)

    def _sent(self, peer: Peer) -> None:
        if peer.alive:
            peer.busy = False
            self._work(peer)

    def _forward_done(self, flight: Flight, stage: Stage) -> float:
        """Send activations on; returns when they arrive."""
        if flight.refill == stage:
            self._refilled(flight, stage)
            return self._clock.now
        if stage == flight.last:
            return self._send_back(flight, stage)  # it kept the gradient for its input
        flight.position = stage + 1
        return self._send_on(flight, stage)

    def _send_on(self, flight: Flight, stage: Stage) -> float:
        took_s = self._transfer(flight, stage, stage + 1, self._world.job.forward_bytes[stage], self.arrive)
        flight.latency_s[stage] = took_s
        return self._clock.now + took_s

    def _transfer(
        self,
        flight: Flight,
        stage: Stage,
        to_stage: Stage,
        size_bytes: float,
        arrived: Callable[[tuple[Flight, Stage, Peer]], None],
    ) -> float:
        """Send from hop to hop; returns the seconds until `arrived` is called."""
        here, there, now_s = flight.hops[stage], flight.hops[to_stage], self._clock.now
        self._report.boundary_bytes += size_bytes
        took_s = self._lines.send(here.device, there.device, size_bytes, now_s) - now_s
        self._clock.after(took_s, arrived, (flight, to_stage, there))
        return took_s

    def _backward_done(self, flight: Flight, stage: Stage) -> float:
        """Add the gradient of the weights to the sum, and send that of the input back."""
        peer = flight.hops[stage]
        peer.computed += 1
        self._report.computed += 1
        self._steps.record(peer, flight.t, flight.m)
        flight.recorded[stage] = True
        self._leave_peer(flight, peer)
        sent_s = self._send_back(flight, stage)
        if self._steps.is_complete(flight.t, stage):
            self._steps.reduce_if_complete(stage)
        return sent_s

    def _leave_peer(self, flight: Flight, peer: Peer) -> None:
        """Release a peer from the microbatch: it has room for another."""
        peer.flights.pop(flight, None)
        if flight in peer.held:
            del peer.held[flight]
            while peer.waiting and len(peer.held) < peer.room:
                self._admit(peer, peer.waiting.popleft())
        elif peer.waiting and flight in peer.waiting:
            peer.waiting.remove(flight)
        if peer.draining_to is not None:
            self.on_released(peer)

    def _send_back(self, flight: Flight, stage: Stage) -> float:
        """Send the gradient of the input to the stage before; the first stage answers the trainer."""
        now_s, here = self._clock.now, flight.hops[stage]
        flight.back = True
        if stage == flight.first:
            self._land(flight)
            for kept in (flight.first, flight.last):  # those that only passed on what they had
                self._leave_peer(flight, flight.hops[kept])
            latency_s = self._lines.latency_s(here.device, flight.trainer.device) if stage == 0 else 0.0
            self._clock.after(latency_s, self.on_answer, flight)
            return now_s
        flight.position = stage - 1
        size_bytes = self._world.job.backward_bytes[stage - 1]
        took_s = self._transfer(flight, stage, stage - 1, size_bytes, self._returned)
        flight.latency_s[stage - 1] += took_s
        return now_s + took_s

    def _returned(self, arrival: tuple[Flight, Stage, Peer]) -> None:
        """A gradient has arrived at a peer."""
        flight, stage, peer = arrival
        if not flight.alive or not peer.alive or flight.hops[stage] is not peer:
            return
        if flight.refill == stage:
            flight.gradient = "here"
            return
        if flight.recorded[stage]:
            self._send_back(flight, stage)
            return
        flight.reached_s[stage] = self._clock.now
        peer.count_load(self._clock.now)
        peer.backwards.append(flight)
        if not peer.busy:
            self._work(peer)

    def _land(self, flight: Flight) -> None:
        if flight.t in self._world.in_flight:
            self._world.in_flight[flight.t] &= ~(1 << flight.m)

    def cancel(self, flight: Flight) -> None:
        """Give a flight up: its microbatch has to be started again."""
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
        self.on_failure(flight)

    # -- after a death ----------------------------------------------------------------------------

    def repair(self, flight: Flight, stage: Stage) -> None:
        """Let another peer of the stage take the place of a dead hop, or cancel the flight."""
        dead = flight.hops[stage]
        dead.flights.pop(flight, None)
        if not flight.alive or dead.alive:
            return
        peer = None
        # A replay, or a flight that is cut off on its way back, is rare and begins anew.
        if not any(flight.recorded[s] for s in range(flight.first, stage + 1)):
            try:
                route = flight.trainer.router.route(stage, now=self._clock.now, exclude=(dead.name,))
                peer = self._world.stages[stage].get(route.peer)
            except NoPeerForStage:
                pass
        if peer is None:
            self.cancel(flight)
            return
        flight.hops[stage] = peer
        peer.flights[flight] = None
        flight.own_s[stage] = flight.reached_s[stage] = 0.0
        if not flight.back and flight.position < stage:
            return  # not there yet
        if flight.back or flight.position > stage:
            # Behind this stage the work goes on; before it comes back here, the activations are needed again.
            if flight.refill not in (-1, stage):
                self.cancel(flight)
                return
            flight.gradient = "lost" if flight.back and flight.position == stage else flight.gradient
            flight.refill = stage
        if stage == flight.first:
            latency_s = self._lines.latency_s(flight.trainer.device, peer.device)
            self._clock.after(latency_s, self.arrive, (flight, stage, peer))
        elif flight.hops[stage - 1].alive:
            self._send_on(flight, stage - 1)
        else:
            self.cancel(flight)

    def _refilled(self, flight: Flight, stage: Stage) -> None:
        """The stage has the activations again: its gradient may be there already, or has to be sent anew."""
        gradient, flight.gradient, flight.refill = flight.gradient, "", -1
        if gradient == "here":
            self._returned((flight, stage, flight.hops[stage]))
        elif gradient == "lost":
            if flight.hops[stage + 1].alive:
                self._send_back(flight, stage + 1)
            else:
                self.cancel(flight)

"""The way of a microbatch through devices, there and back. A device does one job at a time."""

from __future__ import annotations

from swarm.ids import Stage
from swarm.protocol.ledger import Claim
from swarm.sim.actors import Flight, Peer
from swarm.sim.world import Part


class Pipeline(Part):
    """Moves flights from hop to hop."""

    def arrive(self, arrival: tuple[Flight, Stage, Peer]) -> None:
        """Activations are there."""
        flight, stage, peer = arrival
        if not flight.alive or not peer.alive or flight.hops[stage] is not peer:
            return  # whoever sent them hears of it
        if flight.recorded[stage]:
            self._forward_done(flight, stage, peer)
            return
        claim = self._world.steps.ledger(peer, flight.t).claim(flight.m)
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
        """The next job of an idle device."""
        while peer.backwards or peer.forwards:
            back = bool(peer.backwards)
            flight = peer.backwards.popleft() if back else peer.forwards.popleft()
            if not flight.alive or flight.hops[peer.stage] is not peer:
                continue
            peer.busy = True
            forward_s, backward_s = peer.job_s
            job_s = backward_s if back else forward_s
            if not back and peer.stage == self._job.stages - 1:
                job_s += backward_s
            self._clock.after(job_s, self._worked, (peer, flight, back, job_s))
            return

    def _worked(self, job: tuple[Peer, Flight, bool, float]) -> None:
        peer, flight, back, job_s = job
        if not peer.alive:
            return
        peer.count_load(self._clock.now)
        peer.busy = False
        peer.busy_s += job_s
        sent_s = self._clock.now
        if flight.alive and flight.hops[peer.stage] is peer:
            stage = peer.stage
            flight.own_s[stage] += self._clock.now - flight.reached_s[stage]
            if back or stage == self._job.stages - 1:
                sent_s = self._backward_done(flight, stage, peer)
            else:
                sent_s = self._forward_done(flight, stage, peer)
        if self._settings.blocking and sent_s > self._clock.now:
            peer.busy = True
            self._clock.after(sent_s - self._clock.now, self._sent, peer)
        else:
            self._work(peer)

    def _sent(self, peer: Peer) -> None:
        if peer.alive:
            peer.busy = False
            self._work(peer)

    def _forward_done(self, flight: Flight, stage: Stage, peer: Peer) -> float:
        """Activations go on; returns when they are there."""
        if flight.refill == stage:
            self._world.repair.refilled(flight, stage)
            return self._clock.now
        if stage == flight.last:
            return self.send_back(flight, stage)  # it kept the gradient for its input
        flight.pos = stage + 1
        return self.send_on(flight, stage)

    def send_on(self, flight: Flight, stage: Stage) -> float:
        size_bytes = self._job.forward_bytes[stage]
        self._report.boundary_bytes += size_bytes
        here, there = flight.hops[stage], flight.hops[stage + 1]
        there_s = self._lines.send(here.device, there.device, size_bytes, self._clock.now)
        flight.latency_s[stage] = there_s - self._clock.now
        self._clock.after(there_s - self._clock.now, self.arrive, (flight, stage + 1, there))
        return there_s

    def _backward_done(self, flight: Flight, stage: Stage, peer: Peer) -> float:
        """The gradient of its weights goes into the sum, that of its input back."""
        peer.computed += 1
        self._report.computed += 1
        self._world.steps.record(peer, flight.t, flight.m)
        flight.recorded[stage] = True
        self.leave_peer(flight, peer)
        sent_s = self.send_back(flight, stage)
        if self._world.steps.whole(flight.t, stage):
            self._world.steps.reduce_if_whole(stage)
        return sent_s

    def leave_peer(self, flight: Flight, peer: Peer) -> None:
        """It has nothing to do with it any more: room for another."""
        peer.flights.pop(flight, None)
        if flight in peer.held:
            del peer.held[flight]
            while peer.waiting and len(peer.held) < peer.room:
                self._admit(peer, peer.waiting.popleft())
        elif peer.waiting and flight in peer.waiting:
            peer.waiting.remove(flight)
        if peer.draining_to is not None:
            self._world.placing.leave_if_done(peer)

    def send_back(self, flight: Flight, stage: Stage) -> float:
        """The gradient of its input to whoever gave that; from the first stage, the answer to the trainer."""
        now_s, here = self._clock.now, flight.hops[stage]
        flight.back = True
        if stage == flight.first:
            self._world.trainers.land(flight)
            for kept in (flight.first, flight.last):  # who only passed on what it had
                self.leave_peer(flight, flight.hops[kept])
            latency_s = self._lines.latency_s(here.device, flight.trainer.device) if stage == 0 else 0.0
            self._clock.after(latency_s, self._world.trainers.answered, flight)
            return now_s
        flight.pos = stage - 1
        there = flight.hops[stage - 1]
        size_bytes = self._job.backward_bytes[stage - 1]
        self._report.boundary_bytes += size_bytes
        there_s = self._lines.send(here.device, there.device, size_bytes, now_s)
        flight.latency_s[stage - 1] += there_s - now_s
        self._clock.after(there_s - now_s, self.returned, (flight, stage - 1, there))
        return there_s

    def returned(self, arrival: tuple[Flight, Stage, Peer]) -> None:
        """A gradient is there."""
        flight, stage, peer = arrival
        if not flight.alive or not peer.alive or flight.hops[stage] is not peer:
            return
        if flight.refill == stage:
            flight.grad = "here"
            return
        if flight.recorded[stage]:
            self.send_back(flight, stage)
            return
        flight.reached_s[stage] = self._clock.now
        peer.count_load(self._clock.now)
        peer.backwards.append(flight)
        if not peer.busy:
            self._work(peer)

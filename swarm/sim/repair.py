"""What a death leaves behind: microbatches whose way leads through the dead peer."""

from __future__ import annotations

from swarm.ids import Stage
from swarm.policy.router import NoPeerForStage
from swarm.sim.actors import Flight
from swarm.sim.world import Part


class Repair(Part):
    """Gives the work of a dead hop to another peer of its stage, or has the microbatch begun anew."""

    def repair(self, flight: Flight, stage: Stage) -> None:
        """A hop of this microbatch is dead: another peer of the stage takes its place."""
        dead = flight.hops[stage]
        dead.flights.pop(flight, None)
        if not flight.alive or dead.alive:
            return
        if any(flight.recorded[s] for s in range(flight.first, stage + 1)):
            # A replay, or one whose way back is cut: rare, and begun anew.
            self._world.trainers.cancel(flight)
            return
        try:
            name = flight.trainer.router.route(stage, now=self._clock.now, exclude=(dead.name,)).peer
        except NoPeerForStage:
            self._world.trainers.cancel(flight)
            return
        peer = self._world.stages[stage].get(name)
        if peer is None:
            self._world.trainers.cancel(flight)
            return
        flight.hops[stage] = peer
        peer.flights[flight] = None
        flight.own_s[stage] = flight.reached_s[stage] = 0.0
        if not flight.back and flight.pos < stage:
            return  # not there yet
        if flight.back or flight.pos > stage:
            # Beyond it the work goes on; it needs the activations again before it can go back through here.
            if flight.refill not in (-1, stage):
                self._world.trainers.cancel(flight)
                return
            flight.grad = "lost" if flight.back and flight.pos == stage else flight.grad
            flight.refill = stage
        if stage == flight.first:
            latency_s = self._lines.latency_s(flight.trainer.device, peer.device)
            self._clock.after(latency_s, self._world.pipeline.arrive, (flight, stage, peer))
        elif flight.hops[stage - 1].alive:
            self._world.pipeline.send_on(flight, stage - 1)
        else:
            self._world.trainers.cancel(flight)

    def refilled(self, flight: Flight, stage: Stage) -> None:
        """The stage has the activations again: its gradient may be there already, or has to be sent anew."""
        grad, flight.grad, flight.refill = flight.grad, "", -1
        if grad == "here":
            self._world.pipeline.returned((flight, stage, flight.hops[stage]))
        elif grad == "lost":
            if flight.hops[stage + 1].alive:
                self._world.pipeline.send_back(flight, stage + 1)
            else:
                self._world.trainers.cancel(flight)

"""The route of a microbatch through devices, forth and back: a coroutine that each stage is a call of.

As in `peers/stage/next_stage.py`, a peer that has computed the forward calls one of the next stage, and
another one if that is gone. What the stages behind have done by then counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from peers.sim.throughput.steps import Steps
from peers.sim.throughput.world import Flight, Gone, Peer, World
from swarm.ids import Stage
from swarm.protocol.ledger import Claim


class Pipeline:
    """Moves flights from hop to hop."""

    def __init__(self, world: World, steps: Steps) -> None:
        self._world, self._steps, self._loop = world, steps, world.loop
        self._last = world.job.stages - 1
        self.on_released: Callable[[Peer], None]
        """Called when a draining peer has one microbatch less."""

    async def visit(self, flight: Flight, stage: Stage) -> None:
        """Take a microbatch, whose activations have arrived, through `stage` and those behind it, and back.

        Raises:
            Gone: the peer is, and its caller has noticed.
            NoPeerForStage: nor has a stage behind it another peer.
        """
        peer, t, m = flight.hops[stage], flight.t, flight.m
        if not peer.serving:
            await self._notice(peer)
        known = self._steps.has(t, stage, m)
        if known and stage >= flight.deepest:
            return  # it kept its answer
        ledger = peer.ledger(t, self._world.job.microbatches)
        if not known:
            claim = ledger.claim(m)
            assert claim is Claim.NEW, f"{flight.microbatch} came to {peer.name} twice"
        peer.flights += 1
        try:
            await self._compute(flight, stage, count=not known)
        finally:
            ledger.release(m)
            peer.flights -= 1
            if peer.draining_to is not None:
                self.on_released(peer)

    async def _compute(self, flight: Flight, stage: Stage, *, count: bool) -> None:
        """Compute a microbatch; without `count` forward only, to feed the stages behind again."""
        peer, loop = flight.hops[stage], self._loop
        began_s, behind_s = loop.now_s, 0.0
        forward_s, backward_s = peer.job_s
        await peer.take_room()
        try:
            await peer.compute(forward_s + backward_s if stage == self._last else forward_s)
            if stage != self._last:
                left_s = loop.now_s
                await self._behind(flight, stage)
                behind_s = loop.now_s - left_s
                if not peer.alive:
                    await self._notice(peer)
                if count:
                    await peer.compute(backward_s, back=True)
            if count:
                peer.computed += 1
                self._steps.record(peer, flight.t, flight.m)
                flight.own_s[stage] = loop.now_s - began_s - behind_s
        finally:
            peer.give_room()

    async def _behind(self, flight: Flight, stage: Stage) -> None:
        """Have the stages behind do their part, until the gradient has come back from them."""
        here, job = flight.hops[stage], self._world.job
        while True:
            there = flight.hops[stage + 1]
            took_s = await self._send(here, there, job.forward_bytes[stage])
            try:
                await self.visit(flight, stage + 1)
            except Gone:
                if not here.alive:
                    raise
                route = flight.trainer.router.route(stage + 1, now=self._loop.now_s, exclude=(there.name,))
                flight.hops[stage + 1] = self._world.stages[stage + 1][route.peer]
                continue
            took_s += await self._send(there, here, job.backward_bytes[stage])
            flight.latency_s[stage] = took_s
            return

    async def _send(self, here: Peer, there: Peer, size_bytes: float) -> float:
        """Send tensors; returns the seconds that it took."""
        there_s = self._world.lines.send(here.device, there.device, size_bytes, self._loop.now_s)
        self._world.report.boundary_bytes += size_bytes
        here.sends_until_s = max(here.sends_until_s, there_s)
        took_s = there_s - self._loop.now_s
        if took_s:
            await asyncio.sleep(took_s)
        return took_s

    async def _notice(self, peer: Peer) -> None:
        """Raise `Gone`, for a dead peer when that can be known."""
        if not peer.alive:
            await asyncio.sleep(max(0.0, peer.ended_s + self._world.settings.detect_s - self._loop.now_s))
        raise Gone

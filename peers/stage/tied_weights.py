"""Weights that lie on several stages: what each found of their gradient is added up before a step is taken.

A stage that has its own sum of a step gives out the part of it that others share, and asks a member of each
of those for theirs. Only a member that has all of them says that it holds the step's gradient; so the go
comes when every stage can complete it, and all copies of a tied weight take the same step. Any complete sum
of a stage is the sum (`swarm.protocol.rounds`), so it does not matter who is asked.
"""

from __future__ import annotations

import asyncio
import zlib

import msgspec
import torch

from peers.clock import now_s
from peers.ports import Directory, Transport
from peers.stage.open_step import OpenStep
from peers.stage.state import StageCore
from peers.transfer.gradient import fetch_vector
from swarm.errors import NotReady, PeerFault, SwarmError
from swarm.ids import PeerId, Stage
from swarm.policy.backoff import Backoff
from swarm.protocol.rounds import Prepared

RETRY_S = 0.1
"""Who is asked holds the request while its own reduce runs, so this is for those who are not there."""
ASKED_AT_ONCE = 4
"""Members of another stage that are asked, one after the other, before a pause."""


class TiedWeights:
    """Completes the summed gradient of a member's steps."""

    def __init__(self, core: StageCore, transport: Transport, directory: Directory, backoff: Backoff) -> None:
        self._core, self._transport, self._directory, self._backoff = core, transport, directory, backoff

    async def hold(self, step: OpenStep, reduced: torch.Tensor, held: Prepared) -> None:
        """`reduced` is the stage's sum: hold it, once what other stages found of shared weights is here.

        Raises:
            NotReady: the step ended meanwhile.
        """
        compute, whole = self._core.compute, reduced
        step.complete()
        if step.prepared is None:
            step.reduced = reduced
            step.reduced_there.set()
        if compute.shared.names:
            try:
                await asyncio.gather(*(self._part(step, other) for other in compute.shared.names))
                whole = await asyncio.to_thread(compute.shared.complete, reduced, step.shared)
                sqnorm = await asyncio.to_thread(compute.shared.sqnorm, whole)
            except BaseException:
                step.incomplete()
                raise
            held = msgspec.structs.replace(held, sqnorm=sqnorm)
        if not step.over:
            step.reduced, step.whole = reduced, whole
            step.prepare(held)

    async def _part(self, step: OpenStep, other: Stage) -> None:
        """Put what `other` found into the step: from one of its members, or from a replica whom they told."""
        core = self._core
        numel = core.compute.shared.numel(other)
        while not step.over and other not in step.shared:
            members, replicas = self._serving(other), self._serving(core.stage)
            asks = [(peer, core.stage, -1) for peer in members[:ASKED_AT_ONCE]]
            asks += [(peer, -1, other) for peer in replicas[:ASKED_AT_ONCE]]
            for peer, shared_with, shared_of in asks:
                try:
                    part, _ = await fetch_vector(
                        core, self._transport, peer, step.t, numel,
                        shared_with=shared_with, shared_of=shared_of,
                    )  # fmt: skip
                except PeerFault as fault:
                    self._backoff.failed(peer, now=now_s(), silent=fault.silent)
                except SwarmError:
                    pass
                else:
                    step.shared[other] = part
                    return
            await asyncio.sleep(RETRY_S)
        if step.over:
            raise NotReady(f"step {step.t} ended before all that it shares was here", version=core.version)

    def _serving(self, stage: Stage) -> list[PeerId]:
        """Other peers of a stage. Each of us begins with another of them."""
        now, me = now_s(), self._core.me
        found = [r.peer for r in self._directory.at(stage) if r.state in ("serving", "leaving")]
        awake = [peer for peer in found if peer != me and not self._backoff.in_backoff(peer, now=now)]
        return sorted(awake, key=lambda peer: zlib.crc32(f"{me} {peer}".encode()))

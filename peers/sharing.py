"""Weights that lie on several stages: what each found of their gradient is added up before a step is taken.

A stage that has its own sum of a step gives out the part of it that others share, and asks a member of each
of those for theirs. Only a member that has all of them says that it holds the step's gradient; so the go
comes when every stage can complete it, and all copies of a tied weight take the same step. Any complete sum
of a stage is the sum (`swarm.policy.rounds`), so it does not matter who is asked.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import replace

import torch

from peers.core import StageCore
from peers.ports import Directory, Transport
from peers.steps import OpenStep
from peers.sync import fetch_vector
from swarm.errors import NotReady, SwarmError
from swarm.ids import PeerId, Stage
from swarm.policy.rounds import Held

RETRY_S = 0.1
"""Who is asked holds the request while its own reduce runs, so this is for those who are not there."""


class Sharing:
    """Completes the summed gradient of a member's steps."""

    def __init__(self, core: StageCore, transport: Transport, directory: Directory) -> None:
        self._core, self._transport, self._directory = core, transport, directory

    async def hold(self, step: OpenStep, reduced: torch.Tensor, held: Held) -> None:
        """`reduced` is the stage's sum: hold it, once what other stages found of shared weights is here.

        Raises:
            NotReady: the step ended meanwhile.
        """
        compute = self._core.compute
        step.reduced = reduced
        step.reduced_there.set()
        if compute.shares:
            parts = await asyncio.gather(*(self._part(step, other) for other in compute.shares))
            step.shared = dict(zip(compute.shares, parts, strict=True))
            whole = await asyncio.to_thread(compute.complete, reduced, step.shared)
            held = replace(held, sqnorm=await asyncio.to_thread(compute.sqnorm, whole))
        if not step.over:
            step.held = held

    async def _part(self, step: OpenStep, other: Stage) -> torch.Tensor:
        core = self._core
        numel = core.compute.shared_numel(other)
        while not step.over:
            for peer in self._members(other):
                try:
                    part, _ = await fetch_vector(
                        core, self._transport, peer, step.t, numel, shared_with=core.stage
                    )
                except SwarmError:
                    continue
                return part
            await asyncio.sleep(RETRY_S)
        raise NotReady(f"step {step.t} ended before all that it shares was here", version=core.version)

    def _members(self, stage: Stage) -> list[PeerId]:
        """Each of us begins with another of them."""
        serving = [r.peer for r in self._directory.at(stage) if r.state in ("serving", "leaving")]
        return sorted(serving, key=lambda peer: zlib.crc32(f"{self._core.me} {peer}".encode()))

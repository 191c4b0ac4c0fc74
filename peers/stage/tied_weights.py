"""Weights that lie on several stages: their gradients are added up before a step is taken.

Only a replica that has the sums of all of those stages is prepared. Any complete sum of a stage is the sum,
so it does not matter which honest replica is asked, and several are where one may lie: docs/design.md, *The
path of a step*.
"""

from __future__ import annotations

import asyncio
import contextlib
import math

import msgspec
import torch

from peers.clock import now_s
from peers.islands.meeting import IslandMeeting
from peers.ports import Rank
from peers.stage.open_step import OpenStep
from peers.stage.state import StageCore
from peers.transfer.client import DownloadFailed, download
from peers.transfer.gradient import wanted_of
from peers.waiting import within
from swarm.errors import NotReady, SwarmError
from swarm.ids import Stage
from swarm.protocol.rounds import Commit, Prepared
from swarm.wire.messages import OpenHeld

RETRY_S = 0.1
"""A peer that is asked holds the request while its own reduce runs, so this is for peers that are gone."""
ASKED_AT_ONCE = 4
"""Replicas of a stage asked before a pause: at once where words count by voice, else one after another."""
GATHER_S = 2.5
"""Replicas that have the result answer at once; others hold the question for 2 s."""
RENEW_S = 5.0
FEWEST_OF_MANY = 3
"""Of two that contradict each other it is not known which one lies."""
ALONE_S = 20.0
"""From its first answer on. Replicas of a stage have its result within moments of each other, but for those
that are left out, or come back."""


class TiedWeights:
    """Completes the summed gradient of this replica's steps."""

    def __init__(self, core: StageCore, meeting: IslandMeeting) -> None:
        self._core, self._meeting = core, meeting

    async def hold(
        self, step: OpenStep, reduced: torch.Tensor, held: Prepared, commit: Commit | None = None
    ) -> None:
        """Hold `reduced`, the stage's sum, once the other stages' parts of shared weights are here; or at a
        meeting what this island has changed, once that of all others is. `commit`: which parts.

        Raises:
            NotReady: the step ended meanwhile.
        """
        compute, whole = self._core.compute, reduced
        step.complete()
        if step.prepared is None:
            step.reduced = reduced
            step.reduced_there.set()
        if compute.needs_others(step.t):
            try:
                if self._core.run.meets_at(step.t):
                    whole = await self._meeting.sum(step, reduced)
                else:
                    if step.doubted:
                        step.doubted, step.shared = False, {}
                    others = compute.shared.names
                    await asyncio.gather(*(self._part(step, other, commit) for other in others))
                    whole = await asyncio.to_thread(compute.shared.complete, reduced, step.shared)
                sqnorm = await asyncio.to_thread(compute.shared.sqnorm, whole)
            except BaseException:
                step.incomplete()
                raise
            held = msgspec.structs.replace(held, sqnorm=sqnorm)
        if not step.over:
            step.reduced, step.whole = reduced, whole
            step.prepare(held)

    async def hold_fetched(
        self, step: OpenStep, reduced: torch.Tensor, held: Prepared, *, limit_s: float | None = None
    ) -> None:
        """Hold a result that another replica gave: nothing enters this replica's own sum any more.

        Raises:
            NotReady: the step ended meanwhile.
            asyncio.TimeoutError: what other stages found did not come within `limit_s`.
        """
        step.promise(held.round, now=now_s())
        try:
            await self._core.device.run(Rank.STEP, step.t, step.ledger.freeze, held.round)
            work = self.hold(step, reduced, held)
            await (work if limit_s is None else within(work, limit_s))
        finally:
            step.end_round(held.round, failed=False)

    async def renew(self, step: OpenStep, commit: Commit) -> None:
        """Before a step is taken: have what other stages take it with, if a liar was convicted since. They
        may have taken its work out after they gave it. If they give nothing now, what they gave counts."""
        asks = step.doubted and not self._core.run.meets_at(step.t)  # a meeting has no peer's work in it
        if asks and step.reduced is not None and step.prepared is not None:
            with contextlib.suppress(SwarmError, asyncio.TimeoutError):
                await within(self.hold(step, step.reduced, step.prepared, commit), RENEW_S)

    async def _part(self, step: OpenStep, other: Stage, commit: Commit | None = None) -> None:
        """Get the part of `other`: from its replicas, or if none can be reached from those of this stage that
        have it. `commit`: of the round that it names; some may still have the result of another one.

        Where words count by voice, of three or more one does not say it alone for `ALONE_S`: the others may
        not have their result yet.
        """
        core, named = self._core, self._core.run.admission.named
        numel, alone_until = core.compute.shared.numel(other), math.inf
        made = commit.proofs[other][0].prepared.round if commit is not None and commit.proofs else ""
        while not step.over and other not in step.shared:
            stage = other
            question = OpenHeld(run=core.run.id, t=step.t, round=made, shared_with=core.stage)
            sources = core.others_to_ask(stage, core.directory, core.voices)
            if not sources:
                stage, question = core.stage, OpenHeld(run=core.run.id, t=step.t, shared_of=other)
                sources = core.others_to_ask(stage, core.directory, core.voices)
            sources, voice = sources[:ASKED_AT_ONCE], core.voices.of(stage)
            wanted = wanted_of(core.compute, question, numel, gather_s=GATHER_S * named)
            for some in [sources] if named else [[source] for source in sources]:
                with contextlib.suppress(DownloadFailed):
                    found = await download(core.transport, wanted, some, voice=voice, on_fault=core.failed)
                    alone_until = min(alone_until, now_s() + ALONE_S)
                    if len(found.agreed) > 1 or len(some) < FEWEST_OF_MANY or now_s() >= alone_until:
                        step.shared[other] = found.tensors["gradient"]
                        return
            await asyncio.sleep(RETRY_S)
        if step.over:
            raise NotReady(f"step {step.t} ended before all that it shares was here", version=core.version)

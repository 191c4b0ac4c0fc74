"""Meetings of islands: what the others have changed of this stage is fetched, and added to what this one has.

A meeting is a step without microbatches (docs/design.md, *Islands*). Replicas of a stage of an island have
the same bits, so it does not matter which is asked, and one that has all of it gives out what it got from
others too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from functools import partial

import torch

from peers.clock import now_s
from peers.events import PeerLost
from peers.fault_points import fault_point
from peers.islands.directory import Island, Islands
from peers.ports import Rank
from peers.stage.open_step import OpenStep
from peers.stage.state import StageCore
from peers.transfer.client import GATHER_S, DownloadFailed, download
from peers.transfer.gradient import wanted_of
from swarm.errors import NotReady, PeerFault, Refused
from swarm.manifest import parts_summed
from swarm.model.gpt import weights_dtype
from swarm.model.meeting import added_up, difference_bytes, part_of, told_of, unlike
from swarm.protocol.voice import heard
from swarm.wire.messages import Opened, OpenHeld

PASSED_S = 5.0
"""After so long it is looked whether the others are past a meeting, and hold nothing of it any more."""
RETRY_S = 0.2
"""Islands come to a meeting at different times: a peer that is asked holds the request for a while."""
ASKED_AT_ONCE = 4
"""Replicas that are asked at once: what most of them say, by voice, is believed."""

Fits = Callable[[Opened, Mapping[str, torch.Tensor]], "str | None"]


class IslandMeeting:
    """This replica's part in the meetings of its stage."""

    def __init__(self, core: StageCore, islands: Islands) -> None:
        self._core, self._islands = core, islands
        self._count, self._parts = len(islands.all), parts_summed(core.run.islands.count)
        self.overdue: Callable[[], None] = lambda: None
        """Told now and then while a meeting waits for others."""

    async def difference(self, step: OpenStep) -> torch.Tensor:
        """What this island has changed since the last meeting, as it travels; from now on it is given out."""
        core = self._core
        if step.reduced is None:
            fault_point("meeting")
            step.reduced = await core.device.run(Rank.STEP, step.t, core.compute.state.difference)
            fault_point("encoded")
            step.reduced_there.set()
        return step.reduced

    async def prepare(self, step: OpenStep) -> None:
        """Bring all together that the meeting takes."""
        await self._gather(step, await self.difference(step))

    async def sum(self, step: OpenStep, own: torch.Tensor) -> torch.Tensor:
        """What all islands have changed, added up. `own`: what this one has.

        Raises:
            NotReady: the step ended meanwhile.
        """
        await self._gather(step, own)
        return await asyncio.to_thread(self._added_up, step)

    def _added_up(self, step: OpenStep) -> torch.Tensor:
        run, layout = self._core.run, self._core.compute.layout
        if self._parts == 1:
            return added_up(run, layout, [step.shared[number] for number in range(self._count)])
        total = torch.zeros(layout.sum_numel, dtype=weights_dtype(run))
        for part in range(self._parts):
            added_up(run, layout, [step.shared[self._count + part]], part, are_sums=True, total=total)
        return total

    async def _gather(self, step: OpenStep, own: torch.Tensor) -> None:
        """Have in `step.shared` all that the sum is made of.

        Of a few islands that is what each has changed. Of many each adds up its part of that, gives the sum
        out, and gets those of the other parts.
        """
        core, number = self._core, self._core.run.number
        step.shared[number] = part_of(core.run, core.compute.layout, own, number if self._parts > 1 else 0)
        await asyncio.gather(*(self._part(step, other) for other in self._islands.others))
        if self._parts > 1:
            await self._add_up(step)
            sums = (self._count + part for part in range(self._parts))
            await asyncio.gather(*(self._part(step, number) for number in sums))

    async def _add_up(self, step: OpenStep) -> None:
        """Have the sum of the part that is this island's."""
        run, layout, number = self._core.run, self._core.compute.layout, self._core.run.number
        async with step.getting[self._count + number]:
            if not step.added_up.is_set():
                changes = [step.shared[island] for island in range(self._count)]
                total = await asyncio.to_thread(added_up, run, layout, changes, number)
                step.shared[self._count + number] = told_of(run, layout, total, number)
                step.added_up.set()
                fault_point("summed")

    async def _part(self, step: OpenStep, number: int) -> None:
        """Have what island `number` has changed; or from their count on, the sum of a part."""
        async with step.getting[number]:
            if number not in step.shared:
                step.shared[number] = await self._fetched(step, number)
                fault_point("gathered")

    async def _fetched(self, step: OpenStep, number: int) -> torch.Tensor:
        """The same from replicas of this stage of the island that has it, or from one that got it."""
        core, holders = self._core, self._holders(number)
        part = core.run.number if self._parts > 1 else -1
        numel, fits = self._expected(step, number)
        if numel == 0:  # more islands than blocks
            return torch.empty(0, dtype=torch.uint8)
        looked_at = now_s()
        while not step.over:
            for holder, island in holders:
                question = OpenHeld(run=island.run.id, t=step.t, shared_with=core.stage, part=part)
                if holder != number:  # of other islands it gives out what it got
                    question = OpenHeld(run=island.run.id, t=step.t, shared_of=number)
                voices = island.voices
                sources = core.others_to_ask(core.stage, island.directory, voices)[:ASKED_AT_ONCE]
                with contextlib.suppress(DownloadFailed):
                    wanted = wanted_of(core.compute, question, numel, fits, gather_s=GATHER_S)
                    voice, failed = voices.of(core.stage), self._failed
                    found = await download(core.transport, wanted, sources, voice=voice, on_fault=failed)
                    return found.tensors["gradient"]
            if now_s() - looked_at > PASSED_S:
                looked_at = now_s()
                past = sum(map(partial(self._is_past, step.t), self._islands.others))
                # Among friends one is enough: others may wait for it as this island does.
                too_few = (self._count - 1) // 2 if core.run.admission.named else 0
                if past > too_few:
                    self.overdue()
            await asyncio.sleep(RETRY_S)
        raise NotReady(f"meeting {step.t} ended before all of it was here", version=core.version)

    def _is_past(self, t: int, number: int) -> bool:
        """Whether this stage of another island says that it has taken a meeting."""
        island, stage = self._islands.all[number], self._core.stage
        past = {r.peer: r.version > t for r in island.directory.at(stage) if r.state == "serving"}
        return any(past[peer] for peer in heard(past, island.voices.of(stage)))

    def _failed(self, fault: PeerFault) -> None:
        self._core.failed(fault)
        self._core.emit(PeerLost(peer=fault.peer, stage=self._core.stage, why=fault.why))

    def _holders(self, number: int) -> list[tuple[int, Island]]:
        """Islands whose replicas may have it, first that which makes it. Where each adds up a part, no third
        has what another has changed of this one's.
        """
        first = number % self._count
        islands = sorted(enumerate(self._islands.all), key=lambda one: one[0] != first)
        few = self._parts > 1 and number < self._count
        return [one for one in islands if not few or one[0] in (first, self._core.run.number)]

    def _expected(self, step: OpenStep, number: int) -> tuple[int, Fits]:
        """The length of it, and why it cannot be it."""
        run, layout, count = self._core.run, self._core.compute.layout, self._count
        is_sum = number >= count
        part = number - count if is_sum else run.number if self._parts > 1 else 0

        def fits(_: Opened, tensors: Mapping[str, torch.Tensor]) -> str | None:
            assert step.reduced is not None  # a meeting begins with it
            # With all of it, as parts of what honest islands change may be turned away from one another.
            own = part_of(run, layout, step.reduced, part) if is_sum else step.reduced
            try:
                other = added_up(run, layout, [tensors["gradient"]], part, are_sums=is_sum)
            except Refused as refused:
                return refused.text
            mine = added_up(run, layout, [own], part if is_sum else None)
            if not mine.any():  # nothing of this part, whose weights may be frozen
                mine = added_up(run, layout, [step.reduced])
            return unlike(mine, other / count if is_sum else other) if run.admission.named else None

        return difference_bytes(run, layout, part, is_sum=is_sum), fits

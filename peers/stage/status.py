"""What a stage peer says of itself: its record in the directory, and its status to those that ask."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import msgspec

from peers.clock import now_s
from peers.evaluation.serving import EvaluationServer
from peers.ports import Answer, Rank, Request
from peers.stage.all_reduce import SURE_S, AllReduce
from peers.stage.coordination import StepCoordination
from peers.stage.microbatches import MicrobatchServer
from peers.stage.moving import Moving
from peers.stage.settings import StageSettings
from peers.stage.state import TIMES_KEPT, StageCore
from peers.status_query import TrafficStatus
from swarm.records import PeerRecord
from swarm.wire.messages import AskStatus, PastStep, PeerStatus, pack, unpack

ANNOUNCE_S = 5.0
"""A record lives a few times longer than this in the DHT."""
WARMING_S = 1.0
"""The first microbatch of a device pays for warming up; of one that takes longer than this that is little."""
MAX_WORDS = 400
MAX_PAST = 2048
MAX_PAST_TOLD = 128
"""In one status: 3 kB."""


class StageStatus:
    """Announces the peer, and answers `status`."""

    def __init__(
        self, core: StageCore, settings: StageSettings, coordination: StepCoordination,
        microbatches: MicrobatchServer, all_reduce: AllReduce, moving: Moving, evaluations: EvaluationServer,
    ) -> None:  # fmt: skip
        self._core, self._settings, transport = core, settings, core.transport
        self._coordination, self._microbatches, self._all_reduce = coordination, microbatches, all_reduce
        self._moving, self._evaluations = moving, evaluations
        self._traffic = TrafficStatus(transport)
        self.rehearsed_s = self._rehearsals_s = 0.0
        """What a microbatch took before there was any; all of the device's time that went into that."""
        self._past: dict[int, PastStep] = {}
        """By version: what is known of the steps since this peer joined, of many of them of some."""
        transport.serve("status", self._serve)
        settings.voucher.recall(core.run, transport)
        settings.voucher.serve(core.run, transport, lambda: core.version, self.announce)

    def record(self) -> PeerRecord:
        """This peer as it is now."""
        core, settings, reduced = self._core, self._settings, self._all_reduce
        measured_bps = reduced.bandwidth_bps * (reduced.measured_s >= SURE_S)
        if core.me in self._coordination.left_out:  # what held rounds up may be its upload
            measured_bps = measured_bps or reduced.last_bps
        uploads_bps = filter(None, (measured_bps, settings.upload_bps))
        return PeerRecord(
            peer=core.me, run=core.run.id, stage=core.stage, state=core.life, version=core.version,
            speed=self._speed(), load=core.device.mean_queue(), state_bytes=core.compute.state.nbytes,
            bandwidth_bps=min(uploads_bps, default=0.0), movable=settings.movable,
            max_inflight=self._microbatches.max_inflight, device=settings.device_name,
            addresses=settings.addresses, since=settings.joined_at, voucher=settings.voucher.value,
            machine=settings.machine,
        )  # fmt: skip

    async def announce(self) -> None:
        self._remember()
        await self._core.directory.announce(self.record())

    async def run(self) -> None:
        """Announce every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            await self.announce()

    async def rehearse(self) -> None:
        """Find out of which kind the device is, and how fast on this stage, before there is work."""
        core, device = self._core, self._core.device

        def once() -> tuple[str, float]:
            return core.compute.rehearse(), device.elapsed_s()

        # Before all other jobs: kinds are compared by what the weights of version 0 give.
        core.kind, took_s = await device.run(Rank.STEP, -1, once)
        all_s = took_s
        if took_s < WARMING_S:
            _, took_s = await device.run(Rank.IDLE, 0, once)
            all_s += took_s
        self.rehearsed_s, self._rehearsals_s = took_s / device.workers, all_s / device.workers

    def _speed(self) -> float:
        """Microbatches per second of the device when it is busy; 0 before anything is known."""
        core = self._core
        busy_s = core.device.busy_s - self._rehearsals_s
        if core.computed and busy_s > 0:
            return core.computed / busy_s
        return 1.0 / self.rehearsed_s if self.rehearsed_s > 0 else 0.0

    def _remember(self) -> None:
        """Note what the last steps took, and what their losses were."""
        past = {version: step for version, step in self._past.items() if version <= self._core.version}
        for (before, began), (version, ended) in pairwise(self._core.taken_at):
            if version == before + 1:
                known = past.get(version, PastStep(version=version, took_s=0.0))
                past[version] = msgspec.structs.replace(known, took_s=ended - began)
        for t, loss in self._coordination.run_status.losses:
            if t + 1 <= self._core.version:
                known = past.get(t + 1, PastStep(version=t + 1, took_s=0.0))
                past[t + 1] = msgspec.structs.replace(known, loss=loss)
        if len(past) > MAX_PAST:
            for version in sorted(past)[1:-TIMES_KEPT:2]:
                del past[version]
        self._past = past

    def _past_after(self, version: int) -> tuple[PastStep, ...]:
        """The steps to later versions, evenly chosen where there are too many; the last is among them."""
        self._remember()
        later = [self._past[v] for v in sorted(self._past) if v > version]
        return tuple(later[-1 :: -max(1, -(-len(later) // MAX_PAST_TOLD))][::-1])

    async def _serve(self, request: Request) -> Answer:
        core, microbatches = self._core, self._microbatches
        asked = unpack(request.header, AskStatus, core.run.id, core.run.whole.id)
        step, traffic = core.steps.get(core.version), self._traffic.now()
        eval_version, eval_loss = self._evaluations.newest or (-1, None)
        status = PeerStatus(
            peer=core.me, stage=core.stage if asked.run == core.run.id else core.run.cell(core.stage),
            generation=core.generation, version=core.version,
            state="leaving" if self._moving.going else core.life,
            device=self._settings.device_name, done=step.ledger.done.bit_count() if step else 0,
            inflight=microbatches.inflight, max_inflight=microbatches.max_inflight,
            speed=self._speed(), computed=core.computed,
            coordinator=self._coordination.coordinator(core.stage) or "", audit=core.ledger_counts,
            since=self._settings.joined_at, up_s=now_s() - self._settings.started_at,
            eval_loss=eval_loss, eval_version=eval_version, bytes_in=traffic.bytes_in,
            bytes_out=traffic.bytes_out, links=traffic.links, rebalance=self._moving.decided[:MAX_WORDS],
            busy_s=core.device.busy_s, taken=microbatches.taken, answered=microbatches.answered,
            digest=core.digest, kind=core.kind, trainers=self._coordination.trainers,
            past=() if asked.after < 0 else self._past_after(asked.after),
        )  # fmt: skip
        return Answer(pack(status))

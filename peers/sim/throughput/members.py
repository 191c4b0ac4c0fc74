"""Membership: devices that come, load a state, serve, move by the live rule, and vanish; as a trace says.

Two forms of traces are read, spot instances' for one. JSON, as published with "Can't Be Late" (NSDI 24):
`{"metadata": {"gap_seconds": g}, "data": [counts]}`, a count every g seconds. CSV, as published with Bamboo
(NSDI 23): lines of `seconds,count`, one for each change, times that do not go back; with a third field, a
region, the count is of the devices there.

A trace says how many are up, not which. Here every decrease takes victims drawn evenly among those that are
up, and every increase is as many new peers; both at the time of the sample.
(The SWARM paper draws the stage of each victim instead. Instances do not know what stage they serve.)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec.structs import replace

from peers.sim.dice import Dice
from peers.sim.throughput.trainer import Trainer
from peers.sim.throughput.world import Peer, World
from peers.stage.moving import BOUNDARY_S
from peers.waiting import happens
from swarm.codecs import SLOW_BPS
from swarm.errors import SetupError
from swarm.ids import PeerId, Stage
from swarm.plan.network import BACKWARD_FORWARDS
from swarm.policy.rebalance import choose_stages, rebalance
from swarm.policy.spares import Exchange, judge
from swarm.records import NO_STAGE, PeerRecord

LOST_S = 6.0
"""A joiner of a stage without peers waits so long for one that may be cut off."""
DOWNLOAD_PARTS = 32
"""A state travels in so many parts from each source, between which other transfers have their turn."""


class Members:
    """Keeps `world.peers` and `world.stages`."""

    def __init__(self, world: World, trainer: Trainer, layout: Sequence[Stage]) -> None:
        self._world, self._trainer = world, trainer
        self._loop, self._report, self._job = world.loop, world.report, world.job
        world.on_released = self._leave_if_drained
        self._layout = list(layout)
        self._free = list(range(len(layout)))[::-1]
        self._idle: dict[PeerId, int] = {}
        """Joiners that no stage fits into, and their devices."""

    # -- come and go ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Let all devices of the layout serve from the beginning."""
        for device, stage in enumerate(self._layout):
            if stage != NO_STAGE:
                self._free.remove(device)
                self._add(device, stage, f"p{device:06d}")
                self._report.joins += 1

    async def follow(self, trace: Trace) -> None:
        """Let peers vanish and come, as the trace says."""
        for change in changes(trace, self._world.seed):
            await asyncio.sleep(change.at_s - self._loop.now_s)
            self._change(change)

    def _change(self, change: Change) -> None:
        for name in change.died:
            if name in self._world.peers:
                self._die(self._world.peers[name])
            else:
                self._free.append(self._idle.pop(name))
        for name in change.joined:
            device = self._take(change.region)
            stage = self._layout[device] if change.at_s == 0.0 else NO_STAGE
            if stage == NO_STAGE:
                stage = self._chosen(device, name)
            self._report.joins += 1
            if stage == NO_STAGE:
                self._report.idle += 1
                self._idle[name] = device
            else:
                self._add(device, stage, name)

    def _take(self, region: str) -> int:
        """A device that is free, in that region if one is named."""
        network, free = self._world.network, self._free
        where = network.regions.index(region) if region else None
        last = next(n for n in reversed(range(len(free))) if where in (None, network.place_of[free[n]]))
        return free.pop(last)

    def _add(self, device: int, stage: Stage, name: PeerId, *, spare: bool = False) -> None:
        """Bring `device` to `stage`: it serves when it has the state, or stands by."""
        world, job, now_s = self._world, self._job, self._loop.now_s
        there, settings = world.network.devices[device], world.settings
        forward_s = job.forward_flops[stage] / there.flops_per_s
        backward_s = BACKWARD_FORWARDS * job.forward_flops[stage] / there.flops_per_s
        open_steps = 1 + settings.delayed_updates
        room = int(min(settings.max_inflight, job.room(stage, there), open_steps * job.microbatches))
        carried = world.packed if there.upload_bps <= SLOW_BPS else job
        upload_s = 8.0 * carried.bytes_out(stage) / there.upload_bps
        peer = world.peers[name] = Peer(
            self._loop, device, name, stage, (forward_s, backward_s), upload_s, room
        )
        peer.spare = spare
        if spare:
            return
        if now_s == 0.0 or (world.version == 0 and not world.covered):
            self._serve(peer)  # version 0 follows from the seed
        else:
            self._loop.create_task(self._join(peer))

    async def _join(self, peer: Peer) -> None:
        """Load the state of the stage, then serve."""
        lines, size_bytes = self._world.lines, self._job.state_bytes[peer.stage]
        self._report.download_bytes += size_bytes
        sources = [source.device for source in self._world.serving(peer.stage)]
        if sources:
            part_bytes = size_bytes / len(sources) / DOWNLOAD_PARTS
            await asyncio.gather(*(self._fetch(peer, source, part_bytes) for source in sources))
        else:
            await asyncio.sleep(LOST_S + lines.down_s(peer.device, size_bytes))
            if peer.alive and not self._world.serving(peer.stage):  # else another one was first
                self._restore(peer.stage)
        peer.spare = peer.alive and self._told(peer) is True
        if peer.alive and not peer.spare:
            self._serve(peer)

    async def _fetch(self, peer: Peer, source: int, part_bytes: float) -> None:
        for _ in range(DOWNLOAD_PARTS):
            there_s = self._world.lines.send(source, peer.device, part_bytes, self._loop.now_s)
            await asyncio.sleep(there_s - self._loop.now_s)
            if not peer.alive:
                return

    def _restore(self, stage: Stage) -> None:
        """Take the run back to its last checkpoint: a stage had lost all its peers."""
        world, report = self._world, self._report
        back_to = world.version - world.version % world.settings.checkpoint_every
        report.generations += bool(world.covered) or world.version != back_to
        world.drop()
        report.recomputed += (world.version - back_to) * self._job.microbatches * self._job.stages
        world.version = back_to
        del report.step_ends_s[back_to:]
        self._trainer.went_back(back_to)

    def _serve(self, peer: Peer) -> None:
        world, now_s = self._world, self._loop.now_s
        peer.serving, peer.served_from_s = True, now_s
        peer.mean_load()  # from now on
        world.stages[peer.stage][peer.name] = peer
        self._trainer.set_peers(peer.stage)
        world.filled(peer.stage)
        if now_s > 0.0:  # those that begin together are all there before anything starts
            self._trainer.start_all()

    def count_out(self, peer: Peer) -> None:
        """Add what a peer did in its stage to the report."""
        if peer.serving:
            self._report.busy_s[peer.stage] += peer.busy_s
            self._report.there_s[peer.stage] += self._loop.now_s - peer.served_from_s
        peer.alive = peer.serving = False

    def _leave(self, peer: Peer) -> None:
        world, was_serving = self._world, peer.serving
        self.count_out(peer)
        peer.ended_s = self._loop.now_s
        del world.peers[peer.name]
        if was_serving and not world.serving(peer.stage):
            world.emptied(peer.stage)

    def _die(self, peer: Peer) -> None:
        self._report.deaths += 1
        self._leave(peer)
        self._free.append(peer.device)
        self._world.lose(peer)
        self._loop.call_later(self._world.settings.detect_s, self._detected, peer)

    def _detected(self, peer: Peer) -> None:
        """Now the others know that a peer is gone."""
        there = self._world.stages[peer.stage]
        if there.get(peer.name) is peer:
            del there[peer.name]
        self._trainer.set_peers(peer.stage)
        self._call_spares()
        peer.fail_all()
        self._trainer.report_soon()

    # -- the choice of stages ---------------------------------------------------------------------

    def _chosen(self, device: int, name: PeerId) -> Stage:
        """The stage that a newcomer chooses, by the live rule, of those that fit into the device."""
        job, there = self._job, self._world.network.devices[device]
        fit = [stage for stage in range(job.stages) if job.fits(stage, there)]
        if not fit:
            return NO_STAGE
        newcomer = PeerRecord(peer=name, run="simulated", stage=NO_STAGE, state="choosing", version=0)
        return choose_stages(
            self._records(), [newcomer], stages=job.stages, depth=job.stages, now_s=self._loop.now_s,
            among=fit,
        )[name]  # fmt: skip

    def _told(self, peer: Peer) -> bool | None:
        """Whether a peer is to be a spare from now on; None: as it is."""
        job = self._job
        if not self._world.settings.rebalance_every_s:
            return None
        # Here a state is as large as what is exchanged of it: nothing else is asked of its size.
        sizes = [max(1, round(size)) for size in job.gradient_bytes]
        records = [
            replace(r, state_bytes=sizes[r.stage], speed=1.0 / sum(self._world.peers[r.peer].job_s))
            for r in self._records()
        ]
        exchange = Exchange(
            stages=job.stages, microbatches=job.microbatches, gradient_share=1.0,
            delayed_updates=self._world.settings.delayed_updates,
        )  # fmt: skip
        me = next((record for record in records if record.peer == peer.name), None)
        found = judge(me, records, exchange) if me is not None else None
        return None if found is None else found.spare

    def _call_spares(self) -> None:
        """Have those serve that are needed by now."""
        for peer in list(self._world.peers.values()):
            if peer.spare and self._told(peer) is False:
                peer.spare = False
                self._loop.create_task(self._join(peer))

    def _records(self) -> list[PeerRecord]:
        """Records like those that live peers publish."""
        found = list[PeerRecord]()
        for peer in self._world.peers.values():
            if peer.draining_to is not None:
                continue
            upload_bps = self._world.network.devices[peer.device].upload_bps
            found.append(
                PeerRecord(
                    peer=peer.name,
                    run="simulated",
                    stage=peer.stage,
                    state="serving" if peer.serving else "paused" if peer.spare else "joining",
                    spare=peer.spare,
                    version=self._world.version,
                    speed=1.0 / sum(peer.job_s) if peer.computed else 0.0,
                    load=peer.mean_load() if peer.serving else 0.0,
                    state_bytes=round(self._job.state_bytes[peer.stage]),
                    bandwidth_bps=upload_bps if math.isfinite(upload_bps) else 0.0,
                    since=peer.since_s,
                )
            )
        return found

    async def rebalance(self) -> None:
        """Move peers by the live rule, in the middle of each period."""
        world, period_s = self._world, self._world.settings.rebalance_every_s
        await asyncio.sleep(period_s / 2)
        while True:
            told = rebalance(
                self._records(), stages=self._job.stages, period_s=period_s, now_s=self._loop.now_s
            )
            for move in told.moves:
                peer = world.peers[move.peer]
                if self._job.fits(move.to_stage, world.network.devices[peer.device]):
                    self._report.moves.append((self._loop.now_s, move))
                    self._loop.create_task(self._move(peer, move.to_stage))
            self._call_spares()
            for peer in list(world.peers.values()):
                if peer.serving and peer.draining_to is None and self._told(peer):
                    self._drain(peer, peer.stage)
            await asyncio.sleep(period_s)

    async def _move(self, peer: Peer, to_stage: Stage) -> None:
        """Go after the next step, as live peers do, unless no other is left by then."""
        self._world.stepped.clear()
        await happens(self._world.stepped, BOUNDARY_S)
        if peer.alive and peer.draining_to is None and len(self._world.stages[peer.stage]) > 1:
            self._drain(peer, to_stage)

    def _drain(self, peer: Peer, to_stage: Stage) -> None:
        """Have a peer finish what it has, and then go to a stage; to its own: to stand by there."""
        peer.draining_to = to_stage
        del self._world.stages[peer.stage][peer.name]
        self._trainer.set_peers(peer.stage)
        self._leave_if_drained(peer)

    def _leave_if_drained(self, peer: Peer) -> None:
        """Move a peer without microbatches in flight; what is in its sums is run again."""
        to_stage = peer.draining_to
        if to_stage is None or peer.flights or not peer.alive:
            return
        self._leave(peer)
        self._world.lose(peer)
        self._trainer.report_soon()
        self._add(peer.device, to_stage, peer.name, spare=to_stage == peer.stage)


# --- traces -------------------------------------------------------------------------------------------------

MAX_UP = 1_000_000
"""More peers than anything here is meant for: a mistake in the file."""


class _Metadata(msgspec.Struct):
    gap_seconds: Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class _Sampled(msgspec.Struct):
    metadata: _Metadata
    data: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_UP)]], msgspec.Meta(min_length=1)]


class Trace(NamedTuple):
    """How many peers are up, as steps."""

    times_s: tuple[float, ...]
    """When a count begins to hold; ascending, the first one is 0."""
    counts: tuple[int, ...]
    end_s: float
    regions: tuple[str, ...] = ()
    """Where each count is of; empty: of all devices."""


class Change(NamedTuple):
    """Peers that come and peers that vanish at one time."""

    at_s: float
    joined: tuple[PeerId, ...]
    died: tuple[PeerId, ...]
    region: str = ""
    """Where, if the trace says so."""


def read_trace(text: str, name: str = "the trace") -> Trace:
    """Either form; counts that follow one another and are equal become one.

    Raises:
        SetupError: neither form, or numbers that cannot be; says where.
    """
    lines, end_s = _json(text, name) if text.lstrip().startswith("{") else _csv(text, name)
    kept: list[tuple[float, int, str]] = []
    newest: dict[str, int] = {}
    """Region -> the place of its last line."""
    for time_s, count, region in lines:
        before = newest.get(region)
        if before is not None and kept[before][0] == time_s:
            kept[before] = (time_s, count, region)  # of several changes at one time the last one holds
        elif before is None or count != kept[before][1]:
            newest[region] = len(kept)
            kept.append((time_s, count, region))
    times_s, counts, regions = zip(*kept, strict=True)
    return Trace(times_s, counts, end_s, regions if any(regions) else ())


def changes(trace: Trace, seed: int) -> Iterator[Change]:
    """The trace with names and victims; the same for the same seed."""
    dice, everywhere, made = Dice(seed), dict[str, list[PeerId]](), 0
    regions = trace.regions or ("",) * len(trace.counts)
    for at_s, count, region in zip(trace.times_s, trace.counts, regions, strict=True):
        died, up = list[PeerId](), everywhere.setdefault(region, [])
        while len(up) > count:
            died.append(up.pop(dice.below(len(up))))
        joined = [f"p{made + i:06d}" for i in range(count - len(up))]
        made += len(joined)
        up += joined
        if joined or died:
            yield Change(at_s, tuple(joined), tuple(died), region)


def _json(text: str, name: str) -> tuple[list[tuple[float, int, str]], float]:
    try:
        found = msgspec.json.decode(text, type=_Sampled)
    except msgspec.MsgspecError as error:
        raise SetupError(f"{name}: {error}") from None
    gap_s = found.metadata.gap_seconds
    return [(i * gap_s, count, "") for i, count in enumerate(found.data)], len(found.data) * gap_s


def _csv(text: str, name: str) -> tuple[list[tuple[float, int, str]], float]:
    found: list[tuple[float, int, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() in ("", "seconds,count", "seconds,count,region"):
            continue
        before_s = found[-1][0] if found else 0.0
        try:
            first, second, *more = line.split(",")
            time_s, count, region = float(first), int(second), more[0].strip() if more else ""
            if not (before_s <= time_s < math.inf and 0 <= count <= MAX_UP):
                raise ValueError
        except ValueError:
            raise SetupError(
                f"{name}, line {number}: {line.strip()[:60]!r} is not `seconds,count`, at {before_s:g} s "
                "or later"
            ) from None
        if found and bool(region) != bool(found[0][2]):
            raise SetupError(f"{name}, line {number}: either all lines name a region, or none")
        found.append((time_s, count, region))
    if not found:
        raise SetupError(f"{name} is empty: lines of `seconds,count` are needed")
    end_s = found[-1][0]
    if found[0][0] > 0:
        found.insert(0, (0.0, 0, found[0][2]))
    return found, end_s

"""An event simulation of one step, to hold the predictions against. It shares no formula with them.

Every microbatch is a walk: forward through one peer of each stage, backward the same way. A device is a queue
(backwards first, then the older microbatch). A transfer takes its turn at the sender's upload, at the line
and at the receiver's download, each a queue of its own, and has arrived when the slowest of them is through,
plus the latency. When a stage's last backward is done its members exchange their sums part by part over the
same lines. The step ends when the run coordinator's word has reached everybody.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence

from swarm.plan.network import Job, Network


class Step:
    """One step of `stage_of` (the stage of each device); `run()` returns its seconds."""

    def __init__(
        self, network: Network, job: Job, stage_of: Sequence[int], *, seed: int = 0, window: int | None = None
    ) -> None:
        self.network, self.job = network, job
        self.chance = random.Random(seed)
        self.members = [[i for i, stage in enumerate(stage_of) if stage == s] for s in range(job.stages)]
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.free_at: dict[object, float] = {}
        self.waiting: dict[int, list[tuple[int, int, float, Callable[[], None]]]] = {}
        self.computing: set[int] = set()
        self.virtual = {
            i: self.chance.random() * self.cost_s(i, s) for s, m in enumerate(self.members) for i in m
        }
        self.left = [job.microbatches] * job.stages
        self.to_start = iter(range(job.microbatches))
        self.window = window or job.microbatches
        self.parts_missing: dict[tuple[int, int], int] = {}
        self.sums_missing = [len(m) * (len(m) - 1) for m in self.members]
        self.ready = 0
        self.ended_at = 0.0

    def run(self) -> float:
        for _ in range(self.window):
            self.start_one()
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            action()
        assert self.ready == self.job.stages
        return self.ended_at

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.order), action))

    # -- routing: a virtual clock for each peer; whose is furthest behind is next ------------------

    def cost_s(self, device: int, stage: int) -> float:
        """What the router has learnt of a peer: how long a microbatch keeps its slowest part busy."""
        d, job = self.network.devices[device], self.job
        out_bytes = in_bytes = 0.0
        if stage + 1 < job.stages:
            out_bytes += job.forward_bytes[stage]
            in_bytes += job.backward_bytes[stage]
        if stage > 0:
            out_bytes += job.backward_bytes[stage - 1]
            in_bytes += job.forward_bytes[stage - 1]
        return max(
            3 * job.forward_flops[stage] / d.flops_per_s,
            8 * out_bytes / d.upload_bps,
            8 * in_bytes / d.download_bps,
        )

    def route(self) -> list[int]:
        chosen: list[int] = []
        for stage, members in enumerate(self.members):
            peer = min(members, key=lambda i: (self.virtual[i], i))
            self.virtual[peer] += self.cost_s(peer, stage) * self.chance.uniform(0.5, 1.5)
            chosen.append(peer)
        return chosen

    # -- a microbatch ------------------------------------------------------------------------------

    def start_one(self) -> None:
        m = next(self.to_start, None)
        if m is not None:
            self.forward(m, self.route(), 0)

    def forward(self, m: int, way: list[int], stage: int) -> None:
        job, last = self.job, stage == self.job.stages - 1
        flops = job.forward_flops[stage] * (3 if last else 1)

        def done() -> None:
            if last:
                self.finished(m, way, stage)
            else:
                self.send(way[stage], way[stage + 1], job.forward_bytes[stage],
                          lambda: self.forward(m, way, stage + 1))  # fmt: skip

        self.compute(way[stage], 1, m, flops, done)

    def backward(self, m: int, way: list[int], stage: int) -> None:
        flops = 2 * self.job.forward_flops[stage]
        self.compute(way[stage], 0, m, flops, lambda: self.finished(m, way, stage))

    def finished(self, m: int, way: list[int], stage: int) -> None:
        if stage:
            self.send(way[stage], way[stage - 1], self.job.backward_bytes[stage - 1],
                      lambda: self.backward(m, way, stage - 1))  # fmt: skip
        else:
            self.start_one()
        self.left[stage] -= 1
        if not self.left[stage]:
            self.exchange(stage)

    def compute(self, device: int, rank: int, m: int, flops: float, done: Callable[[], None]) -> None:
        queue = self.waiting.setdefault(device, [])
        heapq.heappush(queue, (rank, m, flops, done))
        if device not in self.computing:
            self.next_of(device)

    def next_of(self, device: int) -> None:
        queue = self.waiting[device]
        if not queue:
            self.computing.discard(device)
            return
        self.computing.add(device)
        _, _, flops, done = heapq.heappop(queue)

        def end() -> None:
            done()
            self.next_of(device)

        self.at(self.now + flops / self.network.devices[device].flops_per_s, end)

    # -- lines -------------------------------------------------------------------------------------

    def send(self, a: int, b: int, nbytes: float, arrived: Callable[[], None]) -> None:
        one, other = self.network.devices[a], self.network.devices[b]
        line_bps = float(self.network.bandwidth_bps[one.region, other.region])
        through = self.now
        for queue, bps in (
            (("up", a), one.upload_bps),
            ((a, b), line_bps),
            (("down", b), other.download_bps),
        ):
            ends = max(self.free_at.get(queue, 0.0), self.now) + 8 * nbytes / bps
            self.free_at[queue] = ends
            through = max(through, ends)
        self.at(through + float(self.network.latency_s[one.region, other.region]), arrived)

    # -- the end of a step ---------------------------------------------------------------------------

    def exchange(self, stage: int) -> None:
        members = self.members[stage]
        part_bytes = self.job.gradient_bytes[stage] / len(members)
        if len(members) == 1:
            self.prepared()
            return
        for owner in members:
            self.parts_missing[stage, owner] = len(members) - 1
        # Everybody sends in another order, as it is in life, so that no download is met by all at once.
        for shift in range(1, len(members)):
            for k, sender in enumerate(members):
                owner = members[(k + shift) % len(members)]
                self.send(sender, owner, part_bytes, lambda o=owner: self.part_came(stage, o, part_bytes))

    def part_came(self, stage: int, owner: int, part_bytes: float) -> None:
        self.parts_missing[stage, owner] -= 1
        if self.parts_missing[stage, owner]:
            return
        members = self.members[stage]
        k = members.index(owner)
        for shift in range(1, len(members)):
            self.send(owner, members[(k + shift) % len(members)], part_bytes, lambda: self.sum_came(stage))

    def sum_came(self, stage: int) -> None:
        self.sums_missing[stage] -= 1
        if not self.sums_missing[stage]:
            self.prepared()

    def prepared(self) -> None:
        self.ready += 1
        if self.ready < self.job.stages:
            return
        regions = [self.network.devices[i].region for members in self.members for i in members]
        run_coordinator = self.network.devices[self.members[0][0]].region
        farthest = max(float(self.network.latency_s[run_coordinator, region]) for region in regions)
        self.ended_at = self.now + (2 * farthest if self.job.stages > 1 else 0.0)

"""Where to cut a model into stages: first the shortest period of the pipeline, then the shortest latency.

The period is the time from one microbatch to the next when all stages and lines work at once: the slowest
stage or line. Transfers hide behind compute, and both directions of a line work at once.

In a given order of the operators the best cut is found exactly, by dynamic programming over places to cut at:
what crosses a place and what a stretch costs follow from the places alone (`swarm.partitioner.segments`). A
chain has one order. For a DAG several orders that keep branches together are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from swarm.errors import SetupError
from swarm.model.graph.ir import OpGraph
from swarm.model.layout import Holding
from swarm.partitioner.cost import DeviceModel
from swarm.partitioner.flops import works
from swarm.partitioner.segments import Facts, OrderedGraph, Stretches, WireTerms

RANDOM_ORDERS = 24
"""Depth-first, with branches in a random order: tried besides the graph's own."""
NEARLY = 1e-9
"""Relative: what is gained below this is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The device of one stage."""

    device: DeviceModel
    memory_bytes: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The line between a stage and the next one, the same both ways."""

    bandwidth_bps: float = math.inf
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTerms:
    """The terms of a run that matter to where its model is cut."""

    holding: Holding = field(default_factory=Holding)
    wire: WireTerms = field(default_factory=WireTerms)
    microbatches: int = 1
    """Of a step: gradients of weights on several stages are added up once in so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A cut, and what it is expected to cost."""

    assignment: tuple[int, ...]
    """The stage of each operator, by index. Of those that several stages compute: the first of them."""
    period_s: float
    """From one microbatch to the next."""
    latency_s: float
    """Of one microbatch alone, there and back; and its share of adding up gradients of shared weights."""
    compute_s: tuple[float, ...]
    """Of each stage, forward and backward."""
    transfer_s: tuple[float, ...]
    """Of each boundary, in the direction that takes longer."""
    forward_bytes: tuple[float, ...]
    """Over each boundary."""
    backward_bytes: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    """Of each stage at its worst moment, with its state."""

    @property
    def limit(self) -> str:
        """The stage or line that determines the period."""
        slowest = max(range(len(self.compute_s)), key=lambda stage: self.compute_s[stage])
        if not self.transfer_s or max(self.transfer_s) <= self.compute_s[slowest]:
            return f"stage {slowest}"
        line = max(range(len(self.transfer_s)), key=lambda boundary: self.transfer_s[boundary])
        return f"the line between stages {line} and {line + 1}"


def split(
    graph: OpGraph, places: Sequence[Place], links: Sequence[Link] = (), terms: SplitTerms | None = None
) -> Split:
    """Cut `graph` into as many stages as there are places. `links`: the lines between them; none: no limit.

    Raises:
        SetupError: fewer operators with weights than stages; a stage that its device cannot hold.
    """
    task = _Task(graph, places, links, terms or SplitTerms())
    found = [cut for order in _orders(task.facts) if (cut := task.best_of(order)) is not None]
    if not found:
        raise task.too_large()
    return min(found, key=lambda cut: (cut.period_s, cut.latency_s))


def judge(
    graph: OpGraph,
    assignment: Sequence[int],
    places: Sequence[Place],
    links: Sequence[Link] = (),
    terms: SplitTerms | None = None,
) -> Split:
    """What a given cut is expected to cost.

    Raises:
        SetupError: not a cut: a value flows to an earlier stage, or a stage that is not there.
    """
    return _Task(graph, places, links, terms or SplitTerms()).judged(assignment)


class _Task:
    """One graph to be cut for given devices and lines."""

    def __init__(
        self, graph: OpGraph, places: Sequence[Place], links: Sequence[Link], terms: SplitTerms
    ) -> None:
        self.graph, self.terms, self.S = graph, terms, len(places)
        links = links or [Link()] * (self.S - 1)
        if not places or len(links) != self.S - 1:
            raise SetupError(
                f"{self.S} stages need {max(0, self.S - 1)} links between them, and {len(links)} are given"
            )
        for link in links:
            if not (link.bandwidth_bps > 0 and 0 <= link.latency_s < math.inf):
                raise SetupError(
                    f"a link of {link.bandwidth_bps:g} bit/s and {link.latency_s:g} s: the bandwidth must be "
                    "above 0, the latency finite and not below 0"
                )
        for place in places:
            if not place.memory_bytes > 0:
                raise SetupError(f"a device with {place.memory_bytes:g} bytes of memory holds nothing")
        self.links, self.limits = links, [place.memory_bytes for place in places]
        devices = list({id(place.device): place.device for place in places}.values())
        self.device = [next(n for n, d in enumerate(devices) if d is place.device) for place in places]
        self.seconds = np.array([[sum(d.operator_s(work)) for work in works(graph)] for d in devices])
        self.facts = Facts(graph)
        trained = sum(
            any(name in graph.parameters for name in self.facts.weights[index]) for index in self.facts.row
        )
        if trained < self.S:
            raise SetupError(
                f"{trained} operators have weights, too few for {self.S} stages: a stage without weights "
                "trains nothing. Cut the model into fewer stages"
            )

    # --- a row of operators ---

    def ordered(self, order: Sequence[int]) -> OrderedGraph:
        return OrderedGraph(self.graph, order, self.seconds, self.terms.holding, self.terms.wire, self.facts)

    def transfers(self, row: OrderedGraph) -> tuple[np.ndarray, np.ndarray]:
        """([S, n + 1] seconds that a link is busy, of the transfers there and back), by place; 0 after the
        last stage.
        """
        busy, trip = np.zeros((self.S, row.n + 1)), np.zeros((self.S, row.n + 1))
        for number, link in enumerate(self.links):
            forth, back = (8 * b / link.bandwidth_bps for b in (row.forward_bytes, row.backward_bytes))
            busy[number] = np.maximum(forth, back)
            trip[number] = forth + back + 2 * link.latency_s
        return busy, trip

    def best_of(self, order: Sequence[int]) -> Split | None:
        """The best cut of this order; None if none fits."""
        row, sharing_s = self.ordered(order), self._sharing_s()
        busy, trip = self.transfers(row)

        def period(stage: int, start: int, so_far: float, found: Stretches) -> np.ndarray:
            slowest = np.maximum(found.seconds[self.device[stage]], busy[stage, start + 1 :])
            return np.where(found.memory > self.limits[stage], math.inf, np.maximum(slowest, so_far))

        limit = _best_cut(row, self.S, period)[0] * (1 + NEARLY)
        if limit == math.inf:
            return None

        def latency(stage: int, start: int, so_far: float, found: Stretches) -> np.ndarray:
            seconds, line_s = found.seconds[self.device[stage]], busy[stage, start + 1 :]
            late = (found.memory > self.limits[stage]) | (seconds > limit) | (line_s > limit)
            costs = so_far + seconds + found.again * sharing_s + trip[stage, start + 1 :]
            return np.where(late, math.inf, costs)

        found = self._split_of(row, _best_cut(row, self.S, latency)[1])
        if tuple(order) == self.facts.row:
            return found
        # A stage computes in the graph's order, whichever order the cut was found in: its memory is another.
        found = self.judged(found.assignment)
        return found if self._fits(found) else None

    def order_of(self, assignment: Sequence[int]) -> list[int]:
        """The operators stage by stage."""
        return sorted(self.facts.row, key=lambda index: (assignment[index], index))

    def judged(self, assignment: Sequence[int]) -> Split:
        """The expected cost of a cut.

        Raises:
            SetupError: not a cut of this graph.
        """
        self._check(assignment)
        order = self.order_of(assignment)
        stages = np.array([assignment[index] for index in order])
        ends = list(np.searchsorted(stages, np.arange(self.S), side="right"))
        return self._split_of(self.ordered(order), ends)

    def _check(self, assignment: Sequence[int]) -> None:
        graph = self.graph
        if len(assignment) != len(graph.operators):
            raise SetupError(f"{len(assignment)} stages are given for {len(graph.operators)} operators")
        for index, sources in self.facts.before.items():
            stage, name = assignment[index], graph.operators[index].name
            if not 0 <= stage < self.S:
                raise SetupError(f"operator {name} is on stage {stage} of {self.S}")
            for source in sources:
                if assignment[source] > stage:
                    raise SetupError(
                        f"operator {name} of stage {stage} reads what {graph.operators[source].name} makes "
                        f"on stage {assignment[source]}: values flow to later stages only"
                    )

    def _split_of(self, row: OrderedGraph, ends: Sequence[int]) -> Split:
        """`ends`: the place after each stage's last operator."""
        starts = [0, *ends[:-1]]
        wanted = {start: stage for stage, start in enumerate(starts) if start < ends[stage]}
        compute, memory, again = [0.0] * self.S, [0.0] * self.S, 0.0
        for start, stretches in enumerate(row.stretches()):
            if start in wanted:
                stage, found = wanted[start], stretches()
                length = ends[stage] - start - 1
                compute[stage] = float(found.seconds[self.device[stage], length])
                memory[stage] = float(found.memory[length])
                again += float(found.again[length])
        busy, trip = self.transfers(row)
        cuts = list(ends[:-1])
        transfer = tuple(float(busy[number, cut]) for number, cut in enumerate(cuts))
        latency_s = math.fsum(compute) + math.fsum(float(trip[b, cut]) for b, cut in enumerate(cuts))
        assignment = [-1] * len(self.graph.operators)
        for stage, (start, end) in enumerate(zip(starts, ends, strict=True)):
            for index in row.order[start:end]:
                assignment[index] = stage
                for cheap in self.facts.needs[index]:
                    assignment[cheap] = stage if assignment[cheap] < 0 else assignment[cheap]
        return Split(
            assignment=tuple(max(0, stage) for stage in assignment),
            period_s=max(*compute, *transfer) if transfer else max(compute),
            latency_s=latency_s + again * self._sharing_s(),
            compute_s=tuple(compute),
            transfer_s=transfer,
            forward_bytes=tuple(float(row.forward_bytes[cut]) for cut in cuts),
            backward_bytes=tuple(float(row.backward_bytes[cut]) for cut in cuts),
            memory_bytes=tuple(memory),
        )

    def _sharing_s(self) -> float:
        """Of a microbatch, by byte of weights that one more stage holds: there and back, once a step."""
        slowest = min((link.bandwidth_bps for link in self.links), default=math.inf)
        return 16 / slowest / max(1, self.terms.microbatches)

    def _fits(self, found: Split) -> bool:
        return all(need <= limit for need, limit in zip(found.memory_bytes, self.limits, strict=True))

    def too_large(self) -> SetupError:
        """The error that nothing fits: names the cut whose worst stage is the least beyond its device."""
        row = self.ordered(self.facts.row)

        def overflow(stage: int, start: int, so_far: float, found: Stretches) -> np.ndarray:
            return np.maximum(found.memory / self.limits[stage], so_far)

        worst, ends = _best_cut(row, self.S, overflow)
        assert worst > 1
        found = self._split_of(row, ends)
        stage = max(range(self.S), key=lambda s: found.memory_bytes[s] / self.limits[s])
        inside = row.order[[0, *ends][stage] : ends[stage]]
        first, last = (self.graph.operators[index].name for index in (inside[0], inside[-1]))
        what = f"the operator {first}" if len(inside) == 1 else f"the operators from {first} to {last}"
        return SetupError(
            f"a stage that no device can hold: even in the best cut for memory stage {stage} ({what}) needs "
            f"{found.memory_bytes[stage] / 1e9:.3g} GB, and its device has {self.limits[stage] / 1e9:.3g} "
            "GB. Cut the model into more stages, bring a device with that much memory, or make microbatches "
            "smaller"
        )


def _best_cut(
    row: OrderedGraph, S: int, cost: Callable[[int, int, float, Stretches], np.ndarray]
) -> tuple[float, list[int]]:
    """The least cost of a cut of this order, and the place after each stage's last operator.

    Args:
        cost: (stage, start, the least cost up to there, stretches from there) -> [n - start] the cost with
            that stage and the boundary behind it, by the place after the stage's last operator.
    """
    best = np.full((S + 1, row.n + 1), math.inf)
    origin = np.zeros((S + 1, row.n + 1), dtype=np.int64)  # where the last of so many stages begins
    best[0, 0] = 0.0
    for start, stretches in enumerate(row.stretches()):
        reached = np.flatnonzero(best[:S, start] < math.inf).tolist()
        if not reached:
            continue
        found, trains = stretches(), row.trains[start:]
        shortest = int(np.argmax(trains)) if trains.any() else row.n  # a stage has weights
        for stage in reached:
            costs = cost(stage, start, float(best[stage, start]), found)
            costs[:shortest] = math.inf
            target = best[stage + 1, start + 1 :]
            less = costs < target
            target[less] = costs[less]
            origin[stage + 1, start + 1 :][less] = start
    ends = [row.n]
    for stage in range(S, 1, -1):
        ends.append(int(origin[stage, ends[-1]]))
    return float(best[S, row.n]), ends[::-1]


def _orders(facts: Facts) -> list[tuple[int, ...]]:
    """Different topological orders, the graph's own first; one for a chain."""
    rng = np.random.default_rng(0)
    ranks = (rng.permutation(len(facts.row)).tolist() for _ in range(RANDOM_ORDERS))
    found = [_depth_first(facts, dict(zip(facts.row, rank, strict=True))) for rank in ranks]
    return list(dict.fromkeys([facts.row, *found]))


def _depth_first(facts: Facts, rank: dict[int, int]) -> tuple[int, ...]:
    """Each operator as late as what needs it allows; of several branches that of the highest rank first."""
    before, done = facts.before, dict[int, None]()
    stack = [(root, False) for root in reversed(facts.ends)]
    while stack:
        index, ready = stack.pop()
        if index in done:
            continue
        if ready:
            done[index] = None
            continue
        stack.append((index, True))
        # The last is done first.
        stack += [(need, False) for need in sorted(before[index], key=lambda need: rank[need])]
    return tuple(done)

"""The state of a simulated run: devices that compute one job at a time, microbatches in flight, trainers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from swarm.ids import Microbatch, PeerId, Stage
from swarm.plan.network import Job, Network
from swarm.policy.link_latency import LinkLatency
from swarm.policy.router import Pace, Router
from swarm.policy.window import Window
from swarm.protocol.ledger import Ledger
from swarm.sim.clock import Clock
from swarm.sim.dice import Dice
from swarm.sim.network import SharedNetwork
from swarm.sim.report import Settings, ThroughputReport


class Flight:
    """A microbatch in flight: forward through a peer of each stage, and back."""

    __slots__ = (
        "alive", "back", "first", "generation", "gradient", "hops", "last", "latency_s", "m", "microbatch",
        "own_s", "position", "reached_s", "recorded", "refill", "t", "trainer",
    )  # fmt: skip

    def __init__(self, trainer: Trainer, microbatch: Microbatch, hops: list[Peer], generation: int) -> None:
        self.trainer, self.generation = trainer, generation
        self.microbatch, (self.t, self.m) = microbatch, microbatch
        self.hops = hops
        """By stage. A replay does not visit those outside `first` … `last`."""
        self.first, self.last = 0, len(hops) - 1
        self.recorded = [False] * len(hops)
        """Whether it is in that hop's sum: such a hop passes on what it kept, without computing."""
        self.position, self.back = 0, False
        """The stage that it is at or on its way to."""
        self.alive = True
        self.refill: Stage = -1
        """The stage whose new peer is being sent the activations again."""
        self.gradient = ""
        """That stage's: it is `here`, `lost` with the dead peer, or has yet to come."""
        self.reached_s = [0.0] * len(hops)
        self.latency_s = [0.0] * len(hops)
        """Per stage, on the link to the next one and back."""
        self.own_s = [0.0] * len(hops)
        """Per stage, its time there without the stages behind it: what routers learn from."""


@dataclass(slots=True, eq=False)
class Peer:
    """A device in one stage, from its arrival there to its end or its move to another stage."""

    device: int
    name: PeerId
    stage: Stage
    job_s: tuple[float, float]
    """(forward, backward) of one microbatch; the last stage does both at once."""
    room: int
    """Microbatches that fit into its memory; more wait before it."""
    came_s: float
    load_at_s: float
    served_from_s: float = 0.0
    alive: bool = True
    serving: bool = False
    draining_to: Stage | None = None
    """It gets no new microbatch, and moves to that stage when it has finished those that it has."""
    busy: bool = False
    backwards: deque[Flight] = field(default_factory=deque[Flight])
    """They go before the forwards: they end something, and free memory."""
    forwards: deque[Flight] = field(default_factory=deque[Flight])
    waiting: deque[Flight] = field(default_factory=deque[Flight])
    held: dict[Flight, None] = field(default_factory=dict[Flight, None])
    """Microbatches in its memory."""
    flights: dict[Flight, None] = field(default_factory=dict[Flight, None])
    """Microbatches that are routed through it and not yet in its sum."""
    ledgers: dict[int, Ledger] = field(default_factory=dict[int, Ledger])
    busy_s: float = 0.0
    computed: int = 0
    load_s: float = 0.0
    """Microbatches at the device × seconds, since its last record."""

    def count_load(self, now_s: float) -> None:
        """Add up the load so far; called before its queue changes."""
        queued = len(self.backwards) + len(self.forwards) + self.busy + len(self.waiting)
        self.load_s += queued * (now_s - self.load_at_s)
        self.load_at_s = now_s


@dataclass(slots=True, eq=False)
class Trainer:
    """A trainer with the live policies. All share the work list, as if claims were known to all at once."""

    device: int
    """The device that it is next to."""
    window: Window
    router: Router = field(default_factory=Router)
    link_latency: LinkLatency = field(default_factory=LinkLatency)
    pace: Pace = field(default_factory=Pace)
    running: int = 0
    shared: int = 0
    """Microbatches of the open step that it ran."""


class World:
    """The state of one run that all parts of the simulation share."""

    def __init__(self, network: Network, job: Job, settings: Settings, seed: int) -> None:
        self.network, self.job, self.settings, self.seed = network, job, settings, seed
        self.clock, self.lines, self.dice = Clock(), SharedNetwork(network), Dice(seed)
        self.report = ThroughputReport(
            job.microbatches, job.stages, busy_s=[0.0] * job.stages, there_s=[0.0] * job.stages,
            bin_s=settings.bin_s,
        )  # fmt: skip
        self.version = self.generation = 0
        self.peers: dict[PeerId, Peer] = {}
        """Those that join, serve or drain."""
        self.stages: list[dict[PeerId, Peer]] = [{} for _ in range(job.stages)]
        """Those that serve."""
        self.empty_since_s: float | None = 0.0
        """Since when some stage has no peer."""
        self.in_flight: dict[int, int] = {}
        """Step -> microbatches in flight, as bits."""

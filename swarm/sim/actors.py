"""Who takes part: devices that compute one job at a time, microbatches under way, trainers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from swarm.ids import Microbatch, PeerId, Stage
from swarm.policy.link_latency import LinkLatency
from swarm.policy.router import Pace, Router
from swarm.policy.window import Window
from swarm.protocol.ledger import Ledger


class Peer:
    """A device in one stage, from its coming there to its end or its move elsewhere."""

    __slots__ = (
        "alive", "backwards", "busy", "busy_s", "came_s", "computed", "device", "draining_to", "flights",
        "forwards", "held", "job_s", "ledgers", "load_at_s", "load_s", "name", "room", "served_from_s",
        "serving", "stage", "waiting",
    )  # fmt: skip

    def __init__(
        self, device: int, name: PeerId, stage: Stage, job_s: tuple[float, float], room: int, now_s: float
    ) -> None:
        self.device, self.name, self.stage = device, name, stage
        self.job_s = job_s
        """(forward, backward) of one microbatch; the last stage does both at once."""
        self.room = room
        """Microbatches that it takes at most; more wait at its door."""
        self.alive = True
        self.serving = False
        self.draining_to: Stage | None = None
        """Nothing new is given to it: it goes elsewhere when what it has is done."""
        self.busy = False
        self.backwards: deque[Flight] = deque()
        self.forwards: deque[Flight] = deque()
        """Backwards go first: they end something, and free its memory."""
        self.waiting: deque[Flight] = deque()
        self.held: dict[Flight, None] = {}
        """That it has memory for."""
        self.flights: dict[Flight, None] = {}
        """That it has in their way and not yet in its sum."""
        self.ledgers: dict[int, Ledger] = {}
        self.busy_s = 0.0
        self.computed = 0
        self.came_s = self.served_from_s = self.load_at_s = now_s
        self.load_s = 0.0
        """Microbatches at the device × seconds, since the last report of it."""

    def count_load(self, now_s: float) -> None:
        """Before its queue changes."""
        queued = len(self.backwards) + len(self.forwards) + self.busy + len(self.waiting)
        self.load_s += queued * (now_s - self.load_at_s)
        self.load_at_s = now_s


class Flight:
    """A microbatch under way: forward through a peer of each stage, and back."""

    __slots__ = (
        "alive",
        "back",
        "first",
        "generation",
        "grad",
        "hops",
        "last",
        "latency_s",
        "m",
        "own_s",
        "pos",
        "reached_s",
        "recorded",
        "refill",
        "t",
        "trainer",
    )  # fmt: skip

    def __init__(self, trainer: Trainer, microbatch: Microbatch, hops: list[Peer], generation: int) -> None:
        self.trainer = trainer
        self.t, self.m = microbatch
        self.hops = hops
        """By stage. Of a replay those outside `first` … `last` are not visited."""
        self.first, self.last = 0, len(hops) - 1
        self.recorded = [False] * len(hops)
        """In the sum of that hop; it passes on what it kept, without computing."""
        self.pos, self.back = 0, False
        """The stage that it is at or on its way to."""
        self.alive = True
        self.refill: Stage = -1
        """A stage that lost its activations behind our back, and is being given them again."""
        self.grad = ""
        """Of that stage: its gradient is `here`, `lost` with the peer that had it, or has yet to come."""
        self.generation = generation
        self.reached_s = [0.0] * len(hops)
        self.latency_s = [0.0] * len(hops)
        """Per stage, on the line to the next one and back."""
        self.own_s = [0.0] * len(hops)
        """Per stage, what it took there without the stages behind it: what routers learn from."""

    @property
    def microbatch(self) -> Microbatch:
        return Microbatch(self.t, self.m)


@dataclass(slots=True, eq=False)
class Trainer:
    """With the live policies; the work list is shared, as if claims were known to all at once."""

    device: int
    """Near which it is."""
    router: Router
    window: Window
    ways: LinkLatency = field(default_factory=LinkLatency)
    pace: Pace = field(default_factory=Pace)
    running: int = 0
    shared: int = 0
    """Microbatches of the open step that it ran."""

"""The run that is simulated, what travels between its processes, and who is announced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from swarm.ids import Era, PeerId, Stage, Standing
from swarm.policy.rounds import Go, Held, MemberStep, Plan, StageStep
from swarm.sim.clock import Clock

if TYPE_CHECKING:
    from swarm.sim.check import Weights

LIFE_S = 20.0
"""A record outlives its peer by at most this."""

RUN = "sim"


@dataclass(frozen=True, slots=True)
class Terms:
    """The manifest, as far as the protocol of steps cares."""

    stages: int
    microbatches: int
    steps: int
    delayed_updates: bool = False
    checkpoint_every: int = 0
    tied: bool = False
    """The first and the last stage hold one weight, element `SHARED`: what both found of it is added up."""

    def shares_with(self, stage: Stage) -> Stage | None:
        """The other stage that holds what `stage` holds, if there is one."""
        ends = (0, self.stages - 1)
        if not self.tied or self.stages == 1 or stage not in ends:
            return None
        return sum(ends) - stage

    def weight_version(self, t: int) -> int:
        return max(0, t - 1) if self.delayed_updates else t

    @property
    def ahead(self) -> int:
        """How many steps beyond the present one may be worked on."""
        return 1 if self.delayed_updates else 0


# --- messages -----------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """Run `(t, m)`. `versions`: of the weights that made the activation, one of each stage before."""

    t: int
    m: int
    attempt: int = 0
    deepest: Stage = -1
    route: tuple[PeerId, ...] = ()
    versions: tuple[int, ...] = ()


class Hop(NamedTuple):
    stage: Stage
    peer: PeerId
    own_s: float


class WorkDone(NamedTuple):
    """`versions`: of the weights that made the gradient, one of each stage from the callee on."""

    versions: tuple[int, ...]
    hops: tuple[Hop, ...]


class Status(NamedTuple):
    standing: Standing
    stays: bool


class Report(NamedTuple):
    era: Era
    version: int
    digest: str
    steps: tuple[tuple[int, MemberStep], ...] = ()
    goes: tuple[Go, ...] = ()
    farewell: bool = False


class RunBrief(NamedTuple):
    era: Era = Era()
    version: int = 0
    lacking: tuple[tuple[int, tuple[int, ...]], ...] = ()
    goes: tuple[Go, ...] = ()
    conductor: PeerId = ""


class StepBrief(NamedTuple):
    t: int
    plan: Plan | None = None
    adopt: tuple[str, tuple[PeerId, ...]] | None = None
    undo: int = 0


class Brief(NamedTuple):
    coordinator: PeerId
    number: int
    era: Era
    version: int
    sources: tuple[PeerId, ...]
    digest: str
    steps: tuple[StepBrief, ...]
    goes: tuple[Go, ...]
    whole_run: RunBrief
    behind_s: float


class Summary(NamedTuple):
    stage: Stage
    era: Era
    version: int
    steps: tuple[tuple[int, StageStep], ...]
    goes: tuple[Go, ...]


class Watched(NamedTuple):
    revision: int
    era: Era
    version: int
    brief: RunBrief


class Part(NamedTuple):
    """A contribution to the elements from `start` on; None: the ledger is empty."""

    round: str
    start: int
    total: int | None


class Vector(NamedTuple):
    """A reduced gradient; with its go once it was applied."""

    reduced: tuple[int, ...]
    held: Held
    go: Go | None


# --- disks -----------------------------------------------------------------------------------------------


class Shelf:
    """States that can be had of whoever serves nothing now."""

    def __init__(self, stages: int) -> None:
        self.saved: list[dict[int, Weights]] = [{} for _ in range(stages)]
        """Checkpoints on disks that outlive their peers: stage -> version -> weights."""
        self.pinned: dict[PeerId, tuple[Stage, Weights]] = {}
        """What peers keep while they are paused."""

    def of(self, stage: Stage) -> dict[int, Weights]:
        """All states of `stage`, by version."""
        pinned = {weights.version: weights for at, weights in self.pinned.values() if at == stage}
        return pinned | self.saved[stage]


# --- the directory ------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    peer: PeerId
    stage: Stage
    state: str
    since_s: float
    """When it came, by its own clock."""


class Directory:
    """Who says what of itself. One for all: everybody sees a change within a second or so, if at all late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[PeerId, Entry] = {}
        self._gone_at: dict[PeerId, float] = {}
        self._serving: dict[Stage, list[PeerId]] = {}
        self._fresh_until = float("inf")
        self._revision = 0

    def announce(self, entry: Entry) -> None:
        self._entries[entry.peer] = entry
        self._changed()

    def died(self, peer: PeerId, *, forgotten_s: float) -> None:
        """Its record is still seen for so long."""
        self._gone_at[peer] = self._clock.now + forgotten_s
        self._fresh_until = min(self._fresh_until, self._gone_at[peer])

    def entries(self) -> Sequence[Entry]:
        """All records, by peer."""
        self._forget()
        return [self._entries[peer] for peer in sorted(self._entries)]

    def latest(self) -> int:
        """The present revision: the same as long as nothing changes."""
        self._forget()
        return self._revision

    def serving(self, stage: Stage) -> list[PeerId]:
        """Those who say that they serve `stage`, sorted. Not to be changed."""
        self._forget()
        found = self._serving.get(stage)
        if found is None:
            found = [e.peer for e in self.entries() if e.stage == stage and e.state == "serving"]
            self._serving[stage] = found
        return found

    def since_s(self, peer: PeerId) -> float:
        """When it came, by its own clock; who is not known came last."""
        entry = self._entries.get(peer)
        return float("inf") if entry is None else entry.since_s

    def state(self, peer: PeerId) -> str:
        entry = self._entries.get(peer)
        return "left" if entry is None else entry.state

    def _forget(self) -> None:
        now = self._clock.now
        if now < self._fresh_until:
            return
        for peer in [p for p, at in self._gone_at.items() if at <= now]:
            del self._gone_at[peer]
            self._entries.pop(peer, None)
        self._fresh_until = min(self._gone_at.values(), default=float("inf"))
        self._changed()

    def _changed(self) -> None:
        self._revision += 1
        self._serving.clear()

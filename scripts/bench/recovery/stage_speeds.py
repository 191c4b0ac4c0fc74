"""A swarm as the speeds of its stages: joins, deaths and moves, but no microbatches.

The pipeline is as fast as its slowest stage. Peers are alike, so the best assignment of n peers to S stages
has floor(n / S) of them in the slowest one; what a rule is worth is the work done under it by the work that
would be done were the best assignment in place at every instant (SWARM, Ryabinin et al. 2023, section 4.4).
Who has come and downloads the first state counts from its end on: no rule can have it serve before.

The rules are given the very records that live peers publish, and carry names only: `ours` is
`swarm.policy.rebalance`, `papers` is the paper's Algorithm 2.

Joiners go where they are needed most (`Fluid.neediest`), under every rule. Of several that come at once
each sees those before it, as machines do that boot seconds apart; with `blind` none sees the others, and they
spread over the neediest stages by chance: they do not see one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from peers.sim.dice import Dice
from peers.sim.throughput.members import Trace, changes
from swarm.ids import PeerId, Stage
from swarm.policy.rebalance import MIN_GAIN, rebalance
from swarm.records import PeerRecord

MAX_LOAD = 8.0
"""Microbatches at a device of the slowest stage: what is in flight stands in front of it."""
CROWDED = 0.97
"""Share of its speed from which on a stage counts as the one where the queue is."""

Going: TypeAlias = "tuple[PeerId, Stage]"
Rule: TypeAlias = "Callable[[Sequence[PeerRecord], int, float, float], list[Going]]"
"""(records, stages, period in s, now in s) -> who moves where."""


@dataclass(frozen=True, slots=True)
class Span:
    """Work done in a part of the trace, in peers of the slowest stage × seconds."""

    done: float
    best: float
    """With the best assignment at every instant."""

    @property
    def share(self) -> float:
        """1 where nothing could be done."""
        return self.done / self.best if self.best else 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rule made of one trace."""

    overall: Span
    first_hour: Span
    """Of the time in which there are enough peers for all stages: the traces begin with nobody."""
    last_hour: Span
    moves: int
    """State downloads, one of a stage's state each. Joiners' are not in: they are the same for all rules."""
    rescues: int
    """Of the moves, those to a stage that nobody served."""
    standstill_s: float
    """A stage stood empty although there were peers enough."""
    served_s: float
    """There were peers enough."""


@dataclass(slots=True)
class _Peer:
    stage: Stage
    since_s: float
    serves_at_s: float
    came_s: float
    """When it had its first state."""


class Fluid:
    """Peers by stage, and the work they do while time passes."""

    def __init__(self, stages: int, *, load_s: float = 0.0) -> None:
        self.stages, self._load_s = stages, load_s
        self.peers: dict[PeerId, _Peer] = {}
        self.now_s = 0.0
        self.moves = self.rescues = 0
        self._pieces: list[tuple[float, int, int]] = []
        """(seconds, peers of the slowest stage, of the best assignment's), where the latter is not 0."""

    def levels(self) -> list[int]:
        """Peers that serve each stage now."""
        found = [0] * self.stages
        for peer in self.peers.values():
            if peer.serves_at_s <= self.now_s:
                found[peer.stage] += 1
        return found

    @property
    def best(self) -> int:
        return sum(peer.came_s <= self.now_s for peer in self.peers.values()) // self.stages

    def pass_until(self, at_s: float) -> None:
        """Work goes on until then; who arrives meanwhile serves from then on."""
        arrivals = sorted({p.serves_at_s for p in self.peers.values() if self.now_s < p.serves_at_s < at_s})
        for end_s in (*arrivals, at_s):
            if self.best and end_s > self.now_s:
                self._pieces.append((end_s - self.now_s, min(self.levels()), self.best))
            self.now_s = end_s

    def records(self, *, unix_s: float | None = None) -> list[PeerRecord]:
        """What the peers publish, if it is `unix_s` now (default: `now_s`).

        Queues stand before the slowest stage; elsewhere Little's law.
        """
        shift_s = 0.0 if unix_s is None else unix_s - self.now_s
        levels = self.levels()
        slowest = min(levels)
        loads = [_load(slowest / level if level else 1.0) for level in levels]
        return [
            PeerRecord(
                peer=name,
                run="trace",
                stage=peer.stage,
                state="serving" if peer.serves_at_s <= self.now_s else "joining",
                version=0,
                speed=1.0,
                load=loads[peer.stage],
                since=max(0.0, peer.since_s + shift_s),
            )
            for name, peer in self.peers.items()
        ]

    def neediest(self) -> list[Stage]:
        """The stages with the fewest peers, and those with so few more that it is noise."""
        there = Counter(peer.stage for peer in self.peers.values())
        least = min(there[stage] for stage in range(self.stages))
        return [stage for stage in range(self.stages) if there[stage] <= least * (MIN_GAIN - 1e-9)]

    def join(self, names: Iterable[PeerId], dice: Dice, *, blind: bool = False) -> None:
        """Newcomers, each to the stage of greatest need."""
        needy: list[Stage] = []
        for name in names:
            if not (blind and needy):
                needy = self.neediest()
            comes_s = self.now_s + self._load_s
            self.peers[name] = _Peer(dice.pick(needy), self.now_s, comes_s, comes_s)

    def die(self, names: Iterable[PeerId]) -> None:
        for name in names:
            del self.peers[name]

    def move(self, name: PeerId, to_stage: Stage) -> None:
        """It leaves its stage now and serves the other one when it has its state."""
        self.moves += 1
        self.rescues += not any(peer.stage == to_stage for peer in self.peers.values())
        came_s = self.peers[name].came_s
        self.peers[name] = _Peer(to_stage, self.now_s, self.now_s + self._load_s, came_s)

    def mark(self) -> int:
        """This moment, for `since`."""
        return len(self._pieces)

    def since(self, mark: int) -> Span:
        """What was done after that moment."""
        return _span(self._pieces[mark:])

    def outcome(self) -> Outcome:
        pieces = self._pieces
        return Outcome(
            overall=_span(pieces),
            first_hour=_span(_hour(pieces)),
            last_hour=_span(_hour(pieces[::-1])),
            moves=self.moves,
            rescues=self.rescues,
            standstill_s=sum(seconds for seconds, done, _ in pieces if done == 0),
            served_s=sum(seconds for seconds, _, _ in pieces),
        )


def run_trace(
    trace: Trace,
    rule: Rule | None,
    *,
    stages: int,
    period_s: float,
    seed: int,
    load_s: float = 0.0,
    blind: bool = False,
) -> Outcome:
    """One trace under one rule (None: nobody moves), with victims and the phase of the periods by `seed`.

    Args:
        load_s: how long who comes to a stage downloads its state, serving nobody; 0 as in the paper.
    """
    dice = Dice(seed)
    phase_s = dice.between(0.0, period_s)
    swarm, periods = Fluid(stages, load_s=load_s), 0
    events = [(change.at_s, change) for change in changes(trace, seed)]
    for number, (at_s, change) in enumerate(events):
        swarm.pass_until(at_s)
        swarm.die(change.died)
        swarm.join(change.joined, dice, blind=blind)
        end_s = events[number + 1][0] if number + 1 < len(events) else trace.end_s
        while rule is not None and phase_s + periods * period_s < end_s:
            decide_s, periods = phase_s + periods * period_s, periods + 1
            if decide_s <= at_s:
                continue
            swarm.pass_until(decide_s)
            # Names are drawn anew in each period of Unix time; the middle of one is where peers decide.
            unix_s = (periods + 0.5) * period_s
            for name, to_stage in rule(swarm.records(unix_s=unix_s), stages, period_s, unix_s):
                swarm.move(name, to_stage)
    swarm.pass_until(trace.end_s)
    return swarm.outcome()


def ours(records: Sequence[PeerRecord], stages: int, period_s: float, now_s: float) -> list[Going]:
    """The live rule. Where all peers serve and are level it cannot gain anything, and is not asked."""
    levels = [0] * stages
    for record in records:
        levels[record.stage] += record.state == "serving"
    if min(levels) >= len(records) // stages:
        return []
    told = rebalance(records, stages=stages, period_s=period_s, now_s=now_s)
    return [(move.peer, move.to_stage) for move in told.moves]


def papers(eager: bool) -> Rule:
    """SWARM's Algorithm 2: the least loaded peer of the least loaded stage goes to the most loaded stage.

    The paper's text has it move whenever the loads of two stages differ (`eager`); with 17 peers and 4 stages
    somebody then moves in every period, for ever. Not eager: only if the stage that it leaves keeps at least
    as many peers as the other one gets, which is the least that a sane reading of it downloads.
    """

    def rule(records: Sequence[PeerRecord], stages: int, period_s: float, now_s: float) -> list[Going]:
        there: list[list[PeerId]] = [[] for _ in range(stages)]
        for record in records:
            there[record.stage].append(record.peer)
        # Peers are alike: the load of each is the stage's work by its peers, least where most peers are.
        least = max(range(stages), key=lambda s: (len(there[s]), -s))
        most = min(range(stages), key=lambda s: (len(there[s]), s))
        if len(there[least]) - len(there[most]) < (1 if eager else 2):
            return []
        return [(min(there[least]), most)]

    return rule


def _load(use: float) -> float:
    return MAX_LOAD if use > CROWDED else min(MAX_LOAD, use / (1 - use))


def _hour(pieces: Sequence[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """The first 3600 s of them."""
    left_s, kept = 3600.0, list[tuple[float, int, int]]()
    for seconds, done, best in pieces:
        if left_s <= 0:
            break
        kept.append((min(seconds, left_s), done, best))
        left_s -= seconds
    return kept


def _span(pieces: Iterable[tuple[float, int, int]]) -> Span:
    done = best = 0.0
    for seconds, slowest, possible in pieces:
        done += seconds * slowest
        best += seconds * possible
    return Span(done, best)

"""Which peers move to which stages, if any: SWARM's Algorithm 2, made safe. Pure: `now_s` is given.

Every peer calls `rebalance` once a period with the public records and acts only if it is one of those that
are named. From one view all compute the same answer, in whatever order the records come. All should call in
the middle of a period of Unix time, where small differences of clocks do not matter.

What moves, what does not, and why: docs/design.md, *Moving*.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from statistics import median_low
from typing import NamedTuple, TypeAlias

from swarm.errors import short
from swarm.ids import PeerId, Stage
from swarm.records import PeerRecord

COOLDOWN_PERIODS = 2.0
"""A peer that came to its stage less than this ago does not move again: its arrival has to be measured."""
HORIZON_PERIODS = 5.0
"""A move must earn its download within this. Volunteers stay for hours; what is known of the swarm's speeds
a few minutes from now is little."""
MIN_GAIN = 1.10
"""Smaller gains are within the noise of measured speeds and would make peers wander."""
SOLE_GAIN = 1.25
"""Required gain of a move that leaves a stage with a single peer, whose death would stop the run. Of 200
small swarms the median comes to 0.955 of the best throughput with it, to 0.970 without; 1.5 gives 0.941."""
NOISY = 2
"""Number of peers of a stage up to which `MIN_GAIN` holds. In larger sums independent errors average out, as
one over the root of the number."""
SLOW_SHARE = 0.5
"""Times the typical speed. Slower peers move only if one alone makes the difference: else many would follow
one another to where one fast peer would do."""
SITS_OUT = 0.25
"""Share of all peers, drawn anew in each period."""
BUSY = 0.5
"""Microbatches at each device of a stage, on average, below which its speed is not what limits the run."""
MAX_TIMES_MEDIAN = 32.0
"""Honest speeds are within 20 times of each other; one liar must not make a stage look served for ever."""
VERSIONS_BEHIND = 2
"""Serving records further behind the median are of hung or dead peers, which must not be relied on."""
DEFAULT_BPS = 50e6
"""For a link that was not measured."""
MIN_SPEED, MAX_SPEED = 1e-9, 1e9
MAX_BYTES = 1e15
MIN_BPS, MAX_BPS = 1e3, 1e13
MAX_LOAD = 4096.0
_Named: TypeAlias = Callable[[Stage], str]


class Move(NamedTuple):
    """`peer` moves from `from_stage` to `to_stage` at its next step boundary."""

    peer: PeerId
    from_stage: Stage
    to_stage: Stage
    why: str


class Moves(NamedTuple):
    """The moves of this period, most urgent first; perhaps none. No peer is in it twice."""

    moves: tuple[Move, ...]
    why: str
    """The reason of the first move, and how many others there are; or why no peer moves."""


class _Replica(NamedTuple):
    """A record with its numbers bounded."""

    peer: PeerId
    stage: Stage
    serving: bool
    """False: it is still joining. Its speed counts, but it cannot move."""
    speed: float
    load: float
    bandwidth_bps: float
    """0 = not measured."""
    cooled_down: bool
    movable: bool
    sits_out: bool


def rebalance(
    records: Iterable[PeerRecord], *, stages: int, period_s: float, now_s: float,
    place: _Named = "stage {}".format,
) -> Moves:  # fmt: skip
    """The moves of this period, or why there are none.

    Args:
        records: the newest of each peer, of this run; `since` is when it came to the stage it names.
        now_s: Unix time, as the records' `since`. `place`: what a stage is called.
    """
    if not (stages >= 1 and period_s > 0 and math.isfinite(period_s) and math.isfinite(now_s)):
        raise ValueError(f"cannot rebalance {stages} stages every {period_s} s at {now_s}")
    newest = _newest(records, stages=stages, now_s=now_s)
    replicas = _replicas(newest, period_s=period_s, now_s=now_s)
    if not any(replica.serving for replica in replicas):
        return Moves((), "no peer serves any stage")
    by_stage: list[list[_Replica]] = [[] for _ in range(stages)]
    for replica in replicas:
        by_stage[replica.stage].append(replica)
    anchors = {_anchor(stage, stay, int(now_s // period_s)) for stage, stay in enumerate(by_stage)}
    download_s = _downloads_s(newest, by_stage)
    rescues = _rescue(by_stage, anchors, place)
    if isinstance(rescues, str):
        return Moves((), rescues)
    thought = _Levelling(by_stage, anchors, download_s, place, HORIZON_PERIODS * period_s)
    levelling = _level(thought, proven=bool(rescues))
    moves = (*rescues, *(() if isinstance(levelling, str) else levelling))
    if isinstance(levelling, str) and not moves:
        return Moves((), levelling)
    others = f" (and {len(moves) - 1} more)" if len(moves) > 1 else ""
    return Moves(moves, moves[0].why + others)


def is_due(*, period_s: float, lag_s: float, now_s: float) -> bool:
    """Whether a peer that sees records only after `lag_s` decides in this period.

    The moves of one decision must be in the records before the next, or each would move as many again. So a
    large run decides in every second, fourth, eighth ... period of Unix time, and all peers that decide in
    one period have the same anchors.
    """
    if not math.isfinite(lag_s):
        return False
    every = 1
    while every * period_s < lag_s:
        every *= 2
    return int(now_s // period_s) % every == 0


def choose_stages(
    records: Iterable[PeerRecord], newcomers: Iterable[PeerRecord], *, stages: int, depth: int, now_s: float,
    among: Sequence[Stage] = (),
) -> dict[PeerId, Stage]:  # fmt: skip
    """A stage for each newcomer, as if one after the other joined the slowest stage, or an equal of it.

    So newcomers of one instant spread over the stages, and each can compute where all go. Those of a machine
    come in a row, and each takes, of stages that are equal up to noise, one next to its machine's, to which
    it hands over in memory: a stranger's word on where it is decides between those. `depth`: stages of an
    island. `among`: those that may be chosen; none: all.
    """
    coming = {new.peer: new for new in newcomers}
    there = _newest((r for r in records if r.peer not in coming), stages=stages, now_s=now_s)
    chosen: dict[PeerId, Stage] = {}
    among = sorted(among) or range(stages)
    for new in sorted(coming.values(), key=lambda r: (r.machine, r.peer)):
        levels = _levels(there, stages=stages, now_s=now_s)
        slowest = min(among, key=levels.__getitem__)
        most = levels[slowest] * (_min_gain(sum(r.stage == slowest for r in there)) - 1e-9)
        own = {r.stage for r in there if r.machine and r.machine == new.machine}
        beside = {s for at in own for s in (at - 1, at + 1) if s // depth == at // depth}
        stage = min(among, key=lambda s: (levels[s] > most, s not in beside, levels[s], s))
        chosen[new.peer] = stage
        joins = PeerRecord(
            peer=new.peer, run="", stage=stage, state="joining", version=0, machine=new.machine, since=now_s
        )
        there.append(joins)
    return chosen


def _levels(records: Iterable[PeerRecord], *, stages: int, now_s: float) -> list[float]:
    """Microbatches per second of each stage, including joining peers; 0: it has none."""
    replicas = _replicas(_newest(records, stages=stages, now_s=now_s), period_s=1e9, now_s=now_s)
    return [_speed([m for m in replicas if m.stage == stage]) for stage in range(stages)]


# --- what the records say -----------------------------------------------------------------------------------


def _newest(records: Iterable[PeerRecord], *, stages: int, now_s: float) -> list[PeerRecord]:
    """One record of each peer of a stage, sorted by peer: of two, the later one."""
    found: dict[PeerId, PeerRecord] = {}

    def later(record: PeerRecord) -> tuple[float, int, int, str, str]:
        # The text breaks ties, so that the order of the records never matters.
        return _since(record, now_s), record.version, record.stage, record.state, repr(record)

    for record in records:
        if record.state in ("joining", "serving", "leaving", "left", "paused"):
            old = found.get(record.peer)
            if old is None or later(record) > later(old):
                found[record.peer] = record
    return [
        found[peer]
        for peer in sorted(found)
        if 0 <= found[peer].stage < stages and found[peer].state in ("joining", "serving")
    ]


def _replicas(newest: Sequence[PeerRecord], *, period_s: float, now_s: float) -> list[_Replica]:
    speeds = [between(r.speed, MIN_SPEED, MAX_SPEED) for r in newest]
    typical = median_low([speed for speed in speeds if speed] or [1.0])
    serving_versions = [r.version for r in newest if r.state == "serving"] or [0]
    # Records are seconds old, and steps may be short: others may lag as far behind as the newest are ahead.
    version = median_low(serving_versions)
    spread = max(serving_versions) - version
    replicas: list[_Replica] = []
    for record, speed in zip(newest, speeds, strict=True):
        here_s = now_s - _since(record, now_s)
        serving = record.state == "serving"
        if serving and record.version < version - VERSIONS_BEHIND - 2 * spread:
            continue
        if not serving and here_s > HORIZON_PERIODS * period_s:
            continue  # it will not arrive any more
        drawn = hashlib.sha256(f"sits out {int(now_s // period_s)} {record.peer}".encode()).digest()[0]
        replicas.append(
            _Replica(
                peer=record.peer, stage=record.stage, serving=serving, movable=record.movable,
                speed=min(speed or typical, MAX_TIMES_MEDIAN * typical),
                load=between(record.load, 0.0, MAX_LOAD) if serving else 0.0,
                bandwidth_bps=between(record.bandwidth_bps, MIN_BPS, MAX_BPS),
                cooled_down=here_s >= COOLDOWN_PERIODS * period_s,
                sits_out=drawn < SITS_OUT * 256,
            )
        )  # fmt: skip
    return replicas


def _since(record: PeerRecord, now_s: float) -> float:
    """When it came to its stage; an impossible time counts as now, so that it waits the cooldown."""
    return record.since if 0.0 <= record.since <= now_s else now_s


def _min_gain(peers: int) -> float:
    """The factor by which moves must speed up the slowest stage."""
    return 1.0 + (MIN_GAIN - 1.0) * min(1.0, math.sqrt(NOISY / max(1, peers)))


def between(value: float, low: float, high: float) -> float:
    """`value` inside its bounds; 0 if it is no positive number."""
    return float(min(max(value, low), high)) if 0.0 < value < math.inf else 0.0


def _anchor(stage: Stage, there: Sequence[_Replica], period: int) -> PeerId | None:
    """The peer of a stage that stays in this period whatever its speed: a function of the replicas' ids."""

    def draw(peer: PeerId) -> tuple[bytes, PeerId]:
        return hashlib.sha256(f"anchor {period} {stage} {peer}".encode()).digest(), peer

    return min((replica.peer for replica in there if replica.serving), key=draw, default=None)


def _downloads_s(newest: Sequence[PeerRecord], by_stage: Sequence[Sequence[_Replica]]) -> list[float]:
    """Per stage, how long a newcomer downloads its state from all replicas at once."""
    sizes: list[list[float]] = [[] for _ in by_stage]
    for record in newest:
        if size := between(record.state_bytes, 1.0, MAX_BYTES):
            sizes[record.stage].append(size)
    typical_bytes = median_low([size for here in sizes for size in here] or [0.0])
    found: list[float] = []
    for here, there in zip(sizes, by_stage, strict=True):
        uploads = [replica.bandwidth_bps for replica in there if replica.serving]
        typical_bps = median_low([bps for bps in uploads if bps] or [DEFAULT_BPS])
        all_bps = max(MIN_BPS, sum(bps or typical_bps for bps in uploads))
        found.append(8 * median_low(here or [typical_bytes]) / all_bps)
    return found


def _movable(there: Sequence[_Replica], anchors: set[PeerId | None]) -> list[_Replica]:
    return [m for m in there if m.serving and m.movable and m.peer not in anchors]


# --- stages without a peer ----------------------------------------------------------------------------------


def _rescue(by_stage: list[list[_Replica]], anchors: set[PeerId | None], place: _Named) -> list[Move] | str:
    """Moves to empty stages, where the run stands still: those that leave the fastest pipeline behind; or why
    none can be made.

    Peers that move are moved within `by_stage`.
    """
    moves: list[Move] = []
    free = [m for there in by_stage for m in _movable(there, anchors)]
    empties = [stage for stage, there in enumerate(by_stage) if not there]
    if len(free) < len(empties):
        # To fill only some of them would cost downloads, and the run would still stand still.
        short_of = len(empties) - len(free)
        gives = "no other stage has a second peer to give"
        if free:
            gives = f"the others can give {len(free)} only"
        return f"no peer serves {' or '.join(map(place, empties))}, and {gives}: the run waits for " + (
            "a newcomer" if short_of == 1 else f"{short_of} newcomers"
        )
    for empty in empties:
        levels = [_speed(there) for there in by_stage]

        def left(replica: _Replica, levels: Sequence[float] = levels) -> tuple[bool, bool, float, float]:
            others = min(
                level - (replica.speed if stage == replica.stage else 0.0)
                for stage, level in enumerate(levels)
                if level > 0
            )
            return not replica.cooled_down, replica.sits_out, -min(others, replica.speed), replica.speed

        mover = min(free, key=lambda m: (left(m), m.peer))
        count, source = sum(m.serving for m in by_stage[mover.stage]), mover.stage
        why = (
            f"no peer serves {place(empty)}, so the run stands still; {place(source)} has {count} peers, "
            f"and without peer {short(mover.peer)} still does {levels[source] - mover.speed:.3g} of "
            f"{levels[source]:.3g} microbatches/s"
        )
        moves.append(Move(mover.peer, source, empty, why))
        free.remove(mover)
        by_stage[source].remove(mover)
        by_stage[empty].append(mover._replace(stage=empty, serving=False))
    for stage, there in enumerate(by_stage):
        if not moves and not any(replica.serving for replica in there):
            coming = min(replica.peer for replica in there)
            return f"no peer serves {place(stage)} yet, but peer {short(coming)} is on its way there"
    return moves


def _speed(there: Sequence[_Replica]) -> float:
    """The speed of a stage, summed exactly so that all peers round alike."""
    return math.fsum(replica.speed for replica in there)


# --- stages of unequal speed --------------------------------------------------------------------------------


class _Step(NamedTuple):
    mover: _Replica
    to_stage: Stage
    source_speed: float
    """Speed of the stage that it leaves, before the move."""


class _Levelling:
    """Stage speeds and movable peers, with moves applied on trial.

    For a gap of `2 g` between two stages the best mover has the speed `g`: both end level. Slower ones close
    less of it, faster ones turn it round. So of each stage only the two peers next to `g` matter, and with
    its peers sorted by speed the cost is that of a bisection.
    """

    def __init__(
        self, by_stage: Sequence[Sequence[_Replica]], anchors: set[PeerId | None],
        download_s: Sequence[float], place: _Named, horizon_s: float,
    ) -> None:  # fmt: skip
        self.by_stage, self.download_s, self.place, self.horizon_s = by_stage, download_s, place, horizon_s
        self.levels = [_speed(there) for there in by_stage]
        self._serving = [sum(replica.serving for replica in there) for there in by_stage]
        able = [[m for m in _movable(there, anchors) if m.cooled_down] for there in by_stage]
        free = [sorted(there, key=lambda m: (m.speed, m.peer)) for there in able]
        self._awake = [[m for m in there if not m.sits_out] for there in free]
        self._asleep = [[m for m in there if m.sits_out] for there in free]
        self._even = math.fsum(self.levels) / len(self.levels)
        self._fair_speed = SLOW_SHARE * median_low([m.speed for there in by_stage for m in there] or [0.0])

    @property
    def slowest(self) -> Stage:
        return min(range(len(self.levels)), key=lambda s: (self.levels[s], s))

    def best(self) -> _Step | None:
        """The move to the slowest stage that levels best; None if no move helps."""
        return self._best_of(self._awake) or self._best_of(self._asleep)

    def _best_of(self, candidates: Sequence[Sequence[_Replica]]) -> _Step | None:
        to, chosen, best = self.slowest, None, (-1.0, 0.0, 0.0)
        for stage, free in enumerate(candidates):
            if stage == to:
                continue
            gap = self.levels[stage] - self.levels[to]
            at = bisect_left(free, gap / 2, key=lambda m: m.speed)
            for replica in free[max(0, at - 1) : at + 1]:
                lower = min(self.levels[stage] - replica.speed, self.levels[to] + replica.speed)
                enough = 1.0 if replica.speed >= self._fair_speed else MIN_GAIN
                if self._serving[stage] == 2 and self._serving[to] > 1:
                    enough = SOLE_GAIN
                if lower <= self.levels[to] or lower < enough * self.levels[to]:
                    continue
                # Above the average of all stages nothing is gained: then the least useful peer moves, and
                # among equals one of the fastest stage, which misses it least when others die.
                rank = (min(lower, self._even), -replica.speed, self.levels[stage])
                if chosen is None or rank > best or (rank == best and replica.peer < chosen.mover.peer):
                    chosen, best = _Step(replica, to, self.levels[stage]), rank
        return chosen

    def move(self, step: _Step) -> None:
        """Apply a move on trial."""
        source = step.mover.stage
        (self._asleep if step.mover.sits_out else self._awake)[source].remove(step.mover)
        self._serving[source] -= 1
        self.levels[source] -= step.mover.speed
        self.levels[step.to_stage] += step.mover.speed


def _level(thought: _Levelling, *, proven: bool) -> list[Move] | str:
    """Groups of a few moves that pay, until the next group would not; or why the first would not.

    `proven`: moves are needed whatever the queues say, because the run stands still or is being levelled.
    """
    moves: list[Move] = []
    while not isinstance(few := _next_few(thought, proven=proven or bool(moves)), str):
        moves += few
    return moves or few


def _next_few(thought: _Levelling, *, proven: bool) -> list[Move] | str:
    to, before, place = thought.slowest, min(thought.levels), thought.place
    gain = _min_gain(len(thought.by_stage[to]))
    steps: list[_Step] = []
    price_s = [0.0] * len(thought.levels)
    # Several stages may be equally slow: then the run is faster only when the last of them got a peer.
    while min(thought.levels) < gain * before and (step := thought.best()) is not None:
        thought.move(step)
        steps.append(step)
        price_s[step.to_stage] += thought.download_s[step.to_stage]
    after = min(thought.levels)
    if after < gain * before or not steps:
        return (
            f"{place(to)} is the slowest with {before:.3g} microbatches/s, and no move makes the run "
            f"{gain - 1:.0%} faster"
        )
    mover = steps[0].mover
    idle = None if proven else _why_speed_is_not_the_limit(thought.by_stage, to, mover.stage, place)
    if idle is not None:
        return idle
    # Stages download side by side; newcomers of one stage share its links.
    wait_s = max(price_s)
    earned_s = wait_s * before / (after - before)
    if wait_s + earned_s > thought.horizon_s:
        return (
            f"{place(to)} would do {after:.3g} instead of {before:.3g} microbatches/s with peer "
            f"{short(mover.peer)} of {place(mover.stage)}, but {wait_s:.0f} s of download would be earned "
            f"back only after {earned_s:.0f} s; the limit is {thought.horizon_s:.0f} s for both"
        )
    also = f" (with {len(steps) - 1} more like it)" if len(steps) > 1 else ""
    end = (
        f"after the move{also} the slowest stage does {after:.3g} instead of {before:.3g}, "
        f"which pays back {wait_s:.0f} s of download in {earned_s:.0f} s"
    )
    return [
        Move(
            step.mover.peer,
            step.mover.stage,
            step.to_stage,
            f"{place(step.to_stage)} is the slowest; peer {short(step.mover.peer)} gives "
            f"{step.mover.speed:.3g} of {place(step.mover.stage)}'s {step.source_speed:.3g} microbatches/s; "
            f"{end}",
        )
        for step in steps
    ]


def _wait_s(there: Sequence[_Replica]) -> float:
    """How long a microbatch stays at a stage, by Little's law."""
    return math.fsum(m.load for m in there) / _speed([m for m in there if m.serving])


def _why_speed_is_not_the_limit(
    by_stage: Sequence[Sequence[_Replica]], to: Stage, source: Stage, place: _Named
) -> str | None:
    """The reason not to move if queues contradict the speeds: they stand in front of what is really slow."""
    needy = [m for m in by_stage[to] if m.serving]
    load = math.fsum(m.load for m in needy)
    if load < BUSY * len(needy):
        return (
            f"{place(to)} is the slowest, but only {load:.1f} microbatches are at its {len(needy)} devices: "
            "more speed there would stand idle"
        )
    wait_s, given_s = (_wait_s(by_stage[stage]) for stage in (to, source))
    if wait_s < given_s:
        return (
            f"{place(to)} should be the slowest, but microbatches wait longer at {place(source)} "
            f"({given_s:.2g} s against {wait_s:.2g} s): the speeds are not what limits the run"
        )
    return None

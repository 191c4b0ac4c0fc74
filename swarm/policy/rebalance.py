"""Which peers move to which stages, if any: SWARM's Algorithm 2, made safe. Pure: `now_s` is given.

Every peer calls `rebalance` once a period with the public records and acts only if it is one of those that
are named. From one view everybody computes the same answer, in whatever order the records come. All should
call in the middle of a period of Unix time, where small differences of clocks do not matter.

What moves. The pipeline is as fast as its slowest stage, so the speed of a stage is the sum over its
peers, and that of the run the least of the stages. The slowest stage gets the peer that best levels the
two stages it moves between. The paper takes the least useful peer of the most idle stage instead. Compared
in simulated swarms of 36 peers, speeds 20 times apart, 6 stages, an hour of periods: this rule needs 3.0
moves and has 0.886 of the best throughput over the hour; the paper's, with the same safeguards, needs 9.3
and has 0.868 (it ends at 0.915 instead of 0.895, one small peer after the other).

How many. As many as are needed, at once: with one move a period a swarm that lost half of its machines is
unlevel for several periods, in which its other stages wait. In the swarms above: 0.937 of the mean stage
speed over the hour with 4.6 moves, against 0.899 with 3.2 when one moved at a time; on traces of spot
instances see `scripts/bench/rebalance.py`.

What does not move, and why:

- A stage keeps somebody (I6): its *anchor*, one of those that serve it, drawn for each period from their ids
  alone. The only peer of a stage is its anchor. Views differ in speeds and loads all the
  time; two peers that each believe they are the one to go still leave the anchor behind.
- A quarter of all peers, drawn anew for each period, sits out if others can go instead: one that is named
  again and again and cannot go, or lies, holds the others up for four periods and not for ever.
- A peer whose owner chose its stage stays there.
- A peer rests two periods after it came, unless a stage stands empty and nobody else can go.
- Moves must raise the speed of the run by 10 % (less where many peers' errors of measurement average out),
  alone or a few together: several stages may be equally slow, or large. Their downloads, priced as if the run
  stood still for them, must be earned back within the horizon. After these the next few are weighed in the
  same way, from the speed that the run then has.
- If the slowest stage is not the one where microbatches wait, the speeds are not the limit: nobody moves.
- Where a planner is given that knows the ways between peers (`step_s`), it chooses among movers that are
  equally fast, and has the last word: moves after which it predicts steps to be a tenth longer are not made.

Strangers write records: a number that cannot be is taken as not measured, and nobody is believed to be more
than 32 times as fast as the median.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from swarm.errors import short
from swarm.ids import PeerId, Stage
from swarm.records import PeerRecord

REST_PERIODS = 2.0
"""A peer that came to its stage less than this ago does not move again: its arrival has to be measured."""
HORIZON_PERIODS = 5.0
"""A move must earn its download within this. Volunteers stay for hours; what is known of the swarm's speeds
a few minutes from now is little."""
LEAST_GAIN = 1.10
"""Less is within the noise of measured speeds, and would have peers wander."""
NOISY = 4
"""Peers of a stage, up to which that holds. The speeds of more are summed, and errors that have nothing to do
with one another average out, as one over the root of their number."""
SMALL_FRY = 0.5
"""Times the usual speed. Slower peers move only if one alone makes the difference: else many would follow one
another to where one fast peer would do."""
SITS_OUT = 0.25
"""Of all peers, in each period."""
BUSY = 0.5
"""Microbatches at each device of a stage, on average, below which its speed is not what limits the run."""
MOST_TIMES_MEDIAN = 32.0
"""Honest speeds are within 20 times of each other; one liar must not make a stage look served for ever."""
VERSIONS_BEHIND = 2
"""Serving records further behind the median are of peers that hang or are gone: nobody may rely on them."""
USUAL_BPS = 50e6
"""Of a line that nobody has measured."""
ALIKE = 0.1
"""Speeds that differ by less, relatively, are the same: measurements are no better."""
MOST_ALIKE = 16
"""Of those that are tried in the place of one that should move."""
StepTime = Callable[[Mapping[PeerId, Stage]], float]
"""Predicted seconds of a step if these peers served those stages, all others as they are."""
LEAST_SPEED, MOST_SPEED = 1e-9, 1e9
MOST_BYTES = 1e15
LEAST_BPS, MOST_BPS = 1e3, 1e13
MOST_LOAD = 4096.0


@dataclass(frozen=True, slots=True)
class Move:
    """`peer` leaves `from_stage` for `to_stage`, at its next step boundary."""

    peer: PeerId
    from_stage: Stage
    to_stage: Stage
    why: str


@dataclass(frozen=True, slots=True)
class Moves:
    """Who moves in this period: the most urgent first. No peer is in it twice."""

    moves: tuple[Move, ...]

    @property
    def why(self) -> str:
        """Of the first one; the others are counted."""
        others = len(self.moves) - 1
        return self.moves[0].why + (f" (and {others} more)" if others else "")


@dataclass(frozen=True, slots=True)
class Stay:
    """Nobody moves in this period."""

    why: str


@dataclass(frozen=True, slots=True)
class _Member:
    """A record with its numbers made sane."""

    peer: PeerId
    stage: Stage
    serving: bool
    """Else it is on its way: its speed counts, it does not."""
    speed: float
    load: float
    bandwidth_bps: float
    """0 = not measured."""
    rested: bool
    movable: bool
    sits_out: bool


def rebalance(
    records: Iterable[PeerRecord],
    *,
    stages: int,
    period_s: float,
    now_s: float,
    step_s: StepTime | None = None,
) -> Moves | Stay:
    """The moves of this period, or why there are none.

    Args:
        records: the newest of each peer, of this run; `since` is when it came to the stage it names.
        now_s: Unix time, as the records' `since`.
        step_s: predicted seconds of a step with such changes, from the same records.
    """
    if not (stages >= 1 and period_s > 0 and math.isfinite(period_s) and math.isfinite(now_s)):
        raise ValueError(f"cannot rebalance {stages} stages every {period_s} s at {now_s}")
    newest = _newest(records, stages=stages, now_s=now_s)
    members = _members(newest, period_s=period_s, now_s=now_s)
    if not any(member.serving for member in members):
        return Stay("nobody serves any stage")
    by_stage: list[list[_Member]] = [[] for _ in range(stages)]
    for member in members:
        by_stage[member.stage].append(member)
    anchors = {_anchor(stage, stay, int(now_s // period_s)) for stage, stay in enumerate(by_stage)}
    download_s = _downloads_s(newest, by_stage)
    rescues = _rescue(by_stage, anchors)
    if isinstance(rescues, Stay):
        return rescues
    levelling = _level(
        by_stage, anchors, download_s, horizon_s=HORIZON_PERIODS * period_s, proven=bool(rescues)
    )
    if isinstance(levelling, Stay):
        return Moves(tuple(rescues)) if rescues else levelling
    if rescues or step_s is None:
        return Moves((*rescues, *levelling))
    free = [m for there in by_stage for m in there if _may_go(m, anchors) and not m.sits_out]
    return _nearer(levelling, free, step_s)


def _may_go(member: _Member, anchors: set[PeerId | None]) -> bool:
    return member.serving and member.movable and member.rested and member.peer not in anchors


def _nearer(levelling: Sequence[Move], free: Sequence[_Member], step_s: StepTime) -> Moves | Stay:
    """The same moves by those who are nearest to where they go, among such that are as fast."""
    speeds = {member.peer: member.speed for member in free}
    changes: dict[PeerId, Stage] = {}
    moves: list[Move] = []
    for move in levelling:
        speed = speeds.get(move.peer, 0.0)
        alike = [
            m.peer
            for m in free
            if m.stage == move.from_stage and m.peer not in changes and abs(m.speed - speed) <= ALIKE * speed
        ]
        tried = [*([] if move.peer in changes else [move.peer]), *alike[:MOST_ALIKE]]
        if not tried:
            continue
        told_s = {peer: step_s({**changes, peer: move.to_stage}) for peer in tried}
        peer = min(told_s, key=lambda peer: (told_s[peer], peer != move.peer, peer))
        changes[peer] = move.to_stage
        moves.append(replace(move, peer=peer, why=move.why.replace(short(move.peer), short(peer))))
    before_s, after_s = step_s({}), step_s(changes)
    if after_s > LEAST_GAIN * before_s:
        return Stay(
            f"by their speeds {len(moves)} should move (first {short(moves[0].peer)} to stage "
            f"{moves[0].to_stage}), but by the ways between them a step would take {after_s:.3g} s instead "
            f"of {before_s:.3g} s"
        )
    return Moves(tuple(moves))


def is_due(*, period_s: float, lag_s: float, now_s: float) -> bool:
    """Whether somebody decides in this period who sees what others do only after `lag_s`.

    The moves of one decision must be in the records before the next, or each would send off as many again. So
    a large run decides in every second, fourth, eighth ... period of Unix time, and all who decide in one of
    them have the same anchors.
    """
    if not math.isfinite(lag_s):
        return False
    every = 1
    while every * period_s < lag_s:
        every *= 2
    return int(now_s // period_s) % every == 0


def neediest(records: Iterable[PeerRecord], *, stages: int, now_s: float) -> list[Stage]:
    """Where a newcomer is needed most: stages without a peer, else the slowest; those alike together.

    Peers whose speed is not known yet count as usual ones, so that a swarm that starts is filled evenly.
    """
    members = _members(_newest(records, stages=stages, now_s=now_s), period_s=1e9, now_s=now_s)
    levels = [_speed([m for m in members if m.stage == stage]) for stage in range(stages)]
    return [stage for stage in range(stages) if levels[stage] <= min(levels) * (LEAST_GAIN - 1e-9)]


# --- what the records say -----------------------------------------------------------------------------------


def _newest(records: Iterable[PeerRecord], *, stages: int, now_s: float) -> list[PeerRecord]:
    """One record of each peer of a stage, sorted by peer: of two, the one that came later."""
    found: dict[PeerId, PeerRecord] = {}

    def later(record: PeerRecord) -> tuple[float, int, int, str, str]:
        # The text settles what is left, so that the order in which records come never does.
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


def _members(newest: Sequence[PeerRecord], *, period_s: float, now_s: float) -> list[_Member]:
    speeds = [_between(r.speed, LEAST_SPEED, MOST_SPEED) for r in newest]
    usual = _median([speed for speed in speeds if speed], default=1.0)
    serving_versions = sorted(r.version for r in newest if r.state == "serving")
    # Records are seconds old, and steps may be short: as far as the newest are ahead, others may lag behind.
    version = serving_versions[(len(serving_versions) - 1) // 2] if serving_versions else 0
    spread = serving_versions[-1] - version if serving_versions else 0
    members: list[_Member] = []
    for record, speed in zip(newest, speeds, strict=True):
        here_s = now_s - _since(record, now_s)
        serving = record.state == "serving"
        if serving and record.version < version - VERSIONS_BEHIND - 2 * spread:
            continue
        if not serving and here_s > HORIZON_PERIODS * period_s:
            continue  # it will not arrive any more
        members.append(
            _Member(
                peer=record.peer,
                stage=record.stage,
                serving=serving,
                speed=min(speed or usual, MOST_TIMES_MEDIAN * usual),
                load=_between(record.load, 0.0, MOST_LOAD) if serving else 0.0,
                bandwidth_bps=_between(record.bandwidth_bps, LEAST_BPS, MOST_BPS),
                rested=here_s >= REST_PERIODS * period_s,
                movable=record.movable,
                sits_out=_sits_out(record.peer, int(now_s // period_s)),
            )
        )
    return members


def _since(record: PeerRecord, now_s: float) -> float:
    """When it came; a time that cannot be is now, so that it rests."""
    return record.since if 0.0 <= record.since <= now_s else now_s


def _least_gain(there: Sequence[_Member]) -> float:
    """What the slowest stage must gain for moves to be worth while."""
    return 1.0 + (LEAST_GAIN - 1.0) * min(1.0, math.sqrt(NOISY / max(1, len(there))))


def _between(value: float, least: float, most: float) -> float:
    """`value` inside its bounds; 0 if it is no positive number at all."""
    if not 0.0 < value < math.inf:
        return 0.0
    return float(min(max(value, least), most))


def _median(values: Sequence[float], *, default: float) -> float:
    return sorted(values)[(len(values) - 1) // 2] if values else default


def _anchor(stage: Stage, there: Sequence[_Member], period: int) -> PeerId | None:
    """Who of a stage stays in this period whatever its speed: known from its members alone."""

    def draw(peer: PeerId) -> tuple[bytes, PeerId]:
        return hashlib.sha256(f"anchor {period} {stage} {peer}".encode()).digest(), peer

    return min((member.peer for member in there if member.serving), key=draw, default=None)


def _sits_out(peer: PeerId, period: int) -> bool:
    return hashlib.sha256(f"sits out {period} {peer}".encode()).digest()[0] < SITS_OUT * 256


def _downloads_s(newest: Sequence[PeerRecord], by_stage: Sequence[Sequence[_Member]]) -> list[float]:
    """Per stage, how long a newcomer downloads its state: from all its members at once."""
    sizes: list[list[float]] = [[] for _ in by_stage]
    for record in newest:
        if size := _between(record.state_bytes, 1.0, MOST_BYTES):
            sizes[record.stage].append(size)
    usual_bytes = _median([size for here in sizes for size in here], default=0.0)
    found: list[float] = []
    for here, there in zip(sizes, by_stage, strict=True):
        uploads = [member.bandwidth_bps for member in there if member.serving]
        usual_bps = _median([bps for bps in uploads if bps], default=USUAL_BPS)
        all_bps = max(LEAST_BPS, sum(bps or usual_bps for bps in uploads))
        found.append(8 * _median(here, default=usual_bytes) / all_bps)
    return found


# --- stages that nobody serves ------------------------------------------------------------------------------


def _rescue(by_stage: list[list[_Member]], anchors: set[PeerId | None]) -> list[Move] | Stay:
    """The run stands still: whoever leaves the fastest pipeline behind goes, at any price.

    In `by_stage` those who go are put where they go.
    """
    moves: list[Move] = []
    free = [m for there in by_stage for m in there if m.serving and m.movable and m.peer not in anchors]
    empties = [stage for stage, there in enumerate(by_stage) if not there]
    if len(free) < len(empties):
        # To fill some of them would cost downloads, and the run would stand still all the same.
        short_of = len(empties) - len(free)
        gives = "no other stage has a second peer to give"
        if free:
            gives = f"the others can give {len(free)} only"
        return Stay(
            f"nobody serves stage {' or '.join(map(str, empties))}, and {gives}: the run waits for "
            + ("a newcomer" if short_of == 1 else f"{short_of} newcomers")
        )
    for empty in empties:
        levels = [_speed(there) for there in by_stage]

        def left(member: _Member, levels: Sequence[float] = levels) -> tuple[bool, bool, float, float]:
            others = min(
                level - (member.speed if stage == member.stage else 0.0)
                for stage, level in enumerate(levels)
                if level > 0
            )
            return not member.rested, member.sits_out, -min(others, member.speed), member.speed

        mover = min(free, key=lambda m: (left(m), m.peer))
        count, source = sum(m.serving for m in by_stage[mover.stage]), mover.stage
        moves.append(
            Move(
                mover.peer,
                source,
                empty,
                f"nobody serves stage {empty}, so the run stands still; stage {source} has {count} peers, "
                f"and without peer {short(mover.peer)} still does {levels[source] - mover.speed:.3g} of "
                f"{levels[source]:.3g} microbatches/s",
            )
        )
        free.remove(mover)
        by_stage[source].remove(mover)
        by_stage[empty].append(replace(mover, stage=empty, serving=False))
    for stage, there in enumerate(by_stage):
        if not moves and not any(member.serving for member in there):
            coming = min(member.peer for member in there)
            return Stay(f"nobody serves stage {stage} yet, but peer {short(coming)} is on its way there")
    return moves


def _speed(there: Sequence[_Member]) -> float:
    """Of a stage: added in order of the speeds, so that all round alike."""
    return math.fsum(member.speed for member in there)


# --- stages of unequal speed --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    mover: _Member
    to_stage: Stage
    source_speed: float
    """Of the stage that it leaves, before."""


class _Levelling:
    """Stage speeds and who may go, while moves are tried in thought.

    For a gap of `2 g` between two stages the best mover has the speed `g`: both end level. Slower ones close
    less of it, faster ones turn it round. So of each stage only the two peers next to `g` matter, and with
    its peers sorted by speed the cost is that of a bisection.
    """

    def __init__(self, by_stage: Sequence[Sequence[_Member]], anchors: set[PeerId | None]) -> None:
        self.levels = [_speed(there) for there in by_stage]
        free = [
            sorted(
                (m for m in there if _may_go(m, anchors)),
                key=lambda m: (m.speed, m.peer),
            )
            for there in by_stage
        ]
        self._awake = [[m for m in there if not m.sits_out] for there in free]
        self._asleep = [[m for m in there if m.sits_out] for there in free]
        self._even = math.fsum(self.levels) / len(self.levels)
        self._fair_speed = SMALL_FRY * _median([m.speed for there in by_stage for m in there], default=0.0)

    @property
    def slowest(self) -> Stage:
        return min(range(len(self.levels)), key=lambda s: (self.levels[s], s))

    def best(self) -> _Step | None:
        """The move to the slowest stage that levels best, or None if none makes it better."""
        return self._best_of(self._awake) or self._best_of(self._asleep)

    def _best_of(self, candidates: Sequence[Sequence[_Member]]) -> _Step | None:
        to, chosen, best = self.slowest, None, (-1.0, 0.0, 0.0)
        for stage, free in enumerate(candidates):
            if stage == to:
                continue
            gap = self.levels[stage] - self.levels[to]
            at = bisect_left(free, gap / 2, key=lambda m: m.speed)
            for member in free[max(0, at - 1) : at + 1]:
                lower = min(self.levels[stage] - member.speed, self.levels[to] + member.speed)
                enough = 1.0 if member.speed >= self._fair_speed else LEAST_GAIN
                if lower <= self.levels[to] or lower < enough * self.levels[to]:
                    continue
                # Beyond the average of all stages nothing is gained: then the least useful goes, and of those
                # who are alike one of the fastest stage, which will miss it least when others die.
                rank = (min(lower, self._even), -member.speed, self.levels[stage])
                if chosen is None or rank > best or (rank == best and member.peer < chosen.mover.peer):
                    chosen, best = _Step(member, to, self.levels[stage]), rank
        return chosen

    def move(self, step: _Step) -> None:
        """As if it were done."""
        source = step.mover.stage
        (self._asleep if step.mover.sits_out else self._awake)[source].remove(step.mover)
        self.levels[source] -= step.mover.speed
        self.levels[step.to_stage] += step.mover.speed


def _level(
    by_stage: Sequence[Sequence[_Member]],
    anchors: set[PeerId | None],
    download_s: Sequence[float],
    *,
    horizon_s: float,
    proven: bool,
) -> list[Move] | Stay:
    """A few moves that pay, and again a few, until the next few would not.

    `proven`: the run stands still or is about to be levelled anyway; queues need not say that it needs it.
    """
    thought = _Levelling(by_stage, anchors)
    moves: list[Move] = []
    while True:
        few = _next_few(by_stage, thought, download_s, horizon_s=horizon_s, proven=proven or bool(moves))
        if isinstance(few, Stay):
            return moves or few
        moves += few


def _next_few(
    by_stage: Sequence[Sequence[_Member]],
    thought: _Levelling,
    download_s: Sequence[float],
    *,
    horizon_s: float,
    proven: bool,
) -> list[Move] | Stay:
    to, before = thought.slowest, min(thought.levels)
    gain = _least_gain(by_stage[to])
    steps: list[_Step] = []
    price_s = [0.0] * len(by_stage)
    # Several stages may be equally slow: then the run is faster only when the last of them got somebody.
    while min(thought.levels) < gain * before:
        step = thought.best()
        if step is None:
            break
        thought.move(step)
        steps.append(step)
        price_s[step.to_stage] += download_s[step.to_stage]
    after = min(thought.levels)
    if after < gain * before or not steps:
        return Stay(
            f"stage {to} is the slowest with {before:.3g} microbatches/s, and no move makes the run "
            f"{gain - 1:.0%} faster"
        )
    mover = steps[0].mover
    idle = None if proven else _why_speed_is_not_the_limit(by_stage, to, mover.stage)
    if idle is not None:
        return Stay(idle)
    # Stages download side by side, those who come to one stage share its lines.
    wait_s = max(price_s)
    earned_s = wait_s * before / (after - before)
    if wait_s + earned_s > horizon_s:
        return Stay(
            f"stage {to} would do {after:.3g} instead of {before:.3g} microbatches/s with peer "
            f"{short(mover.peer)} of stage {mover.stage}, but {wait_s:.0f} s of download would be earned "
            f"back only after {earned_s:.0f} s; the limit is {horizon_s:.0f} s for both"
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
            f"{_loaded(by_stage, step)}; peer {short(step.mover.peer)} gives {step.mover.speed:.3g} of stage "
            f"{step.mover.stage}'s {step.source_speed:.3g} microbatches/s; {end}",
        )
        for step in steps
    ]


def _loaded(by_stage: Sequence[Sequence[_Member]], step: _Step) -> str:
    """How the stage that gets somebody compares with the one that gives."""
    to, source = step.to_stage, step.mover.stage
    if not any(m.serving for m in by_stage[to]):
        return f"stage {to} has nobody yet"
    wait_s, given_s = (_wait_s(by_stage[stage]) for stage in (to, source))
    loaded = f"{wait_s / given_s:.1f}× as loaded as" if given_s > 0 else "loaded, unlike"
    return (
        f"stage {to} is {loaded} stage {source} (a microbatch waits {wait_s:.2g} s against {given_s:.2g} s)"
    )


def _wait_s(there: Sequence[_Member]) -> float:
    """How long a microbatch is at a stage, by Little's law: those that are there, by those that leave."""
    return math.fsum(m.load for m in there) / _speed([m for m in there if m.serving])


def _why_speed_is_not_the_limit(
    by_stage: Sequence[Sequence[_Member]], to: Stage, source: Stage
) -> str | None:
    """Queues are the proof of need: they stand in front of what is really slow."""
    needy = [m for m in by_stage[to] if m.serving]
    load = math.fsum(m.load for m in needy)
    if load < BUSY * len(needy):
        return (
            f"stage {to} is the slowest, but only {load:.1f} microbatches are at its {len(needy)} devices: "
            "more speed there would stand idle"
        )
    wait_s, given_s = (_wait_s(by_stage[stage]) for stage in (to, source))
    if wait_s < given_s:
        return (
            f"stage {to} should be the slowest, but microbatches wait longer at stage {source} "
            f"({given_s:.2g} s against {wait_s:.2g} s): the speeds are not what limits the run"
        )
    return None

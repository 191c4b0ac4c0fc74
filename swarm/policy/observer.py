"""Adds up what a monitor saw of a run: looks in, a picture out. Pure.

A history of looks played again gives the same pictures. Nobody is believed alone: where the run is, and its
loss, is what most of those say that were heard lately; what contradicts that is a *doubt* about its peer,
shown beside it. What cannot be at all never gets here (`swarm.policy.claims`).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from swarm.errors import short
from swarm.ids import PeerId, Stage, Standing
from swarm.policy import alerts, claims
from swarm.policy.health import (
    Contribution,
    Happening,
    HappeningKind,
    Look,
    PeerHealth,
    Route,
    StageHealth,
    SwarmHealth,
)
from swarm.records import NO_STAGE, PeerRecord
from swarm.run import Run
from swarm.wire.messages import Audit, PeerStatus

FRESH_S = 10.0
"""Answers that are so old still say where the run is; of many peers each is asked about once a minute."""
QUICKEST_STEP_S = 0.1
"""Until it is known what a step takes."""
LOWER_S = 15.0
"""A majority of late answers may be a step behind: the run is seen to go down only if that lasts."""
WINDOW_S = 60.0
"""Throughput is that of the last minute, or of the last step if that took longer."""
SAMPLE_S = 5.0
"""A point of the throughput's plot."""
MOST_POINTS = 1000
"""Of a plot; when there are more, every second one goes."""
MOST_HAPPENINGS = 500
MOST_ROUTES = 2000
MOST_WORKERS = 5000
"""Peers in the table of contributions, those that are gone included."""
MOST_VERSIONS = 16
"""Of which digests are compared: answers to one question come at different steps."""
CLOCK_OFF_S = 60.0
MANY_UNHEARD = 8
UNHEARD_S = 5.0
"""When so many in a row have not answered for so long, none of hundreds would. Healthy ones are asked each
second, and answer at once; those that hang are waited for, 4 s."""
SETTLED_S = 15.0
"""Records lag behind answers for so long, around a move."""
REPLAYS = 4
"""Nobody has computed more than so many times what a run has needed so far."""


@dataclass(slots=True)
class _Seen:
    """What is known of one peer."""

    record: PeerRecord
    stage_at: float
    """When it was first seen at this stage."""
    steps: int
    """Of the run: no record of a later version is believed."""
    status: PeerStatus | None = None
    heard_at: float = 0.0
    before: PeerStatus | None = None
    """Its answer before that one, and when."""
    before_at: float = 0.0
    why: str = ""
    last: str = ""

    @property
    def state(self) -> str:
        return self.record.state if self.status is None else self.status.state

    @property
    def version(self) -> int:
        # A record is renewed more often than each of many peers is asked; but it does not know of eras.
        announced = self.record.version if self.can_be else 0
        if self.status is None:
            return announced
        return max(self.status.version, 0 if self.status.era.number else announced)

    @property
    def can_be(self) -> bool:
        """Whether the run can be at the version that the record announces."""
        return 0 <= self.record.version <= self.steps

    @property
    def speed(self) -> float:
        return self.record.speed if self.status is None else self.status.speed

    @property
    def serves(self) -> bool:
        return self.record.stage != NO_STAGE and self.state == "serving" and not self.why


@dataclass(slots=True)
class _Work:
    """What one peer computed: since it came the last time, and in its visits before."""

    since: float = 0.0
    computed: int = 0
    earlier: int = 0
    stage: Stage = 0

    @property
    def total(self) -> int:
        return self.computed + self.earlier


class Observer:
    """Adds up looks at one run.

    observer.observe(look); health = observer.health(now=time.time())
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._peers: dict[PeerId, _Seen] = {}
        self._looked = False
        self._began: float | None = None
        """When it was first known where the run is: in the middle of a step."""
        self._standing = Standing()
        self._lower_since: float | None = None
        self._stepped: deque[tuple[float, int]] = deque(maxlen=512)
        """(time, version) of each change of the version."""
        self._losses: dict[int, float] = {}
        self._pace: list[tuple[float, float]] = []
        self._pace_every_s = SAMPLE_S
        self._happenings: deque[Happening] = deque(maxlen=MOST_HAPPENINGS)
        self._work: dict[PeerId, _Work] = {}
        self._most = [0] * run.S
        self._served = [False] * run.S
        self._trainers: dict[PeerId, float] = {}
        self._trainer_at: float | None = None
        self._digests: dict[tuple[Stage, Standing], dict[PeerId, tuple[str, str]]] = {}
        self._refused: dict[str, int] = {}
        self._heard_at: float | None = None
        """When somebody answered, or when we began."""
        self._unheard: set[PeerId] = set()
        """Who was asked since then, and gave no answer."""

    # -- looks ------------------------------------------------------------------------------------

    def observe(self, look: Look) -> None:
        """Add a look. Looks come in the order of their times."""
        for record in look.records:
            self._take_record(record, look.at)
        for peer in look.gone:
            self._lose(peer, look.at)
        if look.refused is not None:
            self._refused = dict(look.refused)
        for status in look.statuses:
            if status.peer in self._peers:
                self._take_status(self._peers[status.peer], status, look.at)
        for peer, why in look.silent.items():
            if peer in self._peers:
                self._take_silence(self._peers[peer], why, look.at)
        self._unheard.update(look.silent)
        if look.statuses or self._heard_at is None:
            self._heard_at = look.at
        if look.statuses:
            self._unheard.clear()
        self._find_standing(look.at)
        self._find_pace(look.at)
        self._find_stages(look.at)
        self._looked = True

    def _happened(
        self,
        at: float,
        kind: HappeningKind,
        text: str,
        stage: Stage | None = None,
        peer: PeerId | None = None,
    ) -> None:
        self._happenings.append(Happening(at=at, kind=kind, text=text, stage=stage, peer=peer))
        if peer is not None and peer in self._peers:
            self._peers[peer].last = kind

    def _take_record(self, record: PeerRecord, now: float) -> None:
        peer, seen = record.peer, self._peers.get(record.peer)
        if record.run != self.run.id or record.stage >= self.run.S or record.state == "choosing":
            return
        if record.state == "left":
            if seen is not None:
                self._forget(peer, "left", f"{_who(seen)} left", now)
        elif seen is None:
            seen = self._peers[peer] = _Seen(record, now, self.run.steps)
            if self._looked:
                self._happened(now, "joined", f"{_who(seen)} joined", record.stage, peer)
        elif seen.record.stage != record.stage:
            self._peers[peer] = _Seen(record, now, self.run.steps)
            text = f"peer {short(peer)} moved from {_place(seen.record.stage)} to {_place(record.stage)}"
            self._happened(now, "moved", text, record.stage, peer)
        elif seen.record.since != record.since:
            self._peers[peer] = _Seen(record, now, self.run.steps)
            if record.state == "paused":
                self._happened(now, "paused", f"{_who(seen)} is paused by its owner", record.stage, peer)
            elif seen.record.state == "paused":
                self._happened(now, "back", f"{_who(seen)} resumes", record.stage, peer)
            else:
                self._happened(now, "restarted", f"{_who(seen)} started again", record.stage, peer)
        else:
            seen.record = record

    def _lose(self, peer: PeerId, now: float) -> None:
        seen = self._peers.get(peer)
        if seen is not None and seen.state == "leaving":
            self._forget(peer, "left", f"{_who(seen)} left", now)
        elif seen is not None:
            self._forget(peer, "lost", f"{_who(seen)} is lost: {seen.why or 'its record ran out'}", now)

    def _forget(self, peer: PeerId, kind: HappeningKind, text: str, now: float) -> None:
        self._happened(now, kind, text, self._peers[peer].record.stage, peer)
        del self._peers[peer]

    def _take_status(self, seen: _Seen, status: PeerStatus, now: float) -> None:
        if seen.why:
            seen.why = ""
            self._happened(now, "back", f"{_who(seen)} answers again", seen.record.stage, status.peer)
        if status.stage != seen.record.stage:
            # Its record will follow, or it lies: until then the record counts.
            seen.status = status if now - seen.stage_at > SETTLED_S else None
            seen.before = None
        else:
            seen.before, seen.before_at = seen.status, seen.heard_at
            seen.status = status
        seen.heard_at = now
        self._take_work(status)
        if status.stage == 0:
            if status.trainers or (seen.before is not None and status.taken > seen.before.taken):
                self._trainer_at = now
            for trainer in status.trainers:
                self._trainers.pop(trainer, None)
                self._trainers[trainer] = now
            while len(self._trainers) > claims.MOST_TRAINERS:
                del self._trainers[next(iter(self._trainers))]
        if status.digest and status.stage != NO_STAGE:
            of_version = self._digests.setdefault((status.stage, status.standing), {})
            of_version[status.peer] = (status.kind, status.digest)

    def _take_work(self, status: PeerStatus) -> None:
        work = self._work.setdefault(status.peer, _Work(since=status.since))
        if work.since != status.since:
            work.since, work.earlier, work.computed = status.since, work.total, 0
        work.computed, work.stage = max(work.computed, status.computed), status.stage
        if len(self._work) > MOST_WORKERS:  # those who are gone and did least, a tenth at once
            ranked = sorted(self._work, key=lambda peer: (peer in self._peers, self._work[peer].total))
            for peer in ranked[: MOST_WORKERS // 10]:
                del self._work[peer]

    def _take_silence(self, seen: _Seen, why: str, now: float) -> None:
        if not seen.why and why:
            text = f"{_who(seen)} does not answer: {why}"
            self._happened(now, "silent", text, seen.record.stage, seen.record.peer)
        seen.why = why

    # -- the run ----------------------------------------------------------------------------------

    def _find_standing(self, now: float) -> None:
        voters = [seen for seen in self._peers.values() if seen.serves]
        fresh = [
            seen.status
            for seen in voters
            if seen.status is not None and seen.heard_at >= now - FRESH_S and _of_run(seen, self.run)
        ]
        if fresh:
            standing = statistics.median_high(status.standing for status in fresh)
        elif voters:
            era = self._standing.era
            standing = Standing(era, statistics.median_high(seen.version for seen in voters))
        else:
            if self._began is None:
                self._standing = self._held()
            return
        self._find_loss([status for status in fresh if status.era == standing.era], standing.version)
        if self._began is None:
            self._began, self._standing = now, standing
        if standing == self._standing:
            self._lower_since = None
            return
        if standing < self._standing:
            self._lower_since = now if self._lower_since is None else self._lower_since
            if now - self._lower_since < LOWER_S:
                return
        old, self._standing, self._lower_since = self._standing, standing, None
        if standing.era > old.era and self._looked:
            text = f"a stage had lost all its peers: the run goes on from version {standing.era.start}"
            self._happened(now, "went back", text)
        if standing.era != old.era or standing.version < old.version:
            self._stepped.clear()
            self._losses = {v: loss for v, loss in self._losses.items() if v <= standing.version}
        self._stepped.append((now, standing.version))
        for key in sorted(self._digests, key=lambda key: key[1])[: -MOST_VERSIONS * self.run.S]:
            del self._digests[key]

    def _held(self) -> Standing:
        """Where the run stands still, as those have it who keep it while nobody serves."""
        held = [
            Standing(version=seen.version) if seen.status is None else seen.status.standing
            for seen in self._peers.values()
            if seen.state in ("paused", "keeping") and not seen.why
        ]
        return statistics.median_high(held) if held else Standing()

    def _find_loss(self, fresh: Sequence[PeerStatus], version: int) -> None:
        said: dict[int, list[float]] = {}
        for status in fresh:
            if status.loss is not None and 0 <= status.loss_step < version:
                said.setdefault(status.loss_step + 1, []).append(status.loss)
        for of_version, losses in said.items():
            if len(losses) >= min(2, len(fresh)):  # nobody is believed alone
                self._losses[of_version] = statistics.median_low(losses)
        if len(self._losses) > MOST_POINTS:
            ascending = sorted(self._losses.items())
            self._losses = dict([*ascending[:-1:2], ascending[-1]])

    def _find_pace(self, now: float) -> None:
        pace = self._tokens_per_s(now)
        if pace is None or (self._pace and now - self._pace[-1][0] < self._pace_every_s):
            return
        self._pace.append((now, pace))
        if len(self._pace) > MOST_POINTS:
            del self._pace[1:-1:2]
            self._pace_every_s *= 2

    def _step_s(self, now: float) -> float | None:
        """What a step took, over those of the last minute or else the last one."""
        changes = [change for change in self._stepped if change[0] >= now - WINDOW_S]
        if len(changes) < 2:
            changes = list(self._stepped)[-2:]
        if len(changes) < 2:
            return None
        (began, low), (ended, high) = changes[0], changes[-1]
        return (ended - began) / max(1, high - low)

    def _step_times(self) -> tuple[tuple[int, float], ...]:
        return tuple(
            (version, (at - before_at) / (version - before))
            for (before_at, before), (at, version) in pairwise(self._stepped)
            if version > before
        )

    def _tokens_per_s(self, now: float) -> float | None:
        """None before the first step; it falls while the next one takes longer than usual."""
        step_s = self._step_s(now)
        if not step_s:
            return None
        if self._standing.version >= self.run.steps:
            return 0.0
        overdue_s = now - self._stepped[-1][0] - 2 * step_s
        if overdue_s > 0:
            step_s += overdue_s
        return self.run.tokens_per_step / step_s

    def _cut_off_s(self, now: float) -> float | None:
        """Many went silent and nobody answered since: one of them each would have had another reason."""
        if self._heard_at is None or len(self._unheard) < 2:
            return None
        away_s = max(0.0, now - self._heard_at)
        all_asked = self._unheard.issuperset(self._peers)
        return away_s if all_asked or (len(self._unheard) >= MANY_UNHEARD and away_s >= UNHEARD_S) else None

    def _find_stages(self, now: float) -> None:
        if self._cut_off_s(now) is not None:
            return  # what we do not see may well be there
        serving = Counter(seen.record.stage for seen in self._peers.values() if seen.serves)
        for stage in range(self.run.S):
            self._most[stage] = max(self._most[stage], serving[stage])
            if self._served[stage] and not serving[stage]:
                self._happened(now, "stage lost", f"stage {stage} has no peer", stage)
            elif serving[stage] and not self._served[stage] and self._most[stage] and self._looked:
                self._happened(now, "stage back", f"stage {stage} is served", stage)
            self._served[stage] = serving[stage] > 0

    # -- the picture ------------------------------------------------------------------------------

    def health(self, *, now: float) -> SwarmHealth:
        """All that is known, at `now`."""
        stages = tuple(self._stage(stage, now) for stage in range(self.run.S))
        keepers = [seen for seen in self._peers.values() if seen.record.stage == NO_STAGE]
        tokens_per_s, step_s = self._tokens_per_s(now), self._step_s(now)
        left = self.run.steps - self._standing.version
        since = self._stepped[-1][0] if self._stepped else self._began
        picture = SwarmHealth(
            run=self.run.id,
            name=claims.clean(self.run.name),
            at=now,
            version=self._standing.version,
            steps=self.run.steps,
            went_back=self._standing.era.number,
            microbatches_per_step=self.run.M,
            tokens_per_step=self.run.tokens_per_step,
            loss=self._losses[max(self._losses)] if self._losses else None,
            tokens_per_s=tokens_per_s,
            left_s=left * step_s if step_s is not None else None,
            still_s=max(0.0, now - since) if since is not None else 0.0,
            step_s=step_s,
            stages=stages,
            keepers=tuple(self._peer(seen, 0.0, now) for seen in _by_id(keepers)),
            trainers=tuple(sorted(p for p, at in self._trainers.items() if at >= now - WINDOW_S)),
            trainer_away_s=self._trainer_away_s(now),
            routes=self._routes(),
            losses=tuple(sorted(self._losses.items())),
            pace=tuple(self._pace),
            step_times=self._step_times(),
            cut_off_s=self._cut_off_s(now),
            happenings=tuple(self._happenings),
            contributions=self._contributions(),
            rebalance=self._rebalance(),
            refused=dict(self._refused),
            alerts=(),
            depends_on_routes=self.run.depends_on_routes,
        )
        # Before the first look nobody is seen, which is no reason for alarm.
        return replace(picture, alerts=alerts.find(picture) if self._looked else ())

    def _stage(self, stage: Stage, now: float) -> StageHealth:
        seen = _by_id(s for s in self._peers.values() if s.record.stage == stage)
        serving = [s for s in seen if s.serves]
        speeds = sorted((s.speed, s.record.peer) for s in serving if s.speed > 0)
        return StageHealth(
            stage=stage,
            serving=len(serving),
            most=self._most[stage],
            joining=sum(s.state == "joining" for s in seen),
            version=statistics.median_high(s.version for s in serving) if serving else 0,
            load=statistics.fmean(s.record.load for s in serving) if serving else 0.0,
            speed=math.fsum(speed for speed, _ in speeds),
            slowest=speeds[0][1] if speeds else None,
            fastest=speeds[-1][1] if speeds else None,
            disagree=self._disagree(stage),
            peers=tuple(self._peer(s, _slower(s, speeds), now) for s in seen),
        )

    def _disagree(self, stage: Stage) -> tuple[tuple[str, tuple[PeerId, ...]], ...]:
        """Of the newest version that two or more peers of one kind have told of."""
        for key in sorted((k for k in self._digests if k[0] == stage), key=lambda key: key[1], reverse=True):
            told = {peer: said for peer, said in self._digests[key].items() if peer in self._peers}
            kinds = Counter(kind for kind, _ in told.values())
            common = [kind for kind, count in kinds.items() if count > 1]
            if not common:
                continue
            for kind in sorted(common):
                sides: dict[str, list[PeerId]] = {}
                for peer, (of_kind, digest) in sorted(told.items()):
                    if of_kind == kind:
                        sides.setdefault(digest, []).append(peer)
                if len(sides) > 1:
                    ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[0]))
                    return tuple((digest, tuple(peers)) for digest, peers in ordered)
            return ()
        return ()

    def _peer(self, seen: _Seen, slower: float, now: float) -> PeerHealth:
        record, status, before = seen.record, seen.status, seen.before
        busy = None
        if status is not None and before is not None and seen.heard_at > seen.before_at:
            worked_s = status.busy_s - before.busy_s
            busy = min(1.0, max(0.0, worked_s / (seen.heard_at - seen.before_at)))
        return PeerHealth(
            peer=record.peer,
            stage=record.stage,
            state=seen.state,
            version=seen.version,
            device=record.device,
            answered=status is not None and not seen.why,
            why=seen.why,
            heard_s=max(0.0, now - seen.heard_at) if status is not None else None,
            since=record.since,
            up_s=max(0.0, now - record.since) if record.since else None,
            speed=seen.speed,
            load=record.load,
            busy=busy,
            inflight=status.inflight if status is not None else 0,
            max_inflight=status.max_inflight if status is not None else record.max_inflight,
            done=status.done if status is not None and status.version == self._standing.version else 0,
            computed=self._work[record.peer].total if record.peer in self._work else 0,
            bandwidth_bps=record.bandwidth_bps,
            bytes_in=status.bytes_in if status is not None else 0,
            bytes_out=status.bytes_out if status is not None else 0,
            audit=status.audit if status is not None else Audit(),
            slower=slower,
            doubts=tuple(self._doubts(seen, now)),
            last=seen.last,
        )

    def _doubts(self, seen: _Seen, now: float) -> Iterable[str]:
        record, status = seen.record, seen.status
        if record.since > now + CLOCK_OFF_S:
            yield f"its clock is {record.since - now:.0f} s ahead"
        if not seen.can_be:
            yield f"announces version {record.version} of a run of {seen.steps} steps"
        # While some were asked, the others took steps.
        meanwhile = FRESH_S / (self._step_s(now) or QUICKEST_STEP_S)
        if seen.version > self._standing.version + 3 + meanwhile:
            yield f"says it is at version {seen.version}, the run is at {self._standing.version}"
        if status is None:
            return
        if status.stage != record.stage:
            yield f"announces {_place(record.stage)} and answers for {_place(status.stage)}"
        if self._too_much(status.computed):
            yield f"says it computed {status.computed} microbatches, more than there were"

    def _too_much(self, computed: int) -> bool:
        # Each era may begin at 0 again; who came before we looked has seen no more versions than the run.
        needed = (self._standing.version + 4) * self.run.M * (self._standing.era.number + 1)
        return computed > REPLAYS * needed

    def _trainer_away_s(self, now: float) -> float | None:
        firsts = [s for s in self._peers.values() if s.record.stage == 0 and s.serves]
        if not firsts or any(s.status is None for s in firsts):
            return None
        if self._trainer_at is None:
            return max(0.0, now - min(s.stage_at for s in firsts))
        # Of many peers each is asked rarely: a trainer is away once all have said so.
        if any(s.heard_at <= self._trainer_at for s in firsts):
            return 0.0
        return max(0.0, now - self._trainer_at)

    def _routes(self) -> tuple[Route, ...]:
        found: dict[tuple[PeerId, PeerId], Route] = {}
        for peer, seen in self._peers.items():
            status, before = seen.status, seen.before
            if status is None or before is None or seen.heard_at <= seen.before_at:
                continue
            old = {link.peer: link.bytes_in + link.bytes_out for link in before.links}
            for link in status.links:
                ends = self._ends(peer, link.peer)
                if ends is None or link.peer not in old:
                    continue
                moved = link.bytes_in + link.bytes_out - old[link.peer]
                bps = 8 * moved / (seen.heard_at - seen.before_at)
                source, target, kind = ends
                known = found.get((source, target))
                if bps > 0 and (known is None or known.bps < bps):  # both ends may have told of it
                    found[source, target] = Route(source=source, target=target, kind=kind, bps=bps)
        busiest = sorted(found.values(), key=lambda route: (-route.bps, route.source, route.target))
        return tuple(busiest[:MOST_ROUTES])

    def _ends(
        self, peer: PeerId, other: PeerId
    ) -> tuple[PeerId, PeerId, Literal["feed", "work", "average"]] | None:
        """Source, target and kind of what flows between them; None: nothing that moves a run on."""
        here = self._peers[peer].record.stage
        if other in self._trainers and here == 0:
            return other, peer, "feed"
        if other not in self._peers or NO_STAGE in (here, self._peers[other].record.stage):
            return None
        there = self._peers[other].record.stage
        if here == there:
            return min(peer, other), max(peer, other), "average"
        if abs(here - there) != 1:
            return None
        return (peer, other, "work") if here < there else (other, peer, "work")

    def _contributions(self) -> tuple[Contribution, ...]:
        counted = {p: work for p, work in self._work.items() if work.total and not self._too_much(work.total)}
        total = sum(work.total for work in counted.values())
        rows = [
            Contribution(
                peer=peer,
                computed=work.total,
                share=work.total / total,
                stage=work.stage,
                here=peer in self._peers,
            )
            for peer, work in counted.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.computed, row.peer)))

    def _rebalance(self) -> str:
        said = Counter(seen.status.rebalance for seen in self._peers.values() if seen.status is not None)
        said.pop("", None)
        return max(said, key=lambda text: (said[text], text), default="")


def _of_run(seen: _Seen, run: Run) -> bool:
    return seen.status is not None and seen.status.stage == seen.record.stage < run.S


def _by_id(seen: Iterable[_Seen]) -> list[_Seen]:
    return sorted(seen, key=lambda one: one.record.peer)


def _place(stage: Stage) -> str:
    return "no stage" if stage == NO_STAGE else f"stage {stage}"


def _who(seen: _Seen) -> str:
    if seen.record.stage == NO_STAGE:
        return f"keeper {short(seen.record.peer)}"
    return f"peer {short(seen.record.peer)} of stage {seen.record.stage}"


def _slower(seen: _Seen, speeds: Sequence[tuple[float, PeerId]]) -> float:
    """How many times the median of the others is faster."""
    others = [speed for speed, peer in speeds if peer != seen.record.peer]
    if not others or not seen.serves or seen.speed <= 0:
        return 0.0
    return statistics.median(others) / seen.speed

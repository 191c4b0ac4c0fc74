"""Aggregator of observations of a run: observations in, a picture out. Pure.

The same history of observations gives the same pictures. No peer is believed alone (docs/design.md,
*Watching*); one that contradicts the others gets an *inconsistency*, shown beside it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from swarm.errors import clean, short
from swarm.ids import PeerId, Position, Stage
from swarm.manifest import Run
from swarm.monitoring import alerts, validation
from swarm.monitoring.health import (
    Happening,
    HappeningKind,
    Observation,
    PeerHealth,
    PeerShare,
    PeerTraffic,
    StageHealth,
    SwarmHealth,
)
from swarm.monitoring.history import History
from swarm.protocol.voice import heard, median
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import PeerStatus

FRESH_S = 10.0
"""Answers this old still say where the run is; of many peers each is asked about once a minute."""
QUICKEST_STEP_S = 0.1
"""Assumed duration of a step before one was measured."""
LOWER_S = 15.0
"""A majority of late answers may be a step behind: the position goes down only if that lasts."""
WINDOW_S = 60.0
"""Throughput is taken over the last minute, or the last step if that took longer."""
MAX_HAPPENINGS = 500
MAX_ROUTES = 2000
MAX_WORKERS = 5000
"""Peers in the table of contributions, gone ones included."""
MAX_VERSIONS = 16
"""Versions whose digests are compared: answers to one question come at different steps."""
CLOCK_OFF_S = 60.0
MANY_UNHEARD = 8
UNHEARD_S = 5.0
"""With so many silent peers in a row for so long, this machine is cut off. Healthy peers are asked each
second and answer at once; hung ones are waited for, 4 s."""
RECORD_LAG_S = 15.0
"""Records lag behind answers for this long, around a move."""
WARM = 16
"""Microbatches, before which a peer's speed is that of a device that warms up."""
MAX_RECOMPUTED = 4
"""A peer cannot have computed more than this many times the run's needs so far."""

NOTHING_SAID = PeerStatus(peer="", stage=NO_STAGE, state="", device="", since=0.0, version=0)


class _Seen(msgspec.Struct):
    record: PeerRecord
    stage_at: float
    """When it was first seen at this stage."""
    steps: int
    """Of the run: records of later versions are not believed."""
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
        # A record is renewed more often than a peer is asked, but knows nothing of generations.
        announced = self.record.version if self.can_be else 0
        if self.status is None:
            return announced
        return max(self.status.version, 0 if self.status.generation.number else announced)

    def up_s(self, now: float) -> float | None:
        """How long its program runs; where it does not say so, since when it serves."""
        if self.status is not None and self.status.up_s:
            return self.status.up_s + now - self.heard_at
        return max(0.0, now - self.record.since) if self.record.since else None

    @property
    def can_be(self) -> bool:
        """Whether the announced version is possible."""
        return 0 <= self.record.version <= self.steps

    @property
    def speed(self) -> float:
        return self.record.speed if self.status is None else self.status.speed

    @property
    def serves(self) -> bool:
        return self.record.stage != NO_STAGE and self.state == "serving" and not self.why


class _Work(msgspec.Struct):
    """Microbatches of one peer: since it last joined, and in earlier visits."""

    since: float = 0.0
    computed: int = 0
    earlier: int = 0
    stage: Stage = 0

    @property
    def total(self) -> int:
        return self.computed + self.earlier


class Aggregator:
    """The picture of one run, from its observations.

    aggregator.observe(observation); health = aggregator.health(now=time.time())
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._peers: dict[PeerId, _Seen] = {}
        self._looked = False
        self._began: float | None = None
        """When the run's position was first known: in the middle of a step."""
        self._position = Position()
        self._lower_since: float | None = None
        self._stepped: deque[tuple[float, int]] = deque(maxlen=512)
        """(time, version) of each change of the version."""
        self._history = History(run)
        self._happenings: deque[Happening] = deque(maxlen=MAX_HAPPENINGS)
        self._work: dict[PeerId, _Work] = {}
        self._most_serving = [0] * run.cells
        self._firsts = range(0, run.cells, run.S)
        """The cells of stage 0, to which trainers send."""
        self._served = [False] * run.cells
        self._trainers: dict[PeerId, float] = {}
        self._trainer_at: float | None = None
        self._digests: dict[tuple[Stage, Position], dict[PeerId, tuple[str, str]]] = {}
        self._refused: dict[str, int] = {}
        self._voice: Mapping[PeerId, int] = {}
        self._heard_at: float | None = None
        """Time of the last answer, at first the beginning."""
        self._unheard: set[PeerId] = set()
        """Peers that were asked since then and did not answer."""

    # -- looks ------------------------------------------------------------------------------------

    def observe(self, observation: Observation) -> None:
        """Add an observation. They come in the order of their times."""
        for record in observation.records:
            self._take_record(record, observation.at)
        for peer in observation.gone:
            self._lose(peer, observation.at)
        if observation.refused is not None:
            self._refused = dict(observation.refused)
        if observation.voice is not None:
            self._voice = dict(observation.voice)
        for status in observation.statuses:
            if status.peer in self._peers:
                self._take_status(self._peers[status.peer], status, observation.at)
        for peer, why in observation.silent.items():
            if (seen := self._peers.get(peer)) is not None:
                if why and not seen.why:
                    text = f"{self._who(seen)} does not answer: {why}"
                    self._happened(observation.at, "silent", text, seen)
                seen.why = why
        self._unheard.update(observation.silent)
        if observation.statuses or self._heard_at is None:
            self._heard_at = observation.at
        if observation.statuses:
            self._unheard.clear()
        self._update_position(observation.at)
        self._update_stages(observation.at)
        self._looked = True

    def _happened(
        self, at: float, kind: HappeningKind, text: str, of: _Seen | None = None, stage: Stage | None = None
    ) -> None:
        peer = None
        if of is not None:
            of.last, stage, peer = kind, of.record.stage, of.record.peer
        self._happenings.append(Happening(at=at, kind=kind, text=text, stage=stage, peer=peer))

    def _take_record(self, record: PeerRecord, now: float) -> None:
        if record.run != self.run.id or record.stage >= self.run.cells or record.state == "choosing":
            return
        seen, new = self._peers.get(record.peer), _Seen(record, now, self.run.steps)
        if record.state == "left":
            self._lose(record.peer, now, left=True)
            return
        if seen is None:
            if self._looked:
                self._happened(now, "joined", f"{self._who(new)} joined", new)
        elif seen.record.stage != record.stage:
            stages = f"from {self.run.place(seen.record.stage)} to {self.run.place(record.stage)}"
            self._happened(now, "moved", f"peer {short(record.peer)} moved {stages}", new)
        elif seen.record.since != record.since and seen.record.state != "joining":
            if record.state == "paused":
                why = "is a spare: a step takes longer with it" if record.spare else "is paused by its owner"
                self._happened(now, "paused", f"{self._who(new)} {why}", new)
            elif seen.record.state == "paused":
                self._happened(now, "back", f"{self._who(new)} resumes", new)
            else:
                self._happened(now, "restarted", f"{self._who(new)} started again", new)
        else:
            seen.record = record
            return
        self._peers[record.peer] = new

    def _lose(self, peer: PeerId, now: float, *, left: bool = False) -> None:
        seen = self._peers.pop(peer, None)
        for of_version in self._digests.values():
            of_version.pop(peer, None)
        if seen is not None and (left or seen.state == "leaving"):
            self._happened(now, "left", f"{self._who(seen)} left", seen)
        elif seen is not None:
            text = f"{self._who(seen)} is lost: {seen.why or 'its record ran out'}"
            self._happened(now, "lost", text, seen)

    def _take_status(self, seen: _Seen, status: PeerStatus, now: float) -> None:
        if seen.why:
            seen.why = ""
            self._happened(now, "back", f"{self._who(seen)} answers again", seen)
        if status.stage != seen.record.stage:
            # Either its record will follow, or it lies: until then the record counts.
            seen.status = status if now - seen.stage_at > RECORD_LAG_S else None
            seen.before = None
        else:
            seen.before, seen.before_at = seen.status, seen.heard_at
            seen.status = status
        seen.heard_at = now
        self._take_work(status)
        if self._began is None or self._apart or status.generation == self._position.generation:
            self._history.take(status, self._voice)  # an island that was lost has a generation of its own
        if status.stage in self._firsts and self._is_heard(seen):
            if status.trainers or (seen.before is not None and status.taken > seen.before.taken):
                self._trainer_at = now
            for trainer in status.trainers:
                self._trainers.pop(trainer, None)
                self._trainers[trainer] = now
            while len(self._trainers) > validation.MAX_TRAINERS:
                del self._trainers[next(iter(self._trainers))]
        counts = not self._voice or status.peer in self._voice
        if status.digest and status.stage != NO_STAGE and counts:
            of_version = self._digests.setdefault((status.stage, status.position), {})
            of_version[status.peer] = (status.kind, status.digest)
            if len(self._digests) > MAX_VERSIONS * self.run.cells:
                del self._digests[max(self._digests, key=self._far_off)]

    def _far_off(self, of: tuple[Stage, Position]) -> tuple[bool, int]:
        generation, version = of[1]
        return generation != self._position.generation, abs(version - self._position.version)

    def _take_work(self, status: PeerStatus) -> None:
        work = self._work.setdefault(status.peer, _Work(since=status.since))
        if work.since != status.since:
            work.since, work.earlier, work.computed = status.since, work.total, 0
        work.computed, work.stage = max(work.computed, status.computed), status.stage
        if len(self._work) > MAX_WORKERS:  # gone peers with the least work, a tenth at once
            ranked = sorted(self._work, key=lambda peer: (peer in self._peers, self._work[peer].total))
            for peer in ranked[: MAX_WORKERS // 10]:
                del self._work[peer]

    # -- the run ----------------------------------------------------------------------------------

    def _update_position(self, now: float) -> None:
        voters = self._heard(seen for seen in self._peers.values() if seen.serves)
        fresh = [
            seen.status
            for seen in voters
            if seen.status is not None
            and seen.heard_at >= now - FRESH_S
            and seen.status.stage == seen.record.stage
        ]
        if fresh:
            position = median([(status.position, status.peer) for status in fresh], self._voice, high=True)
        elif voters:
            generation = self._position.generation
            version = median([(seen.version, seen.record.peer) for seen in voters], self._voice, high=True)
            position = Position(generation, version)
        else:
            if self._began is None:
                self._position = self._paused_position()
            return
        of_generation = [status for status in fresh if status.generation == position.generation]
        self._history.update(of_generation, position.version, self._voice)
        if self._began is None:
            self._began, self._position = now, position
        if position == self._position:
            self._lower_since = None
            return
        if position < self._position:
            self._lower_since = now if self._lower_since is None else self._lower_since
            if now - self._lower_since < LOWER_S:
                return
        old, self._position, self._lower_since = self._position, position, None
        if position.generation > old.generation and self._looked:
            text = f"a stage had lost all its peers: the run goes on from version {position.generation.start}"
            self._happened(now, "went back", text)
        if position.generation != old.generation or position.version < old.version:
            self._stepped.clear()
            self._history.back_to(position.version)
        if self._stepped and now < self._stepped[-1][0]:
            self._stepped.clear()  # the clock was set back
        self._stepped.append((now, position.version))

    def _heard(self, peers: Iterable[_Seen]) -> list[_Seen]:
        """The peers whose word counts."""
        said = {seen.record.peer: seen for seen in peers}
        return [said[peer] for peer in heard(said, self._voice)]

    def _is_heard(self, seen: _Seen) -> bool:
        """Whether what one to which trainers send says counts: without voice only if none has any."""
        counts = self._voice.get
        return bool(counts(seen.record.peer)) or not any(counts(s.record.peer) for s in self._fed())

    def _fed(self) -> Iterable[_Seen]:
        """The peers to which trainers send."""
        return (s for s in self._peers.values() if s.record.stage in self._firsts and s.serves)

    def _paused_position(self) -> Position:
        """The position of a run that no peer serves, by its paused peers and keepers."""
        versions = [
            Position(version=seen.version) if seen.status is None else seen.status.position
            for seen in self._peers.values()
            if seen.state in ("paused", "keeping") and not seen.why
        ]
        return statistics.median_high(versions) if versions else Position()

    def _step_s(self, now: float) -> float | None:
        """Mean duration of the steps of the last minute, or else of the last one."""
        changes = [change for change in self._stepped if change[0] >= now - WINDOW_S]
        if len(changes) < 2:
            changes = list(self._stepped)[-2:]
        if len(changes) < 2:
            return None
        (began, low), (ended, high) = changes[0], changes[-1]
        return (ended - began) / max(1, high - low)

    def _tokens_per_s(self, now: float) -> float | None:
        """None before the first step; it falls while the next one takes longer than usual."""
        step_s = self._step_s(now)
        if not step_s:
            return None
        if self._position.version >= self.run.steps:
            return 0.0
        step_s += max(0.0, now - self._stepped[-1][0] - 2 * step_s)
        end, apart = max(1, self._position.version), self._apart  # so many steps, and a meeting
        microbatches = statistics.fmean(map(self.run.microbatches, range(max(0, end - 1 - apart), end)))
        return microbatches * self.run.tokens_per_step / self.run.M / step_s

    def _cut_off_s(self, now: float) -> float | None:
        """How long no peer has answered since several went silent: their reason is hardly their own."""
        if self._heard_at is None or len(self._unheard) < 2:
            return None
        away_s = max(0.0, now - self._heard_at)
        all_asked = self._unheard.issuperset(self._peers)
        return away_s if all_asked or (len(self._unheard) >= MANY_UNHEARD and away_s >= UNHEARD_S) else None

    @property
    def _apart(self) -> int:
        """Steps that islands may be apart: those between two meetings."""
        return self.run.islands.local_steps if self.run.islands.count > 1 else 0

    def _who(self, seen: _Seen) -> str:
        if seen.record.stage == NO_STAGE:
            return f"keeper {short(seen.record.peer)}"
        return f"peer {short(seen.record.peer)} of {self.run.place(seen.record.stage)}"

    def _update_stages(self, now: float) -> None:
        if self._cut_off_s(now) is not None:
            return  # unseen peers may well be there
        serving = Counter(seen.record.stage for seen in self._peers.values() if seen.serves)
        for stage in range(self.run.cells):
            self._most_serving[stage] = max(self._most_serving[stage], serving[stage])
            if self._served[stage] and not serving[stage]:
                self._happened(now, "stage lost", f"{self.run.place(stage)} has no peer", stage=stage)
            elif serving[stage] and not self._served[stage] and self._most_serving[stage] and self._looked:
                self._happened(now, "stage back", f"{self.run.place(stage)} is served", stage=stage)
            self._served[stage] = serving[stage] > 0

    # -- the picture ------------------------------------------------------------------------------

    def health(self, *, now: float) -> SwarmHealth:
        """The picture at `now`."""
        stages = tuple(self._stage(stage, now) for stage in range(self.run.cells))
        keepers = [seen for seen in self._peers.values() if seen.record.stage == NO_STAGE]
        tokens_per_s, step_s = self._tokens_per_s(now), self._step_s(now)
        left = self.run.steps - self._position.version
        since = self._stepped[-1][0] if self._stepped else self._began
        picture = SwarmHealth(
            run=self.run.id,
            name=clean(self.run.name),
            at=now,
            version=self._position.version,
            steps=self.run.steps,
            went_back=self._position.generation.number,
            microbatches_per_step=self.run.island(0).batch.microbatches(self._position.version),
            tokens_per_step=self.run.tokens_per_step,
            loss=self._history.losses[max(self._history.losses)] if self._history.losses else None,
            tokens_per_s=tokens_per_s,
            left_s=left * step_s if step_s is not None and all(self._served) else None,
            still_s=max(0.0, now - since) if since is not None else 0.0,
            step_s=step_s,
            islands=self.run.islands.count,
            stages=stages,
            keepers=tuple(self._peer(seen, 0.0, now) for seen in _by_id(keepers)),
            trainers=tuple(sorted(p for p, at in self._trainers.items() if at >= now - WINDOW_S)),
            trainer_away_s=self._trainer_away_s(now),
            routes=self._routes(),
            losses=tuple(sorted(self._history.losses.items())),
            evaluations=tuple(sorted(self._history.evaluations.items())),
            step_times=self._history.step_times(self._position.version, self._voice),
            cut_off_s=self._cut_off_s(now),
            happenings=tuple(self._happenings),
            contributions=self._contributions(),
            rebalance=self._rebalance(),
            refused=dict(self._refused),
            alerts=(),
        )
        # Before the first observation no peer is seen, which is no reason for alarm.
        return msgspec.structs.replace(picture, alerts=alerts.find(picture) if self._looked else ())

    def _stage(self, stage: Stage, now: float) -> StageHealth:
        seen = _by_id(s for s in self._peers.values() if s.record.stage == stage)
        serving = [s for s in seen if s.serves]
        speeds = sorted((s.speed, s.record.peer) for s in serving if s.speed > 0)
        return StageHealth(
            stage=stage,
            label=self.run.place(stage, short=True),
            place=self.run.place(stage),
            serving=len(serving),
            most_serving=self._most_serving[stage],
            joining=sum(s.state == "joining" for s in seen),
            version=median([(s.version, s.record.peer) for s in self._heard(serving)], self._voice, high=True)
            if serving
            else 0,
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
            kinds: dict[str, dict[str, list[PeerId]]] = {}
            for peer, (kind, digest) in sorted(self._digests[key].items()):
                kinds.setdefault(kind, {}).setdefault(digest, []).append(peer)
            common = [sides for _, sides in sorted(kinds.items()) if sum(map(len, sides.values())) > 1]
            for sides in (sides for sides in common if len(sides) > 1):
                ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[0]))
                return tuple((digest, tuple(peers)) for digest, peers in ordered)
            if common:
                return ()
        return ()

    def _peer(self, seen: _Seen, slower: float, now: float) -> PeerHealth:
        record, status, before = seen.record, seen.status, seen.before
        said = record if status is None else status
        busy = None
        if status is not None and before is not None and seen.heard_at > seen.before_at:
            worked_s = status.busy_s - before.busy_s
            busy = min(1.0, max(0.0, worked_s / (seen.heard_at - seen.before_at)))
        return PeerHealth(
            **_of(record, "peer", "stage", "device", "since", "load", "bandwidth_bps"),
            **_of(seen, "state", "version", "speed", "why", "last"),
            **_of(status or NOTHING_SAID, "inflight", "bytes_in", "bytes_out", "audit"),
            label=self.run.place(record.stage, short=True),
            answered=status is not None and not seen.why,
            up_s=seen.up_s(now),
            busy=busy,
            max_inflight=said.max_inflight,
            # At the run's step, or at another that its island may be at.
            done=status.done if status and abs(status.version - self._position.version) <= self._apart else 0,
            computed=self._work.get(record.peer, _Work()).total,
            slower=slower,
            inconsistencies=tuple(self._inconsistencies(seen, now)),
            address=clean(record.address),
            voice=self._voice.get(record.peer, 0),
            memory_bytes=sum(link.memory_bytes for link in status.links) if status is not None else 0,
        )

    def _inconsistencies(self, seen: _Seen, now: float) -> Iterable[str]:
        record, status = seen.record, seen.status
        if record.since > now + CLOCK_OFF_S:
            yield f"its clock is {record.since - now:.0f} s ahead"
        if not seen.can_be:
            yield f"announces version {record.version} of a run of {seen.steps} steps"
        # While some were asked, the others took steps.
        meanwhile = FRESH_S / (self._step_s(now) or QUICKEST_STEP_S)
        if seen.version > self._position.version + 3 + meanwhile + self._apart:
            yield f"says it is at version {seen.version}, the run is at {self._position.version}"
        if status is None:
            return
        if status.stage != record.stage:
            yield f"announces {self.run.place(record.stage)} and answers for {self.run.place(status.stage)}"
        if self._too_much(status.computed):
            yield f"says it computed {status.computed} microbatches, more than there were"

    def _too_much(self, computed: int) -> bool:
        # Each generation may begin at 0 again; a peer from before the monitor's start has seen no more
        # versions than the run.
        needed = (self._position.version + 4) * self.run.M * (self._position.generation.number + 1)
        return computed > MAX_RECOMPUTED * needed

    def _trainer_away_s(self, now: float) -> float | None:
        firsts = self._heard(self._fed())
        if not firsts or any(s.status is None for s in firsts):
            return None
        if self._trainer_at is None:
            return max(0.0, now - min(s.stage_at for s in firsts))
        # Of many peers each is asked rarely: a trainer is away once all have said so.
        if any(s.heard_at <= self._trainer_at for s in firsts):
            return 0.0
        return max(0.0, now - self._trainer_at)

    def _routes(self) -> tuple[PeerTraffic, ...]:
        found: dict[tuple[PeerId, PeerId], PeerTraffic] = {}
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
                if bps > 0 and (known is None or known.bps < bps):  # both ends may report it
                    found[source, target] = PeerTraffic(source=source, target=target, kind=kind, bps=bps)
        busiest = sorted(found.values(), key=lambda route: (-route.bps, route.source, route.target))
        return tuple(busiest[:MAX_ROUTES])

    def _ends(
        self, peer: PeerId, other: PeerId
    ) -> tuple[PeerId, PeerId, Literal["feed", "work", "average"]] | None:
        """Source, target and kind of what flows between them; None: nothing that moves a run on."""
        here = self._peers[peer].record.stage
        if other in self._trainers and here in self._firsts:
            return other, peer, "feed"
        if other not in self._peers or NO_STAGE in (here, self._peers[other].record.stage):
            return None
        there = self._peers[other].record.stage
        S = self.run.S
        if here % S == there % S:  # of one island, or those that meet
            return min(peer, other), max(peer, other), "average"
        if abs(here - there) != 1 or here // S != there // S:
            return None
        return (peer, other, "work") if here < there else (other, peer, "work")

    def _contributions(self) -> tuple[PeerShare, ...]:
        counted = {p: work for p, work in self._work.items() if work.total and not self._too_much(work.total)}
        total = sum(work.total for work in counted.values())
        return tuple(
            PeerShare(
                peer=peer, computed=work.total, share=work.total / total, stage=work.stage,
                label=self.run.place(work.stage, short=True),
                here=peer in self._peers,
            )
            for peer, work in sorted(counted.items(), key=lambda item: (-item[1].total, item[0]))
        )  # fmt: skip

    def _rebalance(self) -> str:
        told = self._heard(seen for seen in self._peers.values() if seen.status is not None)
        said = Counter(seen.status.rebalance for seen in told if seen.status and seen.status.rebalance)
        return max(said, key=lambda text: (said[text], text), default="")


def _of(what: object, *names: str) -> dict[str, Any]:
    return {name: getattr(what, name) for name in names}


def _by_id(seen: Iterable[_Seen]) -> list[_Seen]:
    return sorted(seen, key=lambda one: one.record.peer)


def _slower(seen: _Seen, speeds: Sequence[tuple[float, PeerId]]) -> float:
    """Times by which the median of the others is faster."""
    others = [speed for speed, peer in speeds if peer != seen.record.peer]
    warming = (seen.status or NOTHING_SAID).computed < WARM
    if not others or not seen.serves or seen.speed <= 0 or warming:
        return 0.0
    return statistics.median(others) / seen.speed

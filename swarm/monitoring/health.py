"""The health of a run as plain data: an `Observation` of it, and the picture that a dashboard shows.

`swarm.monitoring.aggregator` turns observations into pictures, `swarm.monitoring.alerts` finds what a person
should look at. Terminal, web page, Prometheus and `swarm status` render a picture. Times are Unix seconds of
the monitor's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

import msgspec

from swarm.ids import PeerId, Stage
from swarm.records import PeerRecord
from swarm.wire.messages import LedgerCounts, PeerStatus

HappeningKind: TypeAlias = Literal[
    "joined", "left", "lost", "silent", "back", "moved", "restarted", "went back", "stage lost", "stage back",
    "paused",
]  # fmt: skip

Level: TypeAlias = Literal["error", "warning", "info"]
LEVELS: tuple[Level, ...] = ("error", "warning", "info")
"""The run stops or is wrong; it may, or is slower than it could be; good to know."""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What is new since the last observation, validated by `swarm.monitoring.validation`."""

    at: float
    records: tuple[PeerRecord, ...] = ()
    """New, or changed."""
    gone: tuple[PeerId, ...] = ()
    """Peers whose records ran out."""
    statuses: tuple[PeerStatus, ...] = ()
    silent: dict[PeerId, str] = {}
    """Peers that were asked and gave no usable answer, and why."""
    refused: dict[str, int] | None = None
    """Records that were refused so far, by reason; None: as before."""
    voice: dict[PeerId, int] | None = None
    """How much the word of each peer counts (`swarm.protocol.voice`), where it does; None: as before."""


class Happening(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the timeline."""

    at: float
    kind: HappeningKind
    text: str
    stage: Stage | None = None
    peer: PeerId | None = None


class PeerTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic between two peers, both directions together."""

    source: PeerId
    """The trainer, or the peer of the earlier stage; of one stage, the smaller id."""
    target: PeerId
    kind: Literal["feed", "work", "average"]
    """Trainer to stage; stage to stage; within a stage."""
    bps: float
    """Bits per second, between the last two answers."""


class PeerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """One peer, by its record and its last answer."""

    peer: PeerId
    stage: Stage
    label: str
    """As tables call its stage."""
    state: str
    version: int
    device: str
    answered: bool
    """Its last answer is valid; else only its record is known."""
    why: str
    """Why it does not answer; empty if it does, or was not asked."""
    since: float
    """Unix time at which it joined, by its own clock; 0 = not said."""
    up_s: float | None
    speed: float
    """Microbatches per second of its device; 0 = not measured."""
    load: float
    """Microbatches that wait for its device or are on it, on average."""
    busy: float | None
    """Share of the time in which its device worked, between its last two answers."""
    inflight: int
    max_inflight: int
    done: int
    """Microbatches of the current step in its sum."""
    computed: int
    """Microbatches computed since it joined."""
    bandwidth_bps: float
    bytes_in: int
    bytes_out: int
    audit: LedgerCounts
    slower: float
    """Times by which the rest of its stage is faster; 0 = not known."""
    inconsistencies: tuple[str, ...]
    """Impossible or contradicted statements of the peer, in words."""
    last: str
    """The last thing that happened to it."""
    address: str = ""
    """What others dial it at, as it says; empty: it has not said."""
    voice: int = 0
    """How much its word counts: steps of work that trainers saw; 0: none."""
    memory_bytes: int = 0
    """Of what it sent and received: handed over in memory, to other processes of its machine."""


class StageHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The peers of one stage; of a run of islands, of one cell."""

    stage: Stage
    label: str
    """As tables call it: of islands `1.2` for stage 2 of island 1."""
    place: str
    """As sentences do."""
    serving: int
    """Peers that serve and answer."""
    most_serving: int
    """The largest number of serving peers seen so far."""
    joining: int
    version: int
    """The version of most of them."""
    load: float
    """Mean over the serving peers."""
    speed: float
    """Microbatches per second of all of them."""
    slowest: PeerId | None
    fastest: PeerId | None
    disagree: tuple[tuple[str, tuple[PeerId, ...]], ...]
    """Where replicas on one kind of device differ at one version: each digest with its peers."""
    peers: tuple[PeerHealth, ...]
    """By id."""


class PeerShare(msgspec.Struct, frozen=True, kw_only=True):
    """Microbatches that one peer computed, all its visits together."""

    peer: PeerId
    computed: int
    share: float
    """Of all that was computed, 0 to 1."""
    stage: Stage
    label: str
    """As tables call its stage."""
    here: bool


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence, without its full stop."""

    level: Level
    text: str
    stage: Stage | None = None
    peer: PeerId | None = None


class SwarmHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one moment, with its recent past."""

    run: str
    name: str
    at: float
    version: int
    steps: int
    went_back: int
    """Number of rollbacks to a checkpoint, after a stage had lost all its peers."""
    microbatches_per_step: int
    tokens_per_step: int
    loss: float | None
    """Of the last finished step."""
    tokens_per_s: float | None
    """None: not known yet."""
    left_s: float | None
    """Until the last step, at that pace."""
    still_s: float
    """Time since the last step."""
    step_s: float | None
    """Duration of the recent steps."""
    islands: int
    stages: tuple[StageHealth, ...]
    """Of all islands, one after the other."""
    keepers: tuple[PeerHealth, ...]
    trainers: tuple[PeerId, ...]
    trainer_away_s: float | None
    """How long no trainer has been seen; None: some peer of stage 0 has not answered yet."""
    routes: tuple[PeerTraffic, ...]
    """The busiest first."""
    losses: tuple[tuple[int, float], ...]
    """(version, loss), ascending; not of every step."""
    evaluations: tuple[tuple[int, float], ...]
    """(version, its loss on samples that are held out), ascending."""
    step_times: tuple[tuple[int, float], ...]
    """(version, seconds that the step to it took), ascending, as peers say; not of every step."""
    cut_off_s: float | None
    """How long no peer has answered, if this machine is probably cut off; else None."""
    happenings: tuple[Happening, ...]
    """The newest last."""
    contributions: tuple[PeerShare, ...]
    """The largest first."""
    rebalance: str
    """The last decision about moves of most peers, and why."""
    refused: Mapping[str, int]
    """Records that were refused, by reason."""
    alerts: tuple[Alert, ...]
    """What a person should look at; the worst first."""

    @property
    def peers(self) -> Iterable[PeerHealth]:
        for stage in self.stages:
            yield from stage.peers
        yield from self.keepers

"""The health of a run as plain data: what was seen of it (`Look`), and the picture that a dashboard shows.

`swarm.policy.observer` makes pictures of looks, `swarm.policy.alerts` finds what a person should look at.
Terminal, web page, Prometheus and `swarm status` are renderings of a picture. Times are Unix seconds of
whoever looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from swarm.ids import PeerId, Stage
from swarm.records import PeerRecord
from swarm.wire.messages import Audit, PeerStatus

HappeningKind: TypeAlias = Literal[
    "joined", "left", "lost", "silent", "back", "moved", "restarted", "went back", "stage lost", "stage back",
    "paused",
]

Level: TypeAlias = Literal["error", "warning", "info"]
LEVELS: tuple[Level, ...] = ("error", "warning", "info")
"""The run stops or is wrong; it may, or is slower than it could be; good to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What was new since the last look; through `swarm.policy.claims`: texts printable, numbers finite."""

    at: float
    records: tuple[PeerRecord, ...] = ()
    """New, or changed."""
    gone: tuple[PeerId, ...] = ()
    """Whose records ran out."""
    statuses: tuple[PeerStatus, ...] = ()
    silent: dict[PeerId, str] = field(default_factory=dict[PeerId, str])
    """Who was asked and gave no answer that can be used, and why."""
    refused: dict[str, int] | None = None
    """Records that were refused so far, by reason; None: as before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """A line of the timeline."""

    at: float
    kind: HappeningKind
    text: str
    stage: Stage | None = None
    peer: PeerId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Traffic between two peers, both ways."""

    source: PeerId
    """The trainer, or the peer of the earlier stage; of one stage, the smaller id."""
    target: PeerId
    kind: Literal["feed", "work", "average"]
    """From a trainer; from stage to stage; within a stage."""
    bps: float
    """Bits per second, between the last two answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHealth:
    """One peer, by its record and its last answer."""

    peer: PeerId
    stage: Stage
    state: str
    version: int
    device: str
    answered: bool
    """Its last answer counts; else only its record is known."""
    why: str
    """Why it does not answer; empty if it does, or was not asked."""
    heard_s: float | None
    """Age of its last answer."""
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
    audit: Audit
    slower: float
    """Times by which the rest of its stage is faster, if that is known; else 0."""
    doubts: tuple[str, ...]
    """What it says and cannot be true, in words."""
    last: str
    """The last thing that happened to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageHealth:
    """Those who serve one stage."""

    stage: Stage
    serving: int
    """That serve and answer."""
    most: int
    """That ever did, as far as was seen."""
    joining: int
    version: int
    """The newest that most of them have."""
    load: float
    """Mean over those that serve."""
    speed: float
    """Microbatches per second of all of them."""
    slowest: PeerId | None
    fastest: PeerId | None
    disagree: tuple[tuple[str, tuple[PeerId, ...]], ...]
    """Digests of one version and one kind of device, and who has which, where there is more than one."""
    peers: tuple[PeerHealth, ...]
    """By id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What one peer computed, all its visits together."""

    peer: PeerId
    computed: int
    share: float
    """Of all that was computed, 0 to 1."""
    stage: Stage
    here: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One sentence, without its full stop."""

    level: Level
    text: str
    stage: Stage | None = None
    peer: PeerId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmHealth:
    """A run at one moment, with its recent past."""

    run: str
    name: str
    at: float
    version: int
    steps: int
    went_back: int
    """How often the run went back to a checkpoint, since a stage had lost all its peers."""
    microbatches_per_step: int
    tokens_per_step: int
    loss: float | None
    """Of the last finished step."""
    tokens_per_s: float | None
    """None: not known yet."""
    left_s: float | None
    """Until the last step, at that pace."""
    still_s: float
    """Since the last step was seen."""
    step_s: float | None
    """What a step took lately."""
    stages: tuple[StageHealth, ...]
    keepers: tuple[PeerHealth, ...]
    trainers: tuple[PeerId, ...]
    trainer_away_s: float | None
    """How long no trainer has been seen; None: somebody who would know has not answered yet."""
    routes: tuple[Route, ...]
    """The busiest first."""
    losses: tuple[tuple[int, float], ...]
    """(version, loss), ascending; not of every step."""
    pace: tuple[tuple[float, float], ...]
    """(Unix time, tokens per second), ascending."""
    step_times: tuple[tuple[int, float], ...]
    """(version, seconds that the step to it took), ascending: the last few hundred. Of steps that were taken
    between two looks the mean."""
    cut_off_s: float | None
    """How long nobody has answered, if it is more likely we who are cut off than all of them; else None."""
    happenings: tuple[Happening, ...]
    """The newest last."""
    contributions: tuple[Contribution, ...]
    """The largest first."""
    rebalance: str
    """What most peers last decided about who moves, and why."""
    refused: Mapping[str, int]
    """Records that were refused, by reason."""
    alerts: tuple[Alert, ...]
    """What a person should look at; the worst first."""
    depends_on_routes: bool
    """The manifest lets lines choose their codecs: the weights are no function of it."""

    @property
    def peers(self) -> Iterable[PeerHealth]:
        """Of all stages, and the keepers."""
        for stage in self.stages:
            yield from stage.peers
        yield from self.keepers

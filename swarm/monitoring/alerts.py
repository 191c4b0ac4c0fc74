"""Alerts: sentences about what a person should look at. Pure: from a picture of a run's health."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from swarm.errors import count, lasting, short
from swarm.ids import PeerId
from swarm.monitoring.health import LEVELS, Alert, PeerHealth, SwarmHealth

SLOW = 4.0
"""Times by which a peer is slower than its stage's median. Factors of 2 or 3 are common."""
TRAINER_AWAY_S = 15.0
"""A trainer polls each second, and each peer of a stage is asked every few seconds."""
STILL_STEPS = 5.0
STILL_S = 30.0
"""A run stands still if it has not stepped for this long and for several typical steps."""
MAX_ALIKE = 5
"""Alerts of one kind; the others are counted."""


def find(health: SwarmHealth) -> tuple[Alert, ...]:
    """All alerts of a picture, the worst first."""
    found = [alert for sort in _SORTS for alert in _at_most(list(sort(health)))]
    return tuple(sorted(found, key=lambda alert: LEVELS.index(alert.level)))


def _at_most(alike: Sequence[Alert]) -> Iterator[Alert]:
    yield from alike[:MAX_ALIKE]
    if len(alike) > MAX_ALIKE:
        more = len(alike) - MAX_ALIKE
        yield Alert(level=alike[-1].level, text=f"and {more} more like the last one")


def _counted(peers: Iterable[PeerHealth]) -> Sequence[PeerHealth]:
    """Those whose word counts."""
    every = list(peers)
    return [peer for peer in every if peer.voice] or every


def _wrong_count(health: SwarmHealth) -> Iterator[Alert]:
    for peer in _counted(health.peers):
        for n, what in (
            (peer.audit.missing, "missing from steps that were taken"),
            (peer.audit.duplicated, "counted twice"),
        ):
            if n:
                text = f"peer {short(peer.peer)} reports {count(n, 'microbatch')} {what}: report this bug"
                yield Alert(level="error", text=text, stage=peer.stage, peer=peer.peer)


def _disagree(health: SwarmHealth) -> Iterator[Alert]:
    for stage in health.stages:
        if stage.disagree:
            sides = "; ".join(
                f"{_names(peers)} {'has' if len(peers) == 1 else 'have'} {digest[:8]}"
                for digest, peers in stage.disagree
            )
            text = f"{stage.place}'s weights disagree: {sides}"
            yield Alert(level="error", text=text, stage=stage.stage)


def _few_left(health: SwarmHealth) -> Iterator[Alert]:
    if health.cut_off_s is not None:
        return  # the peers may serve, unseen
    counted = {peer.peer for peer in _counted(health.peers)}
    for stage in health.stages:
        if stage.serving == 0:
            text = f"{stage.place} has no peer: the run waits until one joins"
            paused = sum(peer.state == "paused" for peer in stage.peers)
            if paused:
                text = f"{stage.place} has only {count(paused, 'paused peer')}: the run waits"
            if stage.joining:
                loading = count(stage.joining, "peer")
                text = f"{stage.place} has no peer: the run waits for {loading} to load it"
            yield Alert(level="error", text=text, stage=stage.stage)
        elif not any(one.peer in counted for one in stage.peers if one.state == "serving" and not one.why):
            text = f"{stage.place} has only peers that have not worked for the run: perhaps they do nothing"
            yield Alert(level="warning", text=text, stage=stage.stage)
        elif stage.serving == 1 and stage.most_serving > 1:
            yield Alert(level="warning", text=f"{stage.place} has one peer left", stage=stage.stage)


def _no_trainer(health: SwarmHealth) -> Iterator[Alert]:
    away_s = health.trainer_away_s
    if away_s is None or health.version >= health.steps:
        return
    # Whether a trainer would have found them.
    waited = all(health.at - peer.since >= TRAINER_AWAY_S for peer in _counted(health.stages[0].peers))
    if away_s >= TRAINER_AWAY_S:
        yield Alert(level="warning", text=f"no trainer for {lasting(away_s)}")
    elif health.step_s is None and not health.trainers and waited:
        text = "no trainer that a peer of stage 0 knows of: the run waits for swarm train"
        yield Alert(level="warning", text=text)


def _still(health: SwarmHealth) -> Iterator[Alert]:
    step_s, waits = health.step_s, any(stage.serving == 0 for stage in health.stages)
    explained = waits or health.cut_off_s is not None or list(_no_trainer(health))
    if step_s is None or health.version >= health.steps or explained:
        return
    if health.still_s >= max(STILL_S, STILL_STEPS * step_s):
        text = f"no step for {lasting(health.still_s)}; the last ones took {lasting(step_s)} each"
        yield Alert(level="warning", text=text)


def _silent(health: SwarmHealth) -> Iterator[Alert]:
    silent = [peer for peer in health.peers if peer.why]
    if health.cut_off_s is not None:
        said = f"the last answer came {lasting(health.cut_off_s)} ago"
        if silent:
            said = f"{_names([p.peer for p in silent])}: {silent[0].why}"
        yield Alert(level="error", text=f"no peer answers: is this machine cut off? {said}")
        return
    for peer in silent:
        text = f"{_who(peer)} does not answer: {peer.why}"
        yield Alert(level="warning", text=text, stage=peer.stage, peer=peer.peer)


def _slow(health: SwarmHealth) -> Iterator[Alert]:
    for peer in health.peers:
        if peer.slower >= SLOW:
            text = f"peer {short(peer.peer)} answers {peer.slower:.0f}× slower than its stage"
            yield Alert(level="warning", text=text, stage=peer.stage, peer=peer.peer)


def _inconsistent(health: SwarmHealth) -> Iterator[Alert]:
    for peer in health.peers:
        for text in peer.inconsistencies:
            yield Alert(level="warning", text=f"{_who(peer)}: {text}", stage=peer.stage, peer=peer.peer)


def _refused(health: SwarmHealth) -> Iterator[Alert]:
    for reason, n in sorted(health.refused.items(), key=lambda item: (-item[1], item[0])):
        yield Alert(level="info", text=f"{count(n, 'record')} refused: {reason}")


def _over(health: SwarmHealth) -> Iterator[Alert]:
    if health.version >= health.steps:
        yield Alert(level="info", text=f"all {count(health.steps, 'step')} are done")


def _went_back(health: SwarmHealth) -> Iterator[Alert]:
    if health.went_back:
        times = count(health.went_back, "time")
        text = f"a stage lost all its peers: the run went back to a checkpoint {times}"
        yield Alert(level="info", text=text)


_SORTS: tuple[Callable[[SwarmHealth], Iterator[Alert]], ...] = (
    _wrong_count, _disagree, _few_left, _no_trainer, _still, _silent, _slow, _inconsistent, _refused,
    _went_back, _over,
)  # fmt: skip


def _who(peer: PeerHealth) -> str:
    return f"peer {short(peer.peer)}" if peer.stage >= 0 else f"keeper {short(peer.peer)}"


def _names(peers: Sequence[PeerId]) -> str:
    shown = ", ".join(short(peer) for peer in peers[:4])
    return shown if len(peers) <= 4 else f"{shown} and {len(peers) - 4} more"

"""Validation of what peers say about themselves, so that it can be kept, drawn and counted. Pure.

An impossible number is refused or counts as not said; texts are cut, and characters that would steer a
terminal or change the direction of writing become `?`. Statements that are merely untrue pass.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import msgspec

from swarm.errors import MAX_WORDS_CHARS, Refused, clean
from swarm.ids import PeerId
from swarm.manifest import Run
from swarm.protocol.rollback import check_position
from swarm.protocol.voice import MAX_STEPS
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import LinkStatus, PastStep, PeerStatus

if TYPE_CHECKING:
    from swarm.monitoring.health import Observation

MAX_COUNT = 1 << 53
"""Of microbatches or bytes: more than any peer can have seen."""
MAX_SPEED = 1e6
"""Microbatches per second of one device."""
MAX_LOAD = 4096.0
MAX_UNIX_S = 1e11
"""The year 5138."""
MAX_LINKS = 64
MAX_PAST = 128
MAX_STEP_S = 1e7
MAX_LOSS = 1e9
"""On either side of 0: a thousand of them can be added up."""
MAX_TRAINERS = 16
DEVICE_CHARS = 40
ID_CHARS = 64
"""A peer id has 52, a digest in hex has 64."""
TEXT_CHARS = {
    "state": 20, "device": DEVICE_CHARS, "kind": DEVICE_CHARS, "coordinator": ID_CHARS, "digest": ID_CHARS,
    "rebalance": MAX_WORDS_CHARS,
}  # fmt: skip
"""Of each text of a status."""


def number(value: float) -> float:
    """`value`, or 0 (not said) if it is impossible."""
    return value if math.isfinite(value) and value >= 0 else 0.0


def tidy(record: PeerRecord) -> PeerRecord:
    """A copy of the record with printable texts and numbers that can be added up."""
    return msgspec.structs.replace(
        record,
        device=clean(record.device, DEVICE_CHARS),
        speed=min(number(record.speed), MAX_SPEED),
        load=min(number(record.load), MAX_LOAD),
        bandwidth_bps=number(record.bandwidth_bps),
        since=min(number(record.since), MAX_UNIX_S),
    )


def tidy_observation(observation: Observation, run: Run) -> Observation:
    """A copy of an observation from a file, with untrusted content validated and impossible parts left out.

    Raises:
        Refused: its time is impossible.
    """
    if not 0 <= observation.at <= MAX_UNIX_S:
        raise Refused(f"an observation at an impossible time: {observation.at:g}")
    statuses: list[PeerStatus] = []
    for status in observation.statuses:
        with contextlib.suppress(Refused):  # as in a live answer
            statuses.append(_possible(status, run))
    refused, voice = observation.refused, observation.voice
    return msgspec.structs.replace(
        observation,
        records=tuple(
            tidy(r) for r in observation.records if _is_id(r.peer) and NO_STAGE <= r.stage < run.cells
        ),
        gone=tuple(filter(_is_id, observation.gone)),
        statuses=tuple(statuses),
        silent={peer: clean(why) for peer, why in observation.silent.items() if _is_id(peer)},
        refused=None if refused is None else {clean(why): n for why, n in refused.items()},
        voice=None if voice is None else {p: n for p, n in voice.items() if _is_id(p) and 0 < n <= MAX_STEPS},
    )


def checked(status: PeerStatus, record: PeerRecord, run: Run) -> PeerStatus:
    """The validated answer of the peer that `record` speaks of.

    Raises:
        Refused: no peer of this run can honestly say that; the text says what is wrong.
    """
    if status.peer != record.peer:
        raise Refused(f"a status in the name of {clean(status.peer, ID_CHARS)!r}")
    return _possible(status, run)


def _possible(status: PeerStatus, run: Run) -> PeerStatus:
    if not _is_id(status.peer):
        raise Refused(f"a status in the name of {clean(status.peer, ID_CHARS)!r}")
    if not (0 <= status.stage < run.cells or status.stage == NO_STAGE):
        raise Refused(f"a status of stage {status.stage} of a run of {run.cells} stages")
    check_position(status.generation, status.version, run, what="a status")
    numbers = msgspec.structs.asdict(status)
    numbers |= {f"audit.{name}": n for name, n in msgspec.structs.asdict(status.audit).items()}
    most = {"done": run.M, "speed": MAX_SPEED}
    for name, value in numbers.items():
        least = -1 if name in ("stage", "eval_version") else 0
        if (type(value) is int or name == "speed") and not least <= value <= most.get(name, MAX_COUNT):
            raise Refused(f"a status with an impossible number: {name} {value}")
    return msgspec.structs.replace(
        status,
        since=number(status.since),
        up_s=min(number(status.up_s), MAX_UNIX_S),
        busy_s=number(status.busy_s),
        eval_loss=status.eval_loss if abs(status.eval_loss or 0.0) <= MAX_LOSS else None,
        links=tuple(filter(_can_be, status.links[:MAX_LINKS])),
        past=tuple(step for step in status.past[:MAX_PAST] if _can_have_been(step, run)),
        trainers=tuple(clean(peer, ID_CHARS) for peer in status.trainers[:MAX_TRAINERS]),
        **{name: clean(getattr(status, name), most) for name, most in TEXT_CHARS.items()},
    )


def _is_id(peer: PeerId) -> bool:
    return 0 < len(peer) <= ID_CHARS and peer.isprintable()


def _can_have_been(step: PastStep, run: Run) -> bool:
    told = 0 < step.version <= run.steps and 0 <= step.took_s <= MAX_STEP_S
    return told and abs(step.loss or 0.0) <= MAX_LOSS


def _can_be(link: LinkStatus) -> bool:
    counted = all(0 <= n <= MAX_COUNT for n in (link.bytes_in, link.bytes_out, link.memory_bytes))
    return counted and _is_id(link.peer) and all(map(math.isfinite, (link.rtt_s, link.bandwidth_bps)))

"""What peers say of themselves, made fit to be kept, drawn and counted. Pure.

Records and answers come from strangers. A number that cannot be is refused or counts as not said; a text is
cut, and what would steer a terminal or change the direction of writing becomes `?`. What is merely not true
passes: `swarm.policy.health` compares it with what others say.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import msgspec

from swarm.errors import Refused
from swarm.ids import PeerId
from swarm.policy.eras import check_standing
from swarm.policy.health import Look
from swarm.records import NO_STAGE, PeerRecord
from swarm.run import Run
from swarm.wire.messages import LinkStatus, PeerStatus

MOST_COUNT = 1 << 53
"""Microbatches, or bytes: more than any peer can have seen."""
MOST_SPEED = 1e6
"""Microbatches a second, of one device."""
MOST_LOAD = 4096.0
MOST_UNIX_S = 1e11
"""The year 5138."""
MOST_LINKS = 64
MOST_TRAINERS = 16
DEVICE_CHARS = 40
ID_CHARS = 64
"""Of a peer id, which has 52, and of a digest in hex."""
WORDS_CHARS = 400


def clean(text: str, most: int = WORDS_CHARS) -> str:
    """At most `most` characters of `text`, all of them printable."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(c if c.isprintable() else "?" for c in cut)


def number(value: float) -> float:
    """`value`, or 0 (not said) if it cannot be."""
    return value if math.isfinite(value) and value >= 0 else 0.0


def tidy(record: PeerRecord) -> PeerRecord:
    """The record with texts that can be shown and numbers that can be added up."""
    return msgspec.structs.replace(
        record,
        device=clean(record.device, DEVICE_CHARS),
        speed=min(number(record.speed), MOST_SPEED),
        load=min(number(record.load), MOST_LOAD),
        bandwidth_bps=number(record.bandwidth_bps),
        since=min(number(record.since), MOST_UNIX_S),
    )


def tidy_look(look: Look, run: Run) -> Look:
    """A look from a file, which anybody may have written, as if it had been made here. What cannot be is left
    out.

    Raises:
        Refused: its time cannot be.
    """
    if not 0 <= look.at <= MOST_UNIX_S:
        raise Refused(f"a look at an impossible time: {look.at:g}")
    statuses: list[PeerStatus] = []
    for status in look.statuses:
        with contextlib.suppress(Refused):  # as when it is heard
            statuses.append(_possible(status, run))
    return replace(
        look,
        records=tuple(tidy(r) for r in look.records if _is_id(r.peer) and NO_STAGE <= r.stage < run.S),
        gone=tuple(peer for peer in look.gone if _is_id(peer)),
        statuses=tuple(statuses),
        silent={peer: clean(why) for peer, why in look.silent.items() if _is_id(peer)},
        refused=None if look.refused is None else {clean(why): n for why, n in look.refused.items()},
    )


def checked(status: PeerStatus, record: PeerRecord, run: Run) -> PeerStatus:
    """The answer of the peer that `record` speaks of, in the same way.

    Raises:
        Refused: no peer of this run can honestly say that; the text says what is wrong.
    """
    if status.peer != record.peer:
        raise Refused(f"a status in the name of {clean(status.peer, ID_CHARS)!r}")
    return _possible(status, run)


def _possible(status: PeerStatus, run: Run) -> PeerStatus:
    if not _is_id(status.peer):
        raise Refused(f"a status in the name of {clean(status.peer, ID_CHARS)!r}")
    if not (0 <= status.stage < run.S or status.stage == NO_STAGE):
        raise Refused(f"a status of stage {status.stage} of a run of {run.S} stages")
    check_standing(status.era, status.version, run, what="a status")
    counts = {
        "done": status.done,
        "inflight": status.inflight,
        "max_inflight": status.max_inflight,
        "computed": status.computed,
        "taken": status.taken,
        "answered": status.answered,
        "bytes_in": status.bytes_in,
        "bytes_out": status.bytes_out,
        "audit.steps": status.audit.steps,
        "audit.missing": status.audit.missing,
        "audit.duplicated": status.audit.duplicated,
        "audit.undone": status.audit.undone,
        "first_audited_step": status.first_audited_step,
        "loss_step": status.loss_step + 1,
    }
    for name, value in counts.items():
        if not 0 <= value <= (run.M if name == "done" else MOST_COUNT):
            raise Refused(f"a status with an impossible number: {name} {value}")
    if not (math.isfinite(status.speed) and 0 <= status.speed <= MOST_SPEED):
        raise Refused(f"a status with an impossible number: speed {status.speed}")
    links = [link for link in status.links[:MOST_LINKS] if _can_be(link)]
    return msgspec.structs.replace(
        status,
        state=clean(status.state, 20),
        device=clean(status.device, DEVICE_CHARS),
        coordinator=clean(status.coordinator, ID_CHARS),
        since=number(status.since),
        busy_s=number(status.busy_s),
        loss=status.loss if status.loss is not None and math.isfinite(status.loss) else None,
        links=tuple(links),
        rebalance=clean(status.rebalance),
        digest=clean(status.digest, ID_CHARS),
        kind=clean(status.kind, DEVICE_CHARS),
        trainers=tuple(clean(peer, ID_CHARS) for peer in status.trainers[:MOST_TRAINERS]),
    )


def _is_id(peer: PeerId) -> bool:
    return 0 < len(peer) <= ID_CHARS and peer.isprintable()


def _can_be(link: LinkStatus) -> bool:
    return (
        0 <= link.bytes_in <= MOST_COUNT
        and 0 <= link.bytes_out <= MOST_COUNT
        and _is_id(link.peer)
        and math.isfinite(link.rtt_s)
        and math.isfinite(link.bandwidth_bps)
    )

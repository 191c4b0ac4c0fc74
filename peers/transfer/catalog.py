"""Which saved versions (checkpoints) of which stage are available, and at which peers.

Peers are asked for the versions of their own stage, keepers for those of all. What they say is a claim: the
download checks the bytes. Here only claims are refused that cannot be true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from peers.ports import Transport
from peers.status_query import ask_all
from swarm.errors import BadAnswer, PeerFault
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.policy.keeping import borne_out
from swarm.protocol.rounds import NO_VOICE
from swarm.protocol.voice import heard
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import MAX_LONG_BYTES, AskSaved, Saved

ASK_S = 4.0
"""Longer than the silence limit of a connection, so that a hung peer is named as such."""
MAX_ASKED = 8
"""Peers of one stage, and keepers: replicas of a stage save the same versions, so a few know all."""
MAX_VERSIONS = 64
"""Of one stage, from one peer: more than any peer keeps. The newest ones matter."""

Sources: TypeAlias = "dict[Stage, dict[int, list[PeerId]]]"
"""Stage -> version -> the peers that have it, keepers first, since they have nothing else to do."""


def is_keeper(record: PeerRecord) -> bool:
    """Whether the record is of a keeper, which may hold any stage."""
    return record.stage == NO_STAGE and record.state == "keeping"


async def ask_saved(
    run: Run,
    transport: Transport,
    records: Sequence[PeerRecord],
    *,
    voice: Mapping[PeerId, int] = NO_VOICE,
    on_fault: Callable[[PeerFault], None] = lambda fault: None,
) -> Sources:
    """Ask peers of each stage, and keepers, at once. Every stage is in the answer, if only with no version.

    Peers that do not answer, or say what cannot be, are left out; `on_fault` hears of each and why. If
    replicas of a stage have `voice`, the others do not say which versions there are. In a run that names
    trainers or founders a keeper alone does not, either: `swarm.policy.keeping.borne_out`.
    """
    asked = {record.peer: record for record in chosen(run, records, transport.peer_id, voice)}
    told = await ask_all(
        transport, asked, "saved", AskSaved(run=run.id), Saved,
        deadline_s=ASK_S, max_answer_bytes=MAX_LONG_BYTES,
        check=lambda peer, saved: check_saved(run, asked[peer], saved), on_fault=on_fault,
    )  # fmt: skip
    found: Sources = {}
    for stage in range(run.S):
        replicas = [peer for peer in told if asked[peer].stage == stage]
        not_heard = set(replicas).difference(heard(replicas, voice))
        sources: dict[int, list[PeerId]] = {}
        for peer, saved in told.items():
            versions = [v for one in saved.stages if one.stage == stage for v in one.versions]
            for version in versions if peer not in not_heard else ():
                sources.setdefault(version, []).append(peer)
        found[stage] = borne_out(sources, run.admission.founders, voice) if run.admission.named else sources
    return found


def chosen(
    run: Run, records: Sequence[PeerRecord], me: PeerId, voice: Mapping[PeerId, int] = NO_VOICE
) -> list[PeerRecord]:
    """The peers to ask: a bounded number of keepers, and of each stage; founders and those with voice first,
    then the furthest.

    Also peers that are joining or paused: what they hold, on a disk or in memory, may be the last of it.
    """
    others = [record for record in records if record.peer != me]
    first = {*voice, *run.admission.founders}
    order = sorted(others, key=lambda r: (r.peer not in first, r.state != "serving", -r.version, r.peer))
    asked = [record for record in order if is_keeper(record)][:MAX_ASKED]
    for stage in range(run.S):
        replicas = [r for r in order if r.stage == stage and r.state in ("serving", "joining", "paused")]
        asked += replicas[:MAX_ASKED]
    return asked


def check_saved(run: Run, record: PeerRecord, saved: Saved) -> None:
    """Check what the peer of `record` says it can give out.

    Raises:
        BadAnswer: it cannot be; says why.
    """
    found = set[Stage]()
    for offered in saved.stages:
        stage, versions = offered.stage, offered.versions
        if not 0 <= stage < run.S or stage in found:
            raise BadAnswer(record.peer, f"offers checkpoints of stage {stage}, twice or of {run.S} stages")
        if stage != record.stage and not is_keeper(record):
            raise BadAnswer(record.peer, f"serves stage {record.stage} and offers checkpoints of {stage}")
        if len(versions) > MAX_VERSIONS:
            raise BadAnswer(record.peer, f"offers {len(versions)} checkpoints of stage {stage}")
        if list(versions) != sorted(set(versions)) or not all(0 <= v <= run.steps for v in versions):
            raise BadAnswer(
                record.peer,
                f"offers impossible versions of stage {stage}: {list(versions[:8])} of {run.steps}",
            )
        found.add(stage)

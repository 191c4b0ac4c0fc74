"""Which saved versions (checkpoints) of which stage are available, and at which peers.

What peers say is a claim: the download checks the bytes, by what peers with voice signed of them if a keeper
shows that. Here only claims are refused that cannot be true.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from peers.clock import now_s
from peers.ports import Transport
from peers.status_query import ask_all
from swarm.digest import digest_of
from swarm.errors import BadAnswer, PeerFault
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.policy.keeping import borne_out
from swarm.protocol.coordinator import realigns
from swarm.protocol.rounds import NO_VOICE
from swarm.protocol.statements import Signer, is_signed
from swarm.protocol.voice import FOUNDERS_VOICE, heard, voice_of
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import MAX_LONG_BYTES, AskSaved, Saved
from swarm.wire.trails import ROW_BYTES, Word, weights_of

ASK_S = 4.0
"""Longer than the silence limit of a connection, so that a hung peer is named as such."""
MAX_ASKED = 8
"""Peers of one stage: they save the same versions, so a few know all."""
MAX_KEEPERS = 32
"""One that shows what peers signed is enough, however many others make something up."""
AGAIN_S = 5.0
MAX_VERSIONS = 64
"""Of one stage, from one peer: more than any peer keeps. The newest ones matter."""
MAX_SIGNED = 256
"""Words in one answer, of all stages together: four of two versions of 32 stages."""
SIGNERS = 2
"""One that took a step may lie of it."""


class Found(NamedTuple):
    """What is saved of each stage, by version."""

    sources: dict[Stage, dict[int, list[PeerId]]]
    """The peers that have it, keepers first, since they have nothing else to do."""
    signed: dict[Stage, dict[int, list[Word]]]
    """What peers with voice signed of it, all for one digest: a state with another is not that version."""


def is_keeper(record: PeerRecord) -> bool:
    """Whether the record is of a keeper, which may hold any stage."""
    return record.stage == NO_STAGE and record.state == "keeping"


async def ask_saved(
    run: Run, transport: Transport, records: Sequence[PeerRecord], *,
    voice: Mapping[PeerId, int] = NO_VOICE, on_fault: Callable[[PeerFault], None] = lambda fault: None,
) -> Found:  # fmt: skip
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
    found, liars = Found({}, {}), list[PeerFault]()
    named, founders, signer = run.admission.named, run.admission.founders, transport.signer

    def believe() -> None:
        for peer, saved in list(told.items()) if named else ():
            if not all(voice_behind(word, run, signer) for one in saved.stages for word in one.signed):
                liars.append(BadAnswer(peer, "shows what no peer with voice signed"))
                del told[peer]
        for stage in range(run.S):
            said = {peer: one for peer, saved in told.items() for one in saved.stages if one.stage == stage}
            replicas = [peer for peer in told if asked[peer].stage == stage]
            not_heard = set(replicas).difference(heard(replicas, voice))
            sources, signed = dict[int, list[PeerId]](), dict[int, list[Word]]()
            for peer, one in said.items():
                for version in one.versions if peer not in not_heard else ():
                    sources.setdefault(version, []).append(peer)
            if named:
                words = chain.from_iterable(one.signed for one in said.values())
                for version, by in signed_states(run, signer, words).items():
                    others = {*founders, *voice} if len(by) < SIGNERS else founders
                    if set(others).isdisjoint(sources.get(version, ())):
                        signed[version] = by
                sources = borne_out(sources, founders, voice, signed)
            found.sources[stage], found.signed[stage] = sources, signed

    await asyncio.to_thread(believe)  # thousands of signatures take seconds
    for liar in liars:
        on_fault(liar)
    return found


def signed_states(run: Run, signer: Signer, words: Iterable[Word]) -> dict[int, list[Word]]:
    """Of each version the words for the digest that two signed, with the most voice; or of the only one."""
    said: dict[int, dict[str, dict[PeerId, Word]]] = {}
    for word in words:
        said.setdefault(word[0].end, {}).setdefault(weights_of(word), {})[word[1].peer] = word
    found: dict[int, list[Word]] = {}
    for version, accounts in said.items():
        voices = {
            digest: sum(voice_behind(word, run, signer) for word in by.values())
            for digest, by in accounts.items()
            if len(by) >= SIGNERS or len(accounts) == 1
        }
        most = [digest for digest, voice in voices.items() if voice == max(voices.values())]
        if len(most) == 1:
            found[version] = list(accounts[most[0]].values())
    return found


@lru_cache(8192)  # keepers show the same again and again
def voice_behind(word: Word, run: Run, signer: Signer) -> int:
    """How much voice its peer has for a word on a whole state, as the step that made it left it; 0: none."""
    (took, by), run = word, run.island(0)
    voice = voice_of(by.peer, by.voucher, run, signer, version=took.end)
    voice = max(voice, FOUNDERS_VOICE * (by.peer in run.admission.founders))
    if len(took.rows) != ROW_BYTES or not realigns(run, took.end) or not weights_of(word):
        return 0
    return voice if is_signed(signer, by.peer, run.id, took, by.signature) else 0


def chosen(
    run: Run, records: Sequence[PeerRecord], me: PeerId, voice: Mapping[PeerId, int] = NO_VOICE
) -> list[PeerRecord]:
    """The peers to ask: a bounded number of keepers, others after a while, and of each stage; founders and
    those with voice first, then the furthest.

    Also peers that are joining or paused: what they hold, on a disk or in memory, may be the last of it.
    """
    others = [record for record in records if record.peer != me]
    first = {*voice, *run.admission.founders}
    order = sorted(others, key=lambda r: (r.peer not in first, r.state != "serving", -r.version, r.peer))
    keepers = [record for record in order if is_keeper(record)]
    draw = {r.peer: digest_of(f"{me} {r.peer} {now_s() // AGAIN_S}".encode()) for r in keepers}
    asked = sorted(keepers, key=lambda r: (r.peer not in first, draw[r.peer]))[:MAX_KEEPERS]
    for stage in range(run.S):
        replicas = [r for r in order if r.stage == stage and r.state in ("serving", "joining", "paused")]
        asked += replicas[:MAX_ASKED]
    return asked


def check_saved(run: Run, record: PeerRecord, saved: Saved) -> None:
    """Check what a peer says it can give, but for signatures. Raises BadAnswer: it cannot be; says why."""
    found, why = set[Stage](), ""
    for offered in saved.stages:
        stage, versions, signed = offered.stage, offered.versions, offered.signed
        if not 0 <= stage < run.S or stage in found:
            why = f"offers checkpoints of stage {stage}, twice or of {run.S} stages"
        elif stage != record.stage and not is_keeper(record):
            why = f"serves stage {record.stage} and offers checkpoints of {stage}"
        elif len(versions) > MAX_VERSIONS:
            why = f"offers {len(versions)} checkpoints of stage {stage}"
        elif list(versions) != sorted(set(versions)) or not all(0 <= v <= run.steps for v in versions):
            why = f"offers impossible versions of stage {stage}: {list(versions[:8])} of {run.steps}"
        elif len(signed) > MAX_SIGNED // run.S or not all(
            took.stage == stage and took.end in versions for took, _ in signed
        ):
            why = f"shows {len(signed)} signatures of stage {stage}, too many or of others than it offers"
        if why:
            raise BadAnswer(record.peer, why)
        found.add(stage)

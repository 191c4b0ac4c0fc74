"""A keeper: holds the checkpoints of a run on its disk, so that they outlive the machines that made them.

    looks       which versions peers and other keepers can give out (`peers.transfer.catalog`)
    downloads   those of use (`swarm.policy.keeping`), each chunk checked by its hash
    saves       whole or not at all, and prunes, but never the newest version that all stages have here
    serves      what it has (`peers.transfer.server`), to joiners and to other keepers
    records     what peers sign of their steps (`peers.audit.recorder`), for `swarm verify`

Knows ports only, and needs no device.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from peers import events
from peers.audit.recorder import TranscriptRecorder
from peers.clock import now_s, unix_s
from peers.islands.directory import Islands
from peers.ports import Answer, Directory, Request, Transport
from peers.status_query import TrafficStatus
from peers.storage import checkpoint
from peers.storage.checkpoint_store import CheckpointStore
from peers.storage.transcript import TranscriptWriter
from peers.transfer.catalog import SIGNERS, Found, ask_saved, is_keeper, signed_states, voice_behind
from peers.transfer.client import DownloadFailed, Partial, download, shown, state_of
from peers.transfer.server import StateLeases
from peers.waiting import happens, until_one_ends, within
from swarm.errors import BadAnswer, PeerFault, SetupError
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.model.reductions import state_digest
from swarm.policy.backoff import Backoff
from swarm.policy.keeping import newest_common, next_download, reached, worth_fetching
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import AskStatus, PeerStatus, pack, unpack
from swarm.wire.trails import Word, weights_of

POLL_S = 3.0
"""A peer without a disk holds a version until its next checkpoint; these are minutes apart in earnest."""
FULL_S = 60.0
"""Until a full disk is tried again."""
FIRST_REST_S = 5.0
LONGEST_REST_S = 300.0
"""Backoff of a peer that did not give what it offered: there are others, and no hurry."""
ELSEWHERE_S = 300.0
"""Of one download, until others are asked as well: at first perhaps one peer had it, which gives next to
nothing. What came is kept."""
LAST_S = 25.0
"""On leaving, for the run's last version: a cloud gives 30 s from the notice to the end."""
MAX_SIGNED = 4
"""What so many peers sign of a checkpoint is saved with it."""
MAX_COMPLAINTS = 256
"""That are remembered, of any identities: said again only after so many others."""
SLACK_BYTES = 1 << 20
"""More than the tensors take on the disk: headers, index, blocks."""


class KeepingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a keeper decides for itself."""

    folder: Path
    remedy: str = "choose another --dir"
    """What to do if it is full, besides making room."""
    keep: int = 2
    stages: tuple[Stage, ...] = ()
    """Empty: all."""
    addresses: tuple[str, ...] = ()
    joined_at: float = msgspec.field(default_factory=unix_s)
    charter: Callable[[], tuple[PeerId, bytes]] = lambda: ("", b"")
    """The owner's id and the charter of the run, as it is signed; empty: none."""


def _said(records: Sequence[PeerRecord], found: Found) -> dict[Stage, dict[PeerId, int]]:
    """The newest version that each peer of a stage says it has, by its record or by what it saved."""
    keepers = {record.peer for record in records if is_keeper(record)}
    said: dict[Stage, dict[PeerId, int]] = {stage: {} for stage in found.sources}
    for record in records:
        if record.state == "serving" and record.stage in said:
            said[record.stage][record.peer] = record.version
    for stage, versions in found.sources.items():
        for version, peers in versions.items():
            for peer in {*peers} - keepers:
                said[stage][peer] = max(version, said[stage].get(peer, version))
    return said


class CheckpointKeeper:
    """Keeps checkpoints of `run` until told to leave."""

    def __init__(
        self, run: Run, transport: Transport, directory: Directory, settings: KeepingSettings,
        emit: events.Emit,
    ) -> None:  # fmt: skip
        islands = Islands(run.island(0), transport.signer, directory, lambda: 0).all
        file = TranscriptWriter(settings.folder, run)
        self._recorders = [
            TranscriptRecorder(one.run, transport, one.directory, file, emit, settings.charter)
            for one in islands
        ]
        # What is saved is the same on all islands: those of one are asked.
        run, directory, self._voices = islands[0].run, islands[0].directory, islands[0].voices
        self._run, self._settings, self._emit = run, settings, emit
        self._transport, self._directory = transport, directory
        self.stages = settings.stages or tuple(range(run.S))

        def not_kept(damaged: str) -> None:
            emit(events.Trouble(text=f"not kept: {damaged}"))

        self._stores = {
            stage: CheckpointStore(run, stage, settings.folder, tell=not_kept) for stage in self.stages
        }
        # Their tensors are maps of files: a copy in memory is the system's to drop.
        most = (settings.keep + 2) * len(self._stores)
        self.leases = StateLeases(run, transport, self._stores, voices=self._voices, most_saved=most)
        self._traffic = TrafficStatus(transport)
        transport.serve("status", self._serve_status)
        self._backoff = Backoff(first_s=FIRST_REST_S, longest_s=LONGEST_REST_S)
        self._partials: dict[Stage, Partial] = {}
        self._have: dict[Stage, list[int]] = {stage: [] for stage in self.stages}
        self._voiced: set[Stage] = set()
        """Of these stages there are versions that a peer with voice gave: the others do not count."""
        self.offers: dict[Stage, list[int]] = {stage: [] for stage in self.stages}
        """The versions of each stage that peers could give when they were last asked."""
        self._shown: Mapping[Stage, Mapping[int, Sequence[Word]]] = {}
        """What other keepers show that peers signed."""
        self._said: int | None = None
        self._complaints = deque[str](maxlen=MAX_COMPLAINTS)
        self._full_until = float("-inf")
        self.full = ""
        """Why the last download was not kept, if the disk had no room."""
        self._leaving = asyncio.Event()

    @property
    def version(self) -> int | None:
        """The newest that all its stages have here."""
        return newest_common(self._have)

    # -- life -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look at what is on the disk, then keep and serve until `leave`."""
        await self._take_stock(False)
        if self.version is None:
            every = self._run.checkpoint_every
            when = f"every {every} steps" if every else "at the end of the run only (checkpoint_every = 0)"
            text = f"nothing is kept in {self._settings.folder} yet: peers save a version {when}"
            self._emit(events.Note(text=text))
        try:
            await self._announce()
            recording = [recorder.run() for recorder in self._recorders]
            # A bug in a loop ends the keeper, with its traceback.
            await until_one_ends(self._leaving.wait(), self._keep_often(), *recording)
            await self._keep_the_last()
        finally:
            await self._directory.withdraw()

    def leave(self) -> None:
        """End `run` once what is newer was fetched. What is kept stays."""
        self._leaving.set()

    async def _announce(self) -> None:
        record = PeerRecord(
            peer=self._transport.peer_id, run=self._run.id, stage=NO_STAGE, state="keeping",
            version=self.version or 0, movable=False, device="disk",
            addresses=self._settings.addresses, since=self._settings.joined_at,
        )  # fmt: skip
        await self._directory.announce(record)

    # -- what is here -----------------------------------------------------------------------------

    async def _take_stock(self, announces: bool) -> None:
        """Note what is on the disk now; say so if the newest whole version is another, and to the run."""
        for stage in self.stages:
            versions = await self.leases.versions(stage)
            voiced = await asyncio.to_thread(self._voiced_of, stage, versions)
            self._have[stage] = voiced or versions
            if voiced and self._run.admission.named:
                self._voiced.add(stage)
        if self.version is not None and self.version != self._said:
            self._said = self.version
            self._emit(events.Kept(version=self.version, stages=self.stages))
        if announces:
            await self._announce()

    def _saved(self, stage: Stage, version: int) -> checkpoint.Checkpoint:
        return checkpoint.Checkpoint(self._settings.folder, self._run, stage, version)

    def _is_there(self) -> bool:
        """Whether the newest version still is on the disk."""
        return (v := self.version) is None or all(self._saved(s, v).is_whole() for s in self.stages)

    def _voiced_of(self, stage: Stage, versions: Sequence[int]) -> list[int]:
        return [v for v in versions if self._saved(stage, v).voiced]

    # -- keeping ----------------------------------------------------------------------------------

    async def fetch(self) -> None:
        """Look at what is on the disk, and fetch what is newer, once. Leaves the directory as it is: a
        visitor of the run keeps nothing for others.
        """
        await self._take_stock(False)
        await self._keep(announces=False)

    async def _keep_often(self) -> None:
        while True:
            if now_s() >= self._full_until:
                await self._keep()
            await happens(self._leaving, POLL_S)

    async def _keep(self, *, announces: bool = True) -> None:
        """Fetch all that is offered and of use; `announces`: and tell the run what is here."""
        now = now_s()
        if not await asyncio.to_thread(self._is_there):
            self._emit(events.Trouble(text=f"version {self.version} is gone or damaged: fetching it again"))
            self._said = None
            await self._take_stock(announces)
        known = await self._directory.refresh()
        records = [r for r in known if not self._backoff.in_backoff(r.peer, now=now)]
        voice = {stage: self._voices.of(stage) for stage in range(self._run.S)}
        of_all = {peer: much for of in voice.values() for peer, much in of.items()}
        found = await ask_saved(
            self._run, self._transport, records, voice=of_all, on_fault=self._not_believed
        )
        self._shown = found.signed
        limit = reached(_said(records, found), of_all)
        offered = dict[Stage, dict[int, Sequence[PeerId]]]()
        for stage in self.stages:
            there = {v: peers for v, peers in found.sources[stage].items() if self._run.is_common(v)}
            there = {v: peers for v, peers in there.items() if limit is None or v <= limit}
            offered[stage] = worth_fetching(there, voice[stage], have_voiced=stage in self._voiced)
        self.offers = {stage: sorted(versions) for stage, versions in offered.items()}
        while (wanted := next_download(self._believed(voice), offered)) is not None:
            stage, version = wanted
            if self._leaving.is_set():
                text = f"version {version} of stage {stage} is fetched before this keeper leaves, within "
                self._emit(events.Note(text=f"{text}{LAST_S:.0f} s; again to leave now"))
            offer, limit_s = offered[stage].pop(version), ELSEWHERE_S if announces else math.inf
            sources = [peer for peer in offer if not self._backoff.in_backoff(peer, now=now_s())]
            if sources and await self._fetch(stage, version, sources, voice[stage], limit_s):
                await self._take_stock(announces)
            elif now_s() < self._full_until:
                return

    async def _keep_the_last(self) -> None:
        """Fetch what is newer before leaving, within `LAST_S`; say what is lost all the same."""

        async def last() -> None:
            await asyncio.gather(*(recorder.record(all_of_it=True) for recorder in self._recorders))
            await self._keep()

        with contextlib.suppress(asyncio.TimeoutError):
            await within(last(), LAST_S)
        offered = newest_common(self.offers)
        kept = "nothing" if self.version is None else f"version {self.version}"
        if offered is None or (self.version is not None and self.version >= offered):
            self._emit(events.Note(text=f"this keeper leaves with {kept}"))
            return
        text = f"this keeper leaves with {kept}; version {offered} is with the peers only. Start the "
        text += "keeper again before they leave, or give them --checkpoint-dir"
        self._emit(events.Trouble(text=text))

    def _believed(self, voice: Mapping[Stage, Mapping[PeerId, int]]) -> dict[Stage, list[int]]:
        """The versions here, of stages whose peers have voice only those that such a peer gave."""
        return {s: [] if voice[s] and s not in self._voiced else self._have[s] for s in self.stages}

    async def _fetch(
        self, stage: Stage, version: int, sources: Sequence[PeerId], voice: Mapping[PeerId, int],
        limit_s: float,
    ) -> bool:  # fmt: skip
        """Download and save one version of one stage; False: not now, and why was said."""
        words, began = list(self._shown[stage].get(version, ())), now_s()
        wanted = state_of(self._run, stage, version, words)
        size = sum(vector.nbytes for vector in wanted.like.values())
        if (trouble := await asyncio.to_thread(self._no_room, stage, version, size)) is not None:
            self._full(trouble)
            return False
        refused = partial(self._refused, stage, version)
        try:
            found = await within(download(
                self._transport, wanted, sources, voice=voice,
                partial=self._partials.setdefault(stage, Partial()),
                progress=shown(stage, version, self._emit), on_fault=self._not_believed,
            ), limit_s)  # fmt: skip
        except asyncio.TimeoutError:
            return refused(f"not all of it came within {limit_s:.0f} s; the rest is fetched later", sources)
        except DownloadFailed as failed:
            return refused(failed.text, failed.reasons)
        for peer in found.sources:
            self._backoff.answered(peer)
        if voice and not found.voiced:
            return refused("no peer with voice gave it")
        words += await self._recorders[0].signed(stage, version)
        signed = await self._signed(version, found.tensors, words)
        if signed is None:
            return refused("its replicas signed another", found.sources)
        source, took_s = next(iter(found.sources), ""), now_s() - began
        fetched = events.StateFetched(stage=stage, version=version, source=source, bytes=size, seconds=took_s)
        self._emit(fetched)
        voiced = found.voiced or bool(signed) or not self._run.admission.named
        try:
            save, keep = self._saved(stage, version).save, self._settings.keep
            await asyncio.to_thread(
                save, found.tensors, keep=keep, together=self.stages, voiced=voiced, signed=signed
            )
        except SetupError as error:
            self._full(error.text)
            return False
        self._emit(events.Checkpointed(stage=stage, step=version, path=str(self._settings.folder)))
        return True

    async def _signed(
        self, version: int, tensors: Mapping[str, torch.Tensor], words: Sequence[Word]
    ) -> list[Word] | None:
        """What peers signed of a state that came; None: most signed another one."""
        digest = await asyncio.to_thread(state_digest, tensors)
        signer = self._transport.signer
        words = [word for word in words if voice_behind(word, self._run, signer)]
        most = signed_states(self._run, signer, words).get(version, [])
        if len(most) >= SIGNERS and weights_of(most[0]) != digest:
            return None
        same = {by.peer: (took, by) for took, by in words if weights_of((took, by)) == digest}
        return [*same.values()][:MAX_SIGNED]

    def _refused(self, stage: Stage, version: int, why: str, by: Collection[PeerId] = ()) -> bool:
        """Say why a version is not kept, and leave those alone that gave it."""
        for peer in by:
            self._backoff.failed(peer, now=now_s())
        self._complain(f"version {version} of stage {stage} is not kept: {why}")
        return False

    def _no_room(self, stage: Stage, version: int, size_bytes: int) -> str | None:
        """Why a download is not worth its bytes; None if the disk has room for it."""
        needed, folder = size_bytes + SLACK_BYTES, self._settings.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
        except OSError as error:
            return f"cannot keep anything in {folder}: {error.strerror or error}. Repair that"
        if free >= needed:
            return None
        return (
            f"no room for version {version} of stage {stage} in {folder}: it takes {needed / 2**20:.0f} MiB, "
            f"and {free / 2**20:.0f} MiB are free. Make room or {self._settings.remedy}"
        )

    def _full(self, text: str) -> None:
        self._full_until, self.full = now_s() + FULL_S, text
        kept = "what is kept stays" if any(self._have.values()) else "nothing is kept yet"
        self._emit(events.Trouble(text=f"{text}; {kept}, next try in {FULL_S:.0f} s"))

    # -- what goes wrong ----------------------------------------------------------------------------

    def _not_believed(self, fault: PeerFault) -> None:
        """Put the peer into backoff. One that is gone is left out without a word; nonsense is said, once."""
        self._backoff.failed(fault.peer, now=now_s())
        if isinstance(fault, BadAnswer):
            self._complain(f"not believed: {fault.text}")

    def _complain(self, text: str) -> None:
        """Once, until there was much else to say."""
        if text not in self._complaints:
            self._complaints.append(text)
            self._emit(events.Trouble(text=text))

    # -- status -----------------------------------------------------------------------------------

    async def _serve_status(self, request: Request) -> Answer:
        unpack(request.header, AskStatus, self._run.id)
        traffic = self._traffic.now()
        status = PeerStatus(
            peer=self._transport.peer_id, stage=NO_STAGE, version=self.version or 0, state="keeping",
            device="disk", since=self._settings.joined_at,
            bytes_in=traffic.bytes_in, bytes_out=traffic.bytes_out,
        )  # fmt: skip
        return Answer(pack(status))

"""The loop of the dashboard: read the directory, ask some peers for their status, pass on what is new.

A plain client of the DHT, which announces nothing and asks a few peers a second whatever their number. Most
of what it knows of many peers is in their records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from peers.islands.directory import Islands
from peers.ports import Directory, Transport
from peers.waiting import end_tasks
from swarm.errors import BadAnswer, PeerGone, Refused, SwarmError, clean, short
from swarm.ids import PeerId
from swarm.manifest import Run
from swarm.monitoring import validation
from swarm.monitoring.health import Observation
from swarm.records import PeerRecord
from swarm.wire.messages import AskStatus, PeerStatus, pack, unpack_answer

MAX_ASKED_EACH = 8
"""Of 500 peers each is then asked once a minute. An answer is up to 8 kB, and takes a peer a millisecond."""
MAX_ASKED = 32
"""At once: those that hang are waited for."""
MAX_ASKED_ONCE = 256
"""By one look at a run. Each takes some files, of which a process may open 1024, and a peer without work
may announce any number."""
VOICED_SHARE = 4
"""Of so many questions one is for those whose word does not count, be they ever so many."""
MAX_REASONS = 20


class WatchPace(NamedTuple):
    observe_every_s: float = 1.0
    peer_every_s: float = 3.0
    """No peer is asked more often."""
    silent_every_s: float = 10.0
    """One that did not answer is asked again after this."""
    ask_s: float = 4.0
    """Longer than the silence limit of a connection, so that a hung peer is named as such."""


USUAL_PACE = WatchPace()


class Monitor:
    """Observes until `run` is cancelled, or `once`."""

    def __init__(
        self, run: Run, transport: Transport, directory: Directory,
        take: Callable[[Observation], object] = lambda observation: None, *,
        refused: Callable[[], Mapping[str, int]] = dict, pace: WatchPace = USUAL_PACE,
    ) -> None:  # fmt: skip
        """`take` gets each observation of `run`; `refused` counts refused records, by reason."""
        self._run, self._transport, self._directory = run, transport, directory
        self._take, self._refused, self._pace = take, refused, pace
        self._islands = Islands(run, transport.signer, directory, lambda: 0)
        self._voice: Mapping[PeerId, int] = {}
        self._listed: Sequence[PeerRecord] = ()
        self._records: dict[PeerId, PeerRecord] = {}
        self._reasons: dict[str, int] = {}
        self._ask_at: dict[PeerId, float] = {}
        """When each peer may be asked (again), monotonic."""
        self._asked: dict[PeerId, asyncio.Task[None]] = {}
        self._told: dict[PeerId, int] = {}
        """To which version each has told of its steps."""
        self._statuses: list[PeerStatus] = []
        self._silent: dict[PeerId, str] = {}

    async def run(self) -> None:
        """Observe, until cancelled."""
        self._directory.watch(())  # no stage is read all the time: a run may have thousands
        try:
            await self._directory.lookup_all()
            while True:
                self._ask_some()
                self._take(self._observe())
                await asyncio.sleep(self._pace.observe_every_s)
        finally:
            await end_tasks(self._asked.values())

    async def once(self, *, calls: bool = True) -> Observation:
        """The run by all of its records and, unless no `calls` are wanted, by each peer's own answer; all are
        asked at once, of very many first those whose word counts.
        """
        await self._directory.lookup_all()
        if calls:
            voice, askable = self._islands.voice(), self._askable()
            asked = sorted(askable, key=lambda peer: peer not in voice)[:MAX_ASKED_ONCE]
            await asyncio.gather(*(self._ask(askable[peer]) for peer in asked))
        return self._observe()

    def _askable(self) -> dict[PeerId, PeerRecord]:
        return {r.peer: r for r in self._directory.peers() if r.state not in ("left", "feeding")}

    def _observe(self) -> Observation:
        """What is new since the last observation."""
        listed = self._directory.peers()
        records: dict[PeerId, PeerRecord] = self._records
        if listed is not self._listed:  # the same object: nothing has changed
            self._listed = listed
            records = {r.peer: validation.tidy(r) for r in listed if r.state != "feeding"}
        changed = tuple(record for peer, record in records.items() if self._records.get(peer) != record)
        gone = tuple(peer for peer in self._records if peer not in records)
        self._records = records
        # Reasons may quote what was refused.
        reasons = {clean(reason): n for reason, n in list(self._refused().items())[:MAX_REASONS]}
        refused = reasons if reasons != self._reasons else None
        self._reasons = reasons
        statuses, self._statuses = tuple(self._statuses), []
        silent, self._silent = self._silent, {}
        voice, before = self._islands.voice(), self._voice
        self._voice = voice
        return Observation(
            at=time.time(), records=changed, gone=gone, statuses=statuses, silent=silent, refused=refused,
            voice=voice if voice != before else None,
        )  # fmt: skip

    def _ask_some(self) -> None:
        """Ask the peers that have waited longest, and first those whose word counts."""
        now = time.monotonic()
        records = self._askable()
        self._ask_at = {peer: self._ask_at.get(peer, 0.0) for peer in records}
        self._told = {peer: version for peer, version in self._told.items() if peer in records}
        due = [peer for peer, at in self._ask_at.items() if at <= now and peer not in self._asked]
        room = max(0, min(MAX_ASKED_EACH, MAX_ASKED - len(self._asked)))
        due.sort(key=lambda peer: (self._ask_at[peer], peer))
        first = [peer for peer in due if peer in self._voice][: room - room // VOICED_SHARE]
        for peer in [*dict.fromkeys((*first, *due))][:room]:
            self._asked[peer] = asyncio.create_task(self._ask(records[peer]))

    async def status_of(self, record: PeerRecord) -> PeerStatus | None:
        """A peer's own status, made fit to be shown; None if it is still joining, or left.

        Raises:
            PeerFault: it does not answer, or what it answers cannot be (BadAnswer).
            NotNow, Refused: its answer.
        """
        question = pack(AskStatus(run=self._run.id, after=self._told.get(record.peer, 0)))
        try:
            answer = await self._transport.call(record.peer, "status", question, deadline_s=self._pace.ask_s)
        except Refused:
            if record.state in ("choosing", "joining"):
                return None  # it announces itself before it serves any method
            raise
        except PeerGone:
            # A peer that left says so in the directory, which may not have told us yet.
            await self._directory.refresh((record.stage,))
            now = self._directory.find(record.peer)
            if now is None or now.state == "left":
                return None
            raise
        status = unpack_answer(record.peer, answer.header, PeerStatus)
        try:
            return validation.checked(status, record, self._run)
        except Refused as refused:
            raise BadAnswer(record.peer, f"answered with {refused.text}") from None

    async def _ask(self, record: PeerRecord) -> None:
        peer, again_s = record.peer, self._pace.peer_every_s
        began = time.monotonic()
        try:
            status = await self.status_of(record)
            if status is not None:
                self._statuses.append(status)
                self._told[peer] = max((step.version for step in status.past), default=status.version)
        except SwarmError as error:
            self._silent[peer] = clean(error.text.removeprefix(f"peer {short(peer)}: "))
            again_s = self._pace.silent_every_s
        finally:
            self._ask_at[peer] = began + again_s
            self._asked.pop(peer, None)

"""What a trainer knows of the run: how far it is and what it lacks, as one peer of stage 0 tells it.

None is believed alone: what it says has to be borne out by those of all stages whose word counts, and another
one is asked once it brings no news.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence

from peers.audit.verdicts import Verdicts
from peers.clock import now_s
from peers.ports import Directory, Transport
from peers.status_query import all_have, run_position
from peers.voices import Voices
from swarm.errors import PeerFault, Refused, SwarmError
from swarm.ids import Generation, PeerId, Position
from swarm.manifest import Run
from swarm.policy.router import Router
from swarm.protocol.ledger import check_bitmap
from swarm.protocol.rollback import check_position
from swarm.protocol.voice import heard
from swarm.protocol.worklist import WorkList
from swarm.wire.messages import MAX_LONG_BYTES, Watch, Watched, as_bad_answer, pack, unpack_answer

WATCH_S = 3.0
"""Limit for one look at the run; the answer is held back at most a second."""
SAME_S = 10.0
"""While no step is taken, another peer is watched after so long: one may hide what it knows."""
ASKED_S = 5.0
"""Sooner than a peer is believed that says the run went back."""
MAX_STAGES_ASKED = 8
AGAIN_S = 0.25
"""Until the next look after one in vain."""
BACK_AFTER_S = 6.0
"""The run is where it is said to be, if that has been earlier than we knew for so long: all peers that held
more are dead, and others came back from older checkpoints. One peer that lags behind has caught up by
then."""


class RunWatch:
    """Follows the run coordinator's picture of the run, through any peer of stage 0."""

    generation, version = Generation(), 0
    """Where the run is, as far as is known."""
    told = False
    """That was heard from a peer."""
    held_by_all = -1
    """The version that every stage has: until the last one, some stage may be lost and need its trainers."""
    _behind_since: float | None = None
    """Since when it is said to be earlier."""
    _asked_at, _reached = -math.inf, Position()
    """When the peers of all stages bore that out last, and what they had reached."""
    _peer: PeerId | None = None
    """The peer that is watched."""
    _seen, _doubted = -1, False
    """The newest revision of its picture, and whether others do not bear that out."""

    def __init__(
        self, run: Run, last_step: int, transport: Transport, directory: Directory, router: Router,
        verdicts: Verdicts, voices: Voices, todo: WorkList, changed: asyncio.Event,
        took_steps: Callable[[range, float], None], went_back: Callable[[range], None],
    ) -> None:  # fmt: skip
        """
        Args:
            last_step: how many steps the run has when it is over for this trainer.
            todo: told which microbatches are in no ledger of a stage.
            changed: set once there are news.
            took_steps: told of steps that the run took, and how many seconds they were open; of none, once it
                is heard where the run is: what came before was taken before that.
            went_back: told which steps are to be taken again, since a stage lost all of its replicas; of none
                if they were not known to be taken.
        """
        self._run, self._last_step = run, last_step
        self._transport, self._directory, self._router = transport, directory, router
        self._verdicts, self._voices, self._todo, self._changed = verdicts, voices, todo, changed
        self._took_steps, self._went_back = took_steps, went_back
        self.step_losses: dict[int, float] = {}
        """What was told of the last steps; see `Trainer.step_losses`."""
        self.step_began_s = self._since_s = now_s()

    async def run(self) -> None:
        """Follow the run until cancelled."""
        while True:
            try:
                await self._watch_one()
            except PeerFault as fault:
                self._router.failed(fault.peer, now=now_s(), silent=fault.silent)
                self._peer = None
            except SwarmError as error:
                if isinstance(error, Refused) and self._peer is not None:
                    self._router.failed(self._peer, now=now_s())  # it serves nothing: ask the next one
                self._peer = None
                await asyncio.sleep(AGAIN_S)
            await asyncio.sleep(0.02)  # progress need not be followed more closely

    async def _watch_one(self) -> None:
        if not (peers := self._watchable()):
            await self._directory.refresh({0})
            self._changed.set()
            await asyncio.sleep(0.1)
            return
        peer = self._choose(peers)
        watch = Watch(run=self._run.id, seen=self._seen, generation=self.generation, version=self.version)
        answer = await self._transport.call(
            peer, "watch", pack(watch), max_answer_bytes=MAX_LONG_BYTES, deadline_s=WATCH_S
        )
        watched = unpack_answer(peer, answer.header, Watched, answer.body)
        self._doubted = not await self.is_borne_out(watched)
        if self._doubted:
            await asyncio.sleep(AGAIN_S)
            return
        self._seen = watched.revision
        self.learn(peer, watched)
        if self.version >= self._last_step > self.held_by_all and now_s() - self.step_began_s > SAME_S:
            # A run coordinator that hears not all stages never says so, and once all is done no turn ends.
            stages = map(self._voices.counted, range(self._run.S))
            end = Position(self.generation, self._last_step)
            if await all_have(self._run, self._transport, stages, end):
                self.held_by_all = self._last_step
                self._changed.set()

    def _watchable(self) -> list[PeerId]:
        """The peers of stage 0 that can be asked now, and whose word counts."""
        now, backoff = now_s(), self._router.backoff
        # Those that join have nothing to tell, but should know that there is a trainer.
        peers = self._router.peers(0) or [r.peer for r in self._directory.at(0) if r.state == "joining"]
        backoff.relent(peers, now=now)  # what it waits for may be said by the only one there
        return heard([p for p in peers if not backoff.in_backoff(p, now=now)], self._voices.of(0))

    def _choose(self, peers: Sequence[PeerId]) -> PeerId:
        """The same one again, as long as it brings news that others bear out."""
        now, last = now_s(), self._peer
        if last is not None and last in peers and not self._doubted:
            if now - max(self._since_s, self.step_began_s) <= SAME_S:
                return last
            self._verdicts.ask_soon(about=last)
        place = peers.index(last) + 1 if last in peers else 0
        self._peer, self._seen, self._since_s, self._doubted = peers[place % len(peers)], -1, now, False
        return self._peer

    async def is_borne_out(self, watched: Watched) -> bool:
        """Whether the run is where a peer says, by those of all stages whose word counts. They are asked of
        each leap, and now and then of what is none: it may be a lie each time. What all had reached when they
        were asked before a peer that is up to date has reached as well.
        """
        over, at, steps = watched.status.held_by_all >= self._last_step, watched.position, range(self._run.S)
        leaps = over or (at.generation, at.version - 1) > (self.generation, self.version)
        if not leaps and now_s() - self._asked_at < ASKED_S:
            return True
        dice = random.Random(f"{self._transport.peer_id} {now_s()}")
        asked = steps if leaps else dice.sample(steps, min(MAX_STAGES_ASKED, len(steps)))
        run = await run_position(self._run, self._transport, map(self._voices.counted, asked))
        if run is None:
            return True  # they are silent, or gone
        ahead = 2 if self._run.delayed_updates else 1  # some may take a step a moment later
        if at > run._replace(version=run.version + ahead) or (over and run.version < self._last_step):
            return False
        if at < min(run, self._reached):
            return False
        self._asked_at, self._reached = now_s(), run
        return True

    def learn(self, peer: PeerId, watched: Watched) -> None:
        """Take what a peer tells of the run. Raises BadAnswer: that cannot be."""
        status, now, version = watched.status, now_s(), watched.version
        with as_bad_answer(peer):
            check_position(watched.generation, version, self._run, what="a status")
        self.step_losses = dict(status.losses)
        if watched.position >= Position(self.generation, self.version):
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        believed = self._behind_since is not None and now - self._behind_since > BACK_AFTER_S
        if watched.generation < self.generation and not believed:
            return  # a peer that has not heard of it yet
        if watched.generation > self.generation or believed:
            self._go_back(watched.generation, version)
        if version > self.version or not self.told:
            steps = range(self.version if self.told else version, version)
            took_s, self.step_began_s = now - self.step_began_s, now
            self.version, self.told = version, True
            self._took_steps(steps, took_s)
        if status.generation != self.generation:
            return
        self.held_by_all = status.held_by_all
        for lacks in status.lacking[:2]:  # of the open step, and of the next one
            if len(lacks.by_stage) == self._run.S and lacks.t in range(self.version, self._run.steps)[:2]:
                with as_bad_answer(peer):
                    for bitmap in lacks.by_stage:
                        check_bitmap(bitmap, self._run.microbatches(lacks.t))
                self._todo.lacking(lacks.t, lacks.by_stage, now=now)
        self._changed.set()

    def _go_back(self, generation: Generation, version: int) -> None:
        """Follow the run to an earlier version: a stage lost all of its replicas."""
        steps = range(version, self.version if self.told else version)
        self.generation, self._behind_since = generation, None
        if steps:
            self.version, self.step_began_s = version, now_s()
        self._went_back(steps)

"""The IO around `StepProtocol`: it receives calls, sends messages and tells the time.

Whatever comes in goes through `_step`: the protocol sees this peer and the directory as they are now, then
what came in. The protocol's messages are sent here; its actions are done by the stage peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from peers.clock import now_s
from peers.ports import Answer, Buffer, Request
from peers.stage.all_reduce import AllReduce
from peers.stage.state import StageCore
from peers.status_query import ask_status
from peers.waiting import LatestValueSender, TaskKeeper, happens, pulse
from swarm.audit import is_audited
from swarm.errors import Leaving, NotNow, PeerFault, Refused, SwarmError
from swarm.ids import Generation, PeerId, Position, Stage
from swarm.protocol.messages import Directive, ReplicaReport, RunStatus, StageSummary
from swarm.protocol.protocol import REFRESH_S, Message, Ready, StepProtocol
from swarm.protocol.replica import Action, AskAbsent, AskLostStage, AskWitnesses, Local
from swarm.protocol.rounds import Commit
from swarm.protocol.voice import heard
from swarm.wire.messages import MAX_LONG_BYTES, Ack, Watch, Watched, hear, pack, say, unpack, unpack_answer

GATHER_S = 0.1
"""Progress within this time travels in one report; what a step waits for goes at once."""
CALL_S = 3.0
"""Limit for one report or directive."""
METHODS = {ReplicaReport: "report", Directive: "directive", StageSummary: "summary", RunStatus: "run"}
MAX_WITNESSES = 8
MAX_LOST_ASKED = 32
"""Replicas that one peer asks: of a stage that is called lost, and of the others."""
WATCHED_S = 5.0
"""How long a trainer counts as watching: it asks once a second; after a lost answer, another peer."""
MAX_WATCHERS = 16

OVERDUE_S = 5.0
"""A peer whose word is lacking for so long, on one step or the other, may have been shown to lie."""

M = TypeVar("M")
T = TypeVar("T")


class _Lacking(NamedTuple):
    """When the word of a peer was lacking, without a break."""

    since_s: float
    last_s: float


class StepCoordination:
    """This peer's part in the coordination of its stage and, in stage 0, of the run."""

    def __init__(
        self, core: StageCore, all_reduce: AllReduce, *, since_s: float,
        word_overdue: Callable[[PeerId], Awaitable[None]],
    ) -> None:  # fmt: skip
        """`all_reduce` measures uploads to replicas; `word_overdue` hears of peers that long owe a word."""
        self._core, self._transport, self._directory = core, core.transport, core.directory
        self._all_reduce, self._word_overdue = all_reduce, word_overdue
        self._lacking: dict[PeerId, _Lacking] = {}
        """The peers whose words were lacking lately, of whatever step."""
        self.act: Callable[[Action], None] = lambda action: None
        """Called with each action; it makes the peer do it."""
        self._run, self._stage, self._me = core.run, core.stage, core.me
        self.protocol = StepProtocol(
            core.run, core.stage, core.me, core.compute.numel, self._local(), core.backoff,
            core.transport.signer, since_s=since_s,
        )  # fmt: skip
        self._asking = TaskKeeper()
        self._shown = self.protocol.run_status
        self._revision = 0
        self._revised = asyncio.Event()
        self._watchers: dict[PeerId, float] = {}
        """When each trainer last asked, the latest last."""
        self._trained: dict[PeerId, Position] = {}
        """Where each trainer that the manifest names last knew the run to be. It goes back with the run."""
        self._silent = False
        self._messages = LatestValueSender(self._send)
        most_bytes = MAX_LONG_BYTES + 16 * self._run.M
        self._transport.serve("report", self._serve_report, max_body_bytes=most_bytes)
        for kind, stage, take_in in (
            (Directive, self._stage, self.protocol.hear_directive),
            (RunStatus, 0, self.protocol.hear_run_status),
        ):
            handler = partial(self._serve_pushed, kind, stage, take_in)
            self._transport.serve(METHODS[kind], handler, max_body_bytes=MAX_LONG_BYTES)
        self._transport.serve("summary", self._serve_summary, max_body_bytes=MAX_LONG_BYTES)
        self._transport.serve("watch", self._serve_watch)

    # -- asked by the stage peer ------------------------------------------------------------------

    def coordinator(self, stage: Stage) -> PeerId | None:
        """The live serving peer of `stage` that coordinates it, as far as this peer can see."""
        return self.protocol.coordinator(stage, now=self._observe(also=stage))

    @property
    def directive(self) -> Directive | None:
        """The last directive that this peer followed."""
        return self.protocol.directive

    @property
    def left_out(self) -> tuple[PeerId, ...]:
        """Replicas of this stage that take part in nothing for now, as its coordinator says."""
        return self.directive.left_out if self.directive is not None else ()

    @property
    def run_status(self) -> RunStatus:
        return self.protocol.run_status

    @property
    def behind_s(self) -> float:
        """For how long this stage, which this peer coordinates, has been unable to follow the run."""
        now = self._observe()
        return self.protocol.stuck_s(now=now) if self.protocol.coordinates(self._stage, now=now) else 0.0

    def believes(self, commit: Commit) -> bool:
        """Whether a commit of this peer's generation that another replica tells of is proven."""
        self._observe()
        return self.protocol.believes(commit, self._core.generation)

    def lost(self, peer: PeerId) -> None:
        """The connection to `peer` broke: do not wait for its silence."""
        self._step(lambda _: self.protocol.lost(peer))

    # -- the loop ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Report on every change, and every second."""
        while True:
            await self._core.report_trigger.wait(quiet_s=REFRESH_S, gather_s=GATHER_S)
            if not self._silent:
                leads = self._step(lambda now: self.protocol.speak(now=now))
                self._directory.watch(self._stages_watched(leads=leads))

    async def close(self) -> None:
        """Stop talking."""
        await self._asking.close()
        await self._messages.close()

    async def say_leaving(self) -> None:
        """Tell the coordinator that this peer is gone, so that its silence is not waited for."""
        self._silent = True
        # A report that comes after it would count this peer in again.
        await self._messages.close(lambda key: key[1] == "report")
        coordinator = self.coordinator(self._stage)
        if coordinator is not None and coordinator != self._me:
            report = ReplicaReport(
                run=self._run.id, stage=self._stage, generation=self._core.generation,
                version=self._core.version, say_leaving=True,
            )  # fmt: skip
            with contextlib.suppress(SwarmError):
                await self._transport.call(coordinator, "report", pack(report), deadline_s=CALL_S)

    def _stages_watched(self, *, leads: bool) -> set[Stage]:
        """This stage and its neighbours, where answers are audited the one before, since chains begin there,
        those that share weights with it, and for a coordinator stage 0.
        """
        first = self._stage - (2 if is_audited(self._run) else 1)
        around = {stage for stage in range(first, self._stage + 2) if 0 <= stage < self._run.S}
        around |= self._core.compute.shared.names.keys()
        return around | {0} if leads else around

    # -- the protocol -----------------------------------------------------------------------------

    def _local(self) -> Local:
        core = self._core
        return Local(
            generation=core.generation, version=core.version, steps=core.steps, commits=core.commits,
            digest=core.digest, kind=core.kind, bandwidth_bps=self._all_reduce.bandwidth_bps,
            joined=core.joined, leaving=core.leaving, busy=core.busy,
        )  # fmt: skip

    def _observe(self, *, also: Stage = 0) -> float:
        """Let the protocol see what is; returns when that was."""
        now = now_s()
        every = self._run.admission.named  # commits are proven by all
        stages = range(self._run.S) if every else {0, self._stage, also}
        seen = {stage: self._directory.at(stage) for stage in stages}
        self.protocol.observe(self._local(), seen, now=now)
        return now

    def _step(self, event: Callable[[float], T], *, also: Stage = 0) -> T:
        """Let the protocol see what is, and then `event`; do what it says."""
        now = self._observe(also=also)
        try:
            return event(now)
        finally:
            self._carry_out(self.protocol.ready(now=now), now)

    def _carry_out(self, ready: Ready, now: float) -> None:
        for message in ready.messages:
            self._messages.post((message.to, METHODS[type(message.body)]), message)
        for action in ready.actions:
            match action:
                case AskWitnesses():
                    self._ask(self._ask_witnesses)
                case AskAbsent(t=t, peers=peers):
                    self._ask(lambda t=t, peers=peers: self._ask_absent(t, peers))
                case AskLostStage(generation=claimed):
                    self._ask(lambda claimed=claimed: self._ask_lost_stage(claimed))
                case _:
                    self.act(action)
        if ready.wake_at <= now:
            self._core.report_trigger.urgent()
        if self.protocol.run_status != self._shown:
            self._shown = self.protocol.run_status
            self._revision += 1
            pulse(self._revised)

    def _ask(self, question: Callable[[], Coroutine[None, None, None]]) -> None:
        """Ask one thing at a time: what is still of interest comes again."""
        if not self._asking:
            self._asking.create_task(question())

    async def _ask_lost_stage(self, claimed: Generation) -> None:
        """Ask replicas where they are: of a stage that is called lost, and of the others; some of each."""
        lost, asked = claimed.lost_stage, []
        records = [r for r in await self._directory.refresh({lost}) if r.state in ("serving", "leaving")]
        voice = self._core.voices.of_all()
        for group in ([r for r in records if r.stage == lost], [r for r in records if r.stage != lost]):
            peers = sorted(record.peer for record in group if record.peer != self._me)
            # Strangers may crowd out others without voice, but not in the same way everywhere.
            random.Random(self._me).shuffle(peers)
            asked += sorted(peers, key=lambda peer: peer not in voice)[:MAX_LOST_ASKED]
        told = {
            peer: (status.stage, status.position)
            for peer, status in (await ask_status(self._run, self._transport, asked)).items()
            if status.state in ("serving", "leaving")
        }
        self._step(lambda now: self.protocol.lost_stage_told(claimed, told, voice, now=now))

    async def _ask_absent(self, t: int, peers: Sequence[PeerId]) -> None:
        """Ask peers whose word is lacking, and about those of which it has been for long; do without that of
        those that are away, or say that they have nothing of the step.
        """
        told = await ask_status(self._run, self._transport, peers)
        there = {p: s for p, s in told.items() if s.state == "serving" and s.version == t}
        able = {peer for peer, status in there.items() if status.done or status.inflight}
        serving = {record.peer for record in self._directory.peers() if record.state == "serving"}
        able |= {peer for peer, status in told.items() if status.state == "serving"} - serving
        self.protocol.belief.excuse(t, set(peers) - able, there.keys() - able, able)
        await asyncio.gather(*map(self._word_overdue, self._overdue(peers, now_s())))
        self._core.report_trigger.urgent()  # the answer tells the commit again

    def _overdue(self, peers: Sequence[PeerId], now: float) -> list[PeerId]:
        """Note that the word of `peers` is lacking; returns those of which it has been for long."""
        lately = {peer: at for peer, at in self._lacking.items() if now - at.last_s < OVERDUE_S}
        begun = {peer: lately.get(peer, _Lacking(now, now)) for peer in peers}
        self._lacking = lately | {peer: at._replace(last_s=now) for peer, at in begun.items()}
        return sorted(peer for peer, at in begun.items() if now - at.since_s > OVERDUE_S)

    async def _ask_witnesses(self) -> None:
        """Ask replicas of the other stages for their positions: their coordinators may have slept as well."""
        others = [r for r in self._directory.peers() if r.state == "serving" and r.stage != self._stage]
        voice = self._core.voices.of_all()
        furthest = sorted(others, key=lambda r: (r.peer not in voice, -r.version, r.peer))[:MAX_WITNESSES]
        told = await ask_status(self._run, self._transport, [record.peer for record in furthest])
        for peer in heard(told, voice):
            self.protocol.witnessed = max(self.protocol.witnessed, told[peer].position)

    # -- sending ----------------------------------------------------------------------------------

    async def _send(self, key: tuple[PeerId, str], message: Message) -> None:
        """Send a message. A report is answered by a directive, a summary by a status of the run."""
        peer, method = key
        header, long = say(message.body)
        body = [*long, *(struct.pack(f"<{len(row)}d", *row) for row in message.losses)]
        came: Callable[..., None] | None = None
        try:
            answer = await self._transport.call(
                peer, method, header, body, max_answer_bytes=MAX_LONG_BYTES, deadline_s=CALL_S
            )
            if method == "report":
                directive = unpack_answer(peer, answer.header, Directive, answer.body)
                came = partial(self.protocol.directive_came, directive)
            elif isinstance(message.body, StageSummary):
                status = unpack_answer(peer, answer.header, RunStatus, answer.body)
                came = partial(self.protocol.run_status_came, peer, status, told=message.body)
        except PeerFault as fault:
            if method == "directive":
                self.lost(peer)
            elif method != "run":  # a stage coordinator that was not told asks again with its next summary
                silent = fault.silent
                self._step(lambda now: self.protocol.unreachable(peer, silent=silent, now=now))
        except SwarmError as error:
            if method == "report" and isinstance(error, (Refused, Leaving)):
                # It will not hear this peer, whichever is wrong: let the next one coordinate it meanwhile.
                self._core.backoff.failed(peer, now=now_s())
                self._core.report_trigger.some()
        else:
            if came is not None:
                self._core.backoff.answered(peer)
                self._step(lambda now: came(now=now))

    # -- serving ----------------------------------------------------------------------------------

    async def _long(self, request: Request, stage: Stage) -> Sequence[Buffer]:
        """The body of a message that is too large for a header: of a peer that is announced at `stage`."""
        if request.header:
            return ()
        await self._core.membership.require(request.peer, stage)
        return await request.accept()

    async def _serve_report(self, request: Request) -> Answer:
        long = await self._long(request, self._stage)
        report = hear(request.header, long[:1], ReplicaReport)
        due = [8 * count for count in self._step(lambda _: self.protocol.may_report(report))]
        await self._core.membership.require(request.peer, self._stage)
        losses: list[list[float]] = []
        if not report.say_leaving:
            if (given := list(request.body_sizes[len(long[:1]) :])) != due:
                raise Refused(f"losses of {given[:8]} bytes do not fit the ledgers: {due[:8]} were due")
            rows = long[1:] if long else await request.accept()
            losses = [list(struct.unpack(f"<{len(row) // 8}d", row)) for row in rows]
        take_in = partial(self.protocol.report, request.peer, report, losses)
        return Answer(*say(self._step(lambda now: take_in(now=now))))

    async def _serve_summary(self, request: Request) -> Answer:
        record = self._directory.find(request.peer)
        long = await self._long(request, record.stage if record is not None else 0)
        summary = hear(request.header, long, StageSummary)
        if summary.run != self._run.id or not 0 <= summary.stage < self._run.S:
            raise Refused(f"a summary of stage {summary.stage} of run {summary.run[:40]!r}")
        if self._stage == 0:
            await self._core.membership.require(request.peer, summary.stage)
        take_in = partial(self.protocol.summary, request.peer, summary)
        return Answer(*say(self._step(lambda now: take_in(now=now), also=summary.stage)))

    async def _serve_pushed(
        self, kind: type[M], stage: Stage, take_in: Callable[..., None], request: Request
    ) -> Answer:
        """Hear the coordinator of `stage`. Of others no body is taken, which may be large."""
        if request.body_sizes and request.peer != self.coordinator(stage):
            raise Refused(f"this peer takes no long message of yours: you do not coordinate stage {stage}")
        body = await request.accept() if request.body_sizes else ()
        message = hear(request.header, body, kind)
        self._step(lambda now: take_in(request.peer, message, now=now))
        return Answer(pack(Ack()))

    # -- for trainers -----------------------------------------------------------------------------

    @property
    def trainers(self) -> tuple[PeerId, ...]:
        """The peers that watch the run by this one; by id."""
        since = now_s() - WATCHED_S
        return tuple(sorted(peer for peer, at in self._watchers.items() if at > since))

    async def _serve_watch(self, request: Request) -> Answer:
        watch, named = unpack(request.header, Watch, self._run.id), self._run.admission.trainers
        if request.peer in named:
            self._trained[request.peer] = watch.position
        if request.peer in named or not named:
            self._watchers.pop(request.peer, None)
            self._watchers[request.peer] = now_s()
        lately = [self._trained[trainer] for trainer in self.trainers if trainer in self._trained]
        self.protocol.trained = max(lately, default=Position())
        if len(self._watchers) > MAX_WATCHERS:
            del self._watchers[next(iter(self._watchers))]
        if not self._core.joined:
            raise NotNow("this peer has not joined yet")
        if watch.seen == self._revision and watch.seen >= 0:
            await happens(self._revised, REFRESH_S)
        far = self.run_status.position
        if self._core.joined:
            far = max(far, self._core.position)
        watched = Watched(
            revision=self._revision, generation=far.generation, version=far.version,
            status=replace(self.run_status, commits=()),
        )  # fmt: skip
        return Answer(*say(watched))

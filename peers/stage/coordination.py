"""The IO around `StepProtocol`: it receives calls, sends messages and tells the time.

Whatever comes in goes through `_step`: the protocol sees this peer and the directory as they are now, then
what came in. The protocol's messages are sent here; its actions are done by the stage peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Callable
from typing import TypeVar

from peers.clock import now_s
from peers.latest_value import LatestValueSender
from peers.ports import Answer, Directory, Request, Transport
from peers.stage.membership import Membership
from peers.stage.state import StageCore
from peers.status_query import ask_status
from peers.waiting import happens
from swarm.errors import Leaving, NotNow, PeerFault, Refused, SwarmError
from swarm.ids import PeerId, Position, Stage
from swarm.policy.backoff import Backoff
from swarm.protocol.messages import Directive, ReplicaReport, RunStatus, StageSummary
from swarm.protocol.protocol import Message, Ready, StepProtocol
from swarm.protocol.replica import Action, AskWitnesses, Local
from swarm.protocol.timings import ProtocolTimings
from swarm.wire.messages import Ack, Watch, Watched, check_run, pack, unpack, unpack_answer

REFRESH_S = 1.0
GONE_AFTER_S = 3.5
GATHER_S = 0.1
"""Progress within this time travels in one report; what a step waits for goes at once."""
CALL_S = 3.0
"""Limit for one report or directive."""
MAX_WITNESSES = 8
WATCHED_S = 5.0
"""How long a trainer counts as watching: it asks once a second; after a lost answer, another peer."""
MAX_WATCHERS = 16

T = TypeVar("T")


class StepCoordination:
    """This peer's part in the coordination of its stage and, in stage 0, of the run.

    Args:
        act: called with each action; it makes the peer do it.
        busy: whether the peer takes a step or changes its whole state.
    """

    def __init__(
        self,
        core: StageCore,
        transport: Transport,
        directory: Directory,
        membership: Membership,
        backoff: Backoff,
        *,
        act: Callable[[Action], None],
        busy: Callable[[], bool],
        bandwidth: Callable[[], float],
        since_s: float,
        look_s: float,
        lost_s: float,
    ) -> None:
        self._core, self._transport, self._directory, self._backoff = core, transport, directory, backoff
        self._membership, self._act, self._busy, self._bandwidth = membership, act, busy, bandwidth
        self._run, self._stage, self._me = core.run, core.stage, core.me
        self._timings = ProtocolTimings(
            refresh_s=REFRESH_S, gone_after_s=GONE_AFTER_S, look_s=look_s, lost_s=lost_s
        )
        self.protocol = StepProtocol(
            core.run, core.stage, core.me, core.compute.numel, self._local(), backoff, self._timings,
            since_s=since_s,
        )  # fmt: skip
        self._asking: asyncio.Task[None] | None = None
        self._shown = self.protocol.run_status
        self._revision = 0
        self._revised = asyncio.Event()
        self._watchers: dict[PeerId, float] = {}
        """When each trainer last asked, the latest last."""
        self._silent = False
        self._reports = LatestValueSender(self._send_report)
        self._directives = LatestValueSender(self._send_directive)
        self._summaries = LatestValueSender(self._send_summary)
        self._run_statuses = LatestValueSender(self._send_run_status)
        transport.serve("report", self._serve_report, max_body_bytes=16 * self._run.M)
        transport.serve("directive", self._serve_directive)
        transport.serve("summary", self._serve_summary)
        transport.serve("run", self._serve_run)
        transport.serve("watch", self._serve_watch)

    # -- asked by the stage peer ------------------------------------------------------------------

    def coordinator(self, stage: Stage) -> PeerId | None:
        """The live serving peer of `stage` that joined first, as far as this peer can see."""
        now = self._observe(also=stage)
        return self.protocol.coordinator(stage, now=now)

    @property
    def directive(self) -> Directive | None:
        """The last directive that this peer followed."""
        return self.protocol.directive

    @property
    def run_status(self) -> RunStatus:
        return self.protocol.run_status

    @property
    def run_position(self) -> Position:
        """How far the run is, as far as the run coordinator told."""
        return self.protocol.run_position

    @property
    def behind_s(self) -> float:
        """For how long this stage, which this peer coordinates, has been unable to follow the run."""
        return self.protocol.behind_s(now=self._observe())

    def lost(self, peer: PeerId) -> None:
        """The connection to `peer` broke: do not wait for its silence."""
        self._step(lambda _: self.protocol.lost(peer))

    # -- the loop ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Report on every change, and every second."""
        while True:
            await self._core.report_trigger.wait(quiet_s=self._timings.refresh_s, gather_s=GATHER_S)
            self._speak()

    async def close(self) -> None:
        """Stop talking."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        for sender in (self._reports, self._directives, self._summaries, self._run_statuses):
            await sender.close()

    async def say_leaving(self) -> None:
        """Tell the coordinator that this peer is gone, so that its silence is not waited for."""
        self._silent = True
        await self._reports.close()  # a report that comes after it would count us in again
        coordinator = self.coordinator(self._stage)
        if coordinator is not None and coordinator != self._me:
            report = ReplicaReport(
                run=self._run.id,
                stage=self._stage,
                generation=self._core.generation,
                version=self._core.version,
                say_leaving=True,
            )
            with contextlib.suppress(SwarmError):
                await self._transport.call(coordinator, "report", pack(report), deadline_s=CALL_S)

    def _speak(self) -> None:
        if self._silent:
            return
        self._directory.watch(self._stages_watched(leads=self.coordinator(self._stage) == self._me))
        self._step(lambda now: self.protocol.speak(now=now))

    def _stages_watched(self, *, leads: bool) -> set[Stage]:
        """This stage and its neighbours, those that share weights with it, and for a coordinator stage 0."""
        around = {stage for stage in range(self._stage - 1, self._stage + 2) if 0 <= stage < self._run.S}
        around |= self._core.compute.shared.names.keys()
        return around | {0} if leads else around

    # -- the protocol -----------------------------------------------------------------------------

    def _local(self) -> Local:
        core = self._core
        return Local(
            generation=core.generation, version=core.version, steps=core.steps, commits=core.commits,
            digest=core.digest, kind=core.kind, bandwidth_bps=self._bandwidth(), joined=core.joined,
            leaving=core.leaving, busy=self._busy(),
        )  # fmt: skip

    def _observe(self, *, also: Stage = 0) -> float:
        """Let the protocol see what is; returns when that was."""
        now = now_s()
        seen = {stage: self._membership.at(stage) for stage in {0, self._stage, also}}
        self.protocol.observe(self._local(), seen, now=now)
        return now

    def _step(self, event: Callable[[float], T]) -> T:
        """Let the protocol see what is, and then `event`; do what it says."""
        now = self._observe()
        try:
            return event(now)
        finally:
            self._carry_out(self.protocol.ready(now=now), now)

    def _carry_out(self, ready: Ready, now: float) -> None:
        for message in ready.messages:
            self._post(message)
        for action in ready.actions:
            if isinstance(action, AskWitnesses):
                if self._asking is None or self._asking.done():
                    self._asking = asyncio.get_running_loop().create_task(self._ask_witnesses())
            else:
                self._act(action)
        if ready.wake_at <= now:
            self._core.report_trigger.urgent()
        if self.protocol.run_status != self._shown:
            self._shown = self.protocol.run_status
            self._revision += 1
            revised, self._revised = self._revised, asyncio.Event()
            revised.set()

    def _post(self, message: Message) -> None:
        if isinstance(message.body, ReplicaReport):
            self._reports.post(message.to, message)
        elif isinstance(message.body, Directive):
            self._directives.post(message.to, message)
        elif isinstance(message.body, StageSummary):
            self._summaries.post(message.to, message)
        else:
            self._run_statuses.post(message.to, message)

    async def _ask_witnesses(self) -> None:
        """Ask replicas of the other stages for their positions: their coordinators may have slept as well."""
        others = [r for r in self._directory.peers() if r.state == "serving" and r.stage != self._stage]
        furthest = sorted(others, key=lambda r: (-r.version, r.peer))[:MAX_WITNESSES]
        told = await ask_status(self._run, self._transport, [record.peer for record in furthest])
        for status in told.values():
            self.protocol.witness(status.position)

    # -- sending ----------------------------------------------------------------------------------

    async def _send_report(self, coordinator: PeerId, message: Message) -> None:
        body = [struct.pack(f"<{len(row)}d", *row) for row in message.losses]
        try:
            answer = await self._transport.call(
                coordinator, "report", pack(message.body), body, deadline_s=CALL_S
            )
            directive = unpack_answer(coordinator, answer.header, Directive)
        except PeerFault as fault:
            self._unreachable(coordinator, silent=fault.silent)
            return
        except (Refused, Leaving):
            # It will not hear us, whoever is wrong: let the next one coordinate us meanwhile.
            self._backoff.failed(coordinator, now=now_s())
            self._core.report_trigger.some()
            return
        except SwarmError:
            return
        self._backoff.answered(coordinator)
        self._step(lambda now: self.protocol.directive_came(directive, now=now))

    async def _send_directive(self, member: PeerId, message: Message) -> None:
        try:
            await self._transport.call(member, "directive", pack(message.body), deadline_s=CALL_S)
        except PeerFault:
            self.lost(member)
        except SwarmError:
            pass

    async def _send_summary(self, coordinator: PeerId, message: Message) -> None:
        try:
            answer = await self._transport.call(coordinator, "summary", pack(message.body), deadline_s=CALL_S)
            status = unpack_answer(coordinator, answer.header, RunStatus)
        except PeerFault as fault:
            self._unreachable(coordinator, silent=fault.silent)
            return
        except SwarmError:
            return
        self._backoff.answered(coordinator)
        self._step(lambda now: self.protocol.run_status_came(status, now=now))

    async def _send_run_status(self, peer: PeerId, message: Message) -> None:
        with contextlib.suppress(SwarmError):  # it asks again with its next summary
            await self._transport.call(peer, "run", pack(message.body), deadline_s=CALL_S)

    def _unreachable(self, peer: PeerId, *, silent: bool) -> None:
        self._step(lambda now: self.protocol.unreachable(peer, silent=silent, now=now))

    # -- serving ----------------------------------------------------------------------------------

    async def _serve_report(self, request: Request) -> Answer:
        report = unpack(request.header, ReplicaReport)
        self._step(lambda _: self.protocol.may_report(report))
        await self._membership.require(request.peer, self._stage)
        due = [8 * count for count in self.protocol.losses_due(report)]
        losses: list[list[float]] = []
        if not report.say_leaving:
            if list(request.body_sizes) != due:
                given = list(request.body_sizes)[:8]
                raise Refused(f"losses of {given} bytes do not fit the ledgers: {due[:8]} were due")
            body = await request.accept()
            losses = [list(struct.unpack(f"<{len(row) // 8}d", row)) for row in body]
        return Answer(
            pack(self._step(lambda now: self.protocol.report(request.peer, report, losses, now=now)))
        )

    async def _serve_directive(self, request: Request) -> Answer:
        directive = unpack(request.header, Directive)
        self._step(lambda now: self.protocol.hear_directive(request.peer, directive, now=now))
        return Answer(pack(Ack()))

    async def _serve_summary(self, request: Request) -> Answer:
        summary = unpack(request.header, StageSummary)
        if summary.run != self._run.id or not 0 <= summary.stage < self._run.S:
            raise Refused(f"a summary of stage {summary.stage} of run {summary.run[:40]!r}")
        if self.coordinator(0) == self._me:
            await self._membership.require(request.peer, summary.stage)
        status = self._step(lambda now: self.protocol.summary(request.peer, summary, now=now))
        return Answer(pack(status))

    async def _serve_run(self, request: Request) -> Answer:
        status = unpack(request.header, RunStatus)
        self._step(lambda now: self.protocol.hear_run_status(request.peer, status, now=now))
        return Answer(pack(Ack()))

    # -- for trainers -----------------------------------------------------------------------------

    @property
    def trainers(self) -> tuple[PeerId, ...]:
        """The peers that watch the run by this one; by id."""
        since = now_s() - WATCHED_S
        return tuple(sorted(peer for peer, at in self._watchers.items() if at > since))

    async def _serve_watch(self, request: Request) -> Answer:
        watch = unpack(request.header, Watch)
        check_run(watch.run, self._run.id)
        self._watchers.pop(request.peer, None)
        self._watchers[request.peer] = now_s()
        if len(self._watchers) > MAX_WATCHERS:
            del self._watchers[next(iter(self._watchers))]
        if not self._core.joined:
            raise NotNow("this peer has not joined yet")
        if watch.seen == self._revision and watch.seen >= 0:
            await happens(self._revised, self._timings.refresh_s)
        far = self.run_position
        if self._core.joined:
            far = max(far, self._core.position)
        watched = Watched(
            revision=self._revision, generation=far.generation, version=far.version, directive=self.run_status
        )
        return Answer(pack(watched))

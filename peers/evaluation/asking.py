"""A trainer's part in an evaluation: its samples through the stages, before a step begins.

What an evaluation comes to is neither signed nor audited. So in a run that names its trainers a loss
counts once two routes say it that share no peer, but where a stage has one alone whose word counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Sequence

from peers import events
from peers.ports import Buffer, Transport
from peers.status_query import ask_all
from peers.waiting import for_each, within
from swarm import evaluation
from swarm.errors import NotNow, PeerFault, Refused, Stale
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.model.stage_io import input_metas
from swarm.policy.router import NoPeerForStage
from swarm.wire.messages import Ack, EvalDone, Evaluate, Evaluated, pack, unpack_answer

AT_ONCE = 8
"""Microbatches of an evaluation in flight."""
TELL_S = 5.0
LEAST_S, TIMES_EXPECTED, UNKNOWN_S = 30.0, 3.0, 300.0
"""An evaluation may take three times what so many microbatches of training take, and is given up then: a peer
that answers those and no others holds the run up no longer."""
TRIES = 4
"""A call may take that part of this time."""
LAST_S = 120.0
"""For what the run came to: its peers may be gone by then."""
RETRY_S, MAX_RETRY_S = 0.2, 3.0
"""Pause of a microbatch that came to nothing: half as long again each time."""
MAX_ANSWERS = 16
"""Of a microbatch, whose routes do not agree."""


class Evaluations:
    """Those of one trainer: which are due, the one that runs, and what they came to."""

    def __init__(
        self, run: Run, entering: Callable[[list[int]], Awaitable[list[Buffer]]] | None,
        transport: Transport,
        counted: Callable[[Stage], Sequence[PeerId]], route: Callable[[Collection[PeerId]], list[PeerId]],
        failed: Callable[[PeerFault], None], emit: events.Emit, expected_s: Callable[[int], float],
    ) -> None:  # fmt: skip
        """`entering`: offsets -> what stage 0 is sent; None: there is nothing to evaluate on. `counted`: the
        peers of a stage whose word counts. `route`: one of these of each stage, and where there are others
        none of those given. `expected_s`: seconds of so many microbatches of training; infinite: unknown.
        """
        self._run, self._entering, self._transport = run, entering, transport
        self._counted, self._route, self._failed = counted, route, failed
        self._emit, self._expected_s = emit, expected_s
        self.losses: dict[int, float] = {}
        """Step -> what the weights before it came to."""
        self._given_up: set[int] = set()
        self._task: asyncio.Task[None] | None = None
        self._step = -1

    def first_due(self, t: int) -> float:
        """The first step from `t` on that has to be evaluated before it begins; infinite: none."""
        every = self._run.eval.every
        if self._entering is None or not every:
            return math.inf
        due = -(-t // every) * every
        while due in self.losses or due in self._given_up:
            due += every
        return due if due < self._run.steps else math.inf

    def begin(self, t: int, tell: Sequence[PeerId]) -> asyncio.Task[None]:
        """Evaluate the weights of step `t`, unless that is being done; those of another step no more. `tell`:
        peers that hear what it came to.
        """
        if self._step != t or self._task is None or self._task.done():
            self.stop()
            self._step, self._task = t, asyncio.get_running_loop().create_task(self._evaluate(t, tell))
        return self._task

    async def last(self, tell: Sequence[PeerId]) -> None:
        """Evaluate what the run came to, if that is due."""
        t = self._run.steps
        if self._entering is not None and evaluation.is_due(self._run, t) and t not in self.losses:
            done, _ = await asyncio.wait({self.begin(t, tell)}, timeout=LAST_S)
            if not done:
                self._emit(events.Trouble(text=f"the evaluation of the run's end took over {LAST_S:.0f} s"))
            self.check()

    def stop(self, *, before: float = math.inf) -> None:
        """Give up the one that runs, if its step is before that one."""
        if self._task is not None and self._step < before:
            self._task.cancel()

    async def close(self) -> None:
        """As `stop`, and wait for its end."""
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    def check(self) -> None:
        """Raise why the last one came to nothing, if it is not that its step is over."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def _evaluate(self, t: int, tell: Sequence[PeerId]) -> None:
        run, count = self._run, evaluation.microbatches(self._run)
        found, refusals = dict[int, float](), list[str]()
        expected_s = self._expected_s(count * evaluation.routes_needed(run))
        limit_s = max(LEAST_S, TIMES_EXPECTED * expected_s) if expected_s < math.inf else UNKNOWN_S

        async def one(e: int) -> None:
            if (loss := await self._loss(t, e, limit_s / TRIES, refusals)) is not None:
                found[e] = loss

        with contextlib.suppress(asyncio.TimeoutError):
            await within(for_each(range(count), one, AT_ONCE), limit_s)
        if len(found) < count:
            self._given_up.add(t)
            why = f"; the last refusal: {refusals[-1]}" if refusals else ""
            lack = f"{count - len(found)} of {count} microbatches have no loss that is believed{why}"
            text = f"the evaluation before step {t} is given up, and the run goes on: {lack}"
            self._emit(events.Trouble(text=text))
            return
        losses = [found[e] for e in range(count)]
        version, loss = evaluation.version_of(run, t), evaluation.mean_loss(losses, [1] * count)
        self.losses[t] = loss
        self._emit(events.Evaluated(version=version, loss=loss, samples=run.eval.samples))
        said = Evaluated(run=run.id, version=version, loss=loss)
        await ask_all(self._transport, tell, "evaluated", said, Ack, deadline_s=TELL_S)

    async def _loss(self, t: int, e: int, limit_s: float, refusals: list[str]) -> float | None:
        """Of one microbatch, by whichever peers; tries until as many routes as needed answer alike. None: of
        very many answers there are no such.

        One peer's word that it must not be, or that the step is over, is no proof.
        """
        assert self._entering is not None
        body, found, pause_s = list[Buffer](), list[tuple[list[PeerId], float]](), RETRY_S
        near = evaluation.ALIKE[self._run.dtype]
        while len(found) < MAX_ANSWERS:
            try:
                body = body or await self._entering(evaluation.eval_offsets(self._run, e))
                route = self._route({peer for there, _ in found for peer in there})
                loss = await self._ask(t, e, route, body, limit_s)
                alike = [one for there, one in found if self._are_apart(there, route)]
                alike = [one for one in alike if abs(one - loss) <= near * max(1.0, abs(one))]
                if len(alike) + 1 >= evaluation.routes_needed(self._run):
                    return (*alike, loss)[0]
                found.append((route, loss))
                if len(found) == 1:
                    continue
                refusals.append(f"routes answered with the losses {found[-2][1]:.6g} and {loss:.6g}")
            except PeerFault as fault:
                self._failed(fault)
            except Refused as refused:
                refusals.append(refused.text)
            except (NoPeerForStage, NotNow, Stale):
                pass
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_RETRY_S, 1.5 * pause_s)
        return None

    async def _ask(self, t: int, e: int, route: list[PeerId], body: list[Buffer], limit_s: float) -> float:
        metas = input_metas(self._run, 0)
        wanted = pack(Evaluate(run=self._run.id, t=t, e=e, route=tuple(route[1:]), tensors=metas))
        answer = await self._transport.call(route[0], "eval", wanted, body, deadline_s=limit_s)
        return unpack_answer(route[0], answer.header, EvalDone).loss

    def _are_apart(self, one: Sequence[PeerId], other: Sequence[PeerId]) -> bool:
        """Whether two routes share only peers that are alone in their stage."""
        shared = enumerate(zip(one, other, strict=False))
        return all(a != b or len(self._counted(stage)) < 2 for stage, (a, b) in shared)

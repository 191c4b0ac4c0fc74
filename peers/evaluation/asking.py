"""A trainer's part in an evaluation: its samples through the stages, before a step begins."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence

import numpy as np

from peers import events
from peers.ports import Buffer, Transport
from swarm.errors import NotNow, PeerFault, Refused, SetupError, Stale, SwarmError
from swarm.evaluation import eval_offsets, is_due, mean_loss, microbatches, version_of
from swarm.ids import Microbatch, PeerId
from swarm.manifest import Run
from swarm.model.stage_io import input_metas
from swarm.policy.router import NoPeerForStage
from swarm.wire.messages import EvalDone, Evaluate, Evaluated, pack, unpack_answer

AT_ONCE = 8
"""Microbatches of an evaluation in flight."""
CALL_S = 240.0
TELL_S = 5.0
LAST_S = 120.0
"""For what the run came to: its peers may be gone by then."""
RETRY_S = 0.2
MAX_REFUSALS = 5


class Evaluations:
    """Those of one trainer: which are due, the one that runs, and what they came to."""

    def __init__(
        self,
        run: Run,
        entering: Callable[[list[int]], list[Buffer]] | None,
        transport: Transport,
        route: Callable[[Microbatch], list[PeerId]],
        failed: Callable[[PeerFault], None],
        emit: Callable[[events.Event], None],
    ) -> None:
        """`entering`: offsets -> what stage 0 is sent; None: there is nothing to evaluate on."""
        self._run, self._entering, self._transport = run, entering, transport
        self._route, self._failed, self._emit = route, failed, emit
        self.losses: dict[int, float] = {}
        """Step -> what the weights before it came to."""
        self._task: asyncio.Task[None] | None = None
        self._step = -1

    def first_due(self, t: int) -> float:
        """The first step from `t` on that has to be evaluated before it begins; infinite: none."""
        every = self._run.eval.every
        if self._entering is None or not every:
            return math.inf
        due = -(-t // every) * every
        while due in self.losses:
            due += every
        return due if due < self._run.steps else math.inf

    def begin(self, t: int, tell: Sequence[PeerId]) -> None:
        """Evaluate the weights of step `t`, unless that is being done; those of another step no more. `tell`:
        peers that hear what it came to.
        """
        if self._step == t and self._task is not None and not self._task.done():
            return
        self.stop()
        self._step = t
        self._task = asyncio.get_running_loop().create_task(self._evaluate(t, tell))

    async def last(self, tell: Sequence[PeerId]) -> None:
        """Evaluate what the run came to, if that is due."""
        t = self._run.steps
        if self._entering is not None and is_due(self._run, t) and t not in self.losses:
            self.begin(t, tell)
            assert self._task is not None
            await asyncio.wait({self._task}, timeout=LAST_S)
            if (failure := self.failure) is not None:
                raise failure

    def stop(self) -> None:
        """Give up the one that runs."""
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """As `stop`, and wait for its end."""
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def failure(self) -> BaseException | None:
        """Why the last one came to nothing, if it is not that its step is over."""
        task = self._task
        return task.exception() if task is not None and task.done() and not task.cancelled() else None

    async def _evaluate(self, t: int, tell: Sequence[PeerId]) -> None:
        places, run = asyncio.Semaphore(AT_ONCE), self._run

        async def one(e: int) -> float:
            async with places:
                return await self._loss(t, e)

        tasks = [asyncio.ensure_future(one(e)) for e in range(microbatches(run))]
        try:
            losses = await asyncio.gather(*tasks)
        except Stale:
            return  # another trainer did not wait for this one
        finally:
            for task in tasks:
                task.cancel()
        version, loss = version_of(run, t), mean_loss(losses, [1] * len(losses))
        self.losses[t] = loss
        self._emit(events.Evaluated(version=version, loss=loss, samples=run.eval.samples))
        said = pack(Evaluated(run=run.id, version=version, loss=loss))

        async def say(peer: PeerId) -> None:
            with contextlib.suppress(SwarmError):
                await self._transport.call(peer, "evaluated", said, deadline_s=TELL_S)

        await asyncio.gather(*map(say, tell))

    async def _loss(self, t: int, e: int) -> float:
        """Of one microbatch, by whichever peers; tries until one route of them answers.

        Raises:
            Stale: the weights are gone: the step is over.
            SetupError: it is refused again and again.
        """
        assert self._entering is not None
        body, refusals = self._entering(eval_offsets(self._run, e)), 0
        while True:
            try:
                peer, *rest = self._route(Microbatch(t, 0))
                header = pack(
                    Evaluate(run=self._run.id, t=t, e=e, route=tuple(rest), tensors=input_metas(self._run, 0))
                )
                answer = await self._transport.call(peer, "eval", header, body, deadline_s=CALL_S)
                return unpack_answer(peer, answer.header, EvalDone).loss
            except PeerFault as fault:
                self._failed(fault)
            except Refused as refused:
                refusals += 1
                if refusals >= MAX_REFUSALS:
                    text = f"the evaluation before step {t} is refused again and again: {refused.text}"
                    raise SetupError(text) from None
            except (NoPeerForStage, NotNow):
                pass
            await asyncio.sleep(RETRY_S)


def reader(
    run: Run, data: object, entering: Callable[[Run, np.ndarray | list[np.ndarray]], list[Buffer]]
) -> Callable[[list[int]], list[Buffer]] | None:
    """Offsets -> what stage 0 is sent, of opened data; None: there are none."""
    if data is None:
        return None
    batch: Callable[[list[int]], np.ndarray | list[np.ndarray]] = data.batch  # type: ignore[attr-defined]
    return lambda offsets: entering(run, batch(offsets))

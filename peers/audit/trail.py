"""The trail of a replica: the last steps that it took, for those that write a transcript of the run."""

from __future__ import annotations

from collections.abc import Callable

from peers.ports import Answer, Request, Transport
from swarm.ids import Stage
from swarm.manifest import Run
from swarm.protocol.statements import sign
from swarm.wire.messages import AskTrail, Trail, pack, unpack
from swarm.wire.trails import MAX_STEPS, TookStep, TookSteps, pack_rows

KEPT = 4 * MAX_STEPS
"""Steps, of 0.3 kB each in memory: a keeper that starts again a minute later misses none."""


class OwnTrail:
    """Steps without a gap between them, up to the newest that was taken."""

    def __init__(self) -> None:
        self._start = 0
        self._steps: list[TookStep] = []

    @property
    def _end(self) -> int:
        return self._start + len(self._steps)

    def took(self, t: int, digest: str, total_sqnorm: float) -> None:
        """Note a step; what is not the one after the last, or of other weights, begins anew."""
        if t != self._end:
            self.begin(t)
        self._steps.append(TookStep(digest, total_sqnorm, ""))
        if len(self._steps) > KEPT:
            del self._steps[0]
            self._start += 1

    def weighs(self, version: int, digest: str) -> None:
        """Note the digest of the weights of a version."""
        place = version - 1 - self._start
        if 0 <= place < len(self._steps):
            self._steps[place] = self._steps[place]._replace(weights=digest)

    def begin(self, version: int) -> None:
        """Forget all: the weights of `version` are another replica's work, or a checkpoint's."""
        self._start, self._steps = version, []

    def between(self, since: int, until: int) -> tuple[int, list[TookStep]]:
        """The first step asked for that is known, and all from it on; the newest once it is hashed."""
        settled = self._end - (bool(self._steps) and not self._steps[-1].weights)
        first = max(since, self._start)
        last = min(until, settled, first + MAX_STEPS)
        return first, self._steps[first - self._start : max(last, first) - self._start]

    def serve(self, run: Run, stage: Stage, transport: Transport, kind: Callable[[], str]) -> None:
        """Answer `trail`."""

        async def answer(request: Request) -> Answer:
            ask = unpack(request.header, AskTrail, run.id)
            start, steps = self.between(ask.since, ask.until)
            took = TookSteps(stage, start, kind(), pack_rows(steps))
            return Answer(pack(Trail(steps=took, signature=sign(transport.signer, run.id, took))))

        transport.serve("trail", answer)

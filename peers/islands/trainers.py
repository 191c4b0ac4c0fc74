"""Training a run: a trainer for each of its islands, in one process; nearly always there is one."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from peers import events
from peers.islands.directory import telling_cells
from peers.ports import Directory, Transport
from peers.trainer import Batches, Trainer, TrainerSettings
from peers.waiting import for_each
from swarm.floats import mean_of
from swarm.manifest import Run


class IslandTrainers:
    """Runs the microbatches of all islands until the run is finished, or `leave` is called.

    Islands take their steps at different times. A step is told once each has taken it: with the mean of their
    losses, and the losses of microbatches in the order of all.
    """

    def __init__(
        self, run: Run, batches: Batches, transport: Transport, directory: Directory,
        settings: TrainerSettings, emit: events.Emit, *, held_out: Batches | None = None,
    ) -> None:  # fmt: skip
        """`held_out`: what the run is evaluated on. All islands have the same weights then: one does it."""
        self._emit = emit
        self._done: dict[int, dict[int, events.StepDone]] = {}
        """What islands told of a step, until all have."""
        self.trainers = [
            Trainer(
                run.island(number), batches, transport, directory, settings,
                telling_cells(run.island(number), partial(self._heard, number)),
                held_out=None if number else held_out,
            )
            for number in range(run.islands.count)
        ]  # fmt: skip
        for trainer in self.trainers:  # an island may be lost as long as another one is not done
            trainer.may_end = lambda: all(one.is_done for one in self.trainers)
            self.trainers[-1].verdicts.of_runs |= trainer.verdicts.of_runs  # the last one hears for all

    async def run(self) -> None:
        """Train. Raises as `Trainer.run`: then no island is trained any more."""
        await for_each(self.trainers, lambda trainer: trainer.run(), len(self.trainers))

    def leave(self) -> None:
        """Start nothing more and end `run`."""
        for trainer in self.trainers:
            trainer.leave()

    def _heard(self, number: int, event: events.Event) -> None:
        if isinstance(event, events.RolledBack):  # it takes those again
            for t in [t for t in self._done if t >= event.step]:
                self._done[t].pop(number, None)
        if not isinstance(event, events.StepDone):
            self._emit(event)
            return
        told = self._done.setdefault(event.t, {})
        told[number] = event
        if len(told) == len(self.trainers):
            self._emit(_together([told[n] for n in sorted(told)]))
            # What lacks some before that was told before one went back, or before this trainer began.
            self._done = {t: some for t, some in self._done.items() if t > event.t}


def _together(told: list[events.StepDone]) -> events.StepDone:
    means = [one.loss for one in told if one.loss is not None]
    losses = tuple(loss for one in told for loss in one.losses) if all(one.losses for one in told) else ()
    return replace(
        told[0], loss=mean_of(losses or means) if len(means) == len(told) else None, losses=losses,
        tokens_per_s=sum(one.tokens_per_s for one in told),
        peers=tuple(count for one in told for count in one.peers),
    )  # fmt: skip

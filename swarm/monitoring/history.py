"""What peers say of the steps that the run took: their losses and durations, by voice. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from swarm.floats import mean_of
from swarm.ids import PeerId
from swarm.manifest import Run
from swarm.protocol.voice import heard, median
from swarm.wire.messages import PastStep, PeerStatus

MAX_POINTS = 1000
"""Of a plot; above it, every second point is dropped."""
MAX_TELLERS = 5
"""Of one step of an island: so many peers are heard about it."""

Voice = Mapping[PeerId, int]


class History:
    """No peer is believed alone: of what several say of a step the median counts; of losses the mean of those
    of all islands."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.losses: dict[int, float] = {}
        """Version -> the loss of the step to it."""
        self.evaluations: dict[int, float] = {}
        """Version -> its loss on samples that are held out."""
        self._past: dict[int, dict[PeerId, tuple[int, PastStep]]] = {}
        """By version: what peers said of the step to it, and of which island they are."""
        self._spoken_of: set[int] = set()
        """Versions of which something was said since the last update."""

    def take(self, status: PeerStatus, voice: Voice) -> None:
        """Note what a peer says of its past."""
        if voice and status.peer not in voice:
            return  # strangers would be the first to be heard of a step
        island = status.stage // self._run.S
        for step in status.past:
            if step.version not in self._past and len(self._past) > 2 * MAX_POINTS:
                continue  # no peer serves, and strangers say what they like
            by = self._past.setdefault(step.version, {})
            if status.peer in by or sum(at == island for at, _ in by.values()) < MAX_TELLERS:
                by[status.peer] = island, step
                self._spoken_of.add(step.version)

    def update(self, fresh: Sequence[PeerStatus], version: int, voice: Voice) -> None:
        """Settle what was said of versions up to the run's, which those that answered lately are at."""
        of = Counter(status.stage // self._run.S for status in fresh)
        for of_version in [one for one in self._spoken_of if one <= version]:
            means = list[float]()
            for island in range(self._run.islands.count):
                told = self._told(of_version, voice)
                said = [(step.loss, p) for p, at, step in told if at == island and step.loss is not None]
                if said and len(said) >= min(2, of[island]):
                    means.append(median(said, voice, high=False))
            if len(means) == self._run.islands.count:
                self.losses[of_version] = mean_of(means)
        held_out: dict[int, list[tuple[float, PeerId]]] = {}
        first = [status for status in fresh if status.stage == 0]  # to them trainers say it
        for status in first:
            if status.eval_loss is not None and 0 <= status.eval_version <= version:
                held_out.setdefault(status.eval_version, []).append((status.eval_loss, status.peer))
        for of_version, losses in held_out.items():
            if len(losses) >= min(2, len(first)):
                self.evaluations[of_version] = median(losses, voice, high=False)
        for points in (self.losses, self._past, self.evaluations):
            if len(points) > MAX_POINTS:
                for of_version in sorted(points)[1:-1:2]:
                    del points[of_version]
        self._spoken_of = {one for one in self._spoken_of if one > version and one in self._past}

    def back_to(self, version: int) -> None:
        """Forget what came after `version`, to which the run went back."""
        for points in (self.losses, self._past, self.evaluations):
            for later in [one for one in points if one > version]:
                del points[later]

    def step_times(self, version: int, voice: Voice) -> tuple[tuple[int, float], ...]:
        """(version, seconds of the step to it), up to the run's version."""
        return tuple(
            (one, median(times, voice, high=False))
            for one in sorted(self._past)
            if one <= version
            and (times := [(step.took_s, peer) for peer, _, step in self._told(one, voice) if step.took_s])
        )

    def _told(self, version: int, voice: Voice) -> list[tuple[PeerId, int, PastStep]]:
        """What was said of the step to a version by those whose word counts, and of which island they are."""
        by = self._past.get(version, {})
        return [(peer, *by[peer]) for peer in heard(by, voice)]

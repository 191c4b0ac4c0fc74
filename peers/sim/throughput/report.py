"""Assumptions about a simulated run, and its report."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.plan.overlapped import StepTime


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Assumptions about the run and the live system. Defaults are those of the code, or measured."""

    window: int | None = None
    """Microbatches that a trainer keeps in flight; None: it learns how many (`swarm/policy/window.py`)."""
    trainers: int = 1
    delayed_updates: bool = False
    rebalance_every_s: float = 60.0
    """0: no peer moves."""
    checkpoint_every: int = 10
    """Steps; where a run goes back to when a stage has lost all its members."""
    detect_s: float = 0.1
    """Until a death is known: connections of a killed process break at once, silence takes 3.5 s."""
    report_s: float = 0.1
    """Between reports of what is lacking."""
    step_s: float = 0.0
    """Seconds at the end of a step besides the all-reduce and the latencies: optimizer, digest."""
    job_s: float = 0.0
    """Seconds of each forward and each backward besides its arithmetic."""
    max_inflight: float = math.inf
    """Microbatches that a peer takes at most; fewer if its memory holds fewer."""
    bin_s: float = 60.0
    """The width of a bin of `ThroughputReport.answered`."""


class Moved(msgspec.Struct, frozen=True):
    """A peer that the rule sent elsewhere."""

    at_s: float
    peer: str
    from_stage: Stage
    to_stage: Stage
    why: str


class ThroughputReport(msgspec.Struct):
    """The outcome of a simulated run until `end_s`."""

    microbatches: int
    """M, of a step."""
    stages: int
    end_s: float = 0.0
    version: int = 0
    """Steps that count: those of a run that went back are in only once."""
    step_ends_s: list[float] = []
    """When each version was taken, the last time."""
    bin_s: float = 60.0
    answered: list[int] = []
    """Microbatches answered to trainers, by bin of time."""
    busy_s: list[float] = []
    """Per stage, seconds that devices computed."""
    there_s: list[float] = []
    """Per stage, seconds that devices served it."""
    moves: list[Moved] = []
    joins: int = 0
    deaths: int = 0
    idle: int = 0
    """Joiners that no stage fits into."""
    spares: int = 0
    """How often a peer stood by because a step takes longer with it."""
    replayed: int = 0
    """Microbatches that a trainer ran again because what held them was gone."""
    recomputed: int = 0
    """Microbatches of a stage, computed for nothing: lost with a peer, or by a run that went back."""
    computed: int = 0
    """Microbatches of a stage, all in all: those that count, those of open steps, and `recomputed`."""
    open: int = 0
    """Of `computed`, in sums of steps that were not taken yet."""
    generations: int = 0
    """How often the run went back to a checkpoint."""
    boundary_bytes: float = 0.0
    reduce_bytes: float = 0.0
    download_bytes: float = 0.0
    waited_s: float = 0.0
    """Seconds in which some stage had no peer."""
    empty_s: list[float] = []
    """Per stage, seconds in which it had none."""
    predicted: StepTime | None = None
    """Of a step, if that was asked for."""
    events: int = 0

    @property
    def per_s(self) -> float:
        """Microbatches a second that count, over all of the time."""
        return self.version * self.microbatches / self.end_s if self.end_s else 0.0

    @property
    def utilisation(self) -> list[float]:
        """Per stage: the share of their time that its devices computed."""
        return [b / t if t else 0.0 for b, t in zip(self.busy_s, self.there_s, strict=True)]

    def step_s(self, *, skip: int = 2) -> float:
        """Seconds of a step, on average without the first few, in which windows and routers learn.

        Raises:
            SetupError: fewer steps than that were taken.
        """
        ends_s: Sequence[float] = self.step_ends_s
        if len(ends_s) < skip + 2:
            took = f"only {len(ends_s)} steps were taken in {self.end_s:.0f} s"
            raise SetupError(f"{took}: simulate for longer")
        return (ends_s[-1] - ends_s[skip]) / (len(ends_s) - 1 - skip)

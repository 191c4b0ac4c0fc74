"""Peers whose devices are played, in processes: a fork server imports this before it forks them.

Each computes one microbatch, and gives what came of it for all others, in the time that SWARM_JOB_S says
(`peers/fault_points.py`): queues, calls, lines and ends of steps are real, and the arithmetic is not.
"""

from __future__ import annotations

from dataclasses import replace

import swarm.model.stage
from scripts.bench.common.unhurried import Unhurried
from swarm.model.gradient_sum import Gradients


class Played(Unhurried):
    """Adds one microbatch of each step: a GPU adds in the time of its job, two cores for eight do not."""

    def add(self, found: Gradients) -> None:
        super().add(found if found.mb.m == 0 else replace(found, terms={}))


swarm.model.stage.StageCompute = Played

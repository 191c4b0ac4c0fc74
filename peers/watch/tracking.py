"""The dashboard for experiment trackers (`--report-to`): a picture of a run in, points of its curves out.

A tracker knows the run by its id, and points by the version of the weights. So a dashboard that is started
again goes on with the same curves, and so does one on another machine where the tracker keeps them online.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from swarm.errors import SetupError
from swarm.manifest import Run
from swarm.monitoring.health import HappeningKind, SwarmHealth

PROJECT = "swarm"
FOLDER = "runs"
"""TensorBoard's own default."""
FAULTS: frozenset[HappeningKind] = frozenset({"lost", "silent", "restarted", "went back", "stage lost"})

Log: TypeAlias = Callable[[int, Mapping[str, float]], None]
"""Takes the version of the weights, and numbers by name."""


class Report:
    """A face of the dashboard: each new version becomes a point."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._version, self._went_back, self._faults = -1, 0, 0
        self._told = {"loss": -1, "eval_loss": -1}
        """The last version of each curve of losses."""
        self._seen_at = float("-inf")

    def __call__(self, health: SwarmHealth) -> None:
        new = [line for line in health.happenings if line.at > self._seen_at]
        self._faults += sum(line.kind in FAULTS for line in new)
        self._seen_at = max([self._seen_at, *(line.at for line in new)])
        if health.went_back != self._went_back:
            self._went_back, self._version, self._told["loss"] = health.went_back, -1, health.version
        for name, losses in (("loss", health.losses), ("eval_loss", health.evaluations)):
            for version, loss in losses:
                if version > self._told[name]:
                    self._log(version, {name: loss})
                    self._told[name] = version
        if health.version <= self._version:
            return
        numbers: dict[str, float] = {"faults": self._faults, "trainers": len(health.trainers)}
        if health.tokens_per_s is not None:
            numbers["tokens_per_s"] = health.tokens_per_s
        numbers |= {f"peers/stage {stage.label}": stage.serving for stage in health.stages}
        self._log(health.version, numbers)
        self._version, self._faults = health.version, 0


def _wandb(run: Run) -> tuple[Log, Callable[[], object]]:
    import wandb

    opened = wandb.init(
        project=PROJECT, id=run.id, name=run.name, resume="allow", config={"manifest": run.to_toml()}
    )
    # Its own steps never go back, as a run does that restores a checkpoint.
    opened.define_metric("*", step_metric="version")
    return lambda version, numbers: opened.log({"version": version, **numbers}), opened.finish


def _tensorboard(run: Run) -> tuple[Log, Callable[[], object]]:
    from torch.utils.tensorboard.writer import SummaryWriter

    writer = SummaryWriter(f"{FOLDER}/{run.name}-{run.id}")

    def log(version: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, version)

    return log, writer.close


def _trackio(run: Run) -> tuple[Log, Callable[[], object]]:
    import trackio

    opened = trackio.init(project=PROJECT, name=f"{run.name}-{run.id}", resume="allow")
    return lambda version, numbers: opened.log(dict(numbers), step=version), trackio.finish


TRACKERS: dict[str, Callable[[Run], tuple[Log, Callable[[], object]]]] = {
    "wandb": _wandb,
    "tensorboard": _tensorboard,
    "trackio": _trackio,
}
"""Each opens its curves of a run: what takes points, and what ends it."""


@contextmanager
def reported(name: str, run: Run) -> Iterator[Report]:
    """A face that reports to a tracker while the block runs.

    Raises:
        SetupError: the tracker is not installed, or refuses.
    """
    try:
        log, close = TRACKERS[name](run)
    except ImportError:
        raise SetupError(f"--report-to {name} needs {name}: pip install 'swarm-train[{name}]'") from None
    except Exception as error:
        raise SetupError(f"--report-to {name}: {type(error).__name__}: {error}") from error
    try:
        yield Report(log)
    finally:
        close()

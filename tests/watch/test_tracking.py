"""What experiment trackers get of a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import msgspec
import pytest

from peers.watch import tracking
from peers.watch.tracking import Report, reported
from swarm.errors import SetupError
from swarm.ids import Generation
from swarm.monitoring.aggregator import Aggregator
from swarm.monitoring.health import Observation
from tests.watch.pictures import RUN, START, record, status, troubled

Point = tuple[int, dict[str, float]]


class Curves:
    """Notes the points."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.closed = 0

    def __call__(self, version: int, numbers: Mapping[str, float]) -> None:
        self.points.append((version, dict(numbers)))

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(version, numbers[name]) for version, numbers in self.points if name in numbers]


def test_each_version_is_a_point_with_loss_pace_peers_and_faults() -> None:
    aggregator, curves = Aggregator(RUN), Curves()
    report = Report(curves)
    names = {"a": 0, "b": 1, "c": 2, "d": 2}
    aggregator.observe(Observation(at=START, records=tuple(record(name, at) for name, at in names.items())))
    for version in range(4, 8):
        silent = {"d": "the connection broke"} if version == 6 else {}
        told = tuple(status(name, at, version) for name, at in names.items() if name not in silent)
        aggregator.observe(Observation(at=START + 2 * version, statuses=told, silent=silent))
        for _ in range(2):  # a picture with nothing new is no point
            report(aggregator.health(now=START + 2 * version))
    assert [version for version, _ in curves.of("loss")] == [4, 5, 6, 7]
    assert curves.of("loss")[0][1] == pytest.approx(4.6)
    assert curves.of("faults") == [(4, 0), (5, 0), (6, 1), (7, 0)], "since the point before"
    assert curves.of("peers/stage 2") == [(4, 2), (5, 2), (6, 1), (7, 2)]
    assert curves.of("trainers")[0] == (4, 1)
    assert curves.of("tokens_per_s")[-1] == (7, pytest.approx(RUN.tokens_per_step / 2))


def test_a_run_that_goes_back_takes_its_curve_back() -> None:
    aggregator, curves = Aggregator(RUN), Curves()
    report = Report(curves)
    aggregator.observe(Observation(at=START, records=(record("a", 0), record("b", 0))))
    for at, (number, version) in enumerate([(0, 5), (0, 6), (1, 2), (1, 3)]):
        told = (status("a", 0, version), status("b", 0, version))
        told = tuple(msgspec.structs.replace(one, generation=Generation(number, 2 * number)) for one in told)
        aggregator.observe(Observation(at=START + 2.0 * at, statuses=told))
        report(aggregator.health(now=START + 2.0 * at))
    assert [version for version, _ in curves.of("faults")] == [5, 6, 2, 3]
    assert curves.of("loss")[-1][0] == 3


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """wandb, trackio and TensorBoard's writer, without their packages: what they were told."""
    told: dict[str, Any] = {"points": [], "finished": 0}

    def log(numbers: dict[str, float], step: int | None = None) -> None:
        told["points"].append((step, numbers))

    def finish() -> None:
        told["finished"] += 1

    def init(**words: Any) -> Any:
        told["init"] = words
        return module

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            told["init"] = {"folder": folder}

        def add_scalar(self, name: str, number: float, version: int) -> None:
            log({name: number}, version)

        close = staticmethod(finish)

    for name in ("wandb", "trackio", "torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
        module: Any = ModuleType(name)
        module.init, module.log, module.finish, module.SummaryWriter = init, log, finish, SummaryWriter
        module.define_metric = lambda name, step_metric: told.update(by=(name, step_metric))
        monkeypatch.setitem(sys.modules, name, module)
    return told


@pytest.mark.parametrize("name", tracking.TRACKERS)
def test_a_tracker_knows_the_run_by_its_id_and_points_by_the_version(
    name: str, libraries: dict[str, Any]
) -> None:
    aggregator, at = troubled()
    with reported(name, RUN) as report:
        report(aggregator.health(now=at))
    assert RUN.id in str(libraries["init"].values())
    assert libraries["init"].get("resume", "allow") == "allow"
    assert libraries["finished"] == 1
    step, numbers = libraries["points"][-1]
    assert (step if step is not None else numbers["version"]) == 12
    assert any("loss" in numbers for _, numbers in libraries["points"])
    if name == "wandb":
        assert libraries["by"] == ("*", "version"), "its own steps never go back"


def test_a_tracker_that_is_not_there_or_refuses_is_said(
    libraries: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(SetupError, match=r"needs trackio: pip install 'swarm-train\[trackio\]'"):
        with reported("trackio", RUN):
            pass

    def refuses(**_: Any) -> None:
        raise RuntimeError("no api key")

    sys.modules["wandb"].init = refuses  # type: ignore[attr-defined]
    with pytest.raises(SetupError, match="--report-to wandb: RuntimeError: no api key"):
        with reported("wandb", RUN):
            pass

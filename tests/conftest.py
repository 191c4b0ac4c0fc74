"""What all tests share: a cache folder of their own, a profile for hypothesis, and UTC for who asks."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from hypothesis import HealthCheck, Phase, settings

# The time of an example says nothing on a shared machine. What fails is printed in a form that repeats it.
settings.register_profile(
    "swarm", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.register_profile("more", settings.get_profile("swarm"), max_examples=2000)
# For `scripts/test --quick`: the whole run has them all.
settings.register_profile("quick", settings.get_profile("swarm"), max_examples=10)
# For `scripts/bench/mutants.py`: that a test fails is enough, no matter how simply.
settings.register_profile(
    "noticing", settings.get_profile("swarm"), phases=[Phase.explicit, Phase.generate], database=None
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "swarm"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # What a shell starts in the background ignores Ctrl-C, and so would each program that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST_FIRST = (
    *("test_hangs.py", "test_chaos.py", "test_nat.py", "test_charter.py"),
    *("test_local_swarm.py", "test_health.py", "test_refusals.py", "test_dashboard.py"),
    *("test_brought.py", "test_islands.py", "test_behind_nat.py", "test_docs_run.py", "test_up.py"),
    *("test_exact.py", "test_fleet.py", "test_custom_model.py", "test_node.py", "test_keeper.py"),
    *("test_bootstrap.py", "test_pause.py", "test_slow_links.py", "test_vouchers.py"),
    *("test_leaving.py", "test_any_process_dies.py", "test_resume.py"),
)
"""Files of the process part, longest first: no core shall be idle at its end."""


gc.disable()  # while tests are imported nothing becomes garbage: looking for it took a third of the time


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage from here on, in what tests make."""
    try:
        return (yield)
    finally:
        for name, logger in logging.root.manager.loggerDict.items():
            if name.startswith("torch") and isinstance(logger, logging.Logger):
                logger.propagate = True  # else pytest puts handlers on all 42 six times a test
        gc.set_threshold(20_000, 20, 20)  # Python's own 700 looked thousands of times in a file of swarms
        gc.freeze()
        gc.enable()


LONG = frozenset(Path(__file__).with_name("long_tests.txt").read_text().split())
"""Made by `scripts/bench/test_times.py --long`: the quick part has nothing that takes long."""


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.partition("[")[0] in LONG:
            item.add_marker("long")
    if not config.getoption("every") and not any("::" in word for word in config.args):
        further = {item for item in items if item.get_closest_marker("further")}
        config.hook.pytest_deselected(items=list(further))
        items[:] = [item for item in items if item not in further]

    def place(item: pytest.Item) -> int:
        return LONGEST_FIRST.index(item.path.name) if item.path.name in LONGEST_FIRST else len(LONGEST_FIRST)

    items.sort(key=place)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", action="store_true", help="also the further cases of what some cases show")
    parser.addoption(
        "--rewrite", action="store_true", help="write the transcripts of tests/protocol/scenarios anew"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """A test of no other processes has so much CPU time: what else the machine does makes none of them fail.

    What waits for ever uses none, and has several times as long by the clock.
    """
    if any(item.get_closest_marker(mark) for mark in ("process", "net")):
        return None
    pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=5.0 * settings.timeout))
    end_clock = item.cancel_timeout  # type: ignore[attr-defined]

    def end() -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        end_clock()

    item.cancel_timeout = end  # type: ignore[attr-defined]
    signal.signal(signal.SIGPROF, lambda *_: pytest.fail(f"no end after {settings.timeout:g} CPU-s"))
    signal.setitimer(signal.ITIMER_PROF, settings.timeout)
    return True


@pytest.fixture(autouse=True)
def heeds_signals() -> Iterator[None]:
    """A program that a test runs in this process ignores signals at its end; the next test may need them."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module", autouse=True)
def little_garbage() -> None:
    """Garbage is looked for in what a file's tests make, not in what was there: a pause collects it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokens that tests cache, and results of their runs, do not land in the home of the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWARM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("SWARM_RESULTS", str(tmp_path_factory.mktemp("results")))
        yield


@pytest.fixture(scope="module")
def greenwich() -> Iterator[None]:
    """Local time is UTC, so that pictures are the same everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()

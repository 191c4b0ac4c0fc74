"""`swarm.local`: a module trained by real processes of this machine, of which none is left behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

import swarm
from peers.api.local_swarm import LocalSwarm
from peers.events import Event, Killed, PeerLost
from tests.api.nets import net, samples
from tests.process.swarm_processes import MARK, ROOT, family_of_mark

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """All processes of the test inherit it."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    yield mark
    family_of_mark(mark).assert_gone()


def run(steps: int) -> swarm.Run:
    return swarm.Run(
        model=net(), loss=functional.cross_entropy, data=samples(), stages=2, steps=steps,
        batch={"microbatches_per_step": 6}, optimizer={"lr": 0.01},
    )  # fmt: skip


def child_of(s: LocalSwarm, stage: int) -> int:
    """A peer's process."""
    processes = s._processes
    return next(child.pid for child, its in processes._stages.items() if its == stage)


async def test_a_swarm_with_two_deaths_gives_the_module_of_one_process_bit_for_bit(mark: str) -> None:
    """Inside of a running loop, as in a notebook. One peer is killed by us, one by somebody else."""
    found, heard = run(12), list[Event]()
    steps: list[swarm.Step] = []
    with swarm.local(found, peers=2, on_event=heard.append, progress=False) as s:
        for step in s:
            steps.append(step)
            if step.t == 2:
                killed = s.kill(stage=1)
            if step.t == 5:
                os.kill(child_of(s, 0), signal.SIGKILL)
    assert [step.t for step in steps] == list(range(12))
    dead = [peer for step in steps for peer in step.died]
    assert killed in dead and [event.peer for event in heard if isinstance(event, Killed)] == [killed]
    lost = {event.peer for event in heard if isinstance(event, PeerLost) and "signal 9" in event.why}
    assert len(lost) == 1 and lost.isdisjoint({killed})
    single = swarm.reference(found)
    for ours, its in zip(single, steps, strict=True):
        assert its.loss == ours.loss
        assert its.losses in ((), ours.losses)
    trained, expected = s.model().state_dict(), single.model().state_dict()
    assert list(trained) == list(expected)
    for name, weights in trained.items():
        assert torch.equal(weights, expected[name]), name
    assert s.tally.missing(found.terms) == s.tally.duplicated() == 0


def test_an_error_in_the_block_leaves_nothing_behind(mark: str) -> None:
    with pytest.raises(ZeroDivisionError):
        with swarm.local(run(1000), peers=1, progress=False) as s:
            assert len(family_of_mark(mark).processes) > 3
            raise ZeroDivisionError
    family_of_mark(mark).assert_gone()
    with pytest.raises(swarm.errors.SetupError, match="start the swarm first"):  # type: ignore[attr-defined]
        next(iter(s))


KERNEL = """
import time
import swarm
from tests.process.test_local_swarm import run
with swarm.local(run(1000), peers=1) as s:
    print("started", flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_notebook_that_is_killed_or_interrupted_leaves_nothing_behind(
    mark: str, number: signal.Signals
) -> None:
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    )
    with kernel:
        assert kernel.stdout is not None
        assert "started" in kernel.stdout.readline()
        family = family_of_mark(mark)
        kernel.send_signal(number)
        kernel.stdout.read()
    family.assert_gone()

"""`swarm.local`: a module trained by real processes of this machine, of which none is left behind."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import swarm
from peers.api.local_swarm import LocalSwarm
from peers.events import Contributed, Event, PeerJoined, PeerLost, Serving
from swarm.manifest import IslandsSpec, demo_run
from tests.api.nets import net, samples
from tests.process.forkserver import ForkServer
from tests.process.swarm_processes import LIMIT_S, MARK, ROOT, family_of_mark

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def forked_children(tracing_server: ForkServer) -> Iterator[None]:
    """The swarm's processes have imported already."""
    with tracing_server.fork_children():
        yield


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


@pytest.mark.usefixtures("forked_children")
async def test_a_swarm_that_a_peer_from_elsewhere_joins_survives_a_death(mark: str) -> None:
    """One peer for each stage, and one that joins from here, with the code that it was handed; then the only
    other peer of its stage dies. No step is taken again, and losses are those of one process, bit for bit.
    """
    found, steps = run(5000), list[swarm.Step]()
    heard, joined = list[Event](), list[Event]()
    with swarm.local(found, peers=1, on_event=heard.append, progress=False) as s:
        joining = asyncio.create_task(
            swarm.join_async(
                found.id, s.addresses[0], code=found.code, stage=0, device="cpu", on_event=joined.append
            )
        )
        await until(lambda: any(isinstance(event, Serving) for event in joined) or joining.done())
        await until(lambda: any(isinstance(event, PeerJoined) and event.stage == 0 for event in heard))
        os.kill(child_of(s, 0), signal.SIGKILL)
        for step in s:
            steps.append(step)
            if any(step.died for step in steps[:-4]):
                break
        joining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await joining
    (lost,) = [event.peer for event in heard if isinstance(event, PeerLost) and "signal 9" in event.why]
    assert [step.died for step in steps if step.died] == [(lost,)]
    assert [step.t for step in steps] == [*range(len(steps))]
    assert any(isinstance(event, Contributed) and event.microbatches for event in joined)
    for ours, its in zip(swarm.reference(found), steps, strict=False):
        assert (its.t, its.loss) == (ours.t, ours.loss) and its.losses in ((), ours.losses)


@pytest.mark.usefixtures("forked_children")
def test_islands_are_trained_by_peers_of_all_cells(mark: str) -> None:
    """Also when a stage of the second island is killed: as in one process, which has meetings too."""
    base = demo_run(stages=2, steps=18)
    terms = replace(
        base, model=replace(base.model, hidden=32, layers=2, ffn_hidden=64),
        islands=IslandsSpec(count=2, local_steps=5),
    )  # fmt: skip
    found, heard = swarm.Run.of(terms), list[Event]()
    with swarm.local(found, peers=1, on_event=heard.append, progress=False) as s:
        steps = list[swarm.Step]()
        for step in s:
            steps.append(step)
            if step.t == 7:
                s.kill(3)
    assert {event.stage for event in heard if isinstance(event, PeerJoined)} == {0, 1, 2, 3}
    assert any("3 is stage 1 of island 1 (cell 3)" in event.words() for event in heard)
    told = {at for at, (missing, _) in s.tally.audits.items() if missing == 0}
    assert {(cell, t) for cell in range(4) for t in range(18) if t not in (5, 11, 17)} <= told
    assert s.tally.duplicated() == 0 and s.tally.preemptions == 1
    own = list(single := swarm.reference(found))
    assert [step.t for step in own if step.loss is None] == [5, 11, 17]
    newest = {step.t: step for step in steps}
    assert all(newest[ours.t].losses in ((), ours.losses) for ours in own)
    assert all(torch.equal(value, single.weights()[name]) for name, value in s.weights().items())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it; the loop goes on."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.1)


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
from swarm.manifest import demo_run
with swarm.local(swarm.Run.of(demo_run(stages=1)), peers=1) as s:
    print("started", flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize(
    ("number", "portable"), [(signal.SIGKILL, ""), (signal.SIGKILL, "1"), (signal.SIGINT, "")]
)
def test_a_notebook_that_is_killed_or_interrupted_leaves_nothing_behind(
    mark: str, number: signal.Signals, portable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_PORTABLE", portable)
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

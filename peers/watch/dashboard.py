"""`swarm dashboard`: shows a run, or a recorded history, on the faces asked for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from peers.programs.tool_options import DashboardOptions
from peers.watch import history, tracking
from peers.watch.terminal import LiveScreen
from swarm.errors import SetupError
from swarm.manifest import Run
from swarm.monitoring.aggregator import Aggregator
from swarm.monitoring.health import Observation, SwarmHealth

MAX_WAIT_S = 10.0
"""Between two observations of a replay: a night without a recording is not sat through."""


class Board:
    """The newest picture, for all faces."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._aggregator = Aggregator(run)
        self.health = self._aggregator.health(now=time.time())
        self.faces: list[Callable[[SwarmHealth], None]] = []

    def take(self, observation: Observation) -> None:
        """Add an observation, and show what is known now."""
        self._aggregator.observe(observation)
        self.health = self._aggregator.health(now=observation.at)
        for face in self.faces:
            face(self.health)


async def run_dashboard(options: DashboardOptions) -> None:
    """Show, until interrupted or a replay is over.

    Raises:
        SetupError: nothing to look at, or nowhere to show it; the text says what to change.
    """
    if options.replay is not None:
        if options.run or options.join or options.record:
            raise SetupError("--replay shows a recorded history: it goes without --run, --join and --record")
        await _replay(options, options.replay)
        return
    if not options.run or not options.join:
        raise SetupError(
            "give --run and --join, or @FILE that has both, to look at a run; or --replay, for what --record "
            "wrote"
        )
    await _watch(options, options.run)


async def _watch(options: DashboardOptions, run_id: str) -> None:
    from peers.net.node import Node
    from peers.watch.monitor import Monitor

    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(Node(join=options.join, run_id=run_id))
        board = Board(await node.manifest())
        takes: list[Callable[[Observation], None]] = [board.take]
        if options.record is not None:
            most_bytes = int(options.record_max * 2**30)
            recorder = history.Recorder(options.record, board.run, most_bytes=most_bytes)
            takes.insert(0, stack.enter_context(recorder))
        async with _faces(options, board):
            check = node.directory.storage.check
            await Monitor(
                board.run, node.transport, node.directory, lambda seen: [take(seen) for take in takes],
                refused=lambda: check.rejected,
            ).run()  # fmt: skip


async def _replay(options: DashboardOptions, path: Path) -> None:
    run, observations = history.read(path)
    board = Board(run)
    async with _faces(options, board) as stays:
        before = float("inf")
        for observation in observations:
            await asyncio.sleep(min(max(0.0, observation.at - before) / options.speed, MAX_WAIT_S))
            before = observation.at
            board.take(observation)
        if before == float("inf"):
            raise SetupError(f"{path} holds nothing yet but its run: no observation was recorded")
        if stays:
            await asyncio.Event().wait()  # the last picture stays until we are stopped


@contextlib.asynccontextmanager
async def _faces(options: DashboardOptions, board: Board) -> AsyncIterator[bool]:
    """Put up the faces; True if there is more to see than lines that scroll by."""
    async with contextlib.AsyncExitStack() as stack:
        if options.web is not None:
            try:
                from peers.watch import web
            except ImportError as error:
                raise SetupError(f"--web needs {error.name}: pip install 'swarm-train[dashboard]'") from None
            address = await stack.enter_async_context(web.served(options.web, lambda: board.health))
            print(f"the dashboard is at {address}", flush=True)
        if options.metrics is not None:
            from peers.watch.metrics import registry_of, served

            place = stack.enter_context(served(options.metrics, registry_of(lambda: board.health)))
            print(f"metrics at {place}", flush=True)
        for name in dict.fromkeys(options.report_to):
            board.faces.append(stack.enter_context(tracking.reported(name, board.run)))
        screen = stack.enter_context(LiveScreen())
        board.faces.append(screen)
        yield screen.live or options.metrics is not None or options.web is not None

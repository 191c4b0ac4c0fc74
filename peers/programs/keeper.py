"""The program `swarm keeper`: puts `peers.transfer.keeper` on a node. Any machine with a disk will do."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from peers.events import Emit
from peers.net.node import Node
from peers.net.p2pd import Daemon
from peers.options import KeeperOptions
from peers.programs.roles import Networked, daemon_options, manifest, started
from swarm.errors import SetupError
from swarm.ids import Stage
from swarm.manifest import Run

if TYPE_CHECKING:  # torch is imported while p2pd starts
    from peers.transfer.keeper import CheckpointKeeper


class Keeper(Networked):
    """Keeps checkpoints on this machine's disk, and gives them to newcomers."""

    def __init__(self, options: KeeperOptions, *, emit: Emit) -> None:
        self._options, self._emit = options, emit
        self._keeping: CheckpointKeeper | None = None
        self._left = asyncio.Event()

    async def run(self) -> None:
        options = self._options
        daemon = Daemon.spawn(
            await daemon_options(options, options.join, self._emit), identity_path=options.identity
        )
        try:
            from peers.transfer.keeper import CheckpointKeeper, KeepingSettings
        except BaseException:
            daemon.close_now()
            raise
        async with Node(daemon=daemon, join=options.join, run_id=options.run) as node:
            self._node = node
            self._emit(started("keeper", node, options.run))
            run = await manifest(node, options.run)
            settings = KeepingSettings(
                folder=options.dir, keep=options.keep, stages=chosen_stages(run, options.stages),
                addresses=node.addresses, joined_at=time.time(),
            )  # fmt: skip
            keeping = self._keeping = CheckpointKeeper(
                run, node.transport, node.directory, settings, self._emit
            )
            node.transport.on_gone = keeping.peer_gone
            if self._left.is_set():
                keeping.leave()
            await keeping.run()

    async def leave(self) -> None:
        self._left.set()
        if self._keeping is not None:
            self._keeping.leave()


def chosen_stages(run: Run, wish: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The stages to keep, ascending.

    Raises:
        SetupError: the run has no such stage.
    """
    if wrong := [stage for stage in wish if stage >= run.S]:
        raise SetupError(f"--stages {wrong[0]}: run {run.name!r} has stages 0 to {run.S - 1}")
    return tuple(sorted(set(wish))) or tuple(range(run.S))

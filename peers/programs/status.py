"""`swarm status`: the peers of each stage and the progress of the run, by records and the peers' own words.

One observation of the dashboard's monitor, in its model (`swarm.monitoring.health`). `table` and `to_json`
are pure renderings of it; `run_status` asks over a network.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from peers.programs.tool_options import StatusOptions
from peers.start_line import start_line
from peers.watch.monitor import Monitor
from peers.watch.terminal import render
from swarm.errors import count
from swarm.manifest import Run
from swarm.monitoring.aggregator import Aggregator
from swarm.monitoring.health import Observation, SwarmHealth

MAX_JOINED = 3
"""Addresses in a line: one of them is up when it is pasted."""
ALL = 1 << 30
"""Lines: no screen is that high."""


def picture(run: Run, observation: Observation) -> SwarmHealth:
    aggregator = Aggregator(run)
    aggregator.observe(observation)
    return aggregator.health(now=observation.at)


def table(health: SwarmHealth, width: int) -> RenderableType:
    """For people: the dashboard's screen, as long as it takes, and what more there is to say."""
    notes = [Text(f"moves: {health.rebalance}")] if health.rebalance else []
    if handed_over := [peer for peer in health.peers if peer.memory_bytes]:
        moved_mb = sum(peer.memory_bytes for peer in handed_over) / 1e6
        text = f"{count(len(handed_over), 'peer')} handed over {moved_mb:,.1f} MB in memory, both ways"
        notes.append(Text(f"{text}: to others on the same machine"))
    return Group(render(health, width=width, height=ALL), *notes)


def join_line(health: SwarmHealth) -> str:
    """How to join, for when the bootstrap's line is lost; empty if no peer has said where it is dialled. Some
    of those that answer: first those that anyone can dial, last those behind a relay, which may go."""
    from peers.net.identity import CIRCUIT, is_public

    there = [peer.address for peer in health.peers if peer.address and not peer.why]
    best = sorted(there, key=lambda address: (CIRCUIT in address, not is_public(address)))[:MAX_JOINED]
    return f"\njoin with: {start_line('peer', health.run, *best)}" if best else ""


def to_json(health: SwarmHealth) -> str:
    return msgspec.json.encode(health).decode()


async def observe(run_id: str, join: Sequence[str], *, calls: bool = True) -> tuple[Run, Observation]:
    """Join the network, ask, and leave it. `calls`: the peers themselves are asked, too.

    Raises:
        SetupError: no route to any of `join`, or no peer knows that run.
    """
    from peers.net.node import Node

    async with Node(join=join, run_id=run_id) as node:
        run = await node.manifest()
        return run, await Monitor(run, node.transport, node.directory).once(calls=calls)


async def run_status(options: StatusOptions) -> None:
    health = picture(*await observe(options.run, options.join, calls=not options.no_calls))
    if options.json:
        print(to_json(health))
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
        console.print(table(health, console.width))
        console.print(join_line(health), soft_wrap=True, markup=False)

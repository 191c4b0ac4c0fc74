"""`swarm status`: the peers of each stage and the progress of the run, by records and the peers' own words.

One observation of all peers at once, in the dashboard's model (`swarm.monitoring.health`). `table` and
`to_json` are pure renderings of it; `run_status` asks over a network.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console, Group, RenderableType
from rich.text import Text

from peers.ports import Directory, Transport
from peers.programs.tool_options import StatusOptions
from peers.start_line import start_line
from peers.voices import Voices
from peers.watch.monitor import ASK_S, ask_or_why
from peers.watch.terminal import render
from swarm.errors import count
from swarm.ids import PeerId
from swarm.manifest import Run
from swarm.monitoring import validation
from swarm.monitoring.aggregator import Aggregator
from swarm.monitoring.health import Observation, SwarmHealth
from swarm.records import PeerRecord
from swarm.wire.messages import PeerStatus

ALL = 1 << 30
"""Lines: no screen is that high."""


async def ask(
    run: Run,
    transport: Transport | None,
    records: Sequence[PeerRecord],
    *,
    now: float,
    ask_s: float = ASK_S,
    directory: Directory | None = None,
    voice: dict[PeerId, int] | None = None,
) -> Observation:
    """The run by its records and, if there is a transport, by each peer's own answer; all asked at once.

    `voice`: how much the word of each counts.
    """
    ordered = sorted(records, key=lambda record: (record.stage, record.peer))
    there = tuple(validation.tidy(record) for record in ordered if record.state != "left")
    answers: list[PeerStatus | str | None] = []
    if transport is not None:
        answers = await asyncio.gather(
            *(ask_or_why(run, transport, r, deadline_s=ask_s, directory=directory, after=0) for r in there)
        )
    return Observation(
        at=now,
        records=there,
        statuses=tuple(answer for answer in answers if isinstance(answer, PeerStatus)),
        silent={r.peer: why for r, why in zip(there, answers, strict=False) if isinstance(why, str)},
        voice=voice,
    )


def picture(run: Run, observation: Observation) -> SwarmHealth:
    aggregator = Aggregator(run)
    aggregator.observe(observation)
    return aggregator.health(now=observation.at)


def table(health: SwarmHealth, width: int) -> RenderableType:
    """For people: the dashboard's screen, as long as it takes, and what more there is to say."""
    notes = [Text(f"moves: {health.rebalance}")] if health.rebalance else []
    if health.depends_on_routes:
        notes.append(
            Text("codec.adaptive: each microbatch counts once, but the weights depend on the routes")
        )
    if handed_over := [peer for peer in health.peers if peer.memory_bytes]:
        moved_gb = sum(peer.memory_bytes for peer in handed_over) / 1e9
        text = f"{count(len(handed_over), 'peer')} handed over {moved_gb:.3g} GB in memory, both ways"
        notes.append(Text(f"{text}: to others on the same machine"))
    return Group(render(health, width=width, height=ALL), *notes)


def join_line(health: SwarmHealth) -> str:
    """How to join, for when the bootstrap's line is lost; empty if no peer has said where it is dialled."""
    address = next((peer.address for peer in health.peers if peer.address and not peer.why), "")
    return f"\njoin with: {start_line('peer', health.run, address)}" if address else ""


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
        records = await node.directory.lookup_all()
        transport = node.transport if calls else None
        voice = Voices(run, node.transport.signer, node.directory).of_all()
        return run, await ask(run, transport, records, now=time.time(), directory=node.directory, voice=voice)


async def run_status(options: StatusOptions) -> None:
    health = picture(*await observe(options.run, options.join, calls=not options.no_calls))
    if options.json:
        print(to_json(health))
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
        console.print(table(health, console.width))
        console.print(join_line(health), soft_wrap=True, markup=False)

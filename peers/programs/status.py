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
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from peers.events import count
from peers.options import ListenOptions
from peers.ports import Directory, Transport
from peers.programs.tool_options import StatusOptions
from peers.voices import Voices
from peers.watch.display import clock
from peers.watch.monitor import ASK_S, ask_or_why
from swarm.errors import short
from swarm.ids import PeerId
from swarm.manifest import Run
from swarm.monitoring import validation
from swarm.monitoring.aggregator import Aggregator
from swarm.monitoring.health import Observation, SwarmHealth
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import PeerStatus


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
            *(ask_or_why(run, transport, r, deadline_s=ask_s, directory=directory) for r in there)
        )
    return Observation(
        at=now,
        records=there,
        statuses=tuple(answer for answer in answers if isinstance(answer, PeerStatus)),
        silent={r.peer: why for r, why in zip(there, answers, strict=False) if isinstance(why, str)},
        voice=voice,
    )


def picture(run: Run, observation: Observation) -> SwarmHealth:
    """The run's health by one observation."""
    aggregator = Aggregator(run)
    aggregator.observe(observation)
    return aggregator.health(now=observation.at)


def table(health: SwarmHealth) -> RenderableType:
    """For people."""
    loss = "" if health.loss is None else f", loss {health.loss:.4f}"
    there = count(sum(len(stage.peers) for stage in health.stages), "peer")
    if health.keepers:
        there += f", {count(len(health.keepers), 'keeper')}"
    head = Text(f"{health.name}  {health.run}\nstep {health.version} of {health.steps}{loss}, {there}")
    rows = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    named = any(peer.voice for peer in health.peers)
    columns = ("stage", "peer", "state", "version", "step", "in flight", "microbatches/s", "up", "device")
    for name in (*columns[:2], *(("voice",) if named else ()), *columns[2:]):
        rows.add_column(
            name, justify="left" if name in ("peer", "state", "device") else "right", no_wrap=True
        )
    for peer in health.peers:
        asked = peer.answered and peer.stage != NO_STAGE
        rows.add_row(
            "–" if peer.stage == NO_STAGE else str(peer.stage),
            short(peer.peer),
            *((str(peer.voice or "–"),) if named else ()),
            "no answer" if peer.why else peer.state,
            str(peer.version),
            f"{peer.done}/{health.microbatches_per_step}" if asked else "",
            f"{peer.inflight}/{peer.max_inflight}" if asked else "",
            f"{peer.speed:.2f}" if peer.speed else "–",
            "–" if peer.up_s is None else clock(peer.up_s),
            Text(peer.device),
            style="red" if peer.why else "",
        )
    notes = [Text(f"moves: {health.rebalance}")] if health.rebalance else []
    if health.depends_on_routes:
        notes.append(
            Text("codec.adaptive: each microbatch counts once, but the weights depend on the routes")
        )
    notes += [Text(f"! {alert.text}", style="yellow") for alert in health.alerts]
    return Group(head, Text(), rows, *notes)


def join_line(health: SwarmHealth) -> str:
    """How to join, for when the bootstrap's line is lost; empty if no peer has said where it is dialled."""
    address = next((peer.address for peer in health.peers if peer.address and not peer.why), "")
    return f"\njoin with: swarm peer --run {health.run} --join {address}" if address else ""


def to_json(health: SwarmHealth) -> str:
    """For programs: one object."""
    return msgspec.json.encode(health).decode()


async def observe(
    run_id: str, join: Sequence[str], options: ListenOptions, *, calls: bool = True
) -> tuple[Run, Observation]:
    """Join the network, ask, and leave it. `calls`: the peers themselves are asked, too.

    Raises:
        SetupError: no route to any of `join`, or no peer knows that run.
    """
    from peers.net.node import Node
    from peers.net.p2pd import DaemonOptions

    daemon = DaemonOptions(host=options.host, port=options.port, announce=options.announce)
    async with Node(options=daemon, join=join, run_id=run_id) as node:
        run = await node.manifest()
        records = await node.directory.lookup_all()
        transport = node.transport if calls else None
        voice = Voices(run, node.transport.signer, node.directory).of_all()
        return run, await ask(run, transport, records, now=time.time(), directory=node.directory, voice=voice)


async def run_status(options: StatusOptions) -> None:
    """Observe and print."""
    health = picture(*await observe(options.run, options.join, options, calls=not options.no_calls))
    if options.json:
        print(to_json(health))
    else:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
        console.print(table(health))
        console.print(join_line(health), soft_wrap=True, markup=False)

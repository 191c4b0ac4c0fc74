"""`swarm status`: who serves what, and how far the run is, by directory records and the peers' own words.

One look, at everybody at once, at the model that the dashboard shows (`swarm.policy.health`). `table` and
`to_json` are pure renderings of it; `run_status` puts the question on a network.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from peers.asking import ask_one
from peers.display import clock
from peers.events import count
from peers.ports import Transport
from swarm.errors import SwarmError, short
from swarm.ids import PeerId, Stage
from swarm.policy import claims
from swarm.policy.health import Look, SwarmHealth
from swarm.policy.observer import Observer
from swarm.records import NO_STAGE, PeerRecord
from swarm.run import Run, check_id
from swarm.wire.messages import PeerStatus

ASK_S = 4.0
"""Longer than the silence limit of a connection, so that a hung peer is named as such."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusOptions:
    """Which run to look at, and how."""

    run: str
    """Run id."""
    join: tuple[str, ...]
    """Addresses that end in `/p2p/<id>`."""
    host: str = "127.0.0.1"
    port: int = 0
    announce: tuple[str, ...] = ()
    json: bool = False
    no_calls: bool = False
    """Records only: the peers are not called."""


async def ask(
    run: Run, transport: Transport | None, records: Sequence[PeerRecord], *, now: float, ask_s: float = ASK_S
) -> Look:
    """The run by its records and, if there is a transport, by each peer's own answer; all asked at once."""
    there = tuple(claims.tidy(r) for r in sorted(records, key=_place) if r.state != "left")
    answers: list[PeerStatus | str] = []
    if transport is not None:
        answers = await asyncio.gather(*(_ask_or_why(run, transport, record, ask_s) for record in there))
    return Look(
        at=now,
        records=there,
        statuses=tuple(answer for answer in answers if not isinstance(answer, str)),
        silent={r.peer: why for r, why in zip(there, answers, strict=False) if isinstance(why, str)},
    )


def _place(record: PeerRecord) -> tuple[Stage, PeerId]:
    return record.stage, record.peer


async def _ask_or_why(run: Run, transport: Transport, record: PeerRecord, ask_s: float) -> PeerStatus | str:
    try:
        return await ask_one(run, transport, record, deadline_s=ask_s)
    except SwarmError as error:
        return claims.clean(error.text.removeprefix(f"peer {short(record.peer)}: "))


def picture(run: Run, look: Look) -> SwarmHealth:
    """The run's health by one look."""
    observer = Observer(run)
    observer.observe(look)
    return observer.health(now=look.at)


def table(health: SwarmHealth) -> RenderableType:
    """For people."""
    loss = "" if health.loss is None else f", loss {health.loss:.4f}"
    there = count(sum(len(stage.peers) for stage in health.stages), "peer")
    if health.keepers:
        there += f", {count(len(health.keepers), 'keeper')}"
    head = Text(f"{health.name}  {health.run}\nstep {health.version} of {health.steps}{loss}, {there}")
    rows = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for name in ("stage", "peer", "state", "version", "step", "in flight", "microbatches/s", "up", "device"):
        rows.add_column(
            name, justify="left" if name in ("peer", "state", "device") else "right", no_wrap=True
        )
    for peer in health.peers:
        asked = peer.answered and peer.stage != NO_STAGE
        rows.add_row(
            "–" if peer.stage == NO_STAGE else str(peer.stage),
            short(peer.peer),
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


def to_json(health: SwarmHealth) -> str:
    """For programs: one object."""
    return msgspec.json.encode(health).decode()


async def look(options: StatusOptions) -> tuple[Run, Look]:
    """Join the network, ask, and leave it.

    Raises:
        SetupError: no route to any of `join`, or nobody knows that run.
    """
    from peers.net.daemon import DaemonOptions
    from peers.net.node import Node

    daemon = DaemonOptions(host=options.host, port=options.port, announce=options.announce)
    async with Node(options=daemon, join=options.join, run_id=options.run) as node:
        run = check_id(await node.directory.fetch_manifest(options.run), options.run)
        records = await node.directory.survey()
        return run, await ask(run, None if options.no_calls else node.transport, records, now=time.time())


async def run_status(options: StatusOptions) -> None:
    """Look and print."""
    health = picture(*await look(options))
    if options.json:
        print(to_json(health))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table(health))

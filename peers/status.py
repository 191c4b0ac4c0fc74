"""`swarm status`: who serves what, and how far the run is, by directory records and the peers' own words.

`ask` talks over the ports; `RunView` is plain data, `table` and `to_json` are pure renderings of it.
`run_status` puts them on a network.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from peers.display import clock
from peers.events import count
from peers.ports import Transport
from swarm.errors import SwarmError, short
from swarm.ids import PeerId, Stage, Standing
from swarm.records import NO_STAGE, PeerRecord
from swarm.run import Run, check_id
from swarm.wire.messages import AskStatus, PeerStatus, pack, unpack_answer


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


ASK_S = 4.0
"""Longer than the silence limit of a connection, so that a hung peer is named as such."""

MAX_STATUS_BYTES = 10_000
MOST_WORDS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerView:
    """One peer: its record and, if it was asked, its answer or why there is none."""

    record: PeerRecord
    status: PeerStatus | None = None
    why: str = ""

    @property
    def version(self) -> int:
        return self.record.version if self.status is None else self.status.version

    @property
    def state(self) -> str:
        return self.record.state if self.status is None else self.status.state


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment."""

    run: Run
    peers: tuple[PeerView, ...]
    """Sorted by stage and peer id."""
    now: float
    """Unix seconds."""

    @property
    def version(self) -> int:
        """How far the run is: after it went back, peers that have not heard of it do not count."""
        said = [view.status for view in self.peers if view.status is not None]
        if said:
            return max(Standing(status.era, status.version) for status in said).version
        return max((view.version for view in self.peers if view.record.stage != NO_STAGE), default=0)

    @property
    def went_back(self) -> int:
        """How often the run went back to a checkpoint, since a stage had lost all its peers."""
        return max((view.status.era.number for view in self.peers if view.status is not None), default=0)

    @property
    def rebalance(self) -> str:
        """What most peers last decided about who moves, and why. Their words: printable, and not too many."""
        said = Counter(view.status.rebalance for view in self.peers if view.status is not None)
        said.pop("", None)
        words = max(said, key=lambda text: (said[text], text), default="")
        return "".join(c if c.isprintable() else "?" for c in words[:MOST_WORDS])

    @property
    def loss(self) -> float | None:
        """Of the last finished step, as the most advanced peer has it."""
        said = [
            view.status for view in self.peers if view.status is not None and view.status.loss is not None
        ]
        return max(said, key=lambda status: (status.version, status.peer)).loss if said else None

    def serving(self, stage: Stage) -> int:
        """Peers that serve a stage now."""
        return sum(
            view.record.stage == stage and view.state == "serving" and not view.why for view in self.peers
        )

    @property
    def keepers(self) -> tuple[PeerView, ...]:
        """Those who hold checkpoints and serve no stage."""
        return tuple(view for view in self.peers if view.record.stage == NO_STAGE)

    @property
    def problems(self) -> tuple[str, ...]:
        """What a person should look at, in words."""
        found = [
            f"stage {stage} has no peer: the run waits until one joins"
            for stage in range(self.run.S)
            if self.serving(stage) == 0
        ]
        found += [
            f"peer {short(view.record.peer)} does not answer: {view.why}" for view in self.peers if view.why
        ]
        audits = [view.status.audit for view in self.peers if view.status is not None]
        if missing := sum(audit.missing for audit in audits):
            found.append(
                f"{count(missing, 'microbatch')} missing from steps that were taken: report this bug"
            )
        if duplicated := sum(audit.duplicated for audit in audits):
            found.append(f"{count(duplicated, 'microbatch')} counted twice: report this bug")
        return tuple(found)


async def ask(
    run: Run, transport: Transport | None, records: Sequence[PeerRecord], *, now: float, ask_s: float = ASK_S
) -> RunView:
    """The run by its records and, if there is a transport, by each peer's own answer; all asked at once."""
    shown = sorted((r for r in records if r.state != "left"), key=lambda r: (r.stage, r.peer))
    if transport is None:
        views = [PeerView(record=record) for record in shown]
    else:
        views = await asyncio.gather(*(_ask_one(run, transport, record, ask_s) for record in shown))
    return RunView(run=run, peers=tuple(views), now=now)


async def _ask_one(run: Run, transport: Transport, record: PeerRecord, ask_s: float) -> PeerView:
    peer: PeerId = record.peer
    try:
        answer = await transport.call(
            peer, "status", pack(AskStatus(run=run.id)), max_answer_bytes=MAX_STATUS_BYTES, deadline_s=ask_s
        )
        return PeerView(record=record, status=unpack_answer(peer, answer.header, PeerStatus))
    except SwarmError as error:
        return PeerView(record=record, why=error.text.removeprefix(f"peer {short(peer)}: "))


def table(view: RunView) -> RenderableType:
    """For people."""
    run = view.run
    loss = "" if view.loss is None else f", loss {view.loss:.4f}"
    there = count(len(view.peers) - len(view.keepers), "peer")
    if view.keepers:
        there += f", {count(len(view.keepers), 'keeper')}"
    head = Text(f"{run.name}  {run.id}\nstep {view.version} of {run.steps}{loss}, {there}")
    rows = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for name in ("stage", "peer", "state", "version", "step", "in flight", "microbatches/s", "up", "device"):
        rows.add_column(
            name, justify="left" if name in ("peer", "state", "device") else "right", no_wrap=True
        )
    for peer in sorted(view.peers, key=lambda peer: peer.record.stage == NO_STAGE):
        record, status = peer.record, peer.status
        serves = record.stage != NO_STAGE
        speed = record.speed if status is None else status.speed
        rows.add_row(
            str(record.stage) if serves else "–",
            short(record.peer),
            "no answer" if peer.why else peer.state,
            str(peer.version),
            "" if status is None or not serves else f"{status.done}/{run.M}",
            "" if status is None or not serves else f"{status.inflight}/{status.max_inflight}",
            f"{speed:.2f}" if speed else "–",
            clock(max(0.0, view.now - record.since)) if record.since else "–",
            record.device,
            style="red" if peer.why else "",
        )
    notes: list[RenderableType] = [Text(f"moves: {view.rebalance}")] if view.rebalance else []
    if view.went_back:
        text = (
            f"a stage lost all its peers: the run went back to a checkpoint {count(view.went_back, 'time')}"
        )
        notes.append(Text(text))
    return Group(
        head, Text(), rows, *notes, *(Text(f"! {problem}", style="yellow") for problem in view.problems)
    )


def to_json(view: RunView) -> str:
    """For programs: one object."""
    run = view.run
    stages = [
        {
            "stage": stage,
            "serving": view.serving(stage),
            "peers": [_peer(p) for p in view.peers if p.record.stage == stage],
        }
        for stage in range(run.S)
    ]
    return msgspec.json.encode(
        {
            "run": run.id,
            "name": run.name,
            "at": view.now,
            "version": view.version,
            "steps": run.steps,
            "microbatches_per_step": run.M,
            "loss": view.loss,
            "stages": stages,
            "keepers": [_peer(keeper) for keeper in view.keepers],
            "rebalance": view.rebalance,
            "went_back": view.went_back,
            "problems": view.problems,
        }
    ).decode()


def _peer(view: PeerView) -> dict[str, object]:
    fields: dict[str, object] = dict(msgspec.to_builtins(view.record))
    fields.update(version=view.version, state=view.state, answered=view.status is not None, why=view.why)
    if view.status is not None:
        said = msgspec.to_builtins(view.status)
        fields.update(
            {name: said[name] for name in ("done", "inflight", "max_inflight", "computed", "speed", "audit")}
        )
    return fields


async def look(options: StatusOptions) -> RunView:
    """Join the network, ask, and leave it.

    Raises:
        SetupError: no route to any of `join`, or nobody knows that run.
    """
    from peers.net.daemon import DaemonOptions
    from peers.net.node import Node

    daemon = DaemonOptions(host=options.host, port=options.port, announce=options.announce)
    async with Node(options=daemon, join=options.join, run_id=options.run) as node:
        run = check_id(await node.directory.fetch_manifest(options.run), options.run)
        records = await node.directory.refresh()
        return await ask(run, None if options.no_calls else node.transport, records, now=time.time())


async def run_status(options: StatusOptions) -> None:
    """Look and print."""
    view = await look(options)
    if options.json:
        print(to_json(view))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table(view))

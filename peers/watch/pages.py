"""The web pages: the whole run, and one peer. What others wrote is shown as text."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nicegui import ui

from peers.events import time_of_day
from peers.watch import topology
from peers.watch.parts import Lines, Plot, Stats, Table, div, head
from peers.watch.terminal import clock
from swarm.errors import short
from swarm.ids import PeerId
from swarm.monitoring.health import Contribution, PeerHealth, Route, StageHealth, SwarmHealth

REFRESH_S = 2.0
MANY = 100
"""Peers, from which on the picture and tables of them are sent less often: of 500 they have 300 kB."""
MAX_WORKERS = 500
"""Rows of the table of contributions, the largest; a peer's page has its own, `/api/health` all."""
MANY_EVERY = 4
MAX_SHOWN = 60
"""Lines of the timeline on the page."""


def _sorted_as(label: str) -> int | str:
    """A number as one, so that a table sorts 10 after 9."""
    return int(label) if label.isdigit() else label


OF_A_STAGE: dict[str, Callable[[StageHealth], object]] = {
    "stage": lambda stage: _sorted_as(stage.label),
    "peers": lambda stage: stage.serving,
    "joining": lambda stage: stage.joining,
    "load": lambda stage: round(stage.load, 1),
    "version": lambda stage: stage.version,
    "work/s": lambda stage: round(stage.speed, 2),
    "slowest": lambda stage: short(stage.slowest or "–"),
    "fastest": lambda stage: short(stage.fastest or "–"),
}
OF_A_PEER: dict[str, Callable[[PeerHealth], object]] = {
    "id": lambda peer: peer.peer,
    "stage": lambda peer: _sorted_as(peer.label),
    "peer": lambda peer: short(peer.peer),
    "state": lambda peer: "no answer" if peer.why else "doubted" if peer.inconsistencies else peer.state,
    "device": lambda peer: peer.device,
    "version": lambda peer: peer.version,
    "work/s": lambda peer: round(peer.speed, 2),
    "busy": lambda peer: "–" if peer.busy is None else f"{100 * peer.busy:.0f} %",
    "in flight": lambda peer: f"{peer.inflight}/{peer.max_inflight}",
    "queue": lambda peer: round(peer.load, 1),
    "up": lambda peer: "–" if peer.up_s is None else clock(peer.up_s),
    "last": lambda peer: peer.last,
}
OF_WORK: dict[str, Callable[[Contribution], object]] = {
    "id": lambda row: row.peer,
    "peer": lambda row: short(row.peer) + ("" if row.here else " (gone)"),
    "stage": lambda row: _sorted_as(row.label),
    "computed": lambda row: row.computed,
    "share": lambda row: f"{100 * row.share:.1f} %",
}
OF_A_ROUTE: dict[str, Callable[[tuple[Route, PeerId]], object]] = {
    "id": lambda route: route[1],
    "peer": lambda route: short(route[1]),
    "kind": lambda route: route[0].kind,
    "Mbit/s": lambda route: round(route[0].bps / 1e6, 3),
}
STATS = ("stage", "state", "version", "work/s", "busy", "in flight", "queue", "up")
"""The columns of each table, and those that a peer's page begins with; a route is told with its other end."""


def _stamp(at: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at))


class WholeRun:
    """The run."""

    def __init__(self, health: Callable[[], SwarmHealth]) -> None:
        self._health, self._shown, self._ticks = health, None, 0
        self._title = head(back=False)
        self._stats = Stats("step", "loss", "held out", "tokens/s", "left", "peers", "trainers", "seen")
        self._bar = ui.linear_progress(0.0, show_value=False)
        self._alerts = div("").style("width: 100%").props('data-part="alerts" aria-live="polite"')
        self._alerted: tuple[Any, ...] = ()
        with ui.card():
            ui.label("Peers by stage, and the traffic between them").classes("title")
            self._picture = ui.html("", sanitize=False).classes("topology").style("width: 100%")
        with div("pair"):
            self._loss = Plot("Loss by step")
            self._step_times = Plot("Seconds by step")
        self._stages = Table("Stages", OF_A_STAGE, rows=16)
        self._peers = Table("Peers", OF_A_PEER, rows=25, search=True)
        with div("pair"):
            self._timeline = Lines("Timeline", "nothing has happened since we look")
            self._work = Table("Contributions", OF_WORK, rows=10)
        self._moves = Lines("Moves", "no moves have been decided yet")
        self._show()
        ui.timer(REFRESH_S, self._show)

    def _show(self) -> None:
        health = self._health()
        if health is self._shown:
            return
        self._shown = health
        self._title.set_text(f"{health.name}  {health.run}")
        serving = sum(stage.serving for stage in health.stages)
        there = sum(len(stage.peers) for stage in health.stages)
        self._stats.show(
            step=f"{health.version} / {health.steps}",
            loss="–" if health.loss is None else f"{health.loss:.4f}",
            **{"held out": f"{health.evaluations[-1][1]:.4f}" if health.evaluations else "–"},
            **{"tokens/s": "–" if health.tokens_per_s is None else f"{health.tokens_per_s:,.0f}"},
            left="–" if health.left_s is None else clock(health.left_s),
            peers=f"{serving} of {there}" if serving < there else str(there),
            trainers=str(len(health.trainers)),
            seen=time_of_day(health.at),
        )
        self._bar.set_value(health.version / health.steps)
        self._show_alerts(health)
        self._loss.show([[version, round(loss, 6)] for version, loss in health.losses])
        self._step_times.show([[version, round(took_s, 3)] for version, took_s in health.step_times])
        self._stages.show(health.stages)
        if there < MANY or self._ticks % MANY_EVERY == 0:
            self._picture.set_content(topology.svg(health))
            self._peers.show(health.peers)
        if len(health.contributions) < MANY or self._ticks % MANY_EVERY == 0:
            self._work.show(health.contributions[:MAX_WORKERS])
        self._ticks += 1
        self._timeline.show([f"{_stamp(h.at)}  {h.text}" for h in reversed(health.happenings[-MAX_SHOWN:])])
        self._moves.show([health.rebalance] if health.rebalance else [])

    def _show_alerts(self, health: SwarmHealth) -> None:
        if health.alerts == self._alerted:
            return
        self._alerted = health.alerts
        self._alerts.clear()
        with self._alerts:
            for alert in health.alerts:
                ui.label(alert.text).classes(f"alert {alert.level}")


class OnePeer:
    """A peer."""

    def __init__(self, health: Callable[[], SwarmHealth], peer: str) -> None:
        self._health, self._peer = health, peer
        head(back=True).set_text(f"peer {peer}")
        self._stats = Stats(*STATS)
        self._about = Lines("About it", "")
        with div("pair"):
            self._routes = Table("Traffic with", OF_A_ROUTE, rows=15)
            self._timeline = Lines("Timeline", "nothing has happened to it since we look")
        self._show()
        ui.timer(REFRESH_S, self._show)

    def _show(self) -> None:
        health = self._health()
        seen = next((peer for peer in health.peers if peer.peer == self._peer), None)
        work = next((row for row in health.contributions if row.peer == self._peer), None)
        about = [f"computed {work.computed:,} microbatches, {100 * work.share:.1f} % of all"] if work else []
        if seen is None:
            trains = self._peer in health.trainers
            self._stats.show(state="trains" if trains else "not here")
            about.append("it is a trainer" if trains else "no peer of this name is in the run now")
        else:
            self._stats.show(**{name: str(OF_A_PEER[name](seen)) for name in STATS})
            about += _about(seen)
        self._about.show(about)
        self._routes.show(
            (route, other)
            for route in health.routes
            if self._peer in (route.source, route.target)
            for other in {route.source, route.target} - {self._peer}
        )
        mine = [h for h in health.happenings if h.peer == self._peer]
        self._timeline.show([f"{_stamp(h.at)}  {h.text}" for h in reversed(mine)])


def _about(peer: PeerHealth) -> list[str]:
    audit = peer.audit
    lines = [
        f"device {peer.device}; uploads {peer.bandwidth_bps / 1e6:.1f} Mbit/s, measured",
        f"sent {peer.bytes_out / 1e6:,.1f} MB, received {peer.bytes_in / 1e6:,.1f} MB; of both "
        f"{peer.memory_bytes / 1e6:,.1f} MB in memory",
        f"audited {audit.steps} steps: {audit.missing} missing, {audit.duplicated} counted twice, "
        f"{audit.undone} undone in time",
    ]
    lines += [f"does not answer: {peer.why}"] if peer.why else []
    return lines + [f"doubted: {text}" for text in peer.inconsistencies]

"""The web pages: the whole run, and one peer. What others wrote is shown as text."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nicegui import ui

from peers.events import time_of_day
from peers.watch import topology
from peers.watch.display import clock
from peers.watch.parts import Lines, Plot, Stats, Table, div, head
from swarm.errors import short
from swarm.monitoring.health import Contribution, PeerHealth, StageHealth, SwarmHealth
from swarm.records import NO_STAGE

REFRESH_S = 2.0
MANY = 100
"""Peers, from which on the picture and tables of them are sent less often: of 500 they have 300 kB."""
MAX_WORKERS = 500
"""Rows of the table of contributions, the largest; a peer's page has its own, `/api/health` all."""
MANY_EVERY = 4
MAX_SHOWN = 60
"""Lines of the timeline on the page."""


def _stamp(at: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at))


def _state(peer: PeerHealth) -> str:
    return "no answer" if peer.why else "doubted" if peer.inconsistencies else peer.state


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


class WholeRun:
    """The run."""

    def __init__(self, health: Callable[[], SwarmHealth]) -> None:
        self._health, self._shown, self._ticks = health, None, 0
        self._title = head(back=False)
        self._stats = Stats("step", "loss", "tokens/s", "left", "peers", "trainers", "seen")
        self._bar = ui.linear_progress(0.0, show_value=False)
        self._alerts = div("").style("width: 100%").props('data-part="alerts" aria-live="polite"')
        self._alerted: tuple[Any, ...] = ()
        with ui.card():
            ui.label("Peers by stage, and the traffic between them").classes("title")
            self._picture = ui.html("", sanitize=False).classes("topology").style("width: 100%")
        with div("pair"):
            self._loss = Plot("Loss by step", time_axis=False)
            self._pace = Plot("Tokens per second", time_axis=True)
            self._step_times = Plot("Seconds by step", time_axis=False)
        self._stages = Table(
            "Stages", "stage", "peers", "joining", "load", "version", "work/s", "slowest", "fastest",
            key="stage", rows=16,
        )  # fmt: skip
        self._peers = Table(
            "Peers", "stage", "peer", "state", "device", "version", "work/s", "busy", "in flight", "queue",
            "up", "last", key="id", rows=25, search=True,
        )  # fmt: skip
        with div("pair"):
            self._timeline = Lines("Timeline", "nothing has happened since we look")
            self._work = Table("Contributions", "peer", "stage", "computed", "share", key="id", rows=10)
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
            **{"tokens/s": "–" if health.tokens_per_s is None else f"{health.tokens_per_s:,.0f}"},
            left="–" if health.left_s is None else clock(health.left_s),
            peers=f"{serving} of {there}" if serving < there else str(there),
            trainers=str(len(health.trainers)),
            seen=time_of_day(health.at),
        )
        self._bar.set_value(health.version / health.steps)
        self._show_alerts(health)
        self._loss.show([[version, round(loss, 6)] for version, loss in health.losses])
        self._pace.show([[round(1000 * at), round(pace, 1)] for at, pace in health.pace])
        self._step_times.show([[version, round(took_s, 3)] for version, took_s in health.step_times])
        self._stages.show([_stage_row(stage) for stage in health.stages])
        if there < MANY or self._ticks % MANY_EVERY == 0:
            self._picture.set_content(topology.svg(health))
            self._peers.show([_peer_row(peer) for peer in health.peers])
        if len(health.contributions) < MANY or self._ticks % MANY_EVERY == 0:
            self._work.show([_work_row(row) for row in health.contributions[:MAX_WORKERS]])
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


def _stage_row(stage: StageHealth) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "peers": stage.serving,
        "joining": stage.joining,
        "load": round(stage.load, 1),
        "version": stage.version,
        "work/s": round(stage.speed, 2),
        "slowest": short(stage.slowest or "–"),
        "fastest": short(stage.fastest or "–"),
    }


def _work_row(row: Contribution) -> dict[str, Any]:
    return {
        "id": row.peer,
        "peer": short(row.peer) + ("" if row.here else " (gone)"),
        "stage": row.stage,
        "computed": row.computed,
        "share": f"{100 * row.share:.1f} %",
    }


def _peer_row(peer: PeerHealth) -> dict[str, Any]:
    return {
        "id": peer.peer,
        "stage": "–" if peer.stage == NO_STAGE else peer.stage,
        "peer": short(peer.peer),
        "state": _state(peer),
        "device": peer.device,
        "version": peer.version,
        "work/s": round(peer.speed, 2),
        "busy": _percent(peer.busy),
        "in flight": f"{peer.inflight}/{peer.max_inflight}",
        "queue": round(peer.load, 1),
        "up": "–" if peer.up_s is None else clock(peer.up_s),
        "last": peer.last,
    }


class OnePeer:
    """A peer."""

    def __init__(self, health: Callable[[], SwarmHealth], peer: str) -> None:
        self._health, self._peer = health, peer
        head(back=True).set_text(f"peer {peer}")
        self._stats = Stats("stage", "state", "version", "work/s", "busy", "in flight", "queue", "up")
        self._about = Lines("About it", "")
        with div("pair"):
            self._routes = Table("Traffic with", "peer", "kind", "Mbit/s", key="id", rows=15)
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
            row = _peer_row(seen)
            named = {"stage": str(row["stage"]), "state": row["state"], "version": str(seen.version)}
            named |= {name: str(row[name]) for name in ("work/s", "busy", "in flight", "queue", "up")}
            self._stats.show(**named)
            about += _about(seen)
        self._about.show(about)
        self._routes.show(
            [
                {"id": other, "peer": short(other), "kind": route.kind, "Mbit/s": round(route.bps / 1e6, 3)}
                for route in health.routes
                if self._peer in (route.source, route.target)
                for other in {route.source, route.target} - {self._peer}
            ]
        )
        mine = [h for h in health.happenings if h.peer == self._peer]
        self._timeline.show([f"{_stamp(h.at)}  {h.text}" for h in reversed(mine)])


def _about(peer: PeerHealth) -> list[str]:
    audit = peer.audit
    lines = [
        f"device {peer.device}; uploads {peer.bandwidth_bps / 1e6:.1f} Mbit/s, measured",
        f"sent {peer.bytes_out / 1e6:,.1f} MB, received {peer.bytes_in / 1e6:,.1f} MB",
        f"audited {audit.steps} steps: {audit.missing} missing, {audit.duplicated} counted twice, "
        f"{audit.undone} undone in time",
    ]
    lines += [f"does not answer: {peer.why}"] if peer.why else []
    return lines + [f"doubted: {text}" for text in peer.inconsistencies]

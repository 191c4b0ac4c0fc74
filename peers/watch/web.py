"""The dashboard as a web page, and as plain JSON at `/api/health`. Read-only.

NiceGUI serves all that a page needs by itself: nothing is asked of another host. What others wrote is shown
as text: labels and cells are text to the browser, and `peers.watch.topology` escapes what it draws.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Response
from nicegui import ui
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse

from peers.events import time_of_day
from peers.programs.status import to_json
from peers.storage.atomic_file import as_setup_error
from peers.watch import topology
from peers.watch.metrics import is_address
from peers.watch.terminal import clock
from swarm.errors import short
from swarm.ids import PeerId
from swarm.monitoring.health import PeerHealth, PeerShare, PeerTraffic, StageHealth, SwarmHealth

CLOSE_S, MAX_OPEN = 3, 256
"""For open connections, at the end; and how many stay open: silent ones would take all of the files."""


@contextlib.asynccontextmanager
async def served(listen: tuple[str, int], health: Callable[[], SwarmHealth]) -> AsyncIterator[str]:
    """Serve the page while the block runs; `health` gives the newest picture. Yields its address.

    Raises:
        SetupError: the address is taken, or not of this machine.
    """
    host, port = listen
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with as_setup_error(
            f"cannot serve the web page at {host}:{port}", ". Choose another port with --web"
        ):
            place.bind(listen)
        port = place.getsockname()[1]
        config = uvicorn.Config(
            _ByAddress(_app(health)), log_level="error", access_log=False, timeout_graceful_shutdown=CLOSE_S
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[place]))
        try:
            while not server.started and not serving.done():
                await asyncio.sleep(0.01)
            yield f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        finally:
            server.should_exit = True
            await asyncio.gather(serving, return_exceptions=True)


class _ByAddress:
    """Answers those only that ask for an address, or for localhost.

    Any web page can have its own name lead to this machine, and its scripts would read what is served under
    that name (DNS rebinding).
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        app: Any = self._app
        if scope["type"] in ("http", "websocket") and not is_address(Headers(scope=scope).get("host", "")):
            text = "this is no name of a dashboard: open it by an address, such as http://127.0.0.1:PORT/"
            app = PlainTextResponse(text, status_code=421)
        await app(scope, receive, send)


class _Server(uvicorn.Server):
    """Signals are the program's, not the server's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        held = sorted(self.server_state.connections, key=lambda one: getattr(one, "scope", None) is None)
        for silent in held[MAX_OPEN:]:  # they come last: no request has begun
            silent.transport.abort()
        return await super().on_tick(counter)


def _app(health: Callable[[], SwarmHealth]) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/api/health")
    def api_health() -> Response:
        return Response(to_json(health()), media_type="application/json")

    @ui.page("/", title="swarm")
    def whole() -> None:
        WholeRun(health)

    @ui.page("/peer/{peer}", title="swarm: a peer")
    def one(peer: str) -> None:
        OnePeer(health, peer)

    # Any visitor can have a line logged, by an address or over the page's socket; a bug has its traceback.
    logging.getLogger("nicegui").addFilter(lambda record: record.exc_info is not None)
    ui.run_with(app, dark=None, tailwind=False, show_welcome_message=False, title="swarm")
    return app


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
OF_WORK: dict[str, Callable[[PeerShare], object]] = {
    "id": lambda row: row.peer,
    "peer": lambda row: short(row.peer) + ("" if row.here else " (gone)"),
    "stage": lambda row: _sorted_as(row.label),
    "computed": lambda row: row.computed,
    "share": lambda row: f"{100 * row.share:.1f} %",
}
OF_A_ROUTE: dict[str, Callable[[tuple[PeerTraffic, PeerId]], object]] = {
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
    def __init__(self, health: Callable[[], SwarmHealth]) -> None:
        self._health, self._ticks = health, 0
        self._shown: SwarmHealth | None = None
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
            self._timeline = TextLines("Timeline", "nothing has happened since we look")
            self._work = Table("Contributions", OF_WORK, rows=10)
        self._moves = TextLines("Moves", "no moves have been decided yet")
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
        self._loss.show([(version, round(loss, 6)) for version, loss in health.losses])
        self._step_times.show([(version, round(took_s, 3)) for version, took_s in health.step_times])
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
    def __init__(self, health: Callable[[], SwarmHealth], peer: str) -> None:
        self._health, self._peer = health, peer
        head(back=True).set_text(f"peer {peer}")
        self._stats = Stats(*STATS)
        self._about = TextLines("About it", "")
        with div("pair"):
            self._routes = Table("Traffic with", OF_A_ROUTE, rows=15)
            self._timeline = TextLines("Timeline", "nothing has happened to it since we look")
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


GREY = "#8a8a8a"


def div(classes: str) -> ui.element:
    return ui.element("div").classes(classes)


def head(back: bool) -> ui.label:
    """The first line, with the switch between dark and light. Returns the label to its left."""
    ui.add_css(Path(__file__).with_name("page.css"))
    ui.dark_mode(None)
    with div("head"):
        if back:
            ui.link("← the run", "/")
        label = ui.label().classes("title grow")
        toggle = ui.button(icon="contrast").props('flat round aria-label="dark or light"')
    toggle.on("click", js_handler="() => Quasar.Dark.toggle()")  # only the browser knows what it was
    return label


class Stats:
    """A row of numbers with their names."""

    def __init__(self, *names: str) -> None:
        self._labels: dict[str, ui.label] = {}
        with div("stats"):
            for name in names:
                with ui.card():
                    ui.label(name).classes("faint")
                    self._labels[name] = ui.label("–").classes("number").props(f'data-stat="{name}"')

    def show(self, **numbers: str) -> None:
        for name, text in numbers.items():
            self._labels[name.replace("_", " ")].set_text(text)


class TextLines:
    """Lines of text, or a word that there are none."""

    def __init__(self, title: str, none: str) -> None:
        self._none = none
        with ui.card():
            ui.label(title).classes("title")
            self._label = ui.label(none).classes("lines")

    def show(self, lines: Sequence[str]) -> None:
        self._label.set_text("\n".join(lines) or self._none)


LEFT = frozenset({"peer", "state", "device", "slowest", "fastest", "last"})


class Table:
    """A table whose rows change; one that leads to the page of its peer if it has one."""

    def __init__(
        self, title: str, columns: Mapping[str, Callable[[Any], object]], *, rows: int, search: bool = False
    ) -> None:
        """`columns`: what stands in each, of one thing; that named `id` is not shown, and names its peer."""
        self._cells, key = columns, "id" if "id" in columns else next(iter(columns))
        heads = [
            {"name": n, "label": n, "field": n, "sortable": True, "align": "left" if n in LEFT else "right"}
            for n in columns
            if n != "id"
        ]
        with ui.card():
            with div("head"):
                ui.label(title).classes("title grow")
                find = ui.input(placeholder="find").props("dense clearable") if search else None
            self._table = ui.table(rows=[], columns=heads, row_key=key, pagination=rows).props("dense flat")
        if find is not None:
            find.bind_value_to(self._table, "filter")
        if key == "id":
            self._table.on(
                "row-click", lambda event: ui.navigate.to(f"/peer/{event.args[1]['id']}"), [None, ["id"]]
            )
            self._table.style("cursor: pointer")

    def show(self, things: Iterable[Any]) -> None:
        rows = [{name: of(thing) for name, of in self._cells.items()} for thing in things]
        if rows != self._table.rows:
            self._table.rows = rows
            self._table.update()


class Plot:
    """A line over its x."""

    def __init__(self, title: str) -> None:
        axis = {"type": "value", "axisLine": {"lineStyle": {"color": GREY}}}
        axis["splitLine"] = {"lineStyle": {"color": "#8883"}}
        with ui.card():
            ui.label(title).classes("title")
            self._chart = ui.echart(
                {
                    "grid": {"left": 55, "right": 15, "top": 15, "bottom": 30},
                    "textStyle": {"color": GREY},
                    "animation": False,
                    "tooltip": {"trigger": "axis"},
                    "xAxis": {**axis, "min": "dataMin", "max": "dataMax", "axisLabel": {"hideOverlap": True}},
                    "yAxis": {**axis, "scale": True},
                    "series": [{"type": "line", "showSymbol": False, "data": []}],
                }
            ).classes("plot")

    def show(self, points: list[tuple[int, float]]) -> None:
        series = self._chart.options["series"][0]
        if points != series["data"]:
            series["data"] = points
            series["showSymbol"] = len(points) == 1
            self._chart.update()

"""The dashboard as a web page, and as plain JSON at `/api/health`. Read-only.

NiceGUI serves all that a page needs by itself: nothing is asked of another host. What others wrote is shown
as text: labels and cells are text to the browser, and `peers.watch.topology` escapes what it draws.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
from fastapi import FastAPI, Response
from nicegui import ui

from peers.programs.status import to_json
from peers.storage.atomic_file import told
from peers.watch.pages import OnePeer, WholeRun
from swarm.monitoring.health import SwarmHealth

CLOSE_S = 3
"""For open connections, at the end."""


@contextlib.asynccontextmanager
async def served(listen: tuple[str, int], health: Callable[[], SwarmHealth]) -> AsyncIterator[str]:
    """Serve the page while the block runs; `health` gives the newest picture. Yields its address.

    Raises:
        SetupError: the address is taken, or not of this machine.
    """
    host, port = listen
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with told(f"cannot serve the web page at {host}:{port}", ". Choose another port with --web"):
            place.bind(listen)
        port = place.getsockname()[1]
        config = uvicorn.Config(
            _app(health), log_level="warning", access_log=False, timeout_graceful_shutdown=CLOSE_S
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


class _Server(uvicorn.Server):
    """Signals are the program's, not the server's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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

    ui.run_with(app, dark=None, tailwind=False, show_welcome_message=False, title="swarm")
    return app

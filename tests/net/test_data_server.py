"""Servers that data come from, over real sockets and in real time."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem

from peers.storage import fetch

pytestmark = pytest.mark.net
PART, WHOLE = (f"HTTP/1.1 {status}\r\nContent-Length: 1000000\r\n\r\n".encode() for status in (206, 200))
CHUNKS = b"HTTP/1.1 206 Part\r\nTransfer-Encoding: chunked\r\n\r\n"
SENT: dict[str, Sequence[bytes]] = {
    "fast": (PART, bytes(1_000_000).replace(b"\0", b"x")),
    "part": (PART, *100 * [b"x"]),
    "whole": (WHOLE, *100 * [b"x"]),
    "status": (b"H", *100 * [b"T"]),
    "header": (b"HTTP/1.1 206 Part\r\nX: ", *100 * [b"x"]),
    "interim": 1_000_000 * (b"HTTP/1.1 100 Continue\r\n\r\n",),
    "extension": (CHUNKS, b"1;", *100 * [b"x"]),
    "trailer": (CHUNKS, b"1\r\nx\r\n0\r\n", *1_000_000 * [b"X: y\r\n"]),
}
"""By path: what is sent, a single byte now and then."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    monkeypatch.setattr(fetch, "ANSWER_S", 0.3)

    class Odd(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(OSError):
                for part in SENT[self.path[1:]]:
                    self.wfile.write(part)
                    time.sleep(0.1 if len(part) == 1 else 0)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Odd)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield http
    http.shutdown()
    http.server_close()
    thread.join()


def test_a_name_with_many_dead_addresses_is_given_up_in_the_time_for_one(
    server: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as on_end:
        dead = on_end.enter_context(socket.socket())
        dead.bind(("127.0.0.1", 0))
        dead.listen(0)
        for _ in range(3):  # those that wait to be taken: of further ones nothing is heard
            waiting = on_end.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(dead.getsockname())
        places, looked_up = [dead.getsockname()] * 300, socket.getaddrinfo

        def resolved(host: str, port: int, *more: Any, **options: Any) -> list[Any]:
            if host != "many.example":
                return looked_up(host, port, *more, **options)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

        monkeypatch.setattr(socket, "getaddrinfo", resolved)
        began = time.monotonic()
        with pytest.raises(OSError, match="timed out"):
            fetch.read("http://many.example/part", 0, 1)
        assert time.monotonic() - began < 2.0
        places[2:] = [("127.0.0.1", server.server_port)]
        assert fetch.read("http://many.example/fast", 0, 1) == b"x", "one of a few that is not dead is found"


@pytest.mark.parametrize("path", ["part", "whole"])
def test_a_server_that_sends_a_byte_now_and_then_is_gone(server: ThreadingHTTPServer, path: str) -> None:
    began, address = time.monotonic(), f"http://127.0.0.1:{server.server_port}/{path}"
    with pytest.raises(ConnectionError, match="it sends less than 4096 bytes a second") as caught:
        fetch.read(address, 500_000, 900_000)
    assert time.monotonic() - began < 5 and fetch.may_come(address, caught.value)


@pytest.mark.parametrize("path", ["status", "header", "interim", "extension", "trailer"])
def test_a_server_whose_answer_has_no_end_is_gone(server: ThreadingHTTPServer, path: str) -> None:
    began, address = time.monotonic(), f"http://127.0.0.1:{server.server_port}/{path}"
    with pytest.raises(ConnectionError, match="its answer has no end") as caught:
        fetch.read(address, 0, 400)
    assert time.monotonic() - began < 5 and fetch.may_come(address, caught.value)


def test_another_store_that_does_not_answer_is_gone(server: ThreadingHTTPServer) -> None:
    class Silent(AsyncFileSystem):
        protocol = "silent"

        async def _cat_file(self, path: str, **_: Any) -> bytes:
            await asyncio.Event().wait()
            return b""

    fsspec.register_implementation("silent", Silent)
    with pytest.raises(OSError) as caught:
        fetch.read("silent://there", 0, 400)
    assert fetch.may_come("silent://there", caught.value)

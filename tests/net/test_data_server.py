"""Servers that data come from, over real sockets and in real time."""

from __future__ import annotations

import contextlib
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from peers.storage import fetch


@pytest.mark.net
@pytest.mark.parametrize("path", ["part", "whole"])
def test_a_server_that_sends_a_byte_now_and_then_is_gone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "ANSWER_S", 0.3)

    class Trickle(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(206 if self.path == "/part" else 200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.1)

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Trickle)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        began, address = time.monotonic(), f"http://127.0.0.1:{http.server_port}/{path}"
        with pytest.raises(ConnectionError, match="it sends less than 4096 bytes a second") as caught:
            fetch.read(address, 500_000, 900_000)
        assert time.monotonic() - began < 5 and fetch.may_come(address, caught.value)
    finally:
        http.shutdown()
        http.server_close()
        thread.join()

"""A folder of this machine as a web server."""

from __future__ import annotations

import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


class Handler(SimpleHTTPRequestHandler):
    """Files, whole or in ranges; also for who takes it for a proxy."""

    def do_GET(self) -> None:
        self.path = urlsplit(self.path).path
        if elsewhere := self.server.moved.get(self.path):  # type: ignore
            self.send_response(302)
            self.send_header("Location", elsewhere)
            self.end_headers()
            return
        path = Path(self.translate_path(self.path))
        asked = self.server.asked  # type: ignore
        asked.append(self.path)
        if not path.is_file():
            self.send_error(404, "Gone")
            return
        data, ranged = path.read_bytes(), self.headers.get("Range")
        if ranged and "whole" not in self.path:
            first, last = map(int, ranged.removeprefix("bytes=").split("-"))
            data = data[first : last + 1]
            self.send_response(206)
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


class Server:
    """A folder over HTTP."""

    def __init__(self, folder: Path, handler: type[Handler] = Handler) -> None:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder)))
        self.asked: list[str] = []
        self._http.asked = self.asked  # type: ignore
        self.moved = self._http.moved = dict[str, str]()  # type: ignore
        """Where some paths lead."""
        self.folder, self.url = folder, f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

"""Bytes of files that may be far away: paths, https://, hf:// and whatever else fsspec reads."""

from __future__ import annotations

import http.client
import io
import ipaddress
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from swarm.installed import first_line

HUB = "https://huggingface.co"
_HTTP = ("http://", "https://")
_HUB_FILE = re.compile(r"hf://(datasets/|spaces/)?([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")
ANSWER_S = 30.0
"""A server that sends nothing for so long is taken for gone."""
LEAST_S = 0.1
"""For each of its addresses."""
LEAST_BYTES_S = 4096
"""So is one that sends less than that, on the whole, after ANSWER_S."""
WHOLE_S = 600.0
"""Longer than others may take, for one that sends files from their beginning on, whatever is asked for."""
STORES = ("https", "http", "hf", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "r2")
"""What an index from afar may name. Other kinds of fsspec's read on this machine, or by its own programs."""


def is_far(address: str) -> bool:
    """Whether it is an address, and not a path of this machine."""
    return "://" in address


def beside(index: str, address: str) -> str:
    """An address that an index names, which is relative to where the index is; from afar never a path of this
    machine. Raises ValueError: it came from afar, and names what is none of STORES.
    """
    if "\0" in address:
        raise ValueError(f"{address!r} names no file")
    if not is_far(index):
        return address if is_far(address) else str(Path(index).parent / address)
    if is_far(address) and address.partition("://")[0] not in STORES:
        raise ValueError(address)
    if is_far(address):
        return address
    path = address.lstrip("/")  # in which any character may be
    return f"{index.rpartition('/')[0]}/{quote(path) if index.startswith(_HTTP) else path}"


def read(
    address: str, start: int = 0, end: int | None = None, *, most: int = 1 << 30, named_by: str = ""
) -> bytearray:
    """Some bytes of a file, fewer where it ends before.

    `hf://[datasets/]OWNER/NAME[@REVISION]/FILE` is of Hugging Face, as HF_ENDPOINT and HF_TOKEN say.
    `named_by`: where the index is that names the address, which the user named; "": the user did.

    Raises:
        FileNotFoundError: it is not there, or not for everybody.
        OSError: they cannot be had; says why.
    """
    count = most if end is None else end - start
    if not is_far(address):
        with Path(address).open("rb") as file:
            file.seek(start)
            return _at_most(file, count)
    try:
        if address.startswith("hf://"):
            return _over_http(_at_hub(address), start, count, os.environ.get("HF_TOKEN", ""))
        if address.startswith(_HTTP):
            return _over_http(address, start, count, named_by=named_by)
        import fsspec.core

        system, path = fsspec.core.url_to_fs(address)
        if not system.async_impl:
            return bytearray(system.cat_file(path, start=start, end=start + count))
        part: dict[str, Any] = {"start": start, "end": start + count}
        limit_s = ANSWER_S + count / LEAST_BYTES_S
        found: Any = fsspec.asyn.sync(system.loop, system._cat_file, path, timeout=limit_s, **part)
        return bytearray(found)
    except OSError:
        raise
    except Exception as error:
        raise OSError(first_line(error)) from error


def may_come(address: str, error: OSError) -> bool:
    """Whether what cannot be had now may be later: its server does not answer, or is too busy."""
    if not is_far(address) or isinstance(error, FileNotFoundError):
        return False
    code = getattr(error, "code", 503)  # of an answer over HTTP
    return code >= 500 or code in (408, 429)


def _at_hub(address: str) -> str:
    found = _HUB_FILE.fullmatch(address)
    if found is None:
        raise FileNotFoundError(2, f"{address} is no hf://[datasets/]OWNER/NAME[@REVISION]/FILE")
    kind, repository, revision, file = found.groups(default="")
    hub = os.environ.get("HF_ENDPOINT") or HUB
    return f"{hub}/{kind}{repository}/resolve/{revision or 'main'}/{quote(file)}"


_private: set[str] = set()
"""Addresses that the user named, and that are in a private network."""


class _Http(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """One request, and where its answers lead: from the internet into no private network."""

    handler_order = 499  # behind proxies, and before urllib's own for FTP

    def __init__(self, may_be_private: bool) -> None:
        super().__init__()
        self.may_be_private = may_be_private

    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> Any:
        by_proxy = urllib.request.Request(req.full_url).host != req.host  # then it is the proxy that connects

        def connect(place: tuple[str, int], *more: Any) -> socket.socket:
            found = _connected(*place)
            ip = found.getpeername()[0]  # a name can lead elsewhere each time that it is looked up
            is_private = not by_proxy and not ipaddress.ip_address(ip).is_global
            if is_private and not self.may_be_private:
                found.close()
                raise FileNotFoundError(
                    2,
                    f"it leads to {req.full_url}, which is {ip} in a private network, where only an index "
                    "there, or on this machine, may lead",
                )
            self.may_be_private = is_private
            return found

        def connection(*place: Any, **more: Any) -> Any:
            made = http_class(*place, **more)
            made._create_connection = connect  # before TLS, and before anything is sent
            made.response_class = _Answer
            return made

        return super().do_open(connection, req, **options)

    def ftp_open(self, req: urllib.request.Request) -> None:
        raise FileNotFoundError(2, f"it leads to {req.full_url}, which is not HTTP")


def _connected(host: str, port: int) -> socket.socket:
    """As `socket.create_connection`, but all addresses of a name share ANSWER_S: hundreds may be dead."""
    until, why = time.monotonic() + ANSWER_S, OSError("its name has no address")
    there: Any = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, at in there:
        left_s = until - time.monotonic()
        try:
            found = socket.create_connection(at[:2], max(LEAST_S, left_s / 2))
        except OSError as error:
            why = error
            if left_s < LEAST_S:
                break
        else:
            found.settimeout(ANSWER_S)
            return found
    raise why


class _InTime(io.RawIOBase):
    """What a server sends, but for what comes too late."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file, self.until = file, time.monotonic() + ANSWER_S

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        if time.monotonic() > self.until:
            raise ConnectionError("its answer has no end")
        return self._file.readinto1(room)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """One that ends: headers, answers before it, and ends of chunks may be any number, and of any length."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.in_time = _InTime(self.fp)
        self.fp = io.BufferedReader(self.in_time)

    def read(self, amt: int | None = None) -> bytes:
        return b""  # urllib would take all that comes with a redirect


def _over_http(address: str, start: int, count: int, token: str = "", named_by: str = "") -> bytearray:
    request = urllib.request.Request(address, headers={"Range": f"bytes={start}-{start + count - 1}"})
    if token:  # for this server, and for none that it sends us to
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    ours = _Http(not is_far(named_by) or named_by in _private)
    try:
        with urllib.request.build_opener(ours).open(request, timeout=ANSWER_S) as answer:
            if ours.may_be_private and not named_by:
                _private.add(address)
            left = start if answer.status == 200 else 0  # it sends the whole file
            answer.in_time.until += count / LEAST_BYTES_S + (WHOLE_S if left else 0.0)
            for _ in _parts(answer, left):
                pass
            there = answer.length if answer.length is not None else 0
            found = _at_most(answer, count)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 404):
            raise FileNotFoundError(2, f"HTTP {error.code} of {address}") from None
        raise
    except urllib.error.URLError as error:
        raise error.reason if isinstance(error.reason, FileNotFoundError) else error from None
    if len(found) < min(count, there):
        raise ConnectionError("the connection broke")
    return found


def _at_most(file: io.BufferedReader | http.client.HTTPResponse, count: int) -> bytearray:
    """What is there, up to `count` bytes: a buffer of that size is not made before."""
    found = bytearray()
    for some in _parts(file, count):
        found += some
    return found


def _parts(file: io.BufferedReader | http.client.HTTPResponse, count: int) -> Iterator[bytes]:
    """Raises ConnectionError: it sends too little."""
    began, had = time.monotonic(), 0
    while had < count and (some := file.read1(min(count - had, 1 << 22))):
        yield some
        had += len(some)
        if had < LEAST_BYTES_S * (time.monotonic() - began - ANSWER_S):
            raise ConnectionError(f"it sends less than {LEAST_BYTES_S} bytes a second")

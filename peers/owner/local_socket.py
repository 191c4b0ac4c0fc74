"""Questions to programs of this machine, over one user's unix sockets: a line of JSON each way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from peers.waiting import within
from swarm.errors import SetupError

QUESTION_S = 5.0
"""An answer takes milliseconds; a loop on a very busy machine may be late by a second or two."""
LAST_ANSWERS_S = 1.0
MAX_BYTES = 64 * 1024

Do: TypeAlias = Literal["look", "pause", "resume"]


class OwnerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a program."""

    do: Do = "look"


@contextlib.asynccontextmanager
async def answering(
    path: Path, what: str, answer: Callable[[OwnerCommand], Awaitable[Any]]
) -> AsyncIterator[None]:
    """Answer on a socket at `path` while the block runs; what was asked before its end, a moment longer.

    Args:
        what: names the socket in errors.
        answer: a question -> its answer, which msgspec encodes.

    Raises:
        SetupError: another program answers there, or no socket can be made there.
    """
    asked: set[asyncio.Task[None]] = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        asked.add(task)
        task.add_done_callback(asked.discard)
        with contextlib.suppress(ConnectionError, ValueError, msgspec.MsgspecError, asyncio.TimeoutError):
            question = msgspec.json.decode(await within(reader.readline(), QUESTION_S), type=OwnerCommand)
            writer.write(msgspec.json.encode(await answer(question)) + b"\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(converse, sock=listen(path, what), limit=MAX_BYTES)
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)
        if asked:
            await asyncio.wait(asked, timeout=LAST_ANSWERS_S)


def listen(path: Path, what: str) -> socket.socket:
    """A listening socket at `path`; one that a killed program left is replaced. Raises as `answering`."""
    with contextlib.ExitStack() as on_error:
        listener = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            if path.is_socket():
                gone = contextlib.suppress(ConnectionRefusedError, FileNotFoundError)
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, gone:
                    probe.settimeout(QUESTION_S)
                    probe.connect(str(path))
                    raise SetupError(
                        f"{what} {path}: another program answers there; give each its own socket"
                    )
                path.unlink(missing_ok=True)
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            listener.listen(8)
        except OSError as error:
            why = error.strerror or error  # "AF_UNIX path too long" has no number
            raise SetupError(f"{what} {path}: no socket can be made there: {why}") from None
        on_error.pop_all()
        return listener

"""`swarm.join`: serve a stage of a run from a Python program, as `swarm peer` does."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

from peers.api.background import Background, all_as_in_peers, heard
from peers.events import Emit, Emitter
from peers.options import MEMORY, RATE, PeerOptions, options_from
from peers.programs.roles import Peer
from swarm.errors import SetupError, did_you_mean


def join(
    run: str, address: str | Sequence[str], *, code: str | Path | None = None, on_event: Emit | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """Serve a stage of a run until an interrupt (Ctrl-C, a notebook's stop button): the peer then leaves in
    good order, after a second one at once.

    Args:
        run: its id, or its name and its owner's fingerprint.
        address: of its bootstrap or of any peer of it; or several.
        code: the folder that the run's owner handed over (`Run.code`), if there is one. It is run here.
        on_event: hears what happens, from another thread (default: it is printed). Its errors are logged.
        options: those of `swarm peer`, with `_` for `-`, such as `stage=1`, `device="cpu"`, `host="0.0.0.0"`.

    Raises:
        SwarmError: it cannot be joined; says why.
    """
    peer = _peer(run, address, code, on_event, options)
    with _thread() as background, _first_interrupt(peer, lambda: background.start(peer.leave())):
        background.call(peer.run())


async def join_async(
    run: str, address: str | Sequence[str], *, code: str | Path | None = None, on_event: Emit | None = None,
    **options: Any,
) -> None:  # fmt: skip
    """The same as `join`, to be awaited. If it is cancelled, it leaves in good order first.

    The peer has a loop of its own: what the caller's loop computes does not make it silent.
    """
    peer = _peer(run, address, code, on_event, options)
    with _thread() as background:
        waiting = asyncio.wrap_future(background.start(peer.run()))
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            if peer.preparing:  # it may wait for ever, and does nothing yet that others count on
                await asyncio.to_thread(background.close)
            else:
                background.start(peer.leave())
                await waiting
            raise


@contextlib.contextmanager
def _thread() -> Iterator[Background]:
    """Of a peer alone; what runs in it ends with the block."""
    with all_as_in_peers(), contextlib.closing(Background()) as background:
        yield background


@contextlib.contextmanager
def _first_interrupt(peer: Peer, leave: Callable[[], object]) -> Iterator[None]:
    """Have the first interrupt call `leave`, wherever this program is; the next one is an error as ever, and
    so is one that comes while the peer is preparing."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield  # no interrupt comes here
        return

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(number, before)
        if peer.preparing:
            signal.raise_signal(number)
        leave()

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _peer(
    run: str, address: str | Sequence[str], code: str | Path | None, on_event: Emit | None,
    given: dict[str, Any],
) -> Peer:  # fmt: skip
    """Raises SetupError: `swarm peer` has no such option, or it cannot have the value."""
    known = {one.name: one for one in fields(PeerOptions)}
    if not (address and isinstance(address, Sequence) and all(isinstance(one, str) for one in address)):
        raise SetupError(f"address = {address!r}: give that of the run's bootstrap or a peer of it, or more")
    addresses = (address,) if isinstance(address, str) else tuple(address)
    values: dict[str, Any] = {"run": str(run), "join": addresses, "allow_code": (), **given}
    for name, value in values.items():
        if name not in known:
            raise SetupError(f"join has no option {name}{did_you_mean(name, [*known])}")
        kind, more = known[name].metadata["kind"], known[name].metadata["more"]
        if (choices := more.get("choices")) and value not in (None, *choices):
            raise SetupError(f"{name} = {value!r}: choose from {', '.join(choices)}")
        is_number = isinstance(value, int | float) and kind not in (RATE, MEMORY)
        try:
            if kind is not None and (is_number or isinstance(value, str)):
                parsed = kind.parse(str(value))
                values[name] = (parsed,) if more.get("action") == "append" else parsed
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise SetupError(f"{name} = {value!r}: {error}") from None
    handed = [] if code is None else [str(Path(code).resolve())]
    values["allow_code"] = (*(values["allow_code"] or ()), *handed)
    found = {name: one.default if values.get(name) is None else values[name] for name, one in known.items()}
    options = options_from(PeerOptions, argparse.Namespace(**found))
    if (device := str(options.device)) == "all" or "," in device:
        raise SetupError("a Python program serves one device: for several start swarm peer, or programs")
    return Peer(options, emit=heard(on_event or Emitter()))

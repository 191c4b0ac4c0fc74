"""`swarm.join`: its arguments are those of `swarm peer`; leaving, and what is put back."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import swarm
from peers.api import joining
from peers.api.background import Background, heard
from peers.events import Event, Note
from peers.options import PeerOptions
from swarm.errors import SetupError
from tests.test_docs import ADDRESS, RUN


class Serves:
    """In place of a peer: says so, and serves until it is to leave."""

    asked: PeerOptions
    left, preparing = 0, False

    def __init__(self, options: PeerOptions, *, emit: Any) -> None:
        Serves.asked, self._emit = options, emit
        self._leaving = asyncio.Event()

    async def run(self) -> None:
        torch.set_num_threads(1)
        self._emit(Note(text="serving"))
        await self._leaving.wait()

    async def leave(self) -> None:
        Serves.left += 1
        self._leaving.set()


@pytest.fixture
def serves(monkeypatch: pytest.MonkeyPatch) -> type[Serves]:
    monkeypatch.setattr(joining, "Peer", Serves)
    monkeypatch.setattr(Serves, "left", 0)
    return Serves


async def test_a_peer_that_is_cancelled_leaves_in_good_order(serves: type[Serves], tmp_path: Path) -> None:
    heard: asyncio.Queue[Event] = asyncio.Queue()
    loop, threads = asyncio.get_running_loop(), torch.get_num_threads()
    task = asyncio.create_task(
        swarm.join_async(
            RUN, ADDRESS, stage=1, device="cpu", max_upload="20Mbit", code=tmp_path / "net",
            allow_code=("cats",), identity=str(tmp_path / "key"),
            on_event=lambda event: loop.call_soon_threadsafe(heard.put_nowait, event),
        )
    )  # fmt: skip
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
        assert await heard.get() == Note(text="serving")
        # What this thread computes meanwhile is the program's own affair; what all threads do is the peer's.
        assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
        assert torch.backends.cuda.flash_sdp_enabled()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not torch.is_grad_enabled() and not torch.backends.cuda.flash_sdp_enabled()
    asked = serves.asked
    assert serves.left == 1 and torch.get_num_threads() == threads
    assert (asked.run, asked.join, asked.stage, asked.device) == (RUN, (ADDRESS,), 1, "cpu")
    assert (asked.max_upload, asked.identity) == (20e6, tmp_path / "key")
    assert asked.allow_code == ("cats", str(tmp_path / "net"))


async def test_a_peer_that_does_nothing_yet_ends_at_once(
    serves: type[Serves], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the command: it may wait for weights that no peer has, and was waited for as long."""
    monkeypatch.setattr(serves, "preparing", True)
    heard, loop = asyncio.Event(), asyncio.get_running_loop()
    hear = partial(loop.call_soon_threadsafe, heard.set)
    task = asyncio.create_task(swarm.join_async(RUN, ADDRESS, on_event=lambda event: hear()))
    await heard.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert serves.left == 0


async def test_an_error_of_on_event_does_not_reach_the_peer(
    serves: type[Serves], caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the task that had taken a step, before that was saved: no checkpoint was ever written."""
    heard, loop = asyncio.Event(), asyncio.get_running_loop()

    def hear(event: Event) -> None:
        loop.call_soon_threadsafe(heard.set)
        raise ValueError("a slip")

    task = asyncio.create_task(swarm.join_async(RUN, ADDRESS, on_event=hear))
    await heard.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert serves.left == 1 and "a slip" in caplog.text
    with pytest.raises(SetupError, match="on_event is 'print': give a function"):
        swarm.join(RUN, ADDRESS, on_event="print")  # type: ignore[arg-type]


def test_a_full_disk_is_an_error_of_on_event_as_any(caplog: pytest.LogCaptureFixture) -> None:
    """It was taken for a reader that has gone: of what a user's function could not write nothing was said."""

    def write(event: Event) -> None:
        raise OSError(errno.ENOSPC, "no room left")

    heard(write)(Note(text="serving"))
    assert "no room left" in caplog.text


@pytest.mark.parametrize("when", ["started", "serving"])
def test_an_interrupt_makes_a_peer_leave_wherever_it_comes(
    serves: type[Serves], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """While it is started, before it is waited for; and later."""

    class Interrupted(Background):
        times = 0

        def start(self, work: Any) -> Any:
            started, self.times = super().start(work), self.times + 1
            if self.times == 1 and when == "started":
                os.kill(os.getpid(), signal.SIGINT)
            return started

    def hear(event: Event) -> None:
        if when == "serving":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(joining, "Background", Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever ran in this process
    try:
        swarm.join(RUN, [ADDRESS, ADDRESS], on_event=hear)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert serves.left == 1 and serves.asked.join == (ADDRESS, ADDRESS)


def test_a_second_interrupt_ends_it_at_once(serves: type[Serves], monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave(self: Serves) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Serves, "leave", leave)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            swarm.join(RUN, ADDRESS, on_event=lambda event: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_a_peer_that_does_nothing_yet(
    serves: type[Serves], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serves, "preparing", True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            swarm.join(RUN, ADDRESS, on_event=lambda event: os.kill(os.getpid(), signal.SIGINT))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert serves.left == 0


async def test_one_word_is_a_list_of_one_and_none_is_what_a_peer_has_by_itself(
    serves: type[Serves], tmp_path: Path
) -> None:
    """`allow_code="cats"` allowed `c`, `a`, `t` and `s`; a stage None was served by no peer."""
    options = {"allow_code": "cats", "announce": "192.0.2.7:31337", "stage": None, "reach": None}
    task = asyncio.create_task(swarm.join_async(RUN, ADDRESS, code=tmp_path, **options))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    asked = serves.asked
    assert asked.allow_code == ("cats", str(tmp_path)) and asked.announce == ("192.0.2.7:31337",)
    assert (asked.stage, asked.reach) == ("auto", "auto")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stage": -3}, r"stage = -3: '-3' is not a whole number from 0 to 1000000000 \(or auto\)"),
        ({"stage": 1.5}, r"stage = 1.5: '1.5' is not a whole number"),
        ({"keep": 0}, r"keep = 0: '0' is not a whole number from 1 to 1000000000"),
        ({"leave_within": -1.0}, r"leave_within = -1.0: '-1.0' is not a number of seconds"),
        ({"reach": "maybe"}, r"reach = 'maybe': choose from auto, public, relay"),
        ({"devcie": "cpu"}, r"join has no option devcie \(did you mean device\?\)"),
        ({"device": "cpu,cpu"}, "a Python program serves one device"),
        ({"stages": (0, 1)}, "--stages is for several devices .*: take --stage"),
        ({"device": "all"}, "a Python program serves one device"),
        ({"max_vram": "6"}, "max_vram = '6': '6' is not a size of memory"),
    ],
)
def test_options_that_a_peer_does_not_have_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(SetupError, match=text):
        swarm.join(RUN, ADDRESS, **options)
    with pytest.raises(SetupError, match="is not the address of a peer"):
        swarm.join(RUN, "192.0.2.7:31337")
    with pytest.raises(SetupError, match="address = 31337: give that of the run's bootstrap or a peer of it"):
        swarm.join(RUN, 31337)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=r"address = \[\]: give that of the run's bootstrap"):
        swarm.join(RUN, [])
    with pytest.raises(SetupError, match=r"run = 'None': .*is not a run id"):
        swarm.join(None, ADDRESS)  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=r"run = 'abc': .*is not a run id"):
        swarm.join("abc", ADDRESS)

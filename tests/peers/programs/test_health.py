"""A program says whether it is well; one that hangs, is not there or is something else is said to be ill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from peers import events
from peers.cli import Exit, main
from peers.events import Event, Logged, said_in_logs
from peers.owner import control_socket
from peers.owner.health_socket import Pulse, answering
from peers.programs.owner import ask_health as ask
from peers.programs.owner import run_health
from peers.programs.tool_options import HealthOptions
from swarm.errors import SetupError, SwarmError

PEER = "12D3KooWQmabcdef"
STARTED = events.Started(role="peer", peer=PEER, addresses=("/ip4/127.0.0.1/tcp/1/p2p/" + PEER,))
SERVING = events.Serving(peer=PEER, stage=1, version=12, device="cpu")


async def three() -> int:
    return 3


@contextlib.asynccontextmanager
async def running(
    path: Path, *said: Event, connected: Callable[[], Awaitable[int]] = three, p2pd_s: float = 5.0
) -> AsyncIterator[None]:
    pulse = Pulse("peer", lambda event: None)
    for event in said:
        pulse(event)
    async with answering(path, lambda: pulse.health, connected, p2pd_s=p2pd_s):
        yield


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ((), "peer is not well: it is not in the network yet"),
        ((STARTED,), "peer abcdef: joining, connected to 3 peers"),
        ((STARTED, SERVING), "peer abcdef: serving stage 1 at version 12, connected to 3 peers"),
        (
            (STARTED, SERVING, events.Stepped(stage=1, t=12, microbatches=3)),
            "peer abcdef: serving stage 1 at version 13, connected to 3 peers",
        ),
        (
            (STARTED, SERVING, events.Moved(stage=1, to_stage=2, why="it is slow")),
            "peer abcdef: moving to stage 2 at version 12, connected to 3 peers",
        ),
        (
            (STARTED, SERVING, events.Paused(stage=1, version=14, why="swarm pause")),
            "peer abcdef: paused at stage 1 at version 12, connected to 3 peers",
        ),
        (
            (STARTED, SERVING, events.Paused(stage=1, version=12, why="asked to")),
            "peer abcdef: paused at stage 1 at version 12, connected to 3 peers",
        ),
        (
            (STARTED, SERVING, events.RolledBack(stage=1, step=10), events.StopNow(role="peer")),
            "peer abcdef: leaving at version 10, connected to 3 peers",
        ),
    ],
)
async def test_it_says_what_it_does(tmp_path: Path, said: tuple[Event, ...], words: str) -> None:
    async with running(tmp_path / "s", *said):
        answer = await ask(tmp_path / "s")
    assert answer.words() == words
    assert bool(answer.ill) == (not said)


def test_every_role_is_in_the_network_once_it_started() -> None:
    for role in ("bootstrap", "train", "keeper"):
        pulse = Pulse(role, lambda event: None)
        pulse(events.Started(role=role, peer=PEER, addresses=()))
        assert pulse.health.state == "in the network"
        pulse(events.Kept(version=7, stages=(0,)))
        assert pulse.health.version == 7
        pulse(events.StepDone(t=7, steps=9, loss=None, tokens_per_s=0.0))
        assert pulse.health.version == 8


async def test_a_p2pd_that_fails_or_says_nothing_is_ill(tmp_path: Path) -> None:
    async def fails() -> int:
        raise SwarmError("p2pd cannot be reached")

    async def hangs() -> int:
        await asyncio.Event().wait()
        return 0

    for connected in (fails, hangs):
        async with running(tmp_path / "s", STARTED, SERVING, connected=connected, p2pd_s=0.01):
            answer = await ask(tmp_path / "s")
        assert answer.words() == "peer abcdef is not well: its p2pd does not answer"


async def test_being_alone_is_said_but_not_ill(tmp_path: Path) -> None:
    async def nobody() -> int:
        return 0

    async with running(tmp_path / "s", STARTED, SERVING, connected=nobody):
        answer = await ask(tmp_path / "s")
    assert not answer.ill
    assert answer.words().endswith("connected to 0 peers")


async def test_a_process_that_hangs_is_ill_though_it_accepts(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(tmp_path / "s"))
        stopped.listen(1)
        with pytest.raises(SetupError, match=r"does not answer within 0\.05 s: it hangs"):
            await ask(tmp_path / "s", limit_s=0.05)


async def test_who_is_not_there_or_is_another_program_is_said(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"no program answers at .*: No such file or directory"):
        await ask(tmp_path / "s")

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"SSH-2.0-OpenSSH")
        writer.close()

    async with await asyncio.start_unix_server(babble, str(tmp_path / "t")):
        with pytest.raises(SetupError, match="is not of this version of swarm"):
            await ask(tmp_path / "t")


async def test_the_socket_is_its_owners_is_one_programs_and_is_gone_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "s"
    async with running(path, STARTED):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(SetupError, match="another program answers there; give each its own"):
            async with running(path, STARTED):
                pass
        assert not (await ask(path)).ill
    assert not path.exists()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()  # as a kill leaves it
    async with running(path, STARTED):
        assert not (await ask(path)).ill


@pytest.mark.parametrize("name", ["missing/s", "x" * 200])
async def test_where_no_socket_can_be_made_it_is_said(tmp_path: Path, name: str) -> None:
    with pytest.raises(SetupError, match=r"no socket can be made there: .*\. Name another"):
        async with running(tmp_path / name, STARTED):
            pass


def test_the_command_ends_with_what_docker_takes_for_ill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["health", str(tmp_path / "s")]) == Exit.FAILED == 1
    assert capsys.readouterr().err.startswith("swarm health: no program answers at")


async def test_the_command_prints_a_line_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(tmp_path / "s", STARTED, SERVING):
        assert await run_health(HealthOptions(socket=tmp_path / "s"))
        assert await run_health(HealthOptions(socket=tmp_path / "s", json=True))
    line, told = capsys.readouterr().out.splitlines()
    assert line == "peer abcdef: serving stage 1 at version 12, connected to 3 peers"
    assert json.loads(told) == {
        "well": True, "role": "peer", "peer": PEER, "state": "serving stage 1", "version": 12, "connected": 3,
    }  # fmt: skip


def test_what_modules_log_is_an_event() -> None:
    said: list[Event] = []
    logger = logging.getLogger("peers.somewhere")
    with said_in_logs(said.append):
        logger.warning("p2pd was started again (pid %s)", 7)
        logger.info("not worth it")
        try:
            raise ZeroDivisionError("in a task")
        except ZeroDivisionError:
            logger.exception("a bug" + "g" * events.MAX_LINE_CHARS)
    assert [type(event) for event in said] == [Logged, Logged]
    assert said[0] == Logged(logger="peers.somewhere", text="p2pd was started again (pid 7)")
    assert len(said[1].words()) == events.MAX_LOGGED
    assert len(events.to_json(said[1])) < events.MAX_LINE_CHARS


def test_the_mask_of_new_files_is_as_before(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        control_socket.listen(tmp_path / "s", "--health").close()
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)

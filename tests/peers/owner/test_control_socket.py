"""The owner's socket: which peers a command reaches, and what is said when it reaches none."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from peers.owner.commands import Owner
from peers.owner.control_socket import PeerAnswer, control_folder, obeying
from peers.programs.owner import ask, run_command
from peers.programs.tool_options import PauseOptions, ResumeOptions
from swarm.errors import SetupError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))
    return tmp_path


@asynccontextmanager
async def peer(device: str = "cpu", identity: str = "") -> AsyncIterator[Owner]:
    """A peer that pauses and resumes a moment after it was told to."""
    owner = Owner()

    def said() -> PeerAnswer:
        return PeerAnswer(
            pid=os.getpid(), peer="12D3abcdef", device=device, identity=identity, doing=owner.doing, words="",
        )  # fmt: skip

    async def obey() -> None:
        while True:
            changed = owner.changed
            if owner.paused != (owner.doing == "paused"):
                await asyncio.sleep(0)
                owner.does("paused" if owner.paused else "serving")
            else:
                await changed.wait()

    async with obeying(owner, said):
        task = asyncio.create_task(obey())
        yield owner
        task.cancel()


async def test_a_pause_is_answered_once_the_device_is_free(capsys: pytest.CaptureFixture[str]) -> None:
    async with peer() as owner:
        await run_command(PauseOptions())
        assert owner.paused and owner.doing == "paused" and owner.why == "swarm pause"
        await run_command(PauseOptions(pid=os.getpid()))
        await run_command(ResumeOptions(device="cpu"))
        assert not owner.paused and owner.doing == "serving"
    line = f"peer abcdef on cpu, pid {os.getpid()}: "
    assert capsys.readouterr().out.splitlines() == [line + "paused", line + "paused", line + "serving"]


async def test_only_this_user_can_open_the_socket_and_nothing_is_left_of_it(cache: Path) -> None:
    async with peer():
        (path,) = control_folder().iterdir()
        assert path == cache / "control" / f"{os.getpid()}.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(control_folder().stat().st_mode) == 0o700
    assert not list(control_folder().iterdir())


async def test_who_is_meant_is_told_by_key_device_or_process(tmp_path: Path) -> None:
    async with peer("cuda:1", str(tmp_path / "a.key")) as owner:
        for other in (
            PauseOptions(identity=tmp_path / "b.key"), PauseOptions(device="cuda:0"), PauseOptions(pid=1),
            PauseOptions(identity=tmp_path / "a.key", device="cpu"),
        ):  # fmt: skip
            with pytest.raises(
                SetupError, match=r"peer of yours here is meant by that: (there is peer|none has)"
            ):
                await run_command(other)
        with pytest.raises(SetupError, match=r"is meant by that: none has pid 1$"):
            await run_command(PauseOptions(pid=1))
        assert not owner.paused
        await run_command(PauseOptions(identity=tmp_path / "a.key", device="cuda:1"))
        assert owner.paused


async def test_where_no_peer_runs_that_is_said_and_what_a_killed_one_left_goes_away() -> None:
    with pytest.raises(SetupError, match="is meant by that: none runs"):
        await run_command(PauseOptions())
    control_folder().mkdir()
    path = control_folder() / "99999999.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(SetupError, match="none runs"):
        await run_command(ResumeOptions())
    assert not path.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
async def test_a_peer_that_starts_takes_nothing_away_of_one_that_starts_beside_it() -> None:
    """Of eight that start at once some are seen between two calls, and no command reached such a one ever."""
    (folder := control_folder()).mkdir()
    beside = await asyncio.create_subprocess_exec("sleep", "60")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path := folder / f"{beside.pid}.sock"))
        async with peer():
            await run_command(PauseOptions(pid=os.getpid()))
            await run_command(ResumeOptions())
            assert path.exists()
    beside.kill()
    await beside.wait()


async def test_the_next_peer_takes_away_what_a_killed_one_left(cache: Path) -> None:
    async with peer():
        mine = control_folder() / f"{os.getpid()}.sock"
        other, left = control_folder() / "99999998.sock", control_folder() / "99999999.sock"
        with socket.socket(socket.AF_UNIX) as lives, socket.socket(socket.AF_UNIX) as dead:
            lives.bind(str(other))
            lives.listen()
            dead.bind(str(left))
            dead.close()
            mine.rename(cache / "moved.sock")  # as if this were another process
            async with peer():
                assert {*control_folder().iterdir()} == {mine, other}


async def test_one_of_another_version_is_named_at_once_with_what_to_do() -> None:
    """It closes on a question that it cannot read, or answers in words that we cannot."""
    control_folder().mkdir()
    path = control_folder() / "77.sock"
    for answer in (b"", b'{"pid": 77, "state": "serving"}\n'):

        async def older(reader: Any, writer: Any, said: bytes = answer) -> None:
            await reader.readline()
            writer.write(said)
            writer.close()

        server = await asyncio.start_unix_server(older, str(path))
        other = "the peer with pid 77 is not of this version of swarm: ask it by its own"
        with pytest.raises(SetupError, match=other):
            await run_command(PauseOptions())
        server.close()
        await server.wait_closed()


async def test_one_that_hangs_or_is_no_peer_is_named() -> None:
    control_folder().mkdir()
    path = control_folder() / "77.sock"

    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        writer.close()

    for handler, words in ((nothing, "pid 77 does not answer within"), (nonsense, "is not of this version")):
        server = await asyncio.start_unix_server(handler, str(path))
        with pytest.raises(SetupError, match=words):
            await run_command(PauseOptions(), question_s=0.05)
        server.close()
        await server.wait_closed()


async def test_one_that_hangs_keeps_no_other_from_its_pause(
    capsys: pytest.CaptureFixture[str],
) -> None:
    control_folder().mkdir()
    hung, crowded = control_folder() / "0.sock", control_folder() / "00.sock"
    with socket.socket(socket.AF_UNIX) as accepts_only, socket.socket(socket.AF_UNIX) as full:
        for listener, path, room in ((accepts_only, hung, 8), (full, crowded, 0)):
            listener.bind(str(path))
            listener.listen(room)
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(str(crowded))  # there is no room for the next one
            async with peer() as owner:
                with pytest.raises(SetupError) as error:
                    await run_command(PauseOptions(), question_s=0.2)
                assert owner.paused
    first, second = error.value.text.split("; ")
    assert first == "the peer with pid 0 does not answer within 0.2 s: it hangs"
    assert second.startswith("the peer with pid 00 cannot be asked: ")
    assert capsys.readouterr().out.endswith(": paused\n")
    assert hung.exists() and crowded.exists(), "their programs live"


async def test_what_is_no_wish_is_not_obeyed() -> None:
    async with peer() as owner:
        (path,) = control_folder().iterdir()
        for line in (b"pause\n", b'{"do": "format the disk"}\n', b"x" * 100_000 + b"\n"):
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(line)
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        assert not owner.paused
        answer = await ask(path, "it", PeerAnswer, limit_s=5.0)
        assert (
            msgspec.json.decode(msgspec.json.encode(answer), type=PeerAnswer) == answer
            and answer.doing == "starting"
        )


async def test_a_folder_that_cannot_be_made_is_a_clear_error(cache: Path) -> None:
    (cache / "control").write_text("")
    with pytest.raises(SetupError, match="cannot be made: File exists; set SWARM_CACHE"):
        async with peer():
            pass


async def test_a_peer_that_ends_instead_of_pausing_still_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    owner = Owner()

    def said() -> PeerAnswer:
        return PeerAnswer(
            pid=os.getpid(), peer="12D3abcdef", device="cuda:0", identity="", doing=owner.doing,
            words=owner.words,
        )  # fmt: skip

    async with obeying(owner, said):
        asking = asyncio.create_task(run_command(PauseOptions()))
        while not owner.paused:
            await owner.changed.wait()
        owner.does("leaving", "the device hangs. It cannot pause: this process ends")
    assert not list(control_folder().iterdir())
    await asking
    line = f"peer abcdef on cuda:0, pid {os.getpid()}: the device hangs. It cannot pause: this process ends\n"
    assert capsys.readouterr().out == line

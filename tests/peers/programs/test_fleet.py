"""--device all: what each peer is started with, and what becomes of those that end."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from peers.cli import Exit, main
from peers.events import Event, Note, Trouble
from peers.options import PeerOptions
from peers.programs.fleet import Child, Fleet, arguments, labelled, names_of, shared
from swarm.errors import SetupError


def of(device: str, **more: Any) -> PeerOptions:
    return PeerOptions(run="5a", join=("x",), device=device, **more)


def test_each_device_has_a_key_and_ports_of_its_own(tmp_path: Path) -> None:
    options = of("all", identity=tmp_path / "keys", port=31337, max_upload=20e6, announce=("192.0.2.7:4000",))
    found = arguments(options, ["cuda:0", "cuda:1"], ["--run", "5a"], ("127.0.0.1", 9090))
    assert found["cuda:1"] == [
        "--run", "5a", "--device", "cuda:1", "--identity", str(tmp_path / "keys" / "cuda-1.key"),
        "--port", "31338", "--announce", "192.0.2.7:4001", "--metrics", "127.0.0.1:9091",
        "--max-upload", "10000kbit",
    ]  # fmt: skip
    found = arguments(of("cpu,cpu", direct_port=4100), names_of("cpu,cpu"))
    assert list(found) == ["cpu", "cpu#2"]
    assert found["cpu#2"] == ["--device", "cpu", "--direct-port", "4101"]


def test_each_device_serves_the_stage_that_a_plan_gives_it() -> None:
    options = of("all", stages=(4, None, 5))
    found = arguments(options, ["cuda:0", "cuda:1", "cuda:2"], shared(["--run", "5a", "--stages=4,-,5"]))
    assert found == {
        "cuda:0": ["--run", "5a", "--device", "cuda:0", "--stage", "4"],
        "cuda:2": ["--run", "5a", "--device", "cuda:2", "--stage", "5"],
    }
    for wrong in ({"stages": (4,)}, {"stages": (None, None, None)}, {"stages": (0, 1, 2), "stage": 1}):
        with pytest.raises(SetupError, match=r"--stages has . stages? in . words?, and there are 3 devices"):
            arguments(of("all", **wrong), ["cuda:0", "cuda:1", "cuda:2"])


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("")
    with pytest.raises(SetupError, match="is one key, and there are 2 peers: name a folder"):
        arguments(of("all", identity=tmp_path / "key"), ["cuda:0", "cuda:1"])
    with pytest.raises(SetupError, match="is shared by 8 peers: they need 2048kbit at least"):
        arguments(of("all", max_upload=1e6), [f"cuda:{number}" for number in range(8)])
    with pytest.raises(SetupError, match="with several devices take HOST:PORT"):
        arguments(of("all", announce=("/ip4/1.2.3.4/tcp/5",)), ["cuda:0", "cuda:1"])


def test_all_on_a_machine_without_gpu_says_what_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SetupError, match="has no CUDA device; take --device cpu"):
        names_of("all")


def test_the_words_of_the_command_line_are_passed_on_without_what_differs() -> None:
    words = ["--run", "5a", "--device", "all", "--port=7", "--join", "x", "--identity", "k", "--recompute"]
    assert shared(words) == ["--run", "5a", "--join", "x", "--recompute"]


def test_lines_say_which_device_they_are_of() -> None:
    assert labelled("cuda:1", "12:00  serving") == "[cuda:1] 12:00  serving"
    assert labelled("cuda:1", '{"event":"note"}') == '{"event":"note","device_of":"cuda:1"}'
    assert labelled("cuda:1", "{oops") == "[cuda:1] {oops"


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs instead of peers: the word after --device is what they do."""
    start = asyncio.create_subprocess_exec

    async def exec_(*command: str, **more: object) -> asyncio.subprocess.Process:
        does = command[command.index("--device") + 1]
        return await start(sys.executable, "-c", PROGRAMS[does], **more)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", exec_)


PROGRAMS = {
    # Who was started in the background of a shell has inherited that SIGINT is ignored.
    "works": "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "print('working', flush=True)\ntry:\n    signal.pause()\n"
    "except KeyboardInterrupt:\n    print('left')",
    "starts": "import signal\nsignal.signal(signal.SIGINT, lambda *_: exit(130))\n"
    "print('working', flush=True)\nsignal.pause()",
    "refuses": "raise SystemExit(3)",
    "fails": "raise SystemExit(4)",
    "breaks": "import os, signal\nsignal.signal(signal.SIGINT, lambda *_: os.kill(os.getpid(), 9))\n"
    "print('ready', flush=True)\nsignal.pause()",
    "shouts": "print('x' * (3 << 20))\nprint('working')",
    "dies": "import os; os.kill(os.getpid(), 9)",
}


async def run(
    device: str, events: list[Event], until: str, *, restart_s: float = 0.01
) -> tuple[Fleet, asyncio.Task[int]]:
    running = Fleet(of(device), emit=events.append, restart_s=restart_s)
    task = asyncio.create_task(running.run())
    async with asyncio.timeout(60) if sys.version_info >= (3, 11) else _Forever():
        while not any(until in event.words() for event in events):
            await asyncio.sleep(0.01)
    return running, task


class _Forever:
    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


def said(events: Sequence[Event], kind: type[Event]) -> list[str]:
    return [event.words() for event in events if isinstance(event, kind)]


async def until_working(capfd: pytest.CaptureFixture[str], count: int) -> None:
    """Before that a Ctrl-C meets an interpreter that is starting."""
    out = ""
    while out.count("working") < count:
        await asyncio.sleep(0.01)
        out += capfd.readouterr().out


@pytest.mark.process
async def test_one_ctrl_c_ends_all_of_them(children: None, capfd: pytest.CaptureFixture[str]) -> None:
    events: list[Event] = []
    running, task = await run("works,works", events, "on works#2 has process id")
    await until_working(capfd, 2)
    await running.leave()
    assert await task == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["[works#2] left", "[works] left"]
    assert not said(events, Trouble)


@pytest.mark.process
async def test_that_one_leaves_while_it_starts_is_no_trouble(
    children: None, capfd: pytest.CaptureFixture[str]
) -> None:
    events: list[Event] = []
    running, task = await run("works,starts", events, "on starts has process id")
    await until_working(capfd, 2)
    await running.leave()
    assert await task == 130
    assert not said(events, Trouble)


@pytest.mark.process
async def test_one_that_dies_is_started_again_and_takes_no_other_along(
    children: None, capfd: pytest.CaptureFixture[str]
) -> None:
    events: list[Event] = []
    running, task = await run("works,dies", events, "on dies died (signal 9): it is started again in 0 s")
    await until_working(capfd, 1)
    while len([words for words in said(events, Note) if "on dies has" in words]) < 3:
        await asyncio.sleep(0.01)
    assert len([words for words in said(events, Note) if "on works has" in words]) == 1
    await running.leave()
    assert await task == 1, "what died had not ended well"


async def test_one_that_cannot_be_started_takes_no_other_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine had no memory left for it just then, and all that worked were killed for that."""
    tried: list[str] = []

    async def exec_(*command: str, **_: object) -> asyncio.subprocess.Process:
        tried.append(command[command.index("--device") + 1])
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", exec_)
    events: list[Event] = []
    running, task = await run("a,b", events, "on b died (exit code 1): it is started again in 0 s")
    assert "the peer on b cannot start: Resource temporarily unavailable" in said(events, Trouble)
    await running.leave()
    assert await task == 1 and {*tried} == {"a", "b"}


def test_a_list_of_devices_that_names_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was started, and what it ended with was a bug in swarm."""
    address = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWGzxzKZYveHXtpG6AsrUJBcWxHBFS2HsEoGTxrMLvXKtf"
    assert main(["peer", "--run", "5a" * 16, "--join", address, "--device", " , "]) == Exit.SETUP
    assert "--device ' , ' is unknown; take auto, cpu" in capsys.readouterr().err


@pytest.mark.process
async def test_one_that_waits_to_be_started_again_when_all_leave_had_not_ended_well(
    children: None,
) -> None:
    for device, code in (("dies", 1), ("fails", 4)):
        events: list[Event] = []
        running, task = await run(device, events, f"on {device} died", restart_s=300.0)
        await running.leave()
        assert await task == code


@pytest.mark.process
async def test_one_that_is_killed_while_it_leaves_did_not_end_well(
    children: None, capfd: pytest.CaptureFixture[str]
) -> None:
    events: list[Event] = []
    running, task = await run("works,breaks", events, "on breaks has process id")
    out = ""
    while not ("ready" in out and "working" in out):
        await asyncio.sleep(0.01)
        out += capfd.readouterr().out
    await running.leave()
    assert await task == 1


@pytest.mark.process
async def test_a_line_that_is_too_long_does_not_stop_the_peer_that_writes_it(
    children: None, capfd: pytest.CaptureFixture[str]
) -> None:
    _, task = await run("shouts", [], "has process id")
    assert await task == 0
    assert "[shouts] working" in capfd.readouterr().out


class Ended:
    """A process that said what it has to say, and ended."""

    def __init__(self, *lines: str) -> None:
        self.stdout = asyncio.StreamReader()
        self.stdout.feed_data("".join(lines).encode())
        self.stdout.feed_eof()
        self.pid, self.returncode = 1, 0

    async def wait(self) -> int:
        return self.returncode


async def test_what_a_peer_says_is_read_on_when_it_can_be_told_to_nobody() -> None:
    """With the disk full, or the reader gone, peers hung as soon as the pipe to this program was."""
    heard: list[str] = []

    def hear(child: Child, line: str) -> None:
        heard.append(line)
        raise OSError(errno.ENOSPC, "No space left on device")

    process: Any = Ended("one\n", "two\n")
    assert await Child(process, hear).wait() == 0
    assert heard == ["one", "two"]


async def test_the_token_is_on_no_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[tuple[tuple[str, ...], dict[str, str]]] = []

    async def exec_(*command: str, env: dict[str, str], **more: object) -> Ended:
        started.append((command, env))
        return Ended()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", exec_)
    monkeypatch.setenv("SWARM_TOKEN", "swarm-invitation-of-another-run")
    words = ["--run", "5a", "--token", "swarm-invitation-x", "--device", "cpu,cpu"]
    options = of("cpu,cpu", token="swarm-invitation-x", identity=tmp_path / "keys")
    assert await Fleet(options, words, emit=lambda _: None).run() == 0
    assert await Fleet(of("cpu,cpu"), [], emit=lambda _: None).run() == 0
    assert not any("-invitation-" in word or word == "--token" for command, _ in started for word in command)
    assert [env["SWARM_TOKEN"] for _, env in started] == ["swarm-invitation-x"] * 2 + [""] * 2


@pytest.mark.process
async def test_one_that_asks_its_owner_for_something_is_not_started_again(
    children: None, capfd: pytest.CaptureFixture[str]
) -> None:
    events: list[Event] = []
    running, task = await run("works,refuses", events, "on refuses ended with exit code 3; the others go on")
    await until_working(capfd, 1)
    await running.leave()
    assert await task == 3


@pytest.mark.process
async def test_a_second_ctrl_c_leaves_no_process(children: None) -> None:
    events: list[Event] = []
    _, task = await run("works", events, "has process id")
    pid = int(said(events, Note)[0].split()[-1])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        while True:
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.01)


def test_a_list_of_stages_is_for_several_devices(capsys: pytest.CaptureFixture[str]) -> None:
    join = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
    words = ["peer", "--run", "5a" * 16, "--join", join, "--device", "cpu", "--stages"]
    assert main([*words, "0,1"]) == Exit.SETUP
    assert "--stages is for several devices (--device all, or cuda:0,cuda:1)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "0,one"])
    assert "a whole number from 0 to 1000000000" in capsys.readouterr().err

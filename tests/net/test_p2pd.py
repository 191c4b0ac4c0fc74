"""Our p2pd starts fast, says what is wrong, and never outlives us. Real processes on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from peers.net import p2pd as daemon_module
from peers.net._hivemind import Multiaddr, p2pd_pb2
from peers.net.connection import pack_varint
from peers.net.identity import Identity
from peers.net.p2pd import Daemon, DaemonOptions
from peers.net.p2pd_control import ControlError, DaemonControl, peer_bytes
from peers.programs.check import probe_p2pd
from swarm.errors import SetupError
from tests.stopping import stop

pytestmark = pytest.mark.net


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.01)


async def ended(daemon: Daemon) -> None:
    """It is noticed in the loop."""
    deadline = time.monotonic() + 5.0
    while daemon.alive:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Child:
    """A python process that owns a p2pd and then sleeps."""

    _PROGRAM = """
import signal, sys, time
# Whoever runs the tests in the background, or under nohup, has them ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
import asyncio
from peers.net.identity import split_peer_id, to_multiaddr
from peers.net.p2pd import Daemon, DaemonOptions
daemon = Daemon.spawn(DaemonOptions())
asyncio.run(daemon.ready())
print(daemon.pid, daemon._process.pid, daemon.directory, flush=True)
time.sleep(600)
"""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self._PROGRAM], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        p2pd, shell, directory = self.process.stdout.readline().split()
        self.p2pd, self.shell, self.directory = int(p2pd), int(shell), Path(directory)
        assert self.directory.is_dir()
        assert not gone(self.p2pd)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.mark.parametrize("form", ["linux", "portable"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_outlives_its_owner(how: signal.Signals, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_PORTABLE", "1" if form == "portable" else "")
    child = Child()
    try:
        child.process.send_signal(how)
        until(lambda: gone(child.p2pd) and gone(child.shell) and not child.directory.exists())
    finally:
        child.end()


def test_a_stopped_p2pd_does_not_outlive_its_owner_either() -> None:
    child = Child()
    stop(child.p2pd)
    child.end()
    until(lambda: gone(child.p2pd) and not child.directory.exists())


def test_ctrl_c_in_the_terminal_does_not_reach_p2pd() -> None:
    child = Child()
    try:
        assert os.getpgid(child.p2pd) != os.getpgid(child.process.pid)
        assert os.getsid(child.p2pd) != os.getsid(child.process.pid)
    finally:
        child.end()


def test_what_was_left_when_all_died_at_once_is_swept_by_the_next() -> None:
    child = Child()
    stop(child.process.pid)  # so that it cannot clean up after the others
    os.kill(child.shell, signal.SIGKILL)
    child.end()
    until(lambda: gone(child.p2pd) and gone(child.shell))
    assert child.directory.is_dir()
    in_use = Daemon.spawn(DaemonOptions())
    try:
        for directory in (child.directory, in_use.directory):
            os.utime(directory, (0, 0))  # younger ones may not have taken their locks
        # The system may take a moment to release the lock of the dead.
        until(lambda: probe_p2pd() and not child.directory.exists())
        assert in_use.directory.is_dir()
    finally:
        in_use.close_now()


async def test_the_death_of_p2pd_is_noticed_at_once_and_leaves_nothing() -> None:
    daemon = Daemon.spawn(DaemonOptions())
    calls: list[int] = []
    daemon.on_death = lambda: calls.append(1)
    await daemon.ready()
    assert daemon.alive
    os.kill(daemon.pid, signal.SIGKILL)
    await ended(daemon)
    assert calls == [1]
    assert not daemon.alive
    assert not daemon.directory.exists()
    daemon.close_now()


async def test_the_death_of_the_watchdog_takes_p2pd_with_it() -> None:
    daemon = Daemon.spawn(DaemonOptions())
    await daemon.ready()
    pid = daemon.pid
    os.kill(daemon._process.pid, signal.SIGKILL)
    await ended(daemon)
    # The kernel kills p2pd when its watchdog dies; on a busy machine that takes a moment.
    until(lambda: gone(pid) and not daemon.directory.exists())


async def test_without_the_kernels_help_p2pd_ends_with_its_owner_though_its_watchdog_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SWARM_PORTABLE", "1")
    daemon = Daemon.spawn(DaemonOptions())
    await daemon.ready()
    pid = daemon.pid
    os.kill(daemon._process.pid, signal.SIGKILL)
    daemon._process.wait()
    assert not gone(pid)
    daemon.close_now()
    until(lambda: gone(pid) and not daemon.directory.exists())


async def test_closing_leaves_no_process_and_no_file_and_is_no_accident() -> None:
    daemon = Daemon.spawn(DaemonOptions())
    daemon.on_death = lambda: pytest.fail("called")
    await daemon.ready()
    pid, shell = daemon.pid, daemon._process.pid
    before = time.monotonic()
    daemon.close_now()
    daemon.close_now()
    assert time.monotonic() - before < 5.0
    assert gone(pid)
    assert gone(shell)
    assert not daemon.directory.exists()
    assert not daemon.alive


def test_a_daemon_that_was_never_waited_for_closes_as_well() -> None:
    daemon = Daemon.spawn(DaemonOptions())
    shell = daemon._process.pid
    daemon.close_now()
    assert gone(shell)
    assert not daemon.directory.exists()


def why_not(host: str = "127.0.0.1", port: int = 0) -> str:
    """Why p2pd does not start there."""
    with pytest.raises(SetupError) as refused:
        probe_p2pd(host, port)
    return refused.value.text


def test_a_port_in_use_is_named_also_when_another_p2pd_would_share_it() -> None:
    first = Daemon.spawn(DaemonOptions())
    try:
        asyncio.run(first.ready())
        port = int(first.addresses[0].split("/tcp/")[1])
        for host in ("127.0.0.1", "0.0.0.0"):
            assert why_not(host, port) == (
                f"port {port} is already in use on {host}: stop the program that uses it (see: "
                f"ss -ltnp 'sport = :{port}'), or choose another one with --port (--port 0 picks a free one)"
            )
    finally:
        first.close_now()
    assert probe_p2pd("127.0.0.1", port)


def test_an_address_of_another_machine_is_named() -> None:
    assert why_not("192.0.2.77").startswith(
        "this machine has no address 192.0.2.77: listen on 0.0.0.0, and announce"
    )


def test_a_name_without_an_address_is_named() -> None:
    assert (
        why_not("no-such-host.invalid")
        == "'no-such-host.invalid' is not an address and has no name server entry"
    )


def test_a_probe_that_succeeds_says_where_it_listened() -> None:
    assert probe_p2pd("localhost")[0].startswith("/ip4/127.0.0.1/tcp/")


RELAYING = "/libp2p/circuit/relay/0.2.0/hop"


async def test_only_a_p2pd_that_is_to_relay_can_be_asked_to() -> None:
    """Left to itself p2pd relays a little for anybody, also after `--no-relay`."""
    with contextlib.ExitStack() as stack:

        async def started(**options: Any) -> tuple[Daemon, DaemonControl]:
            daemon = Daemon.spawn(DaemonOptions(**options))
            stack.callback(daemon.close_now)
            await daemon.ready()
            return daemon, DaemonControl(daemon.control_path)

        (relay, _), (other, _), (_, control) = [
            await started(reachable=True, be_relay=be_relay) for be_relay in (True, False, False)
        ]

        async def ask(daemon: Daemon) -> None:
            await control.connect(daemon.peer_id, daemon.addresses, 5.0)
            wanted = p2pd_pb2.StreamOpenRequest(peer=peer_bytes(daemon.peer_id), proto=[RELAYING])
            await control._ask("STREAM_OPEN", streamOpen=wanted)

        await ask(relay)
        with pytest.raises(ControlError, match="protocol"):
            await ask(other)


async def test_of_one_peer_the_addresses_of_no_other_are_read(tmp_path: Path) -> None:
    """A coordinator is connected to thousands, and asks before it dials each of them."""
    one, other = (Identity.generate().peer_id for _ in range(2))
    listed = p2pd_pb2.Response(type=p2pd_pb2.Response.OK)
    listed.peers.add(id=peer_bytes(one), addrs=[Multiaddr("/ip4/192.0.2.7/tcp/31337").to_bytes()])
    listed.peers.add(id=peer_bytes(other), addrs=[b"no address"])

    async def list_peers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = listed.SerializeToString()
        writer.write(pack_varint(len(said)) + said)
        await reader.read()
        writer.close()

    control = DaemonControl(tmp_path / "p2pd.sock")
    async with await asyncio.start_unix_server(list_peers, str(control.path)):
        assert await control.connections(one) == {one: ["/ip4/192.0.2.7/tcp/31337"]}
        assert await control.is_direct(one)
        assert Identity.generate().peer_id not in await control.connections(Identity.generate().peer_id)
        with pytest.raises(ValueError):
            await control.connections()


def test_one_identity_serves_one_process(tmp_path: Path) -> None:
    first = Daemon.spawn(DaemonOptions(), identity_path=tmp_path / "key")
    try:
        with pytest.raises(
            SetupError, match="key is in use by another process: stop that one, or give each program"
        ):
            Daemon.spawn(DaemonOptions(), identity_path=tmp_path / "key")
    finally:
        first.close_now()
    again = Daemon.spawn(DaemonOptions(), identity_path=tmp_path / "key")
    asyncio.run(again.ready())
    assert again.peer_id == first.peer_id
    again.close_now()


def test_a_p2pd_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent = tmp_path / "p2pd"
    silent.write_text("#!/bin/sh\nsleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(daemon_module, "p2pd_path", lambda: silent)
    daemon = Daemon.spawn(DaemonOptions())
    with pytest.raises(SetupError, match=r"p2pd did not start within 0\.2 s; is the machine overloaded\?"):
        asyncio.run(daemon.ready(0.2))
    daemon.close_now()


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo listen: permission denied", "not allowed to listen on 127.0.0.1:0: choose a port above 1023"),
        ("echo must be a multiaddr", "p2pd does not understand an address: must be a multiaddr"),
        ("echo strange words", "p2pd did not start on 127.0.0.1:0: strange words"),
        ("exit 3", "p2pd did not start on 127.0.0.1:0: it ended without a word"),
    ],
)
def test_last_words_are_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, text: str
) -> None:
    fake = tmp_path / "p2pd"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(daemon_module, "p2pd_path", lambda: fake)
    assert why_not() == text


@pytest.mark.parametrize("how", ["missing", "not executable"])
def test_a_missing_binary_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str) -> None:
    package = tmp_path / "hivemind"
    (package / "hivemind_cli").mkdir(parents=True)
    (package / "__init__.py").touch()
    if how == "not executable":
        (package / "hivemind_cli" / "p2pd").touch(0o644)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: _Spec([str(package)]))
    with pytest.raises(SetupError, match=r"without its p2pd binary|is not executable: chmod \+x it"):
        daemon_module.p2pd_path()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SetupError, match="hivemind is not installed: pip install hivemind"):
        daemon_module.p2pd_path()


class _Spec:
    def __init__(self, locations: list[str]) -> None:
        self.submodule_search_locations = locations

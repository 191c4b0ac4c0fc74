"""The lab that faults of the network are made in: what it does to packets, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from scripts.bench.common.netlab import HOME, Lab, LabError, Link, Nat, why_not
from tests.process.swarm_processes import ROOT, eventually

pytestmark = [pytest.mark.process, pytest.mark.skipif(bool(why_not()), reason=f"a network lab {why_not()}")]

PORT = 5000
SOON_S = 0.3
"""A packet that is not here by then does not come: none of these labs is slower."""


def open_socket(lab: Lab, host: str) -> socket.socket:
    """A UDP socket in that host, at its port."""
    with lab.inside(host):
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    opened.bind(("0.0.0.0", PORT))
    opened.settimeout(SOON_S)
    return opened


def arrives(lab: Lab, at: dict[str, socket.socket], a: str, b: str) -> bool:
    """Whether a packet gets from a to b."""
    word = os.urandom(8)
    at[a].sendto(word, (lab.ip(b), PORT))
    with contextlib.suppress(TimeoutError):
        while at[b].recv(100) != word:
            pass
        return True
    return False


@contextlib.contextmanager
def sockets(lab: Lab) -> Iterator[dict[str, socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield {host: stack.enter_context(open_socket(lab, host)) for host in lab.hosts}


def test_cut_hosts_links_and_halves_are_silent_until_they_are_healed() -> None:
    with Lab(["a", "b", "c", "d"]) as lab, sockets(lab) as at:
        pairs = [(a, b) for a in lab.hosts for b in lab.hosts if a != b]

        def reached() -> set[tuple[str, str]]:
            return {pair for pair in pairs if arrives(lab, at, *pair)}

        assert reached() == set(pairs)
        lab.cut("a")
        assert reached() == {pair for pair in pairs if "a" not in pair}
        lab.heal("a")
        lab.cut("a", "b")
        assert reached() == set(pairs) - {("a", "b"), ("b", "a")}
        lab.heal("a", "b")
        lab.partition(["a", "b"], ["c", "d"])
        assert reached() == {("a", "b"), ("b", "a"), ("c", "d"), ("d", "c")}
        lab.partition(["a", "b"], ["c", "d"], on=False)
        assert reached() == set(pairs)
        with pytest.raises(LabError, match="the lab has no host 'e'; it has a, b, c, d"):
            lab.cut("e")


def test_packets_take_the_delay_of_their_link_and_some_are_lost() -> None:
    with Lab(["a", "b", "c"], links={("a", "b"): Link(delay_s=0.05)}) as lab, sockets(lab) as at:

        def trip_s(a: str, b: str) -> float:
            began = time.monotonic()
            assert arrives(lab, at, a, b)
            return time.monotonic() - began

        assert 0.05 <= statistics.median(trip_s("b", "a") for _ in range(9)) < 0.05 + SOON_S / 2
        assert statistics.median(trip_s("a", "c") for _ in range(9)) < 0.05
        lab.set_link("a", "c", Link(loss=0.5), both=False)
        for number in range(400):
            at["a"].sendto(bytes([number % 256]), (lab.ip("c"), PORT))
        assert arrives(lab, at, "c", "a")
        came = 0
        with contextlib.suppress(TimeoutError):
            while at["c"].recv(100):
                came += 1
        assert 150 < came < 250
        assert lab.stats()["hosts"]["a"]["dropped"] == 400 - came


def test_a_cable_carries_its_bandwidth_and_a_longer_queue_is_dropped() -> None:
    with Lab(["a", "b"], bandwidth_bps=8e6, queue_s=0.1) as lab, sockets(lab) as at:
        began = time.monotonic()
        for number in range(300):  # 300 kB: 0.3 s at this rate; a third fits into the queue
            at["a"].sendto(bytes([number % 256]) * 1000, (lab.ip("b"), PORT))
        came = 0
        with contextlib.suppress(TimeoutError):
            while True:
                at["b"].recv(2000)
                came += 1
                last = time.monotonic()
        assert lab.stats()["hosts"]["a"]["dropped"] == 300 - came
        assert 90 < came < 300
        assert last - began >= 0.9 * came * 1000 * 8 / 8e6


def test_a_host_behind_a_nat_can_dial_out_and_is_heard_by_nobody_else() -> None:
    nats = {"home": Nat(), "office": Nat(symmetric=True)}
    with Lab(["home", "office", "a", "b"], nats=nats) as lab:
        with contextlib.ExitStack() as stack:
            at = {host: stack.enter_context(open_socket(lab, host)) for host in lab.hosts}
            seen: dict[str, set[int]] = {"home": set(), "office": set()}
            for host in seen:
                assert not arrives(lab, at, "a", host)
                for server in ("a", "b"):
                    at[host].sendto(b"out", (lab.ip(server), PORT))
                    word, (ip, port) = at[server].recvfrom(100)
                    assert (word, ip) == (b"out", lab.ip(host))  # not HOME, which both of them are
                    seen[host].add(port)
                    at[server].sendto(b"back", (ip, port))
                    assert at[host].recvfrom(100) == (b"back", (lab.ip(server), PORT))
                with lab.inside("a"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other_port:
                    other_port.sendto(b"no answer", (lab.ip(host), max(seen[host])))
                with pytest.raises(TimeoutError):
                    at[host].recv(100)
            assert seen["home"] == {PORT} and len(seen["office"]) == 2


@pytest.mark.parametrize("loss", [0.0, 1e-9])  # with any, each packet has its own, whole checksum
@pytest.mark.parametrize("symmetric", [False, True])
def test_tcp_passes_a_nat(loss: float, symmetric: bool) -> None:
    nats = {"home": Nat(symmetric=symmetric)}
    with Lab(["home", "a"], nats=nats, link=Link(loss=loss)) as lab:
        with lab.inside("a"), socket.create_server((lab.ip("a"), PORT)) as server:
            with lab.inside("home"), socket.create_connection((lab.ip("a"), PORT), 5) as out:
                assert out.getsockname()[0] == HOME
                accepted, (ip, _) = server.accept()
                with accepted:
                    assert ip == lab.ip("home")
                    sent = os.urandom(1 << 20)
                    pump = threading.Thread(target=lambda: (out.sendall(sent), out.shutdown(socket.SHUT_WR)))
                    pump.start()
                    accepted.settimeout(10)
                    got = b"".join(iter(lambda: accepted.recv(1 << 16), b""))
                    pump.join()
                    assert got == sent
        with lab.inside("home"), socket.create_server(("0.0.0.0", PORT)):
            with lab.inside("a"), pytest.raises(TimeoutError):
                socket.create_connection((lab.ip("home"), PORT), SOON_S)


OWNER = """
import subprocess, sys
from scripts.bench.common.netlab import Lab

lab = Lab(["a", "b"])
with lab.inside("b"):
    child = subprocess.Popen([*sys.argv[1:], "sleep", "600"], start_new_session=True)
print(lab.wire_pid, child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("both", [False, True])
def test_nothing_is_left_when_the_owner_is_killed(both: bool) -> None:
    """The wire sees to it; without the wire, programs have to end with their parent."""
    before = namespaces()
    command = [sys.executable, "-c", OWNER, *(["setpriv", "--pdeathsig", "KILL", "--"] if both else [])]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as owner:
        assert owner.stdout is not None
        wire, child = map(psutil.Process, map(int, owner.stdout.readline().split()))
        assert len(namespaces() - before) >= 2
        if both:
            wire.kill()
            eventually(lambda: not running(wire), lambda: "the wire lives")
            assert running(child)
        owner.kill()
    eventually(lambda: not running(wire) and not running(child), lambda: "processes are left")
    assert not namespaces() - before


def test_close_ends_what_runs_inside_also_without_the_wire() -> None:
    before = namespaces()
    with Lab(["a"]) as lab:
        with lab.inside("a"):
            child = subprocess.Popen(["sleep", "600"])
        assert lab.inhabitants() == [child.pid]
        os.kill(lab.wire_pid, signal.SIGKILL)
        eventually(lambda: not running(psutil.Process(lab.wire_pid)), lambda: "the wire lives")
        with pytest.raises(LabError, match="the lab's wire process is gone"):
            lab.cut("a")
    assert child.wait() == -signal.SIGKILL
    assert not namespaces() - before


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert why_not() == "needs ip (iproute2)"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "needs root"


def running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def namespaces() -> set[int]:
    """Inodes of all network namespaces that any process is in or holds open."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for entry in (folder / "ns" / "net", *(folder / "fd").iterdir()):
                with contextlib.suppress(OSError):
                    if entry.readlink().name.startswith("net:["):
                        found.add(entry.stat().st_ino)
    return found

"""A small internet on one Linux machine: delay, bandwidth, loss, and cables that can be pulled.

    with Lab(["a", "b", "c"], link=Link(delay_s=0.04), bandwidth_bps=100e6) as lab:
        with lab.inside("a"):                       # this thread is in host a: so is what it starts
            server = subprocess.Popen([..., "--host", lab.ip("a")])
        lab.set_link("a", "b", Link(delay_s=0.15, loss=0.01))
        lab.cut("c")                                # in silence: nobody is told that c is away
        lab.heal("c")

    Lab(["home", "server"], nats={"home": Nat()})   # home can dial out, and nobody can dial home

A host is a network namespace with one TUN device. One more process, the wire, holds the other ends and
forwards packets in userspace; it is where they wait, are delayed, or vanish. A packet from a to b waits for
a's uplink, for the link's own rate if it has one, travels, and waits for b's downlink. Who would have to wait
for longer than `queue_s` is dropped. (The kernel's own netem is not built into every kernel.)

Nothing is left behind. Namespaces have no names; open files of the owner and the wire keep them alive, and
the devices belong to the wire. When the owner ends, however it does, the wire kills what still runs in the
hosts, and ends; when the wire dies, `close` of the owner does the same. Only if somebody kills both, what
runs in the hosts has to end with its parent by itself, as the programs of a swarm do.

Needs root, /dev/net/tun and iproute2; `why_not()` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import heapq
import itertools
import json
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_VNET_HEADER_BYTES = 10
_NEEDS_CSUM = 0x01
HOME = "192.168.1.2"
"""Where each host behind a NAT believes to be."""
_TCP, _UDP = 6, 17
_MAX_BURST = 64
"""Packets taken from one host before the others have their turn."""
_CLOSE_S = 10.0


class LabError(Exception):
    """There can be no lab, or there is none any more; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What happens to packets on the way from one host to another."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Up to so much more or less, evenly; packets stay in order."""
    loss: float = 0.0
    """Share of packets that vanish."""
    bandwidth_bps: float = 0.0
    """Bits per second; 0 = no limit but those of the hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nat:
    """A home router: packets come in only as answers, from the very address and port that was written to."""

    symmetric: bool = False
    """Each destination sees another port, so nobody can be told where to knock; else the port is kept."""


def why_not() -> str:
    """What keeps a lab from working here, or nothing."""
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    if shutil.which("ip") is None:
        return "needs ip (iproute2)"
    return _refusal()


@functools.cache
def _refusal() -> str:
    """Why the kernel gives no lab, or nothing; found by making one."""
    try:
        with Lab(["probe"]):
            return ""
    except LabError as error:
        return str(error)


class Lab:
    """Hosts that see each other and nothing else. `with Lab(...)`, or `close()`."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        link: Link = Link(),
        links: Mapping[tuple[str, str], Link] | None = None,
        nats: Mapping[str, Nat] | None = None,
        bandwidth_bps: float = 0.0,
        queue_s: float = 0.2,
        mtu_bytes: int = 1500,
        seed: int = 0,
    ) -> None:
        """`link` holds between all hosts, `links` for the pairs that it names, in both directions.

        `nats`: the hosts that have a router of their own between them and the others. All of them believe to
        be `HOME`. The addresses of such a lab are of a kind that programs take for public ones.

        `bandwidth_bps` is each host's up and down; 0 = no limit. `seed`: of losses and jitter.

        Raises:
            LabError: no lab can be made here.
        """
        self.hosts = tuple(hosts)
        self._number = {host: i for i, host in enumerate(self.hosts)}
        self._namespaces: list[int] = []
        links = dict(links or {})
        self._nats = {self._index(host): nat for host, nat in (nats or {}).items()}
        # Super-segments save nine tenths of the CPU, but to lose one is to lose 64 KiB at once.
        offload = not any(one.loss for one in (link, *links.values()))
        self._wire = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--wire"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            ready = self._ask(
                "setup", ips=[self.ip(host) for host in self.hosts], queue_s=queue_s, mtu_bytes=mtu_bytes,
                offload=offload, seed=seed, nats={host: nat.symmetric for host, nat in self._nats.items()},
            )  # fmt: skip
            for number in ready["namespaces"]:
                self._namespaces.append(os.open(f"/proc/{self._wire.pid}/fd/{number}", os.O_RDONLY))
            self._inodes = {os.fstat(fd).st_ino for fd in self._namespaces}
            for host in self.hosts:
                self.set_bandwidth(host, bandwidth_bps)
            for a, b in itertools.combinations(self.hosts, 2):
                self.set_link(a, b, links.get((a, b), links.get((b, a), link)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- hosts --------------------------------------------------------------------------------------

    def ip(self, host: str) -> str:
        """The address that others see the host at: its own, if there is no NAT."""
        # Labs need no addresses of their own: each has a network to itself.
        number = self._index(host) + 1
        return f"{44 if self._nats else 10}.77.{number // 250}.{number % 250 + 1}"

    def inner_ip(self, host: str) -> str:
        """The address that the host knows as its own."""
        return HOME if self._index(host) in self._nats else self.ip(host)

    def _index(self, host: str) -> int:
        if host not in self._number:
            raise LabError(f"the lab has no host {host!r}; it has {', '.join(self.hosts)}")
        return self._number[host]

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """This thread is in that host: sockets that it opens, processes and threads that it starts."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            enter(self._namespaces[self._index(host)])
            try:
                yield
            finally:
                enter(before)
        finally:
            os.close(before)

    def inhabitants(self) -> list[int]:
        """Process ids of what runs in the hosts."""
        return _inhabitants(self._inodes)

    # -- the network, while it runs -----------------------------------------------------------------

    def set_link(self, a: str, b: str, link: Link, *, both: bool = True) -> None:
        """Change the way from a to b, and back if `both`."""
        self._ask("link", a=self._index(a), b=self._index(b), **asdict(link))
        if both:
            self._ask("link", a=self._index(b), b=self._index(a), **asdict(link))

    def set_bandwidth(self, host: str, bandwidth_bps: float) -> None:
        """Of a host's cable, up and down alike."""
        self._ask("bandwidth", a=self._index(host), bps=bandwidth_bps)

    def cut(self, a: str, b: str | None = None) -> None:
        """Pull a's cable, or interrupt only the link between a and b. No reset reaches anyone."""
        self._cut(a, b, True)

    def heal(self, a: str, b: str | None = None) -> None:
        """Undo `cut` of the same."""
        self._cut(a, b, False)

    def _cut(self, a: str, b: str | None, on: bool) -> None:
        self._ask("cut", a=self._index(a), b=None if b is None else self._index(b), on=on)

    def partition(self, one: Collection[str], other: Collection[str], *, on: bool = True) -> None:
        """Interrupt all links between two groups; `on=False` heals them."""
        for a, b in itertools.product(one, other):
            self._cut(a, b, on)

    def stats(self) -> dict[str, Any]:
        """Of the wire `cpu_s`, `packets` and `late_s`, the worst; of each host bytes `sent` and `received`.

        `dropped` are packets, counted by who sent them or, at a downlink, by who missed them.
        """
        told = self._ask("stats")
        told["hosts"] = dict(zip(self.hosts, told["hosts"], strict=True))
        return told

    # -- the wire process ---------------------------------------------------------------------------

    @property
    def wire_pid(self) -> int:
        """The process that carries the packets."""
        return self._wire.pid

    def _ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        assert self._wire.stdin is not None and self._wire.stdout is not None
        try:
            self._wire.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._wire.stdin.flush()
            line = self._wire.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        if not line:
            raise LabError("the lab's wire process is gone")
        answer = json.loads(line)
        if "error" in answer:
            raise LabError(answer["error"])
        return answer

    def close(self) -> None:
        """End what runs in the hosts, and the hosts."""
        assert self._wire.stdin is not None and self._wire.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._wire.stdin.close()  # which is the sign to end
        try:
            self._wire.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._wire.kill()
            self._wire.wait()
        self._wire.stdout.close()
        if self._namespaces:
            _evict(self._inodes)
        for fd in self._namespaces:
            os.close(fd)
        self._namespaces = []


# --- namespaces and who lives in them -----------------------------------------------------------------------

_libc = ctypes.CDLL(None, use_errno=True)


def enter(namespace: int) -> None:
    """Take this thread to the network of an open namespace; only root may."""
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise LabError(f"cannot enter a network namespace: {os.strerror(ctypes.get_errno())}")


def _inhabitants(inodes: Collection[int]) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if (folder / "ns" / "net").stat().st_ino in inodes:
                    found.append(int(folder.name))
    return found


def _evict(inodes: Collection[int]) -> None:
    """SIGKILL to whoever lives there, until nobody does."""
    end = time.monotonic() + _CLOSE_S
    while (pids := _inhabitants(inodes)) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


# --- the wire -----------------------------------------------------------------------------------------------


class _Line:
    """What one packet after the other goes through, at a rate."""

    __slots__ = ("free_at", "s_per_byte")

    def __init__(self) -> None:
        self.s_per_byte = self.free_at = 0.0

    def set_rate(self, bps: float) -> None:
        self.s_per_byte = 8.0 / bps if bps else 0.0

    def through(self, now: float, size: int, queue_s: float) -> float:
        """When a packet that comes now is through; negative: it is dropped."""
        if not self.s_per_byte:
            return now
        start = max(now, self.free_at)
        if start - now > queue_s:
            return -1.0
        self.free_at = start + size * self.s_per_byte
        return self.free_at


class _Way:
    """From one host to another."""

    __slots__ = ("cut", "delay_s", "jitter_s", "last", "line", "loss")

    def __init__(self) -> None:
        self.delay_s = self.jitter_s = self.loss = self.last = 0.0
        self.line, self.cut = _Line(), False


class _Nat:
    """Rewrites the addresses of one host's packets, and remembers whom it wrote to."""

    def __init__(self, inside: str, outside: str, symmetric: bool, header: int) -> None:
        self._inside, self._outside = (bytes(map(int, ip.split("."))) for ip in (inside, outside))
        self._symmetric, self._header = symmetric, header
        self._outer: dict[tuple[int, bytes, bytes], bytes] = {}
        """(protocol, port inside, far address and port): the port outside."""
        self._inner: dict[tuple[int, bytes, bytes], bytes] = {}
        """(protocol, port outside, far address and port): the port inside."""

    def out(self, packet: bytes) -> bytes | None:
        """As the world sees it; None if such a packet is not let through."""
        ip, at = self._header, self._ports(packet)
        if at is None or packet[ip + 12 : ip + 16] != self._inside:
            return None
        protocol, port = packet[ip + 9], packet[at : at + 2]
        far = packet[ip + 16 : ip + 20] + packet[at + 2 : at + 4]
        outer = self._outer.get((protocol, port, far))
        if outer is None:
            outer = struct.pack("!H", 30000 + len(self._outer)) if self._symmetric else port
            self._outer[protocol, port, far], self._inner[protocol, outer, far] = outer, port
        return self._rewritten(packet, ip + 12, self._outside, at, outer)

    def into(self, packet: bytes) -> bytes | None:
        """As the host sees it; None if it is no answer."""
        ip, at = self._header, self._ports(packet)
        if at is None:
            return None
        port, far = packet[at + 2 : at + 4], packet[ip + 12 : ip + 16] + packet[at : at + 2]
        inner = self._inner.get((packet[ip + 9], port, far))
        return None if inner is None else self._rewritten(packet, ip + 16, self._inside, at + 2, inner)

    def _ports(self, packet: bytes) -> int | None:
        """Where the ports are, of TCP and UDP."""
        at = self._header + 4 * (packet[self._header] & 0x0F)
        return at if packet[self._header + 9] in (_TCP, _UDP) and len(packet) >= at + 8 else None

    def _rewritten(self, packet: bytes, address_at: int, address: bytes, port_at: int, port: bytes) -> bytes:
        new, ip = bytearray(packet), self._header
        before = packet[address_at : address_at + 4]
        new[address_at : address_at + 4], new[port_at : port_at + 2] = address, port
        _mend(new, ip + 10, before, address)
        udp = packet[ip + 9] == _UDP
        at = self._ports(packet)
        assert at is not None
        at += 6 if udp else 16
        if ip and packet[0] & _NEEDS_CSUM:  # only the sum of the pseudo-header is there, and not inverted
            _mend(new, at, address, before)
        elif not udp or packet[at : at + 2] != b"\0\0":
            _mend(new, at, before + packet[port_at : port_at + 2], address + port)
        return bytes(new)


def _mend(packet: bytearray, at: int, before: bytes, after: bytes) -> None:
    """Correct an internet checksum for words that changed (RFC 1624, equation 3)."""
    words = len(before) // 2
    total = ~struct.unpack_from("!H", packet, at)[0] & 0xFFFF
    total += sum(~word & 0xFFFF for word in struct.unpack(f"!{words}H", before))
    total += sum(struct.unpack(f"!{words}H", after))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", packet, at, ~total & 0xFFFF)


class _Host:
    """One namespace, its device, its cable, its router if it has one, its counters."""

    def __init__(self, ip: str, mtu_bytes: int, offload: bool, nat: _Nat | None) -> None:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            raise LabError(f"cannot make a network namespace: {os.strerror(ctypes.get_errno())}")
        self.address = bytes(map(int, ip.split(".")))
        self.namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            self.tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            flags = _IFF_TUN | _IFF_NO_PI | (_IFF_VNET_HDR if offload else 0)
            fcntl.ioctl(self.tun, _TUNSETIFF, struct.pack("16sH22x", b"net0", flags))
            if offload:
                fcntl.ioctl(self.tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
        except OSError as error:
            raise LabError(f"cannot make a TUN device: {error.strerror}") from None
        self.nat = nat
        commands = (
            f"link set net0 mtu {mtu_bytes} txqueuelen 2000 addrgenmode none up\n"
            f"link set lo up\naddress add {ip if nat is None else HOME}/16 dev net0\n"
        )
        if nat is not None:
            commands += "route add default dev net0\n"
        done = subprocess.run(["ip", "-batch", "-"], input=commands, capture_output=True, text=True)
        if done.returncode:
            raise LabError(f"cannot set up a host's network: {done.stderr.strip()}")
        self.up, self.down, self.cut = _Line(), _Line(), False
        self.sent = self.received = self.dropped = 0


class _Wire:
    """Forwards packets between the TUNs until its standard input ends."""

    def __init__(self) -> None:
        self.hosts: list[_Host] = []
        self._heap: list[tuple[float, int, int, int, bool, bytes]] = []
        """(due, tie, destination, size, past the downlink, packet)."""
        self._ties = itertools.count()
        self._packets, self._late_s = 0, 0.0

    # -- commands ---------------------------------------------------------------------------------

    def setup(self, m: dict[str, Any]) -> dict[str, Any]:
        self._queue_s, self._random = m["queue_s"], random.Random(m["seed"])
        self._header = _VNET_HEADER_BYTES if m["offload"] else 0
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        for i, ip in enumerate(m["ips"]):
            nat = m["nats"].get(str(i))
            router = None if nat is None else _Nat(HOME, ip, nat, self._header)
            self.hosts.append(_Host(ip, m["mtu_bytes"], m["offload"], router))
        enter(own)
        os.close(own)
        self._ways = [[_Way() for _ in self.hosts] for _ in self.hosts]
        self._by_address = {host.address: i for i, host in enumerate(self.hosts)}
        self._by_tun = {host.tun: i for i, host in enumerate(self.hosts)}
        try:  # packets must not wait behind the programs that sent them
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        except OSError:
            with contextlib.suppress(OSError):
                os.nice(-15)
        return {"namespaces": [host.namespace for host in self.hosts]}

    def command(self, m: dict[str, Any]) -> dict[str, Any]:
        kind = m["command"]
        if kind == "setup":
            return self.setup(m)
        if kind == "stats":
            times = os.times()
            hosts = [{"sent": h.sent, "received": h.received, "dropped": h.dropped} for h in self.hosts]
            cpu_s = times.user + times.system
            return {"cpu_s": cpu_s, "packets": self._packets, "late_s": self._late_s, "hosts": hosts}
        if kind == "bandwidth":
            self.hosts[m["a"]].up.set_rate(m["bps"])
            self.hosts[m["a"]].down.set_rate(m["bps"])
        elif kind == "link":
            way = self._ways[m["a"]][m["b"]]
            way.delay_s, way.jitter_s, way.loss = m["delay_s"], m["jitter_s"], m["loss"]
            way.line.set_rate(m["bandwidth_bps"])
        elif m["b"] is None:
            self.hosts[m["a"]].cut = m["on"]
        else:
            self._ways[m["a"]][m["b"]].cut = self._ways[m["b"]][m["a"]].cut = m["on"]
        return {}

    # -- packets ----------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until the owner is gone."""
        buffered = b""
        while True:
            wait_s = max(0.0, self._heap[0][0] - time.monotonic()) if self._heap else None
            for fd in select.select([0, *(host.tun for host in self.hosts)], [], [], wait_s)[0]:
                if fd != 0:
                    self._take(self._by_tun[fd])
                    continue
                data = os.read(0, 65536)
                if not data:
                    return
                *lines, buffered = (buffered + data).split(b"\n")
                for line in lines:
                    try:
                        answer = self.command(json.loads(line))
                    except LabError as error:
                        answer = {"error": str(error)}
                    os.write(1, json.dumps(answer).encode() + b"\n")
            self._deliver()

    def _take(self, source: int) -> None:
        """Read what a host sends, and decide when it arrives."""
        host, header = self.hosts[source], self._header
        for _ in range(_MAX_BURST):
            try:
                packet = os.read(host.tun, 70000)
            except BlockingIOError:
                return
            to = self._by_address.get(packet[header + 16 : header + 20])
            if to is None or to == source or packet[header] >> 4 != 4:
                continue
            if host.nat is not None:
                translated = host.nat.out(packet)
                if translated is None:
                    continue
                packet = translated
            now, size = time.monotonic(), len(packet) - header
            if header and packet[1]:  # a super-segment: its pieces would each have had headers
                header_bytes, piece = struct.unpack_from("=HH", packet, 2)
                size += header_bytes * max(0, (size - header_bytes - 1) // piece)
            self._packets += 1
            host.sent += size
            due = self._due(host, self._ways[source][to], size, now)
            if due < 0:
                host.dropped += 1
            else:
                heapq.heappush(self._heap, (due, next(self._ties), to, size, False, packet))

    def _due(self, host: _Host, way: _Way, size: int, now: float) -> float:
        """When a packet reaches the other host's downlink; negative: never."""
        if host.cut or way.cut or (way.loss and self._random.random() < way.loss):
            return -1.0
        due = host.up.through(now, size, self._queue_s)
        if due >= 0:
            due = way.line.through(due, size, self._queue_s)
        if due < 0:
            return -1.0
        due += way.delay_s
        if way.jitter_s:
            way.last = due = max(way.last, due + way.jitter_s * (2 * self._random.random() - 1))
        return due

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._heap and self._heap[0][0] <= now:
            due, _, to, size, through, packet = heapq.heappop(self._heap)
            host = self.hosts[to]
            if host.cut:
                host.dropped += 1
                continue
            if not through:
                end = host.down.through(due, size, self._queue_s)
                if end < 0:
                    host.dropped += 1
                    continue
                if end > now:
                    heapq.heappush(self._heap, (end, next(self._ties), to, size, True, packet))
                    continue
            self._late_s = max(self._late_s, now - due)
            if host.nat is not None:
                answer = host.nat.into(packet)
                if answer is None:
                    host.dropped += 1
                    continue
                packet = answer
            try:
                os.write(host.tun, packet)
                host.received += size
            except OSError:  # the kernel takes no more for now
                host.dropped += 1


def _wire() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    wire = _Wire()
    try:
        wire.serve()
    finally:
        _evict({os.fstat(host.namespace).st_ino for host in wire.hosts})


if __name__ == "__main__":
    if sys.argv[1:] != ["--wire"]:
        sys.exit(f"{__doc__}\nHere: {why_not() or 'it works'}")
    _wire()

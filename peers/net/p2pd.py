"""Our own libp2p daemon (p2pd): started fast, watched, and never left behind.

    python ──stdin pipe──▶ sh (own session) ──pdeathsig──▶ p2pd
       ◀───────────────────── stdout pipe ───────────────────┘

- python dies (or closes the pipe): sh reads end of file, kills p2pd, removes the private directory.
- sh dies: the kernel kills p2pd, where there is a way to have it so (`killed_with_parent`): python sees
  its output end and removes the directory. Elsewhere python kills p2pd when it ends itself; if it dies in
  the same moment, p2pd ends a minute later (`idleTimeout`).
- p2pd dies: python sees its output end (`died`), closes the pipe, and sh removes the directory.
- All at once: the directory stays, its lock is free, and the next daemon started here sweeps it.

The session of its own keeps a terminal's Ctrl-C away from p2pd, which is needed to leave politely.
Nothing here imports hivemind, so that p2pd can start while slow imports are still running.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import importlib.util
import logging
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from peers.net.identity import Identity, host_part, to_multiaddr
from peers.system import killed_with_parent, private_folder
from peers.waiting import happens
from swarm.errors import SetupError
from swarm.ids import PeerId

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 15.0
"""p2pd answers in 0.15 s on an idle core; this allows for a very busy one."""

MAX_RELAYS = 4
"""That p2pd is told of. It takes a place at each, and nowhere for three minutes if one of them is dead or no
relay. Four, since it believes the address at which four peers see it, and punches no holes before."""
MAX_CONNECTIONS = 4096
"""Of p2pd to other peers; each takes about 100 kB there."""
_RELAY_BUFFER_BYTES = 256 * 1024
"""For each direction of each relayed connection. p2pd's default, 16 MiB, is no faster."""

_WATCHDOG = """
directory=$1; shift
"$@" </dev/null &
echo "pid $!"
exec >/dev/null 2>&1
while read -r _; do :; done
kill -KILL $!
wait
rm -rf "$directory"
"""
"""Ends when its standard input does. `read` keeps it asleep; no line is ever written."""

P2PD_ENVIRONMENT = {
    "GOLOG_LOG_LEVEL": "fatal",
    # With more, Go's threads spin while they look for work: half of p2pd's CPU at a stage peer's rate (3.0
    # against 6.5 ms per MB, both ends; at full speed 2.3 against 3.1, and 340 against 270 MB/s on two cores).
    # One thread moves about 800 MB/s; set the variable for a faster link.
    "GOMAXPROCS": "1",
}
"""What p2pd is started with unless our own environment says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """What p2pd is told. Addresses are multiaddrs or `host:port`."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every address of this machine."""
    port: int = 0
    """TCP port; 0 lets the system choose one."""
    any_port: bool = False
    """The user did not choose `port`: a p2pd that is started again may take another one."""
    announce: tuple[str, ...] = ()
    """Addresses under which others reach us, if p2pd cannot see them itself (port forwarding)."""
    named: tuple[str, ...] = ()
    """The same as the user wrote it: names may lead elsewhere later."""
    seen_at: str = ""
    """The host there, if it is where others saw us, and not what the user said."""
    reachable: bool | None = None
    """Whether others can dial us; None: p2pd finds out, which takes minutes and several public peers."""
    outside: str = ""
    """Where a router that keeps ports shows us, if others cannot dial us."""
    relays: tuple[str, ...] = ()
    """Multiaddrs of peers, ending in `/p2p/<id>`, through which others reach us if they cannot dial us."""
    be_relay: bool = False
    """Relay for others, on this machine's bandwidth, while we are reachable."""
    relay_guests: int = 64
    """Peers that we relay for at a time."""
    direct: bool = True
    """Connect to peers beside p2pd, where that can be done (`peers.net.direct`)."""
    direct_port: int = 0
    """TCP port for such connections; 0 lets the system choose one."""
    memory: bool = True
    """Those to other processes of this machine hand over in memory."""


def hivemind_folder() -> Path | None:
    """Where hivemind is installed, without importing it; None if it is not."""
    spec = importlib.util.find_spec("hivemind")
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(locations[0]) if locations else None


def most_connections() -> int:
    """How many peers may be connected: half of the files that a process may open, of which each takes one."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(64, min(MAX_CONNECTIONS, soft // 2))


def p2pd_path() -> Path:
    """The p2pd binary that hivemind's wheel brings. Raises SetupError: it is missing or not executable."""
    folder = hivemind_folder()
    if folder is None:
        raise SetupError("hivemind is not installed: pip install hivemind")
    path = folder / "hivemind_cli" / "p2pd"
    if not path.is_file():
        raise SetupError(f"hivemind was installed without its p2pd binary ({path}): install its wheel")
    if not os.access(path, os.X_OK):
        raise SetupError(f"{path} is not executable: chmod +x it")
    return path


_ADVICE = {
    "address already in use": "port {port} is already in use on {host}: stop the program that uses it (see: "
    "ss -ltnp 'sport = :{port}'), or choose another one with --port (--port 0 picks a free one)",
    "cannot assign requested address": "this machine has no address {host}: listen on 0.0.0.0, and announce "
    "the address under which others reach you",
    "permission denied": "not allowed to listen on {host}:{port}: choose a port above 1023",
    "multiaddr": "p2pd does not understand an address: {last_line}",
    "": "p2pd did not start on {host}:{port}: {last_line}",
}
"""What a person can do about p2pd's last words."""


def _explain(last_line: str, options: DaemonOptions) -> str:
    advice = next(text for words, text in _ADVICE.items() if words in last_line)
    return advice.format(
        host=options.host, port=options.port, last_line=last_line or "it ended without a word"
    )


def _claim_port(options: DaemonOptions) -> None:
    """Refuse a port on which another program listens. p2pd would share it (SO_REUSEPORT) with another p2pd
    of the same user, and each would get half of the calls. Raises SetupError: it is in use.
    """
    if not options.port:
        return
    _, kind, host = host_part(options.host).split("/")
    family = socket.AF_INET6 if kind == "ip6" else socket.AF_INET
    try:  # connections that ended a moment ago do not hinder; one that listens does, whatever it allows
        socket.create_server((host, options.port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SetupError(_explain("address already in use", options)) from None
        # p2pd says anything else itself


class Daemon:
    """A p2pd of our own. `spawn` starts it at once and does not wait; `ready` does."""

    def __init__(self, options: DaemonOptions, identity: Identity, identity_path: Path | None) -> None:
        announce, named = tuple(map(to_multiaddr, options.announce)), options.named or options.announce
        self.options = replace(options, announce=announce, named=named)
        self.identity = identity
        self.peer_id: PeerId = identity.peer_id
        # The path of a unix socket has to be shorter than 108 bytes.
        short = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
        self.directory, lock = private_folder(Path(short), "swarm-")
        self._locks = [lock]
        self.control_path = self.directory / "p2pd.sock"
        self.pid: int | None = None
        """Of p2pd itself; known once it is ready."""
        self.addresses: tuple[str, ...] = ()
        """Multiaddrs that p2pd listens on, without the peer id; known once it is ready."""
        self.on_death: Callable[[], None] | None = None
        """Called in the loop when p2pd ends although it was not asked to."""
        self.identity_path = identity_path
        self._identity_path = identity_path or self.directory / "identity"
        self._config_path = self.directory / "p2pd.json"
        self._process: subprocess.Popen[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._output = b""
        self._lines: deque[str] = deque(maxlen=20)
        self._up = False
        self._ended = False
        self._closing = False
        self._changed: asyncio.Event = asyncio.Event()

    @classmethod
    def spawn(
        cls, options: DaemonOptions, *, identity_path: Path | None = None, identity: Identity | None = None
    ) -> Daemon:
        """Start p2pd in the background. With neither path nor identity, the identity is new and temporary.

        A name that is announced is looked up here, which holds up the loop.

        Raises:
            SetupError: no binary, a bad address, or an identity file that cannot be used.
        """
        binary = p2pd_path()
        if identity_path is not None:
            identity = Identity.load_or_create(identity_path)
        identity = identity or Identity.generate()
        _claim_port(options)
        daemon = cls(options, identity, identity_path)
        try:
            daemon._start(binary)
        except BaseException:
            daemon._release()
            raise
        return daemon

    def _start(self, binary: Path) -> None:
        if self._identity_path.parent == self.directory:
            with os.fdopen(os.open(self._identity_path, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(self.identity.to_file_bytes())
        self._locks.append(os.open(self._identity_path, os.O_RDONLY))
        try:
            fcntl.flock(self._locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SetupError(
                f"the identity {self._identity_path} is in use by another process: "
                "stop that one, or give each program an identity file of its own"
            ) from None
        self._config_path.write_text('{"Relay": {"Enabled": false}}')
        command = killed_with_parent([str(binary), *self._flags()])
        # The locks are inherited: they are free only when python, sh and p2pd are all gone.
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "sh", str(self.directory), *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            pass_fds=self._locks, env={**P2PD_ENVIRONMENT, **os.environ},
        )  # fmt: skip
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def _flags(self) -> list[str]:
        options = self.options
        relays = options.be_relay and options.reachable is True
        flags: dict[str, object] = {
            "listen": f"/unix{self.control_path}",
            "id": self._identity_path,
            "hostAddrs": f"{host_part(options.host)}/tcp/{options.port}",
            "tls": 1,
            "connManager": 1,
            # By default it closes connections above 512, down to 256: a coordinator of more would lose them.
            "connHi": most_connections(),
            "connLo": most_connections() * 3 // 4,
            "autonat": 1,
            "dhtServer": 1,
            "natPortMap": 0,  # no UPnP
            "relay": int(relays or bool(options.relays)),
            # With discovery p2pd looks for strangers first, and for the relays that we know 15 s later.
            "autoRelay": int(bool(options.relays)),
            "relayDiscovery": 0,
            "relayService": int(relays),
            "relayMaxReservations": options.relay_guests,
            "relayMaxCircuits": 16,  # of each guest; each may take half a MB of memory
            "relayBufferSize": _RELAY_BUFFER_BYTES,
            # Bytes each way, and time, after which it is reset; by default 4 GiB, 30 minutes.
            "relayDataLimit": 1 << 40,
            "relayTimeLimit": f"{7 * 24}h",
            # Should everything else fail, p2pd ends by itself when no client attaches.
            "idleTimeout": "60s",
        }
        if not flags["relay"]:
            # No flag turns off that p2pd relays 128 kB for any peer, for which it reads a table (0.37 s
            # of a core, 31 MB). Relayed peers are dialled anyway.
            flags["f"] = self._config_path
        if options.announce:
            flags["announceAddrs"] = ",".join(options.announce)
        if options.relays:
            flags["trustedRelays"] = ",".join(options.relays)
        if options.reachable is not None:
            flags["forceReachabilityPublic" if options.reachable else "forceReachabilityPrivate"] = 1
        return [f"-{name}={value}" for name, value in flags.items()]

    # -- its output -----------------------------------------------------------------------------

    def _read_output(self) -> None:
        """Take in what p2pd printed; never blocks."""
        assert self._process is not None and self._process.stdout is not None
        try:
            data = os.read(self._process.stdout.fileno(), 65536)
        except BlockingIOError:
            return
        if not data:
            self._ended = True
        self._output += data
        *lines, self._output = self._output.split(b"\n")
        self._output = self._output[-4096:]
        for raw in lines:
            line = raw.decode(errors="replace").strip()[:1000]
            logger.debug("p2pd: %s", line)
            if line.startswith("pid ") and self.pid is None:
                self.pid = int(line[4:])
            elif line.startswith("/"):
                self.addresses += (line,)  # printed last: the first one means that it listens
            elif line and not line.startswith(("Control socket:", "Peer ID:", "Peer Addrs:")):
                self._lines.append(line)
        self._up = self._up or bool(self.addresses and self.pid)

    async def ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until p2pd listens, and watch it from then on. Raises SetupError: it does not; says why."""
        assert self._process is not None and self._process.stdout is not None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._process.stdout.fileno(), self._on_output)
        self._on_output()
        deadline = time.monotonic() + timeout_s
        while not self._up:
            if self._ended:
                raise SetupError(_explain(self._lines[-1] if self._lines else "", self.options))
            self._changed.clear()
            if not await happens(self._changed, deadline - time.monotonic()):
                raise SetupError(f"p2pd did not start within {timeout_s:g} s; is the machine overloaded?")

    def _on_output(self) -> None:
        self._read_output()
        self._changed.set()
        if not self._ended:
            return
        self._unwatch()
        if self._up and not self._closing:
            last_words = next((line for line in self._lines if "panic" in line), "") or " ".join(self._lines)
            logger.error("p2pd (pid %s) ended unexpectedly: %s", self.pid, last_words[-500:] or "no word")
            self._release()
            if self.on_death is not None:
                self.on_death()

    # -- the end --------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._process is not None and not self._ended

    def kill(self) -> None:
        """SIGKILL p2pd. Its end is noticed, and told to `on_death`, as that of any other."""
        if self.pid is not None and self.alive:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def expect_end(self) -> None:
        """From now on the end of p2pd is no accident: it ends when its last lasting client detaches."""
        self._closing = True

    def close_now(self) -> None:
        """End p2pd and sh and remove the directory; blocks for some milliseconds. Idempotent."""
        self.expect_end()
        self._unwatch()
        self._release()

    def _unwatch(self) -> None:
        if self._loop is not None and self._process is not None and self._process.stdout is not None:
            self._loop.remove_reader(self._process.stdout.fileno())

    def _release(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:  # a stopped sh reads no end of file
                process.kill()
                process.wait()
            self._kill_orphan(process)
            process.stdout.close()
            self._ended = True
        shutil.rmtree(self.directory, ignore_errors=True)
        while self._locks:
            os.close(self._locks.pop())

    def _kill_orphan(self, process: subprocess.Popen[bytes]) -> None:
        """If sh was killed where there is no pdeathsig, p2pd lives on and holds the pipe."""
        assert process.stdout is not None
        if process.returncode == 0 or self.pid is None:
            return
        with contextlib.suppress(OSError):
            while select.select([process.stdout], [], [], 0.2)[0]:
                if not os.read(process.stdout.fileno(), 65536):
                    return
            os.kill(self.pid, signal.SIGKILL)

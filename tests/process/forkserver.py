"""A process that has imported what a peer needs, and forks one whenever a test starts a program.

A peer's imports take 2 s of a core, more than most tests need it for. A forked program is what
`python -m peers.cli` would be after its imports: a session, standard streams and an environment of its own,
and one thread; inside a lab it enters the host's network first. Benchmarks that measure starts, and swarms
of other processes, start a new Python instead, but for those whose `Child` is told to `fork_children`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest.mock import patch

from peers.options import VARIABLES
from peers.programs.fleet import MAX_LINE, Child
from scripts.bench.common import netlab

ROOT = Path(__file__).resolve().parents[2]
MAX_REQUEST_BYTES = 1 << 20
PRELOADED = (
    "peers.owner.health_socket",
    "peers.programs.roles",
    "peers.stage.server",
    "peers.trainer",
    "peers.watch.metrics",
    "swarm.model.graph.custom_model",
    "swarm.model.reference",
    "torch.fx.experimental.symbolic_shapes",
    "uvloop",
)
"""What the roles import when they start, and torch at the first backward."""


class Forked:
    """A forked program; the methods are those of `subprocess.Popen` that `Program` uses."""

    def __init__(self, pid: int, status: int, stdout: IO[str], stderr: IO[str]) -> None:
        self.pid = pid
        self.stdout, self.stderr = stdout, stderr
        self.status = status
        """Readable when it has ended."""
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, minus the signal if one killed it; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it still prints, and what it complains of, when it has ended."""
        with ThreadPoolExecutor(1) as pool, self.stdout, self.stderr:
            complaints = pool.submit(self.stderr.read)
            printed = self.stdout.read()
        self.wait(timeout)
        return printed, complaints.result()

    def wait(self, timeout: float) -> int:
        """Wait for the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            if not select.select([self.status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            told = os.read(self.status, 16)
            assert told, "the fork server is gone"
            os.close(self.status)
            self.returncode = int(told)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """To this process only; nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """The side of the tests. `also`: modules that its programs will import, besides those of all roles."""

    def __init__(self, also: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-m", "tests.process.forkserver", str(theirs.fileno()), str(os.getpid())]
            words += also
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(words, cwd=ROOT, pass_fds=[theirs.fileno()], env=environment)
        self._socket = ours

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], *, stdin: bytes = b""
    ) -> Forked:
        """Start `swarm ARGUMENTS` in the network of this thread.

        It dies with this server, which dies with the tests.
        """
        request = json.dumps({"arguments": [*arguments], "environment": dict(environment)}).encode()
        assert len(request) < MAX_REQUEST_BYTES
        pipes = [os.pipe() for _ in range(3)]
        given = [*(write for _, write in pipes), os.open("/proc/thread-self/ns/net", os.O_RDONLY)]
        given.append(os.memfd_create("stdin"))
        os.pwrite(given[-1], stdin, 0)
        socket.send_fds(self._socket, [len(request).to_bytes(4, "big")], given)
        self._socket.sendall(request)
        for fd in given:
            os.close(fd)
        pid = int.from_bytes(self._socket.recv(4), "big")
        assert pid, "the fork server is gone"
        out, err, status = (read for read, _ in pipes)
        streams = (os.fdopen(one, encoding="utf-8", errors="replace") for one in (out, err))
        return Forked(pid, status, *streams)

    def close(self) -> None:
        """End it, and what it forked and is still there."""
        self._socket.close()
        self._process.wait(30.0)

    @contextlib.contextmanager
    def fork_children(self) -> Iterator[None]:
        """Meanwhile the roles that this process starts as its children are forked here."""

        async def spawn(
            cls: type[Child], arguments: Sequence[str], hear: Callable[[Child, str], None], *,
            stdin: bytes = b"", stderr: int | None = None, environment: Mapping[str, str] | None = None,
        ) -> Child:  # fmt: skip
            kept = {k: v for k, v in os.environ.items() if k not in VARIABLES}
            process: Any = ForkedProcess(self.start(arguments, {**kept, **(environment or {})}, stdin=stdin))
            return cls(process, hear)

        with patch.object(Child, "spawn", classmethod(spawn)):
            yield


class ForkedProcess:
    """A forked program; the methods are those of `asyncio.subprocess.Process` that `Child` uses."""

    def __init__(self, forked: Forked) -> None:
        self._forked, self.pid = forked, forked.pid
        self.stdin, self.stdout = None, asyncio.StreamReader(MAX_LINE)
        """Both of its streams are in the latter."""
        self._loop, self._over, self._streams = asyncio.get_running_loop(), asyncio.Event(), 2
        self._loop.add_reader(forked.status, self._ended)
        for stream in (forked.stdout, forked.stderr):
            self._loop.add_reader(stream.fileno(), self._read, stream, bytearray())

    def _read(self, stream: IO[str], rest: bytearray) -> None:
        new = os.read(stream.fileno(), 1 << 16)
        rest += new
        lines = rest.rfind(b"\n") + 1 if new else len(rest)
        self.stdout.feed_data(bytes(rest[:lines]))
        del rest[:lines]
        if not new:
            self._loop.remove_reader(stream.fileno())
            stream.close()
            self._streams -= 1
            self._look()

    def _ended(self) -> None:
        self._loop.remove_reader(self._forked.status)
        self._forked.poll()
        self._look()

    def _look(self) -> None:
        if not self._streams:
            self.stdout.feed_eof()
            if self.returncode is not None:
                self._over.set()

    @property
    def returncode(self) -> int | None:
        return self._forked.returncode

    async def wait(self) -> None:
        await self._over.wait()


def serve(requests: socket.socket) -> None:
    """Fork what is asked for until the tests are gone."""
    children: dict[int, int] = {}
    reads, writes = socket.socketpair()
    reads.setblocking(False)
    writes.setblocking(False)
    signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([requests, reads], [], [])
        if reads in readable:
            reads.recv(4096)
            _reap(children)
        if requests not in readable:
            continue
        head, fds, _, _ = socket.recv_fds(requests, 4, 5)
        if not head:
            return
        body = _read(requests, int.from_bytes(head, "big"))
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (requests, reads, writes):
                one.close()
            for status in children.values():
                os.close(status)
            _become(json.loads(body), *fds)
        out, err, children[pid], network, stdin = fds
        for one in (out, err, network, stdin):
            os.close(one)
        requests.sendall(pid.to_bytes(4, "big"))


def _read(stream: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        found += stream.recv(count - len(found))
    return found


def _reap(children: dict[int, int]) -> None:
    """Tell the tests who has ended, and how."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            told = children.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(told)


def _enter(network: int) -> None:
    """Join a network namespace; only root may, and a program of this one's network need not."""
    if Path("/proc/self/ns/net").stat().st_ino != os.fstat(network).st_ino:
        netlab.enter(network)
    os.close(network)


def _become(
    request: dict[str, object], out: int, err: int, status: int, network: int, stdin: int
) -> NoReturn:
    """What `python -m peers.cli` is once it has imported."""
    from peers import cli, fault_points
    from peers.system import die_with_parent

    die_with_parent(os.getppid())
    _enter(network)
    os.setsid()
    os.close(status)
    for source, target in ((stdin, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
        os.close(source)
    environment, arguments = request["environment"], request["arguments"]
    assert isinstance(environment, dict) and isinstance(arguments, list)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    importlib.reload(fault_points)  # the only module that reads the environment when it is imported
    sys.argv = [cli.__file__, *arguments]
    sys.exit(cli.main())


def main() -> None:
    from peers.system import die_with_parent

    die_with_parent(int(sys.argv[2]), signum=signal.SIGTERM)
    gc.disable()
    for name in (*PRELOADED, *sys.argv[3:]):
        importlib.import_module(name)
    gc.freeze()  # programs look for garbage in what they make themselves
    gc.enable()
    assert len([*Path("/proc/self/task").iterdir()]) == 1, "a fork would lose threads"
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        serve(requests)


if __name__ == "__main__":
    main()

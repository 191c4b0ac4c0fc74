"""`swarm peer --device all`: one peer for each device, one Ctrl-C for all; and roles as child processes.

Each peer is a process of its own, with a key of its own: a device that fails, or a driver that hangs, stops
no other peer. One that dies is started again, after a wait that grows, as the same peer: volunteers leave
their machines alone for days. One whose owner has to change something is not started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from peers.events import Emit, Note, Trouble, count
from peers.options import MIN_UPLOAD_BPS, TOKEN_VARIABLE, VARIABLES, Listen, PeerOptions
from peers.start_line import program
from peers.waiting import end_tasks, happens, within
from swarm.errors import SetupError

STOP_S = 5.0
"""How long a child gets to leave before it is killed."""
MAX_LINE = 1 << 20
MIN_PROCESSES, PROCESSES_PER_CORE = 32, 8
"""More processes than either are refused: each has torch in its memory, 200 MB at least."""
RESTART_S = 5.0
LONGEST_WAIT_S = 300.0
DID_WELL_S = 600.0
"""A peer that ran so long is started again after the shortest wait."""
OWN_EXITS = (0, 2, 3)
"""Exit codes of a peer that is not to be started again: done, or its owner has to change something."""
STOPPED = 130
"""That of one that was told to leave before it served."""

OWN_OPTIONS = frozenset(
    {"--device", "--identity", "--port", "--announce", "--metrics", "--max-upload", "--die-with-parent"}
    | {"--direct-port", "--stages", "--token"}
)
"""Those in which the peers differ, and the token, which is not for a command line."""


class Child:
    """One role in a process of its own. It dies with this process, whatever happens to it."""

    def __init__(self, process: asyncio.subprocess.Process, hear: Callable[[Child, str], None]) -> None:
        self._process, self._hear = process, hear
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def spawn(
        cls, arguments: Sequence[str], hear: Callable[[Child, str], None], *, stdin: bytes = b"",
        stderr: int | None = None, environment: Mapping[str, str] | None = None,
    ) -> Child:  # fmt: skip
        """Start `swarm ARGUMENTS`; `hear` is called with each line of its output."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "peers", *arguments, "--die-with-parent", str(os.getpid()),
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr,
            limit=MAX_LINE,
            # A terminal's Ctrl-C is for the parent, which then ends its children in order.
            start_new_session=True,
            env={**{k: v for k, v in os.environ.items() if k not in VARIABLES}, **(environment or {})},
        )  # fmt: skip
        child = cls(process, hear)
        if stdin and process.stdin is not None:
            process.stdin.write(stdin)
            await process.stdin.drain()
            process.stdin.close()
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # `send_signal` may take the exit code of one that has just died: asyncio says 255 then.
                os.kill(self.pid, number)

    async def wait(self) -> int:
        """Its exit code, once it has ended and everything that it said was heard."""
        await self._process.wait()
        await self._reader
        return self._process.returncode or 0

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL if it takes too long."""
        self.signal(signal.SIGTERM)
        try:
            await within(self._process.wait(), STOP_S)
        except asyncio.TimeoutError:
            self.signal(signal.SIGKILL)
            await self._process.wait()
        await end_tasks([self._reader])

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:  # longer than `MAX_LINE`: what is left of it is read as the next one
                continue
            if not line:
                return
            with contextlib.suppress(OSError):  # if it is not read on: the child is not to wait for that
                self._hear(self, line.decode(errors="replace").rstrip("\n"))


async def stop_all(children: Sequence[Child]) -> None:
    """End all of them, together; none is left, also if this is cancelled."""
    try:
        await asyncio.gather(*(child.stop() for child in children), return_exceptions=True)
    finally:
        for child in children:
            child.signal(signal.SIGKILL)


def check_folder(folder: Path) -> None:
    """Raises SetupError: `swarm init` did not make it."""
    names = ("run.toml", "charter", "owner.key", "trainer.key")
    if lacking := [name for name in names if not (folder / name).is_file()]:
        there = f"it lacks {', '.join(lacking)}; take the folder that swarm init made"
        new = f"make one with {program()} init {shlex.quote(str(folder))}"
        raise SetupError(f"{folder} holds no run: {there if folder.exists() else new}")
    if not os.access(folder, os.W_OK):
        raise SetupError(f"{folder} cannot be written, and checkpoints go there: make it, or a copy, yours")


def check_unused(folder: Path) -> None:
    """Raises SetupError: another swarm trains the run in that folder."""
    with (folder / "owner.key").open("rb") as key:
        try:  # a p2pd holds it for as long as it runs
            fcntl.flock(key, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            here = shlex.quote(str(folder))
            raise SetupError(
                f"{folder} is in use: another {program()} up, or a bootstrap, runs with its owner.key. Watch "
                f"it with {program()} dashboard @{here}/join.txt, or stop it with Ctrl-C where it runs"
            ) from None


def check_size(stages: int, peers: int, yes: bool) -> None:
    """`stages`: of all islands together.

    Raises:
        SetupError: they are more processes than this machine is likely to bear.
    """
    if type(peers) is not int or peers < 1:
        raise SetupError(f"peers = {peers!r}: each stage needs at least one")
    cores, processes = os.cpu_count() or 1, 2 + stages * peers
    most = max(MIN_PROCESSES, PROCESSES_PER_CORE * cores)
    if processes > most and not yes:
        raise SetupError(
            f"{stages} stages of {peers} peers are {processes} processes with torch, on "
            f"{count(cores, 'core')}: more than {most} are started only with --yes (from Python: yes=True). "
            "Take fewer stages or peers"
        )


# --- a peer for each device ---


def names_of(device: str) -> list[str]:
    """The devices, each in a word. Raises SetupError: there is none."""
    if device != "all":
        return [name.strip() for name in device.split(",") if name.strip()]
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not devices:
        raise SetupError("--device all: this machine has no CUDA device; take --device cpu")
    return [f"cuda:{number}" for number in range(devices)]


def shared(words: Sequence[str]) -> list[str]:
    """The arguments of a command line without those of `OWN_OPTIONS`, and their values."""
    left: list[str] = []
    skips = False
    for word in words:
        if not skips and word.partition("=")[0] not in OWN_OPTIONS:
            left.append(word)
        skips = not skips and word in OWN_OPTIONS
    return left


def arguments(
    options: PeerOptions, names: Sequence[str], words: Sequence[str] = (), metrics: Listen | None = None
) -> dict[str, list[str]]:
    """Label -> the arguments of each peer. Ports count up from the one that is given.

    Args:
        words: arguments that all have.

    Raises:
        SetupError: they cannot be told apart, or their shares of --max-upload are too small.
    """
    if options.identity is not None and options.identity.is_file():
        raise SetupError(
            f"--identity {options.identity} is one key, and there are {len(names)} peers: name a folder"
        )
    wanted = [stage for stage in options.stages if stage is not None]
    if options.stages and (len(options.stages) != len(names) or not wanted or options.stage != "auto"):
        raise SetupError(
            f"--stages has {count(len(wanted), 'stage')} in {len(options.stages)} words, and there are "
            f"{count(len(names), 'device')} ({', '.join(names)}): give a stage for each, or - where no peer "
            "is wanted, and no --stage"
        )
    least_bps = MIN_UPLOAD_BPS * len(names)
    if options.max_upload is not None and options.max_upload < least_bps:
        raise SetupError(
            f"--max-upload is shared by {len(names)} peers: they need {least_bps / 1e3:.0f}kbit at least"
        )
    found: dict[str, list[str]] = {}
    seen: Counter[str] = Counter()
    for number, name in enumerate(names):
        label = name if not seen[name] else f"{name}#{seen[name] + 1}"
        seen[name] += 1
        stages = options.stages[number : number + 1]
        if stages == (None,):
            continue
        own = [*words, "--device", name]
        own += [word for stage in stages for word in ("--stage", str(stage))]
        if options.identity is not None:
            own += ["--identity", str(options.identity / f"{label.replace(':', '-')}.key")]
        if options.port:
            own += ["--port", str(options.port + number)]
        if options.direct_port:
            own += ["--direct-port", str(options.direct_port + number)]
        for address in options.announce:
            host, colon, port = address.rpartition(":")
            if address.startswith("/") or not colon or not port.isdigit():
                text = f"--announce {address}: with several devices take HOST:PORT, that of the first one"
                raise SetupError(text)
            own += ["--announce", f"{host}:{int(port) + number}"]
        if metrics is not None:
            host, at = metrics
            own += ["--metrics", f"{f'[{host}]' if ':' in host else host}:{at + number}"]
        if options.max_upload is not None:
            own += ["--max-upload", f"{options.max_upload / len(names) / 1e3:.0f}kbit"]
        found[label] = own
    return found


class Fleet:
    """Starts the peers, passes on what they say, and ends when all have ended."""

    preparing = False

    def __init__(
        self, options: PeerOptions, words: Sequence[str] = (), metrics: Listen | None = None, *, emit: Emit,
        restart_s: float = RESTART_S,
    ) -> None:  # fmt: skip
        """`words`: the whole command line after `swarm peer`."""
        self._options, self._words, self._metrics, self._emit = options, shared(words), metrics, emit
        self._restart_s, self._leaving = restart_s, asyncio.Event()
        self._running: dict[str, Child] = {}

    async def run(self) -> int:
        """The exit code: 0, or that of a peer which ended in trouble."""
        options = self._options
        names = await asyncio.to_thread(names_of, options.device)
        if options.identity is not None:
            options.identity.mkdir(mode=0o700, parents=True, exist_ok=True)
        peers = arguments(options, names, self._words, self._metrics)
        tasks = [asyncio.create_task(self._keep(label, words)) for label, words in peers.items()]
        try:
            return max(await asyncio.gather(*tasks))
        finally:
            for child in self._running.values():
                child.signal(signal.SIGKILL)
            await end_tasks(tasks)

    async def leave(self) -> None:
        """All of them finish what they have."""
        self._leaving.set()
        for child in self._running.values():
            child.signal(signal.SIGINT)

    async def _keep(self, label: str, words: Sequence[str]) -> int:
        """Run one peer, again and again if need be; its last exit code."""
        wait_s = self._restart_s
        while True:
            began = time.monotonic()
            code = await self._once(label, words)
            if self._leaving.is_set() or code in OWN_EXITS:
                if code not in (0, STOPPED):
                    text = f"the peer on {label} ended with exit code {code}; the others go on"
                    self._emit(Trouble(text=text))
                break
            wait_s = self._restart_s if time.monotonic() - began > DID_WELL_S else wait_s
            why = f"signal {-code}" if code < 0 else f"exit code {code}"
            text = f"the peer on {label} died ({why}): it is started again in {wait_s:.0f} s"
            self._emit(Trouble(text=f"{text}; the others go on"))
            if await happens(self._leaving, wait_s):
                break
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        return 1 if code < 0 else code  # a signal ended it

    async def _once(self, label: str, words: Sequence[str]) -> int:
        def say(_: Child, line: str) -> None:
            print(labelled(label, line), flush=True)

        secret = {TOKEN_VARIABLE: self._options.token or ""}
        try:
            child = self._running[label] = await Child.spawn(["peer", *words], say, environment=secret)
        except OSError as error:  # such as no memory now, which ends no other peer
            self._emit(Trouble(text=f"the peer on {label} cannot start: {error.strerror}"))
            return 1
        self._emit(Note(text=f"the peer on {label} has process id {child.pid}"))
        if self._leaving.is_set():
            child.signal(signal.SIGINT)
        try:
            return await child.wait()
        finally:
            del self._running[label]
            child.signal(signal.SIGKILL)


def labelled(label: str, line: str) -> str:
    """A line of a peer, with its device: as a key where lines are JSON."""
    if line.startswith("{"):
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.encode({**msgspec.json.decode(line), "device_of": label}).decode()
    return f"[{label}] {line}"

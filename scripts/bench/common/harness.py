"""What the benchmarks share: a run to measure, a swarm of real processes, CPU clocks, a table.

The processes are those of `swarm demo`: a bootstrap and peers, each with its own p2pd. The trainer is this
process. `Swarm.train` runs some steps, then the peers idle, so that a baseline can be measured in between.
In a lab (`netlab.py`) each role is on the host that has its name, and lines can be changed meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import psutil

from peers.events import Event, Serving, Started, StepDone, parse_event
from peers.islands.directory import split_cell
from peers.islands.trainers import IslandTrainers
from peers.net.node import Node
from peers.net.p2pd import DaemonOptions
from peers.programs.fleet import Child, stop_all
from peers.storage import RESULTS_ENV
from peers.storage.dataset import Dataset, open_dataset
from peers.trainer import TrainerSettings
from peers.waiting import happens
from swarm.ids import PeerId, Stage
from swarm.manifest import BatchSpec, CodecSpec, DataSpec, ModelSpec, OptimizerSpec, Run
from swarm.wire.messages import AskStatus, PeerStatus, pack, unpack_answer

if TYPE_CHECKING:
    from scripts.bench.common.netlab import Lab

START_S = 120.0
"""Limit for a process to start; the machine may be loaded."""


def bench_run(
    *,
    stages: int,
    hidden: int,
    layers: int = 4,
    dtype: str = "float32",
    codec: str = "blockwise8",
    optimizer: str = "adamw",
    microbatches: int = 24,
    microbatch_size: int = 4,
    sequence_length: int = 256,
    steps: int = 1000,
) -> Run:
    """A byte-level GPT with heads of 64, to be pinned to its data."""
    return Run(
        name="bench",
        seed=1,
        steps=steps,
        dtype=dtype,  # type: ignore[arg-type]
        model=ModelSpec(
            layers=layers, hidden=hidden, heads=max(1, hidden // 64), ffn_hidden=4 * hidden,
            vocab_size=256, stages=stages,
        ),
        data=DataSpec(source="tales", sequence_length=sequence_length),
        batch=BatchSpec(microbatch_size=microbatch_size, microbatches_per_step=microbatches),
        optimizer=OptimizerSpec(name=optimizer, lr=1e-4),  # type: ignore[arg-type]
        codec=CodecSpec.symmetric(codec),
    )  # fmt: skip


# --- CPU and memory of processes ---


@dataclass(frozen=True)
class Clocks:
    """CPU seconds used so far, by kind of process; `machine` counts everybody's."""

    at: float
    python: dict[str, float]
    """By name of the role, such as `stage 0`."""
    p2pd: dict[str, float]
    machine: float

    def since(self, before: Clocks) -> Clocks:
        def less(now: dict[str, float], then: dict[str, float]) -> dict[str, float]:
            return {name: seconds - then.get(name, 0.0) for name, seconds in now.items()}

        return Clocks(
            self.at - before.at,
            less(self.python, before.python),
            less(self.p2pd, before.p2pd),
            self.machine - before.machine,
        )

    @property
    def ours(self) -> float:
        return sum(self.python.values()) + sum(self.p2pd.values())

    @property
    def foreign_cores(self) -> float:
        """Cores that others kept busy: what a measurement on a shared machine suffered from."""
        return max(0.0, self.machine - self.ours) / self.at


def machine_busy_s() -> float:
    """CPU seconds that all processes of the machine have used."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def cpu_s(pid: int) -> float:
    """User and system seconds of one process, without its children."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def p2pd_of(pid: int) -> psutil.Process | None:
    """The p2pd that a role started, through its watchdog."""
    for process in psutil.Process(pid).children(recursive=True):
        if process.name() == "p2pd":
            return process
    return None


def memory_of(pid: int) -> tuple[int, int]:
    """(resident, proportional) bytes of a process; pages that processes share count proportionally."""
    full = psutil.Process(pid).memory_full_info()
    return full.rss, full.pss


# --- a swarm ---


@dataclass
class Role:
    """One process of the swarm, and when it said what (monotonic seconds)."""

    name: str
    stage: Stage | None
    child: Child
    spawned_at: float
    peer: PeerId = ""
    started_at: float | None = None
    serving_at: float | None = None
    served_bytes: int = 0
    """Resident when it began to serve, before its first microbatch; of peers that started one by one."""
    stepped_at: float | None = None
    """First heard of a step taken, by this process or by its trainer."""
    said: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    """The last lines that are no events: why it failed, perhaps."""


@dataclass
class Segment:
    """Some steps of one trainer."""

    steps: int
    seconds: float
    """From its first move to the last step taken: fill and drain of the pipeline are in."""
    clocks: Clocks
    before: dict[str, PeerStatus]
    """What each peer said of itself, by role, before it began."""
    after: dict[str, PeerStatus]
    events: list[StepDone] = field(default_factory=list)

    @property
    def busy_s(self) -> dict[str, float]:
        """By role: seconds that its device worked."""
        return {name: now.busy_s - self.before[name].busy_s for name, now in self.after.items()}


def role_names(stages: int, replicas: int) -> list[str]:
    """Of a swarm, this process as its trainer included: the hosts of a lab for it. `stages`: of several
    islands all cells.
    """
    numbers = [f".{number}" if replicas > 1 else "" for number in range(replicas)]
    return ["bootstrap", "trainer", *(f"stage {s}{n}" for s in range(stages) for n in numbers)]


class Swarm:
    """`async with Swarm(run, replicas=1) as swarm`: all peers serve; their processes end with the block."""

    def __init__(
        self,
        run: Run,
        *,
        replicas: int = 1,
        threads: int = 1,
        window: int | None = None,
        one_by_one: bool = False,
        peer_arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        lab: Lab | None = None,
        identity: Path | None = None,
        device: str = "cpu",
    ) -> None:
        """`lab`: with a host for each of `role_names`. `identity`: of this process, the trainer."""
        self.data: Dataset = open_dataset(run)
        self.run = self.data.pinned(run)
        self.replicas, self._threads, self._window = replicas, threads, window
        self._one_by_one = one_by_one
        self._peer_arguments, self._environment = tuple(peer_arguments), environment
        self._lab, self._identity, self._device = lab, identity, device
        self.roles: list[Role] = []
        self.version = 0
        self.node: Node
        self._entry = ""
        self._closing = False
        self._heard = asyncio.Event()

    async def __aenter__(self) -> Swarm:
        try:
            manifest = self.run.to_toml()
            await self._spawn("bootstrap", None, ["bootstrap", "--manifest", "-"], manifest)
            await self.until(lambda: bool(self._entry), "the bootstrap does not start")
            self.node = Node(
                options=DaemonOptions(host=self._ip("trainer")), identity_path=self._identity,
                join=(self._entry,), run_id=self.run.id,
            )  # fmt: skip
            for stage in range(self.run.cells):
                for _ in range(self.replicas):
                    peer = await self.add_peer(stage)
                    if self._one_by_one:
                        serves = lambda peer=peer: peer.serving_at is not None  # noqa: E731
                        await self.until(serves, "a peer does not serve")
                        peer.served_bytes = memory_of(peer.child.pid)[0]
            await self.until(
                lambda: all(role.serving_at is not None for role in self.peers), "a peer does not serve"
            )
            with self._on("trainer"):
                await self.node.__aenter__()
            while sum(r.state == "serving" for r in await self.node.directory.refresh()) < len(self.peers):
                await asyncio.sleep(0.05)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        self._closing = True
        try:
            if hasattr(self, "node") and hasattr(self.node, "daemon"):  # else why it did not start is hidden
                await self.node.close()
        finally:
            await stop_all([role.child for role in self.roles])

    def _on(self, host: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._lab is None else self._lab.inside(host)

    def _ip(self, host: str) -> str:
        return "127.0.0.1" if self._lab is None else self._lab.ip(host)

    @property
    def peers(self) -> list[Role]:
        return [role for role in self.roles if role.stage is not None]

    async def add_peer(self, stage: Stage) -> Role:
        """Spawn a peer of `stage`, of several islands of that cell; it serves later."""
        arguments = ["peer", "--run", self.run.id, "--join", self._entry, "--stage", str(stage)]
        arguments += ["--device", self._device, "--threads", str(self._threads), *self._peer_arguments]
        number = sum(role.stage == stage for role in self.roles)
        name = f"stage {stage}" + (f".{number}" if self.replicas > 1 else "")
        return await self._spawn(name, stage, arguments)

    async def add_trainer(self) -> Role:
        """Spawn a trainer in a process of its own; it goes on until the block ends."""
        return await self._spawn("trainer", None, ["train", "--run", self.run.id, "--join", self._entry])

    async def _spawn(self, name: str, stage: Stage | None, arguments: list[str], stdin: str = "") -> Role:
        heard: list[Role] = []
        early: list[str] = []

        def hear(_: Child, line: str) -> None:
            if heard:
                self._hear(heard[0], line)
            else:
                early.append(line)

        spawned_at = time.monotonic()
        arguments = [*arguments, "--host", self._ip(name), "--log-format", "json"]
        with self._on(name):  # whoever runs meanwhile in this thread opens no connections: p2pd does
            child = await Child.spawn(
                arguments,
                hear,
                stdin=stdin.encode(),
                stderr=asyncio.subprocess.STDOUT,
                environment={RESULTS_ENV: "", **(self._environment or {})},
            )
        role = Role(name, stage, child, spawned_at)
        self.roles.append(role)
        heard.append(role)
        for line in early:
            self._hear(role, line)
        return role

    def _hear(self, role: Role, line: str) -> None:
        event = parse_event(line)
        if event is None:
            role.said.append(line)
        elif isinstance(event, Started):
            role.peer, role.started_at = event.peer, time.monotonic()
            if event.role == "bootstrap":
                self._entry = event.addresses[0]
        elif isinstance(event, Serving):
            role.serving_at = time.monotonic()
        elif isinstance(event, StepDone):
            role.stepped_at = role.stepped_at or time.monotonic()
        elif event.level != "info" and not self._closing:
            print(f"{role.name}: {event.words()}", file=sys.stderr)
        self._heard.set()

    async def until(self, condition: Callable[[], bool], why: str) -> None:
        """Wait for `condition`, which some event makes true. A process that ends meanwhile is an error."""
        end = time.monotonic() + START_S
        while not condition():
            for role in self.roles:
                if role.child.returncode is not None:
                    raise RuntimeError(f"{role.name} ended: " + "\n".join(role.said))
            if time.monotonic() > end:
                raise RuntimeError(f"{why} within {START_S:.0f} s")
            await happens(self._heard, 0.5)
            self._heard.clear()

    # -- measuring --------------------------------------------------------------------------------

    async def train(self, steps: int, *, window: int | None = None) -> Segment:
        """Take `steps` more steps, measured from idle to idle. `window`: instead of the swarm's."""
        done: list[StepDone] = []
        ended_at = began = time.monotonic()

        def hear(event: Event) -> None:
            nonlocal ended_at
            if isinstance(event, StepDone) and event.t >= self.version:
                done.append(event)
                ended_at = time.monotonic()
            elif not isinstance(event, StepDone) and event.level != "info":
                print(f"trainer: {event.words()}", file=sys.stderr)

        before = await self.statuses()
        trainer = IslandTrainers(
            self.run, self.data, self.node.transport, self.node.directory,
            TrainerSettings(window=window or self._window, steps=self.version + steps), hear,
        )  # fmt: skip
        clocks, began = self.clocks(), time.monotonic()
        await trainer.run()
        clocks = self.clocks().since(clocks)
        assert len(done) == steps, (len(done), steps)
        self.version += steps
        return Segment(steps, ended_at - began, clocks, before, await self.statuses(), done)

    def clocks(self) -> Clocks:
        """What all our processes have used so far; `trainer` is this one."""
        python = {role.name: cpu_s(role.child.pid) for role in self.roles}
        python["trainer"] = time.process_time()
        p2pd: dict[str, float] = {}
        for role in self.roles:
            process = p2pd_of(role.child.pid)
            if process is not None:
                p2pd[role.name] = cpu_s(process.pid)
        if self.node.daemon.pid is not None:
            p2pd["trainer"] = cpu_s(self.node.daemon.pid)
        return Clocks(time.monotonic(), python, p2pd, machine_busy_s())

    async def statuses(self) -> dict[str, PeerStatus]:
        """What each peer says of itself, by role."""
        found: dict[str, PeerStatus] = {}
        for role in self.peers:
            assert role.stage is not None
            question = pack(AskStatus(run=split_cell(self.run, role.stage)[0].id))
            answer = await self.node.transport.call(role.peer, "status", question)
            found[role.name] = unpack_answer(role.peer, answer.header, PeerStatus)
        return found


# --- saying it ---


def machine() -> str:
    """For the line above a table."""
    import torch

    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    cores = len(psutil.Process().cpu_affinity() or [])
    return f"{model}, {cores} cores, Python {platform.python_version()}, torch {torch.__version__}"


def report(rows: Sequence[dict[str, Any]], columns: Sequence[str], title: str) -> None:
    """A table for people; the last line is for programs and holds everything."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_shown(row.get(column)) for column in columns))
    Console(width=max(110, 14 * len(columns)), highlight=False).print(table)
    print(json.dumps({"rows": list(rows)}), flush=True)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"
    return "" if value is None else str(value)

"""Swarms of real processes: started, heard, killed, and what they leave behind.

Each program is `swarm …` as a user types it, its events read from its standard output. All of them carry
a mark in their environment, which their p2pd and its watchdog inherit: whatever has that mark when a swarm
was closed is an orphan, whoever its parent is now.

In a `Lab` each program has a host of its own, whose cable can be pulled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import psutil
import torch

from peers.events import (
    AddedUp,
    Event,
    JoinLine,
    Logged,
    Note,
    Serving,
    Started,
    StateFetched,
    StepDone,
    Stepped,
    parse_event,
)
from peers.islands.directory import split_cell
from peers.net.node import Node
from peers.net.p2pd import DaemonOptions
from peers.programs.manifest_pinning import pinned
from peers.storage.dataset import Dataset
from peers.storage.samples import Samples, open_data
from peers.transfer.client import Download, DownloadFailed, download, state_of
from swarm.ids import Stage
from swarm.manifest import Run, audit_run
from swarm.model.layout import stage_layout
from swarm.model.reference import SingleProcess
from swarm.model.stage import StageCompute
from swarm.wire.messages import AskStatus, PeerStatus, pack, unpack_answer
from tests.model.chain import weights_of
from tests.process.forkserver import ForkServer
from tests.stopping import stop

if TYPE_CHECKING:
    from scripts.bench.common.netlab import Lab

E = TypeVar("E", bound=Event)
T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 90.0
"""For anything to happen. A start takes 3 s on an idle core; other programs may want the cores as well."""
GONE_S = 30.0
"""For a dead process's p2pd, watchdog and files to be gone; it takes milliseconds."""
MARK = "SWARM_TEST_MARK"


def executed(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """`swarm ARGUMENTS` by a new Python."""
    return subprocess.Popen(
        [sys.executable, "-m", "peers", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # a Ctrl-C in the terminal is for pytest
        env=environment,
        cwd=ROOT,
    )


def swarm_command(*words: str) -> subprocess.CompletedProcess[str]:
    """`swarm WORDS` to its end: one that prints something, and is no part of a swarm."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = Processes.fork_server
    process = executed(words, environment) if server is None else server.start(words, environment)
    printed, complaints = process.communicate(timeout=LIMIT_S)
    return subprocess.CompletedProcess(words, process.wait(LIMIT_S), printed, complaints)


class Program:
    """`swarm ARGUMENTS` in a process of its own."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        mark: str,
        news: threading.Condition,
        kill_at: str = "",
        job_s: float = 0.0,
        server: ForkServer | None = None,
    ) -> None:
        """`kill_at`: the fault point at which it kills itself, as SWARM_KILL_AT; `job_s`: SWARM_JOB_S."""
        self.name, self.kill_at = name, kill_at
        self.events: list[Event] = []
        self.other_lines: list[str] = []
        """Standard output that is no event: there should be none."""
        self.errors: list[str] = []
        """Lines of standard error, and what was logged."""
        self.sentenced = bool(kill_at)
        """It is meant to die or to fail; nobody else's wait ends with it."""
        self.host = ""
        """Where it is in the lab."""
        self._news = news
        environment = {"SWARM_JOB_S": str(job_s), **os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"}
        environment.pop("SWARM_KILL_AT", None)
        if kill_at:
            environment["SWARM_KILL_AT"] = kill_at
        words = [*arguments, "--log-format", "json"]
        if server is None:
            # The kernel's signal for `--die-with-parent` follows the thread that forks.
            assert threading.current_thread() is threading.main_thread()
            self._process = executed([*words, "--die-with-parent", str(os.getpid())], environment)
        else:
            self._process = server.start(words, environment)
        self._readers = [
            threading.Thread(target=self._read, args=(stream, take), daemon=True)
            for stream, take in (
                (self._process.stdout, self._hear),
                (self._process.stderr, self.errors.append),
            )
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, take: Callable[[str], None]) -> None:
        for line in stream:
            take(line.rstrip("\n"))
        stream.close()
        with self._news:
            self._news.notify_all()

    def _hear(self, line: str) -> None:
        event = parse_event(line)
        if event is None:
            self.other_lines.append(line)
            return
        if isinstance(event, Logged):
            self.errors.append(event.text)
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    # -- what it said -----------------------------------------------------------------------------

    def heard(self, kind: type[E]) -> list[E]:
        """Its events of that kind so far."""
        return [event for event in list(self.events) if isinstance(event, kind)]

    @property
    def address(self) -> str:
        """Where others can join."""
        return self.heard(Started)[0].addresses[0]

    @property
    def peer_id(self) -> str:
        return self.heard(Started)[0].peer

    def story(self) -> str:
        """The last that it said, for a failed test."""
        lines = [event.words() for event in self.events[-8:]] + self.other_lines[-5:] + self.errors[-8:]
        return f"--- {self.name} (pid {self.pid}, exit code {self.returncode})\n" + "\n".join(lines)

    # -- how it ends ------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; minus the signal if one killed it."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:  # type: ignore
        """To this process only."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """It hangs, its p2pd does not."""
        stop(self.pid)

    def cont(self) -> None:
        """It goes on."""
        self.signal(signal.SIGCONT)

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Its exit code, once all that it said is read."""
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end within {limit_s:.0f} s\n{self.story()}") from None
        for reader in self._readers:
            reader.join(LIMIT_S)
        return code

    def family(self) -> Family:
        """Its watchdog and its p2pd, and their files, as of now."""
        me = psutil.Process(self.pid)
        return Family([me, *me.children(recursive=True)])


class Family:
    """Processes that belong together, and the socket directories that they use."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self.processes = list(processes)
        self.names: dict[str, psutil.Process] = {}
        self.directories: set[Path] = set()
        self.shared_memory: set[Path] = set()
        for process in self.processes:
            with contextlib.suppress(psutil.Error, OSError):
                command = process.cmdline()
                self.names[Path(command[0]).name if command else "?"] = process
                self.directories |= {
                    Path(p) for word in command for p in re.findall(r"/tmp/swarm-\w{8}", word)
                }
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                self.shared_memory |= {Path(p) for p in re.findall(r"/dev/shm/\S+", maps)}

    @property
    def p2pd(self) -> psutil.Process:
        return self.names["p2pd"]

    @property
    def watchdog(self) -> psutil.Process:
        return self.names["sh"]

    def left(self) -> list[str]:
        """What of it is still there."""
        left = [str(path) for path in self.directories | self.shared_memory if path.exists()]
        for process in filter(_alive, self.processes):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
                left.append(f"process {process.pid} {process.name()}")
        return left

    def assert_gone(self) -> None:
        """Nothing of it is left, or will be in a moment."""
        eventually(lambda: not self.left(), lambda: f"left behind: {self.left()}", GONE_S)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(condition: Callable[[], bool], why: Callable[[], str], limit_s: float = LIMIT_S) -> None:
    """For what announces itself to nobody: looked at again and again."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, why()
        time.sleep(0.05)  # a look at all processes takes a fifth of that


def family_of_mark(mark: str, programs: Sequence[Program] = ()) -> Family:
    """All live processes that carry the mark, whoever their parents are.

    The programs themselves are named: others read in a forked one the environment of its parent.
    """
    wanted = f"{MARK}={mark}".encode()
    named = {program.pid for program in programs if program.returncode is None}

    def carries_it(process: psutil.Process) -> bool:
        return wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")

    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if (process.pid in named or carries_it(process)) and _alive(process):
                found.append(process)
    return Family(found)


class Processes:
    """Programs that are started together and leave nothing behind."""

    fork_server: ClassVar[ForkServer | None] = None
    """Forks the programs of all swarms; without one each is a new Python."""

    job_s: float = 0.03
    """What a forward takes at least, and a backward: a swarm that only goes on leaves the cores idle."""

    def __init__(self, lab: Lab | None = None) -> None:
        self.mark = secrets.token_hex(8)
        self.programs: list[Program] = []
        self.lab = lab
        self._news = threading.Condition()
        self._census: list[Family] = []

    def start(self, name: str, arguments: Sequence[str], *, kill_at: str = "") -> Program:
        """Start `swarm ARGUMENTS`; it is not waited for."""
        host = self.free_host()
        with self.lab.inside(host) if self.lab is not None else contextlib.nullcontext():
            words = [*arguments, *(["--host", self.lab.inner_ip(host)] if self.lab is not None else [])]
            program = Program(
                name,
                words,
                mark=self.mark,
                news=self._news,
                kill_at=kill_at,
                job_s=self.job_s,
                server=self.fork_server,
            )
        program.host = host
        self.programs.append(program)
        return program

    def free_host(self) -> str:
        """The lab's first host where no program runs; nothing without a lab."""
        if self.lab is None:
            return ""
        taken = {program.host for program in self.programs if program.returncode is None}
        return next(host for host in self.lab.hosts if host not in taken)

    def until(self, condition: Callable[[], object], why: str, limit_s: float = LIMIT_S) -> None:
        """Wait until `condition()`, looked at whenever somebody says something.

        Fails when it takes too long, and when a program ends that was not meant to.
        """
        end = time.monotonic() + limit_s
        while True:
            with self._news:
                if condition():
                    break
                self.assert_none_ended()
                if time.monotonic() > end:
                    raise AssertionError(f"{why}: not within {limit_s:.0f} s\n{self.story()}")
                self._news.wait(0.5)
        self.take_census()

    def assert_none_ended(self) -> None:
        """No program has ended that was not meant to."""
        for program in self.programs:
            if not program.sentenced and program.returncode not in (None, 0):
                raise AssertionError(f"{program.name} ended\n{self.story()}")

    def listen(self, limit_s: float) -> None:
        """Return when somebody says something, or after `limit_s`."""
        with self._news:
            self._news.wait(limit_s)

    def hear(self, program: Program, kind: type[E], count: int = 1) -> E:
        """Wait for the `count`-th event of that kind."""
        self.until(lambda: len(program.heard(kind)) >= count, f"{program.name} does not say {kind.__name__}")
        return program.heard(kind)[count - 1]

    def kill(self, *programs: Program) -> None:
        """SIGKILL to all of them at once, and nothing of them is left."""
        families = [program.family() for program in programs]
        for program in programs:
            program.sentenced = True
            program.signal(signal.SIGKILL)
        for program, family in zip(programs, families, strict=True):
            assert program.wait() == -signal.SIGKILL
            family.assert_gone()

    def dies(self, program: Program) -> None:
        """Wait for a program to kill itself at its fault point."""
        assert program.kill_at
        self.until(lambda: program.returncode is not None, f"{program.name} does not pass {program.kill_at}")
        assert program.wait() == -signal.SIGKILL, program.story()

    def story(self) -> str:
        """What all of them said last."""
        return "\n".join(program.story() for program in self.programs)

    def take_census(self) -> None:
        """Remember who is there, and with which files."""
        self._census.append(family_of_mark(self.mark, self.programs))

    def close(self) -> None:
        """End all programs, by SIGTERM if they let us.

        Raises:
            AssertionError: something is left of them, or one printed what is no event.
        """
        self.take_census()
        living = [program for program in self.programs if program.returncode is None]
        try:
            for program in living:
                program.sentenced = True
                program.signal(signal.SIGTERM)
            for program in living:
                program.wait(30.0)
        finally:
            for program in living:
                if program.returncode is None:
                    program.signal(signal.SIGKILL)
                    program.wait()
        for program in self.programs:
            program.wait()
            assert not program.other_lines, program.story()
        for family in (*self._census, family_of_mark(self.mark)):
            family.assert_gone()

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with contextlib.suppress(AssertionError):  # the first error is the one to show
            self.close()


class Swarm(Processes):
    """A bootstrap, peers, trainers and keepers of one run."""

    def __init__(
        self,
        folder: Path,
        run: Run,
        *,
        data: Sequence[Path] = (),
        start: Path | None = None,
        held_out: Sequence[Path] = (),
        lab: Lab | None = None,
        device: str = "cpu",
    ) -> None:
        """`device`: of its peers, and of the process that it is compared with."""
        super().__init__(lab)
        self.device = device
        self.data: Dataset | Samples = open_data(run, data)
        self.run = pinned(run, data, None, start, held_out)
        self._files = ["--data", *map(str, data)] if data else []
        self._files += ["--eval-data", *map(str, held_out)] if held_out else []
        self.manifest = folder / "run.toml"
        self.manifest.write_text(self.run.to_toml())
        self._counts: dict[str, int] = defaultdict(int)

    # -- starting ---------------------------------------------------------------------------------

    def bootstrap(self) -> Program:
        """Start it, in the network of whoever is up, and wait until others can join."""
        program = self.start_bootstrap()
        self.hear(program, JoinLine)
        return program

    def start_bootstrap(self, *extra: str) -> Program:
        """Start it; it is not waited for."""
        words = ["bootstrap", "--manifest", str(self.manifest), *self._joins(), *extra]
        return self.start("bootstrap", words)

    def _joins(self) -> list[str]:
        """Arguments to join with: at whoever is up."""
        up = [p.address for p in self.programs if p.returncode is None and p.heard(Started)]
        return [word for address in up[:4] for word in ("--join", address)]

    def membership(self) -> list[str]:
        """Arguments of who takes part in the run."""
        allowed = [word for code in self.run.code for word in ("--allow-code", code)]
        return ["--run", self.run.id, *self._joins(), *allowed]

    def _name(self, kind: str) -> str:
        self._counts[kind] += 1
        return f"{kind} {self._counts[kind]}"

    def peer(self, stage: Stage, *extra: str, kill_at: str = "") -> Program:
        """Start a peer; it is not waited for."""
        words = ["--stage", str(stage), "--device", self.device, "--threads", "1", "--max-inflight", "8"]
        words += extra
        return self.start(
            self._name(f"peer of stage {stage}"), ["peer", *self.membership(), *words], kill_at=kill_at
        )

    def peers(self, replicas: int = 2) -> None:
        """Start peers until each stage has so many that are not doomed, and wait until all serve."""
        for stage in range(self.run.cells):
            for _ in range(replicas - sum(not p.kill_at for p in self.serving(stage))):
                self.peer(stage)
        self.all_serve()

    def all_serve(self) -> None:
        """Wait until every peer that lives serves."""
        alive = [p for p in self.programs if p.name.startswith("peer") and p.returncode is None]
        self.until(
            lambda: all(p.heard(Serving) or p.returncode is not None for p in alive), "the peers do not serve"
        )

    def serving(self, stage: Stage) -> list[Program]:
        """Live peers of a stage that serve."""
        return [
            p
            for p in self.programs
            if p.returncode is None and any(event.stage == stage for event in p.heard(Serving))
        ]

    def trainer(self, *extra: str, kill_at: str = "") -> Program:
        """Start a trainer; it is not waited for."""
        return self.start(
            self._name("trainer"), ["train", *self.membership(), *self._files, *extra], kill_at=kill_at
        )

    def keeper(self, folder: Path, *extra: str) -> Program:
        """Start a keeper of checkpoints in `folder`; it is not waited for."""
        return self.start(self._name("keeper"), ["keeper", *self.membership(), "--dir", str(folder), *extra])

    def train_to(self, version: int, *extra: str) -> Program:
        """Run a trainer until so many steps are taken; it ends by itself, with 0."""
        trainer = self.trainer("--steps", str(version), *extra)
        self.ends(trainer)
        return trainer

    def ends(self, program: Program) -> None:
        """Wait until a program has done what it was started for, or was asked to leave: it ends with 0."""
        self.until(lambda: program.returncode is not None, f"{program.name} does not end")
        assert program.wait() == 0, self.story()

    def leaves(self, program: Program) -> None:
        """Ctrl-C: it ends in good order."""
        program.signal(signal.SIGINT)
        self.ends(program)

    def living(self, kind: str) -> list[Program]:
        """Programs whose name begins like that and that run."""
        return [p for p in self.programs if p.name.startswith(kind) and p.returncode is None]

    def takes_part(self, peer: Program) -> None:
        """Wait until `peer` takes two steps that no other peer takes yet."""
        now = self.version()
        self.until(
            lambda: any(event.t >= now + 2 for event in peer.heard(Stepped)), f"{peer.name} does not step"
        )

    # -- what happened ----------------------------------------------------------------------------

    def version(self) -> int:
        """Steps taken, as far as the trainers have told."""
        done = [event.t + 1 for program in self.programs for event in program.heard(StepDone)]
        return max(done, default=0)

    def until_version(self, version: int) -> None:
        """Wait until so many steps are taken."""
        self.until(lambda: self.version() >= version, f"version {version} is not reached")

    def goes_on(self, steps: int = 2) -> None:
        """Wait for so many steps more, or for the last one."""
        self.until_version(min(self.version() + steps, self.run.steps))

    def until_all_stepped(self) -> None:
        """Wait until every serving peer says that it took the last step told, or has its weights."""
        version = self.version()
        peers = [p for stage in range(self.run.cells) for p in self.serving(stage)]

        def reached(program: Program) -> bool:
            took = [event.t + 1 for event in program.heard(Stepped)]
            got = [event.version for event in (*program.heard(Serving), *program.heard(StateFetched))]
            # One that missed a step takes it with the gradient of another.
            text = f"step {version - 1} taken with the gradient"
            return any(text in note.text for note in program.heard(Note)) or max(got + took) >= version

        self.until(lambda: all(map(reached, peers)), f"some peers do not reach version {version}")

    def audits(self) -> dict[tuple[Stage, int], list[tuple[int, int]]]:
        """(stage, step) -> (missing, counted twice), as the ledgers of the rounds say."""
        found: dict[tuple[Stage, int], list[tuple[int, int]]] = defaultdict(list)
        for program in self.programs:
            for event in program.heard(AddedUp):
                found[event.stage, event.t].append((event.missing, event.duplicated))
        return found

    def audited_weights(self) -> dict[str, torch.Tensor]:
        """`weights`, once all have taken the last step; in no step was anything missing or counted twice."""
        self.until_all_stepped()
        weights = self.weights()
        assert {audit for found in self.audits().values() for audit in found} == {(0, 0)}
        return weights

    def single_process(self, steps: int) -> SingleProcess:
        """The same run in one process, so many steps on."""
        single = SingleProcess(self.run, self.data.batch, self.device)
        for t in range(steps):
            single.step(t)
        return single

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of all stages, as who joins would get them. For a run at rest."""

        async def fetch(node: Node) -> dict[str, torch.Tensor]:
            end, cells = time.monotonic() + LIMIT_S, range(self.run.cells)
            states = [await self._download(node, cell) for cell in cells]
            while len({got.opened.version for got in states}) > 1:  # some are about to commit the last step
                assert time.monotonic() < end, [got.opened.version for got in states]
                states = [await self._download(node, cell) for cell in cells]
            found = dict[str, torch.Tensor]()
            for cell, got in enumerate(states):
                named = stage_layout(self.run, cell % self.run.S).views(
                    got.tensors["weights"], got.tensors.get("statistics")
                )
                for name, weights in named.items():  # all islands have the same, after a meeting
                    assert torch.equal(found.setdefault(name, weights), weights)
            return found

        return self.as_a_node(fetch)

    async def _download(self, node: Node, stage: Stage) -> Download:
        """The newest state of a stage. At first the directory may know half of the peers, or dead ones."""
        end = time.monotonic() + 15.0
        while True:
            records = await node.directory.refresh({stage})
            serving = [r.peer for r in records if r.stage == stage and r.state == "serving"]
            try:
                return await download(node.transport, state_of(*split_cell(self.run, stage)), serving)
            except DownloadFailed:
                if time.monotonic() >= end:
                    raise
            await asyncio.sleep(0.5)

    def states(self) -> list[tuple[Program, Stage, int, dict[str, torch.Tensor]]]:
        """(peer, its stage, version, weights) of every peer that serves, each asked itself."""

        async def fetch(node: Node) -> list[tuple[Program, Stage, int, dict[str, torch.Tensor]]]:
            found = []
            for stage in range(self.run.S):
                compute = StageCompute(self.run, stage)
                for program in self.serving(stage):
                    node.transport.addresses.learn(program.peer_id, program.heard(Started)[0].addresses)
                    got = await download(node.transport, state_of(self.run, stage), [program.peer_id])
                    compute.load_state(got.opened.version, got.tensors)
                    weights = {name: w.clone() for name, w in weights_of(compute).items()}
                    found.append((program, stage, got.opened.version, weights))
            return found

        return self.as_a_node(fetch)

    def versions(self) -> dict[Program, int]:
        """Of every peer that serves, or will, each asked itself. A spare holds the newest saved version."""
        peers = [p for p in self.programs if p.returncode is None and p.heard(Serving)]

        async def ask(node: Node) -> dict[Program, int]:
            found = {}
            for program in peers:
                node.transport.addresses.learn(program.peer_id, program.heard(Started)[0].addresses)
                question = pack(AskStatus(run=self.run.id))
                answer = await node.transport.call(program.peer_id, "status", question)
                status = unpack_answer(program.peer_id, answer.header, PeerStatus)
                if status.state != "paused":
                    found[program] = status.version
            return found

        return self.as_a_node(ask)

    def count_matrices(self) -> list[tuple[Program, int, list[int | float]]]:
        """The audit model: (peer, version, how often each microbatch index counted in its weights)."""
        rows = []
        for program, _, version, weights in self.states():
            (vector,) = weights.values()
            rows.append((program, version, (-vector * self.run.M).tolist()))
        return rows

    def assert_each_counted_once(self) -> int:
        """In the weights of every peer, each index m counted once a step. Returns the lowest version."""
        rows = self.count_matrices()
        for program, version, counts in rows:
            assert counts == [version] * self.run.M, f"{program.name} at version {version}: {counts}"
        return min(version for _, version, _ in rows)

    def as_a_node(self, ask: Callable[[Node], Coroutine[Any, Any, T]]) -> T:
        """Run `ask` with a node of this process that joined the swarm."""

        async def main() -> T:
            up = [p.address for p in self.programs if p.returncode is None and p.heard(Started)]
            options = DaemonOptions(host=self.lab.inner_ip(host) if self.lab is not None else "127.0.0.1")
            async with Node(options=options, join=up, run_id=self.run.id) as node:
                return await ask(node)

        host = self.free_host()
        # Only p2pd has sockets of the network, and it is started by this thread.
        with self.lab.inside(host) if self.lab is not None else contextlib.nullcontext():
            return asyncio.run(main())


class Training(Swarm):
    """A swarm that always trains: each test takes something from it, and the next finds it whole again."""

    job_s = 0.05
    """It trains also while tests wait for heartbeats and records: a fifth of the steps do."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, audit_run(stages=2, steps=1_000_000, microbatches_per_step=4))

    def make_whole(self) -> None:
        """A bootstrap, two peers a stage, a trainer."""
        if not self.living("bootstrap"):
            self.bootstrap()
        if not self.living("trainer"):
            self.trainer("--window", "3")
        self.peers(2)
        self.goes_on()


def farthest(found: dict[str, torch.Tensor], single: SingleProcess) -> float:
    """The largest difference of any weight, relative to the largest weight of its tensor."""
    expected = single.named_weights()
    assert found.keys() == expected.keys()
    return max(float((found[n] - w).abs().max() / w.abs().max()) for n, w in expected.items())

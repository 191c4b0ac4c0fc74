"""A whole swarm as processes of this machine: a bootstrap, peers of every stage and a trainer.

They find each other over the DHT, as they would on many machines. What they say of themselves is heard and
added up; a peer that dies is replaced.
"""

from __future__ import annotations

import asyncio
import random
import shlex
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from signal import SIGKILL
from subprocess import STDOUT
from typing import TYPE_CHECKING

import msgspec

from peers import events
from peers.clock import unix_s
from peers.device import choose_device
from peers.events import Emit, Event, Note, StepDone, count, parse_event
from peers.net.charter.signed import make_token
from peers.net.identity import Identity
from peers.options import TOKEN_VARIABLE
from peers.programs.fleet import Child, names_of, stop_all
from peers.storage import RESULTS_ENV
from peers.waiting import happens
from swarm import manifest
from swarm.errors import SetupError
from swarm.ids import PeerId, Stage

if TYPE_CHECKING:
    import torch

    from peers.api.run import Run

START_S = 120.0
"""Limit for the start of a process, on a loaded machine."""
STALL_S = 900.0
"""Limit between two signs of work: longer than a device may take for one job."""
PRIVATE = ("--host", "127.0.0.1")
QUIET_S = 5.0
"""If nothing is said for so long after the last step, there is nothing more to say."""
LAST_LINES = 20
OWN_WORDS = (events.Stepped, events.AddedUp, events.JoinLine, events.StopNow, events.Contributed, Note)
"""What a process says of itself, which means little where it is one of many."""
SIGNS_OF_WORK = (events.Serving, events.Working, StepDone)
AGAIN_S = 30.0
"""Between tries to keep what was trained, while the disk is full."""
INVITED_S = 3650 * 86_400
"""A token holds for longer than any run takes."""
MAX_DEATHS = 5
"""So many peers may die of themselves before a step is taken: then something kills all of them."""


class Tally(msgspec.Struct):
    """What the processes said, added up."""

    steps: int = 0
    losses: dict[int, float] = {}
    microbatch_losses: dict[int, tuple[float, ...]] = {}
    audits: dict[tuple[Stage, int], tuple[int, int]] = {}
    """(stage, step) -> (missing, duplicated) in the ledgers of the newest round that was added up."""
    work: dict[tuple[Stage, PeerId], int] = {}
    """Microbatches that each peer added to steps that were taken, the dead included."""
    replayed: int = 0
    undone: int = 0
    preemptions: int = 0
    first_step_at: float = 0.0
    last_step_at: float = 0.0

    def add(self, event: Event) -> None:
        if isinstance(event, StepDone):
            self.steps = max(self.steps, event.t + 1)
            if event.loss is not None:
                self.losses[event.t] = event.loss
            if event.losses:
                self.microbatch_losses[event.t] = event.losses
            self.first_step_at = self.first_step_at or event.at
            self.last_step_at = event.at
        elif isinstance(event, events.AddedUp):
            self.audits[event.stage, event.t] = (event.missing, event.duplicated)
        elif isinstance(event, events.Replayed):
            self.replayed += event.count
        elif isinstance(event, events.Undone):
            self.undone += event.count

    def missing(self, run: manifest.Run) -> int:
        """Microbatches that no ledger shows to be counted; a step without a ledger misses all of them."""
        share = run.island(0)  # all islands have as many
        return sum(
            self.audits.get((cell, t), (share.microbatches(t), 0))[0]
            for t in range(run.steps)
            for cell in range(run.cells)
        )

    def duplicated(self) -> int:
        """Microbatches that the ledgers show in two sums."""
        return sum(twice for _, twice in self.audits.values())

    def tokens_per_s(self, run: manifest.Run) -> float:
        """Over all steps but the first, which pays for the start."""
        elapsed_s = self.last_step_at - self.first_step_at
        tokens = sum(map(run.microbatches, range(1, self.steps))) * run.tokens_per_step / run.M
        return tokens / elapsed_s if elapsed_s > 0 else 0.0


class Processes:
    """The processes of one run, from `start` to `close`. One caller at a time."""

    def __init__(
        self, given: Run, peers: int, emit: Emit, *, folder: Path | None = None, device: str = "cpu"
    ) -> None:
        """
        Args:
            peers: of each stage.
            emit: hears what is worth a line; what one process says of itself alone is left out.
            folder: that `swarm init` made of this run: with its keys, and checkpoints there.
            device: one or several, which the peers have in turn.

        Raises:
            SetupError: this machine has none of that name.
        """
        devices = [choose_device(name) for name in names_of(str(device))] or [choose_device(str(device))]
        self.run, self.tally, run, code = given.terms, Tally(), given.terms, given.code
        self._peers, self._emit, self._folder = peers, emit, folder
        self._data: list[str] = []
        for option, files in (("--data", given.files), ("--eval-data", given.eval_data)):
            words = [str(f.resolve() if isinstance(f, Path) else f) for f in files]
            self._data += [option, *words] if words else []
        self._data += [] if given.tokenizer is None else ["--tokenizer", str(given.tokenizer.resolve())]
        self._start = [] if given.start is None else ["--start", str(given.start.resolve())]
        installed = [name for name in run.code if code is None or name.partition(":")[0] != code.stem]
        allowed = [*installed, *([str(code.resolve())] if code is not None else [])]
        self._allowed = [word for code in allowed for word in ("--allow-code", code)]
        self._random, self._devices = random.Random(run.seed), cycle(devices)
        self.children: list[Child] = []
        self._serving: dict[Child, tuple[PeerId, Stage]] = {}
        self._stages: dict[Child, Stage] = {}
        """Of the peers: what each was started for."""
        self._said: dict[Child, deque[str]] = defaultdict(lambda: deque(maxlen=LAST_LINES))
        """What each printed last that was no event: tracebacks and the like."""
        self._dead: set[PeerId] = set()
        self._died: list[PeerId] = []
        """Since the last step that was handed out."""
        self.stall_s, self.again_s = STALL_S, AGAIN_S
        self._sign_s = 0.0
        """When the last sign of work was heard."""
        self._deaths = 0
        """Not by `kill`, since the last step."""
        self.addresses: tuple[str, ...] = ()
        """Where others can join, once the bootstrap has started."""
        self._meeting: list[str] = []
        """What the bootstrap says that others join with."""
        self._changed = asyncio.Event()
        self._failure = ""
        self._steps: deque[StepDone] = deque()
        self._trainer: Child | None = None
        self._keys: dict[Child, Path] = {}
        """Of the peers of a folder. The first of each stage keeps checkpoints."""

    # -- from the first process to the last step ------------------------------------------------

    async def start(self) -> None:
        """Start all of them; a first step may take seconds from now on. Only this machine can dial them.

        Raises:
            SetupError: one of them cannot start.
        """
        run, folder, peers = self.run, self._folder, count(self.run.cells * self._peers, "peer")
        self._emit(Note(text=f"starting {peers}, a trainer and a bootstrap, where they meet: 10 to 60 s"))
        if run.cells > run.S:
            last = run.cells - 1
            text = f"stages of all islands are numbered in a row, as cells: {last} is {run.place(last)}"
            self._emit(Note(text=text))
        files = {"--charter": "charter", "--identity": "owner.key", "--join-file": "join.txt"}
        own = [str(word) for flag, name in files.items() for word in (flag, folder / name)] if folder else []
        await self._spawn(["bootstrap", "--manifest", "-", *own], stdin=run.to_toml().encode())
        await self._until(lambda: bool(self._meeting), START_S, "the bootstrap does not start")
        for cell in range(run.cells):
            for _ in range(self._peers):
                await self._spawn_peer(cell)
        key = [] if folder is None else ["--identity", str(folder / "trainer.key")]
        self._trainer = await self._spawn(["train", *self._meeting, *self._allowed, *self._data, *key])

    async def next_step(self) -> tuple[StepDone, tuple[PeerId, ...]] | None:
        """The next step, and which peers died before it; None after the last one.

        Raises:
            SetupError: a process failed, or no step is taken.
        """
        trainer = self._trainer
        assert trainer is not None, "started"
        first = self.tally.steps == 0
        why = "the first step is not taken" if first else f"step {self.tally.steps + 1} is not taken"
        await self._until(
            lambda: bool(self._steps) or self.tally.steps >= self.run.steps or trainer.returncode == 0,
            self.stall_s, why,
        )  # fmt: skip
        if not self._steps:
            return None
        died, self._died = tuple(self._died), []
        return self._steps.popleft(), died

    async def finish(self) -> None:
        """Wait until all has been said, after the last step. What peers from elsewhere say is not heard here.

        Raises:
            SetupError: the trainer failed.
        """
        assert self._trainer is not None
        if await self._trainer.wait() != 0:
            raise SetupError("the trainer failed: " + " | ".join(self._said[self._trainer]))
        while len(self.tally.audits) < self.run.cells * self.run.steps:
            self._changed.clear()
            if not await happens(self._changed, QUIET_S):
                return

    async def weights(self) -> tuple[dict[str, torch.Tensor], int]:
        """The newest weights that all stages can give, by full name as `swarm export --run` gets them, and
        their version.

        Raises:
            SetupError: there is no such version.
        """
        from peers.net.node import Node
        from peers.programs.trained import NoRoom, collect
        from peers.storage.checkpoint import found_steps
        from peers.storage.weights import read_stage

        run, found = self.run, dict[str, "torch.Tensor"]()
        with tempfile.TemporaryDirectory() as name:
            async with Node(join=self.addresses, run_id=run.id) as node:
                while True:
                    try:
                        network, where = (node.transport, node.directory), Path(name)
                        step = await collect(run, *network, where, self._hear_download)
                        break
                    except NoRoom as error:
                        if self._folder is None:
                            raise
                        where, step = self._folder / "checkpoints", run.steps
                        if all(step in found_steps(where, run, stage) for stage in range(run.S)):
                            break
                        self._emit(
                            events.Trouble(text=f"{error.text}: tried again every {self.again_s:.0f} s")
                        )
                        await asyncio.sleep(self.again_s)
            for stage in range(run.S):
                found |= await asyncio.to_thread(read_stage, where, run, stage, step)
        return found, step

    def _hear_download(self, event: Event) -> None:
        if isinstance(event, events.Downloading):
            self._emit(event)

    async def close(self) -> None:
        """End all processes; none is left, also if this is cancelled."""
        if self.children:
            self._emit(Note(text="ending all processes"))
        self._emit = lambda event: None  # that they lose one another now is no news
        await stop_all(self.children)

    # -- processes --------------------------------------------------------------------------------

    async def _spawn(self, arguments: list[str], *, stdin: bytes = b"", token: str = "") -> Child:
        child = await Child.spawn(
            [*arguments, *PRIVATE, "--log-format", "json"], self._hear, stdin=stdin, stderr=STDOUT,
            environment={RESULTS_ENV: "", TOKEN_VARIABLE: token},
        )  # fmt: skip
        self.children.append(child)
        return child

    async def _spawn_peer(self, stage: Stage) -> None:
        words = ["--stage", str(stage), "--device", next(self._devices), "--threads", "1"]
        used, key, token = {self._keys.get(child) for child in self._stages}, Path(), ""
        if (folder := self._folder) is not None:
            keys = [folder / f"peer{stage}{f'-{n}' * (n > 0)}.key" for n in range(len(used) + 1)]
            words += ["--identity", str(key := next(key for key in keys if key not in used))]
            if key == keys[0] and stage < self.run.S:  # what is saved is the same on all islands
                words += ["--checkpoint-dir", str(folder / "checkpoints")]
            if Identity.load_or_create(key).peer_id not in self.run.admission.founders:
                until, owner = int(unix_s()) + INVITED_S, Identity.load(folder / "owner.key")
                token = make_token(self.run.id, owner, "peer", expires=until)
        child = await self._spawn(["peer", *self._meeting, *self._allowed, *self._start, *words], token=token)
        self._stages[child], self._keys[child] = stage, key

    def _hear(self, child: Child, line: str) -> None:
        event = parse_event(line)
        if event is None:
            self._said[child].append(line)
            return
        if isinstance(event, SIGNS_OF_WORK):
            self._sign_s = time.monotonic()
        self.tally.add(event)
        if isinstance(event, events.Stepped):
            place = event.stage, self._serving.get(child, ("", 0))[0]
            self.tally.work[place] = self.tally.work.get(place, 0) + event.microbatches
        if isinstance(event, events.Started):
            self.addresses = self.addresses or event.addresses  # of the bootstrap, which is the first
        elif isinstance(event, events.JoinLine):
            self._meeting = shlex.split(event.line)[2:]
        elif isinstance(event, events.Serving) and child in self._stages:
            self._serving[child] = (event.peer, event.stage)
            self._emit(events.PeerJoined(peer=event.peer, stage=event.stage, device=event.device))
        elif isinstance(event, events.Failed):
            self._failure = event.text
        elif isinstance(event, StepDone):
            # The directory forgets the dead after some seconds; we saw them die.
            stages = [stage for _, stage in self._serving.values()]
            event = msgspec.structs.replace(event, peers=tuple(map(stages.count, range(self.run.cells))))
            self._steps.append(event)
            self._deaths = 0
            self._emit(event)
        elif isinstance(event, events.PeerLost) and event.peer in self._dead:
            pass  # said once, by us
        elif not isinstance(event, OWN_WORDS):
            self._emit(event)
        self._changed.set()

    async def _until(self, condition: Callable[[], bool], limit_s: float, why: str) -> None:
        """Wait until `condition()`; a process that ends unasked is replaced if it was a peer that died."""
        began_s = time.monotonic()
        while True:
            if self._failure:
                raise SetupError(self._failure)
            for child in [child for child in self.children if child.returncode not in (None, 0)]:
                await self._ended(child)
            if condition():
                return
            left_s = max(began_s, self._sign_s) + limit_s - time.monotonic()
            if left_s <= 0:
                raise SetupError(f"{why}, and nothing else for {limit_s:g} s: the machine may be too busy")
            await happens(self._changed, min(left_s, 1.0))
            self._changed.clear()

    async def _ended(self, child: Child) -> None:
        """Start another in place of a peer that a signal ended.

        Raises:
            SetupError: it was no peer, or it has something to say; or too many have died.
        """
        code = await child.wait()
        self._deaths += 1
        if child not in self._stages or code > 0 or self._deaths > MAX_DEATHS:
            raise SetupError(f"a process ended with {code}: {' | '.join(self._said[child])}")
        serving, stage = self._serving.get(child), self._bury(child)
        why = f"its process died of signal {-code}"
        if serving is not None:
            self._emit(events.PeerLost(peer=serving[0], stage=stage, why=why))
        else:
            self._emit(events.Trouble(text=f"a peer of {self.run.place(stage)} is lost at its start: {why}"))
        await self._spawn_peer(stage)

    def _bury(self, child: Child) -> Stage:
        """Forget a peer whose process is dead; its stage."""
        self.children.remove(child)
        if (serving := self._serving.pop(child, None)) is not None:
            self._dead.add(serving[0])
            self._died.append(serving[0])
        return self._stages.pop(child)

    # -- preemption -------------------------------------------------------------------------------

    async def kill(self, stage: Stage | None = None) -> PeerId:
        """Kill a peer, of that stage or of any, in the middle of its work, and start another.

        Raises:
            SetupError: there is no such stage; or no other peer could be started to take over its weights
                before.
        """
        if stage is not None and stage not in range(self.run.cells):
            raise SetupError(f"stage = {stage!r}: {self.run.name!r} has stages 0 to {self.run.cells - 1}")
        # In the middle of a step, not at its edge, where little is at stake.
        await asyncio.sleep(self._random.random())
        if not self._spare(stage):
            # With one peer a stage its weights would be lost: let another take them over first.
            await self._spawn_peer(self._random.randrange(self.run.cells) if stage is None else stage)
            await self._until(lambda: bool(self._spare(stage)), START_S, "the replacement does not serve")
        child = self._random.choice(self._spare(stage))
        victim, its_stage = self._serving[child]
        self._bury(child)
        child.signal(SIGKILL)
        self.tally.preemptions += 1
        self._emit(events.Killed(peer=victim, stage=its_stage))
        await self._spawn_peer(its_stage)
        await child.wait()
        return victim

    def _spare(self, stage: Stage | None) -> list[Child]:
        """Those of a stage, or of any, without which its weights are not lost."""
        alive = {child: its for child, (_, its) in self._serving.items() if child.returncode is None}
        stages = [*alive.values()]
        return [child for child, its in alive.items() if stages.count(its) > 1 and stage in (None, its)]

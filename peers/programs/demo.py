"""`swarm demo`: a whole swarm of real processes on this machine, some of them killed.

1 bootstrap, stages × peers peers and 1 trainer find each other over the DHT; while they train, peers
are killed with SIGKILL and replaced; then the ledgers are added up, and the model writes a passage.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGKILL
from subprocess import STDOUT
from typing import TYPE_CHECKING, TextIO

import msgspec

from peers import events
from peers.events import Emit, Event, Note, StepDone, count, parse_event, to_text
from peers.programs.fleet import Child, stop_all
from peers.programs.tool_options import DemoOptions
from peers.storage import RESULTS_ENV
from peers.waiting import happens
from swarm.errors import SetupError
from swarm.ids import PeerId, Stage
from swarm.manifest import CodecSpec, CustomModelSpec, Run, demo_run, load_run

if TYPE_CHECKING:
    import torch

START_S = 120.0
"""Limit for the first step: processes start slowly on a loaded machine."""
STALL_S = 120.0
"""Limit between two steps."""
MIN_PROCESSES, PROCESSES_PER_CORE = 32, 8
"""A demo of more processes than either is refused: each has torch in its memory, 200 MB at least."""
SAMPLE_TOKENS = 400
LAST_LINES = 20
PROMPT = "The "
STEP_LINES = 40
"""Of the steps, about so many are said."""


class Lines:
    """Prints each event as a line; steps now and then."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._done = 0
        self._print(title)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            before, self._done = self._done, max(self._done, event.t + 1)
            every = max(1, event.steps // STEP_LINES)
            if self._done // every == before // every and self._done != event.steps:
                return
        self._print(to_text(event))

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


@dataclass
class Tally:
    """What the processes said, added up."""

    steps: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    microbatch_losses: dict[int, tuple[float, ...]] = field(default_factory=dict)
    audits: dict[tuple[Stage, int], tuple[int, int]] = field(default_factory=dict)
    """(stage, step) -> (missing, duplicated) in the ledgers of the round that was applied."""
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
        elif isinstance(event, events.Stepped) and event.missing is not None and event.duplicated is not None:
            self.audits[event.stage, event.t] = (event.missing, event.duplicated)
        elif isinstance(event, events.Replayed):
            self.replayed += event.count
        elif isinstance(event, events.Undone):
            self.undone += event.count

    def missing(self, run: Run) -> int:
        """Microbatches that no ledger shows to be counted; a step without a ledger misses all of them."""
        cells = [(stage, t) for stage in range(run.S) for t in range(run.steps)]
        return sum(self.audits.get(cell, (run.M, 0))[0] for cell in cells)

    def duplicated(self) -> int:
        """Microbatches that the ledgers show in two sums."""
        return sum(twice for _, twice in self.audits.values())

    def tokens_per_s(self, run: Run) -> float:
        """Over all steps but the first, which pays for the start."""
        elapsed_s = self.last_step_at - self.first_step_at
        return (self.steps - 1) * run.tokens_per_step / elapsed_s if elapsed_s > 0 else 0.0


async def run_demo(options: DemoOptions) -> int:
    """Run it all; 0, or 5 if a number is not what it must be."""
    run = _manifest_of(options)
    _check_size(run, options)
    _check_text(options.data)
    title = (
        f"swarm demo: {count(run.S, 'stage')} × {count(options.peers, 'peer')}, {count(run.steps, 'step')}"
    )
    shown = sys.stderr if options.json else sys.stdout
    demo = Demo(run, options, Lines(title, shown))
    try:
        result = await demo.play()
    finally:
        await stop_all(demo.children)
    print(summary(result), file=shown)
    if options.json:
        print(json.dumps({key: value for key, value in result.items() if not key.startswith("_")}))
    return 5 if result["missing"] or result["duplicated"] or result["_wrong"] else 0


def _manifest_of(options: DemoOptions) -> Run:
    if options.manifest is None:
        run = demo_run(
            stages=options.stages or 3, steps=options.steps or 50,
            codec=options.codec or "blockwise8", seed=1 if options.seed is None else options.seed,
        )  # fmt: skip
    else:
        run = load_run(options.manifest)
        if options.stages is not None:
            cut = {"cut": ""} if run.brings_model else {}
            run = replace(run, model=replace(run.model, stages=options.stages, **cut))
        given = {name: getattr(options, name) for name in ("steps", "seed")}
        run = replace(run, **{name: value for name, value in given.items() if value is not None})
        if options.codec is not None:
            codecs = CodecSpec.symmetric(options.codec)
            run = replace(run, codec=replace(run.codec, forward=codecs.forward, backward=codecs.backward))
        if options.seed is not None and isinstance(run.model, CustomModelSpec):
            run = replace(run, model=replace(run.model, weights=""))
    if options.data and run.data.source != "code":
        run = replace(run, data=replace(run.data, source="files", sha256="", tokens=0))
    return run


def _check_size(run: Run, options: DemoOptions) -> None:
    """Raises SetupError: more processes than this machine is likely to bear."""
    processes = 2 + run.S * options.peers
    most = max(MIN_PROCESSES, PROCESSES_PER_CORE * (os.cpu_count() or 1))
    if processes > most and not options.yes:
        raise SetupError(
            f"{run.S} stages of {options.peers} peers are {processes} processes with torch, on "
            f"{count(os.cpu_count() or 1, 'core')}: more than {most} are started only with --yes. Take fewer "
            "--stages or --peers"
        )


def _check_text(files: Sequence[Path]) -> None:
    """Raises SetupError: a file is no text, though bytes could be trained on."""
    for path in files:
        if path.is_file():
            with path.open("rb") as file:
                if b"\0" in file.read(4096):
                    raise SetupError(f"--data {path} is not text: it has null bytes; give a text file")


class Demo:
    """The processes of one demo, and the story that they tell."""

    def __init__(self, run: Run, options: DemoOptions, display: Emit) -> None:
        self._run, self._options, self._display = run, options, display
        self._random = random.Random(run.seed)
        self.children: list[Child] = []
        self._serving: dict[PeerId, tuple[Child, Stage]] = {}
        self._ids: dict[Child, PeerId] = {}
        self._said: dict[Child, deque[str]] = defaultdict(lambda: deque(maxlen=LAST_LINES))
        """What each printed last that was no event: tracebacks and the like."""
        self._expected_dead: set[PeerId] = set()
        self._started: dict[str, events.Started] = {}
        self._changed = asyncio.Event()
        self._failure = ""
        self._replacing = False
        self.tally = Tally()

    async def play(self) -> dict[str, object]:
        """From the first process to the last word."""
        from peers.programs.manifest_pinning import pinned
        from peers.storage.samples import open_data

        data = await asyncio.to_thread(open_data, self._run, self._options.data)
        run = self._run = await asyncio.to_thread(pinned, self._run, data)
        files = [str(path.resolve()) for path in self._options.data]
        await self._spawn(["bootstrap", "--manifest", "-", *(["--data", *files] if files else [])],
                          stdin=run.to_toml().encode())  # fmt: skip
        await self._until(lambda: "bootstrap" in self._started, START_S, "the bootstrap does not start")
        self._meeting = ["--run", run.id, "--join", self._started["bootstrap"].addresses[0]]
        self._meeting += [word for code in run.code for word in ("--allow-code", code)]
        for stage in range(run.S):
            for _ in range(self._options.peers):
                await self._spawn_peer(stage)
        trainer = await self._spawn(["train", *self._meeting, *(["--data", *files] if files else [])])
        await self._until(lambda: self.tally.steps > 0, START_S, "the first step is not taken")
        for step in self._preemption_steps():
            await self._until_step(step)
            await self._preempt()
        await self._until_step(run.steps)
        if await trainer.wait() != 0:
            raise SetupError("the trainer failed: " + " | ".join(self._said[trainer]))
        return await self._conclude(data.batch, data.tokenizer.encode, data.tokenizer.decode)

    # -- processes --------------------------------------------------------------------------------

    async def _spawn(self, arguments: list[str], *, stdin: bytes = b"") -> Child:
        child = await Child.spawn(
            [*arguments, "--log-format", "json"], self._hear, stdin=stdin, stderr=STDOUT,
            environment={RESULTS_ENV: ""},
        )  # fmt: skip
        self.children.append(child)
        return child

    async def _spawn_peer(self, stage: Stage) -> Child:
        return await self._spawn(
            ["peer", *self._meeting, "--stage", str(stage), "--device", "cpu", "--threads", "1"]
        )

    def _hear(self, child: Child, line: str) -> None:
        event = parse_event(line)
        if event is None:
            self._said[child].append(line)
            return
        self.tally.add(event)
        if isinstance(event, events.Started):
            self._ids[child] = event.peer
            self._started[event.role] = event
        elif isinstance(event, events.Serving):
            self._serving[event.peer] = (child, event.stage)
            self._display(events.PeerJoined(peer=event.peer, stage=event.stage, device=event.device))
        elif isinstance(event, events.Failed):
            self._failure = event.text
        elif isinstance(event, StepDone):
            # The directory forgets the dead after some seconds; we saw them die.
            stages = [stage for _, stage in self._serving.values()]
            self._display(
                msgspec.structs.replace(event, peers=tuple(stages.count(s) for s in range(self._run.S)))
            )
        elif isinstance(event, events.PeerLost) and event.peer in self._expected_dead:
            pass  # said once, by us
        elif not isinstance(event, (events.Stepped, events.JoinLine, events.StopNow, Note)):
            self._display(event)
        self._changed.set()

    async def _until(self, condition, limit_s: float, why: str) -> None:  # type: ignore[no-untyped-def]
        """Wait until `condition()`; a child that ends unasked ends the demo."""
        end = time.monotonic() + limit_s
        while not condition():
            if self._failure:
                raise SetupError(self._failure)
            for child in self.children:
                if child.returncode not in (None, 0) and self._ids.get(child, "") not in self._expected_dead:
                    said = " | ".join(self._said[child])
                    raise SetupError(f"a process ended with {child.returncode}: {said}")
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise SetupError(f"{why} within {limit_s:.0f} s; the machine may be too busy")
            await happens(self._changed, min(left_s, 1.0))
            self._changed.clear()

    async def _until_step(self, step: int) -> None:
        while self.tally.steps < step:
            due = self.tally.steps + 1
            await self._until(lambda due=due: self.tally.steps >= due, STALL_S, f"step {due} is not taken")

    # -- preemption -------------------------------------------------------------------------------

    def _preemption_steps(self) -> list[int]:
        """Spread over the run, the first after a third for one."""
        n, steps = self._options.preempt, self._run.steps
        return [max(1, (i + 1) * steps // (n + 2)) for i in range(n)]

    async def _preempt(self) -> None:
        """Kill a peer in the middle of its work, and start another."""
        stages = [stage for _, stage in self._serving.values()]
        fit = sorted(p for p, (_, stage) in self._serving.items() if stages.count(stage) > 1)
        if not fit:
            # With one peer a stage its weights would be lost: let another take them over first.
            stage = self._random.randrange(self._run.S)
            before = len(self._serving)
            await self._spawn_peer(stage)
            await self._until(lambda: len(self._serving) > before, START_S, "the replacement does not serve")
            fit = sorted(p for p, (_, s) in self._serving.items() if s == stage)
        # In the middle of a step, not at its edge, where little is at stake.
        await asyncio.sleep(self._random.random())
        victim = self._random.choice(fit)
        child, stage = self._serving.pop(victim)
        self._expected_dead.add(victim)
        child.signal(SIGKILL)
        self.tally.preemptions += 1
        self._display(events.Killed(peer=victim, stage=stage))
        await self._spawn_peer(stage)

    # -- the end ----------------------------------------------------------------------------------

    async def _conclude(self, batch, encode, decode) -> dict[str, object]:  # type: ignore[no-untyped-def]
        run, tally = self._run, self.tally
        told = run.S * run.steps
        await self._until(lambda: len(tally.audits) >= told, 10.0, "the last ledgers are not told")
        self._display(Note(text="taking the trained weights from the peers"))
        weights = await self._fetch_weights()
        sample = ""
        if run.model.kind == "gpt":
            from swarm.model.generate import generate

            more = await asyncio.to_thread(
                generate, run, weights, encode(PROMPT), SAMPLE_TOKENS, 0.7, run.seed
            )
            sample = "".join(c if c.isprintable() or c == "\n" else "·" for c in PROMPT + decode(more))
        verify = await self._verify(batch, weights) if self._options.verify else None
        return {
            "steps": tally.steps,
            "tokens_per_s": round(tally.tokens_per_s(run), 1),
            "loss_first": tally.losses.get(0),
            "loss_last": tally.losses.get(run.steps - 1),
            "preemptions": tally.preemptions,
            "replayed": tally.replayed,
            "missing": tally.missing(run),
            "duplicated": tally.duplicated(),
            "verify": verify,
            "_undone": tally.undone,
            "_sample": sample,
            "_wrong": tally.steps != run.steps,
        }

    async def _fetch_weights(self) -> dict[str, torch.Tensor]:
        """The weights of every stage by name, as `swarm export --run` gets them."""
        from peers.net.node import Node
        from peers.storage.weights import read_stage
        from peers.transfer.keeper import collect

        run, found = self._run, dict[str, "torch.Tensor"]()
        with tempfile.TemporaryDirectory() as name:
            async with Node(join=self._started["bootstrap"].addresses, run_id=run.id) as node:
                step = await collect(run, node.transport, node.directory, Path(name), lambda event: None)
            for stage in range(run.S):
                found |= await asyncio.to_thread(read_stage, Path(name), run, stage, step)
        return found

    async def _verify(self, batch, weights: Mapping[str, torch.Tensor]) -> dict[str, float]:  # type: ignore[no-untyped-def]
        """The same manifest in this process; the largest difference of any loss and of any weight."""
        import torch

        from swarm.model.reference import SingleProcess

        torch.set_num_threads(1)
        single = SingleProcess(self._run, batch)
        loss_diff = 0.0
        self._display(Note(text="verifying: the same manifest in one process"))
        for t in range(self._run.steps):
            losses = await asyncio.to_thread(single.step, t)
            mean = sum(losses) / len(losses)
            theirs = self.tally.microbatch_losses.get(t)
            if theirs is not None:
                loss_diff = max(loss_diff, *(abs(a - b) for a, b in zip(losses, theirs, strict=True)))
            elif t in self.tally.losses:
                loss_diff = max(loss_diff, abs(mean - self.tally.losses[t]))
            if (t + 1) % 10 == 0:
                self._display(Note(text=f"verified {t + 1} of {self._run.steps} steps"))
        weight_diff = max(
            float((weights[name].double() - mine.double()).abs().max())
            for name, mine in single.named_weights().items()
        )
        return {"max_loss_diff": loss_diff, "max_weight_diff": weight_diff}


def summary(result: Mapping[str, object]) -> str:
    """The last screen, in words."""
    first, last = (
        f"{loss:.3f}" if isinstance(loss, float) else "?"
        for loss in (result["loss_first"], result["loss_last"])
    )
    lines = [
        "",
        f"loss          {first} → {last} in {result['steps']} steps, {result['tokens_per_s']:,.0f} tokens/s",
        f"preemptions   {result['preemptions']} (SIGKILL), microbatches run again: {result['replayed']}"
        f", duplicates undone before they counted: {result['_undone']}",
        f"ledgers       microbatches missing {result['missing']}, counted twice {result['duplicated']}",
    ]
    verify = result["verify"]
    if isinstance(verify, dict):
        lines.append(
            f"verified      against one process: largest difference of a loss {verify['max_loss_diff']:.2e},"
            f" of a weight {verify['max_weight_diff']:.2e}"
        )
    if result["_sample"]:
        lines += ["", "the trained model writes:", "", str(result["_sample"])]
    return "\n".join(lines)

"""`swarm demo` and `swarm up`: a whole swarm of real processes on this machine.

In a demo 1 bootstrap, stages × peers peers and 1 trainer find each other over the DHT; while they train,
peers are killed with SIGKILL and replaced; then the ledgers are added up, and the model writes a passage.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from peers.events import Emit, Event, Note, StepDone, count, to_text
from peers.programs.fleet import check_folder, check_size
from peers.programs.tool_options import DemoOptions, UpOptions, check_text
from peers.start_line import allowing, as_given, program
from peers.watch.terminal import clock, curve, sparkline
from swarm import manifest
from swarm.errors import SetupError, short
from swarm.manifest import CodecSpec, CustomModelSpec, demo_run, load_run

if TYPE_CHECKING:
    import torch

    from peers.api.local_swarm import LocalSwarm
    from peers.api.run import Run

STEPS = 300
SAMPLE_TOKENS = 400
NEXT = """\
next:
    {0} demo --preempt 3 --verify     three die, and one process computes the same beside it
    {0} init myrun     a run of your own
    {0} up myrun       train it
"""
CURVE = 65
"""Columns of a curve, and its numbers."""
ALONE = """\
17dda822a408e58131c59d13c7d5d405 5.591 0.207
4.726 3.188 2.449 2.275 2.159 2.023 1.910 1.790 1.679 1.598 1.477 1.387 1.290 1.204 1.113 1.063 0.945
0.888 0.809 0.719 0.672 0.619 0.569 0.502 0.475 0.447 0.402 0.378 0.354 0.333 0.319 0.307 0.300 0.286
0.272 0.254 0.245 0.248 0.237 0.236 0.224 0.223 0.218 0.220 0.220 0.215 0.207 0.206 0.200 0.201"""
"""What one process made of the demo as it is without arguments: the run's id, the first and the last loss,
and the means of equally many steps each. Written by `scripts/bench/loss/loss_curve.py --alone`."""
STEP_LINES, SILENCE_S = 40, 30.0
"""Of the steps, about so many are said, and more if nothing else was said of them for so long."""


class EventLines:
    """Prints each event as a line; steps now and then."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self.say = partial(print, file=stream if stream is not None else sys.stdout, flush=True)
        """A line that is no event."""
        self._done = 0
        self._first: StepDone | None = None
        self._said_at = float("-inf")
        self.say(title)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepDone):
            before, self._done = self._done, max(self._done, event.t + 1)
            every, silent_s = max(1, event.steps // STEP_LINES), event.at - self._said_at
            due = self._done // every > before // every or self._done == event.steps or silent_s >= SILENCE_S
            if self._done == before or not due:
                return
            self._said_at = event.at
            self.say(to_text(event) + self._left(event))
            return
        self.say(to_text(event))

    def _left(self, event: StepDone) -> str:
        """How long the steps that are left will take, once two were seen."""
        first = self._first = self._first or event
        if event.t <= first.t or event.t + 1 >= event.steps:
            return ""
        return f", {clock((event.at - first.at) / (event.t - first.t) * (event.steps - event.t - 1))} left"


def run_demo(options: DemoOptions) -> int:
    """Run it all; 0, or 5 if a number is not what it must be."""
    terms = _manifest_of(options)
    check_size(terms.cells, options.peers, options.yes)
    check_text((*options.data, *options.eval_data))
    sizes = f"{sizes_of(terms)} × {count(options.peers, 'peer')}, {count(terms.steps, 'step')}"
    shown = sys.stderr if options.json else sys.stdout
    lines = EventLines(f"swarm demo: {sizes}", shown)
    from peers.api.run import Run  # torch, which takes seconds

    run = Run.of(terms, files=options.data, start=options.start, eval_data=options.eval_data)
    result = play(run, options, lines)
    print(summary(result), file=shown)
    if options.json:
        print(told_as_json(result))
    return 5 if result["missing"] or result["duplicated"] or result["_wrong"] else 0


def sizes_of(run: manifest.Run) -> str:
    """`3 stages`, `2 islands of 3 stages`."""
    stages = count(run.S, "stage")
    return stages if run.cells == run.S else f"{count(run.islands.count, 'island')} of {stages}"


def told_as_json(result: Mapping[str, Any]) -> str:
    """The numbers of a demo, without what is only drawn of them."""
    verify = result["verify"] and {key: n for key, n in result["verify"].items() if key != "losses"}
    told = {key: value for key, value in result.items() if not key.startswith("_")}
    return json.dumps({**told, "verify": verify})


def play(run: Run, options: DemoOptions, display: Emit) -> dict[str, object]:
    """Train it, kill peers on the way, and see what came of it."""
    from peers.api.local_swarm import local

    terms = run.terms
    # Spread over the run, the first after a third for one.
    kills = Counter(max(1, (i + 1) * terms.steps // (options.preempt + 2)) for i in range(options.preempt))
    with local(run, options.peers, on_event=display, progress=False, yes=options.yes) as swarm:
        for step in swarm:
            for _ in range(kills.pop(step.t + 1, 0)):
                swarm.kill()
            if step.t + 1 == terms.steps:
                display(Note(text="taking the trained weights from the peers"))
    tally, weights = swarm.tally, swarm.weights()
    if writes := terms.model.kind == "gpt":
        display(Note(text="the trained model writes a passage"))
    return {
        "steps": tally.steps,
        "tokens_per_s": round(tally.tokens_per_s(terms), 1),
        "loss_first": tally.losses.get(0),
        "loss_last": tally.losses.get(terms.steps - 1),
        "preemptions": tally.preemptions,
        "replayed": tally.replayed,
        "missing": tally.missing(terms),
        "duplicated": tally.duplicated(),
        "verify": _verify(swarm, display) if options.verify else None,
        "_curve": (losses := [loss for _, loss in sorted(tally.losses.items())]),
        "_alone": recorded(run.id, losses),
        "_work": tally.work,
        "_place": terms.place,
        "_undone": tally.undone,
        "_losses": tally.microbatch_losses,
        "_sample": _sample(run, weights) if writes else "",
        "_wrong": tally.steps != terms.steps,
    }


def run_up(options: UpOptions) -> None:
    """Train it to its end, or to Ctrl-C; what is kept in the folder is where the next one goes on.

    Raises:
        SetupError: the folder holds no run, or a process cannot start.
    """
    folder = options.folder.parent if options.folder.name == "run.toml" else options.folder
    check_folder(folder)
    terms, model = load_run(folder / "run.toml"), folder / "model.safetensors"
    lines = EventLines(f"{terms.name}: {sizes_of(terms)}, {count(terms.steps, 'step')}", sys.stdout)
    from peers.storage import model_file  # torch, which takes seconds

    if not model_file.is_trained(model, terms):
        _train(options, terms, model, lines)
    given = f"--model {shlex.quote(str(model))}{allowing(terms.code)}{as_given(options, 'tokenizer')}"
    what, words = "See what it writes", f"generate {given} 'Once upon a time '"
    if terms.model.kind != "gpt":
        what, words = "Measure its loss", f"eval {given}{as_given(options, 'data')}"
    lines.say(f"the trained model is {model}. {what}:\n    {program()} {words}")


def _train(options: UpOptions, terms: manifest.Run, model: Path, lines: EventLines) -> None:
    """Train the run in the folder of `model`, and write that; raises as `run_up`."""
    from peers.api.local_swarm import local
    from peers.api.processes import AGAIN_S
    from peers.api.run import Run
    from peers.storage import model_file
    from peers.storage.weights import model_shapes

    folder, here = model.parent, shlex.quote(str(model.parent))
    run = Run.of(
        terms, files=options.data, tokenizer=options.tokenizer, start=options.start,
        eval_data=options.eval_data,
    )  # fmt: skip
    made = local(
        run, options.peers, on_event=lines, progress=False, yes=options.yes, folder=folder,
        device=options.device,
    )  # fmt: skip
    saves = terms.checkpoint_every or terms.islands.count > 1  # which save what each meeting leaves
    kept = "from the last checkpoint" if saves else "from the start (checkpoint_every = 0)"
    lines.say(f"stop it: Ctrl-C; {program()} up {here} goes on {kept}")
    with made as swarm:  # its join.txt is written now
        lines.say(f"watch it: {program()} dashboard @{here}/join.txt")
        for _ in swarm:
            pass
    by_name, step = made.trained()
    remedy = f"end this by Ctrl-C, which gives the model up: tried again every {AGAIN_S:.0f} s"
    while True:  # what took days to train is in this memory only, if the disk is full
        try:
            model_file.write(model, terms, step, model_shapes(terms), by_name.__getitem__, remedy=remedy)
            break
        except SetupError as error:
            lines.say(f"! {error.text}")
            time.sleep(AGAIN_S)


def _sample(run: Run, weights: Mapping[str, torch.Tensor]) -> str:
    """What the trained model writes."""
    from swarm.model.evaluate import generate

    tokenizer, tells = run.open_data().tokenizer, run.terms.data.source == "tales"
    prompt, temperature = ("Once upon a time there was a ", 0.4) if tells else ("The ", 0.7)
    more = generate(run.terms, weights, tokenizer.encode(prompt), SAMPLE_TOKENS, temperature, run.terms.seed)
    return "".join(c if c.isprintable() or c == "\n" else "·" for c in prompt + tokenizer.decode(more))


def _verify(swarm: LocalSwarm, display: Emit) -> dict[str, object]:
    """The same run in this process; the largest difference of any loss and of any weight."""
    from peers.api.steps import reference

    display(Note(text="verifying: the same manifest in one process"))
    single, tally, loss_diff = reference(swarm.run), swarm.tally, 0.0
    alone: list[float] = []
    for step in single:
        alone += [] if step.loss is None else [step.loss]
        theirs = tally.microbatch_losses.get(step.t)
        if theirs is not None:
            loss_diff = max(loss_diff, *(abs(a - b) for a, b in zip(step.losses, theirs, strict=True)))
        elif step.t in tally.losses and step.loss is not None:
            loss_diff = max(loss_diff, abs(step.loss - tally.losses[step.t]))
        if (step.t + 1) % 10 == 0:
            display(Note(text=f"verified {step.t + 1} of {step.steps} steps"))
    weights = swarm.weights()
    weight_diff = max(
        float((weights[name].double() - mine.double()).abs().max()) for name, mine in single.weights().items()
    )
    return {"max_loss_diff": loss_diff, "max_weight_diff": weight_diff, "losses": alone}


def _manifest_of(options: DemoOptions) -> manifest.Run:
    if options.manifest is None:
        run = demo_run(
            stages=options.stages or 3, steps=options.steps or STEPS,
            codec=options.codec or "blockwise8", seed=1 if options.seed is None else options.seed,
        )  # fmt: skip
    else:
        run = load_run(options.manifest)
        if options.stages is not None:
            cut = {"cut": ""} if run.brings_model else {}
            start = replace(run.start, digests=())
            run = replace(run, model=replace(run.model, stages=options.stages, **cut), start=start)  # type: ignore
        given = {name: getattr(options, name) for name in ("steps", "seed")}
        run = replace(run, **{name: value for name, value in given.items() if value is not None})
        if options.codec is not None:
            codecs = CodecSpec.symmetric(options.codec)
            run = replace(run, codec=replace(run.codec, forward=codecs.forward, backward=codecs.backward))
        if options.seed is not None and isinstance(run.model, CustomModelSpec):
            run = replace(run, model=replace(run.model, digests=()))
    if options.data and run.data.source != "code":
        run = replace(run, data=replace(run.data, source="files", sha256="", tokens=0, root="", mixture=""))
    return run


def summary(result: Mapping[str, Any]) -> str:
    """The last screen, in words."""
    missing, twice, verify = result["missing"], result["duplicated"], result["verify"]
    worked = sorted((place, done) for place, done in result["_work"].items() if done)
    ledgers = f"microbatches missing {missing}, counted twice {twice}"
    if not missing and not twice:
        ledgers = "each microbatch of each step counted once"
    lines = [
        "",
        f"loss       {curve(result['_curve'], CURVE)}",
        f"one alone  {curve(verify['losses'], CURVE) if verify else result['_alone']}",
        f"speed      {result['steps']} steps, {result['tokens_per_s']:,.0f} tokens/s",
        f"killed     {_killed(result['preemptions'], result['replayed'])}",
        f"ledgers    {ledgers}",
    ]
    if result["_undone"]:
        lines.append(f"           {count(result['_undone'], 'duplicate')} undone before it counted")
    if verify:
        lines.append(
            f"verified   against one process: largest difference of a loss {verify['max_loss_diff']:.2e},"
            f" of a weight {verify['max_weight_diff']:.2e}"
        )
    lines += [
        f"{'' if number else 'thanks':<11}peer {short(peer)} of {result['_place'](cell)}: "
        f"{count(done, 'microbatch')}"
        for number, ((cell, peer), done) in enumerate(worked)
    ]
    if result["_sample"]:
        lines += ["", "the trained model writes:", "", str(result["_sample"])]
    return "\n".join([*lines, "", NEXT.format(program())])


def recorded(run: str, losses: Sequence[float]) -> str:
    """The curve of one process beside that of these losses, where it is known."""
    (of, first, last), means = ALONE.split()[:3], [float(mean) for mean in ALONE.split()[3:]]
    if run != of or len(losses) % len(means):
        return "is trained and drawn here too with --verify"
    often = len(losses) // len(means)
    apart = max(abs(mean - sum(losses[i * often :][:often]) / often) for i, mean in enumerate(means))
    words = f"{first} → {last}"
    bars = sparkline(means, CURVE - len(words) - 2)
    beside = f"(recorded; at most {apart:.3f} beside this one: --verify trains it here)"
    return f"{words}  {bars}\n{'':<11}{beside}"


def _killed(killed: int, again: int) -> str:
    if not killed:
        return "none"
    words = f"{count(killed, 'peer')} with SIGKILL, in the middle of the work"
    if again:
        return f"{words}; {count(again, 'microbatch')} lost with it: run again"
    return f"{words}; nothing was lost: others held what it had computed, or it had nothing yet"

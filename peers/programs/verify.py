"""`swarm verify`: steps of a run are computed again, and compared with what its peers signed. No network."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from peers.audit.account import Account, Verify, account_of
from peers.device import choose_device
from peers.islands.directory import split_cell
from peers.net import identity
from peers.programs.manifest_pinning import check_code
from peers.programs.stage_choice import check_stages
from peers.programs.tool_options import VerifyOptions
from peers.progress import Bar
from peers.storage import transcript
from peers.storage.atomic_file import as_setup_error
from peers.storage.checkpoint import Checkpoint
from peers.storage.samples import open_data
from peers.storage.start_weights import offer_start
from peers.storage.weights import say, with_step
from peers.trainer import entering
from swarm.audit.rerun import NEAR, Said, answers_of, is_false, is_same_state, referee_of, rerun_step
from swarm.data import sample_offsets
from swarm.errors import SetupError, short
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.model.layout import empty_state, initial_state
from swarm.model.reductions import state_digest
from swarm.model.reference import SingleProcess
from swarm.model.stage import StageCompute
from swarm.protocol.coordinator import realigns
from swarm.wire.receipts import Answered


def run_verify(options: VerifyOptions, *, verify: Verify = identity.verify) -> bool:
    """Compute, compare, print; whether all is as it was signed.

    Raises:
        SetupError: what is needed for that is not there; says what to do.
    """
    told, first, last = read(options, verify), options.from_, options.to
    run = told.run
    for verdict in told.convictions:
        print(f"convicted: {verdict}")
    folder = options.checkpoint_dir or options.transcript.resolve().parent.parent
    device = choose_device(options.device)
    data = open_data(run, options.data, options.tokenizer)
    offer_start(run, options.start)
    torch.set_num_threads(1)
    gaps, total = told.unsigned(first, last), (last - first) * len(told.stages)
    signed = total - sum(map(len, gaps.values()))
    places = ", ".join(f"{run.place(c)} ({ts[0]} to {ts[-1]})" for c, ts in gaps.items())
    lacks = f"nobody whose word counts signed {total - signed} of {total} steps of stages: {places}"
    if gaps:
        say(lacks)
    by = {peer for t in range(first, last) for one in told.by_step.get(t, []) for peer in one.by}
    say(f"signed by {' '.join(sorted(map(short, by)))}")
    start, saved = partial(read_state, folder, run, first), partial(read_state, folder, run, last)
    before = told.by_step.get(first - 1, []) if realigns(run, first) else []
    signed_start = [one for one in before if one.took.weights]
    if unsigned := {*range(run.S)}.difference(one.stage % run.S for one in signed_start) if first else ():
        stages = " ".join(map(str, sorted(unsigned)))
        say(f"nobody signed the checkpoint of step {first} of stage {stages}: what differs may be that")
    wrong = [one for one in signed_start if one.took.weights != state_digest(start(one.stage % run.S))]
    right = {one.stage: len(one.by) for one in signed_start if one not in wrong}
    if wrong := [one for one in wrong if len(one.by) >= right.get(one.stage, 0)]:
        said = [other_than(run, first - 1, "weights", one) for one in wrong]
        return differs(run, said, f"The checkpoint of step {first} has others.")
    why = why_not_exact(told, device)
    with open_scratch(options.scratch) as scratch:
        terms: dict[str, Any] = {"version": first, "state": start, "scratch": scratch}
        if why and run.adds_exactly:  # another kind that was named makes no comparison less close by itself
            again = SingleProcess(run, data.batch, device, **terms)
            each = (told.by_step.get(t, []) for t in range(first, last))
            with Bar("comparing bits", much_of(run, first, last), unit="microbatches") as bar:
                steps = (rerun_step(again, said, told.stages, exact=True, done=bar)[0] for said in each)
                why = why if any(steps) else ""
        if why:
            print(f"a referee in float64 judges, not to the bit, {signed} of {signed} signed steps: {why}")
        again = SingleProcess(referee_of(run) if why else run, data.batch, device, **terms)
        if not rerun(told, again, last, data.batch, exact=not why):
            return False
        also, near = "", NEAR[run.dtype] if why else None
        if all(Checkpoint(folder, run, stage, last).path.exists() for stage in range(run.S)):
            if other := [
                stage
                for stage in sorted({cell % run.S for cell in told.stages})
                # Where bits are compared, it does not matter where they came from.
                if not is_same_state(again.state_of(stage), start(stage) if near else {}, saved(stage), near)
            ]:
                print(f"the checkpoint of step {last} is not what was computed: stage", *other)
                return False
            also = f", and the checkpoint of step {last}"
    how = "as far as another kind of device can tell" if why else "to the last bit"
    print(f"steps {first} to {last - 1} are what the peers signed, {how}")
    print(f"compared: {signed} of {total} signed steps of stages{also}\nrun {run.name} {run.id}")
    if gaps:
        raise SetupError(f"{lacks}. Leave them out (--from, --to, --stage), or take another transcript")
    return True


def rerun(
    told: Account, again: SingleProcess, last: int, batch: Callable[[list[int]], Any], *, exact: bool
) -> bool:
    """Compute up to version `last`; whether all is as it was signed. Says where not, of each that signed it.

    Where others signed what is true it goes on: else one could keep the rest from being compared.
    """
    run, aside, liars = told.run, set[Stage](), dict[tuple[Stage, tuple[PeerId, ...]], str]()
    with Bar("computing again", much_of(run, again.version, last), unit="microbatches") as bar:
        for t in range(again.version, last):
            if exact and not run.delayed_updates:
                judge_answers(told, again, batch)
            found, ends = rerun_step(again, told.by_step.get(t, []), told.stages, exact=exact, done=bar)
            for what, one in found:
                text = other_than(run, t, what, one)
                if one.stage in told.stages:
                    liars.setdefault((one.stage, one.by), text)
                elif one.stage not in aside:
                    say(f"not compared, but seen: {text}")
                    aside.add(one.stage)
            if ends or (liars and t == last - 1):
                return differs(run, liars.values(), MEETING_HINT if run.meets_at(t) else HINT)
    return True


def much_of(run: Run, first: int, last: int) -> int:
    """How many microbatches pass a stage in these steps."""
    return run.S * sum(map(run.microbatches, range(first, last)))


FOUND = {True: "it lied", False: "its answer is true", None: "it was sent something false"}
HINT = (
    "Each stage computes with what others send it. Where one differs, look there; where several do, at these "
    "and the next one."
)
MEETING_HINT = (
    "At a meeting each island takes what all have changed of a stage. A signer of another change made it up. "
    "One that signed other weights made those up, or took what another island gave and had not signed."
)


def judge_answers(told: Account, again: SingleProcess, batch: Callable[[list[int]], Any]) -> None:
    """Say of each answer to a microbatch of the next step that convicted its peer whether that was a lie."""
    t, true = again.version, dict[tuple[str, Microbatch], list[Answered]]()
    for verdict in told.convictions:
        run, said = verdict.run, verdict.evidence.statement
        if not isinstance(said, Answered) or said.t != t or not 0 <= said.m < run.M:
            continue
        mb, cells = Microbatch(t, said.m), range(run.cell(0), run.cell(run.S))
        if (run.id, mb) not in true:
            body, states = entering(run, batch(sample_offsets(run, *mb))), [*map(again.state_of, cells)]
            true[run.id, mb] = answers_of(run, t, states.__getitem__, mb, body, str(again.device))
        lied = is_false(said, true[run.id, mb][said.stage], is_last=said.stage == run.S - 1)
        print(f"computed again, microbatch ({t}, {said.m}): peer {verdict.evidence.accused}: {FOUND[lied]}")


def differs(run: Run, said: Iterable[str], hint: str) -> bool:
    """Say what differs, where, and which peers signed it; False."""
    print("\n".join([*said, hint, f"run {run.name} {run.id}"]))
    return False


def other_than(run: Run, t: int, what: str, one: Said) -> str:
    return f"step {t}, {run.place(one.stage)}: other {what} than {' and '.join(one.by)} signed"


def read(options: VerifyOptions, verify: Verify) -> Account:
    """What the transcript says of the steps that are asked for.

    Raises:
        SetupError: it is none, says nothing of them, or the run has no such steps.
    """
    first, last, stage = options.from_, options.to, options.stage
    found = transcript.read(options.transcript)
    run = found.run
    check_code(run, options.allow_code)
    folder = options.transcript.resolve().parent.name
    if re.fullmatch("[0-9a-f]{32}", folder) and folder != run.id:
        raise SetupError(f"{options.transcript} is of run {run.id}, and lies in the folder of {folder}")
    if not first < last <= run.steps:
        has = f"run {run.name!r} has versions 0 to {run.steps}"
        raise SetupError(f"--from {first} --to {last}: {has}, and --to is a later one than --from")
    compared = range(run.cells) if stage is None else [stage]
    check_stages("--stage", compared, run, cells=True)
    told = account_of(found, first, last, compared, verify)
    if not told.kinds.keys() & set(told.stages):
        took = (entry.steps for entry in found.entries if isinstance(entry, transcript.Took))
        other = [steps for steps in took if steps.end <= first or steps.start >= last]
        has = f"steps {min(s.start for s in other)} to {max(s.end for s in other) - 1}" if other else "none"
        text = f"{options.transcript} has no signed step from {first} to {last - 1}"
        raise SetupError(f"{text}: take others (it has {has}), or the transcript of another keeper")
    return told


def read_state(folder: Path, run: Run, version: int, stage: Stage) -> Mapping[str, torch.Tensor]:
    """The state of a stage at a version that all stages have in the folder, or of version 0 from the seed.

    Raises:
        SetupError: it is not there, damaged, or not of this stage.
    """
    if version == 0:
        return initial_state(run, stage)
    state = with_step(folder, run, version, lambda step: Checkpoint(folder, run, stage, step).load())
    forms = [{name: (v.shape, v.dtype) for name, v in s.items()} for s in (state, empty_state(run, stage))]
    if forms[0] != forms[1]:
        raise SetupError(f"the checkpoint of step {version} in {folder} is not one of stage {stage}")
    return state


def why_not_exact(told: Account, device: str) -> str:
    """Why this device cannot find the bits that the peers found; empty if it can."""
    if not told.run.adds_exactly:
        return "the sums of this run depend on the order of their terms"
    for cell, kinds in told.kinds.items():
        mine = StageCompute(*split_cell(told.run, cell), device).rehearse()
        if other := sorted({peer for kind, peers in kinds.items() if kind != mine for peer in peers}):
            return f"{' and '.join(other)} of {told.run.place(cell)} computed on another kind of device"
    return ""


class ScratchFolder(UserDict[str, dict[str, torch.Tensor]]):
    """Sets of tensors that are not needed now, by name, each a file. What is read is mapped: it is in memory
    where it is looked at.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: nothing else writes there."""
        super().__init__()
        self._folder = folder

    def __setitem__(self, key: str, item: dict[str, torch.Tensor]) -> None:
        """Raises SetupError: it cannot be written."""
        path = self._path(key)
        with as_setup_error(f"cannot write to --scratch {self._folder.parent}", ": choose another"):
            save_file({name: one.contiguous() for name, one in item.items()}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)  # what was read of the one before stays as it was
        self.data[key] = {}

    def __getitem__(self, key: str) -> dict[str, torch.Tensor]:
        return self.data[key] or load_file(self._path(key))

    def __delitem__(self, key: str) -> None:
        del self.data[key]
        self._path(key).unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.tensors"


@contextlib.contextmanager
def open_scratch(folder: Path | None) -> Iterator[MutableMapping[str, dict[str, torch.Tensor]]]:
    """A place for tensors under `folder`, or without one in memory.

    Raises:
        SetupError: nothing can be written there.
    """
    if folder is None:
        yield {}
        return
    with as_setup_error(f"cannot write to --scratch {folder}", ": choose another"):
        folder.mkdir(parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(prefix="scratch-", dir=folder)
    with place as name:
        yield ScratchFolder(Path(name))

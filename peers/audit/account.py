"""What a transcript says of a run's steps: only what was signed, and that by peers with voice.

A keeper writes the transcript, and may be a stranger: it can leave out what others signed, but neither make
up their signatures nor have identities of its own outweigh peers that have worked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

from peers.storage.transcript import Conviction, Took, Transcript
from peers.storage.weights import say
from swarm.audit.rerun import Said
from swarm.errors import short
from swarm.ids import PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.statements import signable
from swarm.protocol.voice import voice_of
from swarm.wire import evidence as lies
from swarm.wire.receipts import Answered
from swarm.wire.trails import TookSteps, unpack_rows

WORDS: dict[type[lies.Evidence], str] = {
    lies.WrongSum: "a sum of what others contributed",
    lies.FalseContribution: "a contribution that its member did not send",
    lies.WrongProduct: "the products of its sum",
    lies.WrongAnswer: "its answer",
    lies.WrongContribution: "what it added",
}
"""What each was convicted of."""
Verify: TypeAlias = Callable[[PeerId, bytes, bytes], bool]
"""Whether a peer signed some bytes."""


class Verdict(NamedTuple):
    """Evidence that the accused signed, and the replicas of its stage that judged it."""

    evidence: lies.Evidence
    by: tuple[PeerId, ...]
    run: Run  # of the island

    def __str__(self) -> str:
        said = self.evidence.statement
        of = f"microbatch ({said.t}, {said.m})" if isinstance(said, Answered) else f"step {said.t}"
        place, what = self.run.place(self.run.cell(said.stage)), WORDS[type(self.evidence)]
        return f"peer {self.evidence.accused} of {place}: {what} of {of}, say {' and '.join(self.by)}"


class Account(NamedTuple):
    """What a transcript says of the steps that are computed again, and of the one before."""

    run: Run
    stages: Sequence[Stage]
    """Those that are compared; here and below cells, of a run with islands."""
    by_step: dict[int, list[Said]]
    """Of all stages."""
    kinds: dict[Stage, dict[str, set[PeerId]]]
    """Of devices, with the peers that signed: of all stages, since each computes with what others send it."""
    convictions: list[Verdict]
    """Of peers of the stages that are compared, at any step."""

    def add(self, one: Testimony, first: int) -> None:
        """Take in what is believed; of steps before `first` is not asked what they were computed on."""
        if isinstance(one.entry, Conviction):
            if one.cell in self.stages:
                self.convictions.append(Verdict(one.entry.evidence, one.by, one.run))
            return
        took = one.entry.steps
        if took.end > first:
            self.kinds.setdefault(one.cell, {}).setdefault(took.kind, set()).update(one.by)
        for t, step in enumerate(unpack_rows(took.rows), took.start):
            self.by_step.setdefault(t, []).append(Said(one.cell, step, one.by))

    def unsigned(self, first: int, last: int) -> dict[Stage, list[int]]:
        """Of the stages that are compared, steps of which no peer signed anything."""
        there = {t: {one.stage for one in self.by_step.get(t, [])} for t in range(first, last)}
        return {s: lacks for s in self.stages if (lacks := [t for t in there if s not in there[t]])}


class Testimony(NamedTuple):
    """An entry of a transcript, and its signers."""

    entry: Took | Conviction
    run: Run
    """Of the island."""
    cell: Stage
    by: tuple[PeerId, ...]
    """Those with voice, if any of them has it: a keeper may have identities of its own sign as well."""
    has_voice: bool
    forged: set[PeerId]
    """It names them, and they did not sign."""


def account_of(found: Transcript, first: int, last: int, stages: Sequence[Stage], verify: Verify) -> Account:
    """What a transcript says of steps `first` to `last - 1`; says what is left out, and why.

    `stages`: those that are compared; of islands, cells.
    """
    told, heard = Account(found.run, stages, {}, {}, []), list[Testimony]()
    for entry in found.entries:
        if isinstance(entry, Took) and (entry.steps.end < first or entry.steps.start >= last):
            continue
        if isinstance(entry, Took | Conviction) and (one := hear(found.run, entry, verify)) is not None:
            heard.append(one)
    voiced, strangers = {one.cell for one in heard if one.has_voice}, set[PeerId]()
    for one in heard:
        # A keeper may make up identities. Where there are founders, these have voice from the start.
        if not one.has_voice and (one.cell in voiced or found.run.admission.founders):
            strangers.update(one.by)
        elif one.by:
            told.add(one, first)
    if found.rest_bytes:
        say(f"the last {found.rest_bytes} bytes of the transcript are damaged, and not read")
    if strangers:
        names = " ".join(map(short, sorted(strangers)))
        say(f"signed by peers without voice, and left out: {names}")
    elif found.run.admission.named and (alone := {one.cell for one in heard if one.by} - voiced):
        places = ", ".join(map(found.run.place, sorted(alone)))
        say(f"signed by peers without voice alone, which the writer of this transcript can make up: {places}")
    if forged := set[PeerId]().union(*(one.forged for one in heard)):
        say(f"not signed by those that it names, and left out: {' '.join(map(short, sorted(forged)))}")
    return told


def hear(run: Run, entry: Took | Conviction, verify: Verify) -> Testimony | None:
    """The signers of an entry; None: it is of no stage of the run, or is not signed by the accused."""
    said = entry.steps if isinstance(entry, Took) else entry.evidence.statement
    if not (0 <= said.stage < run.S and 0 <= entry.island < run.islands.count):
        return None
    island = run.island(entry.island)
    words, version = signable(island.id, said), said.end if isinstance(said, TookSteps) else said.t
    if isinstance(entry, Conviction):
        if not verify(entry.evidence.accused, words, entry.evidence.signature):
            return None
        words = signable(island.id, lies.judged(entry.evidence))
    by = tuple(dict.fromkeys(s.peer for s in entry.by if verify(s.peer, words, s.signature)))
    reader: Any = SimpleNamespace(verify=verify)
    founders = island.admission.founders
    worked = {
        s.peer
        for s in entry.by
        if s.peer in founders or voice_of(s.peer, s.voucher, island, reader, version=version)
    }
    some, forged = tuple(peer for peer in by if peer in worked), {s.peer for s in entry.by}.difference(by)
    return Testimony(entry, island, island.cell(said.stage), some or by, bool(some), forged)

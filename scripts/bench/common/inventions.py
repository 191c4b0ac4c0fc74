"""Messages that could be true and are not: each of the right form, within its bounds, and signed by the liar.

An *invention* takes a message that a member is about to send, with its body, and says what is sent instead.
What others signed nobody can make; but what was signed before, of another step, microbatch or round, or by
another peer, may be shown again.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import msgspec
import torch
from msgspec.structs import replace

from peers.sim.dice import Dice
from peers.stage.all_reduce import holds
from scripts.bench.common.lies import Said
from swarm.digest import DIGEST_BYTES, digest_of
from swarm.ids import Generation, Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.protocol.ledger import Bitmap, everything, members_of
from swarm.protocol.messages import (
    Directive,
    ReplicaReport,
    RunStatus,
    StageSummary,
    StepDirective,
    StepLacking,
)
from swarm.protocol.proofs import HoldsResult, signed_report
from swarm.protocol.rounds import (
    Commit,
    FetchResult,
    Plan,
    Prepared,
    Proof,
    StepReport,
    StepSummary,
    round_id,
)
from swarm.protocol.statements import Signer, sign
from swarm.protocol.sums import Contribution, Projected, Reduced, contributed
from swarm.records import PeerRecord, Voucher
from swarm.wire import messages as wire
from swarm.wire.chunks import pack_chunk, unpack_chunk
from swarm.wire.codec import chunk_digest
from swarm.wire.evidence import Audited, Convicted, Projecting, Reveal, Revealed, ShownChunk
from swarm.wire.messages import Work, WorkDone, pack, unpack
from swarm.wire.receipts import Answered, Receipt, give_receipt
from swarm.wire.trails import TookSteps

M = TypeVar("M", bound=msgspec.Struct)
Body: TypeAlias = list[bytes]
Made: TypeAlias = tuple[Any, Body]
Invention: TypeAlias = Callable[["Scene", Any, Body], "Made | Any | None"]
"""Returns the message, or it and its body; None: there is nothing to say instead."""

FORMS: dict[tuple[str, bool], type[msgspec.Struct]] = {
    ("report", False): ReplicaReport, ("report", True): Directive, ("directive", False): Directive,
    ("summary", False): StageSummary, ("summary", True): RunStatus, ("run", False): RunStatus,
    ("watch", True): wire.Watched, ("work", False): Work, ("work", True): WorkDone,
    ("locate", True): wire.Located, ("part", False): wire.Part, ("part", True): wire.PartDone,
    ("reveal", False): Reveal, ("reveal", True): Revealed, ("show", True): ShownChunk,
    ("audit", True): Audited, ("convicted", True): Convicted, ("state", True): wire.Opened,
    ("held", True): wire.Opened, ("status", True): wire.PeerStatus, ("trail", True): wire.Trail,
    ("saved", True): wire.Saved, ("record", False): PeerRecord,
}  # fmt: skip
"""Of questions and answers of each kind: what they are."""
INVENTIONS: dict[type, dict[str, Invention]] = defaultdict(dict)
"""By the message, in words."""


@dataclass(kw_only=True)
class Scene:
    """What a liar knows."""

    run: Run
    stage: Stage
    signer: Signer
    names: Sequence[PeerId]
    """Of all peers that ever were."""
    mates: Sequence[PeerId]
    """Of those those of its stage, itself among them."""
    dice: Dice = field(default_factory=lambda: Dice(0))
    seen: dict[type, deque[Any]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=12)))
    """What it sent or got."""
    rounds: dict[str, int] = field(default_factory=dict)
    """Of which steps rounds are."""
    leases: dict[tuple[str, int], bytes] = field(default_factory=dict)
    """The chunks of leases that it gives out otherwise."""
    to: PeerId = ""
    """To whom this message goes."""
    asked: Microbatch | None = None
    """Which microbatch is answered."""
    round: str = ""
    """Which one the message is about."""
    leased: bytes = b""
    """The first chunk of the lease that is given out. Empty: it is not looked at."""

    @property
    def me(self) -> PeerId:
        return self.signer.peer_id

    @property
    def other(self) -> PeerId:
        """One of the others."""
        return self.dice.pick([name for name in self.names if name != self.me])

    @property
    def mate(self) -> PeerId:
        """One of the others of its stage, if there is any."""
        return self.dice.pick([name for name in self.mates if name != self.me] or [self.me])

    def more(self, of: int) -> int:
        """One more, or one less."""
        return max(0, of + self.dice.pick((1, -1)))

    def notes(self, message: Any) -> None:
        """Remember a message, and what is in it."""
        self.seen[type(message)].append(message)
        for found in _within(message):
            self.seen[type(found)].append(found)
        if isinstance(message, wire.Part):
            self.rounds[message.round] = message.t
        for step in message.steps if isinstance(message, Directive) else ():
            if step.plan is not None:
                self.rounds[step.plan.round] = step.t

    def before(self, kind: type[M], now: M | None = None) -> M | None:
        """Another one of what it saw."""
        there = [one for one in self.seen[kind] if one != now]
        return self.dice.pick(there) if there else None

    def any_hex(self, letters: int) -> str:
        return f"{self.dice.below(1 << 52):032x}"[-letters:].zfill(letters)

    def any_bytes(self, size: int) -> bytes:
        return bytes(self.dice.below(256) for _ in range(size))


def _within(message: Any) -> list[Any]:
    """What may be said again of it."""
    found = list[Any]()
    told = isinstance(message, (ReplicaReport, Directive, StageSummary))
    for step in message.steps if told else ():
        parts = (getattr(step, name, None) for name in ("prepared", "plan", "fetch"))
        found += [part for part in parts if part is not None]
        found += getattr(step, "proofs", ())
    found += getattr(message, "commits", ())
    if isinstance(message, Directive):
        found += message.run_status.commits
    if isinstance(message, wire.Opened) and message.last_commit is not None:
        found.append(message.last_commit)
    if isinstance(message, Work) and message.fed is not None:
        found.append(message.fed)
    if isinstance(message, WorkDone):
        found += [hop.receipt for hop in message.hops if hop.receipt is not None]
    if isinstance(message, PeerRecord) and message.voucher is not None:
        found.append(message.voucher)
    if isinstance(message, wire.PartDone) and message.proof is not None:
        found.append(message.proof)
    if isinstance(message, Revealed):
        found += message.said.values()
    return found


def invents(kind: type) -> Callable[[Invention], Invention]:
    """A function of the name of what it says is an invention of such messages."""

    def note(invention: Invention) -> Invention:
        INVENTIONS[kind][invention.__name__.strip("_").replace("_", " ")] = invention
        return invention

    return note


def _says(kind: type, words: str, change: Callable[[Scene, Any], dict[str, Any]]) -> None:
    """An invention that changes a few fields: to what `change` says."""
    INVENTIONS[kind][words] = lambda scene, message, body: replace(message, **change(scene, message))


def invented(
    scene: Scene, kind: str, answers: bool, said: Said, which: Dice, only: str = ""
) -> tuple[str, Said]:
    """What is said in place of a message, and in words what that is; no words: the truth. `only`: this, or
    nothing.
    """
    form = FORMS.get((kind, answers))
    if form is None or not said[0]:
        return "", said
    message = unpack(said[0], form)
    there = INVENTIONS[form]
    words = only or which.pick(sorted(there))
    with contextlib.suppress(IndexError):  # of what it speaks there is nothing
        made = there[words](scene, message, list(said[1]))
        if made is not None:
            body: Sequence[bytes] = said[1]
            if isinstance(made, tuple):
                made, body = made
            if (made, body) != (message, said[1]):
                return words, (pack(made), body)
    return "", said


def _with(steps: Sequence[M], at: int, step: M) -> tuple[M, ...]:
    return (*steps[:at], step, *steps[at + 1 :])


# -- reports ------------------------------------------------------------------------------------------


def _signed(scene: Scene, report: ReplicaReport) -> ReplicaReport:
    return signed_report(report, scene.signer, _voucher(scene))


def _voucher(scene: Scene) -> Voucher | None:
    """The newest of its own."""
    records = [record for record in scene.seen[PeerRecord] if record.peer == scene.me]
    return records[-1].voucher if records else None


def _of_step(words: str, change: Callable[[Scene, StepReport, Run], StepReport | None]) -> None:
    """An invention about one step of a report, with as many losses as it then has."""

    def invention(scene: Scene, report: ReplicaReport, body: Body) -> Made | None:
        at = scene.dice.below(len(report.steps))
        step = change(scene, report.steps[at], scene.run)
        if step is None:
            return None
        if len(body) == len(report.steps):
            losses, due = body[at], 8 * step.done.bit_count()
            body[at] = (losses + (losses[-8:] or bytes(8)) * step.done.bit_count())[:due]
        return _signed(scene, replace(report, steps=_with(report.steps, at, step))), body

    INVENTIONS[ReplicaReport][words] = invention


def _bit(scene: Scene, of: int) -> int:
    return 1 << scene.dice.pick(list(members_of(of)))


def _all(step: Any, run: Run) -> int:
    return everything(run.microbatches(step.t))


def _done(step: StepReport, done: int) -> StepReport:
    return replace(step, done=Bitmap(done), in_progress=Bitmap(step.in_progress & ~done))


_of_step(
    "one microbatch more", lambda s, step, run: _done(step, step.done | _bit(s, _all(step, run) & ~step.done))
)
_of_step("one microbatch less", lambda s, step, run: _done(step, step.done & ~_bit(s, step.done)))
_of_step("all microbatches", lambda s, step, run: _done(step, _all(step, run)))
_of_step(
    "one for another",
    lambda s, step, run: _done(step, step.done & ~_bit(s, step.done) | _bit(s, _all(step, run) & ~step.done)),
)
_of_step("nothing done", lambda s, step, run: replace(step, done=Bitmap(0), frozen_for="", prepared=None))
_of_step(
    "computes all others",
    lambda s, step, run: replace(step, in_progress=Bitmap(_all(step, run) & ~step.done)),
)
_of_step("computes nothing", lambda s, step, run: replace(step, in_progress=Bitmap(0)))
_of_step("has no result", lambda s, step, run: replace(step, prepared=None))
_of_step("has no result and gave nothing", lambda s, step, run: replace(step, prepared=None, gave_all=""))
_of_step(
    "its round failed",
    lambda s, step, run: (
        replace(step, failed_round=step.frozen_for, frozen_for="", prepared=None) if step.frozen_for else None
    ),
)
_of_step("gave all", lambda s, step, run: replace(step, gave_all=_round_of(s, step.t)))
_of_step("frozen for another round", lambda s, step, run: replace(step, frozen_for=_round_of(s, step.t)))
_of_step("failed another round", lambda s, step, run: replace(step, failed_round=_round_of(s, step.t)))
_of_step(
    "its result is of another round of the step",
    lambda s, step, run: (
        replace(step, prepared=replace(step.prepared, round=_round_of(s, step.t))) if step.prepared else None
    ),
)
_of_step(
    "its result has another norm",
    lambda s, step, run: (
        replace(step, prepared=replace(step.prepared, sqnorm=math.nextafter(step.prepared.sqnorm, math.inf)))
        if step.prepared
        else None
    ),
)
_of_step(
    "its result is another one",
    lambda s, step, run: (
        replace(step, prepared=replace(step.prepared, digest=s.any_hex(32))) if step.prepared else None
    ),
)
_of_step(
    "has a result that it made up",
    lambda s, step, run: replace(
        step, prepared=Prepared(_round_of(s, step.t), s.dice.number(), s.any_hex(32))
    ),
)
_of_step(
    "has the result of another",
    lambda s, step, run: replace(step, prepared=s.before(Prepared, step.prepared)),
)


def _round_of(scene: Scene, t: int) -> str:
    """Of a step, perhaps an old one."""
    return scene.dice.pick([name for name, of in scene.rounds.items() if of == t][-3:])


@invents(ReplicaReport)
def one_version_on(scene: Scene, report: ReplicaReport, body: Body) -> Made:
    version, steps = report.version + 1, tuple(s for s in report.steps if s.t > report.version)
    cut = len(report.steps) - len(steps)
    return _signed(scene, replace(report, version=version, steps=steps)), body[cut:]


_says(ReplicaReport, "one version back", lambda s, said: {"version": max(0, said.version - 1)})
_says(ReplicaReport, "other weights", lambda s, said: {"digest": s.any_hex(32)})
_says(ReplicaReport, "other device", lambda s, said: {"kind": s.any_hex(32)})
_says(ReplicaReport, "slow or fast upload", lambda s, said: {"bandwidth_bps": s.dice.pick((1.0, 1e3, 1e12))})


@invents(ReplicaReport)
def leaves(scene: Scene, report: ReplicaReport, body: Body) -> Made:
    return replace(report, say_leaving=True, steps=()), []


_says(ReplicaReport, "numbered beyond all", lambda s, said: {"number": said.number + 1_000_000})
_says(ReplicaReport, "took no steps", lambda s, said: {"commits": ()})
_says(
    ReplicaReport,
    "took the last step otherwise",
    lambda s, said: {"commits": (*said.commits[:-1], _commit(s, said.version))},
)
_says(
    ReplicaReport,
    "takes the next step",
    lambda s, said: {"commits": (*said.commits[-2:], _commit(s, said.version))},
)


@invents(ReplicaReport)
def another_generation(scene: Scene, report: ReplicaReport, body: Body) -> Made:
    return _signed(scene, replace(report, generation=_generation(scene, report))), body


@invents(ReplicaReport)
def says_what_another_reported(scene: Scene, report: ReplicaReport, body: Body) -> Made | None:
    """The ledgers and results of another replica, signed as its own."""
    theirs = scene.before(ReplicaReport, report)
    if theirs is None or len(body) not in (0, len(theirs.steps)):
        return None
    body = [bytes(8 * step.done.bit_count()) for step in theirs.steps] if body else body
    return _signed(scene, replace(report, steps=theirs.steps)), body


def _generation(scene: Scene, said: Any) -> Generation:
    now = said.generation
    if now.number and scene.dice.chance(0.5):
        return Generation()
    return Generation(now.number + 1, max(0, said.version - 1), scene.dice.below(scene.run.S), said.version)


def _commit(scene: Scene, t: int) -> Commit:
    """Of a step, made of what others signed of another one, and with another norm."""
    known = scene.dice.pick(list(scene.seen[Commit]))
    t = max(0, min(t, scene.run.steps - 1))
    return replace(known, t=t, total_sqnorm=known.total_sqnorm * scene.dice.pick((1.0, 4.0)))


# -- directives ---------------------------------------------------------------------------------------


def _of_directive(words: str, change: Callable[[Scene, StepDirective], StepDirective | None]) -> None:
    def invention(scene: Scene, directive: Directive, body: Body) -> Any:
        at = scene.dice.below(len(directive.steps))
        step = change(scene, directive.steps[at])
        return None if step is None else replace(directive, steps=_with(directive.steps, at, step))

    INVENTIONS[Directive][words] = invention


def _plan(scene: Scene, step: StepDirective, **new: Any) -> StepDirective | None:
    """With another plan, whose name fits."""
    if step.plan is None:
        return None
    plan = replace(step.plan, **new)
    of = (plan.number, plan.members, plan.ledgers, plan.parts)
    name = round_id(scene.run.id, scene.stage, step.t, *of)
    return replace(step, plan=replace(plan, round=name))


def _without(plan: Plan, peer: PeerId, heir: int) -> dict[str, Any]:
    """One is left out of a plan, and another one of it has its part and microbatches."""
    kept = [at for at, member in enumerate(plan.members) if member != peer]
    gone = plan.members.index(peer)
    ledgers, parts = list(plan.ledgers), list(plan.parts)
    heir = kept[heir % len(kept)]
    ledgers[heir], parts[heir] = Bitmap(ledgers[heir] | ledgers[gone]), parts[heir] + parts[gone]
    return {
        "members": tuple(plan.members[at] for at in kept), "ledgers": tuple(ledgers[at] for at in kept),
        "parts": tuple(parts[at] for at in kept),
    }  # fmt: skip


_of_directive(
    "leaves one out of the plan",
    lambda s, step: (
        _plan(s, step, **_without(step.plan, s.dice.pick(step.plan.members), s.dice.below(4)))
        if step.plan and len(step.plan.members) > 1
        else None
    ),
)
_of_directive(
    "a plan in which one owns all",
    lambda s, step: (
        _plan(s, step, parts=_owned_by(s.dice.below(len(step.plan.members)), step.plan.parts))
        if step.plan
        else None
    ),
)
_of_directive(
    "a plan of another number",
    lambda s, step: _plan(s, step, number=s.more(step.plan.number)) if step.plan else None,
)
_of_directive(
    "a plan with one microbatch at another one",
    lambda s, step: _plan(s, step, ledgers=_moved(s, step.plan.ledgers)) if step.plan else None,
)
_of_directive(
    "an older plan", lambda s, step: replace(step, plan=s.before(Plan, step.plan)) if step.plan else None
)
_of_directive("no plan", lambda s, step: replace(step, plan=None) if step.plan else None)
_of_directive("all begins again", lambda s, step: StepDirective(t=step.t, begin_again=True))
_of_directive("it retracts all", lambda s, step: StepDirective(t=step.t, retract=Bitmap(_all(step, s.run))))
_of_directive(
    "it retracts one", lambda s, step: StepDirective(t=step.t, retract=Bitmap(_bit(s, _all(step, s.run))))
)
_of_directive(
    "all have the result, or not",
    lambda s, step: (
        replace(step, fetch=replace(step.fetch, ready=not step.fetch.ready)) if step.fetch else None
    ),
)
_of_directive(
    "the result is with another one",
    lambda s, step: replace(step, fetch=replace(step.fetch, sources=(s.mate,))) if step.fetch else None,
)
_of_directive(
    "an older result",
    lambda s, step: replace(step, plan=None, fetch=s.before(FetchResult, step.fetch)),
)
_of_directive("a result that it made up", lambda s, step: _made_up(s, step))


def _owned_by(at: int, parts: Sequence[int]) -> tuple[int, ...]:
    return tuple(sum(parts) * (at == place) for place in range(len(parts)))


def _moved(scene: Scene, ledgers: Sequence[Bitmap]) -> tuple[Bitmap, ...]:
    found = list(ledgers)
    giver = scene.dice.pick([at for at, ledger in enumerate(found) if ledger])
    taker, bit = scene.dice.below(len(found)), _bit(scene, found[giver])
    found[giver] = Bitmap(found[giver] & ~bit)
    found[taker] = Bitmap(found[taker] | bit)
    return tuple(found)


def _own_proof(scene: Scene, generation: Generation, t: int, round_name: str) -> Proof:
    found = Prepared(round_name, scene.dice.number(), scene.any_hex(32))
    statement = HoldsResult(generation, scene.stage, t, found.round, found.sqnorm, found.digest)
    signature = sign(scene.signer, scene.run.id, statement)
    return Proof(scene.me, replace(found, signature=signature, voucher=_voucher(scene)))


def _made_up(scene: Scene, step: StepDirective) -> StepDirective:
    last = scene.seen[ReplicaReport][-1].generation if scene.seen[ReplicaReport] else Generation()
    proof = _own_proof(scene, last, step.t, _round_of(scene, step.t))
    held = FetchResult(proof.prepared.round, (scene.me,), True, proof.prepared.sqnorm, (proof,))
    return StepDirective(t=step.t, fetch=held)


_says(Directive, "says nothing of steps", lambda s, said: {"steps": ()})
_says(
    Directive,
    "no step is taken",
    lambda s, said: {"commits": (), "run_status": replace(said.run_status, commits=())},
)
_says(
    Directive,
    "the step is taken",
    lambda s, said: {"commits": (*said.commits[-2:], _commit(s, said.version))},
)


@invents(Directive)
def the_stage_is_further(scene: Scene, directive: Directive, body: Body) -> Any:
    return replace(
        directive, version=directive.version + 1, sources=(scene.dice.pick((scene.me, scene.mate)),)
    )


_says(Directive, "the stage is not so far", lambda s, said: {"version": max(0, said.version - 1)})
_says(
    Directive,
    "the stage has other weights",
    lambda s, said: {"digest": s.any_hex(32), "sources": (s.dice.pick((s.me, s.mate)),)},
)
_says(Directive, "one is left out", lambda s, said: {"left_out": (s.mate,)})
_says(Directive, "the stage is far behind", lambda s, said: {"behind_s": 3600})
_says(Directive, "directives numbered beyond all", lambda s, said: {"number": said.number + 1_000_000})
_says(Directive, "another coordinates", lambda s, said: {"coordinator": s.mate})


@invents(Directive)
def the_stage_is_in_another_generation(scene: Scene, directive: Directive, body: Body) -> Any:
    found = _generation(scene, directive)
    status = replace(directive.run_status, generation=found)
    return replace(directive, generation=found, run_status=status)


# -- the run's status, wherever it is said ------------------------------------------------------------


def _of_status(words: str, change: Callable[[Scene, RunStatus], RunStatus]) -> None:
    INVENTIONS[RunStatus][words] = lambda scene, status, body: change(scene, status)
    for kind, name in ((Directive, "run_status"), (wire.Watched, "status")):

        def invention(scene: Scene, message: Any, body: Body, name: str = name) -> Any:
            status = change(scene, getattr(message, name))
            new: dict[str, Any] = {name: status}
            if isinstance(message, wire.Watched):
                new |= {"version": status.version, "generation": status.generation}
            return replace(message, **new)

        INVENTIONS[kind][words] = invention


def _lacks(scene: Scene, status: RunStatus, lacking: Callable[[int], int]) -> RunStatus:
    steps = range(status.version, min(status.version + 1, scene.run.steps))
    found = (
        StepLacking(t=t, by_stage=(Bitmap(lacking(everything(scene.run.microbatches(t)))),) * scene.run.S)
        for t in steps
    )
    return replace(status, lacking=tuple(found))


_of_status("the run is a step further", lambda s, status: replace(status, version=status.version + 1))
_of_status(
    "the run is at its end", lambda s, status: replace(status, version=s.run.steps, held_by_all=s.run.steps)
)
_of_status("the run is a step back", lambda s, status: replace(status, version=max(0, status.version - 1)))
_of_status("all stages have this step", lambda s, status: replace(status, held_by_all=status.version))
_of_status("some stage is silent", lambda s, status: replace(status, held_by_all=-1))
_of_status("nothing lacks", lambda s, status: replace(status, lacking=()))
_of_status("all lacks", lambda s, status: _lacks(s, status, lambda every: every))
_of_status("one microbatch lacks", lambda s, status: _lacks(s, status, lambda every: _bit(s, every)))
_of_status("the run has no commits", lambda s, status: replace(status, commits=()))
_of_status("the run takes a step", lambda s, status: replace(status, commits=(_commit(s, status.version),)))
_of_status(
    "the run is in another generation", lambda s, status: replace(status, generation=_generation(s, status))
)
_of_status("another coordinates the run", lambda s, status: replace(status, run_coordinator=s.other))


# -- summaries ----------------------------------------------------------------------------------------


def _of_summary(words: str, change: Callable[[Scene, StageSummary, StepSummary], StepSummary | None]) -> None:
    def invention(scene: Scene, summary: StageSummary, body: Body) -> Any:
        at = scene.dice.below(len(summary.steps))
        step = change(scene, summary, summary.steps[at])
        return None if step is None else replace(summary, steps=_with(summary.steps, at, step))

    INVENTIONS[StageSummary][words] = invention


def _ready(scene: Scene, summary: StageSummary, step: StepSummary, proofs: Sequence[Proof]) -> StepSummary:
    return replace(
        step, ready=True, unclaimed=Bitmap(0), sqnorm=proofs[0].prepared.sqnorm, proofs=tuple(proofs)
    )


_of_summary("is not ready", lambda s, _, step: replace(step, ready=False, proofs=()))
_of_summary("is ready", lambda s, _, step: replace(step, ready=True))
_of_summary(
    "is ready with what it made up",
    lambda s, of, step: _ready(s, of, step, [_own_proof(s, of.generation, step.t, _round_of(s, step.t))]),
)
_of_summary(
    "is ready with words of another step",
    lambda s, of, step: _ready(s, of, step, [s.dice.pick(list(s.seen[Proof]))]),
)
_of_summary("has one word only", lambda s, _, step: replace(step, proofs=step.proofs[:1]))
_of_summary("has one word twice", lambda s, _, step: replace(step, proofs=2 * step.proofs[:1]))
_of_summary("has another norm", lambda s, _, step: replace(step, sqnorm=step.sqnorm + s.dice.number()))
_of_summary(
    "lacks all", lambda s, _, step: replace(step, unclaimed=Bitmap(_all(step, s.run)), ready=False, proofs=())
)
_of_summary("lacks one", lambda s, _, step: replace(step, unclaimed=Bitmap(_bit(s, _all(step, s.run)))))
_of_summary("lacks nothing", lambda s, _, step: replace(step, unclaimed=Bitmap(0)))


_says(StageSummary, "the stage is one further", lambda s, said: {"version": said.version + 1})
_says(StageSummary, "the stage is one back", lambda s, said: {"version": max(0, said.version - 1)})
_says(StageSummary, "took another step", lambda s, said: {"commits": (_commit(s, said.version),)})
_says(
    StageSummary, "the stage is in a later generation", lambda s, said: {"generation": _generation(s, said)}
)
_says(StageSummary, "summaries numbered beyond all", lambda s, said: {"number": said.number + 1_000_000})
_says(StageSummary, "of another stage", lambda s, said: {"stage": s.dice.below(s.run.S)})


# -- microbatches -------------------------------------------------------------------------------------


def _half(scene: Scene, work: Work, inputs: bytes, outputs: bytes, to: PeerId) -> Receipt:
    said = Answered(scene.stage, work.t, work.m, inputs, outputs, b"", b"", 0.0, to)
    return give_receipt(scene.signer, scene.run.id, said)


@invents(Work)
def made_of_another_ones_inputs(scene: Scene, work: Work, body: Body) -> Any:
    known = scene.before(Receipt, work.fed)
    if work.fed is None or known is None:
        return None
    return replace(work, fed=_half(scene, work, known.inputs, work.fed.outputs, scene.to))


@invents(Work)
def made_otherwise_than_sent(scene: Scene, work: Work, body: Body) -> Any:
    known = scene.before(Receipt, work.fed)
    if work.fed is None or known is None:
        return None
    return replace(work, fed=_half(scene, work, work.fed.inputs, known.outputs, scene.to))


@invents(Work)
def signed_for_another_peer(scene: Scene, work: Work, body: Body) -> Any:
    if work.fed is None:
        return None
    return replace(work, fed=_half(scene, work, work.fed.inputs, work.fed.outputs, scene.other))


@invents(Work)
def another_ticket(scene: Scene, work: Work, body: Body) -> Any:
    known = scene.before(Work, work)
    return None if known is None else replace(work, ticket=known.ticket)


@invents(Work)
def another_microbatch_with_this_ones_tensors(scene: Scene, work: Work, body: Body) -> Any:
    known = scene.before(Work, work)
    if known is None or known.tensors != work.tensors or work.fed is None or known.fed is None:
        return None
    fed = _half(scene, known, known.fed.inputs, work.fed.outputs, scene.to)
    return replace(known, fed=fed, route=work.route, attempt=work.attempt)


_says(Work, "lost behind", lambda s, said: {"attempt": said.attempt + 1, "deepest": s.run.S - 1})
_says(Work, "came through nobody", lambda s, said: {"through": ()})
_says(Work, "another route", lambda s, said: {"route": tuple(s.other for _ in said.route or (0,))})


def _of_receipt(words: str, change: Callable[[Receipt, Receipt], Receipt]) -> None:
    """`change`: the receipt, and an older one, of whomever."""

    def invention(scene: Scene, done: WorkDone, body: Body) -> Any:
        hop = done.hops[0]
        known = scene.before(Receipt, hop.receipt)
        if hop.receipt is None or known is None or not scene.asked:
            return None
        said = change(hop.receipt, known).statement(scene.stage, scene.asked, done.loss)
        receipt = give_receipt(scene.signer, scene.run.id, said)
        return replace(done, hops=(replace(hop, receipt=receipt), *done.hops[1:]))

    INVENTIONS[WorkDone][words] = invention


_of_receipt("answers other inputs", lambda true, old: replace(true, inputs=old.inputs))
_of_receipt("sent something else on", lambda true, old: replace(true, outputs=old.outputs))
_of_receipt(
    "got other gradients", lambda true, old: replace(true, output_grads=old.output_grads or bytes(32))
)
_of_receipt(
    "answers other gradients", lambda true, old: replace(true, input_grads=old.input_grads or bytes(32))
)


@invents(WorkDone)
def an_older_receipt(scene: Scene, done: WorkDone, body: Body) -> Any:
    known = scene.before(Receipt, done.hops[0].receipt)
    return replace(done, hops=(replace(done.hops[0], receipt=known), *done.hops[1:]))


_says(
    WorkDone,
    "took no time",
    lambda s, said: {"hops": tuple(replace(hop, own_s=1e-6, compute_s=1e-6) for hop in said.hops)},
)


@invents(WorkDone)
def those_behind_took_hours(scene: Scene, done: WorkDone, body: Body) -> Any:
    return replace(
        done, hops=(done.hops[0], *(replace(hop, own_s=9e3, compute_s=9e3) for hop in done.hops[1:]))
    )


_says(
    WorkDone,
    "another answered behind",
    lambda s, said: {"hops": (said.hops[0], *(replace(hop, peer=s.other) for hop in said.hops[1:]))},
)
_says(wire.Located, "has it or not", lambda s, said: {"has": not said.has})
_says(wire.Located, "honest ones are left out", lambda s, said: {"left_out": (s.mate,)})


# -- sums ---------------------------------------------------------------------------------------------


def _tensor(body: Body, numel: int, dtype: str) -> torch.Tensor:
    return unpack_chunk(body, numel, getattr(torch, dtype)).clone()


def _otherwise(scene: Scene, tensor: torch.Tensor) -> torch.Tensor:
    """One number of it is another one."""
    at = scene.dice.below(len(tensor))
    tensor[at] = 3 * tensor[at] + scene.dice.pick((1, -1))
    return tensor


def _contributes(scene: Scene, part: wire.Part, chunks: bytes, seal: bytes) -> Any:
    assert part.proof is not None
    said = Contribution(scene.me, digest_of(chunks), seal, b"")
    signature = sign(scene.signer, scene.run.id, contributed(scene.stage, part.t, part.round, scene.to, said))
    return replace(part, proof=replace(part.proof, chunks=chunks, seal=seal, signature=signature))


@invents(wire.Part)
def another_nonce_is_sealed(scene: Scene, part: wire.Part, body: Body) -> Any:
    return part.proof and _contributes(scene, part, part.proof.chunks, scene.any_bytes(DIGEST_BYTES))


@invents(wire.Part)
def another_sum(scene: Scene, part: wire.Part, body: Body) -> Any:
    if part.proof is None or not part.tensors or len(part.proof.chunks) != DIGEST_BYTES:
        return None
    found = _otherwise(scene, _tensor(body, part.numel, part.tensors[0].dtype))
    made = _contributes(scene, part, chunk_digest(found), part.proof.seal)
    return made, [bytes(buffer) for buffer in pack_chunk(found, name="a sum").buffers]


@invents(wire.Part)
def other_digests(scene: Scene, part: wire.Part, body: Body) -> Any:
    return part.proof and _contributes(scene, part, scene.any_bytes(len(part.proof.chunks)), part.proof.seal)


_says(wire.Part, "of another round", lambda s, said: {"round": _round_of(s, said.t)})


def _reduces(scene: Scene, done: wire.PartDone, contributions: Any, chunks: bytes) -> Any:
    """What it reduced, signed. `scene.asked`: the round."""
    assert done.proof is not None
    of = scene.round, scene.rounds.get(scene.round, 0)
    said = Reduced(scene.stage, of[1], of[0], tuple(contributions), chunks)
    signature = sign(scene.signer, scene.run.id, said)
    return replace(
        done,
        proof=replace(done.proof, contributions=tuple(contributions), chunks=chunks, signature=signature),
    )


@invents(wire.PartDone)
def another_result(scene: Scene, done: wire.PartDone, body: Body) -> Any:
    if done.proof is None or len(done.proof.chunks) != DIGEST_BYTES:
        return None
    meta = done.tensors[0]
    found = _otherwise(scene, _tensor(body, meta.shape[0], meta.dtype))
    made = _reduces(scene, done, done.proof.contributions, chunk_digest(found))
    return made, [bytes(buffer) for buffer in pack_chunk(found, name="a result").buffers]


@invents(wire.PartDone)
def another_result_than_signed(scene: Scene, done: wire.PartDone, body: Body) -> Any:
    meta = done.tensors[0]
    found = _otherwise(scene, _tensor(body, meta.shape[0], meta.dtype))
    return done, [bytes(buffer) for buffer in pack_chunk(found, name="a result").buffers]


def _one_said(scene: Scene, done: wire.PartDone, field: str) -> Any:
    """Of one contribution another digest."""
    if done.proof is None:
        return None
    at, said = scene.dice.below(len(done.proof.contributions)), done.proof.contributions
    other = replace(said[at], **{field: scene.any_bytes(DIGEST_BYTES)})
    return _reduces(scene, done, _with(said, at, other), done.proof.chunks)


@invents(wire.PartDone)
def one_contributed_something_else(scene: Scene, done: wire.PartDone, body: Body) -> Any:
    return _one_said(scene, done, "chunks")


@invents(wire.PartDone)
def one_sealed_another_nonce(scene: Scene, done: wire.PartDone, body: Body) -> Any:
    return _one_said(scene, done, "seal")


@invents(wire.PartDone)
def one_contributed_what_another_did(scene: Scene, done: wire.PartDone, body: Body) -> Any:
    if done.proof is None:
        return None
    said = done.proof.contributions
    at, of = scene.dice.below(len(said)), scene.dice.pick(said)
    return _reduces(scene, done, _with(said, at, replace(of, member=said[at].member)), done.proof.chunks)


@invents(wire.PartDone)
def signed_as_before(scene: Scene, done: wire.PartDone, body: Body) -> Any:
    known = scene.before(type(done.proof), done.proof) if done.proof else None
    return None if known is None else replace(done, proof=known)


def _of_nonces(words: str, change: Callable[[Scene, Sequence[bytes]], tuple[bytes, ...]]) -> None:
    def invention(scene: Scene, message: Any, body: Body) -> Any:
        return replace(message, nonces=change(scene, message.nonces))

    INVENTIONS[Reveal][words] = INVENTIONS[Revealed][words] = invention


_of_nonces("another nonce", lambda s, nonces: _with(nonces, s.dice.below(len(nonces)), s.any_bytes(16)))
_of_nonces("knows no nonce", lambda s, nonces: tuple(b"" for _ in nonces))
_of_nonces("the nonces of others", lambda s, nonces: (*nonces[1:], *nonces[:1]))
_of_nonces("one nonce less", lambda s, nonces: _with(nonces, s.dice.below(len(nonces)), b""))


_says(Reveal, "lacks all products", lambda s, said: {"lacking": tuple(sorted(s.mates))})


def _projects(scene: Scene, told: Projecting) -> Projecting:
    t = scene.rounds.get(scene.round, 0)
    said = Projected(scene.stage, t, scene.round, told.nonces, told.contributions, told.sums)
    return replace(told, signature=sign(scene.signer, scene.run.id, said))


def _of_products(words: str, change: Callable[[Scene, Projecting], Projecting]) -> None:
    def invention(scene: Scene, told: Revealed, body: Body) -> Any:
        if scene.me not in told.said:
            return None
        return replace(
            told, said={**told.said, scene.me: _projects(scene, change(scene, told.said[scene.me]))}
        )

    INVENTIONS[Revealed][words] = invention


def _any(scene: Scene, there: Sequence[bytes], new: Callable[[bytes], bytes]) -> tuple[bytes, ...]:
    at = scene.dice.pick([at for at, one in enumerate(there) if one])
    return _with(there, at, new(there[at]))


_of_products(
    "another product",
    lambda s, told: replace(told, sums=_any(s, told.sums, lambda one: s.any_bytes(len(one)))),
)
_of_products(
    "products with other nonces",
    lambda s, told: replace(told, nonces=_any(s, told.nonces, lambda _: s.any_bytes(16))),
)
_of_products(
    "products of another contribution",
    lambda s, told: replace(told, contributions=_any(s, told.contributions, lambda _: s.any_bytes(32))),
)


@invents(Revealed)
def products_of_another_round(scene: Scene, told: Revealed, body: Body) -> Any:
    known = scene.before(Projecting)
    return None if known is None else replace(told, said={**told.said, scene.me: known})


_says(Revealed, "no products", lambda s, said: {"said": {}})
_says(ShownChunk, "shows other digests", lambda s, said: {"digests": s.any_bytes(len(said.digests))})


# -- judges -------------------------------------------------------------------------------------------


_says(Audited, "judges otherwise", lambda s, said: {"fits": not said.fits})
_says(Audited, "asks for more", lambda s, said: {"asks": True})
_says(Convicted, "saw a lie", lambda s, said: {"yes": not said.yes})
_says(Convicted, "saw others lie", lambda s, said: {"others": tuple(sorted({s.other, s.mate}))})
_says(Convicted, "one added nothing", lambda s, said: {"added": 0})


# -- states, and what a peer says of itself -----------------------------------------------------------


_says(wire.Opened, "one newer", lambda s, said: {"version": said.version + 1})
_says(wire.Opened, "one older", lambda s, said: {"version": said.version - 1})
_says(wire.Opened, "of another generation", lambda s, said: {"generation": _generation(s, said)})
_says(wire.Opened, "with another commit", lambda s, said: {"last_commit": _commit(s, said.version - 1)})


@invents(wire.Opened)
def something_else(scene: Scene, opened: wire.Opened, body: Body) -> Any:
    """Other numbers, and digests and signatures that fit. `scene.leased`: its true first chunk."""
    form = next((form for form in opened.tensors if form.numel), None)
    if form is None or not scene.leased or form.dtype == "int64":
        return None
    found = torch.frombuffer(bytearray(scene.leased), dtype=getattr(torch, form.dtype))
    found = _otherwise(scene, found.clone())
    scene.leases[opened.lease, 0] = data = found.numpy().tobytes()
    if opened.prepared is not None and form.numel == len(found):
        made = holds(opened.prepared.round, found, lambda vector: float(vector.double().square().sum()))
        of = HoldsResult(opened.generation, scene.stage, opened.version, made.round, made.sqnorm, made.digest)
        made = replace(made, signature=sign(scene.signer, scene.run.id, of), voucher=_voucher(scene))
        opened = replace(opened, prepared=made)
    return opened, [digest_of(data) + body[0][DIGEST_BYTES:], *body[1:]]


for _kind in (PeerRecord, wire.PeerStatus):
    _says(_kind, "a version more", lambda s, said: {"version": said.version + 1})
    _says(_kind, "a version less", lambda s, said: {"version": max(0, said.version - 1)})
    _says(_kind, "far ahead", lambda s, said: {"version": s.run.steps})
    _says(_kind, "serves another stage", lambda s, said: {"stage": (said.stage + 1) % s.run.S})
    _says(
        _kind,
        "does something else",
        lambda s, said: {"state": s.dice.pick(("leaving", "left", "paused", "joining"))},
    )
    _says(_kind, "came first", lambda s, said: {"since": 1.0})
    _says(_kind, "needs no time", lambda s, said: {"speed": 1e9})
    _says(_kind, "needs hours", lambda s, said: {"speed": 1e-4})
    _says(_kind, "takes one at a time", lambda s, said: {"max_inflight": 1})
_says(PeerRecord, "an endless upload", lambda s, said: {"bandwidth_bps": 1e15})
_says(PeerRecord, "a large state", lambda s, said: {"state_bytes": 1 << 50})
_says(PeerRecord, "no voucher", lambda s, said: {"voucher": None})
_says(PeerRecord, "the voucher of before", lambda s, said: {"voucher": s.before(Voucher, said.voucher)})
_says(PeerRecord, "stands by", lambda s, said: {"spare": True, "state": "paused"})
_says(PeerRecord, "of no machine", lambda s, said: {"addresses": ()})
_says(wire.PeerStatus, "has nothing of the step", lambda s, said: {"done": 0, "inflight": 0})
_says(wire.PeerStatus, "has all of the step", lambda s, said: {"done": s.run.M})
_says(wire.PeerStatus, "another one coordinates", lambda s, said: {"coordinator": s.mate})
_says(wire.PeerStatus, "another digest", lambda s, said: {"digest": s.any_hex(32)})
_says(wire.PeerStatus, "another generation", lambda s, said: {"generation": _generation(s, said)})


@invents(wire.Trail)
def took_other_steps(scene: Scene, trail: wire.Trail, body: Body) -> Any:
    rows = trail.steps.rows
    at = scene.dice.below(len(rows) or 1)
    other = replace(
        trail.steps, rows=rows[:at] + bytes(byte ^ 1 for byte in rows[at : at + 1]) + rows[at + 1 :]
    )
    return replace(trail, steps=other, signature=sign(scene.signer, scene.run.id, other))


@invents(wire.Trail)
def took_more_steps(scene: Scene, trail: wire.Trail, body: Body) -> Any:
    other = TookSteps(
        trail.steps.stage, trail.steps.start, trail.steps.kind, trail.steps.rows + trail.steps.rows[-40:]
    )
    return replace(trail, steps=other, signature=sign(scene.signer, scene.run.id, other))


@invents(wire.Saved)
def saved_one_more(scene: Scene, saved: wire.Saved, body: Body) -> Any:
    return replace(
        saved, stages=tuple(replace(s, versions=(*s.versions, s.versions[-1] + 1)) for s in saved.stages)
    )


_says(wire.Saved, "saved nothing", lambda s, said: {"stages": ()})


@invents(wire.Saved)
def saved_of_all_stages(scene: Scene, saved: wire.Saved, body: Body) -> Any:
    of = saved.stages[0]
    return replace(saved, stages=tuple(replace(of, stage=stage) for stage in range(scene.run.S)))

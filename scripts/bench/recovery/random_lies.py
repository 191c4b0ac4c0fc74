"""Members that lie at random, message by message, in a simulated swarm of the shipped classes: what it costs.

    python scripts/bench/recovery/random_lies.py --seeds 40 --seed 1
    python scripts/bench/recovery/random_lies.py --seed 7 --replay       # of one seed all that happens
    python scripts/bench/recovery/random_lies.py --invents --steps 32    # most lies could be true
    python scripts/bench/recovery/random_lies.py --each --steps 24       # all such, each by itself, always

In virtual time a run that names its trainers takes 20 steps of the model that counts its gradients, on two or
three stages of three or four replicas. A seed draws a member, which may have most voice or none, and two to
four lies: what it does to a kind of message, how often, to whom, since when and for how long. Of four seeds
two draw an accomplice in another stage, and two a fault besides. What a member computes is true: of false
gradients see `scripts/bench/liars/adversary.py`. With `--invents` most lies are well-formed, signed and false
(`scripts/bench/common/inventions.py`), and begin after the third step.

As it must be: all honest members come to the end with the weights of one process, each microbatch counted
once in each step; no honest one convicts another, or fails; and the run takes at most 30 s longer than the
same one without the lies. Exit code 1 if anything is not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import math
import statistics
import sys
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import msgspec
import torch

from peers.audit.verdicts import Verdicts
from peers.islands.directory import split_cell
from peers.ports import Answer
from peers.sim.dice import Dice
from peers.sim.faults import Fault
from peers.sim.lines import Lines
from peers.sim.loop import PROCESS
from peers.sim.network import SimSigner
from peers.sim.setting import TRAINERS, Setting, dice_of, tree_of_zeros
from peers.sim.swarm import Member, PeerMember, Swarm
from peers.sim.world import Outcome, World
from scripts.bench.common.arguments import parser_of
from scripts.bench.common.inventions import FORMS, INVENTIONS, Scene, invented
from scripts.bench.common.lies import (
    INVENTS,
    RECORD,
    REFUSALS,
    TRUTH,
    Lie,
    Said,
    altered,
    drawn,
    flipped,
    inventing,
)
from swarm.errors import PeerSilent, Refused
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import AdmissionSpec, audit_run
from swarm.protocol.messages import ReplicaReport
from swarm.protocol.proofs import signed_report
from swarm.protocol.voice import Worked, vouch
from swarm.records import PeerRecord, Voucher
from swarm.wire.evidence import Reveal
from swarm.wire.messages import FetchChunk, Opened, Part, Work, pack, unpack

GOAL_S = 30.0
STEPS = 20
FIRST_STEPS = 3
"""After so many those begin that invent: what begins in the first one is another matter."""
FIRST_STEPS_S = 3.0
"""They often take so long."""
Trace: TypeAlias = Callable[[str], None] | None
RUNS = (
    "one lies at random",
    "two lie at random",
    "one lies, and a fault besides",
    "two lie, and a fault besides",
)
"""By the rest of a seed and 4."""
EACH = "one invents, always the same"
FAULTS_OF_TWO = ("storm", "slow threads", "kill trainer", "join")
FAULTS = ("cut", "cut one way", "stop", "storm", "slow threads", "kill trainer", "join", "pause", "restart")


@dataclass(frozen=True, kw_only=True)
class LyingSetting(Setting):
    """All that a seed says."""

    voice: str
    lies: dict[PeerId, tuple[Lie, ...]]
    faults: tuple[Fault, ...]
    first_steps: int = 0
    """After so many the liars begin."""
    only: str = ""
    """What they invent, in words; empty: any."""

    def voucher_of(self, peer: PeerId, stage: Stage) -> Voucher | None:
        alike = self.voice == "all alike"
        if not alike and (peer not in self.lies or "liars" not in self.voice):
            return super().voucher_of(peer, stage)
        run, most = split_cell(self.run, stage)[0], Worked(peer, 100, 0, 100)
        return vouch(SimSigner(TRAINERS[0]), run.id, most) if alike or self.voice.endswith("most") else None

    def words(self) -> str:
        lies = [f"{name} {lie.words()}" for name, lies in self.lies.items() for lie in lies]
        run, more = self.run, {"tied weights": self.tied}
        more |= {"delayed updates": run.delayed_updates, "rounded sums": run.rounds_sums}
        shape = f"{run.S} stages of {self.first_peers[0]}", *(word for word, said in more.items() if said)
        lies += [self.only] if self.only else []
        return "; ".join((*shape, f"voice: {self.voice}", *lies, *(fault.words() for fault in self.faults)))


def draw(seed: int, *, steps: int = STEPS, invents: bool = False) -> LyingSetting:
    """`invents`: three of four lies could be true; there may be two replicas, disks and a keeper."""
    dice = dice_of(seed, "inventions" if invents else "random lies")
    stages, replicas = dice.pick((2, 2, 2, 3)), dice.pick((2, 3, 3, 3, 4) if invents else (3, 3, 4))
    voice = dice.pick(("all", "none", "all but the liars", "the liars most", "the liars most"))
    names = dice.shuffled([f"p{i:02}" for i in range(60)])  # the first ones are of stage 0, the next of 1
    first = dice.below(stages)
    second = (first + 1 + dice.below(stages - 1)) % stages
    liars = [names[stage * replicas + dice.below(replicas)] for stage in (first, second)[: 1 + seed % 2]]
    lie = partial(_lie, dice) if invents else partial(drawn, dice)
    disks = invents and dice.chance(0.25)
    # Of three, of whom one lies, two are needed: with one that is gone for ever the liar is one of two.
    fault_kind = dice.pick((FAULTS_OF_TWO, FAULTS, (*FAULTS, "kill", "leave"))[replicas - 2])
    since_s = FIRST_STEPS_S if invents else 0.0
    fault = Fault(since_s + dice.between(0.4, 2.5), fault_kind, dice.number(), dice.between(0.5, 7.0))
    run = audit_run(stages=stages, steps=steps, microbatches_per_step=4, seed=seed)
    kind, data = (
        dice_of(seed, "kind of run"),
        replace(run.data, root=tree_of_zeros(run.data.tokens).root.hex()),
    )
    run = replace(
        run, dtype="float32", data=data, admission=AdmissionSpec(trainers=TRAINERS),
        delayed_updates=kind.chance(0.25), checkpoint_every=kind.pick((0, 0, 3)),
    )  # fmt: skip
    if not run.delayed_updates and kind.chance(1 / 3):
        run = replace(run, codec=replace(run.codec, reduce="rounded16"))
    return LyingSetting(
        voice=voice, lies={liar: tuple(lie() for _ in range(2 + dice.below(3))) for liar in liars},
        faults=(fault,) if seed % 4 > 1 else (), seed=seed, run=run, tied=kind.chance(0.25), names=names,
        lines=Lines(least_s=0.001, most_s=0.006, bytes_per_s=1e7), job_s=(0.006, 0.012), window=None,
        dice=dice, first_peers=[replicas] * stages, first_trainers=1, with_voucher=float(voice != "none"),
        disks="own" if disks else "none", keeper=disks, first_steps=FIRST_STEPS if invents else 0,
    )  # fmt: skip


def _lie(dice: Dice) -> Lie:
    lie = inventing(dice, FORMS) if dice.chance(0.75) else drawn(dice)
    return lie._replace(since_s=lie.since_s - 0.25)


def alone(kind: str, answers: bool, words: str, seed: int, *, steps: int = STEPS) -> LyingSetting:
    """One of three, in one of two stages of equal voice, invents the same in all its messages of a kind."""
    stage = int((kind, answers) in (("summary", False), ("work", True), ("locate", True)))
    setting = draw(4 * seed, steps=steps, invents=True)
    run = audit_run(stages=2, steps=steps, microbatches_per_step=4, seed=seed)
    named = {"dtype": "float32", "data": setting.run.data, "admission": setting.run.admission}
    lie = TRUTH._replace(kind=kind, answers=answers, act=INVENTS, chance=1.0, share=1.0, lasts_s=math.inf)
    return replace(
        setting, run=replace(run, **named), voice="all alike", tied=False, faults=(), first_peers=[3, 3],
        lies={setting.names[3 * stage]: (lie,)}, only=words, with_voucher=1.0, disks="none", keeper=False,
    )  # fmt: skip


class Liar:
    """Stands between a member and all others, and tells its lies."""

    def __init__(self, swarm: LyingSwarm, member: PeerMember, lies: Sequence[Lie]) -> None:
        self._swarm, self._member = swarm, member
        self._dice = {lie: Dice(lie.number) for lie in (*lies, TRUTH)}
        self._said = defaultdict[tuple[str, bool], deque[Said]](lambda: deque(maxlen=40))
        self._heard = defaultdict[str, deque[Said]](lambda: deque(maxlen=10))
        """What others asked it."""
        transport, directory = member.transport, member.directory
        self._call, self._serve, self._announce = transport.call, transport.serve, directory.announce
        transport.call, transport.serve, directory.announce = self.call, self.serve, self.announce  # type: ignore
        self._handlers: dict[str, Callable[..., Awaitable[Answer]]] = {}
        self._scene: Scene | None = None
        if any(lie.act == INVENTS for lie in lies):
            self._scene = Scene(
                run=swarm.run,
                stage=member.stage,
                signer=member.transport.signer,
                names=swarm.setting.names,
                mates=(),
            )

    def _lie_to(self, peer: PeerId, kind: str, *, answers: bool) -> Lie:
        for lie, dice in self._dice.items():
            due = (lie.kind, lie.answers) == (kind, answers)
            due = due and 0 <= self._swarm.loop.now_s - self._swarm.begun_s - lie.since_s < lie.lasts_s
            if due and dice_of(lie.number, peer).number() < lie.share and dice.chance(lie.chance):
                self._swarm.told += 1
                self._swarm.say(f"~~~ {self._member.name} to {peer or 'all'}: {lie.words()}")
                return lie
        return TRUTH

    async def call(
        self, peer: PeerId, kind: str, header: bytes, body: Sequence[Any] = (), **limits: Any
    ) -> Answer:
        lie, true = self._lie_to(peer, kind, answers=False), (header, [bytes(part) for part in body])
        if lie.act == "drops":
            await asyncio.sleep(limits.get("deadline_s") or 3.5)
            raise PeerSilent(peer, "was not asked")
        self._notes(kind, False, header)
        answer = await self._call(peer, kind, *await self._instead(lie, kind, true, peer), **limits)
        self._notes(kind, True, answer.header)
        if lie.act == "refuses":
            raise PeerSilent(peer, "its answer was not taken")
        return await self._call(peer, kind, *true, **limits) if lie.act == "doubles" else answer

    def serve(self, kind: str, handler: Callable[..., Awaitable[Answer]], *, max_body_bytes: int = 0) -> None:
        async def lying(request: Any) -> Answer:
            self._heard[kind].append((request.header, []))
            self._notes(kind, False, request.header)
            lie = self._lie_to(request.peer, kind, answers=True)
            if lie.act == "drops":
                await asyncio.get_running_loop().create_future()
            if lie.act == "refuses":
                raise REFUSALS[lie.number % len(REFUSALS)]()
            answer = await handler(request)
            true = answer.header, [bytes(part) for part in answer.body]
            self._notes(kind, True, answer.header)
            return Answer(*await self._instead(lie, kind, true, request.peer, request.header))

        self._handlers[kind] = handler
        self._serve(kind, lying, max_body_bytes=max_body_bytes)

    async def announce(self, record: PeerRecord) -> None:
        lie = self._lie_to("", RECORD, answers=False)
        if lie.act not in ("drops", "refuses"):
            self._notes(RECORD, False, pack(record))
            said = await self._instead(lie, RECORD, (pack(record), ()))
            with contextlib.suppress(Refused):
                record = msgspec.structs.replace(unpack(said[0], PeerRecord), peer=record.peer)
            await self._announce(record)

    async def _instead(
        self, lie: Lie, kind: str, true: Said, to: PeerId = "", asked: bytes | None = None
    ) -> Said:
        """What is said in place of what is true, perhaps later. `asked`: by whom this is an answer to."""
        answers = asked is not None
        said, heard, dice = self._said[kind, answers], self._heard[kind], self._dice[lie]
        old = [*said] or [true]
        said.append(true)
        if lie.act == "delays":
            await asyncio.sleep(lie.by_s)
        if lie.act in ("replays", "mixes up"):
            return dice.pick(heard if lie.act == "mixes up" and heard and not answers else old)
        if self._scene is not None and kind == "chunk" and asked:
            true = self._leased(self._scene, asked, true)
        if lie.act == INVENTS:
            return await self._invented(lie, kind, true, to, asked)
        return self._altered(lie, true) if lie.act == "alters" else true

    def _notes(self, kind: str, answers: bool, header: bytes) -> None:
        if self._scene is not None and header and (form := FORMS.get((kind, answers))):
            with contextlib.suppress(Refused):
                self._scene.notes(unpack(header, form))

    @staticmethod
    def _leased(scene: Scene, asked: bytes, true: Said) -> Said:
        wanted = unpack(asked, FetchChunk)
        data = scene.leases.get((wanted.lease, wanted.index))
        return true if data is None else (true[0], [data])

    def _is_most(self) -> bool:
        """Whether it has half of its stage's voice: then newcomers believe it."""
        swarm, stage = self._swarm, self._member.stage
        by = {
            peer.name: swarm.setting.voucher_of(peer.name, stage)
            for peer in swarm.peers
            if peer.stage == stage
        }
        steps = {peer: voucher.steps for peer, voucher in by.items() if voucher is not None}
        return 2 * steps.get(self._member.name, 1) >= sum(steps.values())

    async def _invented(self, lie: Lie, kind: str, true: Said, to: PeerId, asked: bytes | None) -> Said:
        """What could be true."""
        scene, swarm, dice = self._scene, self._swarm, self._dice[lie]
        assert scene is not None
        scene.stage, scene.to, scene.asked, scene.round, scene.leased = self._member.stage, to, None, "", b""
        scene.names = sorted(swarm.network.transports)
        scene.mates = [peer.name for peer in swarm.peers if peer.stage == scene.stage]
        header = asked or true[0]
        if kind == "work" and asked:
            work = unpack(asked, Work)
            scene.asked = Microbatch(work.t, work.m)
        elif kind == "part":
            scene.round = unpack(header, Part).round
        elif kind == "reveal":
            scene.round = unpack(header, Reveal).round
        elif kind in ("state", "held") and asked and true[0] and (kind == "held" or not self._is_most()):
            lease = unpack(true[0], Opened).lease
            chunk = pack(FetchChunk(run=scene.run.id, lease=lease, index=0))
            request = SimpleNamespace(peer=to, header=chunk, body_sizes=(), passed_bytes=0)
            with contextlib.suppress(Refused):
                scene.leased = b"".join(bytes(part) for part in (await self._handlers["chunk"](request)).body)
        scene.dice = dice_of(lie.number, to) if lie.number % 4 > 1 else dice  # to each its own, or any
        which = Dice(lie.number) if lie.number % 2 else dice
        words, said = invented(scene, kind, asked is not None, true, which, swarm.setting.only)
        swarm.say(f"~~~ {scene.me} says to {to or 'all'}: {words or 'the truth'}")
        return said

    def _altered(self, lie: Lie, true: Said) -> Said:
        dice, (header, body) = self._dice[lie], true
        if not header:
            return true  # a long one
        if lie.kind in ("state", "held", "chunk") and body and dice.chance(0.3):
            return header, [flipped(part, dice) for part in body]
        which = Dice(lie.number) if lie.number % 3 else dice  # the same field again and again, or any
        names, fields = sorted(self._swarm.network.transports), msgspec.msgpack.decode(header)
        header = msgspec.msgpack.encode(altered(fields, which, names))
        if lie.kind == "report" and not lie.answers:
            with contextlib.suppress(Refused):  # who alters a result signs it as well
                report = unpack(header, ReplicaReport)
                vouchers = (step.prepared.voucher for step in report.steps if step.prepared)
                header = pack(signed_report(report, self._member.transport.signer, next(vouchers, None)))
        return header, body


class LyingSwarm(Swarm):
    """Of its liars nothing is asked."""

    def __init__(self, setting: LyingSetting, trace: Trace) -> None:
        super().__init__(setting, trace)
        self._lies, self.told = setting.lies, 0
        self._first_steps = setting.first_steps
        self.begun_s = math.inf if setting.first_steps else 0.0
        """From when on the times of lies count."""
        leave_out, bug = Verdicts.leave_out, self.loop.bug

        def convict(verdicts: Verdicts, accused: PeerId, why: str) -> None:
            judge = verdicts._transport.peer_id
            self.say(f"{judge} convicts {accused}: {why}")
            if not {judge, accused} & self._lies.keys():
                super(LyingSwarm, self).convicts(accused, why)
            leave_out(verdicts, accused, why)

        def failed(what: str, error: BaseException) -> None:
            process = PROCESS.get()
            if process is None or process.name not in self._lies:
                bug(what, error)

        self.convicts, self.loop.bug = convict, failed  # type: ignore[method-assign]

    def check(self, invariant: Callable[..., None], *args: Any) -> None:
        if math.isinf(self.begun_s) and invariant == self.checks.takes and args[2] >= self._first_steps:
            self.begun_s = self.loop.now_s
        if not args or args[0] not in self._lies:
            super().check(invariant, *args)

    def add_peer(self, *args: Any) -> PeerMember:
        member = super().add_peer(*args)
        if member.name in self._lies:
            Liar(self, member, self._lies[member.name])
        return member

    async def _live(self, member: Member, life: Awaitable[None]) -> None:
        if member.name not in self._lies:
            await super()._live(member, life)
            return
        with contextlib.suppress(Exception):
            await life
        self.network.kill(member.name, quietly=False)

    def living(self) -> list[PeerMember]:
        """Those that faults hit, and that have to come to the end."""
        return [member for member in super().living() if member.name not in self._lies]


def outcome_of(setting: LyingSetting, trace: Trace = None) -> tuple[Outcome, int]:
    """And how many lies were told."""
    world = World(setting.seed, trace, setting.faults, setting)
    world.swarm = swarm = LyingSwarm(setting, trace)
    return world.play(), swarm.told


def play(seed: int, drawn: Callable[[], LyingSetting], trace: Trace = None) -> dict[str, Any]:
    """What came of it; if it took long, compared with the same run without the lies."""
    setting, honest_s = drawn(), 0.0
    found, told = outcome_of(setting, trace)
    if found.ended_s > GOAL_S and not found.violation:
        honest, _ = outcome_of(replace(drawn(), lies=dict.fromkeys(setting.lies, ())))
        honest_s = honest.ended_s
    return {
        "seed": seed, "case": setting.words(), "told": told, "broken": found.violation,
        "late": found.ended_s > honest_s + GOAL_S, "took_s": round(found.ended_s, 1),
    }  # fmt: skip


def row_of(what: str, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all runs of a kind."""
    took = [one["took_s"] for one in found]
    broken, late = ([one["seed"] for one in found if one[how]] for how in ("broken", "late"))
    return {
        "what": what, "runs": len(found), "told": sum(one["told"] > 0 for one in found),
        "broken": " ".join(map(str, broken)) or 0, "late": " ".join(map(str, late)) or 0,
        "measured": f"median {statistics.median(took):.1f} s, most {max(took):.1f} s",
        "goal": f"none broken, none {GOAL_S:.0f} s longer", "missed": bool(broken or late),
    }  # fmt: skip


def cases(options: argparse.Namespace) -> Iterator[tuple[str, int, Callable[[], LyingSetting]]]:
    """What each is a run of, its seed, and what draws it."""
    if options.each:
        for (kind, answers), form in FORMS.items():
            for words in INVENTIONS[form]:
                how = partial(alone, kind, answers, words, options.seed, steps=options.steps)
                yield EACH, options.seed, how
        return
    for seed in range(options.seed, options.seed + (1 if options.replay else options.seeds)):
        yield RUNS[seed % 4], seed, partial(draw, seed, steps=options.steps, invents=options.invents)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=40, help="how many runs (default: 40)")
    parser.add_argument("--seed", type=int, default=1, help="of the first one (default: 1)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each run (default: {STEPS})")
    parser.add_argument("--replay", action="store_true", help="that one only, with all that happens")
    parser.add_argument("--invents", action="store_true", help="most lies could be true")
    parser.add_argument("--each", action="store_true", help="all that could be true, each by itself")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = defaultdict[str, list[dict[str, Any]]](list)
    gc.disable()  # a world is one circle, and is collected at once
    with contextlib.suppress(KeyboardInterrupt):
        for what, seed, how in cases(options):
            found[what].append(play(seed, how, print if options.replay else None))
            print(json.dumps(found[what][-1]), file=sys.stderr, flush=True)
            gc.collect()
    rows = [row_of(what, of) for what, of in found.items() if of]
    print(json.dumps({"rows": rows}))
    return int(any(row["missed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

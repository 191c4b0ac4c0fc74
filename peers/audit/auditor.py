"""An auditor: computes again what replicas contributed to steps, and serves nothing.

    downloads   the state of a stage, as a newcomer does
    asks        what the members of that step's round signed, and what each of them kept of it
    computes    all microbatches of one member, adds them, and compares; then of the next one. Of a step that
                one took without the others it compares the result
    compares    one answer of each member with what its caller got (trainers do that of stage 0)
    tells       the stage of one that added something else: its replicas look at what it adds next

No peer is left out on its word alone, and nothing waits for it. Knows ports only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from peers import events
from peers.audit.answers import evidence_of
from peers.audit.contributions import SignedContribution, count_again, has_its_bits
from peers.audit.kept import KeptWork, Shown
from peers.audit.sum_check import any_chunk
from peers.audit.verdicts import MAX_TOLD
from peers.clock import now_s
from peers.ports import Directory, Rank, StageDevice, Transport
from peers.stage.all_reduce import parts_of
from peers.status_query import ask_all, ask_status
from peers.transfer.client import download, shown, state_of
from peers.transfer.gradient import wanted_of
from peers.voices import Voices
from peers.waiting import TaskKeeper, end_tasks, until_one_ends
from swarm.audit.answers import Made, digest, make, proves_answer
from swarm.audit.contributions import Recount
from swarm.audit.projection import coefficients
from swarm.errors import PeerGone, PeerSilent, SwarmError
from swarm.ids import Microbatch, PeerId, Stage
from swarm.manifest import Run
from swarm.model.reductions import vectors_digest
from swarm.model.stage import StageCompute
from swarm.protocol.proofs import Belief
from swarm.protocol.rounds import check_plan
from swarm.protocol.statements import Coin, Toss, is_signed
from swarm.protocol.sums import SUM_BYTES, Projected, nth_sum, seed_of
from swarm.protocol.voice import heard
from swarm.wire.evidence import AskProducts, Products, ShowEvidence
from swarm.wire.messages import MAX_LONG_BYTES, OpenHeld, pack

ASK_S = 10.0
"""Members wait half of that for the end of a round that is asked for."""
POLL_S = 0.5
MAX_ASKED = 3
"""Members that are asked what another one signed."""
REST = 4.0
"""After a download, for so many times as long: replicas give states a fifth of the time, at most."""


class Auditor:
    """Audits `stages` of a run, one after the other, until told to leave or until the run is complete.

    Args:
        build: makes the stage that is audited, on the machine's device.
    """

    def __init__(
        self, run: Run, transport: Transport, directory: Directory, device: StageDevice,
        stages: Sequence[Stage], build: Callable[[Stage], StageCompute], emit: events.Emit,
    ) -> None:  # fmt: skip
        self._run, self._transport, self._directory = run, transport, directory
        self._device, self._stages, self._build, self._emit = device, stages, build, emit
        self._voices = Voices(run, transport.signer, directory)
        self._gave_alone: dict[Stage, Collection[PeerId]] = {}
        """The peers that gave a state last that no other gave: next time another one is asked."""
        self._last: dict[PeerId, int] = {}
        """The step of which each was audited."""
        self._said: dict[Stage, str] = {}
        """The last note on each."""
        self._comparing = False
        """The result of a step that one took alone."""
        self._leaving, self._tasks = asyncio.Event(), TaskKeeper()
        self.audited = 0
        """Contributions that were computed again."""
        self.found: set[PeerId] = set()
        """The peers that added, or answered, something else than their microbatches give."""

    async def run(self) -> None:
        """Audit until `leave`, or until the run is complete."""
        self._device.start()
        try:
            await until_one_ends(self._audit_all(), self._leaving.wait())
        finally:
            await self._tasks.close()
            self._device.stop()
        liars = f"; other work was signed by {' '.join(sorted(self.found))}" if self.found else ""
        self._emit(events.Note(text=f"{self.audited} contributions were computed again{liars}"))

    def leave(self) -> None:
        self._leaving.set()

    async def _audit_all(self) -> None:
        await self._directory.lookup_all()
        while not all([await self._visit(stage) for stage in self._stages]):
            await asyncio.sleep(POLL_S)

    async def _visit(self, stage: Stage) -> bool:
        """Audit the step that a stage is at; True: it has taken the last one."""
        run, began = self._run, now_s()
        await self._directory.refresh({stage})
        before = self._gave_alone.pop(stage, ())
        serving = self._serving(stage)
        try:
            found = await download(
                self._transport, state_of(run, stage), [peer for peer in serving if peer not in before],
                voice=self._voices.of(stage), progress=shown(stage, -1, self._emit),
            )  # fmt: skip
        except SwarmError as error:
            self._say(stage, error.text)
            return False
        rest_s = REST * (now_s() - began)
        version = found.opened.version
        t = version if run.weight_version(version) == version else version + 1
        counted = set(self._voices.counted(stage))
        said = len(counted & found.agreed)
        only = found.agreed if said < min(2, len(serving)) else None
        if only is not None:  # all others look like liars with what it makes up
            if not before:  # after the others all are asked again: by now two may agree
                self._gave_alone[stage] = only
            text = f"stage {stage}: one peer alone gives version {version}, with which no other is audited"
            self._say(stage, text)
        if t < run.steps:
            compute = await asyncio.to_thread(self._build, stage)
            compute.use_lock(self._device.books)
            await self._device.run(Rank.STEP, t, compute.load_state, version, found.tensors)
            await self._audit_step(compute, t, only)
        await asyncio.sleep(rest_s)
        return version >= run.steps and said >= min(2, len(counted))

    def _serving(self, stage: Stage) -> list[PeerId]:
        return [r.peer for r in self._directory.at(stage) if r.state == "serving"]

    async def _audit_step(self, compute: StageCompute, t: int, only: Collection[PeerId] | None) -> None:
        """Audit the members of a step's round, in an order known to this one, until it is over. `only`: no
        others; None: all.
        """
        stage, before = compute.stage, self.audited
        asked = deque(self._shuffled(stage, t, self._voices.counted(stage), ""))
        claim, self._comparing = None, False

        async def audit_result() -> None:
            while not await self._audit_result(compute, t, only):
                await asyncio.sleep(POLL_S)

        looking = self._tasks.create_task(audit_result())  # beside claims: one may give its results slowly
        while asked and len(self._serving(stage)) > 1:
            claiming = self._tasks.create_task(self._claim(compute, t, asked[0]))
            await asyncio.wait({looking, claiming}, return_when=asyncio.FIRST_COMPLETED)
            if self._comparing:
                await asyncio.wait({looking})
            if looking.done() or (claiming.result() is None and await self._is_over(stage, t)):
                await end_tasks([looking, claiming])
                return
            if (claim := claiming.result()) is not None:
                break
            asked.rotate()
            await asyncio.wait({looking}, timeout=POLL_S)
        await end_tasks([looking])
        members = self._shuffled(stage, t, asked if claim is None else claim.plan.members, "")
        members = [m for m in members if (only is None or m in only) and self._last.get(m, -1) < t]
        for member in members:
            claim = await self._claim(compute, t, member)
            if claim is None or not claim.microbatches:
                continue
            self._last[member] = t  # it is shown once
            if not await self._audit(compute, claim):
                break
        done = f"{self.audited - before} of {len(members)} contributions were computed again"
        self._say(stage, f"stage {stage}, step {t}: {done}")

    def _say(self, stage: Stage, text: str) -> None:
        """Say how it is with a stage, but not again and again while it has no peers."""
        if self._said.get(stage) != text:
            self._said[stage] = text
            self._emit(events.Note(text=text))

    def _coin(self, stage: Stage, t: int, what: str) -> Coin:
        return Coin(self._transport.signer, self._run.id, Toss("auditor", stage, t, what))

    def _shuffled(self, stage: Stage, t: int, peers: Sequence[PeerId], what: str) -> list[PeerId]:
        return sorted(peers, key=lambda peer: self._coin(stage, t, f"{what} {peer}").below(1 << 62))

    async def _is_over(self, stage: Stage, t: int, *, besides: PeerId = "") -> bool:
        """Whether replicas need not keep what a step was made of any more, as others than one say."""
        asked = [peer for peer in self._voices.counted(stage) if peer != besides]
        told = await ask_status(self._run, self._transport, self._shuffled(stage, t, asked, "")[:MAX_ASKED])
        return 2 * sum(status.version > t + 1 for status in told.values()) >= len(told)

    # -- a step that one took alone -----------------------------------------------------------------

    async def _audit_result(self, compute: StageCompute, t: int, only: Collection[PeerId] | None) -> bool:
        """Audit the result of a step, if it is taken and one replica with voice alone signed that: it may
        have left the others out, which do not know what it added. Returns whether it is so.
        """
        run, stage, voice = self._run, compute.stage, self._voices.of(compute.stage)
        told = await ask_status(run, self._transport, self._voices.counted(stage)[:MAX_ASKED])
        taken = [peer for peer, status in told.items() if status.version > t]
        wanted = wanted_of(compute, OpenHeld(run=run.id, t=t), compute.numel)
        for source in self._shuffled(stage, t, taken, "result"):
            try:
                found = await download(self._transport, wanted, [source])
                commit, result = found.opened.last_commit, found.tensors["gradient"]
                if commit is None:
                    continue
                Belief(run, stage, self._transport.signer).check_commit(commit, found.opened.generation, None)
            except SwarmError:
                continue
            by = [proof.peer for proof in commit.proofs[stage] if voice.get(proof.peer) or not voice]
            if len(by) > 1:
                return False
            digest = commit.proofs[stage][0].prepared.digest
            # To an auditor that one might show another.
            if by and source not in by and vectors_digest([result], on_device=False) == digest:
                if only is None or by[0] in only:
                    self._comparing = True
                    await self._compare(compute, t, by[0], result)
                return True
        return False

    async def _compare(self, compute: StageCompute, t: int, by: PeerId, result: torch.Tensor) -> None:
        """Compare a result that one replica alone signed with its step's microbatches, which any may keep."""
        stage, recount = compute.stage, Recount(compute, t, (0, compute.numel))
        await self._device.run(Rank.STEP, t, _begin, compute, t)
        kept = KeptWork(self._run, stage, self._transport, self._directory, lambda: compute.version)
        those = [by, *(peer for peer in self._serving(stage) if peer != by)]
        microbatches = [Microbatch(t, m) for m in range(self._run.microbatches(t))]
        text = f"stage {stage}, step {t}: its result was signed by peer {by} alone"
        try:
            found = await count_again(kept, self._device, recount, those, microbatches)
        except SwarmError as error:  # it may be of a round whose other members are gone
            self._emit(events.Note(text=f"{text}, and not all that is in it is shown: {error.text}"))
            return
        if 2 * found.bound <= len(microbatches) and found.kept_by != {by}:
            return
        self.audited += 1
        if not await asyncio.to_thread(recount.is_result, result):
            if found.kept_by == {by}:  # else another may have sent it something false
                self.found.add(by)
            names = " ".join(sorted(found.kept_by))
            self._emit(events.Trouble(text=f"{text}, and is not that of the microbatches that {names} kept"))

    # -- one contribution ---------------------------------------------------------------------------

    async def _claim(self, compute: StageCompute, t: int, member: PeerId) -> SignedContribution | None:
        """What a member signed, as others heard it: to an auditor it might say something else."""
        stage, voice = compute.stage, self._voices.of(compute.stage)
        others = heard([peer for peer in self._serving(stage) if peer != member], voice)
        return await self._told(compute, t, member, self._shuffled(stage, t, others, member)[:MAX_ASKED])

    async def _told(
        self, compute: StageCompute, t: int, member: PeerId, tellers: Sequence[PeerId]
    ) -> SignedContribution | None:
        """The same, as the first of some tells it that knows."""
        ask = AskProducts(run=self._run.id, t=t, member=member)
        how: dict[str, Any] = {"deadline_s": ASK_S, "max_answer_bytes": MAX_LONG_BYTES}
        for teller in tellers:
            told = await ask_all(self._transport, [teller], "products", ask, Products, **how)
            for one in told.values():
                if (claim := self._checked(compute, t, member, one)) is not None:
                    return claim
        return None

    def _checked(
        self, compute: StageCompute, t: int, member: PeerId, told: Products
    ) -> SignedContribution | None:
        """None: the member did not sign that, or it is no round of this step."""
        run, plan, said = self._run, told.plan, told.said
        ledgers = dict(zip(plan.members, plan.ledgers, strict=False))
        why = check_plan(
            plan, run=run.id, stage=compute.stage, t=t, microbatches=run.microbatches(t), numel=compute.numel,
            me=member, done=ledgers.get(member, -1),
        )  # fmt: skip
        statement = Projected(compute.stage, t, plan.round, said.nonces, said.contributions, said.sums)
        signed = is_signed(self._transport.signer, member, run.id, statement, said.signature)
        if why or not signed:
            return None
        claim = SignedContribution(plan, plan.members.index(member), statement, said.signature)
        due = [len(part) * SUM_BYTES if ledgers[member] else 0 for part in parts_of(plan)]
        return claim if [len(sums) for sums in said.sums] == due else None

    async def _audit(self, compute: StageCompute, claim: SignedContribution) -> bool:
        """Compute a contribution again; False: its step is over, and nothing is known."""
        stage, t, parts, member = compute.stage, claim.said.t, parts_of(claim.plan), claim.member
        place, index = any_chunk(parts, self._coin(stage, t, f"chunk {member}"))
        await self._device.run(Rank.STEP, t, _begin, compute, t)
        recount = Recount(compute, t, parts[place][index])
        kept = KeptWork(self._run, stage, self._transport, self._directory, lambda: compute.version)
        one = claim.microbatches[self._coin(stage, t, f"answer {member}").below(len(claim.microbatches))]
        seen: list[tuple[Shown, Shown | None]] = []

        def saw(mb: Microbatch, came: Shown, made: Shown | None) -> None:
            if mb == one:
                seen.append((came, made))

        try:
            found = await count_again(kept, self._device, recount, [member], claim.microbatches, saw)
        except (PeerGone, PeerSilent):
            return True
        except SwarmError as error:
            if await self._is_over(stage, t, besides=member):
                return False
            await self._tell(claim, f"does not show what it added: {error.text}", is_false=False)
            return True
        bound = 2 * found.bound > len(claim.microbatches)  # else its neighbours may be itself
        self.audited += bound
        r = coefficients(seed_of(claim.said.nonces), place, index, parts[place][index][1])
        projected = nth_sum(claim.said.sums[place], index)
        assert projected is not None  # `_checked` compared the lengths
        same = await asyncio.to_thread(has_its_bits, recount, parts, claim.said)
        off = not same and await asyncio.to_thread(recount.is_off, projected, r)
        if off or found.false:
            what = "added" if off else "sent on"
            what = f"{what} something else than its {len(claim.microbatches)} microbatches"
            own = await self._told(compute, t, member, [member])
            is_last = own is not None and own.said == claim.said
            if is_last:
                self.found.add(member)
            else:  # others may tell of a round that was given up, after which it was sent something else
                what = f"{what}, or signed other sums since"
            await self._tell(claim, what, is_false=is_last)
        elif stage and bound:
            with contextlib.suppress(SwarmError):
                await self._audit_answer(compute, kept, member, one, *seen[0])
        return True

    async def _audit_answer(
        self, compute: StageCompute, kept: KeptWork, member: PeerId, mb: Microbatch, came: Shown,
        shown: Shown | None,
    ) -> None:  # fmt: skip
        """Compute an answer of a member again, as its caller got it: it may show another than it gave.

        `shown`: what it made, if it has shown that.
        """
        run, stage = self._run, compute.stage
        caller = KeptWork(run, stage - 1, self._transport, self._directory, lambda: compute.version)
        told = (await caller.of(came.told.caller, mb, made=False)).told
        receipt = None if told.next is None or told.next.peer != member else told.next.receipt
        if receipt is None:
            return  # another peer's answer was taken
        said = receipt.statement(stage, mb, told.loss)
        made = await self._device.run(Rank.COMPUTE, mb.t, make, compute, mb, came.forth, came.back)
        if made.is_of(said):
            return
        shown = shown or await kept.of(member, mb, made=True)
        evidence, body = evidence_of(member, said, receipt.signature, came, shown)
        signer, given = self._transport.signer, (digest(came.forth), digest(came.back))
        hides = given == (said.inputs, said.output_grads) and not Made(shown.forth, shown.back).is_of(said)
        hides = hides and evidence.is_signed(signer, run.id)
        job = proves_answer, compute, signer, evidence, body
        if hides or await self._device.run(Rank.COMPUTE, mb.t, *job):
            self.found.add(member)
            text = f"stage {stage}: peer {member} answered microbatch ({mb.t}, {mb.m}) with something else"
            self._emit(events.Trouble(text=f"{text} than it {'shows' if hides else 'computes'}"))

    async def _tell(self, claim: SignedContribution, what: str, *, is_false: bool = True) -> None:
        """Have the replicas of its stage look at what a member adds next, and say so here. Where that is one,
        others believe it with this one's word on what `is_false`: one that shows nothing may have paused.
        """
        said, member = claim.said, claim.member
        text = f"stage {said.stage}, step {said.t}: peer {member} {what}; its stage was told"
        self._emit(events.Trouble(text=text))
        show = pack(ShowEvidence(run=self._run.id, evidence=claim.accusation))
        told = self._voices.counted(said.stage)[:MAX_TOLD]
        if is_false and len(told) == 2:
            await self._directory.lookup_all()
            others = set(range(self._run.S)) - {said.stage}
            judges = [peer for stage in others for peer in self._voices.counted(stage)[:MAX_TOLD]]
            trainers = [peer for peer in self._run.admission.trainers if peer != self._transport.peer_id]
            self._tasks.create_task(self._show([*judges, *trainers], show))  # they ask that one meanwhile
        await self._show([peer for peer in told if peer != member], show)

    async def _show(self, peers: Sequence[PeerId], show: bytes) -> None:
        calls = (self._transport.call(peer, "evidence", show, deadline_s=ASK_S) for peer in peers)
        await asyncio.gather(*calls, return_exceptions=True)


def _begin(compute: StageCompute, t: int) -> None:
    compute.sums.drop(t)
    compute.sums.begin(t)

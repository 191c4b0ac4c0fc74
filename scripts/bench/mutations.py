"""The rules of the protocol, each broken at one place: what `mutants.py` applies."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One place of the shipped code, changed so that a rule does not hold any more."""

    name: str
    file: str
    old: str
    """Occurs once in the file."""
    new: str
    goes_wrong: str
    """What a reader would see."""
    tests: tuple[str, ...] = ()
    """Modules of tests/peers that are about it; none: all of them."""

    def applied(self, source: str) -> str:
        """The file with the rule broken.

        Raises:
            ValueError: the place is not there, or not alone.
        """
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {source.count(self.old)} places in {self.file} instead of one")
        return source.replace(self.old, self.new)


LEDGER = "swarm/protocol/ledger.py"
ROUNDS = "swarm/protocol/rounds.py"
REPLICA = "swarm/protocol/replica.py"
COORDINATOR = "swarm/protocol/coordinator.py"
PROTOCOL = "swarm/protocol/protocol.py"
STEP = "swarm/protocol/step.py"
WORKLIST = "swarm/protocol/worklist.py"
ROLLBACK = "swarm/protocol/rollback.py"
SERVER = "peers/stage/server.py"
STATE = "peers/stage/state.py"
HANDOFF = "peers/stage/handoff.py"
ALL_REDUCE = "peers/stage/all_reduce.py"
MICROBATCHES = "peers/stage/microbatches.py"
CLIENT = "peers/transfer/client.py"

SWARMS = ("test_loops", "test_council")
MOVES = ("test_handover", "test_moves")
FETCHED = ("test_download", "test_sync")

MUTATIONS: tuple[Mutation, ...] = (
    # --- what counts ---
    Mutation(
        "count-a-duplicate",
        LEDGER,
        "return self.frozen_for is None and not self.done >> m & 1",
        "return self.frozen_for is None",
        "A microbatch that is computed twice enters the sum twice.",
        SWARMS,
    ),
    Mutation(
        "add-to-a-frozen-sum",
        LEDGER,
        "return self.frozen_for is None and not self.done >> m & 1",
        "return not self.done >> m & 1",
        "A sum that was promised to a round changes while it is sent.",
        SWARMS,
    ),
    Mutation(
        "compute-what-is-done",
        LEDGER,
        "            return Claim.DONE",
        "            return Claim.NEW",
        "A repeated request is computed again instead of answered from memory.",
        SWARMS,
    ),
    Mutation(
        "compute-what-is-being-computed",
        LEDGER,
        "            return Claim.DOING",
        "            return Claim.NEW",
        "Two requests for one microbatch are both computed.",
        ("test_work",),
    ),
    Mutation(
        "inherited-marks-lost",
        LEDGER,
        "        self.inherited |= done\n",
        "",
        "What was taken over is told to be undone, and nothing is there to subtract.",
        MOVES,
    ),
    Mutation(
        "undo-what-was-inherited",
        LEDGER,
        "(self.done & ~self.inherited) >> m & 1",
        "self.done >> m & 1",
        "The mark of a microbatch goes although its gradient cannot be subtracted.",
        MOVES,
    ),
    Mutation(
        "ledger-not-frozen",
        LEDGER,
        "self.frozen_for = round_id",
        "self.frozen_for = None",
        "A microbatch enters the sum between the plan and the reduce.",
        SWARMS,
    ),
    Mutation(
        "never-unfreeze",
        LEDGER,
        "        self.frozen_for = None\n\n    def clear",
        "\n    def clear",
        "After an aborted round no microbatch is counted any more.",
        SWARMS,
    ),
    Mutation(
        "keep-the-ledger-of-a-dropped-sum",
        LEDGER,
        "self.done = self.inherited = 0",
        "self.inherited = 0",
        "Microbatches are in no sum, and nobody computes them again.",
        (*MOVES, "test_loops"),
    ),
    Mutation(
        "believe-any-bitmap",
        LEDGER,
        "if bitmap > everything(microbatches):",
        "if bitmap < 0:",
        "A peer names microbatches that the step does not have.",
        ("test_council", "test_attack"),
    ),
    # --- rounds ---
    Mutation(
        "step-with-one-missing",
        ROUNDS,
        "if union != everything(microbatches):\n        lacking = everything(microbatches) & ~union",
        "if (everything(microbatches) & ~union).bit_count() > 1:\n"
        "        lacking = everything(microbatches) & ~union",
        "A round begins although a microbatch is in nobody's sum.",
        SWARMS,
    ),
    Mutation(
        "reduce-with-duplicates",
        ROUNDS,
        "    if twice:\n",
        "    if False:\n",
        "A microbatch in two sums is not undone before the round.",
        SWARMS,
    ),
    Mutation(
        "prepared-when-one-is",
        ROUNDS,
        "ready=len(votes[chosen]) == len(members),",
        "ready=True,",
        "The commit comes before all replicas hold the result.",
        SWARMS,
    ),
    Mutation(
        "keep-a-plan-that-changed",
        ROUNDS,
        "all(m is not None and m.done == ledger for",
        "all(m is not None for",
        "A plan is told again whose ledgers are not those of its members.",
        SWARMS,
    ),
    Mutation(
        "repeat-a-failed-round",
        ROUNDS,
        "        and not any(m.failed_round == plan.round for m in members)\n",
        "",
        "A round that failed at a member is told again for ever.",
        SWARMS,
    ),
    Mutation(
        "undo-at-the-one-who-cannot",
        ROUNDS,
        "for only_fixed in (True, False):",
        "for only_fixed in (False,):",
        "A replica that inherited a duplicate drops its whole sum although the other could subtract.",
        MOVES,
    ),
    Mutation(
        "join-a-plan-that-lacks-one",
        ROUNDS,
        '    if union != everything(microbatches):\n        return f"microbatch',
        '    if False:\n        return f"microbatch',
        "A replica believes a coordinator whose plan lacks a microbatch.",
        ("test_council",),
    ),
    Mutation(
        "join-a-plan-with-duplicates",
        ROUNDS,
        "        if union & ledger:\n",
        "        if False:\n",
        "A replica believes a coordinator whose plan has a microbatch twice.",
        ("test_council",),
    ),
    Mutation(
        "join-with-another-ledger",
        ROUNDS,
        "if plan.ledgers[plan.members.index(me)] != done:",
        "if False:",
        "A replica gives a sum that is not the one that the plan names.",
        SWARMS,
    ),
    Mutation(
        "commit-before-all-are-prepared",
        ROUNDS,
        "not all(s.ready for s",
        "not any(s.ready for s",
        "One stage takes a step that another cannot take.",
        SWARMS,
    ),
    Mutation(
        "norm-of-one-stage",
        ROUNDS,
        "summaries[stage].sqnorm for stage in range(stages))",
        "summaries[stage].sqnorm for stage in range(1))",
        "Gradients are clipped by the norm of stage 0 alone.",
        SWARMS,
    ),
    Mutation(
        "digest-of-the-minority",
        ROUNDS,
        "key=lambda d: (-len(counts[d]), min(counts[d]))",
        "key=lambda d: (len(counts[d]), min(counts[d]))",
        "One replica with other bits makes the majority download them.",
        SWARMS,
    ),
    # --- a replica and its directives ---
    Mutation(
        "ignore-the-generation-of-a-directive",
        REPLICA,
        "for wanted in directive.steps if same_generation else ():",
        "for wanted in directive.steps:",
        "A plan of before the run went back is carried out on the new sum.",
        SWARMS,
    ),
    Mutation(
        "ignore-the-generation-of-a-commit",
        REPLICA,
        "if same_generation and commit is not None:",
        "if commit is not None:",
        "A commit of before the run went back is taken with a new gradient.",
        SWARMS,
    ),
    Mutation(
        "follow-while-busy",
        REPLICA,
        "    if local.busy:\n",
        "    if False:\n",
        "A replica starts a round while it replaces its state.",
        ("test_stage_lost", "test_loops"),
    ),
    Mutation(
        "skip-the-undo",
        REPLICA,
        "    elif wanted.undo:\n",
        "    elif False:\n",
        "A duplicate stays in two sums, and the step never comes.",
        SWARMS,
    ),
    Mutation(
        "fetch-while-completing",
        REPLICA,
        "        return True  # all that is missing",
        "        return False  # all that is missing",
        "A replica that waits for tied weights only fetches the sum that it has.",
        ("test_brought", "test_latecomers"),
    ),
    Mutation(
        "report-a-sum-that-leaves",
        REPLICA,
        "if step.state is StepState.HANDING:  # in",
        "if False:  # in",
        "A sum is counted here while it is on its way to another.",
        MOVES,
    ),
    Mutation(
        "ignore-another-digest",
        REPLICA,
        "if theirs > local.position or (theirs == local.position and differs):",
        "if theirs > local.position:",
        "A replica with other weights goes on with them.",
        SWARMS,
    ),
    Mutation(
        "stay-frozen",
        REPLICA,
        "        return Unfreeze(step.t)\n",
        "        return None\n",
        "A replica of an aborted round never opens its sum.",
        SWARMS,
    ),
    # --- the coordinators ---
    Mutation(
        "count-members-of-an-old-generation",
        COORDINATOR,
        "if member.report.generation == self._agreed.generation",
        "if member.report",
        "A ledger of before the run went back fills a step of after it.",
        ("test_stage_lost", "test_council"),
    ),
    Mutation(
        "count-summaries-of-an-old-generation",
        COORDINATOR,
        "if said.summary.generation == self._agreed.generation",
        "if said.summary",
        "A stage that was prepared before the run went back is taken for prepared.",
        ("test_stage_lost", "test_council"),
    ),
    Mutation(
        "learn-commits-of-the-future",
        COORDINATOR,
        "if commit.t not in self.commits and commit.t <= newest:",
        "if commit.t not in self.commits:",
        "A made-up commit for a later step hides the true ones.",
        ("test_council", "test_attack"),
    ),
    Mutation(
        "learn-commits-of-an-old-generation",
        COORDINATOR,
        "        if generation != self.generation:\n            return\n",
        "",
        "A step after a rollback is taken with the commit of before it.",
        ("test_stage_lost", "test_council"),
    ),
    Mutation(
        "held-by-all-when-one-holds",
        COORDINATOR,
        "return min(versions) if len(versions) == self._run.S else -1",
        "return max(versions) if len(versions) == self._run.S else -1",
        "Trainers go home before all stages have the last version.",
        ("test_stage_lost", "test_loops"),
    ),
    Mutation(
        "forget-a-leaving-message",
        PROTOCOL,
        '            self.lost(sender)\n            raise NotNow("good',
        '            raise NotNow("good',
        "A peer that left is waited for until it has been silent long enough.",
        ("test_council", "test_moves"),
    ),
    Mutation(
        "coordinate-while-a-newcomer",
        PROTOCOL,
        "if self._local.joined and not (self._local.leaving and serving):",
        "if not (self._local.leaving and serving):",
        "A peer without the weights decides for its stage.",
        ("test_council", "test_latecomers"),
    ),
    Mutation(
        "obey-anybody",
        PROTOCOL,
        "if sender == directive.coordinator == self.coordinator(self._stage, now=now):",
        "if True:",
        "A stranger makes a replica undo its sum.",
        ("test_council",),
    ),
    Mutation(
        "follow-an-overtaken-directive",
        PROTOCOL,
        " and directive.number < last.number:",
        " and False:",
        "A late directive takes a replica back to an older plan.",
        ("test_council",),
    ),
    Mutation(
        "count-the-silent",
        PROTOCOL,
        "return now - seen_s > self._timings.gone_after_s",
        "return False",
        "A replica that hangs is waited for without end.",
        SWARMS,
    ),
    Mutation(
        "believe-one-far-ahead",
        PROTOCOL,
        "if self._run.S > 1 and is_alone_ahead(",
        "if False and is_alone_ahead(",
        "One liar makes its stage follow it to a version that the run has not.",
        ("test_council",),
    ),
    Mutation(
        "commits-kept-in-a-new-generation",
        PROTOCOL,
        "            self._agreed.commits.clear()\n",
        "",
        "The old commits of steps that are computed again let one stage run ahead.",
        ("test_stage_lost", "test_council"),
    ),
    Mutation(
        "plans-kept-in-a-new-generation",
        PROTOCOL,
        "            self._coordinator.forget()\n",
        "",
        "A round of before the run went back is told again.",
        ("test_stage_lost", "test_council"),
    ),
    Mutation(
        "never-restore-a-lost-stage",
        PROTOCOL,
        "self._actions.append(RestoreStage())",
        "pass",
        "A stage that lost its last replica is never brought back.",
        ("test_stage_lost",),
    ),
    Mutation(
        "unfreeze-under-a-round",
        STEP,
        "return self._state is StepState.FROZEN and self.round is None",
        "return self._state is StepState.FROZEN",
        "A sum opens although it was promised to a new round meanwhile.",
        ("test_reduce", *SWARMS),
    ),
    Mutation(
        "open-again-from-prepared",
        STEP,
        "_S.PREPARED: frozenset({_S.TAKEN, _S.ABORTED})",
        "_S.PREPARED: frozenset({_S.TAKEN, _S.OPEN, _S.ABORTED})",
        "A step whose result was announced takes in more microbatches.",
        SWARMS,
    ),
    # --- what a trainer runs ---
    Mutation(
        "never-run-a-lost-microbatch-again",
        WORKLIST,
        "if m in step.due_s and now >= step.due_s[m] and not step.running >> m & 1:",
        "if False:",
        "A microbatch that died with a peer is lacking for ever.",
        ("test_loops",),
    ),
    Mutation(
        "keep-what-was-done-before-a-rollback",
        WORKLIST,
        "        self._oldest = version\n        self._steps.clear()\n",
        "        self._oldest = version\n",
        "After the run went back its microbatches are taken for done.",
        ("test_stage_lost",),
    ),
    Mutation(
        "never-start-a-failed-one-again",
        WORKLIST,
        "            step.running &= ~(1 << microbatch.m)\n            step.cursor = 0\n",
        "            step.cursor = 0\n",
        "A microbatch that was not answered counts as running for ever.",
        ("test_loops", "test_patience"),
    ),
    Mutation(
        "go-back-to-one-stages-newest",
        ROLLBACK,
        "return newest_common(reachable) or 0",
        "return max((v for some in reachable.values() for v in some), default=0)",
        "The run goes back to a version that another stage cannot get.",
        ("test_stage_lost", "test_resume"),
    ),
    Mutation(
        "route-to-resting-peers",
        "swarm/policy/fair_queue.py",
        "            elif backoff.in_backoff(candidate.peer, now=now):",
        "            elif False:",
        "Work goes to a peer that has just failed.",
        ("test_patience", "test_probe"),
    ),
    Mutation(
        "keeper-believes-one-stage",
        "swarm/policy/keeping.py",
        "return min(newest.values(), default=None)",
        "return max(newest.values(), default=None)",
        "One liar makes a keeper throw a good version away for one that cannot be.",
        ("test_keeping",),
    ),
    # --- a stage peer ---
    Mutation(
        "adopt-an-incomplete-sum",
        ALL_REDUCE,
        "if len(chunk.contributions) < len(this.plan.members) or",
        "if len(chunk.contributions) < len(this.plan.members) - 1 or",
        "A chunk is given out before the last member's contribution is in it.",
        ("test_reduce", "test_loops"),
    ),
    Mutation(
        "chunk-checksum-not-compared",
        ALL_REDUCE,
        "        if checksum(body) != crc:",
        "        if False:",
        "A chunk that was damaged on the way enters the sum.",
        ("test_reduce", "test_attack"),
    ),
    Mutation(
        "strangers-in-a-round",
        ALL_REDUCE,
        "if request.peer not in this.plan.members:",
        "if False:",
        "A peer outside the round adds to it.",
        ("test_reduce", "test_attack"),
    ),
    Mutation(
        "freeze-without-checking-the-plan",
        SERVER,
        "            if why is not None:\n                return why, None\n",
        "",
        "A replica joins a round whose plan names another sum than its own.",
        ("test_council", "test_loops"),
    ),
    Mutation(
        "result-taken-after-the-unfreeze",
        SERVER,
        "step.prepared is None and step.ledger.frozen_for == plan.round:",
        "step.prepared is None:",
        "The result of a round that was given up is held, beside a sum that has changed.",
        ("test_reduce", "test_loops"),
    ),
    Mutation(
        "forget-an-inherited-duplicate",
        SERVER,
        "            if twice & step.ledger.inherited:\n",
        "            if False:\n",
        "A duplicate that came with a sum is undone without what there is to subtract.",
        MOVES,
    ),
    Mutation(
        "undo-the-ledger-only",
        SERVER,
        "core.compute.subtract(Microbatch(step.t, m), kept.inputs, kept.grads_out)",
        "pass",
        "A duplicate goes out of the ledger and stays in the sum.",
        ("test_loops",),
    ),
    Mutation(
        "drop-the-ledger-only",
        STATE,
        "            self.compute.drop_sum(step.t)\n",
        "",
        "The ledger is empty, the sum is not: what is computed again counts twice.",
        (*MOVES, "test_loops"),
    ),
    Mutation(
        "take-a-step-twice",
        STATE,
        " or step.over or commit.t != self.version:",
        ":",
        "A commit that is told again is taken again.",
        SWARMS,
    ),
    Mutation(
        "hand-over-and-keep",
        HANDOFF,
        "        await core.device.run(Rank.STEP, step.t, core.drop_sum, step)\n        given",
        "        await core.device.run(Rank.STEP, step.t, step.ledger.thaw)\n        given",
        "A leaving peer gives its sum away and counts it as well.",
        MOVES,
    ),
    Mutation(
        "take-over-half-a-sum",
        HANDOFF,
        "aside.t != take.t or aside.missing:",
        "aside.t != take.t:",
        "A sum is counted whose chunks have not all come.",
        MOVES,
    ),
    Mutation(
        "handed-sum-not-compared",
        HANDOFF,
        "if await asyncio.to_thread(vector_digest, aside.vector) != take.digest:",
        "if False:",
        "A sum with other numbers than were given is counted.",
        (*MOVES, "test_attack"),
    ),
    Mutation(
        "take-over-in-another-generation",
        HANDOFF,
        "if take.generation != core.generation:",
        "if False:",
        "A sum of before the run went back is counted after it.",
        (*MOVES, "test_attack"),
    ),
    Mutation(
        "tied-part-dropped",
        "peers/stage/tied_weights.py",
        "whole = await asyncio.to_thread(compute.complete, reduced, step.shared)",
        "whole = reduced",
        "The copies of a tied weight drift apart.",
        ("test_brought",),
    ),
    Mutation(
        "claim-not-released",
        MICROBATCHES,
        "        step.ledger.release(m)\n",
        "",
        "A microbatch that failed is said to be computed for ever.",
        ("test_work", "test_loops"),
    ),
    Mutation(
        "accept-a-stale-version",
        MICROBATCHES,
        "        if work.version != version:\n",
        "        if False:\n",
        "A gradient of other weights than the step's enters the sum.",
        ("test_work", "test_attack"),
    ),
    Mutation(
        "work-on-a-step-that-is-over",
        MICROBATCHES,
        "        if step.over:\n            raise self._core.closed(step.t)\n        return Micro",
        "        return Micro",
        "A late microbatch is computed with the weights of the next step.",
        SWARMS,
    ),
    Mutation(
        "admit-while-leaving",
        MICROBATCHES,
        '        if self._core.leaving:\n            raise Leaving("this peer is leaving")\n',
        "",
        "A peer that leaves takes in work that goes with it.",
        ("test_work", *MOVES),
    ),
    Mutation(
        "go-back-without-a-trainer",
        "peers/stage/recovery.py",
        "run.version >= self._run.steps and not await self._is_trained():",
        "False:",
        "A finished run is thrown away although nobody trains it again.",
        ("test_stage_lost",),
    ),
    # --- downloads, checkpoints, trainers ---
    Mutation(
        "trust-one-download-source",
        CLIENT,
        "key=lambda group: (len(group), max(offer.position for offer in group))",
        "key=lambda group: max(offer.position for offer in group)",
        "One source that lies outweighs two that agree.",
        FETCHED,
    ),
    Mutation(
        "chunk-hash-not-compared",
        CLIENT,
        ".digest() != chunk.sha256:",
        '.digest() == b"":',
        "A source spoils a state with a chunk that the others did not give.",
        FETCHED,
    ),
    Mutation(
        "another-version-accepted",
        CLIENT,
        "if version >= 0 and opened.version != version:",
        "if False:",
        "A saved version is loaded as another one.",
        (*FETCHED, "test_keeping"),
    ),
    Mutation(
        "latest-generation-believed",
        CLIENT,
        "generation=min(generations, key=",
        "generation=max(generations, key=",
        "One source talks a newcomer into a generation that nobody is in.",
        FETCHED,
    ),
    Mutation(
        "gradient-not-compared",
        "peers/transfer/gradient.py",
        "if held.digest != named.digest or (not core.compute.shares and held.sqnorm != named.sqnorm):",
        "if False:",
        "A step is taken with a gradient that is not the stage's.",
        (*FETCHED, "test_latecomers"),
    ),
    Mutation(
        "checkpoint-of-another-step-accepted",
        "peers/storage/checkpoint.py",
        "if (index.stage, index.step) != (stage, step):",
        "if index.stage != stage:",
        "A file of one version is loaded as another.",
        ("test_checkpoint",),
    ),
    Mutation(
        "trainer-leaves-early",
        "peers/trainer.py",
        "while self._held_by_all < self._last_step and",
        "while self._version < self._last_step and",
        "The trainer goes home when one stage has the last version; a stage that is lost then stays so.",
        ("test_loops", "test_stage_lost"),
    ),
)

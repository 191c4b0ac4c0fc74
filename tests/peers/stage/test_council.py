"""Reports, directives and summaries: who leads, and what nobody can talk a leader into."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from peers.clock import now_s
from peers.stage.coordination import MAX_WATCHERS, WATCHED_S
from peers.stage.status import MAX_PAST_TOLD, StageStatus
from peers.voices import Membership
from swarm.errors import NotNow, Refused
from swarm.manifest import audit_run
from swarm.protocol.ledger import Bitmap
from swarm.protocol.messages import (
    Directive,
    ReplicaReport,
    RunStatus,
    StageSummary,
    StepDirective,
)
from swarm.protocol.rounds import Commit, Plan, Prepared, StepReport, StepSummary, round_id
from swarm.records import PeerRecord, State
from swarm.wire.messages import AskStatus, PastStep, PeerStatus, Watch, Watched
from tests.peers.admitted import OTHER, TRAINER, admitting
from tests.peers.liars.test_false_answers import audited_run
from tests.peers.loops import Stranger, Swarm, obey, swarm

pytestmark = pytest.mark.virtual_time

RUN = audit_run(stages=2, steps=3, microbatches_per_step=4)


NOTHING = StepReport(t=0)


def held(sqnorm: float) -> Prepared:
    return Prepared(round="r", sqnorm=sqnorm, digest="")


def announced(s: Swarm, name: str, stage: int, state: State = "joining") -> Stranger:
    """A stranger that announced itself at `stage`, as anybody may."""
    stranger = s.add_stranger(name)
    s.network.announce(PeerRecord(peer=name, run=s.run.id, stage=stage, state=state, version=0))
    return stranger


def report(**changes: Any) -> ReplicaReport:
    """A good report of a member of stage 0 that has nothing, but for the changes."""
    step = {"t": 0}
    step.update(changes.pop("step", {}))
    steps = changes.pop("steps", (StepReport(**step),))
    return ReplicaReport(**{"run": RUN.id, "stage": 0, "version": 0, "steps": steps, **changes})


def summary(**changes: Any) -> StageSummary:
    """A good summary of stage 1, but for the changes."""
    step = {"t": 0, "unclaimed": Bitmap(15), "ready": False, "sqnorm": 0.0}
    step.update(changes.pop("step", {}))
    steps = changes.pop("steps", (StepSummary(**step),))
    return StageSummary(**{"run": RUN.id, "stage": 1, "version": 0, "members": 1, "steps": steps, **changes})


def chief_of(s: Swarm, name: str) -> str:
    """Who wrote the directive that a peer follows."""
    directive = s.peers[name].coordination.directive
    return "" if directive is None else directive.coordinator


async def refusal(
    stranger: Stranger, peer: str, method: str, message: msgspec.Struct, body: list[Any] | None = None
) -> str:
    with pytest.raises((Refused, NotNow)) as caught:
        await stranger.send(peer, method, message, body)
    return caught.value.text


# --- who leads ----------------------------------------------------------------------------------------------


async def test_the_live_member_with_the_smallest_id_leads_its_stage_and_that_of_stage_0_the_run() -> None:
    async with swarm(RUN, replicas=3) as s:
        await s.until_serving()
        leaders = [[p.coordination.coordinator(number) for number in (0, 1)] for _, p in s.live()]
        assert leaders == [["s0p0", "s1p0"]] * 6
        s.kill("s1p0")
        await s.until(lambda: s.peers["s1p2"].coordination.coordinator(1) == "s1p1")
        await s.until(lambda: s.peers["s0p0"].coordination.run_status.run_coordinator == "s0p0")


async def test_a_peer_alone_leads_itself_and_an_empty_stage_is_led_by_nobody() -> None:
    async with swarm(RUN, replicas=0) as s:
        peer = s.add_peer("alone", 0)
        assert peer.coordination.coordinator(0) is None, "it has not joined yet"
        await s.until_serving()
        assert peer.coordination.coordinator(0) == "alone"
        assert peer.coordination.coordinator(1) is None


async def test_everybody_can_be_asked_how_it_is_doing() -> None:
    async with swarm(RUN) as s:
        s.add_trainer("trainer")
        await s.until_finished()
        status = await s.add_stranger().ask("s1p1", "status", AskStatus(run=RUN.id), PeerStatus)
        assert (status.peer, status.stage, status.version, status.coordinator) == ("s1p1", 1, 3, "s1p0")
        assert (status.audit.missing, status.audit.duplicated) == (0, 0)
        assert status.state == "serving" and status.past == ()


async def test_a_peer_tells_of_the_steps_since_it_joined_to_those_that_ask() -> None:
    async with swarm(RUN) as s:
        s.add_trainer("trainer")
        await s.until_finished()
        await asyncio.sleep(0.1)  # the last step is noted once it is taken
        ask = s.add_stranger().ask
        past = (await ask("s1p1", "status", AskStatus(run=RUN.id, after=0), PeerStatus)).past
        assert [step.version for step in past][-2:] == [2, 3]
        assert all(step.took_s > 0 for step in past[-2:])
        past = (await ask("s0p0", "status", AskStatus(run=RUN.id, after=2), PeerStatus)).past
        assert [step.version for step in past] == [3]


def test_a_peer_keeps_the_losses_that_it_heard_and_of_many_steps_some() -> None:
    core = SimpleNamespace(version=3, taken_at=[(1, 10.0), (2, 12.0), (3, 15.0)])
    told = SimpleNamespace(losses=((1, 2.5), (7, 1.0)))
    status: Any = object.__new__(StageStatus)
    status._core, status._past, status._coordination = core, {}, SimpleNamespace(run_status=told)
    second = PastStep(version=2, took_s=2.0, loss=2.5)
    assert status._past_after(0) == (second, PastStep(version=3, took_s=3.0))
    told.losses = ()
    assert status._past_after(0)[0] == second, "its loss is told for a while only"
    core.version, core.taken_at = 5000, []
    status._past |= {n: PastStep(version=n, took_s=1.0) for n in range(3, 5000)}
    chosen = [step.version for step in status._past_after(100)]
    assert len(chosen) <= MAX_PAST_TOLD and chosen[-1] == 4999 and chosen[0] < 200
    assert len(status._past) < 3000, "of the older ones every other"
    core.version = 1
    assert status._past_after(0) == (), "the run went back"


# --- reports ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"run": "other"}, "a report for stage 0 of run 'other'; this is stage 0"),
        ({"stage": 1}, f"a report for stage 1 of run '{RUN.id}'; this is stage 0"),
        ({"version": 4}, "a report of version 4 of a run of 3 steps"),
        ({"version": -1}, "a report of version -1 of a run of 3 steps"),
        ({"bandwidth_bps": float("inf")}, "an impossible bandwidth, inf bit/s"),
        ({"bandwidth_bps": float("nan")}, "an impossible bandwidth, nan bit/s"),
        ({"bandwidth_bps": -1.0}, "an impossible bandwidth, -1.0 bit/s"),
        ({"step": {"t": 3}}, "[3] are not open steps of a run of 3"),
        ({"step": {"t": -1}}, "[-1] are not open steps of a run of 3"),
        ({"steps": (NOTHING, NOTHING)}, "[0, 0] are not open steps of a run of 3"),
        ({"step": {"done": Bitmap(0x10)}}, "the ledger names a microbatch beyond 3"),
        ({"step": {"in_progress": Bitmap(0x80)}}, "the ledger names a microbatch beyond 3"),
        ({"step": {"prepared": held(float("nan"))}}, "an impossible squared norm, nan"),
        ({"step": {"prepared": held(-1.0)}}, "an impossible squared norm, -1.0"),
        ({"commits": (Commit(t=3, total_sqnorm=1.0),)}, "a commit for step 3 of a run of 3 steps"),
        ({"commits": (Commit(t=-1, total_sqnorm=1.0),)}, "a commit for step -1 of a run of 3 steps"),
        ({"commits": (Commit(t=0, total_sqnorm=float("nan")),)}, "an impossible squared norm, nan"),
    ],
)
async def test_a_report_that_cannot_be_true_is_refused(changes: dict[str, Any], text: str) -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        assert await refusal(announced(s, "z", 0), "s0p0", "report", report(**changes)) == text
        assert "z" not in s.peers["s0p0"].coordination.protocol._coordinator.members


async def test_losses_that_do_not_fit_the_ledger_are_refused() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        liar = announced(s, "z", 1)
        two = report(stage=1, step={"done": Bitmap(3)})
        text = "losses of [9] bytes do not fit the ledgers: [16] were due"
        assert await refusal(liar, "s1p0", "report", two, [bytes(9)]) == text
        assert await refusal(liar, "s1p0", "report", two) == text.replace("[9]", "[]")
        text = "losses of [8] bytes do not fit the ledgers: [] were due"
        assert await refusal(announced(s, "y", 0), "s0p0", "report", report(), [bytes(8)]) == text


async def test_only_announced_members_may_report() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        text = "peer ranger is not announced at stage 0"
        assert await refusal(s.add_stranger(), "s0p0", "report", report()) == text
        assert await refusal(announced(s, "z", 1), "s0p0", "report", report()) == text.replace("ranger", "z")
        assert await refusal(announced(s, "gone", 0, "left"), "s0p0", "report", report()) == (
            "peer gone is not announced at stage 0"
        )


async def test_a_peer_that_has_not_joined_takes_no_reports() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        s.peers["s0p0"].core.joined = False
        text = "this peer has not joined yet"
        assert await refusal(announced(s, "z", 0), "s0p0", "report", report()) == text
        s.peers["s0p0"].core.joined = True


async def test_a_good_report_is_answered_with_the_brief_of_the_stage() -> None:
    async with swarm(RUN, replicas=2) as s:
        await s.until_serving()
        member = announced(s, "z", 0)
        directive = await member.ask("s0p0", "report", report(), Directive)
        assert (directive.coordinator, directive.stage, directive.version, directive.run) == (
            "s0p0",
            0,
            0,
            RUN.id,
        )
        again = await member.ask("s0p0", "report", report(), Directive)
        assert again.number > directive.number
        await s.until(lambda: chief_of(s, "s0p1") == "s0p0")
        told = await member.ask("s0p1", "report", report(), Directive)
        assert told.coordinator == "s0p0", "who does not lead passes on what it was told"


async def test_a_member_that_goes_quiet_is_left_out() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        await announced(s, "z", 0).ask("s0p0", "report", report(), Directive)
        members = s.peers["s0p0"].coordination.protocol._coordinator.members
        assert "z" in members
        await s.until(lambda: "z" not in members)


async def test_a_liar_that_claims_everything_holds_a_step_up_until_it_is_quiet_and_no_longer() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        await announced(s, "z", 0).ask("s0p0", "report", report(step={"done": Bitmap(15)}), Directive)
        s.add_trainer("trainer")
        await s.until_finished()
        s.assert_each_counted_once()


# --- directives
# -------------------------------------------------------------------------------------------------


async def test_a_brief_for_another_stage_or_run_is_refused() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        stranger = s.add_stranger()
        text = f"a directive for stage 1 of run '{RUN.id}'; this is stage 0"
        directive = Directive(run=RUN.id, stage=1, coordinator="stranger", version=0)
        assert await refusal(stranger, "s0p0", "directive", directive) == text
        other = Directive(run="other", stage=0, coordinator="stranger", version=0)
        assert (
            await refusal(stranger, "s0p0", "directive", other)
            == "a directive for stage 0 of run 'other'; this is stage 0"
        )


@pytest.mark.parametrize("coordinator", ["stranger", "s0p0"])
async def test_nobody_but_the_coordinator_is_obeyed(coordinator: str) -> None:
    async with swarm(RUN) as s:
        await s.until_serving()
        await s.until(lambda: s.peers["s0p1"].coordination.directive is not None)
        with s.peers["s0p1"].core.device.books:
            s.step("s0p1").ledger.record(0)
        lie = Directive(
            run=RUN.id, stage=0, coordinator=coordinator, version=0, number=10**18,
            steps=(StepDirective(t=0, retract=Bitmap(1)),),
        )  # fmt: skip
        await s.add_stranger().send("s0p1", "directive", lie)
        assert s.peers["s0p1"].coordination.directive.number < 10**18


async def test_a_brief_that_was_overtaken_is_not_obeyed() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        peer = s.peers["s0p0"]
        await s.until(lambda: peer.coordination.directive is not None)
        newest = peer.coordination.directive
        protocol = peer.coordination.protocol
        protocol.directive_came(msgspec.structs.replace(newest, number=newest.number - 1), now=now_s())
        assert protocol.directive is newest
        protocol.directive_came(msgspec.structs.replace(newest, number=newest.number + 1), now=now_s())
        assert protocol.directive.number == newest.number + 1


async def test_a_plan_with_an_impossible_ledger_is_said_and_changes_nothing() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        members, ledgers = ("s0p0", "z"), (Bitmap(0), Bitmap(0x10))
        name = round_id(RUN.id, 0, 0, 0, members, ledgers, (4, 0))
        plan = Plan(round=name, number=0, members=members, ledgers=ledgers, parts=(4, 0))
        obey(
            s.peers["s0p0"],
            Directive(
                run=RUN.id, stage=0, coordinator="s0p0", version=0, steps=(StepDirective(t=0, plan=plan),)
            ),
        )
        said = "this peer does not take part: a ledger names a microbatch beyond 3"
        await s.until(lambda: said in s.voids())
        assert s.step("s0p0").ledger.frozen_for is None


# --- summaries and the picture of the run -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"run": "other"}, "a summary of stage 1 of run 'other'"),
        ({"stage": 2}, f"a summary of stage 2 of run '{RUN.id}'"),
        ({"stage": -1}, f"a summary of stage -1 of run '{RUN.id}'"),
        ({"version": 4}, "a summary of version 4 of a run of 3 steps"),
        ({"step": {"t": 10**12}}, "[1000000000000] are not open steps of a run of 3"),
        ({"step": {"unclaimed": Bitmap(1 << 792)}}, "the ledger names a microbatch beyond 3"),
        ({"step": {"unclaimed": Bitmap(0xFF)}}, "the ledger names a microbatch beyond 3"),
        ({"step": {"sqnorm": float("nan")}}, "an impossible squared norm, nan"),
        ({"commits": (Commit(t=99, total_sqnorm=1.0),)}, "a commit for step 99 of a run of 3 steps"),
        ({"commits": (Commit(t=0, total_sqnorm=-1.0),)}, "an impossible squared norm, -1.0"),
    ],
)
async def test_a_summary_that_cannot_be_true_is_refused_and_the_run_coordinator_lives(
    changes: dict[str, Any], text: str
) -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        assert await refusal(announced(s, "z", 1), "s0p0", "summary", summary(**changes)) == text
        s.add_trainer("trainer")
        await s.until_finished()
        s.assert_each_counted_once()


async def test_only_announced_members_may_speak_for_a_stage() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        text = "peer ranger is not announced at stage 1"
        assert await refusal(s.add_stranger(), "s0p0", "summary", summary()) == text


async def test_news_of_the_run_are_taken_from_the_run_coordinator_only() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        await s.until(lambda: s.peers["s1p0"].coordination.run_status.run_coordinator == "s0p0")
        stranger = s.add_stranger()
        for run_coordinator in ("stranger", "s0p0"):
            lie = RunStatus(
                run=RUN.id,
                version=2,
                commits=(Commit(t=0, total_sqnorm=0.0),),
                run_coordinator=run_coordinator,
            )
            await stranger.send("s1p0", "run", lie)
            assert s.peers["s1p0"].coordination.run_status.version == 0
        text = f"the status of run 'other'; this peer serves {RUN.id}"
        assert await refusal(stranger, "s1p0", "run", RunStatus(run="other")) == text


async def test_what_a_trainer_knew_before_the_run_went_back_holds_up_no_stage() -> None:
    """Once the power failed everywhere, and a stage waited for ever for what was lost (seed 1090)."""
    run = admitting(RUN)
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        first, second = s.add_stranger(TRAINER), s.add_stranger(OTHER)
        protocol = s.peers["s0p0"].coordination.protocol
        for trainer, version, trained in ((first, 2, 2), (second, 1, 2), (first, 0, 1), (second, 3, 3)):
            await trainer.ask("s0p0", "watch", Watch(run=run.id, version=version), Watched)
            assert protocol.trained.version == trained
        await s.add_stranger().ask("s0p0", "watch", Watch(run=run.id, version=3), Watched)
        await asyncio.sleep(WATCHED_S)
        await first.ask("s0p0", "watch", Watch(run=run.id, version=1), Watched)
        assert protocol.trained.version == 1, "one that is gone does not count for ever, nor do strangers"


async def test_who_watches_hears_at_once_of_what_is_new_and_in_a_while_of_nothing() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        stranger = s.add_stranger()
        text = f"this peer serves run {RUN.id}, not 'other'"
        assert await refusal(stranger, "s0p0", "watch", Watch(run="other")) == text
        seen = -1
        while True:
            watched = await stranger.ask("s0p0", "watch", Watch(run=RUN.id, seen=seen), Watched)
            if watched.revision == seen:
                break
            seen = watched.revision
        waiting = asyncio.create_task(stranger.ask("s0p0", "watch", Watch(run=RUN.id, seen=seen), Watched))
        s.add_trainer("trainer", window=1)
        assert (await waiting).revision >= seen
        await s.until_finished()
        last = await stranger.ask("s0p0", "watch", Watch(run=RUN.id, seen=seen), Watched)
        assert last.version == RUN.steps
        assert last.status.losses == tuple((t, -RUN.S * t / RUN.M) for t in range(RUN.steps))


async def test_another_run_is_not_told_how_this_one_is_doing() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        text = f"this peer serves run {RUN.id}, not 'other'"
        assert await refusal(s.add_stranger(), "s0p0", "status", AskStatus(run="other")) == text


async def test_the_losses_of_a_step_come_from_the_ledgers_in_the_order_of_the_microbatches() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        member, losses = announced(s, "z", 1), (0.5, 0.25)
        two = report(stage=1, step={"done": Bitmap(0b1010)})
        await member.ask("s1p0", "report", two, Directive, [struct.pack("<2d", *losses)])
        assert s.peers["s1p0"].coordination.protocol._coordinator.members["z"].losses == [[0.5, 0.25]]


async def test_the_mean_loss_of_a_step_is_the_same_bits_on_every_version_of_python() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        whole, losses = report(stage=1, step={"done": Bitmap(0b1111)}), (2.0**53, 1.0, 1.0, 0.0)
        await announced(s, "z", 1).ask("s1p0", "report", whole, Directive, [struct.pack("<4d", *losses)])
        assert s.peers["s1p0"].coordination.protocol._coordinator.losses == {0: (2.0**53 + 2.0) / 4}


async def test_a_stage_that_holds_a_step_whose_go_nobody_remembers_is_behind() -> None:
    """Its replicas took many steps while it slept, and died. Found by the simulation."""
    run = audit_run(stages=2, steps=9, microbatches_per_step=4)
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        s.kill("s0p0")
        sleeper = s.peers["s1p0"]
        step, protocol = sleeper.core.steps[0], sleeper.coordination.protocol
        step.promise("r", now=0.0)
        step.prepare(Prepared("r", 1.0, ""))
        for commits, behind in (((0,), False), ((3, 4, 5), True)):
            told = tuple(Commit(t=t, total_sqnorm=1.0) for t in commits)
            protocol._agreed.commits.clear()
            status = RunStatus(run=run.id, version=6, commits=told, run_coordinator="s0p0")
            protocol.run_status_came("s0p0", status, now=now_s())
            protocol.speak(now=now_s())
            protocol.ready(now=now_s())
            assert (protocol.stuck_s(now=now_s() + 1.0) > 0) is behind


async def test_who_is_past_a_step_is_not_waited_for_to_say_what_it_found() -> None:
    """What it has of the next step was taken for that one's: a stage was left behind for ever."""
    run = audit_run(stages=2, steps=50, microbatches_per_step=8)
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        s.add_trainer("trainer")
        core, coordination = s.peers["s0p0"].core, s.peers["s1p0"].coordination
        steps = core.steps
        await s.until(lambda: core.version in steps and steps[core.version].ledger.done.bit_count() == 2)
        t = core.version
        await coordination._ask_absent(t - 1, ["s0p0"])
        await coordination._ask_absent(t, ["s0p0"])
        assert core.version == t
        assert coordination.protocol.belief._excused == {t - 1: {"s0p0"}, t: set()}


async def test_who_serves_by_now_though_its_record_says_not_yet_is_not_done_without() -> None:
    async with swarm(audit_run(stages=2, steps=2), replicas=1) as s:
        await s.until_serving()
        coordination = s.peers["s1p0"].coordination
        for state, excused in (("joining", set[str]()), ("serving", {"s0p0"})):
            s.network.announce(msgspec.structs.replace(s.network.records["s0p0"], state=state))
            await s.network.peers["s1p0"].directory.refresh()
            await coordination._ask_absent(0, ["s0p0"])
            assert coordination.protocol.belief._excused == {0: excused}


# --- the roll -----------------------------------------------------------------------------------------------


async def test_strangers_cannot_make_a_peer_ask_the_directory_for_ever() -> None:
    async with swarm(RUN, replicas=1) as s:
        await s.until_serving()
        asked: list[object] = []
        directory = s.network.peers["s0p0"].directory
        refresh = directory.refresh

        async def counted(stages: Any = None) -> Any:
            asked.append(stages)
            return await refresh(stages)

        directory.refresh = counted  # type: ignore[method-assign]
        membership = Membership(directory)
        for _ in range(20):
            with pytest.raises(NotNow, match="peer nobody is not announced at stage 1"):
                await membership.require("nobody", 1)
        assert asked == [{1}], "that stage only"
        await membership.require("s1p0", 1)
        assert asked == [{1}]


async def test_a_peer_watches_its_stage_and_those_beside_it_and_a_coordinator_stage_0() -> None:
    run = audit_run(stages=3, steps=3, microbatches_per_step=4)
    async with swarm(run) as s:
        await s.until_serving()
        watched = {name: s.network.peers[name].directory for name in ("s0p0", "s2p0", "s2p1")}
        # Who came first in stage 2 speaks for it with the run coordinator. Before they see each other, both
        # do.
        wanted = {"s0p0": {0, 1}, "s2p0": {0, 1, 2}, "s2p1": {1, 2}}
        await s.until(lambda: {name: there.watched for name, there in watched.items()} == wanted)


async def test_where_answers_are_audited_a_peer_watches_the_stage_at_which_chains_begin() -> None:
    async with swarm(audited_run(stages=4), replicas=1) as s:
        await s.until_serving()
        await s.until(lambda: s.network.peers["s3p0"].directory.watched == {0, 1, 2, 3})


async def test_who_serves_says_how_fast_its_device_is_before_there_is_work() -> None:
    async with swarm(RUN) as s:
        await s.until_serving()
        await s.until(lambda: all(peer.status.rehearsed_s for peer in s.peers.values()))
        status = await s.add_stranger().ask("s1p0", "status", AskStatus(run=RUN.id), PeerStatus)
        assert status.computed == 0 and status.speed > 0.0


async def test_who_watches_by_a_peer_and_which_weights_it_holds_are_in_its_status() -> None:
    async with swarm(RUN) as s:
        await s.until_serving()
        trainer = s.add_stranger()
        await s.until(lambda: s.peers["s0p0"].core.digest)
        status = await trainer.ask("s0p0", "status", AskStatus(run=RUN.id), PeerStatus)
        assert (status.trainers, status.digest) == ((), s.peers["s0p0"].core.digest)
        assert status.kind == s.peers["s0p0"].core.kind != ""
        await trainer.ask("s0p0", "watch", Watch(run=RUN.id), Watched)
        status = await trainer.ask("s0p0", "status", AskStatus(run=RUN.id), PeerStatus)
        assert status.trainers == ("stranger",)


async def test_those_who_watch_are_forgotten_and_never_many() -> None:
    async with swarm(RUN) as s:
        await s.until_serving()
        coordination = s.peers["s0p0"].coordination
        names = [f"stranger {i:02d}" for i in range(MAX_WATCHERS + 2)]
        for name in names:
            await s.add_stranger(name).ask("s0p0", "watch", Watch(run=RUN.id), Watched)
        assert coordination.trainers == tuple(sorted(names[2:]))
        await asyncio.sleep(WATCHED_S + 0.1)
        assert coordination.trainers == ()


async def test_in_a_run_that_names_trainers_no_other_is_taken_for_one() -> None:
    """A crowd that watches has a complete run go back to a checkpoint, and hides what trainers know."""
    run = admitting(RUN)
    async with swarm(run, replicas=1) as s:
        await s.until_serving()
        coordination = s.peers["s0p0"].coordination
        trainer = s.add_stranger(TRAINER)
        await trainer.ask("s0p0", "watch", Watch(run=run.id, version=2), Watched)
        for number in range(MAX_WATCHERS):
            await s.add_stranger(f"stranger {number:02d}").ask("s0p0", "watch", Watch(run=run.id), Watched)
        assert coordination.trainers == (TRAINER,)
        assert coordination.protocol.trained.version == 2

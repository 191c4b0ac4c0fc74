"""What a trainer believes of the run, and of the answers to its microbatches."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from peers.clock import now_s
from peers.events import PeerLost, RolledBack
from peers.islands.trainers import IslandTrainers
from peers.sim.network import SimSigner
from peers.trainer import Trainer, TrainerSettings
from peers.trainer.run_watch import ASKED_S, SAME_S
from peers.trainer.trainer import AWAKE_S, SLEPT_S, SLOW_S
from swarm.errors import BadAnswer, Busy, PeerGone, Refused, Stale, SwarmError
from swarm.ids import Generation, Microbatch, Position
from swarm.manifest import IslandsSpec, audit_run
from swarm.policy.backoff import BUDGET_ROUNDS, FIRST_REST_S
from swarm.protocol.ledger import Bitmap
from swarm.protocol.messages import RunStatus, StepLacking
from swarm.protocol.worklist import REPLAY_AFTER_S, WorkItem
from swarm.records import PeerRecord
from swarm.wire.messages import Hop, Located, PeerStatus, Watched, Work, WorkDone, unpack
from swarm.wire.receipts import Answered, give_receipt
from tests.peers.alone import Line, Records
from tests.peers.sybils import admitting

pytestmark = pytest.mark.virtual_time

RUN = audit_run(stages=2, steps=8, microbatches_per_step=4)
FIRST, BACK = Generation(), Generation(1, 0)
ALL = Bitmap(0b1111)


class Rows:
    def batch(self, offsets: list[int]) -> np.ndarray:
        return np.zeros((len(offsets), RUN.data.sequence_length + 1), dtype=np.uint8)


def trainer() -> Trainer:
    line, records = Line("trainer"), Records()
    return Trainer(RUN, Rows(), line, records, TrainerSettings(), lambda _: None)  # type: ignore[arg-type]


def listening() -> tuple[Any, Records, list[str]]:
    """A trainer, what it knows of others, and what it says."""
    this: Any = trainer()
    this._directory, said = Records(), list[str]()
    this._emit = lambda event: said.append(event.words())
    return this, this._directory, said


async def test_a_stage_whose_peers_are_paused_is_not_called_lost() -> None:
    this, records, said = listening()
    record = PeerRecord(peer="p", run=RUN.id, stage=1, state="serving", version=0)
    records.known[:] = [msgspec.structs.replace(record, state="paused")]
    this._set_peers(1, [record])
    this._set_peers(1, [])
    assert said == ["stage 1 has only 1 paused peer: the run waits until one resumes"]
    records.known[:] = []
    this._set_peers(1, [record])
    this._set_peers(1, [])
    assert "has lost all its peers" in said[-1]


async def test_what_the_trainer_of_an_island_says_of_a_stage_names_its_cell() -> None:
    run, heard = replace(RUN, steps=9, islands=IslandsSpec(count=2, local_steps=2)), list[Any]()
    line: Any = Line("trainer")
    both: Any = IslandTrainers(run, Rows(), line, Records(), TrainerSettings(), heard.append)  # type: ignore[arg-type]
    both.trainers[1]._emit(PeerLost(peer="p", stage=1, why="it is gone"))
    both.trainers[1]._emit(RolledBack(stage=-1, step=0))
    assert [event.stage for event in heard] == [3, -1]


def hears(this: Any, version: int, generation: Generation = FIRST, **status: Any) -> None:
    told = RunStatus(**{"run": RUN.id, "generation": generation, "version": version, **status})
    this._watch.learn("p", Watched(revision=1, generation=generation, version=version, status=told))


async def test_after_the_run_went_back_a_peer_that_lags_behind_is_not_followed() -> None:
    this: Any = trainer()
    hears(this, 3)
    hears(this, 0, BACK)
    assert (this._watch.version, this._watch.generation) == (0, BACK)
    hears(this, 4)
    assert (this._watch.version, this._watch.generation) == (0, BACK)


async def test_no_peer_says_the_loss_of_a_step_that_is_to_come() -> None:
    this, said = trainer(), list[Any]()
    this._emit = said.append
    hears(this, 3, losses=((-1, 9.0), (2, 1.0), (3, 9.0), (4, 9.0)))
    hears(this, 4, losses=((2, 9.0), (3, 2.0)))
    hears(this, 5)
    assert [(event.t, event.loss) for event in said] == [(3, 2.0), (4, None)]


async def test_what_some_microbatches_come_to_is_not_told_as_the_loss_of_a_step() -> None:
    """Of two trainers the one that was not told gave the mean of those that it had run."""
    this, said = trainer(), list[Any]()
    this._emit = said.append
    hears(this, 0)
    for version, ran in ((1, RUN.M - 1), (2, RUN.M)):
        for m in range(ran):
            this._answered(Microbatch(version - 1, m), ["p"], WorkDone(loss=1.0, tensors=(), hops=()), 0.1)
        hears(this, version)
    assert [(event.loss, len(event.losses)) for event in said] == [(None, 0), (1.0, RUN.M)]


async def test_a_trainer_keeps_no_loss_of_a_step_that_is_over() -> None:
    """What was answered after the news of its step was kept for ever, and what each step came to."""
    this: Any = trainer()
    for version in range(1, 8):
        hears(this, version, losses=((version - 1, 1.0),))
        this._answered(Microbatch(version - 1, 0), ["p"], WorkDone(loss=1.0, tensors=(), hops=()), 0.1)
    assert not this.losses and this.step_losses == {6: 1.0}


async def test_a_trainer_that_has_run_something_does_not_say_why_it_has_run_nothing() -> None:
    for ran in (False, True):
        this, _, said = listening()
        hears(this, 7, held_by_all=7)
        if ran:
            this._answered(Microbatch(7, 0), ["p"], WorkDone(loss=1.0, tensors=(), hops=()), 0.1)
        hears(this, 8, held_by_all=8)
        await this.run()
        assert ("the run has taken all of its 8 steps" in said) is not ran


async def test_a_trainer_forgets_who_said_that_a_step_is_over_or_refused_of_it_when_it_is() -> None:
    """Peers come and go, each under another name; what one refuses another trainer has done perhaps."""
    this: Any = trainer()
    for version in range(1, 8):
        this._past[f"p{version}"] = this._attempts[Microbatch(version - 1, 0)] = version - 1
        this._refusals[Microbatch(version - 1, 0)] = {f"p{version}": Refused("no")}
        hears(this, version)
    assert not this._past and not this._attempts and not this._refusals


async def test_what_another_generation_lacked_is_not_run() -> None:
    this: Any = trainer()
    hears(this, 0, BACK)
    old = RunStatus(run=RUN.id, version=0, held_by_all=0, lacking=(StepLacking(t=0, by_stage=(ALL, ALL)),))
    this._watch.learn("p", Watched(revision=2, generation=BACK, version=0, status=old))
    assert this._watch.held_by_all == -1 and this._todo.next_wakeup(0, now=0.0) is None
    hears(this, 0, BACK, held_by_all=0, lacking=old.lacking)
    assert this._watch.held_by_all == 0 and this._todo.next_wakeup(0, now=0.0) is not None


async def test_what_a_peer_says_of_steps_that_are_far_off_takes_no_room() -> None:
    """One message of 1 MB has room for 50,000 steps, each of which took the order of all its microbatches."""
    this: Any = trainer()
    for t in range(RUN.steps):
        hears(this, 0, lacking=(StepLacking(t=t, by_stage=(ALL, ALL)),))
    hears(this, 0, lacking=tuple(StepLacking(t=t, by_stage=(ALL, ALL)) for t in range(RUN.steps)))
    assert list(this._todo._steps) == [0, 1]


async def test_a_trainer_offers_nothing_before_it_was_told_how_far_the_run_is() -> None:
    this: Any = trainer()
    this._start_work()
    assert not this._running
    hears(this, 5)
    this._start_work()
    assert set(this._running.values()) == {5}, "not steps that are long over"
    for task in this._running:
        task.cancel()


async def test_a_trainer_asks_the_only_one_there_for_news_though_it_cost_too_much() -> None:
    """Else it hears only after the rest that the run went back, and nothing is done (seed 903421)."""
    line, records = Line("trainer"), Records()
    this: Any = Trainer(RUN, Rows(), line, records, TrainerSettings(), lambda _: None)  # type: ignore[arg-type]
    records.known.append(PeerRecord(peer="ann", run=RUN.id, stage=0, state="serving", version=0))
    line.answers["watch"] = lambda peer, header: Watched(
        generation=FIRST, version=0, revision=line.calls["watch"], status=RunStatus(run=RUN.id)
    )
    this._start_work = this._refresh_peers  # it waits for what others lack
    training = asyncio.create_task(this.run())
    await asyncio.sleep(5.0)
    line.calls.clear()
    this._router.backoff.charge("ann", t=0, since_s=now_s(), now=now_s(), rounds=BUDGET_ROUNDS)
    await asyncio.sleep(FIRST_REST_S / 2)
    training.cancel()
    assert line.calls["watch"]


async def test_a_peer_that_says_that_nothing_is_lacking_holds_a_trainer_up_for_seconds_only() -> None:
    """Where the run is it says truly, so that is borne out: no microbatch of the step would ever be begun."""
    line, records = Line("trainer"), Records()
    this: Any = Trainer(RUN, Rows(), line, records, TrainerSettings(), lambda _: None)  # type: ignore[arg-type]
    for peer in ("ann", "bob"):
        records.known.append(PeerRecord(peer=peer, run=RUN.id, stage=0, state="serving", version=0))

    def watched(peer: str, header: bytes) -> Watched:
        lacking = StepLacking(t=0, by_stage=(Bitmap(0),) * 2 if peer == "ann" else (ALL, ALL))
        told = RunStatus(run=RUN.id, lacking=(lacking,))
        return Watched(generation=FIRST, version=0, revision=line.calls["watch"], status=told)

    begun = set[int]()

    def works(peer: str, header: bytes) -> WorkDone:
        begun.add(unpack(header, Work).t)
        return WorkDone(loss=0.0)

    line.answers |= {"watch": watched, "work": works}
    training = asyncio.create_task(this.run())
    await asyncio.sleep(SAME_S / 2)
    assert 0 not in begun
    await asyncio.sleep(SAME_S)
    training.cancel()
    assert 0 in begun


async def test_where_the_run_is_all_stages_bear_out_each_leap_and_the_rest_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    this: Any = trainer()

    async def position(*_: object) -> Position:
        return Position(FIRST, 4)

    async def is_true(version: int, generation: Generation = FIRST, **status: Any) -> bool:
        told = RunStatus(run=RUN.id, **status)
        said = Watched(revision=1, generation=generation, version=version, status=told)
        return await this._watch.is_borne_out(said)

    monkeypatch.setattr("peers.trainer.run_watch.run_position", position)
    assert await is_true(0) and await is_true(5)
    assert not await is_true(6) and not await is_true(0, BACK) and not await is_true(4, held_by_all=8)
    assert await is_true(1), "a step further, and they were asked just now"
    await asyncio.sleep(ASKED_S)
    assert not await is_true(1), "all had 4 by then"
    this._watch.version = 5
    assert not await is_true(6) and await is_true(4)


async def test_a_trainer_stays_until_all_stages_have_the_last_version() -> None:
    this: Any = trainer()
    training = asyncio.create_task(this.run())
    hears(this, RUN.steps, held_by_all=RUN.steps - 1)
    await asyncio.sleep(60.0)
    assert not training.done()
    hears(this, RUN.steps, held_by_all=RUN.steps)
    await asyncio.wait_for(training, 60.0)


@pytest.mark.parametrize(
    ("reached", "ends"),
    [
        (((FIRST, 8), (FIRST, 8)), True),
        (((FIRST, 8), (FIRST, 7)), False),
        (((FIRST, 8), None), False),
        (((FIRST, 8), (BACK, 0)), False),
    ],
    ids=["all", "behind", "silent", "went back"],
)
async def test_a_trainer_leaves_though_no_run_coordinator_says_that_all_is_over(
    reached: tuple[tuple[Generation, int] | None, ...], ends: bool
) -> None:
    """One that answers no summary hears of no other stage, and after the last step nobody else has a turn.
    A stage that was lost just then, and begins anew, needs the trainer.
    """
    line, records = Line("trainer"), Records()
    this: Any = Trainer(RUN, Rows(), line, records, TrainerSettings(), lambda _: None)  # type: ignore[arg-type]
    for stage, peer in enumerate(("ann", "bob")):
        records.known.append(PeerRecord(peer=peer, run=RUN.id, stage=stage, state="serving", version=8))

    def status(peer: str, header: bytes) -> PeerStatus:
        stage = ("ann", "bob").index(peer)
        if (at := reached[stage]) is None:
            raise PeerGone(peer, "cannot be reached")
        generation, version = at
        return PeerStatus(
            peer=peer, stage=stage, state="serving", device="", generation=generation, version=version,
            since=0.0,
        )  # fmt: skip

    def watched(peer: str, header: bytes) -> Watched:
        told = RunStatus(run=RUN.id, version=8)
        return Watched(generation=FIRST, version=8, revision=line.calls["watch"], status=told)

    line.answers |= {"watch": watched, "status": status}
    training = asyncio.create_task(this.run())
    await asyncio.sleep(SAME_S - 1.0)
    assert not training.done()
    await asyncio.sleep(SAME_S)
    assert training.done() == ends
    training.cancel()


@pytest.mark.parametrize(
    ("version", "generation", "status"),
    [
        (RUN.steps + 1, Generation(), {}),
        (-1, Generation(), {}),
        (0, Generation(-1, 0), {}),
        (0, Generation(1, 3), {}),
        (0, Generation(), {"lacking": (StepLacking(t=0, by_stage=(ALL, Bitmap(1 << 400_000))),)}),
    ],
)
async def test_news_that_cannot_be_change_nothing(
    version: int, generation: Generation, status: dict[str, Any]
) -> None:
    this: Any = trainer()
    with pytest.raises(BadAnswer):
        hears(this, version, generation, **status)
    assert (this._watch.version, this._todo.next_wakeup(0, now=0.0)) == (0, None)


async def test_after_a_sleep_of_its_own_no_stage_is_called_lost_at_once() -> None:
    this, records, said = listening()
    record = PeerRecord(peer="p", run=RUN.id, stage=1, state="serving", version=0)
    records.known[:] = [record]
    this._refresh_peers()
    this._looked_s -= SLEPT_S + 50.0  # as if it had not been asked since
    records.known[:] = []
    for _ in range(3):
        this._refresh_peers()
    assert said == [
        "this program stood still for 60 s (its machine slept, had too much to do, or set its clock): it "
        "looks for its peers anew"
    ]
    records.known[:] = [record]
    this._refresh_peers()
    records.known[:] = []
    for _ in range(5):
        await asyncio.sleep(AWAKE_S / 5)
        this._refresh_peers()
    assert len(said) == 2 and said[1].startswith("stage 1 has lost all its peers")


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 1e31])
async def test_a_loss_that_is_none_is_the_peers_fault(loss: float) -> None:
    this: Any = trainer()
    this._transport.answers["work"] = lambda *_: WorkDone(loss=loss)
    with pytest.raises(BadAnswer, match=r"malformed WorkDone header: .* `\$\.loss`"):
        await this._call(["p"], WorkItem(Microbatch(0, 0), -1, replay=False), ([], []))


async def test_times_of_an_answer_that_cannot_be_reach_no_router() -> None:
    this: Any = trainer()
    hears(this, 0)
    for stage in range(RUN.S):
        this._router.set_peers(stage, ["p"])
    wrong = (float("nan"), -1.0, 1e9)
    hops = tuple(Hop(stage=0, peer="p", own_s=own_s, compute_s=0.0) for own_s in wrong)
    for hop in hops:
        this._transport.answers["work"] = lambda *_, hop=hop: WorkDone(loss=0.0, hops=(hop,))
        await this._microbatch(WorkItem(Microbatch(0, 0), -1, replay=False))
    assert not this._router._queue_of(0).known["p"].measured


async def test_a_peer_gets_no_more_than_its_links_carry_however_fast_its_device_is() -> None:
    this: Any = trainer()
    hears(this, 0)
    for stage in range(RUN.S):
        this._router.set_peers(stage, ["p"])
    hops = tuple(
        Hop(stage=stage, peer="p", own_s=0.01, compute_s=0.01, latency_s=1.0 * stage, rtt_s=0.2 * stage)
        for stage in range(RUN.S)
    )
    now = now_s()
    for _ in range(4):
        this._learn_speeds(Microbatch(0, 0), ["p"] * RUN.S, WorkDone(loss=0.0, hops=hops), 2.0)
    found = [this._router.route(stage, now=now).work_s for stage in range(RUN.S)]
    assert found == pytest.approx([0.4] * RUN.S, rel=0.02), "a second, less the round trip, for both ways"


async def test_what_was_computed_a_moment_ago_is_not_run_again_for_a_report_that_lags() -> None:
    this: Any = trainer()
    hears(this, 0)
    this._todo.next(0, now=0.0)
    this._todo.finished(Microbatch(0, 0))
    hears(this, 0, lacking=(StepLacking(t=0, by_stage=(Bitmap(1), Bitmap(1))),))
    assert this._todo.next_wakeup(0, now=0.0) == pytest.approx(REPLAY_AFTER_S, abs=0.01)


async def test_what_the_first_stage_did_not_count_goes_to_another_peer_and_so_do_later_steps() -> None:
    """One of two that was left out took half of each step all the same, and each was sent to it again."""
    this: Any = trainer()
    hears(this, 0)
    for stage in range(RUN.S):
        this._router.set_peers(stage, ["a", "z"])
    asked = list[str]()

    def work(peer: str, _: bytes) -> WorkDone:
        asked.append(peer)
        return WorkDone(loss=0.0, hops=(Hop(stage=0, peer=peer, own_s=0.0, compute_s=0.0),))

    this._transport.answers["work"] = work
    this._transport.answers["locate"] = lambda peer, _: Located(has=False, left_out=("z",) * (peer == "a"))
    for t in range(2):
        this._first.note_answered(Microbatch(t, 0), "z")
        for _ in range(6):
            await this._microbatch(WorkItem(Microbatch(t, 0), 0, replay=True))
            this._first._answered = {t: {0: {"z"}}}
        assert set(asked) == {"a"}
    for m in range(6):
        await this._microbatch(WorkItem(Microbatch(1, m), -1, replay=False))
    assert set(asked) == {"a"}
    this._router.failed("a", now=now_s())
    await this._microbatch(WorkItem(Microbatch(1, 7), -1, replay=False))
    assert asked[-1] == "z"


async def test_what_is_over_for_one_peer_of_the_first_stage_goes_to_another_that_never_answered() -> None:
    """One took the step before it saw the other, whose word weighs more: the run is still at this step."""
    this: Any = trainer()
    hears(this, 0)
    for stage in range(RUN.S):
        this._router.set_peers(stage, ["ahead", "behind"])
    this._router.answered(0, "ahead", 0.01)
    asked = list[str]()

    def work(peer: str, _: bytes) -> WorkDone:
        asked.append(peer)
        if peer == "ahead":
            raise Stale("step 0 is over", version=1)
        return WorkDone(loss=0.0)

    this._transport.answers["work"] = work
    mb = Microbatch(0, 0)
    this._attempts[mb] = 1
    for _ in range(2):
        await this._microbatch(WorkItem(mb, -1, replay=True))
    assert asked == ["ahead", "behind"]
    this._past["behind"] = 0
    await this._microbatch(WorkItem(Microbatch(0, 1), -1, replay=True))
    assert len(asked) == 3, "all say so: perhaps that is no longer true"


class Late(Line):
    """Some answer after so many seconds."""

    def __init__(self, peer_id: str, **late_s: float) -> None:
        super().__init__(peer_id)
        self.late_s = late_s

    async def call(self, peer: str, *what: Any, **how: Any) -> Any:
        await asyncio.sleep(self.late_s.get(peer, 0.0))
        return await super().call(peer, *what, **how)


async def asked_of_another(error: SwarmError, *others: str) -> tuple[Any, list[str], float]:
    """A trainer, whom it asked for a microbatch that `ann` is late with and `bob` says no to at first, and
    how long that took; `others` would answer at once.
    """
    line, asked = Late("trainer", ann=9.0), list[str]()
    this: Any = Trainer(RUN, Rows(), line, Records(), TrainerSettings(), lambda _: None)  # type: ignore[arg-type]
    hears(this, 0)
    for stage, there in enumerate((["ann", "bob", *others], ["p"])):
        this._router.set_peers(stage, there)
        for peer in there * 3:
            this._first.limits.answered(0.1, now=now_s())
            this._router.answered(stage, peer, 0.5 if peer == "eve" else 0.1, 0.1)

    def work(peer: str, _: bytes) -> WorkDone:
        asked.append(peer)
        if peer == "bob" and asked.count(peer) == 1:
            raise error
        return WorkDone(loss=0.0, hops=(Hop(stage=0, peer=peer, own_s=0.1, compute_s=0.1),))

    line.answers["work"] = work
    this._past = dict.fromkeys(("bob", *others), 0)  # so that it is sent to `ann`
    began_s, mb = now_s(), Microbatch(0, 0)
    running = asyncio.ensure_future(this._microbatch(WorkItem(mb, -1, replay=False)))
    await asyncio.sleep(0.1)
    this._past.clear()
    await running
    return this, asked, now_s() - began_s


async def test_who_is_asked_for_another_that_is_late_and_does_not_answer_is_a_fault_as_any_other() -> None:
    """Nothing was noted of it: of two that lie one was late, and the other one answered first calls only."""
    this, asked, _ = await asked_of_another(PeerGone("bob", "cannot be reached"))
    assert "bob" in asked
    assert this._router.backoff.is_failing("bob") and this._router.backoff.was_charged("bob", t=0)


@pytest.mark.parametrize(
    ("error", "by"),
    [
        (PeerGone("bob", "cannot be reached"), "eve"),
        (Stale("step 0 is over", version=1), "eve"),
        (Busy("no more fit"), "eve"),
        (Busy("no more fit"), "bob"),
    ],
)
async def test_for_one_that_is_late_others_are_asked_until_one_answers(error: SwarmError, by: str) -> None:
    """The second one said that it is busy, and the late one was waited for."""
    _, asked, took_s = await asked_of_another(error, *{by} - {"bob"})
    assert asked == ["bob", by] and took_s < 3.0


async def test_of_a_step_that_takes_minutes_the_trainer_says_now_and_then_how_far_it_is() -> None:
    """Else nothing is seen of it, and who waits takes it for a hang."""
    this: Any = trainer()
    said = list[str]()
    this._emit = lambda event: said.append(event.words())
    hears(this, 0)
    for stage in range(RUN.S):
        this._router.set_peers(stage, ["p"])
    this._transport.answers["work"] = lambda *_: WorkDone(loss=0.0)
    for m, wait_s in enumerate((SLOW_S - 2, 3, 5, SLOW_S)):
        await asyncio.sleep(wait_s)
        await this._microbatch(this._todo.next(0, now=now_s()))
        assert len(said) == (0, 1, 1, 2)[m]
    assert said == [
        "step 0: 2 of 4 microbatches answered after 31 s",
        "step 0: 4 of 4 microbatches answered after 66 s",
    ]


def through(first: str, work_s: float, *, behind: str = "p", upload_s: float = 0.0) -> WorkDone:
    """What one of stage 0 answers, and says of a peer behind it."""
    at = ((0, first, 0.01, 0.0), (1, behind, work_s, upload_s))
    hops = [Hop(stage=s, peer=p, own_s=own_s, compute_s=own_s, upload_s=up_s) for s, p, own_s, up_s in at]
    return WorkDone(loss=0.0, hops=tuple(hops))


async def told_by(this: Any, done: WorkDone, route: tuple[str, ...] = ("ann", "p")) -> None:
    this._learn_speeds(Microbatch(0, 0), route, done, 10.0)


async def test_one_that_lies_about_the_time_of_another_makes_it_neither_slow_nor_fast() -> None:
    """It got a fifth of its work, and where the liar said hours nothing for as long."""
    this: Any = trainer()
    this._directory = records = Records()
    records.known.append(PeerRecord(peer="p", run=RUN.id, stage=1, state="serving", version=0, speed=4.0))
    this._router.set_peers(1, ["p", "q"])
    known = this._router._queue_of(1).known["p"]
    for lie_s in (9.0, 1e-6):
        for _ in range(12):
            await told_by(this, through("ann", 0.25))
            await told_by(this, through("liar", lie_s, upload_s=1e6 if lie_s > 1.0 else 0.0))
            await told_by(this, through("liar", lie_s))
        assert known.work_s == 0.25
    for _ in range(20):
        await told_by(this, through("liar", 1.0, upload_s=1e6))
    assert known.work_s == 10.0, "no more than all of it took"
    for _ in range(3):
        await told_by(this, through("ann", 0.5))
    for _ in range(20):
        await told_by(this, through("bob", 0.5))
    assert known.work_s == 0.5, "it became slower, as all say"


async def test_who_passes_an_answer_on_names_no_peer_that_neither_was_asked_nor_signed_it() -> None:
    this: Any = trainer()
    run = this._run = admitting(RUN)
    this._router.set_peers(1, ["p", "q"])
    known, mb = this._router._queue_of(1).known, Microbatch(0, 0)
    ann = through("ann", 0.1).hops[0]
    this._router.set_peers(0, ["ann"])
    this._router.answered(0, "ann", 0.1)

    def signed(name: str, *, by: str) -> WorkDone:
        receipt = give_receipt(SimSigner(by), run.id, Answered(1, *mb, b"i", b"", b"", b"g", 0.0))
        hop = Hop(stage=1, peer=name, own_s=0.1, compute_s=0.1, receipt=receipt)
        return WorkDone(loss=0.0, hops=(ann, hop))

    for done in (through("ann", 0.1, behind="q"), through("ann", 0.1), signed("q", by="ann")):
        await told_by(this, done)
        assert not (known["p"].measured or known["q"].measured)
    await told_by(this, signed("q", by="q"))
    assert known["q"].measured
    await told_by(this, signed("p", by="p"))
    await told_by(this, through("ann", 0.1))
    assert known["p"].answers == 2, "it has answered before, and was asked to"
    this._router.set_peers(0, ["ann", "p"])
    elsewhere = msgspec.structs.replace(through("ann", 0.1).hops[1], stage=0)
    await told_by(this, WorkDone(loss=0.0, hops=(ann, elsewhere)))
    assert not this._router.knows(0, "p"), "of its stage alone"


async def test_the_step_after_counts_by_its_own_microbatches_in_a_batch_warmup() -> None:
    """With delayed updates. Slow peers were given the first, small steps, as if whole ones followed."""
    batch = replace(RUN.batch, microbatches_per_step=8, warmup_steps=4, warmup_microbatches=1)
    run, records, left = replace(RUN, batch=batch, delayed_updates=True), Records(), list[int]()
    this: Any = Trainer(run, Rows(), Line("me"), records, TrainerSettings(), lambda _: None)  # type: ignore[arg-type]
    records.known.append(PeerRecord(peer="ann", run=run.id, stage=0, state="serving", version=0))
    this._refresh_peers()
    this._pace.horizon_s = lambda count: left.append(count) or 1.0
    for t in (0, 3, 4):
        this._route(Microbatch(t, 0))
    assert left == [1 + 2, 6 + 8, 8 + 8]

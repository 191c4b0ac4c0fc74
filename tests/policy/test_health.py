"""What a dashboard knows: looks in, a picture and its alerts out."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from swarm.errors import MAX_WORDS_CHARS, Refused, clean
from swarm.ids import Generation
from swarm.manifest import IslandsSpec, Run, demo_run
from swarm.monitoring import alerts, validation
from swarm.monitoring.aggregator import MAX_VERSIONS, MAX_WORKERS, Aggregator
from swarm.monitoring.health import Observation, PeerHealth, PeerTraffic, SwarmHealth
from swarm.monitoring.history import MAX_POINTS
from swarm.records import NO_STAGE, PeerRecord
from swarm.wire.messages import LedgerCounts, LinkStatus, PastStep, PeerStatus

RUN = demo_run(stages=2, steps=40)
START = 1_000_000.0


def record(peer: str, stage: int, **more: object) -> PeerRecord:
    usual = PeerRecord(
        peer=peer, run=RUN.id, stage=stage, state="serving", version=3, since=START - 90, speed=2.0
    )
    return msgspec.structs.replace(usual, **more)


def status(peer: str, stage: int, **more: Any) -> PeerStatus:
    """`loss`: of the step to `of`, or to its version."""
    if "loss" in more:
        of, took_s = more.pop("of", more["version"]), more.pop("took_s", 0.0)
        more["past"] = (PastStep(version=of, took_s=took_s, loss=more.pop("loss")),)
    usual = PeerStatus(
        peer=peer, stage=stage, version=3, state="serving", device="cpu", done=5, inflight=2, max_inflight=4,
        speed=2.0, computed=70, coordinator="", audit=LedgerCounts(), since=START - 90,
    )  # fmt: skip
    return msgspec.structs.replace(usual, **more)


FOUR = tuple(record(name, stage) for name, stage in (("a", 0), ("b", 0), ("c", 1), ("d", 1)))


class Seen:
    """An observer, and who there is: `version` makes all of them say that they are there."""

    def __init__(self, *records: PeerRecord, run: Run = RUN) -> None:
        self.aggregator = Aggregator(run)
        self.records = {r.peer: r for r in records or FOUR}
        self.now = START
        self.look(records=tuple(self.records.values()))

    def look(self, after_s: float = 1.0, **what: object) -> SwarmHealth:
        self.now += after_s
        self.aggregator.observe(Observation(at=self.now, **what))  # type: ignore
        return self.aggregator.health(now=self.now)

    def say(self, after_s: float = 1.0, **more: object) -> SwarmHealth:
        """Everybody answers, with these fields."""
        if "loss" in more:
            more["took_s"] = after_s
        told = tuple(
            status(r.peer, r.stage, **{"since": r.since, **more})
            for r in self.records.values()
            if r.stage != NO_STAGE
        )
        return self.look(after_s, statuses=told)

    def gone(self, *names: str) -> SwarmHealth:
        """Their records run out."""
        for name in names:
            del self.records[name]
        return self.look(gone=names)


def texts(health: SwarmHealth) -> list[str]:
    return [alert.text for alert in health.alerts]


def happened(health: SwarmHealth) -> list[tuple[str, str]]:
    return [(line.kind, line.text) for line in health.happenings]


def peer(health: SwarmHealth, name: str) -> PeerHealth:
    return next(one for one in health.peers if one.peer == name)


# --- where the run is ---------------------------------------------------------------------------------------


def test_the_run_is_where_most_say_it_is_and_a_liar_is_doubted() -> None:
    seen = Seen()
    for version in (3, 4, 5):
        seen.say(8.0, version=version, loss=3.0)
    lie = status("d", 1, version=40, loss=-7.0, of=6)
    told = (*(status(n, s, version=6, loss=2.5) for n, s in (("a", 0), ("b", 0), ("c", 1))), lie)
    health = seen.look(statuses=told)
    assert (health.version, health.loss) == (6, 2.5)
    assert peer(health, "d").inconsistencies == ("says it is at version 40, the run is at 6",)
    assert "peer d: says it is at version 40, the run is at 6" in texts(health)


def test_who_is_asked_a_moment_later_in_a_quick_run_is_not_doubted() -> None:
    seen = Seen()
    for version in range(4, 12):
        seen.say(0.5, version=version)
    health = seen.look(statuses=(status("d", 1, version=30),))
    assert (health.version, peer(health, "d").inconsistencies) == (11, ())


def test_strangers_that_are_more_move_neither_the_step_nor_the_loss_where_others_have_voice() -> None:
    """Five of nine answers are invented."""
    strangers = tuple(record(f"l{i}", i % 2) for i in range(5))
    seen = Seen(*FOUR, *strangers)
    seen.look(voice={"a": 30, "b": 100, "c": 40})

    def told(version: int) -> tuple[PeerStatus, ...]:
        honest = [status(r.peer, r.stage, version=version, loss=2.5) for r in FOUR]
        lies = [status(r.peer, r.stage, version=9, loss=77.0, of=version - 1) for r in strangers]
        return (*honest, *lies)

    for version in (5, 6):
        health = seen.look(statuses=told(version))
        assert (health.version, health.loss) == (version, 2.5)
        assert [stage.version for stage in health.stages] == [version, version]
    assert {peer.peer: peer.voice for peer in health.peers if peer.voice} == {"a": 30, "b": 100, "c": 40}


def test_the_most_voice_says_where_the_run_is_not_the_most_heads() -> None:
    seen = Seen()
    seen.look(voice={"a": 20, "b": 20, "c": 20, "d": 100})
    told = [status(r.peer, r.stage, version=6 if r.peer == "d" else 5) for r in FOUR]
    assert seen.look(statuses=tuple(told)).version == 6


def test_a_loss_belongs_to_its_step_and_one_voice_among_many_is_not_enough() -> None:
    seen = Seen()
    seen.say(version=5)
    told = (("a", 0, 3.0, 4), ("b", 0, 3.0, 4), ("c", 1, 2.5, 5), ("d", 1, 9.9, 8))
    statuses = tuple(status(n, s, version=5, loss=loss, of=of) for n, s, loss, of in told)
    health = seen.look(statuses=statuses)
    assert (health.losses, health.loss) == (((4, 3.0),), 3.0)


def test_records_alone_say_where_the_run_is() -> None:
    assert Seen(*(record(n, 0, version=v) for n, v in (("a", 7), ("b", 7), ("c", 39)))).look().version == 7
    assert Seen(record("a", 0, state="joining", version=9)).look().version == 0


@pytest.mark.parametrize("generation", [Generation(), Generation(number=1, start=8)])
def test_where_nobody_serves_the_run_is_where_those_have_it_who_keep_it(generation: Generation) -> None:
    away = [record(name, stage, state="paused", version=9) for name, stage in (("a", 0), ("b", 1))]
    seen = Seen(*away, record("keeper", NO_STAGE, state="keeping", version=8))
    assert seen.look().version == 9
    health = seen.say(version=9, state="paused", generation=generation)
    assert (health.version, health.went_back) == (9, generation.number)
    assert not any(one.inconsistencies for one in health.peers)
    # Who serves knows better, and is believed at once.
    back = tuple(record(name, stage, since=START) for name, stage in (("a", 0), ("b", 1)))
    told = tuple(status(r.peer, r.stage, version=7, since=START) for r in back)
    assert seen.look(records=back, statuses=told).version == 7


def test_a_record_of_a_version_that_cannot_be_says_nothing_and_is_doubted() -> None:
    for version in (2**47, RUN.steps + 1, -1):
        health = Seen(record("a", 0, version=version)).look()
        assert (health.version, health.stages[0].version, peer(health, "a").version) == (0, 0, 0)
        assert peer(health, "a").inconsistencies == (f"announces version {version} of a run of 40 steps",)
        assert not any("are done" in text for text in texts(health))
    seen = Seen(record("a", 0, version=2**47), record("b", 1))
    seen.say(version=4)
    assert [stage.version for stage in seen.say(version=5).stages] == [5, 5]


def test_an_answer_that_is_late_does_not_turn_the_run_back_but_an_era_does() -> None:
    seen = Seen()
    assert seen.say(version=9).version == 9
    assert seen.say(version=8).version == 9
    health = seen.say(version=4, generation=Generation(1, 4))
    assert (health.version, health.went_back) == (4, 1)
    assert ("went back", "a stage had lost all its peers: the run goes on from version 4") in happened(health)
    assert "a stage lost all its peers: the run went back to a checkpoint 1 time" in texts(health)
    assert all(version <= 4 for version, _ in health.losses)


def test_a_run_that_stays_lower_is_believed_in_the_end() -> None:
    seen = Seen()
    seen.say(version=9)
    assert [seen.say(4.0, version=2).version for _ in range(5)] == [9, 9, 9, 9, 2]


def test_the_pace_is_that_of_the_last_minute_and_falls_when_no_step_comes() -> None:
    seen = Seen()
    assert seen.say(version=3).tokens_per_s is None
    for version in range(4, 10):
        health = seen.say(2.0, version=version, loss=9.0 - version, trainers=("t",))
    assert health.step_s == pytest.approx(2.0)
    assert health.tokens_per_s == pytest.approx(RUN.tokens_per_step / 2)
    assert health.left_s == pytest.approx(2.0 * 31)
    assert health.losses == tuple((v, 9.0 - v) for v in range(4, 10))
    assert health.step_times == tuple((v, pytest.approx(2.0)) for v in range(4, 10))
    slowed = seen.look(100.0)
    assert slowed.tokens_per_s is not None and slowed.tokens_per_s < 0.1 * RUN.tokens_per_step / 2
    assert "no step for 100 s; the last ones took 2.0 s each" in texts(slowed)


def test_no_pace_is_taken_over_the_moment_when_the_clock_was_set_back() -> None:
    seen = Seen()
    for version in (4, 5, 6):
        seen.say(10.0, version=version)
    seen.now -= 3600.0
    assert seen.say(10.0, version=7).step_s is None
    health = seen.say(10.0, version=8)
    assert (health.step_s, health.left_s) == (10.0, 320.0)


def past(*steps: tuple[int, float, float | None]) -> tuple[PastStep, ...]:
    return tuple(PastStep(version=version, took_s=took_s, loss=loss) for version, took_s, loss in steps)


def test_what_peers_tell_of_earlier_steps_is_the_beginning_of_the_plots() -> None:
    seen = Seen()
    told = [(version, 2.0 + version / 10, 9.0 - version) for version in range(1, 20)]
    slower = [(version, took_s + 1.0, loss) for version, took_s, loss in told]
    more = {"version": 20, "trainers": ("t",)}
    health = seen.look(
        statuses=(
            *(status(name, 0, past=past(*told), **more) for name in "ab"),
            status("c", 1, past=past(*slower), **more),
            status("d", 1, past=past((3, 9999.0, -50.0), (40, 1.0, 1.0)), **more),
        )
    )
    assert health.losses == tuple((version, 9.0 - version) for version in range(1, 20)), (
        "the lie about 3 is out"
    )
    assert health.step_times[:2] == ((1, pytest.approx(2.1)), (2, pytest.approx(2.2)))
    assert health.step_times[-1][0] == 19, "what is not taken yet has no time"
    for version in (21, 22):
        news = past((version, 2.5, 0.5))
        health = seen.look(3.2, statuses=tuple(status(r, i // 2, version=version, past=news, trainers=("t",))
                                               for i, r in enumerate("abcd")))  # fmt: skip
    assert health.step_times[-2:] == ((21, 2.5), (22, 2.5)), "not the time between two observations"
    assert health.losses[-1] == (22, 0.5)


def test_a_run_that_is_done_says_so_and_asks_for_nothing() -> None:
    seen = Seen()
    seen.say(version=39, trainers=("t",))
    health = seen.say(version=40)
    assert (health.tokens_per_s, health.left_s) == (0.0, 0.0)
    assert texts(seen.look(100.0)) == ["all 40 steps are done"]


def test_plots_stay_small_and_keep_their_ends() -> None:
    long = Aggregator(demo_run(steps=100_000))
    records = (msgspec.structs.replace(record("a", 0), run=long.run.id),)
    for version in range(1, 3 * MAX_POINTS):
        told = status("a", 0, version=version, loss=float(version), took_s=10.0)
        long.observe(Observation(at=START + 10 * version, records=records, statuses=(told,)))
    health = long.health(now=START + 30 * MAX_POINTS)
    assert max(len(health.losses), len(health.step_times)) <= MAX_POINTS
    assert health.losses[0][0] < 10 and health.losses[-1] == (version, float(version))
    assert health.step_times[-1] == (version, pytest.approx(10.0))


# --- who comes and goes -------------------------------------------------------------------------------------


def test_the_timeline_tells_who_joined_left_was_lost_moved_and_came_back() -> None:
    seen = Seen()
    assert seen.say().happenings == ()  # those who were there before us did nothing
    seen.records["e"] = record("e", 1)
    seen.look(records=tuple(seen.records.values()))
    seen.look(silent={"c": "the connection broke"})
    seen.look(statuses=(status("c", 1),))
    seen.look(silent={"c": "the connection broke"})
    seen.gone("c")
    moved = seen.records["b"] = record("b", 1, since=START)
    seen.look(records=tuple(seen.records.values()))
    seen.records["a"] = record("a", 0, since=START + 5)
    seen.look(records=tuple(seen.records.values()))
    health = seen.look(records=(record("d", 1, state="left"),))
    assert happened(health) == [
        ("joined", "peer e of stage 1 joined"),
        ("silent", "peer c of stage 1 does not answer: the connection broke"),
        ("back", "peer c of stage 1 answers again"),
        ("silent", "peer c of stage 1 does not answer: the connection broke"),
        ("lost", "peer c of stage 1 is lost: the connection broke"),
        ("moved", "peer b moved from stage 0 to stage 1"),
        ("restarted", "peer a of stage 0 started again"),
        ("left", "peer d of stage 1 left"),
    ]
    assert [line.peer for line in health.happenings] == ["e", "c", "c", "c", "c", "b", "a", "d"]
    assert peer(health, "b").stage == moved.stage and peer(health, "b").last == "moved"


def test_a_newcomer_that_serves_at_last_did_not_restart() -> None:
    seen = Seen()
    seen.look(records=(record("f", 1, state="joining", since=START),))
    health = seen.look(records=(record("f", 1, since=START + 5),))
    assert happened(health) == [("joined", "peer f of stage 1 joined")]
    assert peer(health, "f").state == "serving"


def test_a_pause_is_said_and_a_stage_that_waits_for_it_too() -> None:
    seen = Seen()
    seen.gone("d")
    seen.records["c"] = record("c", 1, state="paused", since=START + 5)
    health = seen.look(records=tuple(seen.records.values()))
    assert health.alerts[0].text == "stage 1 has only 1 paused peer: the run waits"
    assert peer(health, "c").state == "paused"
    seen.records["c"] = record("c", 1, state="joining", since=START + 9)
    health = seen.look(records=tuple(seen.records.values()))
    said = [happening for happening in happened(health) if "peer c" in happening[1]]
    assert said == [
        ("paused", "peer c of stage 1 is paused by its owner"),
        ("back", "peer c of stage 1 resumes"),
    ]


def test_a_stage_that_thins_out_is_said_before_it_is_lost_and_when_it_is_back() -> None:
    seen = Seen()
    assert texts(seen.say(trainers=("t",))) == []
    health = seen.gone("c")
    assert [(alert.level, alert.text) for alert in health.alerts] == [
        ("warning", "stage 1 has one peer left")
    ]
    health = seen.gone("d")
    assert health.alerts[0].text == "stage 1 has no peer: the run waits until one joins"
    assert (health.alerts[0].level, health.alerts[0].stage) == ("error", 1)
    seen.records["e"] = record("e", 1, state="joining")
    health = seen.look(records=tuple(seen.records.values()))
    assert health.alerts[0].text == "stage 1 has no peer: the run waits for 1 peer to load it"
    seen.records["e"] = record("e", 1)
    health = seen.look(records=tuple(seen.records.values()))
    assert [kind for kind, _ in happened(health)][-3:] == ["stage lost", "joined", "stage back"]
    assert health.stages[1].serving == 1


def test_a_stage_that_always_had_one_peer_is_no_alert() -> None:
    assert texts(Seen(record("a", 0), record("b", 1)).say(trainers=("t",))) == []


def test_who_does_not_answer_does_not_serve_and_all_at_once_are_our_own_line() -> None:
    seen = Seen()
    seen.say(trainers=("t",))
    health = seen.look(silent={"c": "the connection broke"})
    assert (health.stages[1].serving, peer(health, "c").answered) == (1, False)
    assert "peer c does not answer: the connection broke" in texts(health)
    health = seen.look(silent=dict.fromkeys("abd", "no route"))
    assert "no peer answers: is this machine cut off? a, b, c, d: no route" in texts(health)


def test_when_we_are_cut_off_no_stage_is_called_lost() -> None:
    seen = Seen()
    seen.say(trainers=("t",))
    seen.look(silent={"a": "no route", "c": "no route"})
    health = seen.look(silent={"b": "no route", "d": "no route"})
    assert (health.cut_off_s, [alert.level for alert in health.alerts]) == (2.0, ["error"])
    health = seen.gone("a", "b", "c", "d")
    assert texts(health) == ["no peer answers: is this machine cut off? the last answer came 3.0 s ago"]
    assert "stage lost" not in [kind for kind, _ in happened(health)]
    seen.look(60.0, records=FOUR)
    health = seen.look(statuses=(status("a", 0),))
    assert health.cut_off_s is None and not any("cut off" in text for text in texts(health))


def test_of_hundreds_a_few_that_answer_nothing_for_seconds_are_enough_to_tell() -> None:
    names = [f"p{i:03d}" for i in range(200)]
    seen = Seen(*(record(name, i % 2) for i, name in enumerate(names)))
    seen.look(statuses=(status("p000", 0),))
    assert seen.look(silent=dict.fromkeys(names[:50], "it hangs")).cut_off_s is None
    assert seen.look(statuses=(status("p000", 0),), silent=dict.fromkeys(names[:50], "")).cut_off_s is None
    seen.look(silent=dict.fromkeys(names[:8], "it hangs"))
    assert seen.look(6.0).cut_off_s == 7.0


def test_many_alike_are_counted() -> None:
    seen = Seen(*(record(f"p{i:02d}", 0) for i in range(20)), record("q", 1))
    health = seen.look(silent={f"p{i:02d}": "it hangs" for i in range(9)})
    assert sum("does not answer" in text for text in texts(health)) == alerts.MAX_ALIKE
    assert "and 4 more like the last one" in texts(health)


# --- trainers -----------------------------------------------------------------------------------------------


def test_a_trainer_that_goes_away_is_missed() -> None:
    seen = Seen()
    health = seen.say(trainers=("t",))
    assert (health.trainers, health.trainer_away_s) == (("t",), 0.0)
    assert seen.look(40.0).trainer_away_s == 0.0  # nobody was asked meanwhile
    health = seen.say()
    assert health.trainer_away_s == 41.0
    assert "no trainer for 41 s" in texts(health)


def test_a_trainer_that_never_was_there_is_missed_at_the_first_look() -> None:
    told = "no trainer that a peer of stage 0 knows of: the run waits for swarm train"
    assert told in texts(Seen().say())
    assert told not in texts(Seen(record("a", 0, since=START - 5), record("c", 1)).say())
    assert told not in texts(Seen().say(trainers=("t",)))


def test_how_long_a_program_runs_is_what_it_says_or_since_when_it_serves() -> None:
    seen = Seen()
    assert {peer.up_s for peer in seen.say().peers} == {92.0}
    assert {peer.up_s for peer in seen.say(since=START + 1, up_s=500.0).peers} == {500.0}
    assert {peer.up_s for peer in seen.look(3.0).peers} == {503.0}


def test_work_that_arrives_is_a_sign_of_a_trainer() -> None:
    seen = Seen()
    seen.say(taken=5)
    assert seen.say(50.0, taken=5).trainer_away_s == 51.0  # since we look
    assert seen.say(taken=6).trainer_away_s == 0.0


def test_before_all_have_answered_nobody_misses_a_trainer() -> None:
    seen = Seen()
    assert seen.look(100.0, statuses=(status("a", 0),)).trainer_away_s is None


# --- what is wrong ------------------------------------------------------------------------------------------


def test_a_peer_that_is_much_slower_than_its_stage_is_named() -> None:
    seen = Seen(*(record(n, 0) for n in "abc"), record("d", 1))
    told = [status(n, 0, speed=speed, trainers=("t",)) for n, speed in (("a", 4.0), ("b", 4.0), ("c", 0.5))]
    health = seen.look(statuses=(*told, status("d", 1)))
    assert texts(health) == ["peer c answers 8× slower than its stage"]
    stage = health.stages[0]
    assert (stage.slowest, stage.fastest, stage.speed) == ("c", "b", 8.5)
    assert peer(health, "d").slower == 0.0


def test_a_peer_that_has_just_begun_is_not_called_slow() -> None:
    seen = Seen(*(record(n, 0) for n in "ab"), record("d", 1))
    told = [status("a", 0, speed=4.0, trainers=("t",)), status("b", 0, speed=0.5, computed=3)]
    assert texts(seen.look(statuses=(*told, status("d", 1)))) == []


def test_a_peer_that_was_not_asked_yet_is_not_called_slow() -> None:
    """Its record has the speed of a device that warms up, perhaps on a busy machine."""
    cold = msgspec.structs.replace(record("b", 0), speed=0.01)
    assert not any("slower" in text for text in texts(Seen(record("a", 0), cold).look()))


def test_while_the_run_waits_for_a_stage_no_time_left_is_told() -> None:
    seen = Seen()
    for version in range(4, 7):
        health = seen.say(2.0, version=version, trainers=("t",))
    assert health.left_s
    paused = [status(name, 1, version=6, state="paused") for name in "cd"]
    health = seen.look(statuses=(*paused, *(status(name, 0, version=6, trainers=("t",)) for name in "ab")))
    assert health.left_s is None and "stage 1 has only 2 paused peers: the run waits" in texts(health)


def test_weights_that_disagree_are_an_error_for_devices_of_one_kind() -> None:
    seen = Seen(*(record(n, 1) for n in "abcd"), record("z", 0))
    same = {"kind": "cpu", "version": 3}
    health = seen.look(
        statuses=(
            status("a", 1, digest="f00d" * 16, **same),
            status("b", 1, digest="f00d" * 16, **same),
            status("c", 1, digest="beef" * 16, kind="cuda", version=3),
        )
    )
    assert health.stages[1].disagree == ()
    health = seen.look(statuses=(status("d", 1, digest="beef" * 16, **same),))
    assert health.alerts[0].text == "stage 1's weights disagree: a, b have f00df00d; d has beefbeef"
    assert health.alerts[0].level == "error"
    told = tuple(status(n, 1, digest="1234" * 16, kind="cpu", version=4) for n in "abd")
    assert seen.look(statuses=told).stages[1].disagree == ()  # they agree again


def test_what_strangers_say_of_steps_far_off_is_not_kept_and_hides_no_disagreement() -> None:
    """They pushed out those that are compared, and while the run stood still all of them were kept."""
    seen = Seen()
    others = tuple(status(name, stage, version=3) for name, stage in (("b", 0), ("c", 1), ("d", 1)))
    for version in range(9, 40):
        for generation in map(Generation, range(3)):
            far = status("a", 0, version=version, generation=generation, digest="aa", kind="cpu")
            seen.look(statuses=(*others, far))
    assert len(seen.aggregator._digests) <= MAX_VERSIONS * RUN.S
    told = tuple(status(name, 1, digest=digest, kind="cpu", version=3) for name, digest in ("cx", "dy"))
    assert seen.look(statuses=told).stages[1].disagree == (("x", ("c",)), ("y", ("d",)))
    assert seen.gone("d").stages[1].disagree == ()
    assert not any("d" in by for by in seen.aggregator._digests.values())


def test_while_nobody_serves_no_end_of_past_steps_is_kept() -> None:
    history = Aggregator(demo_run(steps=100_000))._history
    for first in range(1, 5 * MAX_POINTS, 100):
        told = past(*((version, 1.0, 1.0) for version in range(first, first + 100)))
        history.take(status("a", 0, past=told), {})
    assert len(history._past) <= 2 * MAX_POINTS + 1


def test_a_count_that_is_wrong_is_the_worst_of_all() -> None:
    seen = Seen()
    health = seen.say(audit=LedgerCounts(steps=3, missing=1, duplicated=2), trainers=("t",))
    assert health.alerts[0].level == "error"
    assert "peer a reports 1 microbatch missing from steps that were taken: report this bug" in texts(health)
    assert "peer a reports 2 microbatches counted twice: report this bug" in texts(health)


def test_refused_records_are_told_with_the_reason() -> None:
    health = Seen().look(refused={"a record with a wrong signature": 12})
    assert "12 records refused: a record with a wrong signature" in texts(health)


def test_what_contradicts_itself_is_doubted() -> None:
    seen = Seen(record("a", 0, since=START + 3600), record("b", 0), record("c", 1))
    seen.say(30.0)
    health = seen.look(statuses=(status("b", 1, since=1.0), status("c", 1, computed=10**9)))
    assert peer(health, "a").inconsistencies == (f"its clock is {3600 - 32} s ahead",)
    assert peer(health, "b").inconsistencies == ("announces stage 0 and answers for stage 1",)
    (doubt,) = peer(health, "c").inconsistencies
    assert doubt == "says it computed 1000000000 microbatches, more than there were"
    assert "c" not in [row.peer for row in health.contributions]


# --- who did what -------------------------------------------------------------------------------------------


def test_contributions_add_up_over_visits_and_stay_when_a_peer_goes() -> None:
    seen = Seen(record("a", 0), record("b", 1))
    seen.look(statuses=(status("a", 0, computed=60), status("b", 1, computed=20)))
    seen.records["a"] = record("a", 1, since=START)
    seen.look(records=tuple(seen.records.values()))
    seen.look(statuses=(status("a", 1, computed=20, since=START),))
    health = seen.gone("b")
    assert [(row.peer, row.computed, row.share, row.stage, row.here) for row in health.contributions] == [
        ("a", 80, 0.8, 1, True),
        ("b", 20, 0.2, 1, False),
    ]


def test_the_table_of_contributions_is_bounded_and_keeps_who_is_here() -> None:
    seen = Seen(record("here", 0))
    seen.look(statuses=(status("here", 0, computed=1),))
    for start in range(0, MAX_WORKERS + 500, 500):
        crowd = tuple(record(f"x{i}", 1) for i in range(start, start + 500))
        told = tuple(status(r.peer, 1, computed=9) for r in crowd)
        health = seen.look(
            records=crowd, statuses=told, gone=tuple(f"x{i}" for i in range(start - 500, start))
        )
    assert 0.8 * MAX_WORKERS < len(health.contributions) <= MAX_WORKERS
    assert "here" in [row.peer for row in health.contributions]


def test_routes_are_what_passed_between_two_answers() -> None:
    def told(moved: int) -> tuple[PeerStatus, ...]:
        def link(to: str, size: int) -> LinkStatus:
            return LinkStatus(peer=to, bytes_in=size, bytes_out=size)

        return (
            status(
                "a", 0, trainers=("t",), links=(link("t", moved), link("c", 10 * moved), link("b", moved))
            ),
            status("c", 1, links=(link("a", 20 * moved), link("nobody", 99 * moved))),
        )

    seen = Seen()
    seen.look(statuses=told(0))
    health = seen.look(2.0, statuses=told(1000))
    assert health.routes == (
        PeerTraffic(source="a", target="c", kind="work", bps=8 * 40_000 / 2),
        PeerTraffic(source="a", target="b", kind="average", bps=8 * 2000 / 2),
        PeerTraffic(source="t", target="a", kind="feed", bps=8 * 2000 / 2),
    )


def test_a_keeper_stands_apart() -> None:
    keeper = record("k", NO_STAGE, state="keeping", version=2, speed=0.0)
    health = Seen(*FOUR, keeper).say(trainers=("t",))
    assert [one.peer for one in health.keepers] == ["k"]
    assert (texts(health), len(list(health.peers))) == ([], 5)


# --- strangers ----------------------------------------------------------------------------------------------


def test_texts_are_cut_and_steer_no_terminal() -> None:
    assert clean("a\x1b[31mb\u202ec\n\0") == "a?[31mb?c??"
    assert clean("x" * 100, 10) == "x" * 9 + "…"


def test_a_record_is_made_fit_to_be_shown() -> None:
    wild = record(
        "a",
        0,
        device="\x1b]0;mine\x07" + "x" * 99,
        speed=math.inf,
        load=math.nan,
        bandwidth_bps=-1.0,
        since=-5.0,
    )
    tame = validation.tidy(wild)
    assert tame.device.isprintable() and len(tame.device) == validation.DEVICE_CHARS
    assert (tame.speed, tame.load, tame.bandwidth_bps, tame.since) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        ({"peer": "b"}, "a status in the name of 'b'"),
        ({"stage": 7}, "a status of stage 7 of a run of 2 stages"),
        ({"version": 41}, "a status of version 41 of a run of 40 steps"),
        ({"generation": Generation(-1, 0)}, "an impossible generation"),
        ({"done": 17}, "an impossible number: done 17"),
        ({"inflight": -1}, "an impossible number: inflight -1"),
        ({"computed": 1 << 60}, "an impossible number: computed"),
        ({"speed": math.nan}, "an impossible number: speed nan"),
        ({"speed": 1e30}, "an impossible number: speed 1e\\+30"),
        ({"audit": LedgerCounts(missing=-3)}, "an impossible number: audit.missing -3"),
    ],
)
def test_an_answer_that_cannot_be_is_refused_with_what_is_wrong(lie: dict[str, object], text: str) -> None:
    with pytest.raises(Refused, match=text):
        validation.checked(msgspec.structs.replace(status("a", 0), **lie), FOUR[0], RUN)


def test_what_an_honest_answer_may_hold_is_kept_within_bounds() -> None:
    link = LinkStatus(peer="b", bytes_in=1, bytes_out=1)
    wrong = ((2, 1.0, math.nan), (3, -1.0, None), (41, 1.0, None))
    wild = status(
        "a", 0, past=past((1, 1.0, None), *wrong, *[(1, 1.0, 1.0)] * 200), since=math.inf, busy_s=-1.0,
        rebalance="\x1b[2J" + "x" * 999,
        links=(link, msgspec.structs.replace(link, bytes_in=-1), *[link] * 99),
        trainers=("t",) * 99, digest="\x9b" * 999,
    )  # fmt: skip
    tame = validation.checked(wild, FOUR[0], RUN)
    assert (tame.since, tame.busy_s) == (0.0, 0.0)
    assert len(tame.past) == validation.MAX_PAST - 3 and tame.past[0].loss is None
    assert tame.rebalance.isprintable() and len(tame.rebalance) == MAX_WORDS_CHARS
    assert len(tame.trainers) == validation.MAX_TRAINERS
    assert len(tame.links) == validation.MAX_LINKS - 1
    assert tame.digest.isprintable() and len(tame.digest) == validation.ID_CHARS


def test_no_mixture_of_truth_and_lies_breaks_the_picture() -> None:
    rng = random.Random(7)
    seen = Seen()
    names = [f"p{i}" for i in range(12)]
    for _ in range(300):
        stages = {name: rng.choice((NO_STAGE, 0, 1, 5)) for name in names if rng.random() < 0.8}
        records = tuple(
            validation.tidy(
                record(
                    name, stage, run=rng.choice((RUN.id, RUN.id, "other")),
                    version=rng.choice((-1, 3, 1 << 47)),
                    state=rng.choice(("joining", "serving", "leaving", "left", "keeping")),
                    speed=rng.choice((0.0, math.nan, 1e300)), since=rng.choice((0.0, START, 1e300)),
                )
            )
            for name, stage in stages.items()
        )  # fmt: skip
        told = [
            status(
                name,
                rng.choice((NO_STAGE, 0, 1)),
                version=rng.randint(0, 40),
                generation=Generation(rng.randint(0, 2), 0),
                computed=rng.choice((0, 5, 1 << 52)),
                since=rng.choice((0.0, START)),
                taken=rng.randint(0, 9),
                digest=rng.choice(("", "aa", "bb")),
                loss=rng.choice((None, 1.0, -1e308)),
                links=tuple(
                    LinkStatus(peer=rng.choice((*names, "t")), bytes_in=rng.randint(0, 9), bytes_out=0)
                    for _ in range(3)
                ),
                trainers=rng.choice(((), ("t",))),
                speed=rng.choice((0.0, 1e-300, 1e6)),
            )
            for name in names
        ]
        silent = {name: "hangs" for name in names if rng.random() < 0.1}
        health = seen.look(
            rng.choice((0.0, 1.0, 50.0)),
            records=records,
            gone=tuple(rng.sample(names, rng.randint(0, 3))),
            statuses=tuple(rng.sample(told, 5)),
            silent=silent,
        )
        back = msgspec.json.decode(msgspec.json.encode(health), type=SwarmHealth)
        assert (back.version, len(back.alerts)) == (health.version, len(health.alerts))
        assert 0 <= sum(row.share for row in health.contributions) <= 1 + 1e-9


# --- islands ------------------------------------------------------------------------------------------------


ISLANDS = replace(RUN, islands=IslandsSpec(count=2, local_steps=9))
CELLS = tuple(record(name, cell, run=ISLANDS.id) for cell, name in enumerate("abcd"))


def test_cells_are_called_by_stage_and_island() -> None:
    seen = Seen(*CELLS, run=ISLANDS)
    health = seen.say()
    assert health.islands == 2 and health.microbatches_per_step == ISLANDS.M // 2
    assert [stage.label for stage in health.stages] == ["0.0", "0.1", "1.0", "1.1"]
    assert [peer.label for peer in health.peers] == ["0.0", "0.1", "1.0", "1.1"]
    health = seen.gone("d")
    lost = "stage 1 of island 1 (cell 3) has no peer"
    assert f"{lost}: the run waits until one joins" in texts(health)
    assert ("lost", "peer d of stage 1 of island 1 (cell 3) is lost: its record ran out") in happened(health)
    assert ("stage lost", lost) in happened(health)


def test_the_loss_of_a_step_is_that_of_all_islands_once_each_has_told() -> None:
    """It was one island's, and another one's at the next look; also after one was lost."""
    seen = Seen(*CELLS, run=ISLANDS)

    def say(names: str, version: int) -> SwarmHealth:
        there = [(cell, name) for cell, name in enumerate("abcd") if name in names]
        told = ((name, cell, past((version, 2.0, 1.0 + 2.0 * (cell // 2)))) for cell, name in there)
        return seen.look(
            statuses=tuple(
                status(name, cell, version=version, past=said, generation=Generation(cell // 2, 0))
                for name, cell, said in told
            )
        )

    assert say("ab", 4).losses == ()
    assert say("cd", 4).losses == say("a", 4).losses == ((4, 2.0),)
    assert [say(names, 5).losses[-1] for names in ("cd", "ab")] == [(4, 2.0), (5, 2.0)]


def test_an_island_that_is_ahead_of_the_others_is_not_doubted() -> None:
    """They are apart by up to the steps between two meetings."""
    run = replace(RUN, islands=IslandsSpec(count=4, local_steps=9))
    seen = Seen(*(record(name, cell, run=run.id) for cell, name in enumerate("abcdefgh")), run=run)

    def say(version: int, ahead: int) -> SwarmHealth:
        there = enumerate("abcdefgh")
        told = tuple(status(name, cell, version=version + ahead * (cell < 2)) for cell, name in there)
        return seen.look(30.0, statuses=told)

    health = [say(version, 9) for version in (3, 4, 5)][-1]
    assert health.version == 5
    assert [one.inconsistencies for one in health.peers] == [()] * 8
    assert [one.done for one in health.peers] == [5] * 8
    assert peer(say(6, 16), "a").inconsistencies


def test_a_meeting_of_islands_takes_time_and_no_tokens() -> None:
    run = replace(RUN, islands=IslandsSpec(count=2, local_steps=1))
    seen = Seen(*(record(name, cell, run=run.id) for cell, name in enumerate("abcd")), run=run)
    paces = [seen.say(2.0, version=version).tokens_per_s for version in range(4, 7)]
    assert paces == [None, *[pytest.approx(RUN.tokens_per_step / 4)] * 2]


def test_traffic_of_islands_is_that_of_trainers_stages_and_meetings() -> None:
    seen = Seen(*CELLS, run=ISLANDS)

    def say(n: int) -> SwarmHealth:
        def links(r: PeerRecord) -> tuple[LinkStatus, ...]:
            return tuple(LinkStatus(peer=p, bytes_in=n, bytes_out=n) for p in "abcdt" if p != r.peer)

        return seen.look(
            statuses=tuple(status(r.peer, r.stage, links=links(r), trainers=("t",)) for r in CELLS)
        )

    say(0)
    routes = {(route.source, route.target): route.kind for route in say(1000).routes}
    assert routes == {
        ("t", "a"): "feed", ("t", "c"): "feed", ("a", "b"): "work", ("c", "d"): "work",
        ("a", "c"): "average", ("b", "d"): "average",
    }  # fmt: skip

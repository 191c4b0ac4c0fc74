"""Which peer moves where: the same answer everywhere, nobody's stage emptied, and an end to the moving."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replaced

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from swarm.manifest import IslandsSpec, demo_run
from swarm.policy.rebalance import (
    COOLDOWN_PERIODS,
    MAX_TIMES_MEDIAN,
    Move,
    Moves,
    choose_stages,
    is_due,
    rebalance,
)
from swarm.records import NO_STAGE, PeerRecord

PERIOD_S = 60.0
NOW_S = 1_000_030.0


def peer(name: str, stage: int, speed: float, **fields: object) -> PeerRecord:
    given = {"load": 4.0, "max_inflight": 8, "since": 0.0, "state": "serving", "version": 5, **fields}
    return PeerRecord(peer=name, run="r", stage=stage, speed=speed, **given)


def decided(*records: PeerRecord, stages: int = 2, now_s: float = NOW_S) -> Moves:
    return rebalance(records, stages=stages, period_s=PERIOD_S, now_s=now_s)


def answer(*records: PeerRecord, stages: int = 2, now_s: float = NOW_S) -> Move | Moves:
    """The most urgent move."""
    told = decided(*records, stages=stages, now_s=now_s)
    return told.moves[0] if told.moves else told


def over_periods(*records: PeerRecord, stages: int = 2, periods: int = 30) -> list[Move | Moves]:
    """The anchors are drawn anew in each period."""
    return [answer(*records, stages=stages, now_s=NOW_S + i * PERIOD_S) for i in range(periods)]


def moves(*records: PeerRecord, stages: int = 2) -> set[str]:
    return {one.peer for one in over_periods(*records, stages=stages) if isinstance(one, Move)}


def after(told: Moves, *records: PeerRecord, stages: int) -> list[int]:
    """Peers of each stage when all have gone where they are sent."""
    where = {record.peer: record.stage for record in records}
    for move in told.moves:
        assert where[move.peer] == move.from_stage != move.to_stage
        where[move.peer] = move.to_stage
    return [list(where.values()).count(stage) for stage in range(stages)]


def why(*records: PeerRecord, stages: int = 2) -> str:
    told = answer(*records, stages=stages)
    assert isinstance(told, Moves), told
    return told.why


# --- one decision -------------------------------------------------------------------------------------------


def test_the_peer_that_levels_two_stages_moves_and_the_reason_has_the_numbers() -> None:
    records = [
        *(peer(f"a{i}", 0, 2.0, load=1.0) for i in range(6)),
        peer("slow", 0, 0.5, load=1.0),
        peer("b", 1, 3.0, load=14.0, state_bytes=70_000_000, bandwidth_bps=40e6),
    ]
    told = next(one for one in over_periods(*records) if isinstance(one, Move))
    assert (told.from_stage, told.to_stage) == (0, 1) and told.peer.startswith("a")
    assert told.why == (
        f"stage 1 is the slowest; peer {told.peer} gives 2 of stage 0's 12.5 microbatches/s; "
        "after the move the slowest stage does 5 instead of 3, which pays back 14 s of download in 21 s"
    )


def test_level_stages_stay() -> None:
    records = [peer(f"{s}{i}", s, 2.0) for s in range(3) for i in range(2)]
    assert "no move makes the run 10% faster" in why(*records, stages=3)


def test_a_small_gain_is_left_alone() -> None:
    """After the move 10.9 instead of 10: 9 %."""
    records = [peer("a", 0, 10.9), peer("b", 0, 0.9), peer("c", 0, 0.9), peer("d", 1, 10.0)]
    assert not moves(*records)


def test_a_stage_is_left_to_a_single_peer_only_for_a_quarter_more() -> None:
    """The fast one of stage 0 would lift stage 1 from 4 to 4.8 or 5.2; stage 0 would hang on one peer."""
    slow = [peer("c", 1, 2.0), peer("d", 1, 2.0)]
    for speed, goes in ((0.8, False), (1.2, True)):
        records = [peer("a", 0, 9.0, movable=False), peer("b", 0, speed), *slow]
        assert bool(moves(*records)) == goes
    # A third peer there makes no stage hang on one.
    assert moves(peer("a", 0, 9.0), peer("b", 0, 0.8), peer("e", 0, 0.8), *slow)


def test_two_equally_slow_stages_are_lifted_together() -> None:
    records = [*(peer(f"a{i}", 0, 2.0) for i in range(6)), peer("b", 1, 2.0), peer("c", 2, 2.0)]
    told = next(one for one in over_periods(*records, stages=3) if isinstance(one, Move))
    assert told.to_stage == 1 and "(with 1 more like it)" in told.why
    assert "does 4 instead of 2" in told.why
    assert all(
        after(decided(*records, stages=3, now_s=NOW_S + i * PERIOD_S), *records, stages=3) == [4, 2, 2]
        for i in range(30)
    )


def test_as_many_move_at_once_as_are_needed() -> None:
    """Each stage keeps its anchor and may have peers that sit out, and still all is level in one period."""
    counts = (9, 7, 2, 2)
    records = [peer(f"p{s}{i}", s, 1.0) for s, count in enumerate(counts) for i in range(count)]
    for i in range(30):
        told = decided(*records, stages=4, now_s=NOW_S + i * PERIOD_S)
        assert after(told, *records, stages=4) == [5, 5, 5, 5]
        assert told.moves and told.why.endswith("(and 5 more)")


def test_nobody_moves_who_is_not_needed() -> None:
    """With 18 peers the slowest of four stages has 4 of them, however the others stand."""
    records = [peer(f"p{s}{i}", s, 1.0) for s, count in enumerate((6, 4, 4, 4)) for i in range(count)]
    assert not moves(*records, stages=4)


def test_of_peers_that_are_alike_one_of_the_fastest_stage_goes() -> None:
    """The stage of three would do as well, until the next one of its peers dies."""
    records = [peer(f"p{s}{i}", s, 1.0) for s, count in enumerate((3, 5, 1)) for i in range(count)]
    assert {one[1] for one in moves(*records, stages=3)} == {"1"}


def test_peers_that_sit_out_go_if_nobody_else_can() -> None:
    """One of the two is the anchor; in a quarter of the periods the other one sits out."""
    records = [peer("a", 0, 2.0), peer("b", 0, 2.0), peer("c", 0, 2.0), peer("d", 1, 2.0)]
    assert all(isinstance(one, Move) for one in over_periods(*records))


def test_two_empty_stages_are_filled_together_and_then_all_is_levelled() -> None:
    records = [peer(f"p{s}{i}", s, 1.0) for s in range(2) for i in range(4)]
    for i in range(30):
        told = decided(*records, stages=4, now_s=NOW_S + i * PERIOD_S)
        assert after(told, *records, stages=4) == [2, 2, 2, 2]
        assert told.moves and {move.to_stage for move in told.moves[:2]} == {2, 3}
        assert "no peer serves stage 2, so the run stands still" in told.why
        assert "stage 2 is the slowest" in told.moves[2].why


def test_stages_that_cannot_all_be_filled_wait_for_newcomers_and_cost_no_download() -> None:
    assert why(peer("a", 0, 5.0), peer("b", 0, 1.0), stages=4) == (
        "no peer serves stage 1 or stage 2 or stage 3, and the others can give 1 only: "
        "the run waits for 2 newcomers"
    )


def test_downloads_to_several_stages_run_side_by_side_those_to_one_share_its_lines() -> None:
    """Of 10 s each: two stages get one peer each in 10 s, one stage gets two in 20 s."""
    fields = {"state_bytes": 62_500_000, "bandwidth_bps": 50e6}
    side = [*(peer(f"a{i}", 0, 2.0, **fields) for i in range(6))]
    side += [peer("b", 1, 2.0, **fields), peer("c", 2, 2.0, **fields)]
    assert "pays back 10 s of download" in decided(*side, stages=3).why
    one = [peer(f"a{i}", 0, 1.0, load=0.5, **fields) for i in range(8)] + [peer("b", 1, 2.0, **fields)]
    told = decided(*one)
    assert told.moves and len(told.moves) == 3
    assert [float(move.why.split("pays back ")[1].split(" s")[0]) for move in told.moves] == [10, 10, 10]


def test_large_stages_are_levelled_too_though_no_peer_alone_makes_a_difference() -> None:
    records = [peer(f"p{s}{i}", s, 1.0) for s, count in enumerate((120, 100, 80)) for i in range(count)]
    told = decided(*records, stages=3)
    assert min(after(told, *records, stages=3)) >= 98
    noise = [peer(f"p{s}{i}", s, 1.0) for s, count in enumerate((101, 100, 99)) for i in range(count)]
    assert not moves(*noise, stages=3)


def test_many_slow_peers_do_not_follow_one_another_to_where_one_fast_one_would_do() -> None:
    records = [*(peer(f"a{i}", 0, 0.1, load=0.5) for i in range(20))]
    records += [peer(f"b{i}", 0, 4.0, load=0.5) for i in range(21)]
    records += [peer(f"c{i}", 1, 4.0) for i in range(18)]
    assert {one[0] for one in moves(*records)} == {"b"}


def test_a_download_that_does_not_pay_stays_away() -> None:
    records = [
        *(peer(f"a{i}", 0, 2.0) for i in range(3)),
        peer("b", 1, 2.0, state_bytes=10_000_000_000, bandwidth_bps=100e6),
    ]
    assert "800 s of download would be earned back only after 800 s; the limit is 300 s" in " ".join(
        one.why for one in over_periods(*records)
    )
    assert not moves(*records)


def test_without_queues_speed_is_not_the_limit() -> None:
    records = [*(peer(f"a{i}", 0, 2.0, load=0.1) for i in range(4)), peer("b", 1, 2.0, load=0.3)]
    assert "more speed there would stand idle" in why(*records)


def test_a_queue_elsewhere_speaks_against_the_speeds() -> None:
    records = [*(peer(f"a{i}", 0, 2.0, load=8.0) for i in range(4)), peer("b", 1, 2.0, load=1.0)]
    assert "the speeds are not what limits the run" in why(*records)


def test_an_empty_stage_is_served_first_by_whoever_leaves_the_fastest_run_behind() -> None:
    records = [peer("a", 0, 5.0), peer("b", 0, 2.0), peer("c", 1, 3.0), peer("d", 1, 3.0)]
    told = next(one for one in over_periods(*records, stages=3) if isinstance(one, Move))
    assert told.to_stage == 2 and "no peer serves stage 2, so the run stands still" in told.why
    # c or d leaves 7, 3 and 3 behind; but one of them is the anchor, and the other may sit out.
    named = [one.peer for one in over_periods(*records, stages=3) if isinstance(one, Move)]
    assert len(named) == 30 and sum(name in "cd" for name in named) >= 20


def test_an_empty_stage_calls_even_those_who_have_just_come_if_nobody_else_can_go() -> None:
    records = [peer("a", 0, 5.0, since=NOW_S - 5), peer("b", 0, 2.0, since=NOW_S - 5)]
    assert isinstance(answer(*records), Move)


def test_an_empty_stage_waits_for_a_newcomer_if_nobody_can_be_spared() -> None:
    assert "no other stage has a second peer to give" in why(peer("a", 0, 5.0), peer("b", 1, 1.0), stages=3)


def test_somebody_who_is_on_the_way_to_an_empty_stage_is_enough() -> None:
    records = [peer("a", 0, 5.0), peer("b", 0, 5.0), peer("c", 1, 1.0, state="joining", since=NOW_S - 30)]
    assert "peer c is on its way there" in why(*records)


def test_somebody_who_never_arrives_is_not_waited_for() -> None:
    records = [peer("a", 0, 5.0), peer("b", 0, 5.0), peer("c", 1, 1.0, state="joining", since=NOW_S - 400)]
    assert isinstance(answer(*records), Move)


def test_a_mover_on_its_way_counts_where_it_goes_so_that_no_second_one_follows() -> None:
    here = [*(peer(f"a{i}", 0, 2.0, load=1.0) for i in range(3)), peer("b", 1, 2.0)]
    assert moves(*here)
    going = [replace(here[0], stage=1, state="joining", since=NOW_S - 1), *here[1:]]
    assert isinstance(answer(*going), Moves)


def test_a_peer_whose_owner_chose_its_stage_stays_even_if_another_stands_empty() -> None:
    slow = peer("b", 1, 1.0, load=14.0)
    assert moves(*(peer(f"a{i}", 0, 2.0) for i in range(4)), slow)
    assert not moves(*(peer(f"a{i}", 0, 2.0, movable=False) for i in range(4)), slow)
    assert not moves(*(peer(f"a{i}", 0, 2.0, movable=False) for i in range(4)))
    assert moves(*(peer(f"a{i}", 0, 2.0, movable=i == 3) for i in range(4))) == {"a3"}


def test_a_newcomer_is_needed_where_nobody_is_and_else_where_it_is_slowest() -> None:
    def chosen(*records: PeerRecord) -> int:
        return choose_stages(records, [card("new", "")], stages=3, depth=3, now_s=NOW_S)["new"]

    assert chosen() == 0
    assert chosen(peer("a", 0, 2.0)) == 1
    three = [peer("a", 0, 4.0), peer("b", 1, 1.0), peer("c", 1, 1.0), peer("d", 2, 4.0)]
    assert chosen(*three) == 1
    assert chosen(*three, peer("e", 1, 0.0, state="joining")) == 1
    assert chosen(*three, peer("e", 1, 2.1, state="joining")) == 0
    starting = [peer("a", 0, 0.0, state="joining"), peer("b", 1, 0.0, state="joining"), peer("c", 0, 0.0)]
    assert chosen(*starting) == 2
    assert chosen(*starting, peer("d", 2, 0.0)) == 1
    assert chosen(*three, peer("liar", 1, math.inf), peer("gone", 1, 9.0, state="left")) == 1


def test_newcomers_of_one_instant_spread_over_the_stages_in_the_order_of_their_ids() -> None:
    def chosen(*newcomers: str, there: Sequence[PeerRecord] = ()) -> dict[str, int]:
        coming = [card(name, "") for name in newcomers]
        return choose_stages(there, coming, stages=3, depth=3, now_s=NOW_S)

    ten = chosen(*(f"new{i}" for i in range(10)))
    assert sorted(ten.values()) == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert chosen("b", "c", "a", "b") == {"a": 0, "b": 1, "c": 2}
    unequal = [peer("x", 0, 4.0), peer("y", 1, 1.0), peer("z", 2, 2.0)]
    assert chosen("a", "b", there=unequal) == {"a": 1, "b": 2}
    again = [*unequal, peer("a", 1, 9.0)]  # its record of before a restart
    assert chosen("a", there=again) == {"a": 1}


def card(name: str, machine: str) -> PeerRecord:
    """A newcomer."""
    return peer(name, NO_STAGE, 0.0, state="choosing", machine=machine)


def test_newcomers_that_may_serve_only_some_stages_spread_over_these() -> None:
    there = [peer("p", 3, 1.0), peer("q", 1, 1.0)]
    coming = [card(f"new{i}", "") for i in range(4)]
    chosen = choose_stages(there, coming, stages=4, depth=4, now_s=NOW_S, among=[3, 2])
    assert chosen == {"new0": 2, "new1": 2, "new2": 3, "new3": 2}


def test_cards_of_one_machine_come_to_consecutive_stages_also_when_two_machines_start_at_once() -> None:
    cards = [card(f"{number}{host}", host) for number in range(4) for host in "AB"]
    chosen = choose_stages([], cards, stages=8, depth=8, now_s=NOW_S)
    assert sorted(chosen[f"{number}A"] for number in range(4)) == [0, 1, 2, 3]
    assert sorted(chosen.values()) == list(range(8))


def test_a_newcomer_goes_next_to_its_machine_only_where_it_is_needed_as_much() -> None:
    """Stages 0 to 4: what each computes, and which of them a card of the newcomer's machine serves."""

    def chosen(*speeds: float, own: int = 3, depth: int = 5, host: str = "A") -> int:
        there = [peer(f"p{stage}", stage, speed) for stage, speed in enumerate(speeds) if speed]
        there[own] = replace(there[own], machine="A") if own < len(there) else there[own]
        return choose_stages(there, [card("new", host)], stages=5, depth=depth, now_s=NOW_S)["new"]

    assert chosen(1.0, 1.0, 1.05, 1.0, 1.09) == 2
    assert chosen(1.0, 1.0, 1.05, 1.0, 1.09, host="B") == 0
    assert chosen(1.0, 1.0, 1.11, 1.0, 1.11) == 0, "the machine's neighbours are faster by more than noise"
    assert chosen(1.0, 1.0, 1.05, 1.0, 1.09, depth=3) == 4, "stage 3 begins another island"
    assert chosen(1.0, 1.0, 1.0, 1.0, 0.0) == 4


def test_peers_that_hand_over_to_nobody_are_not_taken_for_one_machine() -> None:
    there = [peer("a", 0, 1.0, machine="B"), peer("b", 1, 1.05, machine="B"), peer("c", 2, 1.0)]
    assert choose_stages(there, [card("new", "")], stages=3, depth=3, now_s=NOW_S) == {"new": 0}


def test_in_a_large_stage_less_is_noise() -> None:
    """Stages 0 and 2 are faster by 4 %: of 50 peers that is more than where the rebalancer would move one."""
    for count, chosen in ((2, 0), (50, 1)):
        there = [peer(f"{s}-{i}", s, 1.0 if s == 1 else 1.04) for s in range(3) for i in range(count)]
        there[count] = replace(there[count], machine="A")  # of stage 1
        assert choose_stages(there, [card("new", "A")], stages=3, depth=3, now_s=NOW_S) == {"new": chosen}


def test_what_is_decided_names_cells_as_all_that_watches_a_run_does() -> None:
    run = replaced(demo_run(stages=2), islands=IslandsSpec(count=2, local_steps=2), checkpoint_every=0)
    told: set[str] = set()
    for speeds in itertools.product((0.0, 1.0, 8.0), repeat=5):
        for load, state_bytes in ((0.0, 0), (8.0, 0), (8.0, 10**12)):
            there = [
                peer(f"p{n}", n % 4, speed, load=load * (1 + (n == 0)), state_bytes=state_bytes)
                for n, speed in enumerate(speeds) if speed
            ]  # fmt: skip
            terms = {"stages": 4, "period_s": PERIOD_S, "now_s": NOW_S}
            named, plain = rebalance(there, place=run.place, **terms), rebalance(there, **terms)
            assert named.why == re.sub(r"stage (\d)", lambda m: run.place(int(m[1])), plain.why)
            told.add(re.sub("[0-9].*", "", plain.why.replace("stage ", "").lstrip("0123")))
    assert len(told) >= 6, "of many kinds"


def test_nobody_serves() -> None:
    assert why(peer("k", NO_STAGE, 0.0, state="keeping")) == "no peer serves any stage"
    assert why() == "no peer serves any stage"


@pytest.mark.parametrize("wrong", [{"stages": 0}, {"period_s": 0.0}, {"now_s": math.nan}])
def test_impossible_questions_are_bugs(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="cannot rebalance"):
        rebalance([], **{"stages": 2, "period_s": 60.0, "now_s": 1.0, **wrong})


def test_a_peer_rests_two_periods() -> None:
    records = [*(peer(f"a{i}", 0, 2.0, load=1.0, since=NOW_S) for i in range(3)), peer("b", 1, 1.0)]
    in_backoff = [answer(*records, now_s=NOW_S + i) for i in range(int(COOLDOWN_PERIODS * PERIOD_S))]
    assert all(isinstance(one, Moves) for one in in_backoff)
    assert isinstance(answer(*records, now_s=NOW_S + COOLDOWN_PERIODS * PERIOD_S), Move)


def test_a_peer_that_hangs_does_not_count_as_the_second_one() -> None:
    """Its record is still there, but its version is not the run's."""
    records = [peer("a", 0, 5.0), peer("dead", 0, 5.0, version=1), peer("b", 1, 1.0), peer("c", 1, 1.0)]
    assert all(one.peer not in ("a", "dead") for one in over_periods(*records) if isinstance(one, Move))


def test_records_of_different_age_are_not_taken_for_hung_peers() -> None:
    """With steps of less than a second, who announced seconds before the others is many versions behind."""
    fresh = [peer(f"a{i}", 1, 2.0, version=20) for i in range(3)]
    old = [peer("b", 0, 2.0, version=8), peer("c", 0, 2.0, version=9)]
    others = [peer(f"d{i}", 2, 2.0, version=14) for i in range(3)]
    assert not moves(*fresh, *old, *others, stages=3)


def test_one_liar_counts_for_no_more_than_32_and_holds_the_others_up_for_a_while_only() -> None:
    """It would be the best to move, and never does."""
    here = [peer(f"a{i}", 0, 1.0, load=0.1) for i in range(40)]
    told = over_periods(peer("liar", 0, 1e300), *here, peer("b", 1, 1.0, load=8.0), periods=40)
    named = [one.peer for one in told if isinstance(one, Move)]
    assert "liar" in named and 4 <= sum(name != "liar" for name in named) <= 16
    assert f" of stage 0's {40 + MAX_TIMES_MEDIAN:.3g} " in next(
        one.why for one in told if isinstance(one, Move)
    )


# --- any records whatever -----------------------------------------------------------------------------------

ANY_NUMBER = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.floats(0.05, 20.0),
    st.sampled_from([0.0, -1.0, 1e308, 5e-324, math.inf, -math.inf, math.nan]),
)
ANY_RECORD = st.builds(
    PeerRecord,
    peer=st.sampled_from([f"p{i}" for i in range(9)]),
    run=st.just("r"),
    stage=st.integers(-1, 4),
    state=st.sampled_from(["serving", "serving", "serving", "joining", "leaving", "left", "keeping"]),
    version=st.one_of(st.integers(4, 6), st.integers()),
    speed=ANY_NUMBER,
    load=ANY_NUMBER,
    state_bytes=st.one_of(st.integers(0, 10**9), st.integers()),
    bandwidth_bps=ANY_NUMBER,
    max_inflight=st.integers(),
    since=st.one_of(st.just(0.0), ANY_NUMBER),
)


@given(st.lists(ANY_RECORD, max_size=16), st.randoms(use_true_random=False))
@settings(max_examples=3 * settings.default.max_examples)
def test_whatever_strangers_write_the_answer_is_one_and_it_empties_no_stage(
    records: list[PeerRecord], dice: random.Random
) -> None:
    told = decided(*records, stages=4)
    shuffled = list(records)
    dice.shuffle(shuffled)
    assert decided(*shuffled, stages=4) == told
    assert told.why and "nan" not in told.why and "inf" not in told.why.replace("inflight", "")
    if told.moves:
        going = [move.peer for move in told.moves]
        assert len(set(going)) == len(going) > 0
        for move in told.moves:
            assert move.from_stage != move.to_stage
            serving = {r.peer for r in records if (r.stage, r.state) == (move.from_stage, "serving")}
            assert serving - set(going)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.5, 10.0)), min_size=3, max_size=9),
    st.randoms(use_true_random=False),
)
@settings(max_examples=2 * settings.default.max_examples)
def test_peers_that_see_other_speeds_and_loads_never_empty_a_stage_together(
    swarm: list[tuple[int, float]], dice: random.Random
) -> None:
    """Everybody acts on its own view of the same members, all at once."""
    records = [peer(f"p{i}", stage, speed) for i, (stage, speed) in enumerate(swarm)]
    before, left = Counter(r.stage for r in records), Counter(r.stage for r in records)
    for me in records:
        view = [replace(r, speed=r.speed * dice.uniform(0.3, 3), load=dice.uniform(0, 8)) for r in records]
        told = decided(*view, stages=3)
        if me.peer in {move.peer for move in told.moves}:
            left[me.stage] -= 1
    assert all(left[stage] > 0 for stage in before)


# --- many periods -------------------------------------------------------------------------------------------


@dataclass
class Swarm:
    """Peers of honest speeds that do what the rule says; queues stand where the run is slow."""

    stages: int
    dice: random.Random
    where: dict[str, int] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)
    since: dict[str, float] = field(default_factory=dict)
    now_s: float = NOW_S
    moved: int = 0

    def join(self, name: str, stage: int, since: float = 0.0) -> None:
        self.where[name], self.since[name] = stage, since
        self.speeds[name] = 20.0 ** self.dice.random()

    def leave(self, name: str) -> None:
        for kept in (self.where, self.speeds, self.since):
            del kept[name]

    def levels(self) -> list[float]:
        levels = [0.0] * self.stages
        for name, stage in self.where.items():
            levels[stage] += self.speeds[name]
        return levels

    def records(self) -> list[PeerRecord]:
        levels = self.levels()
        records = []
        for name, stage in self.where.items():
            use = min(levels) / levels[stage]
            load = 8.0 if use > 0.97 else min(8.0, use / (1 - use))
            records.append(
                peer(name, stage, self.speeds[name], load=load, since=self.since[name], state_bytes=10**7)
            )
        return records

    def period(self) -> Moves:
        self.now_s += PERIOD_S
        before = Counter(self.where.values())
        told = rebalance(self.records(), stages=self.stages, period_s=PERIOD_S, now_s=self.now_s)
        for move in told.moves:
            rested = self.now_s - self.since[move.peer] >= COOLDOWN_PERIODS * PERIOD_S
            assert rested or len(before) < self.stages
            self.where[move.peer], self.since[move.peer] = move.to_stage, self.now_s
            self.moved += 1
            assert Counter(self.where.values())[move.from_stage] >= 1
        return told

    def settle(self) -> None:
        """Until nobody moved for twenty periods: anchors differ in each."""
        quiet, moved = 0, self.moved
        while quiet < 20:
            least = min(self.levels())
            quiet = quiet + 1 if not self.period().moves else 0
            assert min(self.levels()) >= least * (1 - 1e-12), "a move made the run slower"
            assert self.moved - moved <= 4 * len(self.where), "it does not come to rest"


def random_swarm(seed: int, *, stages: int, peers: int) -> Swarm:
    swarm = Swarm(stages, random.Random(seed))
    for i in range(peers):
        swarm.join(f"p{i}", i if i < stages else swarm.dice.randrange(stages))
    return swarm


def best_throughput(speeds: list[float], stages: int) -> float:
    best = 0.0
    for rest in itertools.product(range(stages), repeat=len(speeds) - 1):
        levels = [0.0] * stages
        for stage, speed in zip((0, *rest), speeds, strict=True):
            levels[stage] += speed
        best = max(best, min(levels))
    return best


def ratios(count: int) -> list[float]:
    """Throughput at rest ÷ that of the best assignment, of `count` random swarms."""
    found = []
    for seed in range(count):
        stages = 2 + seed % 2
        swarm = random_swarm(seed, stages=stages, peers=stages + 2 + seed % 5)
        swarm.settle()
        found.append(min(swarm.levels()) / best_throughput(list(swarm.speeds.values()), stages))
    return sorted(found)


@pytest.mark.slow
def test_it_comes_to_rest_near_the_best_assignment() -> None:
    """Of 200 small swarms: median 0.955 of the best, 10 % below 0.852, 5 % below 0.807, the worst 0.672.

    0.8 is not reached where two peers would have to change places: the first half of a swap makes the run
    slower, and no move may do that; nor where a stage would be left to a single peer for less than 25 %.
    """
    found = ratios(200)
    assert found[0] > 0.65
    assert sum(ratio < 0.8 for ratio in found) <= 0.05 * len(found)
    assert found[len(found) // 2] > 0.95


@pytest.mark.parametrize("seed", range(20))
def test_with_peers_that_come_and_go_no_move_ever_empties_a_stage(seed: int) -> None:
    swarm = random_swarm(seed, stages=4, peers=12)
    for number in range(60):
        if swarm.dice.random() < 0.4 and len(swarm.where) > 5:
            swarm.leave(swarm.dice.choice(sorted(swarm.where)))
        if swarm.dice.random() < 0.4:
            swarm.join(f"n{number}", swarm.dice.randrange(4), since=swarm.now_s)
        swarm.period()
    swarm.settle()
    assert len(set(swarm.where.values())) == 4


# --- late records -------------------------------------------------------------------------------------------


def test_who_sees_the_others_late_decides_in_every_second_fourth_or_eighth_period() -> None:
    def decides(lag_s: float) -> list[int]:
        return [p for p in range(16) if is_due(period_s=60.0, lag_s=lag_s, now_s=60.0 * p + 30.0)]

    assert decides(0.0) == decides(60.0) == list(range(16))
    assert decides(61.0) == decides(120.0) == list(range(0, 16, 2))
    assert decides(212.0) == [0, 4, 8, 12]
    # Whoever decides more rarely does so together with those that decide more often: with the same anchors.
    assert set(decides(400.0)) < set(decides(212.0)) < set(decides(100.0))
    assert decides(math.inf) == decides(math.nan) == []

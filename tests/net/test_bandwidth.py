"""What the line to a peer can do, from what passes over it."""

from __future__ import annotations

import pytest

from peers.net.bandwidth import MAX_BPS, SMALL_BYTES, TELLING_BYTES, Line, Traffic
from peers.ports import NetworkPath


def line() -> Line:
    return Traffic(most_peers=1).of("peer")


def test_of_a_new_line_nothing_is_known() -> None:
    assert line().path() == NetworkPath(rtt_s=0.0, bandwidth_bps=0.0)


def test_the_quickest_answer_tells_the_round_trip() -> None:
    one = line()
    for took_s in (0.3, 0.051, 0.05, 2.0):
        one.answered(took_s, SMALL_BYTES)
    assert one.path().rtt_s == 0.05


def test_a_large_call_tells_nothing_of_the_round_trip_and_a_small_body_nothing_of_the_bandwidth() -> None:
    one = line()
    one.answered(0.3, SMALL_BYTES + 1)
    one.received(TELLING_BYTES - 1, TELLING_BYTES, 0.1)
    assert one.path() == NetworkPath()


def test_bodies_that_lay_in_a_buffer_or_shared_the_line_do_not_count_against_the_usual_ones() -> None:
    one = line()
    for took_s in (0.1, 0.1, 0.1, 0.0, 1e-9, 5.0, 4.0):
        one.received(125_000, 125_000, took_s)
    assert one.path().bandwidth_bps == 1e7
    only = line()
    only.received(125_000, 125_000, 0.0)
    assert only.path().bandwidth_bps == MAX_BPS


def test_a_body_that_had_to_wait_for_others_does_not_make_the_line_look_slow() -> None:
    one = line()
    for place in range(1, 9):
        one.received(125_000, place * 125_000, place * 0.1)
    assert one.path().bandwidth_bps == pytest.approx(1e7)


def test_a_line_that_became_slower_is_seen_after_a_while() -> None:
    one = line()
    for took_s in [0.01] * 40 + [0.1] * 40:
        one.answered(took_s, 100)
        one.received(125_000, 125_000, took_s)
    assert one.path() == NetworkPath(rtt_s=0.1, bandwidth_bps=1e7)

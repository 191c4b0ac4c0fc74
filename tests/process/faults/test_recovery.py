"""What the recovery benchmark makes of moments."""

from __future__ import annotations

from scripts.bench.recovery.recovery import control_s, rate, recovered_s, target


def test_recovered_is_when_a_window_begins_that_is_nearly_as_fast_as_the_end() -> None:
    """Ten a second, none for 1.5 s from 10.0 on, half as many until 15.0, and ten again."""
    fast, slow = [i / 10 for i in range(100)], [11.5 + i / 5 for i in range(18)]
    done = [*fast, *slow, *(15.0 + i / 10 for i in range(100))]
    assert rate(done, 0.0, 10.0) == 10.0
    assert rate(done, 10.0, 11.5) == 0.0
    found = recovered_s(done, 10.0, 25.0, window_s=1.0, per_s=rate(done, 18.0, 25.0))
    assert 4.8 <= found <= 5.0
    assert recovered_s(done, 10.0, 25.0, window_s=1.0, per_s=20.0) == 15.0


def test_the_control_says_what_the_measure_finds_where_nothing_happened() -> None:
    even = [i / 10 for i in range(100)]
    assert control_s(even, 0.0, 10.0, window_s=1.0) == 0.0
    bursts = [i + j / 100 for i in range(0, 20, 2) for j in range(20)]  # so a window of 1 s has 20 or 0
    assert 0.0 < control_s(bursts, 0.0, 20.0, window_s=1.0) < 2.0


def test_a_target_that_is_missed_is_named() -> None:
    row = {"kind": "kill", "detected_s": 0.2, "recovered_s": 0.3, "pass_s": 0.06}
    assert target(row) == "met"
    assert target({**row, "recovered_s": 0.4}) == "not recovered in 2 passes"
    assert target({**row, "detected_s": 1.2, "recovered_s": 1.2}) == "not detected in 1 s"
    assert target({**row, "kind": "hang", "detected_s": None}) == "not detected in 5 s"
    moved = {"kind": "move", "detected_s": None, "recovered_s": 11.0, "download_s": 0.5}
    assert target(moved) == "not recovered in 10 s + download"
    assert target({**moved, "download_s": 1.5}) == "met"

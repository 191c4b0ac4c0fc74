"""Traces of who is up: both forms, mistakes in them, and the names that are given."""

from __future__ import annotations

import pytest

from peers.sim.throughput.members import Trace, changes, read_trace
from swarm.errors import SetupError

JSON = '{"metadata": {"gap_seconds": 300}, "data": [0, 3, 3, 1, 2]}'
CSV = "0,0\n10,4\n10,6\n25.5,2\n\n40,2\n"


def test_json_counts_become_steps() -> None:
    assert read_trace(JSON) == Trace((0.0, 300.0, 900.0, 1200.0), (0, 3, 1, 2), 1500.0)


def test_of_changes_at_one_time_the_last_one_holds_and_equal_counts_are_one() -> None:
    assert read_trace(CSV) == Trace((0.0, 10.0, 25.5), (0, 6, 2), 40.0)


@pytest.mark.parametrize("header", ["seconds,count", "seconds,count,region"])
def test_a_table_may_have_a_header(header: str) -> None:
    assert read_trace(f"{header}\r\n0,3\r\n60,1\r\n") == read_trace("0,3\n60,1\n")


def test_before_its_first_line_nobody_is_up() -> None:
    assert read_trace("5,2\n9,0") == Trace((0.0, 5.0, 9.0), (0, 2, 0), 9.0)


def test_names_are_new_victims_are_among_those_up_and_a_seed_gives_the_same_again() -> None:
    trace = read_trace('{"metadata": {"gap_seconds": 60}, "data": [4, 9, 0, 3, 2, 8, 1]}')
    found = list(changes(trace, seed=7))
    assert found == list(changes(trace, seed=7)) != list(changes(trace, seed=8))
    up: set[str] = set()
    ever: set[str] = set()
    for change, count in zip(found, trace.counts, strict=True):
        assert up.issuperset(change.died) and not ever.intersection(change.joined)
        up = up - set(change.died) | set(change.joined)
        ever |= set(change.joined)
        assert len(up) == count


def test_a_trace_may_say_which_region_dies() -> None:
    trace = read_trace("0,3,Oslo\n0,2,Rome\n60,2,Rome\n100,0,Oslo\n100,1,Rome\n200,3,Oslo\n")
    assert trace.regions == ("Oslo", "Rome", "Oslo", "Rome", "Oslo") and trace.counts == (3, 2, 0, 1, 3)
    oslo, rome, gone, fewer, back = changes(trace, seed=1)
    assert set(gone.died) == set(oslo.joined) and gone.region == "Oslo" and back.region == "Oslo"
    assert set(fewer.died) < set(rome.joined) and len(back.joined) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"metadata": {"gap_seconds": 300}, "data": [1, ', "t.json: Input data was truncated"),
        (
            '{"metadata": {"gap_seconds": 0}, "data": [1]}',
            "t.json: Expected `float` > 0.0 - at `$.metadata.gap_seconds`",
        ),
        ('{"data": [1]}', "t.json: Object missing required field `metadata`"),
        (
            '{"metadata": {"gap_seconds": 300}, "data": []}',
            "t.json: Expected `array` of length >= 1 - at `$.data`",
        ),
        (
            '{"metadata": {"gap_seconds": 300}, "data": [1, -2]}',
            "Expected `int` >= 0 - at `$.data[1]`",
        ),
        (
            '{"metadata": {"gap_seconds": 300}, "data": [1.5]}',
            "Expected `int`, got `float` - at `$.data[0]`",
        ),
        ("0,1,Oslo\n9,2\n", "t.json, line 2: either all lines name a region, or none"),
        ("", "t.json is empty: lines of `seconds,count` are needed"),
        ("0,1\nnever,2", "t.json, line 2: 'never,2' is not `seconds,count`"),
        ("0,1\n7", "t.json, line 2: '7' is not `seconds,count`"),
        ("0,1\n9,2\n8,3", "t.json, line 3: '8,3' is not `seconds,count`, at 9 s or later"),
        ("-1,2", "t.json, line 1: '-1,2' is not `seconds,count`, at 0 s or later"),
        ("0,1\n3,-1", "t.json, line 2: '3,-1' is not `seconds,count`"),
        ("0,1\nnan,1", "t.json, line 2: 'nan,1' is not `seconds,count`"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_the_place(text: str, said: str) -> None:
    with pytest.raises(SetupError) as error:
        read_trace(text, "t.json")
    assert said in error.value.text

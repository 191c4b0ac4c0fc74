"""What a node knows of its run."""

from __future__ import annotations

from typing import Any

from peers.net.signed_records import Announced
from peers.record_table import RecordTable
from swarm.records import PeerRecord

KEY, OTHER_KEY = b"k" * 20, b"o" * 20


def announced(peer: str, expires: float, *, level: int = 0, **changes: Any) -> Announced:
    fields = {"peer": peer, "run": "r", "stage": 0, "state": "serving", "version": 0}
    return Announced(PeerRecord(**(fields | changes)), level, expires)


def names(records: Any) -> list[str]:
    return [record.peer for record in records]


def test_of_two_records_of_a_peer_the_later_one_counts_whichever_comes_first() -> None:
    table = RecordTable("me")
    assert table.put(announced("b", 10.0, stage=2), [KEY])
    assert table.put(announced("a", 10.0), [KEY])
    assert not table.put(announced("b", 9.0, stage=1), [OTHER_KEY])
    assert not table.put(announced("b", 10.0, stage=1), [OTHER_KEY])
    assert names(table.all(now=1.0)) == ["a", "b"]
    assert table.put(announced("b", 11.0, stage=1), [OTHER_KEY])
    assert [names(table.at(stage, now=1.0)) for stage in (0, 1, 2)] == [["a"], ["b"], []]
    assert len(table) == 2


def test_a_record_leaves_when_its_time_is_up_unless_it_was_renewed() -> None:
    table = RecordTable("me")
    table.put(announced("a", 10.0), [KEY])
    table.put(announced("b", 10.0), [KEY])
    table.put(announced("a", 20.0), [KEY])
    assert table.under(KEY, now=9.0) == {"a": 20.0, "b": 10.0}
    assert names(table.at(0, now=10.0)) == names(table.all(now=10.0)) == ["a"]
    assert table.find("b", now=10.0) is None and table.find("a", now=10.0) is not None
    assert table.under(KEY, now=10.0) == {"a": 20.0}
    assert table.levels(0) == {0: 1}
    assert table.all(now=20.0) == [] and table.under(KEY, now=20.0) == {} and len(table) == 0


def test_the_list_of_a_stage_is_the_same_object_until_that_stage_changes() -> None:
    table = RecordTable("me")
    table.put(announced("a", 10.0), [KEY])
    table.put(announced("b", 10.0, stage=1), [KEY])
    zero, one, both = table.at(0, now=0.0), table.at(1, now=0.0), table.all(now=0.0)
    table.put(announced("a", 11.0), [KEY])
    assert table.at(0, now=0.0) is zero and table.all(now=0.0) is both, "a renewal changes nothing"
    table.put(announced("a", 12.0, version=1), [KEY])
    assert table.at(0, now=0.0) is not zero and table.at(1, now=0.0) is one
    assert table.all(now=0.0) is not both
    table.put(announced("a", 13.0, stage=1, version=1), [KEY])
    assert names(table.at(0, now=0.0)) == [] and names(table.at(1, now=0.0)) == ["a", "b"]
    assert names(one) == ["b"]


def test_our_own_record_is_what_we_say_and_no_other_peer() -> None:
    table = RecordTable("me")
    mine = announced("me", 0.0, stage=1).record
    table.set_own(mine)
    assert not table.put(announced("me", 99.0, state="left"), [KEY])
    assert table.find("me", now=50.0) is mine
    assert list(table.at(1, now=50.0)) == list(table.all(now=50.0)) == [mine]
    assert table.under(KEY, now=50.0) == {"me": 99.0}, "so that it is not sent to us again and again"
    seen = table.at(1, now=50.0)
    table.set_own(announced("me", 0.0, stage=1).record)
    assert table.at(1, now=50.0) is seen
    table.set_own(None)
    assert table.find("me", now=50.0) is None and table.at(1, now=50.0) == []


def test_how_many_are_on_each_level_is_known_by_stage() -> None:
    table = RecordTable("me")
    for number in range(5):
        table.put(announced(f"p{number}", 10.0, level=number % 2), [KEY])
    assert table.levels(0) == {0: 3, 1: 2} and table.levels(1) == {}
    table.put(announced("p0", 11.0, level=1), [KEY])
    assert table.levels(0) == {0: 2, 1: 3}


def test_a_record_that_is_renewed_without_end_takes_no_more_room() -> None:
    """One stranger's node gave 200 versions of one record a second, and each was remembered until its end."""
    table = RecordTable("me")
    for version in range(1000):
        table.put(announced("p", 100.0 + version), [KEY])
    assert len(table._ends) == 1
    assert table.find("p", now=500.0) and dict(table.under(KEY, now=500.0)) == {"p": 1099.0}
    assert table.find("p", now=1098.0) and not table.find("p", now=1099.0)
    assert not (table._ends or table._under)


def test_strangers_do_not_fill_our_memory() -> None:
    table = RecordTable("me", most_known=3)
    assert [table.put(announced(f"p{number}", 10.0), [KEY]) for number in range(5)] == [True] * 3 + [
        False
    ] * 2
    assert table.put(announced("p0", 11.0), [KEY]), "those that are known are renewed"
    assert len(table.under(KEY, now=0.0)) == 3

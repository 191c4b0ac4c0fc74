"""Cases of which some stand for the others are all there, once each, and the others only where asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conftest import pytest_collection_modifyitems
from tests.seeds import cases, some


def marks_of(parameters: list[Any]) -> list[str]:
    return ["".join(mark.name for mark in getattr(one, "marks", ())) for one in parameters]


def test_every_fourth_case_that_is_not_quick_stands_for_the_others() -> None:
    others = ["further", "further", "further", "slow", "further"]
    assert marks_of(some(range(6), quick=[2])) == [*others[:2], "", *others[2:]]
    assert marks_of(cases([(n,) for n in range(6)], name="{0}", quick=lambda n: n == 2)) == marks_of(
        some(range(6), quick=[2])
    )


@pytest.mark.parametrize(
    ("every", "args", "played"), [(False, ["tests"], 1), (True, ["tests"], 2), (False, ["a.py::b[1]"], 2)]
)
def test_further_cases_are_played_if_they_are_asked_for(every: bool, args: list[str], played: int) -> None:
    left_out: list[Any] = []
    config = SimpleNamespace(
        args=args,
        getoption={"every": every}.__getitem__,
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    items = [Item(set()), Item({"further"})]
    pytest_collection_modifyitems(cast(Any, config), cast(Any, items))
    assert (len(items), len(left_out)) == (played, 2 - played)


class Item(SimpleNamespace):
    def __init__(self, marks: set[str]) -> None:
        super().__init__(path=SimpleNamespace(name="test_some.py"), get_closest_marker=marks.__contains__)

    __hash__ = object.__hash__

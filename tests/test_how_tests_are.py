"""Tests without processes wait in virtual time, and pass waiting times in instead of patching constants.

Both lists may only become shorter. The files are read, not run. Of many cases some stand for the others, and
what takes long is not in the quick part.
"""

from __future__ import annotations

import ast
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conftest import LONG, pytest_collection_modifyitems
from tests.seeds import cases, some

TESTS = Path(__file__).resolve().parent
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*$")
ELSEWHERE = frozenset({"process", "net", "slow"})
"""Marks of tests that are about real processes and daemons, or their time."""

PATCHED_TODAY = {"net": 8, "peers": 18, "sim": 1, "watch": 1}
"""Constants that tests of a folder patch: sizes of chunks and of what is under way, the share of what is
audited, paths of the system; in `net` a time."""
SLEEPS_TODAY = {"net": 4, "watch": 1}
"""Waits in real time: for an answer over a socket, for the next line of a program, or between calls that
a callee counts."""


def trees(*words: str) -> dict[str, ast.Module]:
    """Path below `tests` -> what is written there, of files that have one of these words."""
    found = {}
    for path in sorted(path for path in TESTS.rglob("test_*.py") if path.parent.name != "process"):
        text = path.read_text(encoding="utf-8")
        if any(word in text for word in words):
            found[str(path.relative_to(TESTS))] = ast.parse(text)
    return found


def patched(tree: ast.AST) -> Iterator[str]:
    """Names of constants that are replaced by `monkeypatch.setattr` or `patch.object`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("setattr", "object"):
            for word in node.args[:2]:
                said = word.value if isinstance(word, ast.Constant) else None
                if isinstance(said, str) and CONSTANT.match(said.rpartition(".")[2]):
                    yield said.rpartition(".")[2]


def marks(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names of the marks of a file or of one test."""
    said: list[ast.AST] = []
    if isinstance(node, ast.Module):
        for line in node.body:
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "pytestmark":
                said.append(line.value)
    else:
        said.extend(node.decorator_list)
    return set(re.findall(r"pytest\.mark\.(\w+)", " ".join(map(ast.unparse, said))))


def waits(tree: ast.Module) -> int:
    """How often something is slept through in real time, a turn of the loop aside."""
    found = 0
    text = ast.unparse(tree)
    virtual = "peers.sim.loop import" in text or "memory_dht import" in text
    for item in tree.body:
        own = marks(item) if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) else set()
        if not getattr(item, "name", "").startswith("test_") and re.search(
            r"mark\.(virtual_time|process)", text
        ):
            continue  # a helper of such tests
        if virtual or (own | marks(tree)) & {"virtual_time", *ELSEWHERE}:
            continue
        for node in ast.walk(item):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "sleep":
                found += ast.unparse(node.args[0]) != "0"
    return found


def by_folder(found: dict[str, int]) -> Counter[str]:
    """The sums of files that lie in one folder."""
    sums = Counter[str]()
    for file, count in found.items():
        sums[file.partition("/")[0]] += count
    return sums


def test_no_constant_is_patched_that_was_not_and_no_time() -> None:
    found = {file: list(patched(tree)) for file, tree in trees(".setattr(", ".object(").items()}
    sums = by_folder({file: len(names) for file, names in found.items()})
    assert not sums - Counter(PATCHED_TODAY), found
    times = {
        file: [name for name in names if name.endswith("_S") and not name.endswith("_PER_S")]
        for file, names in found.items()
    }
    free = ("net/", "sim/test_shipped_mutations")  # those are wrong on purpose
    assert not {file: names for file, names in times.items() if names and not file.startswith(free)}


def test_no_test_sleeps_that_did_not() -> None:
    found = {file: waits(tree) for file, tree in trees(".sleep(").items()}
    assert not by_folder(found) - Counter(SLEEPS_TODAY), found


@pytest.mark.parametrize(
    ("source", "sleeps", "constants"),
    [
        ("def test() -> None:\n    time.sleep(1)", 1, []),
        ("async def test() -> None:\n    await asyncio.sleep(0)", 0, []),
        ("@pytest.mark.virtual_time\nasync def test() -> None:\n    await asyncio.sleep(9)", 0, []),
        ("pytestmark = pytest.mark.process\nasync def test() -> None:\n    await asyncio.sleep(9)", 0, []),
        ("monkeypatch.setattr(module, 'POLL_S', 1)", 0, ["POLL_S"]),
        ("patch.object(module, '_PIECES', 1)", 0, ["_PIECES"]),
        ("monkeypatch.setattr('peers.x.LOOK_S', 1)", 0, ["LOOK_S"]),
        ("monkeypatch.setattr(module, 'function', 1)", 0, []),
    ],
)
def test_the_reader_of_tests_sees_all_forms(source: str, sleeps: int, constants: list[str]) -> None:
    tree = ast.parse(source)
    assert (waits(tree), list(patched(tree))) == (sleeps, constants)


def test_a_test_without_processes_is_ended_by_its_cpu_time_and_later_by_the_clock() -> None:
    left_s, clock_s = (signal.getitimer(timer)[0] for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL))
    assert 0.0 < left_s < 121.0 < clock_s  # the kernel adds a tick
    with pytest.raises(pytest.fail.Exception, match="no end after 120 CPU-s"):
        signal.raise_signal(signal.SIGPROF)


# --- what is played --------------------------------------------------------------------------------------


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
        super().__init__(path=Path("test_some.py"), nodeid="", get_closest_marker=marks.__contains__)

    __hash__ = object.__hash__


def test_each_test_that_takes_long_is_there() -> None:
    for line in sorted(LONG):
        path, name, *_ = line.split("::")
        file = TESTS.parent / path
        assert file.exists() and name in file.read_text(encoding="utf-8"), (
            f"{line}: run scripts/bench/test_times.py --long"
        )

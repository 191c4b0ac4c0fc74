"""The mutations of the protocol still fit the code: each changes one place."""

from __future__ import annotations

import argparse
import builtins
import json
import re
import symtable
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.bench.mutants import (
    FOR_EVER,
    break_rule,
    forked,
    ordered,
    path_of,
    row,
    share_of,
    targets_of,
)
from scripts.bench.mutations import MUTATIONS, Mutation
from swarm.protocol.ledger import Ledger
from swarm.protocol.step import TRANSITIONS, StepState

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "benchmarks" / "mutants.json"


def test_there_are_many_and_each_has_its_own_name() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) >= 200
    assert sorted(set(names)) == sorted(names)


def undefined(table: symtable.SymbolTable, known: set[str]) -> set[str]:
    """Names that are read and nowhere bound. `known`: those of the module, and what Python has."""
    read = {one.get_name() for one in table.get_symbols() if one.is_global() and one.is_referenced()}
    return read.union(*(undefined(inner, known) for inner in table.get_children())) - known


def test_a_mutation_changes_one_place_of_code_that_still_parses_and_names_what_there_is() -> None:
    left = defaultdict[str, list[Mutation]](list)
    for mutation in MUTATIONS:
        assert mutation.goes_wrong.endswith("."), mutation.name
        for name in mutation.tests:
            assert (ROOT / path_of(name)).exists(), mutation.name
        left[mutation.file].append(mutation)
    for file, mutations in left.items():
        source = (ROOT / file).read_text()
        for mutation in mutations:
            mutation.applied(source)
        while mutations:  # those at different places together: to parse takes longer than all else
            broken, later, new = mutations[0].applied(source), [], mutations[0].new
            for mutation in mutations[1:]:
                if broken.count(mutation.old) == 1:
                    broken, new = mutation.applied(broken), f"{new} {mutation.new}"
                else:
                    later.append(mutation)
            table = symtable.symtable(broken, file, "exec")  # in half the time of a tree
            bound = [one for one in table.get_symbols() if one.is_assigned() or one.is_imported()]
            known = {*map(symtable.Symbol.get_name, bound), *dir(builtins), "__file__"}
            # What `if False` has left behind is never read.
            named = set(re.findall(r"\w+", new))
            assert not named & undefined(table, known), file
            mutations = later


def test_a_place_that_is_gone_is_said() -> None:
    with pytest.raises(ValueError, match="count-a-duplicate: 0 places in swarm/protocol/ledger"):
        MUTATIONS[0].applied("nothing of it")


def test_the_table_has_a_row_for_each() -> None:
    rows = json.loads(TABLE.read_text())["tables"][0]["rows"]
    assert [row["what"] for row in rows] == [mutation.name for mutation in MUTATIONS]


def test_in_a_fork_a_rule_is_broken_for_all_that_know_the_code() -> None:
    named = {mutation.name: mutation for mutation in MUTATIONS}

    def counts_twice(_: object) -> str:
        ledger = Ledger(0, 4)
        break_rule(named["count-a-duplicate"])
        for _ in range(2):
            ledger.record(1)
        return "counted twice"

    def prepared_opens(_: object) -> str:
        break_rule(named["open-again-from-prepared"])
        from swarm.protocol import step

        return str(step.StepState.OPEN in step.TRANSITIONS[step.StepState.PREPARED])

    assert forked(counts_twice, limit_s=60).said == "counted twice"
    assert forked(prepared_opens, limit_s=60).said == "True"
    assert not Ledger(0, 4).done and StepState.OPEN not in TRANSITIONS[StepState.PREPARED]


def test_what_goes_round_and_round_is_ended_and_what_breaks_is_said() -> None:
    def goes_round(note: Callable[[str], None]) -> str:
        note("tests/a.py::test_b")
        while True:
            pass

    def breaks(_: object) -> str:
        raise KeyError("gone")

    ended = forked(goes_round, limit_s=0.2)
    assert ended.said == f"tests/a.py::test_b {FOR_EVER}" and 0.2 < ended.cpu_s < 20
    with pytest.raises(RuntimeError, match="died KeyError: 'gone'"):
        forked(breaks, limit_s=60)


def test_a_ring_runs_what_is_likeliest_first_and_nothing_that_cannot_see_the_code() -> None:
    ledger, server = MUTATIONS[0], next(m for m in MUTATIONS if m.file == "peers/stage/server.py")
    targets = targets_of("pure", ledger)
    assert targets == ("tests/protocol/test_ledger.py", "tests/protocol", "tests/policy")
    tests = [
        "tests/policy/test_a.py::test_b", "tests/peers/test_a.py::test_b", "tests/protocol/test_a.py::test_b",
        "tests/protocol/test_a.py::test_c", "tests/protocol/test_ledger.py::test_a",
    ]  # fmt: skip
    assert ordered(tests, targets, tests[3]) == [tests[3], tests[4], tests[2], tests[0]]
    assert targets_of("pure", server) == () and targets_of("peers", server)
    assert targets_of("sim", server) == ("peers.sim",)


def test_a_share_of_the_list() -> None:
    assert share_of("2/4") == (2, 4)
    with pytest.raises(argparse.ArgumentTypeError, match="'5/4' is not a share such as 2/4"):
        share_of("5/4")


def test_a_mutation_that_nobody_looked_at_is_not_called_noticed() -> None:
    said = row(MUTATIONS[0], [])
    assert (said["ring"], said["noticed_by"], said["seconds"]) == ("not run", "", None)

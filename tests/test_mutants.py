"""The mutations of the protocol still fit the code: each changes one place."""

from __future__ import annotations

import argparse
import ast
import functools
import json
from pathlib import Path

import pytest

from scripts.bench.mutants import failures, pytest_words, row, share_of, targets_of, violation
from scripts.bench.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "benchmarks" / "mutants.json"


@functools.cache
def parsed(file: str) -> str:
    return ast.dump(ast.parse((ROOT / file).read_text()))


def test_there_are_many_and_each_has_its_own_name() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) >= 200
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_place_of_code_that_still_parses(mutation: Mutation) -> None:
    mutated = mutation.applied((ROOT / mutation.file).read_text())
    assert ast.dump(ast.parse(mutated)) != parsed(mutation.file)
    assert mutation.goes_wrong.endswith(".")
    for name in mutation.tests:
        assert (ROOT / "tests" / "peers" / f"{name}.py").exists()


def test_a_place_that_is_gone_is_said() -> None:
    with pytest.raises(ValueError, match="count-a-duplicate: 0 places in swarm/protocol/ledger"):
        MUTATIONS[0].applied("nothing of it")


def test_the_table_has_a_row_for_each() -> None:
    rows = json.loads(TABLE.read_text())["tables"][0]["rows"]
    assert [row["what"] for row in rows] == [mutation.name for mutation in MUTATIONS]


def test_what_a_ring_said_is_read_from_its_output() -> None:
    said = "...\nFAILED tests/a.py::test_b[1 - 2] - assert 1\nERROR tests/c.py\n2 failed"
    assert failures(said)[-1] == "tests/c.py" and failures(said)[0].startswith("tests/a.py::test_b[1")
    assert violation('a line\n{"rows": [{"violations": ["I1: twice"]}]}') == "I1: twice"
    assert violation('{"rows": [{"violations": []}]}') == violation("Traceback") == ""
    assert "--deselect=tests/a.py::test_b" in pytest_words(["tests"], ["tests/a.py::test_b"])


def test_a_ring_runs_what_is_likeliest_first_and_nothing_that_cannot_see_the_code() -> None:
    ledger, server = MUTATIONS[0], next(m for m in MUTATIONS if m.file == "peers/stage/server.py")
    assert targets_of("pure", ledger) == ("tests/protocol/test_ledger.py", "tests/protocol", "tests/policy")
    last = "tests/protocol/test_step.py::test_a_sum_that_was_promised_anew_is_not_opened"
    assert targets_of("pure", ledger, last)[0] == last
    assert targets_of("pure", ledger, "tests/protocol/test_step.py::test_gone") == targets_of("pure", ledger)
    assert targets_of("pure", server) == () and targets_of("peers", server)
    assert targets_of("sim", server) == ("peers.sim",)


def test_a_share_of_the_list() -> None:
    assert share_of("2/4") == (2, 4)
    with pytest.raises(argparse.ArgumentTypeError, match="'5/4' is not a share such as 2/4"):
        share_of("5/4")


def test_a_mutation_that_nobody_looked_at_is_not_called_noticed() -> None:
    said = row(MUTATIONS[0], [])
    assert (said["ring"], said["noticed_by"], said["seconds"]) == ("not run", "", None)

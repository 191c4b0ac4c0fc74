"""Scenarios of the protocol with their transcripts; the format is in `scenario.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.protocol.scenario import check, play

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_ends_as_it_is_written(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, rewrite=request.config.getoption("--rewrite"))


def test_there_are_scenarios_and_a_wrong_transcript_is_noticed(tmp_path: Path) -> None:
    assert len(SCENARIOS) >= 12
    wrong = tmp_path / "wrong.txt"
    wrong.write_text("> run stages=1\n> add ann to 0\n> pass 1\n  ann sings\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"wrong.txt: see `pytest .* --rewrite`"):
        check(wrong, rewrite=False)


def test_a_line_that_means_nothing_is_said() -> None:
    with pytest.raises(ValueError, match="no such line in a script: 'dance'"):
        play("> run\n> dance\n")

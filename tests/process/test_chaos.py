"""Faults of every kind against processes: only time is lost. The long form is scripts/bench/chaos.py."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from scripts.bench.chaos import WEIGHTS, Options, deck, play, quick, speaker, verdict


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_faults_of_every_kind_change_no_weight_and_leave_nothing() -> None:
    """Each kind once: each microbatch counts once, and the weights are those of one process, to 1e-9."""
    found = play(quick(Options(seed=11)), speaker())
    assert verdict(found) == ""
    assert found["faults"] >= len(WEIGHTS) - len(found["skipped_kinds"])
    assert found["cells_without_audit"] < found["cells"] / 10


def test_a_seed_deals_the_same_faults_and_every_kind_of_them() -> None:
    def dealt(seed: int) -> list[str]:
        return list(itertools.islice(deck(random.Random(seed), WEIGHTS), 200))

    assert dealt(1) == dealt(1) != dealt(2)
    assert Counter(dealt(1)).keys() == WEIGHTS.keys()


def test_what_is_not_as_it_must_be_is_said() -> None:
    fine = {"weights_differ": 1e-12, "wrong_audits": {}, "survived": 9, "faults": 9}
    assert verdict(fine) == ""
    assert verdict({**fine, "weights_differ": 2e-9}) == "the weights differ by 2.00e-09"
    assert "counted twice: {'stage 1 step 4': [(0, 1)]}" in verdict(
        {**fine, "wrong_audits": {"stage 1 step 4": [(0, 1)]}}
    )
    assert verdict({**fine, "survived": 7}) == "2 faults were the last ones of the run"

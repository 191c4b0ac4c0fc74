"""The states of a step: what may follow what, and who may move it."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol.ledger import Ledger
from swarm.protocol.rounds import Prepared
from swarm.protocol.step import TRANSITIONS, ImpossibleTransition, ReplicaStep, StepState

ROOT = Path(__file__).resolve().parents[2]
MOVERS = {
    "start_round": {"peers/stage/server.py"},
    "exchange": {"peers/stage/server.py"},
    "refuse_round": {"peers/stage/server.py"},
    "end_round": {"peers/stage/server.py", "peers/stage/recovery.py"},
    "give_up_round": {"peers/stage/server.py"},
    "open_again": {"peers/stage/server.py"},
    "promise": {"peers/stage/server.py", "peers/stage/recovery.py"},
    "complete": set[str](),  # also the name of a function of the stage's tensors
    "incomplete": {"peers/stage/tied_weights.py"},
    "prepare": {"peers/stage/tied_weights.py"},
    "hand_over": {"peers/stage/handoff.py"},
    "keep": {"peers/stage/handoff.py"},
    "take": {"peers/stage/open_step.py"},
    "abort": {"peers/stage/open_step.py"},
}
"""Which module calls which method that moves a step."""


def step() -> ReplicaStep:
    return ReplicaStep(3, Ledger(3, 4))


def test_every_state_is_in_the_table_and_the_last_two_end_it() -> None:
    assert set(TRANSITIONS) == set(StepState)
    assert {state for state, after in TRANSITIONS.items() if not after} == {
        StepState.TAKEN, StepState.ABORTED
    }  # fmt: skip
    assert all(StepState.ABORTED in after for after in TRANSITIONS.values() if after)


def test_only_a_prepared_step_is_taken_and_nothing_moves_it_then() -> None:
    this = step()
    with pytest.raises(ImpossibleTransition, match="step 3 is open: it cannot be taken"):
        this.take()
    with pytest.raises(ImpossibleTransition, match="step 3 is open: it cannot be prepared"):
        this.prepare(Prepared("r", 1.0, ""))
    this.promise("r", now=0.0)
    this.prepare(Prepared("r", 1.0, ""))
    this.take()
    this.abort()
    assert this.state is StepState.TAKEN
    with pytest.raises(ImpossibleTransition, match="step 3 is taken: it cannot be frozen"):
        this.start_round("s", now=0.0)


def test_a_sum_that_was_promised_anew_is_not_opened() -> None:
    """By an order to open it that is still under way."""
    this = step()
    this.start_round("one", now=0.0)
    this.exchange("one")
    this.end_round("one", failed=True)
    assert this.may_thaw
    this.start_round("two", now=1.0)
    assert not this.may_thaw
    this.open_again()
    assert this.state is StepState.FROZEN and this.failed_round == "one"


def test_a_round_that_is_refused_opens_the_sum_unless_another_froze_it() -> None:
    this = step()
    this.start_round("one", now=0.0)
    this.refuse_round("one")
    assert (this.state, this.failed_round) == (StepState.OPEN, "one")
    this.start_round("two", now=0.0)
    this.ledger.freeze("two")
    this.end_round("two", failed=True)
    this.start_round("three", now=0.0)
    this.refuse_round("three")
    assert this.state is StepState.FROZEN, "else nobody would open it again"


@given(st.lists(st.sampled_from(sorted(MOVERS))))
def test_in_whatever_order_a_step_moves_by_the_table_only(names: list[str]) -> None:
    this = step()
    arguments: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {
        "start_round": (("r",), {"now": 0.0}), "promise": (("r",), {"now": 0.0}),
        "exchange": (("r",), {}), "refuse_round": (("r",), {}), "end_round": (("r",), {"failed": True}),
        "prepare": ((Prepared("r", 1.0, ""),), {}),
    }  # fmt: skip
    seen = [this.state]
    go = this._go  # pyright: ignore[reportPrivateUsage]

    def noted(state: StepState) -> None:
        go(state)
        seen.append(state)

    this._go = noted  # type: ignore[method-assign]
    for name in names:
        positional, named = arguments.get(name, ((), {}))
        try:
            getattr(this, name)(*positional, **named)
        except ImpossibleTransition:
            assert this.state is seen[-1], "a refused transition changes nothing"
    for before, after in pairwise(seen):
        assert after is before or after in TRANSITIONS[before]
    assert this.state is seen[-1]


def test_only_the_modules_that_the_table_of_movers_names_move_a_step() -> None:
    found: dict[str, set[str]] = {name: set() for name in MOVERS}
    for path in sorted((ROOT / "peers" / "stage").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                own = owner == "step" or (owner == "self" and path.name == "open_step.py")
                if own and node.func.attr in found:
                    found[node.func.attr].add(path.relative_to(ROOT).as_posix())
    found["complete"].discard("peers/stage/tied_weights.py")
    assert found == MOVERS

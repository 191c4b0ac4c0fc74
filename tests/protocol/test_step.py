"""The states of a step: what may follow what, and who may move it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
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
    "start_round": {"peers/stage/actions.py"},
    "exchange": {"peers/stage/actions.py"},
    "refuse_round": {"peers/stage/actions.py"},
    "end_round": {"peers/stage/actions.py", "peers/stage/tied_weights.py"},
    "give_up_round": {"peers/stage/actions.py"},
    "open_again": {"peers/stage/actions.py"},
    "promise": {"peers/stage/tied_weights.py"},
    "complete": set[str](),  # also the name of a function of the stage's tensors
    "incomplete": {"peers/stage/tied_weights.py"},
    "prepare": {"peers/stage/tied_weights.py"},
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


def test_a_sum_that_is_still_frozen_is_not_open() -> None:
    """It was promised anew and given up again while an order to open it was under way (seed 1819)."""
    this = step()
    this.start_round("one", now=0.0)
    this.ledger.freeze("one")
    this.give_up_round()
    this.open_again()
    assert this.state is StepState.FROZEN and this.may_thaw
    this.ledger.thaw()
    this.open_again()
    assert this.state is StepState.OPEN


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


def at(state: StepState) -> ReplicaStep:
    """A step that came to a state as it does in a run; with a round under way it is called `r`."""
    this = step()
    if state not in (StepState.OPEN, StepState.ABORTED):
        this.start_round("r", now=0.0)
        if state is not StepState.FROZEN:
            this.exchange("r")
        if state not in (StepState.FROZEN, StepState.REDUCING):
            this.complete()
        if state in (StepState.PREPARED, StepState.TAKEN):
            this.prepare(Prepared("r", 1.0, ""))
    if state is StepState.TAKEN:
        this.take()
    if state is StepState.ABORTED:
        this.abort()
    assert this.state is state
    return this


CALLS: dict[str, Callable[[ReplicaStep], None]] = {
    "start": lambda step: step.start_round("s", now=0.0),
    "exchange": lambda step: step.exchange("r"),
    "refuse": lambda step: step.refuse_round("r"),
    "end": lambda step: step.end_round("r", failed=False),
    "give up": lambda step: step.give_up_round(),
    "open again": lambda step: step.open_again(),
    "promise": lambda step: step.promise("s", now=0.0),
    "complete": lambda step: step.complete(),
    "incomplete": lambda step: step.incomplete(),
    "prepare": lambda step: step.prepare(Prepared("s", 1.0, "")),
    "take": lambda step: step.take(),
    "abort": lambda step: step.abort(),
}
BECOMES = """
              open     frozen      reducing    completing  prepared  taken  aborted
start         frozen   frozen      frozen      frozen      -         -      -
exchange      open     reducing    reducing    completing  prepared  taken  aborted
refuse        open     open        -           -           -         taken  aborted
end           open     frozen      frozen      frozen      prepared  taken  aborted
give up       open     frozen      frozen      frozen      prepared  taken  aborted
open again    open     frozen      reducing    completing  prepared  taken  aborted
promise       frozen   frozen      reducing    completing  prepared  taken  aborted
complete      open     completing  completing  completing  prepared  taken  aborted
incomplete    open     frozen      reducing    frozen      prepared  taken  aborted
prepare       -        prepared    prepared    prepared    prepared  -      -
take          -        -           -           -           taken     taken  -
abort         aborted  aborted     aborted     aborted     aborted   taken  aborted
"""
"""What a step becomes by each call; `-`: the call is refused as a bug of the caller."""


def test_what_becomes_of_a_step_by_each_call_in_each_state() -> None:
    states, *rows = (re.split(r"  +", line.strip()) for line in BECOMES.strip("\n").splitlines())
    assert states == [state.value for state in StepState] and [row[0] for row in rows] == list(CALLS)
    for call, *due in rows:
        for state, becomes in zip(StepState, due, strict=True):
            this = at(state)
            try:
                CALLS[call](this)
                found = this.state.value
            except ImpossibleTransition:
                found = "-"
                assert this.state is state, "a call that is refused changes nothing"
            assert found == becomes, f"{call} in {state.value}: {found}, not {becomes}"


@given(st.lists(st.sampled_from(sorted(MOVERS))))
def test_in_whatever_order_a_step_moves_by_the_table_only(names: list[str]) -> None:
    this = step()
    arguments: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {
        "start_round": (("r",), {"now": 0.0}), "promise": (("r",), {"now": 0.0}),
        "exchange": (("r",), {}), "refuse_round": (("r",), {}), "end_round": (("r",), {"failed": True}),
        "prepare": ((Prepared("r", 1.0, ""),), {}),
    }  # fmt: skip
    seen = [this.state]
    go = this._go  # type: ignore

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

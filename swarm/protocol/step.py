"""One step at one replica: its states, and which thread may change what. Pure.

    OPEN → FROZEN → REDUCING → COMPLETING → PREPARED → TAKEN     any but TAKEN → ABORTED
    FROZEN → COMPLETING                   with the result that another replica has
    REDUCING, COMPLETING → FROZEN → OPEN  a round is given up, and the sum opens again

What belongs to a step, and where it changes:

    state, round, prepared            the event loop, in the methods of `ReplicaStep`
    ledger.in_progress                the event loop: a microbatch is claimed and released
    sum, kept; ledger.done,           one job of the device that holds the books (`peers.ports.StageDevice`):
      .frozen_for                     of rank STEP, which runs alone, or one that adds a microbatch
    reduced, shared, whole, counts    the event loop, in the task that reduces or fetches
    weights, version                  a job of rank STEP, once the step is TAKEN

Above the methods of `ReplicaStep` is the module that calls them; `tests/protocol/test_step.py` finds others.
The ledger is frozen after the state (a step is FROZEN before its ledger is), and opens before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from swarm.errors import SwarmError
from swarm.protocol.ledger import Ledger
from swarm.protocol.rounds import Prepared


class StepState(Enum):
    """The state of a step at one replica."""

    OPEN = "open"
    """Microbatches enter the sum."""
    FROZEN = "frozen"
    """The sum is promised to a round, or was: no microbatch enters it."""
    REDUCING = "reducing"
    """The round's replicas exchange their sums."""
    COMPLETING = "completing"
    """The stage's sum is complete; other stages' parts of tied weights are on their way."""
    PREPARED = "prepared"
    """All that taking the step needs is here."""
    TAKEN = "taken"
    ABORTED = "aborted"
    """The replica went on from another state: nothing of this step counts."""


_S = StepState
TRANSITIONS: dict[StepState, frozenset[StepState]] = {
    _S.OPEN: frozenset({_S.FROZEN, _S.ABORTED}),
    _S.FROZEN: frozenset({_S.OPEN, _S.REDUCING, _S.COMPLETING, _S.ABORTED}),
    _S.REDUCING: frozenset({_S.FROZEN, _S.COMPLETING, _S.ABORTED}),
    _S.COMPLETING: frozenset({_S.FROZEN, _S.PREPARED, _S.ABORTED}),
    _S.PREPARED: frozenset({_S.TAKEN, _S.ABORTED}),
    _S.TAKEN: frozenset(),
    _S.ABORTED: frozenset(),
}


class ImpossibleTransition(SwarmError):
    """A transition that the table does not have: a bug of the caller."""


@dataclass(slots=True)
class Round:
    """The all-reduce that this replica works on."""

    name: str
    began_s: float
    told_s: float = 0.0
    """When this replica first heard that another has the result; 0: not yet."""


class ReplicaStep:
    """Step `t` at one replica, from its first microbatch to its commit."""

    def __init__(self, t: int, ledger: Ledger) -> None:
        self.t, self.ledger = t, ledger
        self.round: Round | None = None
        """None while no reduce of this step runs here."""
        self.failed_round = ""
        """The last round that failed here."""
        self.gave_all = ""
        """The last round to which this replica gave all that others need to have the result."""
        self.prepared: Prepared | None = None
        """The description of the result, in PREPARED and TAKEN."""
        self._state = StepState.OPEN

    @property
    def state(self) -> StepState:
        return self._state

    @property
    def over(self) -> bool:
        """Whether the step was taken or given up."""
        return self._state in (StepState.TAKEN, StepState.ABORTED)

    @property
    def begun(self) -> bool:
        """Whether this replica has a microbatch of it, or has a part in a round."""
        return self._state is not StepState.OPEN or self.ledger.done | self.ledger.in_progress > 0

    def loss_of(self, m: int) -> float:
        """Last stage: the loss of a microbatch in the sum; 0 if it is not known any more."""
        raise NotImplementedError

    # -- all-reduce (peers.stage.actions) ---------------------------------------------------------

    def start_round(self, name: str, *, now: float) -> None:
        """Promise the sum to a round, instead of the one before it."""
        self._go(StepState.FROZEN)
        self.round = Round(name, now)

    def exchange(self, name: str) -> None:
        """Start the exchange of sums: the ledger is frozen. Not once another replica's result is here."""
        if self._is_at(name) and self._state is StepState.FROZEN:
            self._go(StepState.REDUCING)

    def give_all(self, name: str) -> None:
        """Note that others may have the result of a round from now on; of none if `name` is empty."""
        self.gave_all = name

    def refuse_round(self, name: str) -> None:
        """Stay out of a round: the sum was not frozen."""
        self.failed_round = name
        if self._is_at(name):
            self.round = None
            if self.ledger.frozen_for is None:  # else for an earlier one: the coordinator opens it again
                self._go(StepState.OPEN)

    def end_round(self, name: str, *, failed: bool) -> None:
        """End the work on a round. Without a result the sum stays frozen until the coordinator opens it."""
        if failed:
            self.failed_round = name
        if self._is_at(name):
            self.give_up_round()

    def give_up_round(self) -> None:
        """Give up a round; the ledger is still frozen."""
        self.round = None
        if self._state in (StepState.REDUCING, StepState.COMPLETING):
            self._go(StepState.FROZEN)

    @property
    def may_thaw(self) -> bool:
        """Whether the ledger may open again: nothing was promised meanwhile. On any thread."""
        return self._state is StepState.FROZEN and self.round is None

    def open_again(self) -> None:
        """Note that the ledger is open again, unless the sum was promised anew meanwhile, and perhaps the
        new round given up as well: then the ledger is as it was.
        """
        if self.may_thaw and self.ledger.frozen_for is None:
            self._go(StepState.OPEN)

    # -- another replica's result (peers.stage.tied_weights) ----------------------------------------

    def promise(self, name: str, *, now: float) -> None:
        """Note that another replica's result of a round has arrived: nothing enters the sum any more."""
        if self._state is StepState.OPEN:
            self._go(StepState.FROZEN)
        self.round = Round(name, now)

    # -- the result (peers.stage.tied_weights) ----------------------------------------------------

    def complete(self) -> None:
        """Note that the stage's sum is complete. A prepared step stays so until a new result is, too."""
        if self._state in (StepState.FROZEN, StepState.REDUCING):
            self._go(StepState.COMPLETING)

    def incomplete(self) -> None:
        """Note that other stages' parts did not come."""
        if self._state is StepState.COMPLETING:
            self._go(StepState.FROZEN)

    def prepare(self, prepared: Prepared) -> None:
        """Note that all that taking the step needs is here."""
        self.complete()
        self._go(StepState.PREPARED)
        self.prepared = prepared

    # -- the end (peers.stage.state) --------------------------------------------------------------

    def take(self) -> None:
        """Take the step: it is committed, and its result enters the weights."""
        self._go(StepState.TAKEN)

    def abort(self) -> None:
        """Abort the step: the replica went on from another state. Does nothing if the step was taken."""
        if not self.over:
            self._go(StepState.ABORTED)

    def _is_at(self, name: str) -> bool:
        return self.round is not None and self.round.name == name and not self.over

    def _go(self, state: StepState) -> None:
        if state is not self._state and state not in TRANSITIONS[self._state]:
            raise ImpossibleTransition(f"step {self.t} is {self._state.value}: it cannot be {state.value}")
        self._state = state

"""Virtual time, and what a caller sees of a bad line: the same as with real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from swarm.errors import Busy, Leaving, PeerFault, PeerGone, PeerSilent, SwarmError
from swarm.sim.clock import MOST_AT_ONCE, Clock, Process
from swarm.sim.dice import Dice
from swarm.sim.network import SILENCE_S, Lines, Network, Node


class Pair:
    """a calls b; b counts what it was asked."""

    def __init__(self, lines: Lines | None = None, handler: Callable[[str, Any], Any] | None = None) -> None:
        self.clock = Clock()
        self.network = Network(self.clock, Dice(3), lines or Lines())
        self.a, self.b = Node(self.clock, "a"), Node(self.clock, "b")
        self.asked: list[Any] = []
        self.handler = handler
        self.network.add(self.a)
        self.network.add(self.b)
        self.b.handlers["double"] = self._double

    def _double(self, caller: str, question: int) -> Any:
        self.asked.append(question)
        return 2 * question if self.handler is None else self.handler(caller, question)

    def call(self, question: int = 4, deadline_s: float | None = None) -> list[Any]:
        """What comes of it: [answer or error, when]."""
        seen: list[Any] = []

        async def ask() -> None:
            try:
                seen.append(await self.network.call(self.a, "b", "double", question, deadline_s))
            except SwarmError as error:
                seen.append(error)
            seen.append(self.clock.now)

        self.a.spawn(ask())
        return seen

    def run(self, seconds: float) -> None:
        self.clock.run(until=lambda: False, limit_s=seconds)


def test_events_come_in_their_order_and_those_of_one_time_as_they_were_made() -> None:
    clock, seen = Clock(), list[str]()
    for delay_s, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        clock.after(delay_s, None, seen.append, name)
    assert clock.run(until=lambda: len(seen) == 3, limit_s=5.0)
    assert seen == ["first", "second", "late"] and clock.now == 2.0


def test_time_stops_at_its_limit() -> None:
    clock = Clock()
    clock.after(9.0, None, lambda _: None)
    assert not clock.run(until=lambda: False, limit_s=5.0) and clock.now == 0.0


def test_what_calls_itself_for_ever_at_one_instant_is_ended() -> None:
    clock, seen = Clock(), list[float]()

    def again(delay_s: float) -> None:
        seen.append(delay_s)
        clock.after(delay_s, None, again, delay_s)

    clock.soon(None, again, 0.0)
    assert not clock.run(until=lambda: False, limit_s=5.0) and clock.now == 0.0
    assert len(seen) == MOST_AT_ONCE


def test_a_stopped_process_does_afterwards_what_came_due_and_a_dead_one_nothing() -> None:
    clock, seen = Clock(), list[str]()
    stopped, dead = Process(clock, "stopped"), Process(clock, "dead")
    stopped.stop()
    dead.kill()
    clock.after(1.0, stopped, seen.append, "one")
    clock.after(2.0, stopped, seen.append, "two")
    clock.after(1.0, dead, seen.append, "never")
    clock.after(3.0, None, lambda _: stopped.go_on())
    clock.run(until=lambda: False, limit_s=9.0)
    assert seen == ["one", "two"]


def test_waiting_ends_with_the_event_or_in_time() -> None:
    clock = Clock()
    process, seen = Process(clock, "p"), list[tuple[bool, float]]()
    event = process.future()

    async def wait() -> None:
        for _ in range(2):
            seen.append((await process.within(event, 1.0), clock.now))

    process.spawn(wait())
    clock.after(1.5, None, event.resolve)
    clock.run(until=lambda: False, limit_s=9.0)
    assert seen == [(False, 1.0), (True, 1.5)]


def test_a_cancelled_coroutine_ends_where_it_waits() -> None:
    clock = Clock()
    process, seen = Process(clock, "p"), list[str]()

    async def work() -> None:
        try:
            await process.sleep(1.0)
            seen.append("slept")
        finally:
            seen.append("ended")

    task = process.spawn(work())
    task.cancel()
    clock.run(until=lambda: False, limit_s=9.0)
    assert seen == ["ended"] and task.done


def test_an_answer_comes_back() -> None:
    pair = Pair()
    seen = pair.call(4)
    pair.run(1.0)
    assert seen[0] == 8 and 0.01 <= seen[1] <= 0.1


def test_a_refusal_is_an_answer() -> None:
    def refuse(caller: str, question: int) -> None:
        raise Busy(f"{caller} again")

    pair = Pair(handler=refuse)
    seen = pair.call()
    pair.run(1.0)
    assert isinstance(seen[0], Busy) and seen[0].text == "a again"


def test_what_is_lost_is_noticed_by_silence() -> None:
    pair = Pair(Lines(lost=1.0))
    seen = pair.call()
    pair.run(9.0)
    assert isinstance(seen[0], PeerSilent) and 1.0 <= seen[1] <= SILENCE_S and not pair.asked


def test_what_is_doubled_is_asked_twice_and_answered_once() -> None:
    pair = Pair(Lines(doubled=1.0))
    seen = pair.call()
    pair.run(9.0)
    assert pair.asked == [4, 4] and seen[0] == 8 and len(seen) == 2


def test_late_messages_overtake_one_another() -> None:
    pair = Pair(Lines(late=0.5))
    for question in range(20):
        pair.call(question)
    pair.run(9.0)
    assert sorted(pair.asked) == list(range(20)) != pair.asked


@pytest.mark.parametrize("quietly", [False, True])
def test_a_call_to_who_dies_fails_at_once_or_by_silence(quietly: bool) -> None:
    pair = Pair(handler=lambda caller, question: pair.b.sleep(100.0))
    gone: list[str] = []
    pair.a.on_gone = gone.append
    seen = pair.call()
    pair.clock.after(1.0, None, lambda _: pair.network.kill("b", quietly=quietly))
    pair.run(9.0)
    assert isinstance(seen[0], PeerSilent if quietly else PeerGone)
    assert seen[1] == pytest.approx(1.0 + SILENCE_S) if quietly else seen[1] < 1.2
    assert gone == ([] if quietly else ["b"])
    assert isinstance(after := pair.call(), list)
    pair.run(20.0)
    assert isinstance(after[0], PeerFault)


def test_a_call_to_who_is_stopped_fails_by_silence_and_is_done_all_the_same() -> None:
    pair = Pair()
    pair.network.stop("b")
    seen = pair.call()
    pair.clock.after(5.0, None, lambda _: pair.b.go_on())
    pair.run(9.0)
    assert isinstance(seen[0], PeerSilent) and seen[1] == pytest.approx(SILENCE_S)
    assert pair.asked == [4]


def test_a_short_stop_is_only_slow() -> None:
    pair = Pair()
    pair.network.stop("b")
    seen = pair.call()
    pair.clock.after(2.0, None, lambda _: pair.b.go_on())
    pair.run(9.0)
    assert seen[0] == 8 and 2.0 < seen[1] < 2.2


def test_nothing_crosses_a_cut_until_it_is_healed() -> None:
    pair = Pair()
    pair.network.cut(["b"])
    seen = pair.call()
    pair.run(4.0)
    assert isinstance(seen[0], PeerSilent) and not pair.asked
    pair.network.heal()
    again = pair.call()
    pair.run(9.0)
    assert again[0] == 8


def test_a_deadline_ends_a_call() -> None:
    pair = Pair(handler=lambda caller, question: pair.b.sleep(100.0))
    seen = pair.call(deadline_s=2.0)
    pair.run(9.0)
    assert isinstance(seen[0], PeerSilent) and seen[1] == pytest.approx(2.0)


def test_who_replaces_another_has_its_address_and_what_is_on_its_way() -> None:
    pair = Pair()
    pair.handler = lambda caller, question: pair.b.future()  # never answered
    seen = pair.call()
    pair.run(0.1)
    on_its_way = pair.call(5)
    after = Node(pair.clock, "b")
    after.handlers["double"] = lambda caller, question: 2 * question
    pair.network.replace(after)
    pair.run(1.0)
    assert isinstance(seen[0], Leaving) and on_its_way[0] == 10 and pair.asked == [4]


def test_the_dice_are_the_same_everywhere() -> None:
    """Against the reference implementation's first numbers, from its own state."""
    dice = Dice(0)
    dice._state = 1234567
    drawn = [int(dice.number() * 2**53) for _ in range(3)]
    assert drawn == [n >> 11 for n in (6457827717110365317, 3203168211198807973, 9817491932198370423)]

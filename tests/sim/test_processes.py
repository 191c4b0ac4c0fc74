"""Processes in virtual time, and what a caller sees of a bad line: the same as with real ones."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from peers.ports import Answer, Request
from peers.sim.dice import Dice
from peers.sim.directory import LAG_S, LIFE_S, Dht, SimDirectory
from peers.sim.lines import Lines
from peers.sim.loop import MAX_AT_ONCE, Process, VirtualLoop, run_virtual
from peers.sim.network import SILENCE_S, Network
from peers.status_query import ask_all
from peers.waiting import TaskKeeper
from swarm.errors import Busy, PeerFault, PeerGone, PeerSilent, SwarmError
from swarm.records import PeerRecord
from swarm.wire.messages import Ack


class Pair:
    """a calls b; b counts what it was asked."""

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.network = Network(self.loop, Dice(3), Lines())
        self.a, self.b = (self.network.add(Process(name)) for name in "ab")
        self.asked: list[bytes] = []
        self.refusal: SwarmError | None = None
        self.takes_s = 0.0
        self.b.serve("echo", self._echo, max_body_bytes=100)

    async def _echo(self, request: Request) -> Answer:
        self.asked.append(request.header)
        body = await request.accept()
        await asyncio.sleep(self.takes_s)
        if self.refusal is not None:
            raise self.refusal
        return Answer(request.header, body)

    def call(self, *, deadline_s: float | None = None) -> list[object]:
        """What comes of it: [answer or error, when]."""
        seen: list[object] = []

        async def ask() -> None:
            try:
                answer = await self.a.call(
                    "b", "echo", b"hello", [b"body"], max_answer_bytes=100, deadline_s=deadline_s
                )
                seen.append((answer.header, bytes(answer.body[0])))
            except SwarmError as error:
                seen.append(error)
            seen.append(self.loop.now_s)

        self.a.process.spawn(self.loop, ask())
        return seen

    def run(self, seconds: float) -> None:
        self.loop.run(lambda: False, limit_s=self.loop.now_s + seconds)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    with pair.loop.running():
        yield pair


def test_an_answer_comes_back_with_its_body(pair: Pair) -> None:
    seen = pair.call()
    pair.run(1.0)
    assert seen[0] == (b"hello", b"body") and not pair.loop.bugs


def test_a_refusal_is_an_answer(pair: Pair) -> None:
    pair.refusal = Busy("full")
    seen = pair.call()
    pair.run(1.0)
    assert isinstance(seen[0], Busy)


def test_what_is_lost_is_noticed_by_silence(pair: Pair) -> None:
    pair.network.lines = Lines(lost=1.0)
    seen = pair.call()
    pair.run(10.0)
    assert isinstance(seen[0], PeerSilent) and pair.asked == []


def test_what_is_doubled_is_done_twice_and_answered_once(pair: Pair) -> None:
    pair.network.lines = Lines(doubled=1.0)
    seen = pair.call()
    pair.run(10.0)
    assert pair.asked == [b"hello", b"hello"] and len(seen) == 2


@pytest.mark.parametrize("quietly", [False, True])
def test_a_call_to_a_process_that_dies_fails_at_once_or_by_silence(pair: Pair, quietly: bool) -> None:
    pair.takes_s = 5.0
    seen = pair.call()
    pair.run(1.0)
    pair.network.kill("b", quietly=quietly)
    pair.run(10.0)
    error, at_s = seen
    assert isinstance(error, PeerSilent if quietly else PeerGone)
    assert isinstance(at_s, float) and (at_s > SILENCE_S) == quietly


def test_a_process_that_is_stopped_falls_silent_and_does_the_work_all_the_same(pair: Pair) -> None:
    pair.network.stop("b")
    seen = pair.call()
    pair.run(10.0)
    assert isinstance(seen[0], PeerSilent) and pair.asked == []
    pair.network.go_on("b")
    pair.run(1.0)
    assert pair.asked == [b"hello"]


def test_a_short_stop_is_only_slow(pair: Pair) -> None:
    pair.network.stop("b")
    seen = pair.call()
    pair.run(2.0)
    pair.network.go_on("b")
    pair.run(1.0)
    assert seen[0] == (b"hello", b"body")


@pytest.mark.parametrize(("side", "one_way"), [("a", False), ("b", False), ("a", True), ("b", True)])
def test_nothing_crosses_a_cut_until_it_is_healed(pair: Pair, side: str, one_way: bool) -> None:
    number = pair.network.cut({side}, one_way=one_way)
    seen = pair.call()
    pair.run(20.0)
    assert isinstance(seen[0], PeerFault)
    # What reaches b is done there even if its answer is lost; its body has to come through as well.
    assert pair.asked == ([b"hello"] if one_way and side == "b" else [])
    pair.network.heal(number)
    again = pair.call()
    pair.run(1.0)
    assert again[0] == (b"hello", b"body")


def test_a_deadline_ends_a_call(pair: Pair) -> None:
    pair.takes_s = 60.0
    seen = pair.call(deadline_s=2.0)
    pair.run(10.0)
    assert isinstance(seen[0], PeerSilent) and seen[1] == pytest.approx(2.0)


def test_a_dead_process_runs_no_finally(pair: Pair) -> None:
    ran: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(1.0)
        finally:
            ran.append("finally")

    pair.a.process.spawn(pair.loop, work())
    pair.run(0.5)
    pair.network.kill("a", quietly=False)
    pair.run(5.0)
    assert ran == []


def test_a_callback_that_fails_is_a_bug_that_is_told(pair: Pair) -> None:
    pair.loop.call_soon(lambda: 1 / 0)
    pair.run(0.1)
    assert pair.loop.bugs == ["a callback failed: ZeroDivisionError: division by zero"]


def test_two_pictures_of_the_directory_differ_for_a_while(pair: Pair) -> None:
    dht = Dht(pair.loop, Dice(5))
    mine, theirs = SimDirectory(dht, pair.a.process), SimDirectory(dht, pair.b.process)
    record = PeerRecord(peer="a", run="r", stage=0, state="serving", version=0)
    pair.a.process.spawn(pair.loop, mine.announce(record))
    pair.loop.run(lambda: bool(mine.peers()), limit_s=1.0)
    assert mine.at(0) == [record] and theirs.at(0) == []
    pair.run(LAG_S[1] + 0.1)
    pair.loop.now_s = LAG_S[1] + 1.0
    assert theirs.find("a") == record and theirs.at(0) is theirs.at(0)
    pair.loop.now_s = LIFE_S + 1.0
    assert theirs.peers() == [] and mine.peers() == []


def test_a_peer_that_is_cut_off_the_directory_neither_tells_nor_learns(pair: Pair) -> None:
    dht = Dht(pair.loop, Dice(5))
    mine, theirs = SimDirectory(dht, pair.a.process), SimDirectory(dht, pair.b.process)
    record = PeerRecord(peer="a", run="r", stage=0, state="serving", version=0)
    dht.cut_off.add("a")
    pair.a.process.spawn(pair.loop, mine.announce(record))
    pair.run(1.0)
    assert dht.entries == {} and theirs.peers() == []


def test_callbacks_that_never_end_at_one_instant_are_ended() -> None:
    loop = VirtualLoop()

    def again() -> None:
        loop.call_soon(again)

    with loop.running():
        loop.call_later(1.0, again)
        assert not loop.run(lambda: False, limit_s=5.0)
    assert loop.bugs == ["time stands still at 1.000 s"] and loop.callbacks == MAX_AT_ONCE + 1


def test_what_a_world_leaves_that_is_broken_off_ends_with_it() -> None:
    """A test was broken off by its time limit, and the next one failed for what it had left."""
    told: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(10.0)
        finally:
            await asyncio.sleep(0)  # needs a loop
            told.append("went on")

    def break_off() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with VirtualLoop().running() as loop:
            process = Process("a")
            process.start(loop, work())
            loop.call_later(1.0, break_off)
            loop.run(lambda: False, limit_s=5.0)
    assert not process.tasks and not process.alive
    gc.collect()  # pytest makes an error of what Python can only print
    assert not told


def test_a_bug_in_a_background_task_is_told(pair: Pair) -> None:
    """It was only logged: thousands of schedules held while peers called themselves."""
    tasks = TaskKeeper()

    async def begin() -> None:
        tasks.create_task(pair.a.call("a", "echo", b""))

    pair.a.process.spawn(pair.loop, begin())
    pair.run(1.0)
    assert pair.loop.bugs == ["bug in a task: AssertionError: p2pd dials no peer from itself"]


def test_background_tasks_are_closed_of_which_one_ended_at_that_instant() -> None:
    """It waited for no task, and so nobody could forget that one: it would look again for ever."""

    async def close() -> int:
        tasks, told = TaskKeeper(), asyncio.get_running_loop().create_future()

        async def tell() -> None:
            told.set_result(None)

        tasks.create_task(tell())
        await told
        assert len(tasks) == 1
        await tasks.close()
        return len(tasks)

    assert run_virtual(close()) == 0


def test_a_peer_that_asks_several_does_not_call_itself(pair: Pair) -> None:
    told: dict[str, Ack] = {}

    async def ask() -> None:
        told.update(await ask_all(pair.a, ["a", "b"], "echo", Ack(), Ack, deadline_s=1.0))

    pair.a.process.spawn(pair.loop, ask())
    pair.run(1.0)
    assert [*told] == ["b"] and not pair.loop.bugs

"""Virtual time: a heap of events, processes that can be killed or stopped, and coroutines that wait.

    clock = Clock()
    peer = Process(clock, "a")
    peer.spawn(work(peer))          # async def work(peer): await peer.sleep(1.0); ...
    clock.run(until=lambda: done, limit_s=60.0)

Coroutines are Python's own, driven from here instead of by asyncio: loops look like those of `peers`, one
after the other, and a run is a function of its inputs. Events of one time come in the order in which they
were made.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from swarm.errors import SwarmError

T = TypeVar("T")


class Cancelled(BaseException):
    """Thrown into a coroutine that is to end. Not an Exception: nobody catches it by accident."""


MOST_AT_ONCE = 50_000
"""Events at one instant. A whole schedule has a thousand; more is something that calls itself for ever."""


class Clock:
    """What happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Done so far."""
        self._heap: list[tuple[float, int, Process | None, Callable[[Any], None], Any]] = []
        self._ready: deque[tuple[Process | None, Callable[[Any], None], Any]] = deque()
        self._made = 0

    def after(
        self, delay_s: float, process: Process | None, what: Callable[[Any], None], argument: Any = None
    ) -> None:
        """Call `what(argument)` then, if `process` lives; if it is stopped, when it goes on."""
        self._made += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._made, process, what, argument))

    def soon(self, process: Process | None, what: Callable[[Any], None], argument: Any = None) -> None:
        """Call `what(argument)` next, at this time."""
        self._ready.append((process, what, argument))

    def run(self, *, until: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until `until()` holds; False if not before `limit_s`, or time stands still."""
        heap, ready = self._heap, self._ready
        began = self.events
        while self.events - began < MOST_AT_ONCE:
            if ready:
                process, what, argument = ready.popleft()
            else:
                if until():
                    return True
                if not heap or heap[0][0] > limit_s:
                    return False
                at, _, process, what, argument = heapq.heappop(heap)
                if at > self.now:
                    self.now, began = at, self.events
            if process is not None:
                if not process.alive:
                    continue
                if process.stopped:
                    process.backlog.append((what, argument))
                    continue
            self.events += 1
            what(argument)
        return False


class Process:
    """Something that can die, or be stopped and go on: then its timers and messages have queued up."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.clock, self.name = clock, name
        self.alive = True
        self.stopped = False
        self.backlog: deque[tuple[Callable[[Any], None], Any]] = deque()

    def kill(self) -> None:
        """Nothing of it happens any more."""
        self.alive = False
        self.backlog.clear()

    def stop(self) -> None:
        """As SIGSTOP."""
        self.stopped = True

    def go_on(self) -> None:
        """As SIGCONT: what came meanwhile happens now, in its order."""
        self.stopped = False
        while self.backlog:
            self.clock.soon(self, *self.backlog.popleft())

    def spawn(self, work: Coroutine[Any, None, T]) -> Task[T]:
        """Run a coroutine of this process."""
        return Task(self, work)

    def sleep(self, seconds: float) -> Future[None]:
        """Await it: done after so long."""
        done: Future[None] = Future(self.clock, self)
        self.clock.after(seconds, self, done.resolve, None)
        return done

    def future(self) -> Future[Any]:
        """Something that a coroutine of this process waits for."""
        return Future(self.clock, self)

    def within(self, future: Future[Any], seconds: float) -> Future[bool]:
        """Await it: whether `future` was done before so long."""
        either: Future[bool] = Future(self.clock, self)
        if future.done:
            either.resolve(True)
            return either
        future.then(either.resolve_true)
        self.clock.after(max(0.0, seconds), self, either.resolve, False)
        return either


class Future(Generic[T]):
    """A value or an error that comes once; later ones are ignored."""

    __slots__ = ("_clock", "_process", "_then", "abandoned", "done", "error", "value")

    def __init__(self, clock: Clock, process: Process | None) -> None:
        self._clock, self._process = clock, process
        self.done = False
        self.abandoned = False
        """The coroutine that waited for it was cancelled."""
        self.value: T | None = None
        self.error: Exception | None = None
        self._then: list[Callable[[Any], None]] | None = None

    def resolve(self, value: T) -> None:
        if not self.done:
            self.done, self.value = True, value
            if self._then is not None:
                self._tell()

    def resolve_true(self, _: object) -> None:
        self.resolve(True)  # type: ignore[arg-type]

    def fail(self, error: Exception) -> None:
        if not self.done:
            self.done, self.error = True, error
            if self._then is not None:
                self._tell()

    def then(self, what: Callable[[Any], None]) -> None:
        """Call `what(self)` once it is done."""
        if self.done:
            self._clock.soon(self._process, what, self)
        elif self._then is None:
            self._then = [what]
        else:
            self._then.append(what)

    def _tell(self) -> None:
        assert self._then is not None
        for what in self._then:
            self._clock.soon(self._process, what, self)
        self._then = None

    def __await__(self) -> Generator[Future[T], None, T]:
        if not self.done:
            yield self
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


class Task(Future[T]):
    """A running coroutine; as a future, its result. Any error but a SwarmError ends the simulation."""

    __slots__ = ("_coroutine", "_owner", "_waits_for", "cancelled")

    def __init__(self, process: Process, coroutine: Coroutine[Any, None, T]) -> None:
        super().__init__(process.clock, process)
        self._owner, self._coroutine = process, coroutine
        self._waits_for: Future[Any] | None = None
        self.cancelled = False
        self._go(None)

    def cancel(self) -> None:
        """Throw `Cancelled` into it, next."""
        if not self.done and not self.cancelled:
            self.cancelled = True
            if self._waits_for is not None:
                self._waits_for.abandoned = True
            self._clock.soon(self._owner, self._go, None)

    def _woken(self, future: Future[Any]) -> None:
        if future is self._waits_for:
            self._go(None)

    def _go(self, _: None) -> None:
        if self.done:
            return
        self._waits_for = None
        try:
            if self.cancelled:
                future = self._coroutine.throw(Cancelled())
            else:
                future = self._coroutine.send(None)
        except StopIteration as end:
            self.resolve(end.value)
        except Cancelled:
            self.resolve(None)  # type: ignore[arg-type]
        except SwarmError as error:
            self.fail(error)
        else:
            self._waits_for = future
            future.then(self._woken)

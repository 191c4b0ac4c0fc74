"""Bodies on their way to this peer, where a slow one has its place while no other needs it, and from it."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from peers.clock import now_s
from peers.ports import Buffer, Request
from peers.waiting import let_go
from swarm.errors import Busy, NotReady
from swarm.ids import PeerId
from swarm.policy.timeouts import GRACE_S, most_s

BEFORE_S = GRACE_S / 2
"""Sooner than a caller that waits for the same microbatch would give this peer up for it."""
TIMES, AHEAD_S = 4.0, 20.0
"""Others have their turn for so many times as long as a caller had a place; so much of that it may owe: what
looks strange comes many at a time."""


class Incoming:
    """The bodies that are being received, and whether others wait for their places."""

    def __init__(self) -> None:
        self._bytes: Counter[PeerId] = Counter()
        """Announced, by sender: its bodies come one after another."""
        self._wanted = asyncio.Event()

    def others_wait(self) -> None:
        """A caller waits for a place, or for a microbatch whose body is on its way."""
        self._wanted.set()
        self._wanted = asyncio.Event()

    async def receive(self, request: Request, late: Callable[[], None] = lambda: None) -> Sequence[Buffer]:
        """The body of a request; `late` is called if it is slower than `swarm.policy.timeouts` asks for.

        Raises:
            NotReady: it is late, and others wait.
        """
        size = sum(request.body_sizes)
        self._bytes[request.peer] += size
        body, wanted = asyncio.ensure_future(request.accept()), self._wanted
        waiting = asyncio.ensure_future(wanted.wait())
        try:
            here, _ = await asyncio.wait({body}, timeout=most_s(self._bytes[request.peer]) - BEFORE_S)
            if not here:
                late()
            await asyncio.wait({body, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not body.done():
                raise NotReady("the body came too slowly, and others wait for its place", version=-1)
            return body.result()
        finally:
            self._bytes[request.peer] -= size
            self._bytes += Counter()  # forget peers that have none
            let_go(waiting, body)


class Places(Incoming):
    """Places for what callers have this peer compute. One that had some for long has none for a while."""

    def __init__(self, most: int, *, each: int, times: float = TIMES) -> None:
        """`times`: for how many times as long as it had one; 0: for none."""
        super().__init__()
        self._most, self._each, self._times = most, each, times
        self._taken = Counter[PeerId]()
        self._paid: dict[PeerId, float] = {}
        """Until when what each caller had is paid for by time."""

    @contextmanager
    def one_for(self, caller: PeerId) -> Iterator[None]:
        """Raises Busy: there is none, or not for this caller."""
        began = now_s()
        self._paid = {peer: until for peer, until in self._paid.items() if until > began}
        owed_s = self._paid.get(caller, began) - began
        if self._taken[caller] >= self._each or owed_s > AHEAD_S:
            raise Busy("this peer has computed enough for its caller")
        # Several that take turns would have all places for ever: one with debts leaves the last to others.
        if self._taken.total() >= self._most - (owed_s > AHEAD_S / 2):
            self.others_wait()
            raise Busy("this peer computes as much for others as it can")
        self._taken[caller] += 1
        try:
            yield
        finally:
            self._taken -= Counter([caller])
            self._paid[caller] = self._paid.get(caller, began) + self._times * (now_s() - began)


class Given:
    """Memory of answers that their callers have not read: so much for each caller, and for all."""

    def __init__(self, each: int, of_all: float = math.inf) -> None:
        self._each, self._of_all = each, of_all
        self._held: list[tuple[PeerId, weakref.ref[np.ndarray]]] = []

    def hold(self, caller: PeerId, array: np.ndarray) -> None:
        """Count it until it was sent, or is given up. Raises Busy: too much is held."""
        self._held = [(by, of) for by, of in self._held if of() is not None]
        if sum(by == caller for by, _ in self._held) >= self._each or len(self._held) >= self._of_all:
            raise Busy("others, or you, have not read what they were given", retry_after_s=1.0)
        self._held.append((caller, weakref.ref(array)))

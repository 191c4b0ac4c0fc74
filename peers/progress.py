"""How far a long piece of work on this machine is, on standard error."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

REDRAW_S = 0.1
LINE_S = 10.0
"""Where the output is no terminal: a line so often."""
WIDTH = 20


class Bar:
    """A bar in a terminal, a line now and then elsewhere. Call it with what was done since the last time."""

    def __init__(
        self, what: str, total: int, *, unit: str = "bytes", stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._what, self._total, self._unit = what, max(1, total), unit
        self._stream = stream if stream is not None else sys.stderr
        self._live = self._stream.isatty()
        self._done = 0
        self._clock = clock
        self._next = clock() + (0 if self._live else LINE_S)

    def __call__(self, size: int) -> None:
        self._done = min(self._total, self._done + size)
        now = self._clock()
        if now >= self._next:
            self._next = now + (REDRAW_S if self._live else LINE_S)
            self._write(("\r" if self._live else "") + self.words() + ("" if self._live else "\n"))

    def reach(self, done: float) -> None:
        """Say what was done in all; parts of one count once it is whole."""
        if (more := int(done) - self._done) > 0:
            self(more)

    def words(self) -> str:
        """`exporting [####................] 20.0 of 100.0 MB`"""
        filled = WIDTH * self._done // self._total
        bar = "#" * filled + "." * (WIDTH - filled)
        if self._unit == "bytes":
            return f"{self._what} [{bar}] {self._done / 1e6:.1f} of {self._total / 1e6:.1f} MB"
        return f"{self._what} [{bar}] {self._done} of {self._total} {self._unit}"

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._write("\r\x1b[K")  # the line is the next one's

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


@contextmanager
def spending(
    what: str, budget_s: float, *, stream: TextIO | None = None,
    spent: Callable[[], float] = time.process_time,
) -> Iterator[Callable[[], float]]:  # fmt: skip
    """A bar over CPU seconds. Each call of what it gives moves it, and says how many were spent since."""
    began_s = spent()
    with Bar(what, math.ceil(budget_s), unit="CPU seconds", stream=stream) as bar:

        def spent_s() -> float:
            so_far_s = spent() - began_s
            bar.reach(so_far_s)
            return so_far_s

        yield spent_s

"""The live display of the demo: events in, lines and a few figures out."""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from peers.events import Downloading, Event, Level, StateFetched, StepDone, to_text
from swarm.errors import printable
from swarm.ids import Stage

LOSSES_KEPT = 10_000
BARS = "▁▂▃▄▅▆▇█"
STYLE: dict[Level, str] = {"info": "", "warning": "yellow", "error": "bold red"}


def bar(done: int, steps: int, words: str, room: int) -> RenderableType:
    """A bar, and words beside it, in `room` columns."""
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=steps or 1, completed=done, width=max(4, room - len(words) - 2)), words)
    return row


def curve(losses: Sequence[float], room: int, most: int = 1000) -> str:
    """The first and the last loss, and a line of at most `most` columns, in `room` columns."""
    if not losses:
        return "–"
    words = f"{losses[0]:.3f} → {losses[-1]:.3f}"
    return f"{words}  {sparkline(losses, min(most, room - len(words) - 2))}"


def _peers(peers: Sequence[int]) -> Text:
    if not peers:
        return Text("–")
    words = Text()
    for stage, n in enumerate(peers):
        words.append("   " if stage else "")
        words.append(f"stage {stage}: ", style="dim")
        words.append(f"{n}" if n else "none", style="" if n else "bold red")
    return words


def clock(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars from the smallest to the largest, averaged into at most `width` columns."""
    if not values or width <= 0:
        return ""
    columns = min(width, len(values))
    cuts = [i * len(values) // columns for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    if high <= low:
        return BARS[0] * columns
    return "".join(BARS[min(7, int((value - low) / (high - low) * 8))] for value in means)


class OnTerminal:
    """What is drawn in place on a terminal, and says lines anywhere else. Use with `with`."""

    def __init__(self, stream: TextIO | None, live: bool | None, **drawing: Any) -> None:
        """`live` None: it is if `stream` (stdout by default) is a terminal; `drawing`: for rich's `Live`."""
        self._stream = stream if stream is not None else sys.stdout
        self._console = Console(file=self._stream, highlight=False)
        live = self._console.is_terminal and not self._console.is_dumb_terminal if live is None else live
        self._live = Live(console=self._console, **drawing) if live else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class Display(OnTerminal):
    """Shows events while a `with` block runs; `display(event)` from the thread of the block.

    A line for each event. On a terminal the figures stay below them; elsewhere steps are lines, too, about
    `LINES` in all.
    """

    LINES = 40

    def __init__(self, title: str, *, stream: TextIO | None = None, live: bool | None = None) -> None:
        self._title = title
        self.done = self.steps = 0
        """Steps, and those of the whole run; 0 = not known yet."""
        self.losses: deque[float] = deque(maxlen=LOSSES_KEPT)
        """Mean loss of each step that was seen, oldest first."""
        self._tokens_per_s = 0.0
        self._peers: tuple[int, ...] = ()
        self._started_at: float | None = None
        self._downloads: dict[Stage, Downloading] = {}
        """Those that go on: each is a line that grows, not one each two seconds."""
        super().__init__(stream, live, get_renderable=self._figures, refresh_per_second=4)

    def _figures(self) -> RenderableType:
        return self.figures(now=time.time(), width=self._console.width)

    def figures(self, *, now: float, width: int) -> RenderableType:
        """What stays on the screen. `now` in Unix seconds, `width` in columns."""
        elapsed_s = 0.0 if self._started_at is None else max(0.0, now - self._started_at)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(justify="right", style="dim", min_width=7)
        grid.add_column(overflow="ellipsis", no_wrap=True)
        words = f"{self.done}/{self.steps or '?'}  {clock(elapsed_s)}"
        grid.add_row("step", bar(self.done, self.steps, words, width - 13))
        grid.add_row("loss", curve(list(self.losses), width - 13, 40))
        grid.add_row("speed", f"{self._tokens_per_s:,.0f} tokens/s" if self._tokens_per_s else "–")
        grid.add_row("peers", _peers(self._peers))
        for download in list(self._downloads.values()):
            grid.add_row("", Text(printable(download.words())))
        return Group(Text(self._title, style="bold", no_wrap=True, overflow="ellipsis"), grid)

    def __enter__(self) -> Self:
        if self._live is None:
            self._print(self._title)
        return super().__enter__()

    def __call__(self, event: Event) -> None:
        """Take note of an event and show it."""
        self._started_at = event.at if self._started_at is None else self._started_at
        if isinstance(event, StepDone):
            before, self.done, self.steps = self.done, max(self.done, event.t + 1), event.steps
            self.losses.extend([] if event.loss is None else [event.loss])
            self._tokens_per_s, self._peers = event.tokens_per_s, event.peers or self._peers
            every = max(1, event.steps // self.LINES)
            shown = self.done // every != before // every or self.done == event.steps
            if self._live is not None or not shown:
                return
        if isinstance(event, Downloading | StateFetched):
            self._downloads.pop(event.stage, None)
        if self._live is None:
            self._print(to_text(event))
        elif isinstance(event, Downloading) and event.done_bytes < event.total_bytes:
            self._downloads[event.stage] = event
        else:
            self._console.print(Text(to_text(event), style=STYLE[event.level]))

"""The live display of the demo and of a trainer: events in, a screen out.

`Progress` is what is known, `observe` adds an event to it, `render` draws it: both pure, so that the screen
has golden tests. `Display` owns the terminal: a live screen on a terminal, plain lines anywhere else.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from peers.events import Downloading, Event, Level, Note, StateFetched, StepDone, to_text
from swarm.errors import printable

LAST_EVENTS = 8
"""Lines of events on the screen; with the figures above them the display fits 24 lines."""

LOSSES_KEPT = 10_000
BARS = "▁▂▃▄▅▆▇█"
STYLE: dict[Level, str] = {"info": "", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """All that the screen shows."""

    title: str = ""
    steps: int = 0
    """Of the whole run; 0 = not known yet."""
    done: int = 0
    losses: tuple[float, ...] = ()
    """Mean loss of each step that was seen, oldest first."""
    tokens_per_s: float = 0.0
    peers: tuple[int, ...] = ()
    """Peers that serve each stage."""
    started_at: float | None = None
    """Unix seconds; None = nothing happened yet."""
    last: tuple[Event, ...] = ()
    """The newest events that are worth a line."""


def observe(progress: Progress, event: Event) -> Progress:
    """What is known after `event`."""
    if progress.started_at is None:
        progress = replace(progress, started_at=event.at)
    if isinstance(event, StepDone):
        losses = progress.losses if event.loss is None else (*progress.losses, event.loss)
        return replace(
            progress,
            steps=event.steps,
            done=max(progress.done, event.t + 1),
            losses=losses[-LOSSES_KEPT:],
            tokens_per_s=event.tokens_per_s,
            peers=event.peers or progress.peers,
        )
    # A download is one line, which grows: not one each two seconds.
    last = [line for line in progress.last if not (isinstance(line, Downloading) and _ends(event, line))]
    return replace(progress, last=(*last, event)[-LAST_EVENTS:])


def _ends(event: Event, shown: Downloading) -> bool:
    """Whether `event` tells more of the download that `shown` tells of."""
    return isinstance(event, (Downloading, StateFetched)) and event.stage == shown.stage


def render(progress: Progress, *, now: float, width: int = 80) -> RenderableType:
    """The screen. `now` in Unix seconds, `width` in columns."""
    elapsed = 0.0 if progress.started_at is None else max(0.0, now - progress.started_at)
    figures = Table.grid(padding=(0, 2))
    figures.add_column(justify="right", style="dim", min_width=7)
    figures.add_column(overflow="ellipsis", no_wrap=True)
    figures.add_row("step", _steps(progress, elapsed, width - 13))
    figures.add_row("loss", _loss(progress.losses, width - 13))
    figures.add_row("speed", f"{progress.tokens_per_s:,.0f} tokens/s" if progress.tokens_per_s else "–")
    figures.add_row("peers", _peers(progress.peers))
    lines = [_line(event, width) for event in progress.last]
    return Group(
        Text(progress.title, style="bold", no_wrap=True, overflow="ellipsis"), figures, Text(), *lines
    )


def _steps(progress: Progress, elapsed: float, room: int) -> RenderableType:
    total = str(progress.steps) if progress.steps else "?"
    words = f"{progress.done}/{total}  {clock(elapsed)}"
    row = Table.grid(padding=(0, 2))
    row.add_row(
        ProgressBar(total=progress.steps or 1, completed=progress.done, width=max(4, room - len(words) - 2)),
        words,
    )
    return row


def _loss(losses: Sequence[float], room: int) -> str:
    if not losses:
        return "–"
    words = f"{losses[0]:.3f} → {losses[-1]:.3f}"
    return f"{words}  {sparkline(losses, max(0, min(40, room - len(words) - 2)))}"


def _peers(peers: Sequence[int]) -> Text:
    if not peers:
        return Text("–")
    words = Text()
    for stage, n in enumerate(peers):
        words.append("   " if stage else "")
        words.append(f"stage {stage}: ", style="dim")
        words.append(f"{n}" if n else "none", style="" if n else "bold red")
    return words


def _line(event: Event, width: int) -> Text:
    stamp = time.strftime("%H:%M:%S", time.localtime(event.at))
    words = printable(" ".join(event.words().split()))
    text = Text(f"  {stamp}  {words}", style=STYLE[event.level], no_wrap=True, overflow="ellipsis")
    text.truncate(width, overflow="ellipsis")
    return text


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


class Display:
    """Shows events while a `with` block runs; `display(event)` from the thread of the block.

    On a terminal: a live screen. Elsewhere: a line per event, and of the steps about `LINES` lines in all.
    """

    LINES = 40

    def __init__(self, title: str, *, stream: TextIO | None = None, live: bool | None = None) -> None:
        """`live` None: a screen if `stream` (stdout by default) is a terminal."""
        self._stream = stream if stream is not None else sys.stdout
        self._console = Console(file=self._stream, highlight=False)
        self.progress = Progress(title=title)
        live = self._console.is_terminal and not self._console.is_dumb_terminal if live is None else live
        self._live = (
            Live(console=self._console, get_renderable=self._render, refresh_per_second=4, transient=False)
            if live
            else None
        )

    def _render(self) -> RenderableType:
        return render(self.progress, now=time.time(), width=self._console.width)

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        else:
            self._print(self.progress.title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take note of an event and show it."""
        before = self.progress.done
        self.progress = observe(self.progress, event)
        if self._live is not None:
            return  # its own thread draws
        if isinstance(event, StepDone):
            every = max(1, event.steps // self.LINES)
            if self.progress.done // every == before // every and self.progress.done != event.steps:
                return
        self._print(to_text(event))

    def note(self, text: str) -> None:
        """Shorthand for a line of text."""
        self(Note(text=text))

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)
